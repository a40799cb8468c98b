"""The picture of a comparison: what each strategy costs, and how its training goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from compare import Row


def draw(rows: Sequence[Row], frontier: Sequence[str], file: Path) -> None:
    """Time against peak memory, each over that of no checkpointing, with the losses beside it.

    A bar is the range of the time. A line joins the strategies named in `frontier`: one section under several budgets.
    """
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    costs, losses = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_costs(costs, rows, frontier)
    draw_losses(losses, rows)
    figure.savefig(file, dpi=110)


def draw_costs(axes: Axes, rows: Sequence[Row], frontier: Sequence[str]) -> None:
    """The nearer to the lower left corner, the better."""
    joined = sorted((row.peak, row.time.median) for row in rows if row.name in frontier)
    axes.plot(*zip(*joined, strict=True), color="grey", linewidth=1, linestyle="--", zorder=0)
    for number, row in enumerate(rows):
        below, above = row.time.median - row.time.low, row.time.high - row.time.median
        axes.errorbar(
            row.peak, row.time.median, yerr=[[below], [above]], fmt="o", capsize=3, color=f"C{number}", label=row.label
        )
    axes.set(xlabel="peak memory / no checkpointing", ylabel="computing time / no checkpointing", xlim=(0, 1.05))
    axes.axhline(1, color="lightgrey", linewidth=0.8, zorder=0)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8)


def draw_losses(axes: Axes, rows: Sequence[Row]) -> None:
    """The training losses, in the colours of the costs; the first strategy's is wide."""
    for number, row in enumerate(rows):
        losses = [float("nan") if loss is None else loss for loss in row.losses]
        wide = number == 0  # the others run on top of it, if all is well
        axes.plot(range(1, len(losses) + 1), losses, color=f"C{number}", linewidth=5 if wide else 1)
    axes.set(xlabel="step", ylabel="training loss")
