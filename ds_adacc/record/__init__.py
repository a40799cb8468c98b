"""Run a block once, as plain autograd would, and write down its program.

In comes one call of a block: its callable and its arguments. Out goes a `Capture`: the block's output, and a
`Recording` of its operators (ATen calls), its values (tensors) and the order in which autograd saves them. Each
operator of a recording is either verified to give the same bits when it is replayed, or refused for replay with a
reason. A block is recorded once for each signature, not at every step.

The files, in the order in which a call meets them:

* `block_call`: the call: its inputs and closure, and how to run it.
* `capture`: runs the block under the recorder, and later gives its saved tensors to the plan's pack hook.
* `recorder`: the dispatch mode and the pack hook that see every operator and every saved tensor.
* `follower`: records a call whose program was predicted, beside its plan: it must be the predicted one.
* `calls/`: the calls that the recorder is told of, and what runs inside them; `executed_call`: one that may become an
  operator.
* `draft`: the program as far as it has come: operators, saved tensors and remarks.
* `replayable/`: whether an operator may be replayed.
* `naming/`: what a value is called, and which role it has in the model.

What these need to know:

* `frames`: the calls of Python under way in the block; `compiled_kernels`: whether torch.compile's code is running,
  whose kernels the recorder cannot see.
* `known_tensors`: which value or parameter a tensor is, by where it lies in memory.
* `tensors`: the tensors of the recorded values: those still alive, and the others rebuilt when they are asked for.
* `late_slots`: the slots of a recorded call, which autograd alone holds until the forward has ended.
* `casts`: the casts that autocast keeps for later calls: every call has them as operators.
* `lifetimes`: until when the program keeps in forward what operators return.
* `backward_nodes`: autograd's graph of the block, and which operator each node is of; `gradient_flow`: what a node
  does with the gradients that it gets.

Other rooms know `capture` and `follower`, and of what these take or give `block_call`, `tensors` and `late_slots`. All
other files are this room's own. What is written down is in `program/`, what it depends on besides tensors in
`python_state/`; meanwhile `python_watch/` looks on.

Rules of this room and of these three, cited by their letter and number where they are obeyed:

R1. One forward.
    The block runs once, as it would without ds_adacc, and whatever it raises passes through. A second forward would
    draw other random numbers and fire module hooks twice. (Rule E17 has the one exception, in backward.)
R2. Values may die.
    A value that was verified may die as it does in a plain forward: recording takes little more memory. A storage is
    told apart by its identity, which a weak reference keeps from being reused; an address alone would be given to the
    next tensor, and two values would be taken for one.
R3. Values and views.
    A value is the content of one storage at one time; a view is a geometry of a value. Several saved views (q, k and v
    of one projection) are then one value, held once.
R4. Writes in place.
    A write in place makes a new value. If nobody has read the old one, the operators that made it are replayed
    together with the write, on memory of their own (`empty_like`, `bernoulli_` and `div_` make dropout's noise on the
    CPU). Otherwise neither the old nor the new value is rebuilt: a replay would write as well.
R5. Parameters.
    A parameter is found by its address range and kept as (parameter, geometry from its first byte). ZeRO puts many
    parameters in one storage and moves them between steps, and a kept alias would keep gathered memory alive.
R6. What is never replayed.
    These operators are never replayed: those that write to what others have read, return uninitialised memory, give a
    tensor other memory (`set_`) or take part in a collective, those of compiled code that no graph tells of (Rule R17),
    and higher-order operators. They give other bits, have effects, wait for other ranks, or may be others in the next
    call. What adds a product to a tensor times 0 (`baddbmm` with a `beta` of 0) does not read that tensor, which is
    often such memory, or a buffer of all blocks: a replay is given an element that looks alike. A batch norm in
    training updates running statistics and does not say so; it reads the batch alone, so it is replayed without them.
    What else reads them is not: no version counts these writes. Nor is what reads a parameter that is given its own
    memory (`set_`, as in `torch.nn.utils.parametrize`): its version counts up, nothing changes. Nor is what reads a
    parameter that the forward gives other data (`.data = ...`), or writes to (`.data.clamp_(...)`), or one in the same
    memory: a replay would read the new ones. If autograd has saved it and its version counts the write, the block is
    not recorded: backward may have to raise an error.
R7. Data that Python reads.
    What follows from data is not rebuilt: a shape that data decides belongs to one batch, and once Python has read
    data, the next call may take another branch and save other tensors. The same holds once a function in C++ has read a
    tensor on the host to compute with its numbers, once Python has read the seed of a random generator, once work has
    been handed to another thread, which may read whatever it likes, once an operator has raised an error, and, in a
    block that handles errors, once torch has checked a matrix operation, or data (`torch._check_tensor_all`), for them.
    A tensor that was made of Python's numbers alone (`torch.tensor(1.25)`, and the capacity of experts that follows
    from it) holds no data: it may be read. If the program still has it after the forward, a later call may read it as
    it is then, so it counts as data.
R8. Python's numbers.
    A Python number is a constant of the recorded program, so it is guarded: those in the arguments by the signature,
    those that the callable can reach by its guards. A replay with an old number gives wrong gradients without a
    warning. If a block depends on something that cannot be read again at every call, nothing of it is replayed.
R9. Verification.
    Every operator that may be replayed is verified, bit for bit, on the real data. Schemas do not tell everything.
    Each operator is given the recorded inputs; since it gives the recorded outputs, so does any chain of verified
    operators.
R10. Verifying changes nothing.
    Verifying leaves all random generators where they were: torch's, those that are passed to operators, Python's and
    NumPy's. Otherwise the first step would draw other numbers than it draws without ds_adacc.
R11. Below autograd, autocast and vmap.
    A replay runs below autograd and autocast: the casts of autocast were recorded as operators of their own. Within
    one context autocast casts a parameter once. A later call that finds the cast has that operator too, where it first
    reads the cast. What an operator takes from torch's defaults in forward, such as a dtype, it is given in a replay.
    Dispatch modes of the user's that are on in forward are on in a replay. If a backward runs under vmap, as with
    `is_grads_batched=True`, a replay does not: what it makes has no batch.
R12. What a recording keeps.
    A recording keeps no tensors but the parameters of the block's modules, and its digest leaves out what differs
    between ranks. It lives as long as the plan, and all ranks must agree on the plan.
R13. Blocks without a recording.
    A block that cannot be recorded is no error: `Capture.reason` says why, and the block runs under plain autograd.
R14. Random draws.
    An operator that draws random numbers is replayed with its generator in the state that it had in forward; the
    state of now is put back. States are noted where ds_adacc runs anyway: when the call begins, and in the pack hook.
    So a draw may be replayed only if, while recording, nothing else moved or set its generator between the two calls
    of the hook around it. Each replay proves this again: it must leave the generator in the state that the later call
    noted. The states are values of the recording, which the plan retains if it replays the draw. They are never part
    of the plan: each call on each rank has its own.
R15. Calls of an `autograd.Function`.
    A call of an `autograd.Function` is one operator, with all that it calls inside: its kernels may write by address,
    unseen by the dispatcher. It makes what it returns and what it saves for backward. Its replay runs its forward on a
    context of its own, below autograd, but under the autocast of forward, and in verifying on memory filled with a
    pattern. Looking on tells why it must not be replayed: a collective, data read into Python, state that it changes,
    other tensors that it reads; the bits of its arguments tell whether it writes to them. What its forward reads of
    Python is guarded (Rule R8), and must be the same when it is replayed. The kernels of `torch.library`'s operators
    are looked at in the same way (`kernel_call`). A Function that takes objects may depend on anything, and so may one
    whose class is made anew at each call and refers to variables around it: there the operators inside are recorded.
    Nothing is patched: the watch of Python's calls tells of `apply`. Of a call from C code it may not: then the block
    cannot be recorded.
R16. The random state of fused attention.
    Fused attention returns the state of its random generator, for its backward: whole numbers, two at most. Without
    dropout no kernel writes to that memory, so its bits differ from call to call. They are no result: they are never
    compared and never rebuilt, but retained (16 bytes) as a tensor from elsewhere would be. Some kernels return them
    on the host, where they show nothing of the data (Rule R7).
R17. Graphs of torch.compile.
    A graph of torch.compile is an `autograd.Function` that AOTAutograd makes, and a call of it is one operator (Rule
    R15). It makes its own tensors where the dispatcher does not see it. Its weights are among its arguments. So are
    numbers: the length of a text, or one that the Python function reads which does not run. Of what it saves, views of
    one memory are one value, and one or two whole numbers may be a generator's state (Rule R16). Which graph a call
    runs, with which numbers, is Dynamo's choice, and is known when the forward has ended: autograd's nodes tell, which
    keep the numbers for this. Another graph may save more tensors or fewer, so that all that follows is saved at other
    positions. So from the first graph on, all that would be rebuilt or compressed is kept until then; if another graph
    has run, or with other numbers, it stays, and the next call is recorded. Beside its graphs, code of Dynamo's runs
    other code as Python does. What it passes on, Dynamo may have computed from what nobody sees it read. But it makes
    one graph for one such code. So if a graph has run in the code that calls an operator, then the graph tells of the
    operator too, which is replayed as in other blocks. If no graph has run there, neither this operator nor any later
    one is replayed.
R18. Discarded outputs.
    A block may discard an output: the logits of a router that no loss reads, the scores of an indexer of which it uses
    the places alone. What autograd has saved for it dies with it, and backward never asks for it. So no plan compresses
    or rebuilds it: every call retains it until the block discards it, as under plain autograd. The recording says after
    which operator that is, and the peak of forward counts it until then. A later call that does not discard it retains
    it longer. Once Python has read data (Rule R7), another call may keep what this one discards: then all counts as
    kept.
R19. Writes by address.
    A kernel that a block launches itself, outside of any Function and operator, writes by address, and the dispatcher
    is not told. To write it needs an address. A request for an address names one tensor: all values in its memory get a
    checksum, also later ones. A launch of a kernel of Triton's, or a call of a function that pybind11 binds, names
    none: all values get one, and every later one. (Functions of torch and of the other trusted libraries do not count.)
    If the checksum of a value has changed when it is next read or saved, or when the forward has ended, it was written
    to in place (Rule R4), by an operator that is never replayed. Four writes go unnoticed: by an address that was taken
    before the forward; to a parameter; to a buffer that the block reads only afterwards; and one that left the bits as
    they were while the block was recorded. `Tensor.apply_` and `map_` always count as a write.
R20. Blocks as one operator.
    A block that reads data, or numbers that it has put into tensors, may be planned as one operator, which only a
    second forward runs again (Rule E17). It makes one value: all that the block makes and backward needs. Data decide
    how many bytes those are, so the program does not have them; the profile has. What comes before the read is part of
    the program, and what follows is not, as ranks must agree on it. A block that runs compiled code, has a batch norm,
    or writes to a tensor that it has not made, other than a registered buffer, is never planned so: to run it twice
    would do more than to make its tensors. Of collectives in it, Rule T8 tells.
R21. Calls that are followed.
    A call that is followed is watched too. At its size code may run that ran in no recording. What that reads is
    guarded from then on (Rule R8). If it cannot be read again, if it tells why an operator must not be replayed, or if
    a kernel reads it, the call counts as another program than the predicted one.
R22. Garbage.
    While a block is recorded, and watched, Python collects no garbage. What a collection runs (`__del__`, callbacks)
    is not the block's, and the next call would not run it at the same place: its operators would become the block's,
    and what it reads would guard the block (Rule R8).
R23. What the program keeps in forward.
    A Python variable may hold a value long after its last reader, and then forward takes its bytes whatever the plan
    does. The objects that torch hands to the program tell when it lets go of them; the recorder itself holds aliases
    only. Autocast keeps its casts of weights for all of the model's forward, if the context goes on after the block: a
    cast that is gone when the next block is recorded was kept by a context of the block's own. What variables hold is
    no part of the digest: it changes no bits.
"""
