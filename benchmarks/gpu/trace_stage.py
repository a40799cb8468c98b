"""Stage `trace`: the timeline of one steady step of a GPT, and what it shows: gaps, and copies beside kernels.

Each timeline is kept in FOLDER as trace-*.json.gz, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import stage
import torch
from intervals import Interval, gaps, length, overlap, union
from models import LARGE, SMALL
from rows import Row, Rows
from strategy import Ours, Strategy
from torch.profiler import ProfilerActivity, profile
from trainer import Trainer

SECTIONS: dict[str, Mapping[str, Any] | None] = {
    "none": None,
    "ours-default-offload-in-the-peak-of-full": {},
    "ours-lossless-offload": {"memory_budget": 0.4, "codecs": "none"},
    "ours-default": {"memory_budget": 0.4, "offload": False},
}
REHEARSED = ("ours-default-offload-in-the-peak-of-full",)
COPY = "gpu_memcpy"  # categories of events in a timeline
WORK = {"cuda": ("kernel", "gpu_memset", COPY), "cpu": ("cpu_op",)}
SHORT = 10.0  # microseconds; shorter gaps are between any two kernels
LONGEST = 12  # names of kernels


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    trainer: Trainer | None = None

    def row(name: str, section: Mapping[str, Any] | None) -> Row:
        nonlocal trainer
        if trainer is None:
            trainer = Trainer("GPT", SMALL if rehearses else LARGE, device)
            trainer.begin()
        try:
            return traced(trainer, strategy(trainer, section), folder / f"trace-{name}.json.gz")
        except BaseException:  # it may be in the middle of a step; the next row makes another
            trainer.close()
            trainer = None
            raise

    for name, section in SECTIONS.items():
        if not rehearses or name in REHEARSED:
            rows.measure(name, partial(row, name, section))
    if trainer is not None:
        trainer.close()


def strategy(trainer: Trainer, section: Mapping[str, Any] | None) -> Strategy:
    """ds_adacc under the section, in the peak of full checkpointing if that names no budget; or no checkpointing."""
    if section is None:
        return Strategy()
    return Ours(section if "memory_budget" in section else {**section, "memory_budget": of_full(trainer)})


def of_full(trainer: Trainer) -> int:
    """The bytes of the blocks in the peak of full checkpointing."""
    trainer.strategy = everything = Ours({"memory_budget": 1.0, "codecs": "none", "offload": False})
    trainer.settle(2)
    return everything.about()["recompute_all_bytes"]


def traced(trainer: Trainer, strategy: Strategy, file: Path) -> Row:
    """Write the timeline of a steady step. Returns what it shows."""
    trainer.strategy = strategy
    trainer.settle(2)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trainer.device.type == "cuda" else [])]
    for _ in range(2):  # the first profile of a process is slow to start
        trainer.settle()
        with profile(activities=activities) as profiled:
            trainer.step()
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
    profiled.export_chrome_trace(str(file))
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    return {"tokens": trainer.size.tokens, **shown(events, WORK[trainer.device.type])}


def shown(events: list[Mapping[str, Any]], work: tuple[str, ...]) -> Row:
    """What the events of these categories show: times in microseconds, and names of those that took longest."""
    timed = [event for event in events if event.get("cat") in work and "dur" in event]
    assert timed, f"the timeline has no event of the categories {work}"
    kernels = union(interval(event) for event in timed if event["cat"] != COPY)
    host_copies = [
        event for event in timed if event["cat"] == COPY and any(s in event["name"] for s in ("HtoD", "DtoH"))
    ]
    copies = union(map(interval, host_copies))
    busy = union(map(interval, timed))
    idle = [gap for gap in gaps(busy) if gap[1] - gap[0] > SHORT]
    total = Counter()
    for event in timed:
        total[event["name"]] += event["dur"]
    return {
        "span_us": busy[-1][1] - busy[0][0],
        "busy_us": length(busy),
        "gaps": len(idle),
        "gaps_us": length(idle),
        "longest_gap_us": max((end - start for start, end in idle), default=0.0),
        "host_copies": len(host_copies),
        "host_copies_us": length(copies),
        "host_copies_beside_kernels_us": length(overlap(copies, kernels)),
        "longest_us": dict(total.most_common(LONGEST)),
    }


def interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


if __name__ == "__main__":
    stage.run("trace", measure)
