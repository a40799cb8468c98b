"""Stage `zero3`: a GPT of 1.2 billion parameters under ZeRO-3, enabled as a user enables it, on one GPU.

Each strategy has an engine of its own, from the same weights: ZeRO-3 and ds_adacc change a model's modules. In all of
them the blocks are leaf modules, whose parameters ZeRO-3 gathers together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import stage
import torch
from models import LARGE, SMALL
from rows import Row, Rows
from strategy import Full, Strategy
from trainer import Trainer, release

from ds_adacc import planner

OURS: dict[str, dict[str, Any]] = {
    "ours lossless, 0.4": {"memory_budget": 0.4, "codecs": "none"},
    "ours default, 0.4": {"memory_budget": 0.4},
    "ours lossless, 0.4, no offload": {"memory_budget": 0.4, "codecs": "none", "offload": False},
}
REHEARSED = ("none", "ours lossless, 0.4")


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    jobs = [("none", Strategy, None), ("full", Full, None), *((name, None, section) for name, section in OURS.items())]
    for name, strategy, section in jobs:
        if rehearses and name not in REHEARSED:
            continue
        rows.measure(name, partial(figures, rows, device, rehearses, strategy, section), name.split()[0])
        release(device)


def figures(
    rows: Rows, device: torch.device, rehearses: bool, strategy: type[Strategy] | None, section: dict[str, Any] | None
) -> Row:
    """What steps take, under a strategy or as a section says; with its shares of the speed and memory of none."""
    trainer = Trainer("GPT", SMALL if rehearses else LARGE, device, stage=3, section=section)
    try:
        trainer.begin()
        if strategy is not None:
            trainer.strategy = strategy()
        row = trainer.measured(steps=2 if rehearses else 10)
    except planner.InfeasibleBudget as error:
        return {"infeasible": str(error), "smallest_bytes": error.smallest}
    finally:
        trainer.close()
    return {**rows.shares(row, "none", "none"), **row}


if __name__ == "__main__":
    stage.run("zero3", measure)
