"""Figures for `ds_adacc plan`. They need matplotlib (the extra "plots"), which no other part of ds_adacc needs.

In: a profile, policies and the values' labels. Out: figures, as PNG and SVG files.

* frontier.py: what one call of a block can hold, and the time that this adds
* graph.py: a block's values and operators, coloured by what the plan does; layers.py places them
* timeline.py: the bytes alive through backward
* save.py: figures as files
"""

from ds_adacc.cli.plots.frontier import frontier_figure
from ds_adacc.cli.plots.graph import graph_figure
from ds_adacc.cli.plots.save import save
from ds_adacc.cli.plots.timeline import timeline_figure

__all__ = ["frontier_figure", "graph_figure", "save", "timeline_figure"]
