"""The runtimes of a process: which of them serves a call of `ds_adacc.checkpointing`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_adacc.config import AdaccConfig
from ds_adacc.config.activation_checkpointing import Options
from ds_adacc.execute.input_placement import InputPlacement, tensor_parallel_group
from ds_adacc.plan.ranks import Ranks
from ds_adacc.program.module_class import class_name
from ds_adacc.python_state.closure import closure_of, name_of
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import is_wrapped


class RuntimeRegistry:
    """The runtimes of the engines, and one without an engine, which serves while there is no engine.

    It belongs to the process, as the configuration of DeepSpeed's module does. Since it lives so long, it does not keep
    the engines' runtimes alive: under ZeRO-3 that leads to the whole engine. The engine does, and so do the blocks that
    are wrapped. The runtime without an engine is that of `section`, `options` and `mpu`, as `configure` got them.
    `section` is None before that, and if "enabled" is false. `is_set_up`: whether somebody else than an engine has
    given a section. `has_started`: whether the program has called `ds_adacc.initialize` or `attach`.
    """

    def __init__(self) -> None:
        self.has_started = False
        self._begin()

    def reset(self) -> None:
        """Back to the state before `configure`."""
        for runtime in (*self._runtimes, self._own):
            if runtime is not None:
                runtime.controller.abandon()
        self._begin()

    def _begin(self) -> None:
        self._own: Runtime | None = None
        self._of_engines: list[tuple[weakref.ref[Runtime], weakref.WeakSet[nn.Module]]] = []
        self.section: AdaccConfig | None = None
        self.is_set_up = False
        self.options = Options()
        self.mpu: Any = None
        self._ranks: tuple[dist.ProcessGroup, float, Ranks] | None = None
        self._count = 0  # of engines, those that are gone too

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that serves; of several engines, that of the last one."""
        return self._runtimes[-1] if self._of_engines else self._own

    @property
    def has_engines(self) -> bool:
        return bool(self._of_engines)

    @property
    def is_configured(self) -> bool:
        return self.is_set_up or self.has_engines

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
        for reference, modules in self._of_engines:
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

    def may_be_of_engine(self, function: Callable[..., Any]) -> bool:
        """Whether the function may run modules of an engine: not if it reaches modules, but none that ds_adacc knows.

        It reaches none if it finds them through a global dict, say. A copy of a block runs through an engine's runtime.
        """
        if not self.has_engines or any(runtime.is_inside for runtime in self._runtimes):
            return self.has_engines
        closure = closure_of(function)
        return not closure.modules or any(
            is_wrapped(module) or any(module in its for _, its in self._of_engines) for module in closure.submodules()
        )

    def configure(self, section: AdaccConfig | None, options: Options | None = None, mpu: Any = None) -> None:
        """Make a runtime for the section, without an engine. It serves as soon as no engine does.

        Ranks that hold shares of the same tensor need the same plan, so they plan together. `options` and `mpu` are
        those from now on, also for engines; None stands for those of an earlier call. If anything is raised, all is
        left as it was.
        """
        options, mpu = self.options if options is None else options, self.mpu if mpu is None else mpu
        runtimes, own = self._runtimes, None
        if section is not None or runtimes:
            placement = _placement(options, mpu)  # it may raise what the user's mpu raises
            if section is not None:
                own = Runtime(section, self._ranks_of(placement.group, section.solver.max_seconds))
                runtimes = [*runtimes, own]
            for runtime in runtimes:
                runtime.controller.hold_inputs(placement)
        if self._own is not None:
            self._own.controller.abandon()
        self._own, self.section, self.options, self.mpu = own, section, options, mpu

    def register(self, runtime: Runtime, module: nn.Module | None = None) -> None:
        """Have the runtime of an engine, which trains `module`, serve until the engine is gone.

        Once the last engine is gone, what `configure` has set is in force. If there are several, a function is a block
        of the one whose module it reaches.
        """
        placement = _placement(self.options, self.mpu)  # it may raise what the user's mpu raises
        if self._own is not None:
            self._own.controller.abandon()
        modules = weakref.WeakSet(() if module is None else module.modules())
        self._of_engines.append((weakref.ref(runtime, self._forget), modules))
        self._name(runtime, module)
        runtime.controller.hold_inputs(placement)
        if module is not None:
            runtime.blocks.name_modules(module)

    def unregister(self, runtime: Runtime) -> None:
        """Forget this runtime, whose engine could not be served."""
        self._of_engines = [each for each in self._of_engines if each[0]() is not runtime]

    def unregister_model(self, model: nn.Module) -> None:
        """Forget the runtimes of the engines of this model."""
        own = set(model.modules())
        for reference, modules in self._of_engines:  # the collector may call `_forget` meanwhile
            if modules and own.issuperset(modules):
                self._forget(reference)

    def own_modules(self, model: nn.Module) -> list[nn.Module]:
        """The model's modules, but for those of an engine that trains others too: a critic may share an actor's."""
        own = set(model.modules())
        others = {module for _, modules in self._of_engines if not own.issuperset(modules) for module in modules}
        return [module for module in model.modules() if module not in others]

    def forget_dropped(self) -> None:
        """Forget engines that the program has dropped. Only the collector frees them, as they are parts of cycles."""
        if self._of_engines:
            gc.collect()

    @property
    def _runtimes(self) -> list[Runtime]:
        return [runtime for reference, _ in self._of_engines if (runtime := reference()) is not None]

    def _name(self, runtime: Runtime, module: nn.Module | None) -> None:
        """Name a new engine. If there are others, the log names each from now on: their blocks may have one name."""
        self._count += 1
        model = "" if module is None else f" ({class_name(module)})"
        runtime.agreement.log.engine = f"engine {self._count}{model}"
        runtimes = self._runtimes
        for each in runtimes:
            each.agreement.log.names_engine |= len(runtimes) > 1

    def _ranks_of(self, group: dist.ProcessGroup | None, max_seconds: float) -> Ranks:
        """The ranks of the group. They stay the same if they can: each `Ranks` opens connections for good."""
        if group is None:
            return Ranks()
        if self._ranks is None or self._ranks[:2] != (group, max_seconds):
            self._ranks = group, max_seconds, Ranks(group, max_seconds)
        return self._ranks[2]

    def _forget(self, reference: weakref.ref[Runtime]) -> None:
        self._of_engines = [each for each in self._of_engines if each[0] is not reference]


def _placement(options: Options, mpu: Any) -> InputPlacement:
    group = tensor_parallel_group(mpu) if options.partition_activations else None
    return InputPlacement(group, options.cpu_checkpointing)
