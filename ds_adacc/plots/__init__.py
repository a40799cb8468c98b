"""Figures of what the planner says. They need matplotlib, the extra "plots"; no other part of ds_adacc does."""

from ds_adacc.plots.frontier import frontier_figure
from ds_adacc.plots.graph import graph_figure
from ds_adacc.plots.save import save
from ds_adacc.plots.timeline import timeline_figure

__all__ = ["frontier_figure", "graph_figure", "save", "timeline_figure"]
