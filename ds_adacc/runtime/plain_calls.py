"""Calls that no plan decides on: plain, or checkpointed by torch where the program has asked for that (Rule T2)."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_adacc.execute.incoming import PlainCall, Run
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.ranks import has_other_ranks
from ds_adacc.program.random_states import RandomStates
from ds_adacc.program.signature import why_unhooked
from ds_adacc.python_state.closure import closure_of
from ds_adacc.runtime.checkpoint_by_gradient import checkpoint_by_gradient
from ds_adacc.runtime.warnings import Warnings
from ds_adacc.whole_blocks.as_other_ranks import run_as_other_ranks
from ds_adacc.whole_blocks.same_again import kept_gathered
from ds_adacc.whole_blocks.whole_call import Around

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

    def fall_back(self, call: PlainCall, reason: str, is_of_call: bool = False) -> Any:
        """Run a call that cannot be planned, and warn of the reason.

        `is_of_call`: the call itself may have brought the reason, as by its data, so other ranks may plan theirs.
        """
        self.warn(call, reason, is_of_call)
        return self.run(call, is_of_call)

    def run_on_this_rank(self, call: PlainCall, reason: str) -> Any:
        """Run a call that other ranks may run as planned: its collectives are called again only if theirs are.

        Raises RuntimeError as `InputPlacement.refuse_alone` does.
        """
        self._agreement.inputs.refuse_alone(call.block.name, reason)
        if self._is_repeated(call):
            self._warnings.as_on_other_ranks(call.block, reason)
            return run_as_other_ranks(call.block, call.run, self._inside)
        self._warnings.fallen_back(call.block, reason, is_checkpointed=False)
        return call.run()

    def warn(self, call: PlainCall, reason: str, is_of_call: bool) -> None:
        """Tell the user how such a call runs, and why."""
        if is_of_call and self._is_repeated(call):
            self._warnings.as_on_other_ranks(call.block, reason)
            return
        may_be = _may_be_checkpointed(is_of_call)
        advice = _ADVICE if may_be and not call.is_asked else ""
        self._warnings.fallen_back(call.block, reason, call.is_asked and may_be, advice)

    def run(self, call: PlainCall, is_of_call: bool) -> Any:
        """Run such a call, without a warning."""
        if is_of_call and self._is_repeated(call):
            return run_as_other_ranks(call.block, call.run, self._inside)
        return self._checkpointed(call.run) if call.is_asked and _may_be_checkpointed(is_of_call) else call.run()

    def _is_repeated(self, call: PlainCall) -> bool:
        """Whether all ranks run a second forward of the block, with its collectives (Rule T8)."""
        return call.is_asked and call.block.name in self._agreement.repeated and why_unhooked() is None

    def _checkpointed(self, run: Run) -> Any:
        """Run the call under torch's checkpoint."""
        closure = closure_of(run)

        def forward(*args: Any, **keywords: Any) -> Any:
            with self._inside(), kept_gathered(closure.parameters):
                return run.func(*args, **keywords)

        if any(isinstance(module, torch.jit.ScriptModule) for module in closure.submodules()):
            return checkpoint_by_gradient(forward, run, closure.parameters)
        # torch knows its own generators only, and of CUDA's those of the devices of the arguments.
        states = RandomStates()
        return checkpoint(
            functools.partial(forward, **run.keywords),
            *run.args,  # by their place, as torch finds the device in them
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), states),
        )


def _may_be_checkpointed(is_of_call: bool) -> bool:
    """Whether torch can checkpoint a call here, and may.

    If the call itself has brought the reason, other ranks may run theirs as planned. They would not repeat the
    collectives of their forwards.
    """
    return why_unhooked() is None and not (is_of_call and has_other_ranks())
