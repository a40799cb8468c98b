"""Train on batches of varying sizes: plainly, with gradient checkpointing, and with ds_adacc.

    python benchmarks/lengths.py --out benchmarks/results

Every step runs the same batch three times, one after the other, on three copies of the model in one process of one
thread: plainly, under torch.utils.checkpoint (every block), and under ds_adacc. What counts is the process's CPU time,
without that of the solver, which has a process of its own. So the ratios hold on a busy machine. Codecs are lossless:
every gradient of ds_adacc is compared with the plain one, bit for bit. Results of other programs stay in the files.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from origin import origin
from varying import PROGRAMS, Program, Size

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

FIRST = 60  # steps of a fine-tuning run in which its user decides whether to stay
FEW = 6  # sizes: each gets a line of its own


@dataclass(frozen=True)
class Step:
    """CPU seconds of one step, each way."""

    size: Size
    plain: float
    checkpointed: float
    ours: float
    is_first: bool  # at this size

    @property
    def ratio(self) -> float:
        return self.ours / self.plain


@dataclass(frozen=True)
class Row:
    """CPU seconds over those of plain steps: of the first 60 steps together, and medians of steps.

    `new_size`: the steps whose size was met for the first time, after the first three sizes. `known_size`: all later
    ones. `recordings`: of blocks. `is_exact`: all gradients have the bits of plain steps. `by_size`: if there are few
    sizes, each one's first ratio and the median of the later ones. `about`: where the figures come from.
    """

    program: str
    steps: int
    first_60: float
    first_60_checkpointing: float
    new_size: float | None
    known_size: float | None
    checkpointing: float
    recordings: int
    plans: int
    is_exact: bool
    by_size: Mapping[str, Sequence[float | None]]
    about: Mapping[str, str]


class Copies:
    """A program's model three times, with the same weights."""

    def __init__(self, program: Program, budget: float) -> None:
        self.program = program
        self.plain, self.checkpointed, self.model = (copy.deepcopy(program.model) for _ in range(3))
        for block in find_blocks(self.checkpointed, "auto").values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.runtime = Runtime(load({"adacc": {"memory_budget": budget, "codecs": "none"}}), has_engine=True)
        blocks = find_blocks(self.model, "auto")
        wrap_blocks(blocks, self.runtime)
        self.adacc = Adacc(self.runtime, blocks)

    def step(self, number: int, size: Size, is_first: bool) -> tuple[Step, bool]:
        """One step each way; and whether the gradients of the plain way and ours are the same."""
        torch.manual_seed(number)
        batch = self.program.batch(size)
        seconds = [
            self._run(model, number, size, batch, after)
            for model, after in (
                (self.plain, nothing),
                (self.checkpointed, nothing),
                (self.model, nothing if self.program.is_evaluation(size) else self.adacc.end_step),
            )
        ]
        pairs = zip(self.plain.parameters(), self.model.parameters(), strict=True)
        is_exact = all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)
        return Step(size, *seconds, is_first), is_exact

    def warm_up(self) -> None:
        """Two plain steps of the largest size, for the libraries."""
        for _ in range(2):
            self._run(self.plain, 0, self.program.largest, self.program.batch(self.program.largest), nothing)

    def _run(
        self, model: nn.Module, seed: int, size: Size, batch: dict[str, Tensor], after: Callable[[], None]
    ) -> float:
        is_evaluation = self.program.is_evaluation(size)
        model.train(not is_evaluation).zero_grad()
        torch.manual_seed(seed)
        began = time.process_time()
        with torch.no_grad() if is_evaluation else nullcontext():
            loss = model(**batch)
        if not is_evaluation:
            loss.backward()
        after()
        return time.process_time() - began


def measure(name: str, count: int, budget: float) -> Row:
    """So many steps of a program."""
    torch.manual_seed(0)
    copies = Copies(PROGRAMS[name](), budget)
    copies.warm_up()
    met: set[Size] = set()
    plan, plans, steps, is_exact = None, 0, [], True
    for number, size in enumerate(islice(copies.program.sizes, count)):
        step, is_same = copies.step(number, size, size not in met)
        met.add(size)
        steps.append(step)
        plans += copies.runtime.controller.plan is not plan
        plan = copies.runtime.controller.plan
        is_exact &= is_same
    first = steps[:FIRST]
    return Row(
        program=name,
        steps=count,
        first_60=sum(s.ours for s in first) / sum(s.plain for s in first),
        first_60_checkpointing=sum(s.checkpointed for s in first) / sum(s.plain for s in first),
        new_size=_median(step.ratio for step in steps[3:] if step.is_first),
        known_size=_median(step.ratio for step in steps if not step.is_first),
        checkpointing=statistics.median(step.checkpointed / step.plain for step in steps),
        recordings=copies.runtime.recordings,
        plans=plans,
        is_exact=is_exact,
        by_size={_named(size): _by_size(steps, size) for size in met} if len(met) <= FEW else {},
        about=origin("CPU, one thread") | {"budget": str(budget)},
    )


def _named(size: Size) -> str:
    return ", ".join(map(str, size)) if isinstance(size, tuple) else str(size)


def _by_size(steps: Sequence[Step], size: Size) -> list[float | None]:
    first, *later = (step.ratio for step in steps if step.size == size)
    return [first, _median(later)]


def _median(ratios: Iterable[float]) -> float | None:
    found = [*ratios]
    return statistics.median(found) if found else None


def nothing() -> None:
    pass


def table(rows: Iterable[Row]) -> str:
    """The rows for people."""
    header = ["program", "steps", "first 60 steps", "of checkpointing"]
    header += ["new size", "known size", "of checkpointing", "blocks recorded", "plans", "exact"]
    lines = []
    for row in rows:
        ratios = [row.first_60, row.first_60_checkpointing, row.new_size, row.known_size, row.checkpointing]
        cells = [row.program, row.steps, *map(_shown, ratios)]
        lines.append([*cells, row.recordings, row.plans, "yes" if row.is_exact else "no"])
    return markdown_table(header, lines)


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def by_size(rows: Iterable[Row]) -> str:
    """The ratios of programs of few sizes, size by size."""
    lines = []
    for row in rows:
        if len(row.by_size) > 1:
            for size, (first, later) in sorted(row.by_size.items()):
                lines.append([row.program, size, _shown(first), _shown(later)])
    return markdown_table(["program", "size", "first time", "later"], lines)


def read(path: Path) -> dict[str, Row]:
    """The rows of a file of results, by program."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {row["program"]: Row(**row) for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for lengths.md and lengths.json")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--budget", type=float, default=0.5, help="of the largest peak without checkpointing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ds_adacc").setLevel(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = read(args.out / "lengths.json")
    for name in args.programs:
        rows[name] = measure(name, args.steps, args.budget)
        (args.out / "lengths.json").write_text(json.dumps([asdict(row) for row in rows.values()], indent=2) + "\n")
        told = "\n".join(f"- {row.program}: {', '.join(row.about.values())}" for row in rows.values())
        (args.out / "lengths.md").write_text(f"{table(rows.values())}\n\n{by_size(rows.values())}\n\n{told}\n")
    print(table(rows.values()))


if __name__ == "__main__":
    main()
