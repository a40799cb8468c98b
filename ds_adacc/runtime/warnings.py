"""Warnings of calls that do not run as planned, each logged once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from ds_adacc.execute.block import Block
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.log import EngineLog
from ds_adacc.python_state.guard_history import as_clause, in_short

_MANY_VALUES = 8  # of what a program depends on: fewer may be a choice between a few programs


class Warnings:
    """Warns of each thing once. `has_fallen_back`: a call ran as if there were no ds_adacc."""

    def __init__(self, log: EngineLog) -> None:
        self.has_fallen_back = False
        self._log = log

    def fallen_back(self, block: Block, reason: str, is_checkpointed: bool, advice: str = "") -> None:
        """A call runs as if there were no ds_adacc (Rule T2). `is_checkpointed`: by torch, as the program has asked."""
        self.has_fallen_back = True
        text = "block %s runs without ds_adacc, under plain autograd: %s%s"
        if is_checkpointed:
            text = "block %s runs under torch.utils.checkpoint in place of ds_adacc, as you ask for checkpointing: %s%s"
        self._log_once(block, text, reason, advice, once_for=reason)

    def as_on_other_ranks(self, block: Block, reason: str) -> None:
        """A call of the block cannot be planned on this rank; its forward runs again as on the others (Rule T8)."""
        self.has_fallen_back = True
        text = "block %s is not planned on this rank: %s. Backward runs its forward again, as on the other ranks"
        self._log_once(block, text, reason, once_for=reason)

    def of_no_engine(self, name: str) -> None:
        """A function was checkpointed while several engines run, and it uses the modules of none."""
        self._log_once(
            name,
            "%s runs without ds_adacc, under plain autograd: several engines run with ds_adacc, and it uses no module "
            "of any of them",
        )

    def holds_nothing(self, block: Block) -> None:
        """Backward does not reach the block, as in a frozen backbone."""
        text = "block %s is no part of backward, so it holds nothing: no input or parameter of it requires a gradient"
        self._log_once(block, text, level=logging.INFO)

    def doubtful(self, block: Block, unwatched: str, remedy: str | None = None) -> None:
        """The block depends on what no guard watches."""
        self._log_once(
            block,
            "block %s depends on %s. So what its backward needs is retained, compressed or offloaded, never "
            "recomputed. To have it recomputed, %s",
            as_clause(unwatched),
            remedy or "give the block plain numbers or tensors instead",
            once_for=unwatched,
        )

    def compiled(self, block: Block) -> None:
        """The block runs operators under torch.compile that no graph tells of."""
        self._log_once(
            block,
            "block %s runs operators under torch.compile that no graph tells of. The next call may run others, so what "
            "they and those after them save is retained, compressed or offloaded, never recomputed. "
            "TORCH_LOGS=graph_breaks,recompiles shows where. To have them recomputed, compile the block as a whole, or "
            'do not compile it. LIMITS.md says what the causes are, under "Compiled blocks"',
        )

    def never_recomputed(self, block: Block, what: str, reason: str) -> None:
        """Most of what the block saves can only be kept in one way or another."""
        self._log_once(
            block,
            "block %s runs a %s that is never recomputed: %s. What it saves is retained, compressed or offloaded",
            what,
            reason,
            once_for=reason,
        )

    def compiled_anew(self, block: Block) -> None:
        """A call has run another graph than the recorded one, or with other numbers."""
        self._log_once(
            block,
            "block %s: torch.compile ran another graph than in the recorded call, or with other numbers. So all that "
            "this call saved is retained, also if that takes more than the budget. The next calls of the blocks with "
            "this graph are recorded. Gradients are right. TORCH_LOGS=recompiles tells why it compiles again",
            level=logging.INFO,
        )

    def checkpoints_inside(self, block: Block, checkpoint: str) -> None:
        """The forward of the block calls another checkpoint."""
        self._log_once(
            block,
            "block %s calls %s in its forward. That recomputes what runs in it, whatever the plan says, and what it "
            "holds is no part of the budget. To have ds_adacc decide for these tensors too, take the checkpoint out: "
            "call directly what it is given, and leave out a wrapper such as torch's checkpoint_wrapper",
            checkpoint,
            once_for=checkpoint,
        )

    def ran_twice(self, block: Block, stays: bool) -> None:
        """A second forward of the block has changed something a second time. `stays`: it will be run again."""
        self._log_once(
            block,
            "block %s: backward has run its forward a second time, and that has changed %s, as the first forward had. "
            "%s",
            block.effects,
            "The other ranks run theirs too, so it will happen again: keep that outside of the block"
            if stays
            else "From the next call on, the block is not recomputed as a whole",
        )

    def unmeasurable(self, name: str, reason: str) -> None:
        """The gradient errors of a block type cannot be measured; `name`: of the block that was recorded."""
        self._log_once(
            name,
            "block %s: no lossy codec is used, since its gradient error cannot be measured (%s). To use lossy "
            'codecs without a bound on the error, set "max_gradient_error" to null',
            reason,
            once_for=reason,
        )

    def recorded_again(self, block: Block, numbers: Mapping[str, int]) -> None:
        """The block is recorded since a number among its arguments has a new value; by name, how many it has had."""
        for name, count in numbers.items():
            if count >= _MANY_VALUES:
                self._log_once(
                    block,
                    "block %s: its %s has had %d values. The number is part of the recorded program, and how the "
                    "program follows it cannot be told. So the block is recorded anew for each value, and such a call "
                    "takes several times as long. If the exact number does not matter, pass one that stays the same; "
                    "if it does, give the block a tensor instead",
                    name,
                    count,
                    once_for=name,
                )

    def recorded_at_each_size(self, block: Block, count: int) -> None:
        """The block is recorded at a new size of its tensors; `count`: at how many it was, with this one."""
        if count >= _MANY_VALUES:
            self._log_once(
                block,
                "block %s has been recorded at %d sizes of its tensors, and these do not tell yet what it does at "
                "another. Where batch sizes vary beside lengths, a few more may tell. Where a shape in it depends on "
                "data, say, or it computes with a number made of a size, it is recorded at each new size, and such a "
                "call takes several times as long. If that goes on, pad the batches to a few sizes, or compute in a "
                "block of another class, or outside of blocks, what depends on data (adacc.blocks)",
                count,
            )

    def always_new(self, block: Block) -> None:
        """The block is a new function, as were a thousand before it, and the oldest of them was not called again."""
        self._log_once(
            block,
            "block %s is another function at every call: over a thousand functions have been checkpointed, and they do "
            "not come again. A function that holds another whole number, string or module counts as another one. Each "
            "call is recorded, which takes several times as long, and follows no plan. Pass what changes as an "
            "argument, a number best as a tensor",
        )

    def changed_again(self, block: Block, changed: Collection[str]) -> None:
        """The block is recorded since what it depends on has changed, some of it as often as is told of."""
        names = {name for name in changed if block.changes[name] == _MANY_VALUES}
        if names:
            self._log_once(
                block,
                "block %s has been recorded anew %d times, since %s had changed each time. Such a call takes several "
                "times as long. If the block computes nothing with it, keep it outside of the block; if it does, make "
                "it a tensor, or change it less often",
                _MANY_VALUES,
                in_short(names),
                once_for=", ".join(sorted(names)),
            )

    def diverged(self, block: Block, bound: BoundPolicy, position: int) -> None:
        """A call saved something else than the recorded one."""
        self._log_once(
            block,
            "block %s: from saved tensor %d on, a call differs from the recorded one, which saved %d tensors. What it "
            "saves from there on is retained, so the call takes more memory than planned. Gradients are right. Blocks "
            "that branch on their data do this. If memory runs out, lower adacc.memory_budget",
            position,
            len(bound.course.instructions),
        )

    def mispredicted(self, block: Block, bound: BoundPolicy, position: int) -> None:
        """A call saved something else than was predicted for its arguments."""
        self._log_once(
            block,
            "block %s: from saved tensor %d on, a call differs from what was predicted for its arguments: %d saved "
            "tensors. What it saves from there on is retained, so the call takes more memory than planned. Gradients "
            "are right, and you need do nothing: the next call like it is recorded",
            position,
            len(bound.course.instructions),
        )

    @torch._disable_dynamo
    def compiled_around(self, name: str) -> None:
        """torch.compile compiles a graph around the forward of a block of this name."""
        self._log_once(
            name,
            "blocks %s run uncompiled: ds_adacc must run them outside of the graph that is compiled around them; "
            "call engine.compile() after ds_adacc.initialize or ds_adacc.attach",
        )

    def _log_once(
        self, of: Block | str, text: str, *args: object, once_for: str = "", level: int = logging.WARNING
    ) -> None:
        """Log the text, in which the name of the block comes first: once for blocks of this class and `once_for`."""
        kind, name = (of, of) if isinstance(of, str) else (of.class_name, of.name)
        self._log.once((kind, text, once_for), level, text, name, *args)
