"""A DeepSpeed engine that trains on one batch, its blocks run by one strategy after another; and what steps cost.

After a few steps the learning rate is 0: the optimizer works as ever, but the weights stay. So all strategies meet the
same weights and the same batch, and their gradients can be compared.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from measure import PATIENCE, never_steady
from memory import PeakMemory
from models import Size, build, precision, text
from rows import Row
from strategy import Attached, Strategy
from timing import Ratio, Seconds, in_turns, seconds
from torch import Tensor

import ds_adacc

LEARNING_STEPS = 10  # away from the initial weights, whose gradients are like no others
WARM_UP_STEPS = 2


class Trainer:
    """The model `name`, with a fused AdamW, in a DeepSpeed engine of this ZeRO stage; no launcher is needed.

    With an "adacc" section, ds_adacc.initialize enables it; without one `strategy` may be set at any time. Under ZeRO-3
    the blocks are leaf modules in either case: gathering their parameters one by one takes longer.
    """

    def __init__(
        self, name: str, size: Size, device: torch.device, stage: int = 1, section: Mapping[str, Any] | None = None
    ) -> None:
        self.size, self.device = size, device
        self.batch = text(size, device)
        model = build(name, size, device)
        config = {
            "train_micro_batch_size_per_gpu": size.batch,
            "bf16": {"enabled": precision(device) is torch.bfloat16},
            # The default bucket of 5e8 elements is allocated in backward, and would hide what activations take.
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000},
            "steps_per_print": 1 << 30,
        }
        if section is not None:
            config["adacc"] = dict(section)
        if stage == 3 and section is None:
            set_z3_leaf_modules(model, [type(model.blocks[0])])
        # DeepSpeed's own fused optimizer would be compiled first. This one is torch's.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.engine, *_ = ds_adacc.initialize(model=model, optimizer=optimizer, config=config)
        self.strategy = Strategy() if section is None else Attached(self.engine.adacc)

    def begin(self) -> None:
        """Take the first steps, and learn nothing from then on."""
        for _ in range(LEARNING_STEPS):
            self.step()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 0.0

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # ds_adacc.initialize has taken the blocks' forwards into its own hands
        self.engine.module.checkpoint = None if isinstance(strategy, Attached) else strategy.checkpoint

    def step(self) -> Tensor:
        """One optimizer step; returns the loss."""
        loss = self._forward_and_backward()
        self._end()
        return loss

    def _forward_and_backward(self) -> Tensor:
        loss = self.engine(*self.batch)
        self.engine.backward(loss)
        return loss.detach()

    def _end(self) -> None:
        self.engine.step()
        self.strategy.end_step()

    def settle(self, least: int = 0) -> None:
        """At least so many steps, and until the next one is steady. Raises RuntimeError if none ever is."""
        for taken in range(least + PATIENCE):
            if taken >= least and self.strategy.is_steady:
                return
            self.step()
        raise never_steady(least + PATIENCE)

    def measured(self, steps: int, beside: Strategy | None = None) -> Row:
        """What steady steps take: tokens a second, the median; the peak of activations, and of all allocations.

        `beside`: another strategy, which takes as many steps in turns with this one. `relative_speed` is then the speed
        over that of the other one, the median of the rounds; `_low` and `_high` are the range that it is known to.
        """
        memory = PeakMemory(self.device)
        memory.start()
        self.settle(WARM_UP_STEPS)
        first_steps_peak = memory.peak_bytes()
        release(self.device)
        self.settle(WARM_UP_STEPS)  # the allocator's cache fills again
        memory.start()
        self.step()
        allocated, level = allocator(self.device), memory.level
        taken = self._in_turns(steps, beside)
        mine = [each.computing for each in taken["mine"]]
        step_seconds = statistics.median(mine)
        return {
            "tokens_per_second": self.size.tokens / step_seconds,
            **_speed_of(mine, [each.computing for each in taken.get("beside", ())]),
            "step_seconds": step_seconds,
            "slowest_step_seconds": max(mine),
            "wall_step_seconds": statistics.median(each.wall for each in taken["mine"]),
            "level_bytes": level,
            "peak_bytes": self.activation_peak(memory),
            "first_steps_peak_bytes": first_steps_peak,
            **allocated,
            "loss": self.step().item(),
            **self.strategy.about(),
        }

    def _in_turns(self, rounds: int, beside: Strategy | None) -> dict[str, list[Seconds]]:
        """What steady steps take: "mine" under the strategy, and "beside" under the other one."""
        strategies = {"mine": self.strategy} | ({} if beside is None else {"beside": beside})

        def timed(strategy: Strategy) -> Seconds:
            self.strategy = strategy
            self.settle()
            return seconds(self.step, self.device)

        if beside is not None:
            timed(beside)  # the allocator's cache grows to what this one needs
        try:
            return in_turns({name: partial(timed, each) for name, each in strategies.items()}, rounds)
        finally:
            self.strategy = strategies["mine"]

    def activation_peak(self, memory: PeakMemory) -> int:
        """The peak of a forward and backward in a steady step, in bytes above the level before it.

        Three micro-batches make up this step. The first makes the gradients, so that the second, which is measured, has
        no part in them; nor has it in what DeepSpeed and the optimizer take at the end of the third.
        """
        self.settle()
        self.engine.set_gradient_accumulation_boundary(False)
        self._forward_and_backward()
        memory.start()
        self._forward_and_backward()
        peak = memory.peak_bytes()
        self.engine.set_gradient_accumulation_boundary(True)
        self.step()
        return peak

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter in a steady step, in host memory."""
        self.settle()
        self._forward_and_backward()
        found = [safe_get_full_grad(parameter).cpu() for parameter in self.engine.module.parameters()]
        self._end()
        return found

    def gradient_error(self, exact: Sequence[Tensor]) -> float:
        """‖g - g₀‖ / ‖g₀‖ of the whole gradient g of a steady step, with g₀ = `exact`. A tensor at a time is alive."""
        self.settle()
        self._forward_and_backward()
        errors, norms = [], []
        for parameter, expected in zip(self.engine.module.parameters(), exact, strict=True):
            expected = expected.to(self.device)
            errors.append((safe_get_full_grad(parameter) - expected).norm())
            norms.append(expected.norm())
        self._end()
        return (torch.stack(errors).double().norm() / torch.stack(norms).double().norm()).item()

    def close(self) -> None:
        """Let go of the engine, so that another one has its memory."""
        self.engine.destroy()
        self.engine = self._strategy = self.batch = None
        _forget_zero3_models()
        release(self.device)


def _forget_zero3_models() -> None:
    """Empty the two places where DeepSpeed 0.19 keeps every model of ZeRO-3, with its optimizer, as long as it runs."""
    parameter_offload.FWD_MODULE_STACK.clear()  # the whole model is put there, and never taken away
    # A method with an lru_cache, which holds the object that it is called on. The cache is inside of a wrapper.
    wrapper = getattr(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__params_to_release", None)
    caches = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    cleared = [cache.cache_clear() for cache in caches if hasattr(cache, "cache_clear")]
    if not cleared:
        print("this DeepSpeed keeps models of ZeRO-3 elsewhere: they may stay in memory", file=sys.stderr)


def _speed_of(mine: Sequence[float], base: Sequence[float]) -> Row:
    """The speed of steps as a share of those of the same rounds, with its range; nothing if there are none."""
    if not base:
        return {}
    ratio = Ratio.of(base, mine)
    return {"relative_speed": ratio.median, "relative_speed_low": ratio.low, "relative_speed_high": ratio.high}


def release(device: torch.device) -> None:
    """Free what nobody uses, the allocator's cache included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocator(device: torch.device) -> Row:
    """The peaks of the CUDA allocator since memory was last measured, in bytes, weights and optimizer included."""
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
