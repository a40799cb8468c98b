"""Figures of what the planner says. They need matplotlib, the extra "plots"; no other part of ds_adacc does."""

from ds_adacc.cli.plots.frontier import frontier_figure
from ds_adacc.cli.plots.graph import graph_figure
from ds_adacc.cli.plots.save import save
from ds_adacc.cli.plots.timeline import timeline_figure

__all__ = ["frontier_figure", "graph_figure", "save", "timeline_figure"]
