"""The key "memory_budget" of the section: what it may be, and what a value that is none is likely to mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from ds_adacc.config.problems import invalid

_FEWEST_BYTES = 1 << 14  # a smaller integer is percents, GiB or MiB; small models need few bytes
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b\s*", re.IGNORECASE)
_FRACTION = re.compile(r"0\.\d+|1\.0")
_PERCENTS = re.compile(r"\s*(\d{1,2}(?:\.\d+)?|100)\s*%\s*")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_UNIT_WITHOUT_B = re.compile(r"\d+(\.\d+)?\s*[kmgt]i?", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory the activations of all blocks may take.

    "auto": what the device has left. "bytes": `amount` bytes. "fraction": `amount`, in (0, 1], of the activations' peak
    without checkpointing.
    """

    kind: Literal["auto", "bytes", "fraction"]
    amount: int | float = 0

    def __str__(self) -> str:
        return '"auto"' if self.kind == "auto" else f"{self.amount:g}" if self.kind == "fraction" else str(self.amount)


def to_memory_budget(value: Any) -> MemoryBudget:
    """The budget that a value of the section means. Raises as `invalid` says."""
    if value == "auto":
        return MemoryBudget("auto")
    if isinstance(value, str) and (match := _BYTES.fullmatch(value)):
        amount = int(Decimal(match[1]) * _UNITS[match[2].lower()])
        if amount > 0:
            return MemoryBudget("bytes", amount)
    # DeepSpeed's reader of files makes 1.0 an integer.
    if (type(value) is float and 0 < value <= 1) or (type(value) is int and value == 1):
        return MemoryBudget("fraction", float(value))
    if type(value) is int and value >= _FEWEST_BYTES:
        return MemoryBudget("bytes", value)
    if type(value) is int and value > 0:
        meant = f"the fraction {value / 100}, or '{value}GiB'" if value <= 100 else f"'{value}MiB'"
        raise invalid(((), value, f"{value} bytes can hold nothing; did you mean {meant}?"))
    choices = (
        "'auto', bytes (an integer, or a string like '12GiB' or '1.5 GB'), or a fraction (0 < decimal number <= 1)"
    )
    raise invalid(((), value, f"must be {choices}{_meant(value)}"))


def _meant(value: Any) -> str:
    """The end of a message: which budget this value, which is none, is likely to mean; "" if that is not known."""
    if isinstance(value, str):
        value = value.strip()
        if value.lower() == "auto":
            return "; did you mean 'auto'?"
        if _UNIT_WITHOUT_B.fullmatch(value):
            return f"; did you mean '{value}B'?"
        if _FRACTION.fullmatch(value):
            return f"; did you mean {value}, without quotes?"
        if (percents := _PERCENTS.fullmatch(value)) and float(percents[1]) > 0:
            return f"; did you mean {float(Decimal(percents[1]) / 100):g}?"
        if _NUMBER.fullmatch(value) and float(value) > 0:
            meant = f"'{value}GiB'" if float(value) < _FEWEST_BYTES else f"{value}, without quotes"
            return f"; did you mean {meant}?"
    elif type(value) is float and 1 < value < _FEWEST_BYTES:
        fraction = value / 10 if value < 10 else value / 100
        smaller = f"{fraction:g} or " if fraction <= 1 else ""
        return f"; a fraction is at most 1; did you mean {smaller}'{value:g}GiB'?"
    elif type(value) is float and value >= _FEWEST_BYTES and value.is_integer():
        return f"; did you mean {int(value)}?"
    return ""
