"""Which runtime serves the calls of `ds_adacc.checkpointing`: that of an engine, or one without an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_adacc.config import AdaccConfig
from ds_adacc.config.activation_checkpointing import Options
from ds_adacc.execute.input_placement import InputPlacement, tensor_parallel_group
from ds_adacc.plan.ranks import Ranks
from ds_adacc.python_state.closure import closure_of, name_of
from ds_adacc.runtime.runtime import Runtime


class DefaultRuntime:
    """The configuration of `ds_adacc.checkpointing`. It belongs to the process, as that of DeepSpeed's module does.

    The runtimes of engines are *lent*: an engine alone keeps its runtime alive, since under ZeRO-3 that leads to the
    whole engine. While none is lent, the runtime that `serve_by` has made for `section` serves. `section` is None
    before that, and if "enabled" is false. `has_lent`: there was an engine in this process.
    """

    def __init__(self) -> None:
        self.has_lent = False  # ever
        self._begin()

    def reset(self) -> None:
        """Back to the state before `configure`."""
        self._abandon()
        self._begin()

    def _begin(self) -> None:
        self._own: Runtime | None = None
        self._lent: list[tuple[weakref.ref[Runtime], weakref.WeakSet[nn.Module]]] = []
        self.section: AdaccConfig | None = None
        self.is_configured = False
        self.options = Options()
        self.mpu: Any = None

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that serves; of several engines, that of the last one."""
        return self._runtimes[-1] if self._lent else self._own

    @property
    def is_lent(self) -> bool:
        return bool(self._lent)

    def runtime_of(self, function: Callable[..., Any]) -> Runtime | None:
        """The runtime that serves calls of this function: that of the engine whose module it reaches.

        Within a block it is that of the block. None, after a warning, if the function reaches the module of no engine.
        Raises RuntimeError if it reaches different modules of several engines.
        """
        runtimes = self._runtimes
        if len(runtimes) < 2 or not torch.is_grad_enabled():  # without gradients nothing is held
            return self.runtime
        for runtime in runtimes:
            if runtime.is_inside:
                return runtime
        reached = closure_of(function).modules
        found: dict[frozenset[nn.Module], Runtime] = {}
        for reference, modules in self._lent:
            its, runtime = frozenset(module for module in reached if module in modules), reference()
            if its and runtime is not None:
                found[its] = runtime  # of engines of one model, the last one
        if not found:
            runtimes[-1].warnings.of_no_engine(name_of(function))
            return None
        if len(found) > 1:
            raise RuntimeError(
                f"adacc: {name_of(function)} is checkpointed while {len(runtimes)} engines run with ds_adacc, and it "
                f"reaches modules of {len(found)} of them. So ds_adacc cannot tell whose plan it belongs to. "
                "Checkpoint a module, or a function that uses modules of one engine only"
            )
        return next(iter(found.values()))

    def serve_by(self, section: AdaccConfig | None) -> None:
        """Make a runtime for the section, without an engine.

        Ranks that hold shares of the same tensor need the same plan, so they plan together.
        """
        runtime = None
        if section is not None:
            placement = self._placement()
            runtime = Runtime(section, Ranks(placement.group))
            runtime.controller.hold_inputs(placement)
        self._abandon()
        self._own, self.section = runtime, section

    def borrow(self, runtime: Runtime, module: nn.Module | None) -> None:
        """Use the runtime of an engine, which trains `module`, until the engine is gone."""
        placement = self._placement()  # it may raise what the user's mpu raises
        if not self._lent:
            self._abandon()
            self._own, self.section = None, None
        self.is_configured = self.has_lent = True
        modules = weakref.WeakSet(() if module is None else module.modules())
        self._lent.append((weakref.ref(runtime, self._forget), modules))
        runtime.controller.hold_inputs(placement)

    def take_back(self, runtime: Runtime) -> None:
        """Do no longer use this runtime, whose engine could not be served."""
        for reference, _ in self._lent:
            if reference() is runtime:
                self._forget(reference)

    def place_inputs(self) -> None:
        """Make the engines' runtimes hold block inputs as the options say."""
        for runtime in self._runtimes:
            runtime.controller.hold_inputs(self._placement())

    @property
    def _runtimes(self) -> list[Runtime]:
        return [runtime for reference, _ in self._lent if (runtime := reference()) is not None]

    def _forget(self, reference: weakref.ref[Runtime]) -> None:
        self._lent = [each for each in self._lent if each[0] is not reference]
        if not self._lent:
            self.reset()

    def _abandon(self) -> None:
        for runtime in (*self._runtimes, self._own):
            if runtime is not None:
                runtime.controller.abandon()

    def _placement(self) -> InputPlacement:
        group = tensor_parallel_group(self.mpu) if self.options.partition_activations else None
        return InputPlacement(group, bool(self.options.cpu_checkpointing))
