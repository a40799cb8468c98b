"""Rows of a measurement, each written as soon as it is measured: one line of JSON in a file.

A row has its "name", the "seconds" that it took, and what was measured. In place of that, a row of something that
failed has "error", with the traceback; one that did not fit into the device's memory has "out_of_memory"; one for which
no time was left has "skipped", with the reason. None of these stops the rows that follow.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]
SHARED = "tokens_per_second", "peak_bytes"  # figures of which a row tells the share of another one
HANGS = 240.0  # seconds after which a row is given up
DEVICE_LOST = 75  # the exit code of a process that must be started anew to measure on


class DeviceLost(SystemExit):
    """A kernel has failed: from now on every call of this process to the device fails. Ends it with DEVICE_LOST."""

    def __init__(self) -> None:
        super().__init__(DEVICE_LOST)


class Rows:
    """Measures rows within `seconds`, and writes them to `file`.

    `resumes`: go on where another process ended. The rows in the file are not measured again; the one that was being
    measured when that process died gets an error. `pattern`: a regular expression; rows whose whole names it does not
    match are left out. `measured`: the rows that hold what was measured, by name. `known`: the names of these and of
    those that failed.
    """

    def __init__(self, file: Path, seconds: float, resumes: bool = False, pattern: str = ".*") -> None:
        self.measured: dict[str, Row] = {}
        self.has_failed = False
        self._file, self._ends = file, time.monotonic() + seconds
        self._pattern = re.compile(pattern)
        self._running = file.with_suffix(".running")  # the name of the row that is being measured
        self.known: set[str] = set()
        self._longest: dict[str, float] = {}
        if not resumes:
            file.write_text("")
            self._running.unlink(missing_ok=True)
            return
        for line in file.read_text().splitlines():
            self._note(json.loads(line))
        if self._running.exists():
            self._end({"name": self._running.read_text(), "error": "the process died or hung in this row; see the log"})

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def wants(self, name: str) -> bool:
        return self._pattern.fullmatch(name) is not None

    def measure(
        self, name: str, measure: Callable[[], Row], kind: str = "", least: float = 0.0, spare: float = 0.0
    ) -> Row | None:
        """What `measure` returns, once it is written; None if there is nothing, or the row is not wanted.

        The row is skipped if it needs more time than is left: the `least` seconds given, or those of the longest row of
        its `kind` so far; and at the end there must be `spare` seconds for others. Raises DeviceLost after an error
        that the device does not survive.
        """
        if name in self.known:
            return self.measured.get(name)
        if not self.wants(name):
            return None
        needed, left = max(least, self._longest.get(kind, 0.0)), self.seconds_left - spare
        if left < needed or left <= 0:
            return self._end(
                {"name": name, "skipped": f"{left:.0f} s are left for it, and it takes about {needed:.0f} s"}
            )
        began = time.monotonic()
        try:
            return self.write(name, measure)
        finally:
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - began)

    def write(self, name: str, measure: Callable[[], Row]) -> Row | None:
        """Measure and write a row, however little time is left."""
        self.begin(name)
        began = time.monotonic()
        try:
            found = dict(measure())
        except torch.OutOfMemoryError as error:
            found = {"out_of_memory": str(error).splitlines()[0]}
        except Exception:
            traceback.print_exc()  # if the device is lost, this process may die before the row is written
            found = {"error": traceback.format_exc()}
        row = self._end({"name": name, "seconds": round(time.monotonic() - began, 3), **found})
        if "error" in found:
            check_device()
        return row

    def shares(self, row: Row, base: str, called: str) -> dict[str, float]:
        """The row's speed and peak as shares of those of the row `base`; none if that was not measured."""
        if base not in self.measured:
            return {}
        return {f"{what}_of_{called}": row[what] / self.measured[base][what] for what in SHARED}

    def begin(self, name: str) -> None:
        """Note that this row is being measured, in case the process dies of it. If it hangs, it is made to die."""
        self._running.write_text(name)
        faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)

    def _end(self, row: dict[str, Any]) -> Row | None:
        with self._file.open("a") as file:
            file.write(json.dumps(_plain(row)) + "\n")
        print(_shown(row), flush=True)
        faulthandler.cancel_dump_traceback_later()
        self._running.unlink(missing_ok=True)
        return self._note(row)

    def _note(self, row: dict[str, Any]) -> Row | None:
        self.has_failed |= "error" in row
        if "skipped" in row:
            return None
        self.known.add(row["name"])
        if "error" in row or "out_of_memory" in row:
            return None
        self.measured[row["name"]] = row
        return row


def check_device() -> None:
    """Raises DeviceLost if this process can no longer use the device."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost from error


def _plain(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _shown(row: Row) -> str:
    """A line for the log; an error with all its lines."""
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )
