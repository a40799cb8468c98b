"""Blocks that are recomputed as a whole: backward runs their forward a second time.

Other blocks are recomputed operator by operator, and have no part in this room. But where Python reads data, the
operators after it are never replayed: the next call may take another branch (Rule R7). If the program has asked for
checkpointing of just this call, backward may run the whole forward of such a block again, as `torch.utils.checkpoint`
does. To the planner the block is one operator then, which makes one value: all that backward needs of the block. A
policy retains that value, or recomputes it.

The files, in the order of a call:

* `asked`: whether the program has asked for checkpointing of this call.
* `beginning`: all that a second forward must find as it was; `written_buffers`: of what the forward writes to, too;
  `reached`: of what the function reaches by the variables around it.
* `choice`: whether a block that was recorded is planned as one operator; if not, why not.
* `one_operator`: makes the recording of that operator; `costs`: its profile.
* `host_copies`: holds in host memory what a call saves, while the ranks have yet to agree on a plan for it.
* `whole_call`: the state of a call. Its pack hook holds none of the saved tensors.
* `second_forward`: runs the forward again in backward, and gives the saved tensors to backward.
* `same_again`: what that runs in: an error if it would compute something else; afterwards nothing is left of it.
* `as_other_ranks`: runs a call that this rank alone cannot run as planned, and runs its forward again likewise.

Which second forwards call collectives, so that all ranks run them or none does, is told by
`plan/repeated_collectives.py`. The rules cited here are R20 of `record/`, E17 of `execute/`, T7 and T8 of `runtime/`.
"""
