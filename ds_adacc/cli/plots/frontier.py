"""What one call of a block can hold, and the time that it adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ds_adacc import planner

_MIB = 1 << 20
_MARKERS = "s^vDP*X<>"


def frontier_figure(
    block_type: planner.BlockType,
    points: Sequence[planner.Point],
    baselines: Mapping[str, planner.Policy],
    chosen: Sequence[planner.Policy],
) -> Figure:
    """Added milliseconds against MiB held, of one call.

    The frontier's `points` are drawn as steps: between two points the better one that fits is the left one. The
    `baselines`, by name, are markers; those of equal cost share one. Rings mark the policies `chosen` for the blocks,
    and say how many blocks run each. Raises ValueError for a policy that does not fit the block type.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_frontier(axes, points)
    _draw_baselines(axes, block_type.profile, baselines)
    _draw_chosen(axes, block_type.profile, chosen)
    axes.set(title=block_type.name, xlabel="MiB held by one call", ylabel="added ms of one call")
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small", labelspacing=0.9)
    return figure


def _draw_frontier(axes: Axes, points: Sequence[planner.Point]) -> None:
    ordered = sorted(_at(point.simulation) for point in points)
    held, added = zip(*ordered, strict=True)
    axes.plot(held, added, drawstyle="steps-post", marker=".", color="tab:blue", label="frontier", zorder=2)


def _draw_baselines(axes: Axes, profile: planner.Profile, baselines: Mapping[str, planner.Policy]) -> None:
    names: dict[tuple[float, float], list[str]] = {}
    for name, policy in baselines.items():
        names.setdefault(_at(planner.simulate(profile, policy)), []).append(name)
    for number, (place, alike) in enumerate(names.items()):
        marker, colour = _MARKERS[number % len(_MARKERS)], f"C{number + 1}"
        axes.scatter(*place, s=50, marker=marker, color=colour, label="\n".join(alike), zorder=3)


def _draw_chosen(axes: Axes, profile: planner.Profile, chosen: Sequence[planner.Policy]) -> None:
    if not chosen:
        return
    counts = Counter(chosen)
    rings = sorted((_at(planner.simulate(profile, policy)), count) for policy, count in counts.items())
    held, added = zip(*(place for place, _ in rings), strict=True)
    axes.scatter(held, added, s=170, facecolors="none", edgecolors="black", label="chosen", zorder=4)
    for number, (place, count) in enumerate(rings):
        text = "1 block" if count == 1 else f"{count} blocks"
        above = 48 - 16 * (number % 3)  # points: on a falling curve, neighbours' labels do not meet
        line = {"arrowstyle": "-", "linewidth": 0.6, "shrinkB": 7}  # to the ring, and no further
        axes.annotate(text, place, xytext=(12, above), textcoords="offset points", arrowprops=line, zorder=5)


def _at(simulation: planner.Simulation) -> tuple[float, float]:
    return simulation.held / _MIB, 1000 * simulation.seconds
