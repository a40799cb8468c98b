"""What is planned and observed, as events of DeepSpeed's monitor: curves beside those of loss and learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ds_adacc import planner
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.plan import Plan
from ds_adacc.rectify.calibration import Seen
from ds_adacc.rectify.rectifier import Review

Value = tuple[str, float]
Event = tuple[str, float, int]  # the name, the value, and engine.global_samples, as in DeepSpeed's own


def events(controller: Any, samples: int) -> list[Event]:
    """What is known of the plan in force at the end of an optimizer step; none before there is one.

    Bytes and seconds are of one forward and backward of this rank's blocks. `Adacc/held_bytes`, `peak_bytes` and
    `block_seconds` are as observed in the first step under the plan, beside `planned_held_bytes` and so on;
    `overhead_seconds` is what the plan adds by what was measured of operators and codecs. `compression_ratio/<role>` is
    the payload of what a codec holds over its raw bytes. `rectifier/replanned` (0 or 1) and `rectifier/changed` (values
    stored otherwise) come at tracking steps, `rectifier/interval` (steps to the next) at each.
    """
    if controller.plan is None:
        return []
    values = [
        *_planned(controller.plan),
        *_observed(controller.seen),
        *_compression_ratios(controller.plan, controller.coordinator),
        *(_rectifier(controller.schedule.interval, controller.review) if controller.rectifier is not None else ()),
    ]
    return [(f"Adacc/{name}", value, samples) for name, value in values]


def _planned(plan: Plan) -> Iterable[Value]:
    yield "planned_held_bytes", plan.held
    yield "planned_peak_bytes", plan.peak
    yield "overhead_seconds", plan.added_seconds


def _observed(seen: Seen | None) -> Iterable[Value]:
    if seen is None:
        return
    yield "held_bytes", seen.held.observed
    if seen.peak is not None:
        yield "peak_bytes", seen.peak.observed
    if seen.seconds is not None:
        yield "planned_block_seconds", seen.seconds.planned
        yield "block_seconds", seen.seconds.observed


def _compression_ratios(plan: Plan, coordinator: Coordinator) -> Iterable[Value]:
    """By role, over all calls of the block types that this rank has met."""
    payload: Counter[str] = Counter()
    raw: Counter[str] = Counter()
    for block_type in plan.block_types:
        if block_type.name not in coordinator.block_types:
            continue
        values = coordinator.block_types[block_type.name].recording.values
        for policy, blocks in Counter(plan.policies[block_type.name]).items():
            calls = blocks * block_type.calls_per_block
            for index, store in enumerate(policy.stores):
                if store not in (None, planner.RETAIN, planner.OFFLOAD):
                    role = values[index].role
                    payload[role] += calls * policy.stored_bytes(block_type.profile, index)
                    raw[role] += calls * values[index].nbytes
    for role in sorted(raw):
        yield f"compression_ratio/{role}", payload[role] / raw[role]


def _rectifier(interval: int, review: Review | None) -> Iterable[Value]:
    yield "rectifier/interval", interval
    if review is not None:
        yield "rectifier/replanned", int(review.replanned)
        yield "rectifier/changed", review.changed
