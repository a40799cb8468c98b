"""The strategies that are compared: how each runs a model's blocks.

A strategy is used as `checkpoint(block, *args)`, and told of the end of each step by `end_step()`. A step is steady if
it only trains, and nothing is recorded, compiled, tried or tracked. `about()` is what else its row tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.cache_folder import default_path
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step_schedule import Purpose

WHICH = ("planned", "observed")

aten = torch.ops.aten
MATMULS_AND_ATTENTION = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# There is no dropout, so no strategy needs the state of a random generator: torch's is as fast as it can be.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Strategy:
    """No checkpointing; the base of the others."""

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        return block(*args)

    def end_step(self) -> None:
        """An optimizer step has ended."""

    @property
    def is_steady(self) -> bool:
        return True

    def about(self) -> Mapping[str, Any]:
        return {}


class Full(Strategy):
    """Full checkpointing: torch's, every block."""

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        return recomputed(block, *args)


class Selective(Strategy):
    """Torch's selective checkpointing: the outputs of matrix products and of attention are saved."""

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return recomputed(block, *args, context_fn=contexts)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in MATMULS_AND_ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedInputs(Strategy):
    """Full checkpointing in which the hidden states between blocks wait in pinned host memory."""

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        with save_on_cpu(pin_memory=args[0].is_cuda):
            return recomputed(block, *args)


class Ours(Strategy):
    """ds_adacc under a section; or, of an engine that it is attached to, that engine's."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.adacc = Adacc(Runtime(load({"adacc": dict(section)}), has_engine=True, cache=ProfileCache(default_path())))

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        return self.adacc.runtime.checkpoint(block, *args)

    def end_step(self) -> None:
        self.adacc.end_step()

    @property
    def is_steady(self) -> bool:
        return self.adacc.runtime.controller.step.purpose is Purpose.RUN

    def about(self) -> Mapping[str, Any]:
        """Bytes and seconds as planned, and as observed in the first step under the plan.

        `recompute_all_bytes`: what the blocks would take at their peak if all that can be recomputed were.
        """
        controller, runtime = self.adacc.runtime.controller, self.adacc.runtime
        seen, plan = controller.observation, controller.plan
        pairs = (
            {"held_bytes": seen.held, "blocks_peak_bytes": seen.peak, "blocks_seconds": seen.seconds} if seen else {}
        )
        compared = {f"{name}_{which}": getattr(pair, which) for name, pair in pairs.items() if pair for which in WHICH}
        return {
            "budget_bytes": plan.budget,
            "planned_peak_bytes": plan.peak,
            "planned_without_bytes": plan.without,
            "recompute_all_bytes": next(each.peak for each in plan.baselines if each.name == "recompute all"),
            "added_seconds": plan.added_seconds,
            "solve_seconds": plan.solve_seconds,
            "proven_optimal": plan.proven_optimal,
            "without_solver": [group.solution.fallback for group in plan.groups if group.solution.fallback],
            "recordings": runtime.recordings,
            "profiles_measured": runtime.profiler.measured,
            **compared,
        }


class Attached(Ours):
    """ds_adacc as `ds_adacc.initialize` has connected it to an engine, which ends its steps itself."""

    def __init__(self, adacc: Adacc) -> None:
        self.adacc = adacc

    def end_step(self) -> None:
        pass


class Compiled(Strategy):
    """Another strategy over blocks that torch.compile compiles, each by itself.

    `budget` is torch's activation memory budget: a fraction of what a compiled block would save by itself.
    """

    def __init__(self, inner: Strategy, backend: str, budget: float = 1.0) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self._inner, self._backend, self._budget = inner, backend, budget
        self._compiled: dict[nn.Module, Any] = {}

    def checkpoint(self, block: nn.Module, *args: Any) -> Tensor:
        if block not in self._compiled:
            self._compiled[block] = torch.compile(block, backend=self._backend, fullgraph=True)
        with torch._functorch.config.patch(activation_memory_budget=self._budget):  # it compiles in the first call
            return self._inner.checkpoint(self._compiled[block], *args)

    def end_step(self) -> None:
        self._inner.end_step()

    @property
    def is_steady(self) -> bool:
        return self._inner.is_steady

    def about(self) -> Mapping[str, Any]:
        return {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], **self._inner.about()}
