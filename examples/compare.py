"""Train a GPT without checkpointing, with DeepSpeed's, with quantization, with Adacc: time, memory, gradients, loss.

python examples/compare.py [--steps N] [--rounds N] [--with-compact] [options of train.py]

Adacc gets the peak memory that DeepSpeed's full checkpointing was measured to take, and then half of it, or the least
that fits if that is more. Losses and memory come from one run of each strategy. Times come from one process in which
all take turns (measure.py); nothing else runs beside it. On a CPU each process has one thread, and two runs go on at
once. Writes the table, the picture, and every run's config, log and result to runs/compare/, in place of what was
there.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from markdown_table import markdown_table
from origin import origin, publish
from picture import draw
from processes import EXACT_MALLOC, KEEPING_MALLOC, ROOT, alone
from timing import Ratio

OUT = ROOT / "runs" / "compare"
BASE, RIVAL = "none", "full_checkpointing"

# Large enough to measure (150 MiB of activations), deep enough for full checkpointing to have its usual advantage, and
# small enough for one thread. The bias makes keys as hard to compress as those of some large models. It leaves the
# function of the model as it is.
MODEL = ["--layers", "12", "--width", "192", "--heads", "6", "--context", "128", "--key-bias", "40"]

ATTEMPTS = 4  # to meet a share of memory
LEAST, MORE = "in the least that fits", "in more than that memory"
MARGIN = 0.02  # of a share that is left free: a plan's peak may be so much above the planned one


@dataclass(frozen=True)
class Strategy:
    """A ready config, and what is changed in its "adacc" section.

    `share` is the part of the rival's measured peak that the strategy may take, `amount` says it in words. Without a
    share the config's own budget holds, if it has one.
    """

    name: str
    label: str
    config: str
    section: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None
    amount: str = ""


STRATEGIES = (
    Strategy(BASE, "no checkpointing", "none"),
    Strategy(RIVAL, "DeepSpeed, full checkpointing", "full_checkpointing"),
    Strategy("lossless", "Adacc, lossless", "adacc", {"codecs": "none"}, 1.0, "in that memory"),
    Strategy("adacc", "Adacc", "adacc", {}, 1.0, "in that memory"),
    Strategy("adacc_half", "Adacc", "adacc", {}, 0.5, "in half of it"),
    Strategy("no_outliers", "Adacc, no outlier separation", "adacc_no_outliers", {}, 1.0, "in that memory"),
    Strategy("quantization", "quantization of everything", "quantization"),
)
COMPACT = Strategy("compact", "Adacc with CompAct, a quarter of the features", "compact", {}, 1.0, "in that memory")
FRONTIER = ("adacc_half", "adacc", BASE)  # Adacc under three budgets: with all the memory of the base it is the base


@dataclass(frozen=True)
class Run:
    """A strategy's run: what measure.py found, and the config that was measured.

    `instead`: if the strategy did not get the share of memory that it was to have, which memory it got, in words.
    """

    config: Path
    found: Mapping[str, Any]
    instead: str = ""


@dataclass(frozen=True)
class Row:
    """What one strategy costs. Ratios are to no checkpointing, sizes in bytes, `step_seconds` of computing.

    `gradient_error` is relative. `losses` are those of training, step by step. None stands for a number that is not
    finite.
    """

    name: str
    label: str
    time: Ratio
    wall: Ratio
    step_seconds: float
    peak_bytes: int
    peak: float
    first_steps_peak_bytes: int
    planned_peak_bytes: int | None
    held_bytes: int | None
    gradient_error: float | None
    validation_loss: float | None
    losses: list[float | None]


def configured(strategy: Strategy, budget: int | None) -> Path:
    """The strategy's config under a budget in bytes, as a file. On one rank there is nothing to partition."""
    config = json.loads((ROOT / "ds_configs" / f"{strategy.config}.json").read_text())
    config["zero_optimization"] = {"stage": 0}
    if "adacc" in config:
        config["adacc"] |= strategy.section
    if budget is not None:
        config["adacc"]["memory_budget"] = budget
    file = OUT / f"{strategy.name}.json"
    file.write_text(json.dumps(config, indent=2) + "\n")
    return file


