"""The events of a journal that `ds_adacc report` tells of, checked."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_adacc.report.journal import JournalError, read

Count = Annotated[int, Field(ge=0, lt=1 << 63)]  # of bytes, steps, choices, ranks


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True)


class _Event(_Part):
    time: datetime


class Start(_Event):
    """A run begins."""

    event: Literal["start"]
    ranks: Count
    device: str
    versions: dict[str, str]
    section: dict[str, Any]
    blocks: list[str]


class Baseline(_Part):
    """What another strategy would take: peak bytes, and seconds added to a forward and backward."""

    name: str
    peak: Count
    added_seconds: float
    fits: bool


class Plan(_Event):
    """A plan is in force from `step` on. Bytes and seconds; `table` is one row a value, its header first."""

    event: Literal["plan"]
    step: Count
    reason: str
    budget: Count | None
    without: Count
    peak: Count
    held: Count
    added_seconds: float
    solve_seconds: float
    proven_optimal: bool
    table: list[list[str]]
    baselines: list[Baseline]

    @field_validator("table")
    @classmethod
    def _is_rectangular(cls, table: list[list[str]]) -> list[list[str]]:
        if len({len(row) for row in table}) > 1:
            raise ValueError("rows differ in length")
        return table


class Compared(_Part):
    """A prediction, and what was seen of it."""

    planned: Count | float
    observed: Count | float

    @property
    def difference(self) -> float | None:
        """Of what was seen, relative to the prediction; None if that is 0."""
        return (self.observed - self.planned) / self.planned if self.planned else None


class Observed(_Event):
    """What a step took: bytes held and at the peak, and seconds."""

    event: Literal["observed"]
    step: Count
    held: Compared
    peak: Compared | None
    seconds: Compared | None


class Rectified(_Event):
    """The rectifier looked at the outliers, and asked for a new plan or not."""

    event: Literal["rectifier"]
    step: Count
    reason: str
    replanned: bool
    changed: Count


class Warned(_Event):
    """A warning was given."""

    event: Literal["warning"]
    text: str


_KINDS = {"start": Start, "plan": Plan, "observed": Observed, "rectifier": Rectified, "warning": Warned}

Event = Start | Plan | Observed | Rectified | Warned


def load(path: Path) -> list[Event]:
    """The events of a journal that are known here, in order.

    Raises JournalError for a journal that cannot be read, or an event that lacks what it should have.
    """
    events = []
    for number, fields in enumerate(read(path), start=1):
        if kind := _KINDS.get(fields["event"]):
            try:
                events.append(kind.model_validate(fields))
            except ValidationError as error:
                raise JournalError(f"{path}:{number}: {_first(fields['event'], error)}") from error
    return events


def _first(event: str, error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, (event, *problem['loc'])))}: {problem['msg']}"
