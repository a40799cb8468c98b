"""Bytes as people read them. It imports nothing that `ds_adacc doctor` may find missing."""

from __future__ import annotations


def human_bytes(nbytes: float) -> str:
    """1536 -> '1.50 KiB'."""
    units, exponent = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while exponent < 4 and abs(round(nbytes / 1024**exponent, 2)) >= 1024:  # a byte less than 1 MiB is 1 MiB
        exponent += 1
    return f"{nbytes / 1024**exponent:.{2 if exponent else 0}f} {units[exponent]}"
