"""Figures as files."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

_DPI = 120


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg into the folder, made if need be. Text stays text in the SVG.

    The same figure gives the same bytes. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(paths[0], dpi=_DPI)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
