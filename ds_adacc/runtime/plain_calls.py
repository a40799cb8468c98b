"""Calls that no plan decides on: plain, or checkpointed by torch where the program has asked for that (Rule T2)."""

from __future__ import annotations

import functools
import random
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ds_adacc.execute.block import Block
from ds_adacc.execute.whole_call import Around
from ds_adacc.plan.agreement import Agreement
from ds_adacc.program.generators import default_generators, named_states, set_named_states, unmoved
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

    def fall_back(self, block: Block, reason: str, run: Run, is_asked: bool, is_of_call: bool = False) -> Any:
        """Run a call of the block that cannot be planned, and warn of the reason.

        `is_asked`: as of `Signature`. `is_of_call`: the call itself may have brought the reason, as by its data.
        """
        self.warn(block, reason, is_asked, is_of_call)
        return self.run(run, is_asked, is_of_call)

    def run_alone(self, block: Block, reason: str, run: Run) -> Any:
        """Run a call that other ranks may run as planned, so that its collectives must not be repeated.

        Raises RuntimeError as `InputPlacement.refuse_alone` does.
        """
        self._agreement.inputs.refuse_alone(block.name, reason)
        self._warnings.fallen_back(block, reason, is_checkpointed=False)
        return run()

    def warn(self, block: Block, reason: str, is_asked: bool, is_of_call: bool) -> None:
        """Tell the user how such a call runs, and why."""
        may_be = _may_be_checkpointed(is_of_call)
        self._warnings.fallen_back(block, reason, is_asked and may_be, _ADVICE if may_be and not is_asked else "")

    def run(self, run: Run, is_asked: bool, is_of_call: bool) -> Any:
        """Run such a call, without a warning."""
        if not (is_asked and _may_be_checkpointed(is_of_call)):
            return run()

        def forward(*args: Any) -> Any:
            with self._inside():
                return run.func(*args, **run.keywords)

        again = _DrawingAgain()
        return checkpoint(
            forward,
            *run.args,  # by their place, as torch finds the device in them
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), again),
        )


def _may_be_checkpointed(is_of_call: bool) -> bool:
    """Whether torch can checkpoint a call here, and may.

    If the call itself has brought the reason, other ranks may run theirs as planned. They would not repeat the
    collectives of their forwards.
    """
    has_other_ranks = dist.is_initialized() and dist.get_world_size() > 1
    return why_unhooked() is None and not (is_of_call and has_other_ranks)


class _DrawingAgain:
    """Within, the random generators have the states that they had when this was made, and afterwards those before.

    torch knows its own generators only, and of CUDA's those of the devices of the arguments. If backward runs twice,
    torch enters the same object twice.
    """

    def __init__(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in default_generators()]
        self._named = named_states()
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()
        self._left: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(unmoved(()))
        stack.callback(set_named_states, named_states())
        self._left.append(stack)
        for generator, state in self._states:
            generator.set_state(state)
        set_named_states(self._named)
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)

    def __exit__(self, *_: object) -> None:
        self._left.pop().close()