def fit(share: int, outside: int, measured: Callable[[int, int | None], Mapping[str, Any]]) -> tuple[Any, str]:
    """Run under budgets until the *measured* peak is at most `share` bytes, or nothing smaller fits.

    `measured` runs under a budget, and ends a run that takes more bytes than its second argument. A budget covers the
    activations of the blocks; `outside` is what else the peak has (logits, their gradient). Returns what was measured
    last, and "", or in words what memory that was instead. Raises RuntimeError if not even the smallest budget can be
    met.
    """
    budget, instead = int((1 - MARGIN) * share) - outside, ""
    for attempt in range(1, 2 * ATTEMPTS):
        is_last = instead == LEAST or attempt >= ATTEMPTS
        found = measured(budget, None if is_last else share)
        if "smallest_bytes" in found:
            budget, instead = found["smallest_bytes"], LEAST
        elif instead or found["peak_bytes"] <= share:
            return found, instead
        elif is_last:
            return found, MORE
        else:
            budget -= found["peak_bytes"] - share
    raise RuntimeError(f"no plan fits the smallest budget that was named, {budget} bytes")


class Comparison:
    """The runs of all strategies, with the same options."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        options: Sequence[str],
        steps: int,
        rounds: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.strategies = strategies
        self.options = options
        self.steps = steps
        self.rounds = rounds
        self.pool = pool
        self.started = time.monotonic()
        # Runs that offer the same codecs plan with the same measurements, which the first of them makes.
        self.cache = {"XDG_CACHE_HOME": str(OUT / "cache")}

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self.started:5.0f} s  {what}", flush=True)

    def measure(self, what: str, malloc: Mapping[str, str], result: Path, *arguments: object) -> dict[str, Any]:
        """What measure.py finds with these arguments."""
        command = [what, str(result), *map(str, arguments), *self.options]
        return alone("examples/measure.py", command, malloc | self.cache, result)

    def set_up(self) -> int:
        """Let DeepSpeed build its operator, for most of a minute once, and ds_adacc measure its choices.

        Returns the peak of the blocks' activations without checkpointing, in bytes.
        """
        self.tell("set-up: DeepSpeed builds an operator, ds_adacc measures operators and codecs")
        config = configured(Strategy("setup", "", "adacc"), None)
        found = self.measure("time", KEEPING_MALLOC, OUT / "setup.result.json", config, "--steps", 2)
        return found["setup"]["planned_without_bytes"]

    def run(self, strategy: Strategy, rival: int | None = None, outside: int = 0) -> Run:
        """A strategy's run; `rival` is what the rival was measured to take, and `outside` what no budget covers."""

        def measured(budget: int | None, at_most: int | None) -> Mapping[str, Any]:
            arguments = [configured(strategy, budget), "--steps", self.steps]
            arguments += [] if at_most is None else ["--at-most", at_most]
            found = self.measure("run", EXACT_MALLOC, OUT / f"{strategy.name}.run.json", *arguments)
            size = mebibytes(found.get("peak_bytes"))
            self.tell(f"run of {strategy.name}: {size}, budget {mebibytes(budget)}")
            return found

        if strategy.share is None:
            found, instead = measured(None, None), ""
        else:
            found, instead = fit(int(strategy.share * rival), outside, measured)
        return Run(OUT / f"{strategy.name}.json", found, instead)

    def runs(self, without: int) -> dict[str, Run]:
        """The run of every strategy. The base and the rival come first: they set the budgets.

        `without`: the peak of the blocks' activations without checkpointing, in bytes.
        """
        first = [each for each in self.strategies if each.name in (BASE, RIVAL)]
        others = [each for each in self.strategies if each not in first]
        found = dict(zip((each.name for each in first), self.pool.map(self.run, first), strict=True))
        rival, outside = found[RIVAL].found["peak_bytes"], found[BASE].found["peak_bytes"] - without
        rest = self.pool.map(lambda strategy: self.run(strategy, rival, outside), others)
        return found | dict(zip((each.name for each in others), rest, strict=True))

    def times(self, configs: Sequence[Path]) -> dict[str, Any]:
        """The steps of all strategies, taken in turns."""
        found = self.measure("time", KEEPING_MALLOC, OUT / "time.json", *configs, "--steps", self.rounds)
        self.tell("times")
        return found


