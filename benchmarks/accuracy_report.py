"""The report of accuracy.py: tables and a figure, made from the rows of all finished runs in a folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accuracy_run import ARMS, EXACT, PARTS, Run, Setting
from injections import INJECTIONS
from markdown_table import markdown_table
from origin import as_list, origin

from ds_adacc.environment import device_name

MIB = 1 << 20
SMOOTH = 20  # steps over which the figure averages losses

Rows = Sequence[Mapping[str, Any]]
Runs = Mapping[Run, Rows]


def read(work: Path) -> Runs:
    """The rows of all runs that have ended."""
    runs = {}
    for file in sorted(work.glob("*.jsonl")):
        injection, arm, seed = file.stem.split(".")
        runs[Run(injection, arm, int(seed))] = [json.loads(line) for line in file.read_text().splitlines()]
    return runs


def summaries(runs: Runs) -> list[dict[str, Any]]:
    """One summary for each injection and arm, in the order of `INJECTIONS` and `ARMS`.

    Losses are differences to the exact run of the same seed and injection; those of the exact arm itself are absolute.
    A pair of numbers is the mean and the standard deviation over seeds, which is None for one seed. Seeds that did not
    finish are in no mean; `ends` tells of them.
    """
    found = []
    for injection in INJECTIONS:
        for arm in ARMS:
            seeds = {run.seed: rows for run, rows in runs.items() if (run.injection, run.arm) == (injection, arm)}
            if seeds:
                found.append({"injection": injection, "arm": arm, **_summary(seeds, injection, arm, runs)})
    return found


def _summary(seeds: Mapping[int, Rows], injection: str, arm: str, runs: Runs) -> dict[str, Any]:
    finished = {seed: rows for seed, rows in seeds.items() if rows[-1]["end"] == "finished"}
    references = {seed: () if arm == EXACT else runs.get(Run(injection, EXACT, seed)) for seed in finished}
    missing = sorted(seed for seed, rows in references.items() if rows is None)
    if missing:
        raise ValueError(f"{injection}, {arm}: no exact run to compare with, for seeds {missing}")
    validation = [
        _above(_all(finished[s], "validation_loss"), _all(references[s], "validation_loss")) for s in finished
    ]
    training = [_above(_all(finished[s], "loss"), _all(references[s], "loss")) for s in finished]
    return {
        "ends": {seed: rows[-1] for seed, rows in seeds.items()},
        "validation_end": _over_seeds([losses[-1] for losses in validation]),
        "validation_mean": _over_seeds([statistics.fmean(losses[1:]) for losses in validation]),  # [0]: the injection
        "training_end": _over_seeds([statistics.fmean(losses[-max(1, len(losses) // 4) :]) for losses in training]),
        "training_mean": _over_seeds([statistics.fmean(losses) for losses in training]),
        "errors_at_injection": _errors(list(seeds.values()), first=True),
        "errors_at_end": _errors(list(finished.values()), first=False),
        "plans": [max(0, len(_all(rows, "plan")) - 1) for rows in seeds.values()],
        "held": _over_seeds([seen["held"] for rows in seeds.values() for seen in _all(rows, "seen")[-1:]]),
        "peak": _over_seeds([ratio for rows in seeds.values() for ratio in _peak_ratios(rows)[-1:]]),
    }


def _all(rows: Rows, key: str) -> list[Any]:
    return [row[key] for row in rows if key in row]


def _above(mine: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The differences; `mine` if there is no reference."""
    return [a - b for a, b in zip(mine, reference, strict=True)] if reference else list(mine)


def _over_seeds(numbers: Sequence[float]) -> tuple[float, float | None] | None:
    """The mean and the standard deviation; None of no numbers."""
    if not numbers:
        return None
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None


def _errors(seeds: Sequence[Rows], first: bool) -> dict[str, float | None] | None:
    """The mean gradient error of each part; None for a part that is not finite in some seed."""
    looks = [_all(rows, "gradient_errors") for rows in seeds]
    chosen = [look[0 if first else -1] for look in looks if look]
    if not chosen:
        return None
    columns = {part: [errors[part] for errors in chosen] for part in chosen[0]}
    return {part: None if None in errors else statistics.fmean(errors) for part, errors in columns.items()}


def _peak_ratios(rows: Rows) -> list[float]:
    """For each plan whose peak was observed, that peak over the one without checkpointing, as the planner knows it."""
    ratios, without = [], None
    for row in rows:
        if "plan" in row:
            without = row["plan"]["without"]
        if "seen" in row and row["seen"]["peak"] is not None:
            ratios.append(row["seen"]["peak"] / without)
    return ratios


