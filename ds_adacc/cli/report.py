"""Show what a run did: its plans, what they predicted and what was observed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc.cli import events
from ds_adacc.cli.answer import Answer, BadInput
from ds_adacc.planner import human_bytes
from ds_adacc.report import journal
from ds_adacc.report.decision import span
from ds_adacc.report.grid import table
from ds_adacc.report.screen import brief_tables, heading, remarks_on
from ds_adacc.report.tables import baselines_grid, decision_tables

_PLURALS = {"start": "starts", "plan": "plans"}  # kinds of events that the document calls so
_COMPARED = {"held": "the batch of that step", "peak": "the planned batch", "seconds": "the timed calls"}  # of what
_HOW_COMPARED = """\
held is what that step held when backward began, and was planned for its batch.
peak is of the batch that the plan was made for. Observed is the planned peak,
  and what the calls of that step took beyond their prediction. If that step had
  another batch, this excess is scaled to the planned one.
seconds are of the calls that were timed. Torch's profiler ran beside them, and
  slowed them down.
"""

Kind = TypeVar("Kind", bound=events.JournalEvent)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The journal's path, and how much of it to show."""
    text = "a journal, also of a run still going; by default that of the run that began last"
    parser.add_argument("journal", nargs="?", type=Path, help=text)
    text = "show every value and every policy of every block type, not only what fits on a screen"
    parser.add_argument("--full", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> Answer:
    """The journal as tables. Raises BadInput for one that is missing or garbled."""
    try:
        path = arguments.journal or journal.latest()
    except OSError as error:
        text = "the folder of the journals cannot be read"
        raise BadInput(f"{text}: {error}. Name a journal, or set XDG_CACHE_HOME as in the run") from error
    if path is None:
        raise BadInput(
            f"no run has left a journal in {journal.folder()}. If that folder could not be written to, the log of the "
            "run has said so; XDG_CACHE_HOME moves it. Or name a journal"
        )
    try:
        happened = events.load(path)
    except journal.JournalError as error:
        raise BadInput(str(error)) from error
    return Answer(_document(path, happened), _view(path, happened, arguments.full))


def _document(path: Path, happened: Sequence[events.JournalEvent]) -> dict[str, Any]:
    """The events of each kind, as in the journal; observations with their relative differences."""
    plain = {
        _PLURALS.get(name, name): [event.model_dump(mode="json") for event in _of(kind, happened)]
        for name, kind in events.KINDS.items()
    }
    return {"journal": str(path), **plain}


def _of(kind: type[Kind], happened: Sequence[events.JournalEvent]) -> list[Kind]:
    return [event for event in happened if isinstance(event, kind)]


def _view(path: Path, happened: Sequence[events.JournalEvent], is_full: bool) -> RenderableType:
    """A table for each kind of event that there is; `is_full`: with the whole of the last plan."""
    plans = _of(events.PlanMade, happened)
    parts = [Text(str(path)), *map(_start, _of(events.Started, happened))]
    kinds: tuple[tuple[type[events.JournalEvent], Callable[[Any], RenderableType]], ...] = (
        (events.PlanMade, _plans),
        (events.Observed, _observed),
        (events.Rectified, _rectified),
        (events.GradientErrors, _gradient_errors),
    )
    parts += [show(found) for kind, show in kinds if (found := _of(kind, happened))]
    if plans:
        parts += _in_force(plans[-1], is_full)
    refused = _of(events.Refused, happened)
    parts += [Text(f"{event.time:%H:%M:%S}: engine.step() raised an error:\n{event.text}") for event in refused]
    if not happened:
        parts.append(Text("the journal holds no event yet"))
    elif not plans and not refused and (starts := _of(events.Started, happened)) and not starts[-1].blocks:
        parts.append(
            Text(
                "no plan, as no block was found in the model. If it does not run its blocks through "
                "ds_adacc.checkpointing, list the class names of its layers in adacc.blocks"
            )
        )
    elif not plans and not refused:
        parts.append(
            Text(
                f"no plan yet: the last event is of {happened[-1].time:%H:%M:%S}. The first plan comes at the end of "
                "the first step, when engine.step() has run the optimizer. If the run has ended, it ended before that"
            )
        )
    return Group(*parts)


def _start(event: events.Started) -> RenderableType:
    versions = ", ".join(f"{name} {version}" for name, version in event.versions.items())
    ranks = "1 rank" if event.ranks == 1 else f"{event.ranks} ranks"
    return Text(
        f"began {event.time:%Y-%m-%d %H:%M:%S} with {ranks} on {event.device}\n{versions}\n"
        f"blocks{f' of {event.model}' if event.model else ''}: {', '.join(event.blocks) or 'none'}"
    )


def _plans(found: Sequence[events.PlanMade]) -> RenderableType:
    header = ("step", "budget", "peak", "of all", "held", "added ms", "solved s", "optimal")
    rows = [
        (
            str(plan.step),
            "none" if plan.budget is None else human_bytes(plan.budget),
            human_bytes(plan.peak),
            f"{plan.peak / plan.without:.2f}" if plan.without else "-",
            human_bytes(plan.held),
            f"{1000 * plan.added_seconds:.1f}",
            f"{plan.solve_seconds:.3f}",
            _yes(plan.proven_optimal),
        )
        for plan in found
    ]
    costs = table("Plans", header, rows, {*header} - {"optimal"})
    reasons = [(str(plan.step), plan.reason) for plan in found]  # apart, for a reason may be a whole line
    return Group(costs, table("Why they were made", ("step", "reason"), reasons, {"step"}))


def _observed(found: Sequence[events.Observed]) -> RenderableType:
    header = ("step", "what", "of", "planned", "observed", "difference")
    rows = [
        (str(event.step), name, of, *_numbers(name, compared))
        for event in found
        for name, of in _COMPARED.items()
        if (compared := getattr(event, name))
    ]
    shown = table("Planned and observed", header, rows, {*header} - {"what", "of"})
    return Group(shown, Text(_HOW_COMPARED))


def _numbers(name: str, compared: events.Compared) -> tuple[str, str, str]:
    difference = "-" if compared.difference is None else f"{compared.difference:+.1%}"
    planned, observed = (
        f"{1000 * number:.1f} ms" if name == "seconds" else human_bytes(int(number))
        for number in (compared.planned, compared.observed)
    )
    return planned, observed, difference


def _rectified(found: Sequence[events.Rectified]) -> RenderableType:
    header = ("step", "reason", "planned anew", "choices changed")
    rows = [(str(event.step), event.reason, _yes(event.replanned), str(event.changed)) for event in found]
    return table("Rectifier", header, rows, {"step", "choices changed"})


def _gradient_errors(found: Sequence[events.GradientErrors]) -> RenderableType:
    header = ("step", "blocks", "measured", "largest error", "bound", "above it")
    rows = [
        (
            str(event.step),
            span(name for name, _ in event.errors),
            str(len(event.errors)),
            f"{max(error for _, error in event.errors):.3g}" if event.errors else "-",
            f"{event.bound:g}",
            span(name for name, error in event.errors if error > event.bound) or "none",
        )
        for event in found
    ]
    return table("Gradient errors", header, rows, {"step", "measured", "largest error", "bound"})


def _in_force(plan: events.PlanMade, is_full: bool) -> list[RenderableType]:
    """What the last plan does with each value, and what other strategies would have cost."""
    parts: list[RenderableType] = [Text(f"The plan from step {plan.step} on")]
    if is_full:
        for decision in plan.block_types:
            parts += [Text(f"  {heading(decision)}"), decision_tables(decision)]
            parts += [*remarks_on([decision]), Text()]
    elif plan.block_types:
        parts += [brief_tables(plan.block_types), Text()]
    if plan.baselines:
        parts += [Text("Other strategies"), baselines_grid(plan.baselines)]
    return parts


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
