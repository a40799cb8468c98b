"""One run of accuracy.py: the exact steps of a seed, an injection, and the steps under an arm.

A run writes one row of JSON a line: steps with their losses, validations, gradient errors, plans, what was observed of
a plan, and how the run ended. The blocks run through a `Runtime` whose steps end where an engine's would, so plans
change and the rectifier looks as they do with DeepSpeed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from injections import INJECTIONS, inject, kill_units
from train import GPT, read_texts

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

EXACT = "none"  # the arm that the others are compared with
BUDGET = 0.3  # of the peak without checkpointing
SMALLEST = 0.0  # stands for the smallest budget that the planner says is feasible
ARMS: Mapping[str, dict[str, Any] | None] = {
    EXACT: None,
    "quantization": {"codecs": "quantization"},
    "paper-no-outliers": {"codecs": "paper-no-outliers"},
    "paper-unbounded": {"codecs": "paper", "max_gradient_error": None},
    "paper": {"codecs": "paper"},
    "auto": {"codecs": "auto"},
    "auto-smallest": {"codecs": "auto", "memory_budget": SMALLEST},
}
SETTLE = 3  # passes before the first gradient is judged: record, observe the plan, observe a corrected plan
LOOKS = 4  # validations after the injection, the last one at the end
# Batches are drawn from (seed, position). No seed of a run is this one, and no step has position 0.
VALIDATION_SEED, PROBE = 10**6, 0
# Parts of the model by a piece of their parameters' names; "" is any other.
PARTS = {"attention.qkv": "q, k, v", "attention.projection": "attention out", "mlp": "MLP", "norm": "norms", "": "rest"}

Batch = tuple[Tensor, Tensor]
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    exact: int
    steps: int
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 8
    validation_batches: int = 8
    warm_up: int = 50
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Run:
    """One injection, one arm, one seed."""

    injection: str
    arm: str
    seed: int

    def file(self, work: Path) -> Path:
        """The file of its rows. It has this name only once the run has ended."""
        return work / f"{self.injection}.{self.arm}.{self.seed}.jsonl"


class Training:
    """A model with its optimizer and its data. `checkpoint` runs its blocks; None: exactly, by plain autograd."""

    def __init__(self, setting: Setting, seed: int) -> None:
        torch.manual_seed(seed)
        self.setting, self.seed = setting, seed
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = GPT(setting.layers, setting.width, setting.heads, setting.context).to(self.device)
        kill_units(self.model)
        self.frozen = inject(self.model, INJECTIONS["plain"])
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=setting.learning_rate, betas=(0.9, 0.95))
        self.text, self.validation_text = read_texts(None)

    def inject(self, name: str) -> None:
        self.frozen = inject(self.model, INJECTIONS[name])

    def batch(self, text: Tensor, seed: int, position: int) -> Batch:
        context = self.setting.context
        starts = np.random.default_rng((seed, position)).integers(len(text) - context, size=self.setting.batch)
        windows = torch.stack([text[start : start + context + 1] for start in starts]).to(self.device, torch.long)
        return windows[:, :-1], windows[:, 1:]

    def step(self, number: int) -> float:
        """The optimizer step with this number, counted from 1 with the exact ones. Returns the loss."""
        loss = self._backward(number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.learning_rate * min(1.0, number / self.setting.warm_up)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.frozen.restore()
        return loss

    def gradients(self) -> Gradients:
        """The gradients of the same batch at every call, by the name of the parameter."""
        self._backward(PROBE)
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def validate(self) -> float:
        positions = range(self.setting.validation_batches)
        losses = [self.model(*self.batch(self.validation_text, VALIDATION_SEED, position)) for position in positions]
        return torch.stack(losses).mean().item()

    def _backward(self, position: int) -> float:
        self.optimizer.zero_grad(set_to_none=False)  # gradients made in backward would count as the blocks' memory
        loss = self.model(*self.batch(self.text, self.seed, position))
        loss.backward()
        self.frozen.silence()
        return loss.item()


def warm_up_file(work: Path, seed: int) -> Path:
    return work / f"exact.{seed}.pt"


def warm_up(setting: Setting, seed: int, work: Path) -> None:
    """The exact steps of a seed, unless they are on disk."""
    file = warm_up_file(work, seed)
    if file.exists():
        return
    training = Training(setting, seed)
    for number in range(1, setting.exact + 1):
        training.step(number)
    partial = file.with_suffix(".part")
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, partial)
    partial.rename(file)


def warmed_up(setting: Setting, seed: int, work: Path) -> Training:
    """The training of a seed as its exact steps left it."""
    training = Training(setting, seed)
    state = torch.load(warm_up_file(work, seed), map_location=training.device)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.frozen = inject(training.model, INJECTIONS["plain"])
    return training


class Arm:
    """The runtime of an arm, and the rows that tell of its plans."""

    def __init__(self, section: dict[str, Any], training: Training) -> None:
        self.training = training
        self.section = {"memory_budget": BUDGET, **section}
        self.plan = self.seen = None
        if self.section["memory_budget"] == SMALLEST:
            self.section["memory_budget"] = self._smallest_budget()
        self._open()

    def end_step(self) -> Iterator[dict[str, Any]]:
        """End the optimizer step. Yields rows for a new plan, and for what was observed of it."""
        controller = self.runtime.controller
        controller.end_step()
        if controller.plan is not self.plan:
            self.plan = plan = controller.plan
            yield {"plan": {"reason": plan.reason, "held": plan.held, "peak": plan.peak, "without": plan.without}}
        if controller.observation is not self.seen and controller.observation is not None:
            peak = controller.observation.peak and controller.observation.peak.observed
            yield {"seen": {"held": controller.observation.held.observed, "peak": peak}}
        self.seen = controller.observation

    def settle(self) -> Iterator[dict[str, Any]]:
        """Passes without an optimizer step, until the plan is in force and observed. Yields what `end_step` does."""
        for _ in range(SETTLE):
            self.training.gradients()
            yield from self.end_step()

    def judge(self) -> Iterator[dict[str, Any]]:
        """Yield a row with the gradient errors of one batch by part of the model, beside plain autograd.

        A tracking step is passed first, and rows of it are yielded: it records blocks anew.
        """
        while self.runtime.controller.step.is_tracking:
            self.training.gradients()
            yield from self.end_step()
        lossy = self.training.gradients()
        self.training.model.checkpoint = None
        exact = self.training.gradients()
        self.training.model.checkpoint = self.runtime.checkpoint
        yield {"gradient_errors": relative_errors(lossy, exact)}

    def _open(self) -> None:
        self.runtime = Runtime(load({"adacc": self.section}), has_engine=True)
        self.training.model.checkpoint = self.runtime.checkpoint

    def _smallest_budget(self) -> int:
        """The bytes that the planner names when it refuses a budget that nothing fits."""
        self.section["memory_budget"] = 1 << 20
        self._open()
        try:
            list(self.settle())
        except planner.InfeasibleBudget as error:
            return error.smallest
        return 1 << 20


def relative_errors(lossy: Gradients, exact: Gradients) -> dict[str, float | None]:
    """‖g - g₀‖ / ‖g₀‖ over the parameters of each part, and over the "whole" model; None: not finite."""
    squares = {part: [0.0, 0.0] for part in ("whole", *PARTS.values())}
    for name, g0 in exact.items():
        part = next(part for piece, part in PARTS.items() if piece in name)
        off = (lossy[name].double() - g0.double()).square().sum().item()
        norm = g0.double().square().sum().item()
        for each in ("whole", part):
            squares[each][0] += off
            squares[each][1] += norm
    return {part: finite_or_none(math.sqrt(off / norm)) for part, (off, norm) in squares.items()}


def finite_or_none(number: float) -> float | None:
    """JSON has neither Inf nor NaN."""
    return number if math.isfinite(number) else None


def run(setting: Setting, one: Run, work: Path) -> None:
    """Write the rows of one run, unless they are on disk: steps, validations, plans, and how it ended."""
    file = one.file(work)
    if file.exists():
        return
    started = time.perf_counter()
    partial = file.with_suffix(".part")
    with partial.open("w") as rows:
        training = warmed_up(setting, one.seed, work)
        training.inject(one.injection)
        try:
            end = train(training, ARMS[one.arm], rows)
        except planner.InfeasibleBudget as error:
            end = {"end": "infeasible", "smallest": error.smallest}
        write(rows, **end, seconds=time.perf_counter() - started, torch=torch.__version__)
    partial.rename(file)


def train(training: Training, section: dict[str, Any] | None, rows: TextIO) -> dict[str, Any]:
    """The steps after the injection. A loss that is not finite ends them. Returns the last row."""
    setting = training.setting
    arm = None if section is None else Arm(section, training)
    for row in () if arm is None else arm.settle():
        write(rows, step=0, **row)
    write(rows, step=0, validation_loss=training.validate())
    for row in () if arm is None else arm.judge():
        write(rows, step=0, **row)
    looks = {setting.steps * look // LOOKS for look in range(1, LOOKS + 1)}
    for step in range(1, setting.steps + 1):
        loss = training.step(setting.exact + step)
        if not math.isfinite(loss):
            return {"end": "diverged", "step": step}
        write(rows, step=step, loss=loss)
        for row in () if arm is None else arm.end_step():
            write(rows, step=step, **row)
        if step in looks:
            validation_loss = training.validate()
            if not math.isfinite(validation_loss):
                return {"end": "diverged", "step": step}
            write(rows, step=step, validation_loss=validation_loss)
    for row in () if arm is None else arm.judge():
        write(rows, step=setting.steps, **row)
    return {"end": "finished"}


def write(rows: TextIO, **values: object) -> None:
    """One row, at once: others may be reading along."""
    print(json.dumps(values, allow_nan=False), file=rows, flush=True)
