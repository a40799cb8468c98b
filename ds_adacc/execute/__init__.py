"""Run the calls of a block by its policy: retain, compress, offload or rebuild each tensor that autograd saves.

In come a recorded block, the policy that the planner chose for it, and then call after call. Out goes the block's
output, as plain autograd gives it. What autograd keeps for backward is a slot for each saved tensor; a slot unpacks to
the tensor when backward asks for it.

The files, in the order in which a tensor meets them:

* `block_registry`: finds the block that a callable is.
* `incoming`: a call that has come in, before it runs.
* `block`: what is known of a block; `variant`: of its calls under one signature and guards, and their policy.
* `course`: how calls run under a policy: what the pack hook does at each position, what backward replays.
* `bound_policy`: ties that to a block, with the block's own codecs, parameters and replays; `bound_segment`: what one
  replay runs.
* `input_placement`: DeepSpeed's options for block inputs: a share on each tensor-parallel rank, or host memory.
* `copied_for_backward`: of which tensors backward gets a copy, because it may write to what it has saved.
* `call`: the state of one call. Its pack hook puts each saved tensor into a holder.
* `alive_calls`: how many calls of each block type autograd holds at once.
* `holders/`: what stands for a value until backward, one file for each choice.
* `host_offload`: the copies to host memory and back, and when they start; `pinned_pool`: the host memory they use.

Rules of this room, cited by their letter and number where they are obeyed:

E1. One forward.
    The forward runs once. Backward replays operators, never modules, so module hooks fire once and no random number is
    drawn twice. Only a block that is one operator runs again as a whole (Rule E17).
E2. No cost for each operator.
    Nothing is run for each operator: there is no dispatch mode, only the two hooks of `saved_tensors_hooks`, but for
    calls that are followed (`record/follower.py`). A policy that retains everything installs not even these.
E3. Positions.
    A saved tensor is known by its position: autograd packs in the same order at every call. Size, stride and dtype
    must be those recorded; so must the address, once the value has been seen in this call.
E4. Calls that leave the course.
    A call that leaves the recorded course retains every tensor from there on. What it has dropped before must be
    rebuildable from what it has saved before: a rebuilt value is therefore kept until all its sources are saved.
E5. No reference cycles.
    Slots refer to holders, and holders to the holders that they are rebuilt from; nothing refers back. Without a
    reference cycle, what only one node of the autograd graph needs is freed with that node, not when Python's
    collector comes.
E6. Backward in any order.
    `get` may be called any number of times, in any order, so `retain_graph`, partial and repeated backward passes
    work. The count of uses decides only how long a restored tensor stays cached.
E7. Writes after the forward.
    A retained or offloaded value or a parameter that was written to after the forward raises when backward needs it,
    as in plain autograd: its gradient would be wrong. A compressed value is a copy, which the write does not reach.
    ZeRO's optimizers write where autograd does not see it: after such a step, nothing that reads parameters is
    replayed.
E8. Parameters.
    A parameter is read where it lies when backward asks, and is never held: ZeRO-3 frees and moves it between the two.
E9. Device and stream.
    Unpacking asks for the current device and stream. Backward has threads of its own; what the forward's thread has
    set does not hold there. It runs each node on the stream on which forward ran the operator. A block may use several;
    what is restored for one node is cached for others. So all is restored on the stream on which the call began. Nodes
    of other streams wait for it, and its memory is not reused before they are done.
E10. The order of holders.
    A holder comes after the holders that it is rebuilt from. Values are numbered in that order.
E11. Numbers that keep changing.
    A number that keeps changing is guarded for three values, a container whose items do for eight: guarding it longer
    would record the block at every step. From then on nothing of the block is replayed, just as in a block that depends
    on what no guard can read. Values before 64 calls in which nothing changed do not count.
E12. One pack for each tensor.
    The pack hook runs once for each saved tensor, in the recorded order; positions are counted by it. A hook that
    fired twice would shift all later positions: most calls would diverge (and retain), but a value that looks like the
    one before it could be taken for that.
E13. Lifetimes.
    Nothing of a block outlives its modules: whoever still knows the block must not keep a model alive that the program
    has deleted. Parameters are not kept alive either, as the program may replace them. A call holds all of them during
    its forward, and those that it needs until its backward.
E14. Random states.
    The states of random generators that replays need are noted when the tensor at the recorded position is packed.
    Nothing in the hook draws from a generator of the program. Backward leaves every generator as it finds it.
E15. Backwards that write.
    Backward of a Function, or of an operator of `torch.library`, may write to what it has saved. If something is
    rebuilt from that tensor for an operator that backward visits later, backward gets a copy.
E16. Passing values.
    A value that only passes through a replay (`planner/segments.py`) has no holder. Each run of the replay makes it
    anew, and frees it after its last reader. The replay first asks for all that others make, so that nothing passes
    beside what passes through theirs.
E17. Second forwards.
    A call of a block that is one operator holds its arguments alone, or everything that it saves. In the first case
    backward runs the forward again as soon as it asks for a saved tensor, or, if that calls collectives, as soon as a
    gradient of the block's output arrives: ranks may save other tensors. It does so as torch.utils.checkpoint does
    without reentrance: with all random generators, the casts of autocast and the arguments as they were. If a
    parameter, a tensor or a number that it may read is another one, it raises an error. A registered buffer to which
    the forward writes is replaced by a copy of what it held, so nothing is counted twice. The second forward gives each
    slot that is still alive its tensor, which must look as the one before. The slot gives it up as soon as backward has
    it; if collectives were called, as soon as autograd gives up the slot. Blocks inside the block are left alone in the
    second forward as in the first. Nothing of the second forward's own graph is kept. ZeRO-3 keeps what it has gathered
    for a backward until that has used it.

To add a choice beside offload: CONTRIBUTING.md has the list of places.
"""
