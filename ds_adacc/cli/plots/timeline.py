"""The bytes alive while backward runs through all blocks."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ds_adacc import planner
from ds_adacc.planner.peak import simulations, timeline_of

_MIB = 1 << 20
_TICKS = 16  # at most so many blocks are named


def timeline_figure(problem: planner.Problem, plans: Mapping[str, planner.Policies], budget: int) -> Figure:
    """MiB alive at each step of backward under each of the `plans`, by name, and the budget (bytes) as a line.

    The first entry is the beginning of backward, before its first step. Raises ValueError for a problem without an
    order of its blocks, or for a policy that does not fit it.
    """
    if not problem.order:
        raise ValueError("order of the problem is empty: without one the bytes through backward are not known")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = {name: timeline_of(problem, simulations(problem, policies)) for name, policies in plans.items()}
    for name, line in lines.items():
        axes.plot([alive / _MIB for _, alive in line], drawstyle="steps-mid", linewidth=1.2, label=name)
    axes.axhline(budget / _MIB, color="black", linestyle="--", linewidth=1, label="budget")
    _name_blocks(axes, [number for number, _ in next(iter(lines.values()))])
    axes.set(xlabel="backward, by block in forward order", ylabel="MiB alive")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _name_blocks(axes: Axes, numbers: list[int]) -> None:
    """A tick where the backward of a block begins, the last block's first; they count from 1."""
    starts = {number: numbers.index(number) for number in dict.fromkeys(numbers)}
    named = list(starts)[:: -(-len(starts) // _TICKS)]
    axes.set_xticks([starts[number] for number in named], [str(number + 1) for number in named])
    axes.set_xticks([*starts.values()], minor=True)
    axes.grid(axis="x", which="both", alpha=0.25)
