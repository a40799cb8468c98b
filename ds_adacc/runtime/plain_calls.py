"""Calls that no plan decides on: plain, or checkpointed by torch where the program has asked for that (Rule T2)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_adacc.execute.block import Block
from ds_adacc.execute.whole_call import Around
from ds_adacc.plan.agreement import Agreement
from ds_adacc.program.generators import named_states, set_named_states
from ds_adacc.program.signature import why_unhooked
from ds_adacc.runtime.warnings import Warnings

Run = functools.partial[Any]  # the function of a call, with its arguments
_ADVICE = (
    ". To save memory there, call it by ds_adacc.checkpointing.checkpoint, or enable the gradient checkpointing of "
    "transformers: torch.utils.checkpoint then runs it"
)


class PlainCalls:
    """Runs calls as they would run without ds_adacc."""

    def __init__(self, agreement: Agreement, warnings: Warnings, inside: Around) -> None:
        """`inside`: what has the blocks inside a block left alone."""
        self._agreement = agreement
        self._warnings = warnings
        self._inside = inside

    def fall_back(self, block: Block, reason: str, run: Run, is_asked: bool) -> Any:
        """Run a call of the block that cannot be planned, and warn of the reason. `is_asked`: as of `Signature`."""
        self.warn(block, reason, is_asked)
        return self.run(run, is_asked)

    def run_alone(self, block: Block, reason: str, run: Run) -> Any:
        """Run a call that other ranks may run as planned, so `torch.utils.checkpoint` must not repeat its collectives.

        Raises RuntimeError as `InputPlacement.refuse_alone` does.
        """
        self._agreement.inputs.refuse_alone(block.name, reason)
        self._warnings.fallen_back(block, reason, is_checkpointed=False)
        return run()

    def warn(self, block: Block, reason: str, is_asked: bool) -> None:
        """Tell the user how such a call runs, and why."""
        can_be_asked = why_unhooked() is None
        self._warnings.fallen_back(
            block, reason, is_asked and can_be_asked, _ADVICE if can_be_asked and not is_asked else ""
        )

    def run(self, run: Run, is_asked: bool) -> Any:
        """Run the call. Where nothing can decide what is held for its backward, it is not checkpointed either."""
        if not is_asked or why_unhooked() is not None:
            return run()

        def forward(*args: Any) -> Any:
            with self._inside():
                return run.func(*args, **run.keywords)

        # By their place, as torch finds the devices of the random generators in the arguments.
        return checkpoint(forward, *run.args, use_reentrant=False, context_fn=_drawing_again())


def _drawing_again() -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """What forward and its recomputation run in, so that both draw the same by DeepSpeed's tracker.

    torch puts back its own generators only. `deepspeed.checkpointing` puts back those of the tracker too.
    """
    states = named_states()
    return lambda: (nullcontext(), _States(states))


class _States:
    """DeepSpeed's tracker has these states within. If backward runs twice, torch enters the same object twice."""

    def __init__(self, states: dict[str, torch.Tensor]) -> None:
        self._states = states
        self._put_back: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._put_back.append(named_states())
        set_named_states(self._states)

    def __exit__(self, *_: object) -> None:
        set_named_states(self._put_back.pop())
