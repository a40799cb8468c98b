"""Divides the calls of blocks into passes and steps, and changes the plan between two steps.

In come the calls of blocks, as `runtime/` tells of them, and the ends of backwards and steps, as `engine/` does. Out
goes the policy that each block runs now. A *pass* is a forward and its backward, a *step* an optimizer step with all
its passes.

* `step_controller`: what happens while a step runs, and between two of them, in a fixed order.
* `planning`: the plan of the run, and how it is changed; `after_step`: what follows from a step that was observed,
  tried or tracked.
* `step_schedule`: the `Purpose` of each coming step.
* `step`: one step, and what was observed in it; `current_pass`: what the pass that runs now has called; `given_inputs`:
  which inputs several calls of a pass hold.
* `pending_live_sets`: which live sets wait for a plan.
* `trials`: which gradient errors are measured in a call.
* `policy_chooser`: which policy each block runs now; `binder`: ties one block to it, with the codecs that it names.
* `saved_state`: what a checkpoint saves of a run.

The rules cited here are those of `runtime/`; Rules T1, T5 and T6 are the main ones.
"""
