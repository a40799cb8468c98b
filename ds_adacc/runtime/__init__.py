"""Where calls come in and steps end: the room that has all others work together.

In comes every call of a block; out goes what the block returns, with its saved tensors held as the plan says. Between
two steps plans are made and changed.

* `runtime`: a call comes in: it is recorded if it is new, or runs under its policy;
* `step`: what one optimizer step is for (`Purpose`), what was seen in it, and what the next ones are for;
* `step_controller`: what happens between steps, in a fixed order;
* `binder`: puts a policy in force for one block, with the codecs that it names;
* `wrap`: finds the model's blocks and has their forwards come here; `compiled`: the same for compiled blocks.

Rules:

1. A plan changes between two steps only, on all ranks in the same step: a rank that replays another plan than the
   others waits for a collective that never comes.
2. A block runs under plain autograd where it cannot be recorded; one warning names the block and the reason.
3. Calls inside of a block belong to it: only the outermost is looked at.
4. Where everything is retained and nobody looks, no hooks are installed.
5. A forward or backward that fails leaves the state as if the step had not begun; a planning that fails, the plan as
   it was.
"""
