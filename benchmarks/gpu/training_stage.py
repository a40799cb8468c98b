"""Stage `training`: a GPT and a LLaMA under every strategy, beside no checkpointing, in one process.

Each model has one engine. The timed steps of each strategy take turns with steps without checkpointing. What matters
most comes first, and each model has half of the time. ds_adacc's budgets are fractions of the peak without
checkpointing, and what the blocks take at the peak of other strategies. For compiled blocks these are compiled, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import stage
import torch
from models import LARGE, MODELS, SMALL
from rows import Row, Rows
from strategy import Compiled, Full, OffloadedInputs, Ours, Selective, Strategy
from torch import Tensor
from trainer import Trainer, release

from ds_adacc import planner

NONE, FULL, SELECTIVE, EVERYTHING = "none", "full", "selective", "ours 1.0"
COMPILED = "compiled"
FRACTIONS = (0.4, 0.6)
CODECS = {"lossless": "none", "default": "auto"}
OFFLOAD = {", offload": True, "": False}
MEMORY_BUDGETS = (0.5, 0.2)  # of torch.compile
COMPILE_SECONDS = 25.0
REHEARSED = {
    "GPT": (
        NONE,
        FULL,
        SELECTIVE,
        EVERYTHING,
        "ours lossless, in the peak of full",
        "full, inputs offloaded",
        "ours default, 0.4, offload",
        "compiled",
        "compiled, full",
        "compiled, ours 1.0",
        "compiled, 0.5, ours default, in the peak of compiled, full",
    ),
    "LLaMA": (NONE, EVERYTHING),
}

Job = tuple[str, Callable[[], Row], float]


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    comparisons = [Comparison(name, rows, device, rehearses) for name in MODELS]
    comparisons = [each for each in comparisons if any(rows.wants(f"{each.name} {row}") for row, *_ in each.jobs())]
    share = rows.seconds_left / max(len(comparisons), 1)
    for number, comparison in enumerate(comparisons, start=1):
        name = comparison.name
        for row, job, least in comparison.jobs():
            if rehearses and row not in REHEARSED[name]:
                continue
            rows.measure(f"{name} {row}", job, f"{name} {row.split()[0]}", least, share * (len(comparisons) - number))
            release(device)
        comparison.close()


def unchanged(strategy: Strategy) -> Strategy:
    return strategy


class Comparison:
    """The rows of one model."""

    def __init__(self, name: str, rows: Rows, device: torch.device, rehearses: bool) -> None:
        self.name, self.rows, self.device, self.rehearses = name, rows, device, rehearses
        self.trainer: Trainer | None = None
        self.exact: list[Tensor] = []

    def jobs(self) -> Iterator[Job]:
        """The names of the rows, what measures them, and the least seconds that each takes."""
        yield NONE, partial(self.under, Strategy), 0.0
        yield FULL, partial(self.under, Full), 0.0
        yield SELECTIVE, partial(self.under, Selective), 0.0
        yield EVERYTHING, partial(self.ours, memory_budget=1.0, codecs="none", offload=False), 0.0
        yield from self.compiled()
        yield from self.in_peak(SELECTIVE, {"": False}, {"lossless": "none"})
        yield from self.in_peak(FULL, OFFLOAD, CODECS)
        yield "full, inputs offloaded", partial(self.under, OffloadedInputs), 0.0
        for fraction, (words, offload), (name, codecs) in product(FRACTIONS, OFFLOAD.items(), CODECS.items()):
            job = partial(self.ours, memory_budget=fraction, codecs=codecs, offload=offload)
            yield f"ours {name}, {fraction}{words}", job, 0.0

    def compiled(self) -> Iterator[Job]:
        """Rows of blocks that torch.compile has compiled."""
        backend = "aot_eager_decomp_partition" if self.rehearses else "inductor"
        around = partial(Compiled, backend=backend)
        yield COMPILED, partial(self.under, lambda: around(Strategy())), COMPILE_SECONDS
        yield f"{COMPILED}, {FULL}", partial(self.under, lambda: around(Full())), COMPILE_SECONDS
        job = partial(self.ours, around, memory_budget=1.0, codecs="none", offload=False)
        yield f"{COMPILED}, {EVERYTHING}", job, COMPILE_SECONDS
        yield from self.in_peak(f"{COMPILED}, {FULL}", OFFLOAD, CODECS, f"{COMPILED}, ", around)
        for budget in MEMORY_BUDGETS:
            name = f"{COMPILED}, {budget}"
            yield name, partial(self.under, partial(Compiled, Strategy(), backend, budget)), COMPILE_SECONDS
            yield from self.in_peak(name, OFFLOAD, CODECS, f"{COMPILED}, ", around)
            both = partial(Compiled, backend=backend, budget=budget)
            yield from self.in_peak(f"{COMPILED}, {FULL}", OFFLOAD, CODECS, f"{name}, ", both)

    def in_peak(
        self,
        strategy: str,
        offloads: Mapping[str, bool],
        codecs: Mapping[str, str],
        prefix: str = "",
        around: Callable[[Strategy], Strategy] = unchanged,
    ) -> Iterator[Job]:
        """Rows of ds_adacc in the peak of another strategy; `around`: what is to be put around it, named `prefix`."""
        least = COMPILE_SECONDS if prefix else 0.0
        for (words, offload), (name, chosen) in product(offloads.items(), codecs.items()):
            section = {"codecs": chosen, "offload": offload}
            job = partial(self.in_the_peak_of, strategy, around, **section)
            yield f"{prefix}ours {name}, in the peak of {strategy}{words}", job, least

    def under(self, make: Callable[[], Strategy]) -> Row:
        """The figures of a strategy, with its shares of the speed and of the memory without checkpointing."""
        trainer = self.started()
        try:
            trainer.strategy = make()
            row = trainer.measured(steps=2 if self.rehearses else 10, beside=Strategy())
            row["gradient_error"] = trainer.gradient_error(self.exact)
            trainer.strategy = Strategy()
        except planner.InfeasibleBudget:  # it ends a step
            trainer.strategy = Strategy()
            raise
        except BaseException:
            self.close()  # it may be in the middle of a step; the next row makes another
            raise
        return {
            **self.rows.shares(row, f"{self.name} {NONE}", NONE),
            **self.rows.shares(row, f"{self.name} {COMPILED}", COMPILED),
            **row,
        }

    def started(self) -> Trainer:
        """The trainer; it is made anew after a failure, and the exact gradient with it."""
        if self.trainer is None:
            self.trainer = Trainer(self.name, SMALL if self.rehearses else LARGE, self.device)
            self.trainer.begin()
            self.exact = self.trainer.gradients()
        return self.trainer

    def ours(self, around: Callable[[Strategy], Strategy] = unchanged, **section: Any) -> Row:
        """ds_adacc under this section; `around`: what is to be put around it."""
        try:
            return self.under(lambda: around(Ours(section)))
        except planner.InfeasibleBudget as error:
            return {"infeasible": str(error), "budget_bytes": error.budget, "smallest_bytes": error.smallest}

    def in_the_peak_of(self, strategy: str, around: Callable[[Strategy], Strategy], **section: Any) -> Row:
        """ds_adacc in the peak of another strategy; if no plan fits that, in the smallest budget that one does."""
        row = self.ours(around, memory_budget=self.blocks_bytes(strategy), **section)
        if "infeasible" in row:
            row = {"is_smallest": True, **self.ours(around, memory_budget=row["smallest_bytes"], **section)}
        if "infeasible" in row:
            return row
        return {**self.rows.shares(row, f"{self.name} {strategy}", strategy), **row}

    def blocks_bytes(self, strategy: str) -> int:
        """The bytes of the blocks in the peak of a strategy.

        That of a step has more: logits, gradients, buckets. How much is known without checkpointing.
        """
        none, everything = (NONE, EVERYTHING) if COMPILED not in strategy else (COMPILED, f"{COMPILED}, {EVERYTHING}")
        outside = self.figures(none)["peak_bytes"] - self.figures(everything)["planned_without_bytes"]
        return max(self.figures(strategy)["peak_bytes"] - outside, 1 << 20)

    def figures(self, name: str) -> Mapping[str, Any]:
        """The figures of an earlier row. Raises LookupError if there are none."""
        try:
            return self.rows.measured[f"{self.name} {name}"]
        except KeyError:
            raise LookupError(f"this row needs the row {self.name} {name!r}, which has no figures") from None

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer, self.exact = None, []
        torch._dynamo.reset()  # compiled blocks hold on to their model


if __name__ == "__main__":
    stage.run("training", measure)
