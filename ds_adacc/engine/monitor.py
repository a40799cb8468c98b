"""What is planned and observed, as events of DeepSpeed's monitor: curves beside the loss and the learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ds_adacc import planner
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.observe.calibration import Observation
from ds_adacc.observe.rectifier import Review
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.plan import Plan
from ds_adacc.steps.step_controller import StepController

Reading = tuple[str, float]  # a name and a number
MonitorEvent = tuple[str, float, int]  # a name, a number and engine.global_samples: what DeepSpeed's monitor takes


def events(controller: StepController, samples: int) -> list[MonitorEvent]:
    """The plan in force at the end of an optimizer step, and what was observed of it; empty before the first plan.

    `ds_configs/README.md` says what each event is.
    """
    if controller.plan is None:
        return []
    values = [
        *_planned(controller.plan),
        *_observed(controller.observation),
        *_compression_rates(controller.plan, controller.agreement),
        *_gradient_errors(controller.blocks, controller.agreement),
        *(_rectifier(controller.planning.schedule.interval, controller.review) if controller.tracks else ()),
    ]
    return [(f"Adacc/{name}", value, samples) for name, value in values]


def _planned(plan: Plan) -> Iterable[Reading]:
    yield "planned_held_bytes", plan.held
    yield "planned_peak_bytes", plan.peak
    yield "overhead_seconds", plan.added_seconds


def _observed(observation: Observation | None) -> Iterable[Reading]:
    if observation is None:
        return
    yield "held_bytes", observation.held.observed
    if observation.peak is not None:
        yield "peak_bytes", observation.peak.observed
    if observation.seconds is not None:
        yield "planned_block_seconds", observation.seconds.planned
        yield "block_seconds", observation.seconds.observed
    if observation.device is not None:
        yield "allocated_bytes", observation.device.allocated
        yield "reserved_bytes", observation.device.reserved


def _compression_rates(plan: Plan, agreement: Agreement) -> Iterable[Reading]:
    """By role, over all calls of the block types that this rank runs."""
    payload: Counter[str] = Counter()
    raw: Counter[str] = Counter()
    for block_type in plan.block_types:
        if block_type.name not in agreement.known_types:
            continue
        values = agreement.known_types[block_type.name].recording.values
        for policy, blocks in Counter(plan.policies[block_type.name]).items():
            calls = blocks * block_type.calls_per_block
            for index, store in enumerate(policy.stores):
                if planner.is_codec(store):
                    role = values[index].role
                    payload[role] += calls * block_type.profile.codec(index, store).payload_bytes
                    raw[role] += calls * values[index].nbytes
    for role in sorted(raw):
        yield f"compression_rate/{role}", payload[role] / raw[role]


def _gradient_errors(blocks: BlockRegistry, agreement: Agreement) -> Iterable[Reading]:
    """The largest measured error of the policy in force, of each block on this rank that runs a lossy one."""
    errors = agreement.errors_in_force()
    named: dict[str, float] = {}
    for block, variant in blocks.variants():
        key = agreement.block_key(block, variant.digest)
        if key in errors:
            path, is_module, _ = block.name.partition(" (")  # a function has the name of its definition, like others
            name = path if is_module or key[1] is None else f"{path}.{key[1]}"
            named[name] = max(errors[key], named.get(name, 0.0))
    for name in sorted(named):
        yield f"gradient_error/{name}", named[name]


def _rectifier(interval: int, review: Review | None) -> Iterable[Reading]:
    yield "rectifier/interval", interval
    if review is not None:
        yield "rectifier/replanned", int(review.replanned)
        yield "rectifier/changed", review.changed
