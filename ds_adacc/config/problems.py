"""What is wrong with a config: the error that users see, and how a check tells of a problem."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

Location = tuple[str | int, ...]
Problem = tuple[Location, Any, str]


class ConfigError(ValueError):
    """ds_config cannot be read, or its "adacc" section is wrong. Each line has the path of a key and what is wrong."""


def invalid(*problems: Problem) -> PydanticCustomError:
    """The error that a validator raises. The location of each problem is relative to the validated key."""
    return PydanticCustomError("problems", "invalid", {"problems": problems})


def nearest(value: Any, valid: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the end of a message: the name in `valid` that is most like `value`, if any is, and all valid names.

    `synonyms`: the valid names that other names mean.
    """
    valid = tuple(valid)
    near = []
    if isinstance(value, str):
        meant = (synonyms or {}).get(value.lower())
        near = [meant] if meant else difflib.get_close_matches(value.lower(), valid, n=1)
    return (f"; did you mean {near[0]!r}?" if near else "") + f" (valid: {', '.join(map(repr, valid))})"
