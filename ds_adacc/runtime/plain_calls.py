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

    def fall_back(self, block: Block, reason: str, run: Run, is_asked: bool) -> Any:
        """Run a call of the block that cannot be planned, and warn of the reason.

        `is_asked`: whether it is to be checkpointed by torch. If the `reason` may be one of this call alone, that is
        what `may_repeat` says.
        """
        self.warn(block, reason, is_asked)
        return self.run(run, is_asked)

    def run_alone(self, block: Block, reason: str, run: Run) -> Any:
        """Run a call that other ranks may run as planned, so that its collectives must not be repeated.

        Raises RuntimeError as `InputPlacement.refuse_alone` does.
        """
        self._agreement.inputs.refuse_alone(block.name, reason)
        self._warnings.fallen_back(block, reason, is_checkpointed=False)
        return run()

    def may_repeat(self, is_asked: bool) -> bool:
        """Whether a call is to be checkpointed, as the program has asked, if perhaps no other rank has to do so.

        What the call itself brings, such as its data, may let other ranks run theirs as planned. They would not repeat
        the collectives of their forwards.
        """
        return is_asked and not (dist.is_initialized() and dist.get_world_size() > 1)

    def warn(self, block: Block, reason: str, is_asked: bool) -> None:
        """Tell the user how such a call runs, and why."""
        can_be_asked = why_unhooked() is None
        advice = _ADVICE if can_be_asked and self.may_repeat(not is_asked) else ""
        self._warnings.fallen_back(block, reason, is_asked and can_be_asked, advice)

    def run(self, run: Run, is_asked: bool) -> Any:
        """Run the call. Where nothing can decide what is held for its backward, it is not checkpointed either."""
        if not is_asked or why_unhooked() is not None:
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
