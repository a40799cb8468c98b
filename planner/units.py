"""The units of the planner's numbers: the type of a dataclass's field names the unit.

What counts, rounds or merges all numbers of a unit finds them by it. So no place can forget a new field.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

Bytes = Annotated[int, "bytes"]
DeductedBytes = Annotated[int, "bytes that are subtracted from others: fewer are the safe side"]
Seconds = Annotated[float, "seconds"]
Error = Annotated[float, "relative error of a value"]
GradientError = Annotated[float, "relative error of a block's gradient"]
Guarantee = Annotated[bool, "holds of several measurements if it holds of each"]

By = Mapping[Any, Callable[[Sequence[Any]], Any]]  # by unit, what makes one number of several
Part = TypeVar("Part")


def combined(parts: Sequence[Part], by: By) -> Part:
    """The first of these dataclasses, with each number as `by` makes it of those of all, which it gets in their order.

    Numbers of units that `by` does not have stay those of the first.
    """
    first: Any = parts[0]
    changed = ((name, by[unit]) for name, unit in units_of(type(first)).items() if unit in by)
    return replace(first, **{name: make([getattr(part, name) for part in parts]) for name, make in changed})


def numbers(part: object, *units: object) -> Iterator[Any]:
    """The numbers of these units in a dataclass."""
    return (getattr(part, name) for name, unit in units_of(type(part)).items() if unit in units)


def check_numbers(part: object, kind: str = "", name: str = "") -> None:
    """ValueError naming the field, and the `kind` and `name` of what has it, if a number in it is wrong.

    A number must be finite and not negative, and bytes an int.
    """
    for field, is_count in _checked(type(part)):  # this runs for each part of each profile, so it tells only at the end
        number = getattr(part, field)
        if not (type(number) is int and number >= 0 if is_count else 0 <= number < math.inf):
            (check_count if is_count else check_number)(f"{field} of {kind} {name!r}" if kind else field, number)


@functools.cache
def _checked(kind: type) -> tuple[tuple[str, bool], ...]:
    """The fields of a dataclass that have units, each with whether it must be an int."""
    return tuple((field, unit.__origin__ is int) for field, unit in units_of(kind).items())


@functools.cache
def units_of(kind: type) -> Mapping[str, Any]:
    """The units of a dataclass's numbers, by field."""
    types = get_type_hints(kind, include_extras=True).items()
    return {name: unit for name, unit in types if get_origin(unit) is Annotated}


def check_count(what: str, count: int) -> None:
    """ValueError naming `what` unless `count` is a non-negative int."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"{what} is {count!r}; it must be a non-negative int")


def check_number(what: str, number: float) -> None:
    """ValueError naming `what` unless the number is finite and non-negative."""
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what} is {number!r}; it must be finite and non-negative")