def rows_of(strategies: Sequence[Strategy], runs: Mapping[str, Run], times: Mapping[str, Any]) -> list[Row]:
    """One row a strategy. `times` is what measure.py found of all."""
    rows, base = [], times[BASE]
    for strategy in strategies:
        run, mine = runs[strategy.name], times[strategy.name]
        ratios = {
            clock: Ratio.of([s[clock] for s in mine["seconds"]], [s[clock] for s in base["seconds"]])
            for clock in ("computing", "wall")
        }
        rows.append(
            Row(
                name=strategy.name,
                label=label_of(strategy, run.instead),
                time=ratios["computing"],
                wall=ratios["wall"],
                step_seconds=statistics.median(s["computing"] for s in mine["seconds"]),
                peak_bytes=run.found["peak_bytes"],
                peak=run.found["peak_bytes"] / runs[BASE].found["peak_bytes"],
                first_steps_peak_bytes=run.found["first_steps_peak_bytes"],
                planned_peak_bytes=run.found["planned_peak_bytes"],
                held_bytes=run.found["held_bytes"],
                gradient_error=mine["gradient_error"],
                validation_loss=finite(run.found["validation_loss"]),
                losses=[finite(loss) for loss in run.found["losses"]],
            )
        )
    return rows


def row_from(plain: Mapping[str, Any]) -> Row:
    """The row that a recorded result has as plain data."""
    return Row(**plain | {clock: Ratio(**plain[clock]) for clock in ("time", "wall")})


def label_of(strategy: Strategy, instead: str) -> str:
    """What the table calls the strategy."""
    amount = instead or strategy.amount
    return f"{strategy.label}, {amount}" if amount else strategy.label


def markdown(rows: Sequence[Row]) -> str:
    """The table as people read it."""
    header = ["strategy", "peak memory", "of no checkpointing", "time", "wall clock", "held", "gradient error"]
    return markdown_table([*header, "validation loss"], map(cells, rows))


def cells(row: Row) -> list[str]:
    """A row of the table."""
    is_base = row.name == BASE
    return [
        row.label,
        mebibytes(row.peak_bytes),
        f"{row.peak:.2f}",
        "1" if is_base else str(row.time),
        "1" if is_base else str(row.wall),
        mebibytes(row.held_bytes),
        shown(row.gradient_error, ".2g"),
        shown(row.validation_loss, ".3f"),
    ]


def finite(number: float) -> float | None:
    """JSON has neither Inf nor NaN."""
    return number if math.isfinite(number) else None


def shown(number: float | None, form: str) -> str:
    return "not finite" if number is None else format(number, form)


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


NOTE = """\
*Time* is computing time: the CPU time of the process on one thread; on a GPU, the time between two events. It and
the wall clock's are ratios to no checkpointing, of steady steps taken in turns: the median, and its 95 % confidence
interval. ≈ marks a ratio whose interval is wider than its distance from 1, or than 0.06. *Peak memory* is that of
forward and backward in a steady step, above the level before it. *Gradient error* is that of one batch, at the
weights of no checkpointing."""


def save(rows: Sequence[Row], device: str) -> None:
    """The table for people and for programs, and the picture, with where they come from."""
    text = f"{markdown(rows)}\n\n{NOTE}"
    publish(OUT / "demo", origin(device), text, rows=[asdict(row) for row in rows])
    draw(rows, FRONTIER, OUT / "demo.png")
    print(f"\n{text}\n\nTable, picture, configs and logs: {OUT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the runs for the losses (default: 30)")
    parser.add_argument("--rounds", type=int, default=30, help="turns that the strategies take at timing (default: 30)")
    parser.add_argument("--with-compact", action="store_true", help="also Adacc with CompAct's projections")
    args, options = parser.parse_known_args()
    strategies = (*STRATEGIES, COMPACT) if args.with_compact else STRATEGIES
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    # On a GPU, a second process would take part of its time.
    with ThreadPoolExecutor(1 if torch.cuda.is_available() else 2) as pool:
        comparison = Comparison(strategies, [*MODEL, *options], args.steps, args.rounds, pool)
        runs = comparison.runs(comparison.set_up())
        times = comparison.times([run.config for run in runs.values()])
    save(rows_of(strategies, runs, times), next(iter(runs.values())).found["device"])


if __name__ == "__main__":
    main()