def losses_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One line for each injection and arm."""
    header = ["injection", "arm", "seeds", "validation loss, end", "mean", "training loss, end", "mean"]
    header += ["gradient error, injection", "end", "re-plans", "MiB held", "peak"]
    rows = []
    for one in found:
        sign = "" if one["arm"] == EXACT else "+"
        keys = ("validation_end", "validation_mean", "training_end", "training_mean")
        errors = ["" if one["arm"] == EXACT else _error(one[key]) for key in ("errors_at_injection", "errors_at_end")]
        cells = [one["injection"], one["arm"], _ends(one["ends"]), *(_loss(one[key], sign) for key in keys), *errors]
        plans = "" if one["arm"] == EXACT else ", ".join(map(str, one["plans"]))
        held = "" if one["held"] is None else f"{one['held'][0] / MIB:.1f}"
        peak = "" if one["peak"] is None else f"{one['peak'][0]:.2f}"
        rows.append([*cells, plans, held, peak])
    return markdown_table(header, rows)


def parts_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The gradient error of each part of the model."""
    rows = []
    for one in found:
        for when, key in (("injection", "errors_at_injection"), ("end", "errors_at_end")):
            if one[key] is not None:
                errors = (_number(one[key][part]) for part in PARTS.values())
                rows.append([one["injection"], one["arm"], when, *errors])
    return markdown_table(["injection", "arm", "when", *PARTS.values()], rows)


def _ends(ends: Mapping[int, Mapping[str, Any]]) -> str:
    """How many seeds there are, and which of them did not finish."""
    notes = [str(len(ends))]
    for seed, end in ends.items():
        if end["end"] == "diverged":
            notes.append(f"seed {seed} diverged at step {end['step']}")
        elif end["end"] == "infeasible":
            notes.append(f"seed {seed} infeasible, needs {end['smallest'] / MIB:.1f} MiB")
    return "; ".join(notes)


def _loss(pair: tuple[float, float | None] | None, sign: str) -> str:
    if pair is None:
        return "no seed finished"
    mean, spread = pair
    return f"{mean:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _error(errors: Mapping[str, float | None] | None) -> str:
    return "" if errors is None else _number(errors["whole"])


def _number(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.3g}"


def figure(runs: Runs, folder: Path) -> None:
    """For each injection the training loss of every arm, averaged over seeds and steps, and below it the difference."""
    from matplotlib.figure import Figure

    from ds_adacc.cli import plots

    injections = [name for name in INJECTIONS if any(run.injection == name for run in runs)]
    drawing = Figure(figsize=(1 + 4 * len(injections), 6), layout="constrained")
    axes = drawing.subplots(2, len(injections), sharex=True, squeeze=False)
    for (above, below), injection in zip(axes.T, injections, strict=True):
        above.set_title(injection)
        for number, arm in enumerate(ARMS):
            curves = {
                r.seed: _all(rows, "loss") for r, rows in runs.items() if (r.injection, r.arm) == (injection, arm)
            }
            exact = {seed: _all(runs[Run(injection, EXACT, seed)], "loss") for seed in curves}
            differences = [[a - b for a, b in zip(curves[s], exact[s], strict=False)] for s in curves]
            for axis, drawn in ((above, list(curves.values())), (below, differences)):
                if any(drawn):
                    axis.plot(*_smooth(drawn), label=arm, color=f"C{number}", linewidth=1)
        below.set_xlabel("steps after the injection")
    axes[0][0].set_ylabel(f"training loss, mean of {SMOOTH} steps")
    axes[1][0].set_ylabel("less that of the exact run")
    axes[0][0].legend(frameon=False, fontsize="small")
    plots.save(drawing, folder, "accuracy")


def _smooth(curves: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
    """Steps, and the mean of the curves over the steps before each. It ends where the first seed diverged."""
    mean = [statistics.fmean(losses) for losses in zip(*(curve for curve in curves if curve), strict=False)]
    ends = range(1, len(mean) + 1)
    return list(ends), [statistics.fmean(mean[max(0, end - SMOOTH) : end]) for end in ends]


def report(setting: Setting, work: Path, out: Path) -> None:
    """Write accuracy.md, .json, .png and .svg, and print the tables."""
    runs = read(work)
    found = summaries(runs)
    about = origin(device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    document = {**about, "setting": asdict(setting), "rows": found}
    (out / "accuracy.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    tables = (
        f"{losses_table(found)}\n\n"
        f"Losses of {EXACT!r} are absolute, all others are differences to it of the same seed and injection; "
        "± is the standard deviation over seeds. The training loss at the end is the mean of the last quarter of the "
        "steps. The gradient error is ‖g - g₀‖ / ‖g₀‖ of one batch. The peak is the observed one over that without "
        f"checkpointing.\n\nGradient error by part of the model:\n\n{parts_table(found)}\n"
    )
    (out / "accuracy.md").write_text(
        f"{setting.exact} exact steps, an injection, {setting.steps} steps\n\n{tables}\n{as_list(about)}\n"
    )
    print(tables)
    figure(runs, out)
