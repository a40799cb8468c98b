"""A block's values and operators, coloured by what the plan does with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ds_adacc import planner
from ds_adacc.cli.plots.layers import Layers, Place
from ds_adacc.report.decision import RECOMPUTE, choices
from ds_adacc.report.tables import shortened

_UNUSED = "not needed"
_COLOURS = {planner.RETAIN: "#3b6fb6", RECOMPUTE: "#e08214", planner.OFFLOAD: "#8e4ec6", _UNUSED: "#d0d0d0"}
_COLUMN, _ROW, _NARROWEST = 2.2, 0.45, 6.0  # inches; the legend needs the last
_LARGEST, _SMALLEST, _OP, _LEGEND = 420.0, 12.0, 14.0, 40.0  # areas, in square points
_ASIDE = 16  # points from the middle of a value to its label, past the largest disc
_LONGEST = 24  # characters of a label
_LANES = (0.12, 0.16, 0.2)  # columns to the left of a value, where edges that pass other rows go down
_LEAVE = 0.35  # rows below a value, where such an edge has reached its lane


def graph_figure(profile: planner.Profile, policy: planner.Policy, labels: Sequence[str], title: str) -> Figure:
    """The block from top to bottom: a disc is a value, its area follows its bytes; a square is an operator.

    Below each value's label are its bytes, and their number once compressed. Backward does without a value that is
    "not needed". Raises ValueError if the policy does not fit the profile.
    """
    policy.check(profile)
    layers = Layers.of(profile.graph)
    columns, rows = (1 + max(int(place[axis]) for place in (*layers.values, (0, 0))) for axis in (0, 1))
    figure = Figure(figsize=(max(_NARROWEST, 1 + _COLUMN * columns), 1 + _ROW * rows), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.45, columns - 0.2), ylim=(rows - 0.5, -0.5), title=title)
    _draw_edges(axes, profile.graph, layers)
    _draw_ops(axes, profile.graph.replayed(policy.stores), layers)
    _draw_values(axes, profile, policy, labels, layers)
    legend: Any = figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    for handle in legend.legend_handles:
        handle.set(sizes=[_LEGEND])
    return figure


def _draw_values(
    axes: Axes, profile: planner.Profile, policy: planner.Policy, labels: Sequence[str], layers: Layers
) -> None:
    """One collection for each choice, in the order of the legend."""
    values = profile.graph.values
    made = [choice or _UNUSED for choice in choices(profile, policy)]
    most = max((value.nbytes for value in values), default=0) or 1
    for choice, colour in _colours(made).items():
        members = [index for index, other in enumerate(made) if other == choice]
        axes.scatter(
            *zip(*(layers.values[index] for index in members), strict=True),
            s=[max(_SMALLEST, _LARGEST * values[index].nbytes / most) for index in members],
            color=colour,
            label=choice,
            zorder=3,
        )
    for index, place in enumerate(layers.values):
        text = f"{shortened(labels[index], _LONGEST)}\n{_size(profile, policy, index)}"
        axes.annotate(text, place, xytext=(_ASIDE, 0), textcoords="offset points", fontsize=7, va="center", zorder=4)


def _draw_ops(axes: Axes, replayed_ops: Collection[int], layers: Layers) -> None:
    for replayed, label in ((True, "operator, replayed"), (False, "operator")):
        places = [place for op, place in enumerate(layers.ops) if (op in replayed_ops) == replayed]
        if places:
            colour = _COLOURS[RECOMPUTE] if replayed else "#606060"
            axes.scatter(*zip(*places, strict=True), marker="s", s=_OP, color=colour, label=label, zorder=3)


def _draw_edges(axes: Axes, graph: planner.BlockGraph, layers: Layers) -> None:
    for op, below in zip(graph.ops, layers.ops, strict=True):
        for value in dict.fromkeys(op.inputs):
            axes.add_patch(_edge(layers.values[value], below))
        for value in op.outputs:
            axes.add_patch(_edge(below, layers.values[value]))


def _edge(upper: Place, lower: Place) -> PathPatch:
    """An edge that crosses no label: labels are beside the values, and it goes aside at the operators' height only.

    Values are in whole rows and operators half a row from them. An edge that passes other rows goes down on the left
    of its column.
    """
    if lower[1] - upper[1] > 1:
        left = upper[0] - _LANES[int(upper[1]) % len(_LANES)]  # apart from the edges of the values above and below
        corners = [(left, upper[1] + _LEAVE), (left, lower[1])]
    else:
        is_value = upper[1] == int(upper[1])
        corners = [(upper[0], lower[1]) if is_value else (lower[0], upper[1])]
    return PathPatch(Path([upper, *corners, lower]), facecolor="none", edgecolor="#a0a0a0", linewidth=0.7, zorder=1)


def _colours(made: Sequence[str]) -> dict[str, str]:
    """A colour for each choice that is made, in the order of the legend.

    Codecs have shades of green, and payloads in host memory shades of purple.
    """
    stores = sorted(set(made) - _COLOURS.keys())
    here = [store for store in stores if not planner.is_offloaded(store)]
    away = [store for store in stores if planner.is_offloaded(store)]
    shades = _shades("summer", here) | _shades("Purples_r", away)
    colours = {planner.RETAIN: _COLOURS[planner.RETAIN]} | shades | _COLOURS
    return {choice: colour for choice, colour in colours.items() if choice in made}


def _shades(name: str, stores: Sequence[str]) -> dict[str, str]:
    """A shade for each store, of a colour map whose lightest end is not used."""
    shades = colormaps[name].resampled(len(stores) + 1)
    return {store: to_hex(shades(number)) for number, store in enumerate(stores)}


def _size(profile: planner.Profile, policy: planner.Policy, index: int) -> str:
    raw = planner.human_bytes(profile.graph.values[index].nbytes)
    store = policy.stores[index]
    if not planner.is_codec(store):
        return raw
    return f"{raw} \N{RIGHTWARDS ARROW} {planner.human_bytes(profile.codec(index, store).payload_bytes)}"
