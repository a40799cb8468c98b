"""Runs every call of a block. It uses all rooms below it.

Its input is a call of a block. Its output is what the block returns, with the saved tensors held as the plan says.
What happens between two steps is in `steps/`, which this room tells of each call.

The files, in the order in which a call meets them:

* `find_blocks`: finds the model's blocks; `wrap`: routes their forwards to the runtime; `compiled_blocks`: those that
  are compiled.
* `runtime_registry`: the runtimes of a process: which of them serves a call of `ds_adacc.checkpointing`.
* `asked_functions`: whether what such a call is given is a block, calls others, or is for torch to checkpoint.
* `runtime`: a call comes in: has it recorded, or run as planned.
* `other_checkpoints`: refuses a block that already runs inside one, and finds a block that has one inside.
* `learner`: has a call recorded, and learns from it: its block type, and all costs.
* `planned_calls`: runs any other call under its policy, with hooks if it has to; `plain_calls`: runs those that no
  plan decides on, by `checkpoint_by_gradient` those of TorchScript.
* `seen_programs`: which programs, predicted for an input size, blocks were seen to run, and at which lengths.
* `warnings`: what users are told of calls that do not run as planned.

Rules of this room and of `steps/`, cited by their letter and number where they are obeyed:

T1. When a plan changes.
    A plan changes only between two steps, and on all ranks in the same step. A rank that replayed a different plan
    would wait for a collective that the other ranks never start.
T2. Calls that cannot be recorded.
    A block that cannot be recorded runs under plain autograd. It runs under `torch.utils.checkpoint` where the program
    has asked for checkpointing of the call, unless other ranks may run it as planned: they would not repeat its
    collectives (but see Rule T8). One warning names the block and the reason.
T3. Calls inside a block.
    A call inside a block is part of that block. Only the outermost call is recorded or planned. But a function that
    the program gives to `checkpoint` is no block if it only calls one block of an engine, nor, under ZeRO-3, if it
    calls any: they are.
T4. No hooks without need.
    If a policy retains everything and nothing observes the step, no hooks are installed.
T5. Lossy policies.
    A lossy policy runs only on blocks on which its gradient error was measured within the bound, if there is one.
T6. Failures.
    If a forward or backward fails, the state is as if the step had not begun. If planning fails, the old plan stays.
T7. Blocks recomputed as a whole.
    A block is recomputed as a whole only where the program has asked for checkpointing of just that call, by
    `ds_adacc.checkpointing` or by transformers' gradient checkpointing, or of a function that makes the call and is no
    block (Rule T3). It would have run twice without ds_adacc too. Nor is it if its first call has changed what later
    calls depend on, such as a counter.
T8. Second forwards with collectives.
    A second forward that calls collectives runs on all ranks or on none, and at the same place in backward. So the
    ranks agree on the names of such blocks when they plan; until then all retain what these save. What one rank alone
    knows has no part in it: the sizes of its inputs, a trial, a recording. If a rank cannot run a call of such a block
    as planned, its backward runs the forward again all the same, or it raises an error.
"""
