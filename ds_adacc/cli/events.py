"""The events of a journal that `ds_adacc report` shows, as checked objects."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, field_validator

from ds_adacc.planner import Baseline
from ds_adacc.report.decision import Decision
from ds_adacc.report.journal import JournalError, read

Count = Annotated[int, Field(ge=0, lt=1 << 63)]  # of bytes, steps, choices, ranks


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True)


class JournalEvent(_Part):
    """An event of one of the `KINDS`."""

    time: datetime


class Started(JournalEvent):
    """A run began."""

    ranks: Count
    device: str
    versions: dict[str, str]
    model: str = ""  # its class; journals of earlier versions do not have it
    section: dict[str, Any]
    blocks: list[str]


class PlanMade(JournalEvent):
    """A plan is in force from `step` on. Bytes and seconds; `block_types` says what it does with each value."""

    step: Count
    reason: str
    budget: Count | None
    without: Count
    peak: Count
    held: Count
    added_seconds: float
    solve_seconds: float
    proven_optimal: bool
    block_types: list[Decision]
    baselines: list[Baseline]

    @field_validator("block_types")
    @classmethod
    def _have_all_choices(cls, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            for value in decision.values:
                if len(value.choices) != len(decision.policies):
                    counts = f"{len(value.choices)} choices for {len(decision.policies)} policies"
                    raise ValueError(f"value {value.label!r} has {counts}")
        return decisions


class Compared(_Part):
    """A prediction, and what was observed."""

    planned: Count | float
    observed: Count | float

    @computed_field
    @property
    def difference(self) -> float | None:
        """Observed less planned, as a fraction of planned; None if planned is 0."""
        return (self.observed - self.planned) / self.planned if self.planned else None


class DeviceBytes(_Part):
    """What the process had taken of a CUDA device at its peak."""

    allocated: Count
    reserved: Count
    expandable: bool


class Observed(JournalEvent):
    """What a step took: bytes held, peak bytes, and seconds; the last two are None if they were not measured."""

    step: Count
    held: Compared
    peak: Compared | None
    seconds: Compared | None
    device: DeviceBytes | None = None


class Rectified(JournalEvent):
    """The rectifier looked at the outliers, and asked for a new plan or did not."""

    step: Count
    reason: str
    replanned: bool
    changed: Count


class GradientErrors(JournalEvent):
    """The gradient errors of policies were measured in a step, of each block, which is told by its name."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # earlier versions wrote numbers in place of names

    step: Count
    bound: float
    errors: list[tuple[str, float]]


class Refused(JournalEvent):
    """No plan fits the budget, and `engine.step` raised the error with this text."""

    text: str


KINDS: dict[str, type[JournalEvent]] = {  # by what `event` is in the journal
    "start": Started,
    "plan": PlanMade,
    "observed": Observed,
    "rectifier": Rectified,
    "gradient_errors": GradientErrors,
    "refused": Refused,
}


def load(path: Path) -> list[JournalEvent]:
    """The events of a journal, in order; those of another kind are left out.

    Raises JournalError, naming file and line, for a journal that cannot be read or an event with a bad field.
    """
    events = []
    for number, fields in enumerate(read(path), start=1):
        if kind := KINDS.get(fields["event"]):
            try:
                events.append(kind.model_validate(fields))
            except ValidationError as error:
                raise JournalError(f"{path}:{number}: {_first(fields['event'], error)}") from error
    return events


def _first(event: str, error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, (event, *problem['loc'])))}: {problem['msg']}"
