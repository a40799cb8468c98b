"""The class of `engine.adacc`."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from ds_adacc import planner
from ds_adacc.compact.compact import Compact
from ds_adacc.runtime.find_blocks import beside, no_longer_in, none_ran
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import runs, runtimes_of

_RUN_WITHOUT = "run as without ds_adacc, outside of memory_budget. Change the model before its engine is made"
_MANY_BACKWARDS = 20  # before the first step: some programs run a few passes for one step


class Adacc:
    """The section in force, the blocks by their names in the model, the runtime that runs them, and its results.

    `observed_held_bytes` is the bytes that the blocks' saved tensors took when backward began, in the first step under
    the plan in force. `planned_held_bytes` is the plan's prediction of it. Both are None before that step has ended.
    `compact` has the layers that save a projection of their input; None without the section's `compact`. `is_stepping`:
    `engine.step` runs, which calls the optimizer and ends the step of ds_adacc itself.
    """

    def __init__(
        self,
        runtime: Runtime,
        blocks: Mapping[str, nn.Module] | None = None,
        compact: Compact | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.config = runtime.config
        self.runtime = runtime
        self.controller = runtime.controller  # divides the calls of the blocks into steps, and has the plan in force
        self.compact = compact
        self.blocks = dict(blocks or {})
        self.is_stepping = False
        self._model = model
        # These were left out, as "auto" does with layers that have next to no weights: they are no news.
        others = () if model is None else beside(model, self.blocks).values()
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet(others)
        self._has_served = False
        self._backwards = 0  # before the first step
        self._has_stepped = False

    @property
    def planned_held_bytes(self) -> int | None:
        observation = self.controller.observation
        return None if observation is None else observation.held.planned

    @property
    def observed_held_bytes(self) -> int | None:
        observation = self.controller.observation
        return None if observation is None else observation.held.observed

    def end_backward(self, micro_batches: int) -> None:
        """Note the end of a backward pass; `micro_batches`: how many a step has, if the program steps at all."""
        self.controller.end_backward()
        if self._has_stepped:
            return
        self._backwards += 1
        if self._backwards == _MANY_BACKWARDS * micro_batches:
            self.controller.agreement.log.warning(
                "no step has come in %d backward passes. Until engine.step() has run the optimizer there is no plan, "
                "and every block recomputes. Call engine.step() after each engine.backward()",
                self._backwards,
            )

    def note_update(self, engine: Any) -> None:
        """Note that the engine's optimizer has changed its parameters: of blocks that another engine serves, too."""
        self.controller.note_update()
        modules = () if self._model is None else self._model.modules()
        served = [module for module in modules if runtimes_of([module]) - {self.runtime}]
        if served:
            trained = _trained_by(engine.optimizer)
            changed = [each for each in served if any(id(parameter) in trained for parameter in each.parameters())]
            for runtime in runtimes_of(changed) - {self.runtime}:
                runtime.controller.note_update()

    def end_step(self) -> None:
        """End an optimizer step: plan for new blocks, report, track outliers. Every rank must call."""
        self._has_stepped = True
        self._has_served = self._has_served or self.controller.ranks.any(self.runtime.calls > 0)
        self._warn_of_changes()
        if self._has_served:
            try:
                self.controller.end_step()
            except planner.InfeasibleBudget as error:
                self.controller.journal.write("refused", text=str(error))
                if not self.controller.ranks.is_first:
                    _end_in_silence(error)
                raise
        elif not self.runtime.warnings.has_fallen_back:  # that has its own warning
            self._warn_of_no_calls()

    def _warn_of_changes(self) -> None:
        """Warn once if layers have taken the place of blocks, and once if some have been added."""
        if self._model is None:
            return
        log, names = self.controller.agreement.log, no_longer_in(self._model, self.blocks)
        if added := self._added(self._model, names):
            text = "layers like the blocks found were added to the model: %d (the first: %s). They " + _RUN_WITHOUT
            log.once("added", logging.WARNING, text, len(added), added[0])
        if names:
            text = "no longer in the model: %d of the %d blocks found (the first: %s). Modules in their place "
            log.once("replaced", logging.WARNING, text + _RUN_WITHOUT, len(names), len(self.blocks), names[0])

    def _added(self, model: nn.Module, replaced: Collection[str]) -> list[str]:
        """The new layers beside the blocks that run without ds_adacc, but for those in the place of one `replaced`."""
        layers = beside(model, self.blocks).items()
        new = {name: layer for name, layer in layers if name not in replaced and layer not in self._others}
        return [name for name, layer in new.items() if not runs(self.runtime, layer)]

    def _warn_of_no_calls(self) -> None:
        if self.blocks and not any(runs(self.runtime, block) for block in self.blocks.values()):
            text = (
                "adacc has no effect in this engine: a later engine of its model, or other code, has replaced the "
                "forward of its blocks. Make the engine that trains the model last, and change the blocks before that"
            )
        elif self.blocks:
            text = (
                f"adacc is enabled but does nothing: {none_ran(list(self.blocks))} in training. List the classes of "
                "the blocks that do run in adacc.blocks"
            )
        else:
            text = (
                "adacc is enabled but does nothing: adacc.blocks matched no block of the model, and the model ran none "
                "through ds_adacc.checkpointing. List the classes of its blocks in adacc.blocks"
            )
        self.controller.agreement.log.once(text, logging.WARNING, "%s", text)


def _trained_by(optimizer: Any) -> set[int]:
    """The identities of the parameters that DeepSpeed's optimizer trains: the model's own, not its flat copies."""
    names = ("bit16_groups", "bf16_groups", "fp16_groups")  # of ZeRO-1 and 2, bf16, fp16 and ZeRO-3
    groups = next((found for name in names if (found := getattr(optimizer, name, None))), None)
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group}


def _end_in_silence(error: planner.InfeasibleBudget) -> None:
    """Have Python print nothing if this error ends the process: the first rank prints the same error.

    Otherwise the launcher mixes the tracebacks of all ranks, and the text that the user needs is lost among them.
    """
    before, refusal = sys.excepthook, weakref.ref(error)  # the program may catch it, and its frames hold tensors

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is not refusal():
            before(kind, value, traceback)

    sys.excepthook = hook
