"""Measure strategies on the GPT of train.py: a run of one, with its peak memory, or the time of several in turns.

deepspeed --num_gpus 1 examples/measure.py run RESULT CONFIG [options of train.py]
deepspeed --num_gpus 1 examples/measure.py time RESULT CONFIG CONFIG... [options of train.py]

A strategy is a ds_config; the first one of `time` is the base of the gradient errors. RESULT is a JSON file to write.
Memory and time are those of steady steps: a plan is in force, and nothing is recorded, tried or tracked.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from memory import PeakMemory
from timing import Seconds, in_turns, seconds
from torch import Tensor
from train import (
    Batch,
    add_model_options,
    batches,
    build_model,
    deepspeed_checkpoint,
    read_texts,
    train_step,
    validate,
)

import ds_adacc
from ds_adacc import planner
from ds_adacc.compact.projection import lifted
from ds_adacc.environment import device_name
from ds_adacc.steps.step_schedule import Purpose

WARM_UP_STEPS = 3  # the optimizer's states are allocated, and allocators settle
PATIENCE = 60  # steps without a steady one among them


class Training:
    """A model under a ds_config, with the steps that it takes."""

    def __init__(self, config: str, args: argparse.Namespace) -> None:
        model = build_model(args, deepspeed_checkpoint(config))
        self.engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
        if deepspeed.comm.get_world_size() == 1 and self.engine.zero_optimization_stage() == 0:
            # There is nothing to reduce. DeepSpeed would copy all gradients at the end of backward all the same, which
            # is the peak of a step whose activations take less.
            self.engine.enable_backward_allreduce = False
        training, self.validation = read_texts(args.data)
        self.data = batches(self.engine, training, args.context, args.seed)
        self.adacc = getattr(self.engine, "adacc", None)

    @property
    def is_steady(self) -> bool:
        """Whether the next step is one of the many: it only trains."""
        return self.adacc is None or self.adacc.runtime.controller.step.purpose is Purpose.RUN

    def step(self) -> float:
        return train_step(self.engine, self.data)

    def timed_step(self) -> Seconds:
        """What the next steady step takes."""
        self.settle()
        return seconds(self.step, self.engine.device)

    def settle(self, least: int = 0) -> None:
        """At least so many steps, and until the next one is steady. Raises RuntimeError if none ever is."""
        for taken in range(least + PATIENCE):
            if taken >= least and self.is_steady:
                return
            self.step()
        raise never_steady(least + PATIENCE)

    def measured_step(self, memory: PeakMemory) -> tuple[float, int]:
        """A step; returns its loss, and the peak of its forward and backward in bytes.

        The gradients are there before the level is taken: every strategy holds the same ones. What the optimizer takes
        is no activation.
        """
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        tokens, targets = next(self.data)
        memory.start()
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        peak = memory.peak_bytes()
        self.engine.step()
        return loss.item(), peak

    def gradient(self, batch: Batch) -> Tensor:
        """The gradient of all parameters in a step on this batch, as one vector of float64.

        For a weight that CompAct trains it is what the projected gradient tells of it: G Pᵀ.
        """
        self.engine.backward(self.engine(*batch))
        served = self.adacc.compact.layers.values() if self.adacc is not None and self.adacc.compact is not None else ()
        by_weight = {id(layer.weight): layer for layer in served}
        proxies = {id(layer.compact_update) for layer in served}
        gradients = []
        for parameter in self.engine.module.parameters():
            if id(parameter) in by_weight:
                layer = by_weight[id(parameter)]
                gradients.append(lifted(safe_get_full_grad(layer.compact_update), layer.rows, layer.columns))
            elif id(parameter) not in proxies:
                gradients.append(safe_get_full_grad(parameter))
        self.engine.step()
        return torch.cat([gradient.flatten().double() for gradient in gradients])

    def about(self) -> dict[str, int | None]:
        """The plan in force, in bytes: its peak, that of no checkpointing, and what was held when backward began."""
        plan = self.adacc and self.adacc.runtime.controller.plan
        return {
            "planned_peak_bytes": plan and plan.peak,
            "planned_without_bytes": plan and plan.without,
            "held_bytes": self.adacc and self.adacc.observed_held_bytes,
        }


def never_steady(steps: int) -> RuntimeError:
    return RuntimeError(f"none of {steps} steps only trained; the log tells what they did")


def measure_run(config: str, args: argparse.Namespace) -> dict[str, object]:
    """The losses of a run, and the peaks in bytes of its steady steps and of all others.

    If a steady step takes more than `args.at_most` bytes, the run ends there, and its peak is all that is returned. If
    no plan fits the budget, the smallest one that would is all.
    """
    training = Training(config, args)
    memory = PeakMemory(training.engine.device)
    losses, steady, others = [], [], []
    try:
        while len(losses) < args.steps or not steady:
            if len(losses) >= args.steps + PATIENCE:
                raise never_steady(len(losses))
            is_steady = len(losses) >= WARM_UP_STEPS and training.is_steady
            loss, peak = training.measured_step(memory)
            losses.append(loss)
            (steady if is_steady else others).append(peak)
            if is_steady and args.at_most is not None and peak > args.at_most:
                return {"peak_bytes": peak}
    except planner.InfeasibleBudget as error:
        return {"infeasible": True, "smallest_bytes": error.smallest}
    return {
        "losses": losses,
        "validation_loss": validate(training.engine, training.validation, args.context),
        "peak_bytes": max(steady),
        "first_steps_peak_bytes": max(others),
        **training.about(),
    }


def measure_time(configs: list[str], args: argparse.Namespace) -> dict[str, object]:
    """What some steady steps of each strategy took, in seconds, and its gradient error, by the config's name.

    The gradient error is ‖g - g₀‖ / ‖g₀‖ on one batch, with g₀ and the weights those of the first strategy. If g is not
    finite, it is None.
    """
    trainings = {Path(config).stem: Training(config, args) for config in configs}
    for training in trainings.values():
        training.settle(WARM_UP_STEPS)
    taken = in_turns({name: training.timed_step for name, training in trainings.items()}, args.steps)
    base = next(iter(trainings.values()))
    weights = {name: value.clone() for name, value in base.engine.module.state_dict().items()}
    batch = next(base.data)
    exact = base.gradient(batch)
    return {
        name: {
            "seconds": [asdict(each) for each in taken[name]],
            "gradient_error": gradient_error(training, weights, batch, exact),
            **training.about(),
        }
        for name, training in trainings.items()
    }


def gradient_error(training: Training, weights: dict[str, Tensor], batch: Batch, exact: Tensor) -> float | None:
    """How far the gradient of a steady step at these weights is from the exact one, as a fraction of its norm."""
    training.settle()
    training.engine.module.load_state_dict(weights)
    error = ((training.gradient(batch) - exact).norm() / exact.norm()).item()
    return error if error < float("inf") else None  # not so for NaN either


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time"))
    parser.add_argument("result", type=Path)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=3, help="of a run, or steady ones to time (default: 3)")
    parser.add_argument("--at-most", type=int, help="bytes: end a run whose steady steps take more")
    add_model_options(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    found = measure_run(args.configs[0], args) if args.what == "run" else measure_time(args.configs, args)
    device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
    args.result.write_text(json.dumps({"device": device_name(device), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
