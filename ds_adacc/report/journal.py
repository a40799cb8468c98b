"""What a run did, as lines of JSON: one event a line, written as it happens."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from ds_adacc.environment import cache_folder
from ds_adacc.log import get_logger

_KEPT = 1000  # journals in `folder`
_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?\.jsonl")  # of a journal as `Journal.of_this_run` names it


class JournalError(ValueError):
    """A journal cannot be read; the text names the file, and the line if a line is wrong."""


def folder() -> Path:
    """The folder runs/ in the user's cache folder, where runs keep their journals."""
    return cache_folder() / "runs"


def default_path(now: datetime, pid: int) -> Path:
    """The journal of a process that began at `now`."""
    return folder() / f"{now:%Y%m%d-%H%M%S}-{pid}.jsonl"


def latest() -> Path | None:
    """The journal in `folder` of the run that began last, or None. Raises OSError for a folder that cannot be read."""
    return next(reversed(_oldest_first()), None)


def _oldest_first() -> list[Path]:
    """The journals in `folder`. A file that the user has named is none: it is never deleted.

    Raises OSError for a folder that cannot be read.
    """
    try:
        names = os.listdir(folder())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((folder() / name for name in names if _NAME.fullmatch(name)), key=lambda path: path.stem)


class Journal:
    """Adds events to a file; with a `path` of None it writes nothing.

    The file is opened for each event: a crash loses nothing, and a forked process shares no buffer. If the disk fails,
    one warning is logged and nothing is written from then on.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of_this_run(cls) -> Journal:
        """A journal at `default_path`; of a further engine in the same second, at that with a number.

        Of the journals in the folder the oldest are deleted, so that there are at most `_KEPT`.
        """
        path = default_path(datetime.now(), os.getpid())
        further = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
        free = next(each for each in itertools.chain([path], further) if not os.path.exists(each))  # never raises
        _delete_oldest()
        return cls(free)

    def write(self, event: str, **fields: object) -> None:
        """Add a line with "event", "time" (ISO 8601, with the zone) and the fields.

        Raises TypeError or ValueError for a field that JSON cannot hold.
        """
        if self._path is None:
            return
        time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({"event": event, "time": time, **fields}, allow_nan=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(line.encode())
        except OSError as error:
            text = "the run goes on without its journal %s, so `ds_adacc report` will not show it: %s"
            get_logger().warning(text, self._path, str(error))
            self._path = None


def _delete_oldest() -> None:
    """Make room for a new journal among those that are kept: they would fill the disk."""
    with contextlib.suppress(OSError):  # of a folder that cannot be read; writing tells of it
        for path in _oldest_first()[: -(_KEPT - 1)]:
            with contextlib.suppress(OSError):  # another run has deleted it, or the folder is only readable: no harm
                path.unlink()


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a journal, in order, also while it is being written: a last line that is cut off is left out.

    Raises JournalError for a file that cannot be read, and for any other line that holds no event.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from error
    events = [_event(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return events + _whole(last)


def _whole(line: bytes) -> list[dict[str, Any]]:
    try:
        return [_event(line, "")]
    except JournalError:
        return []


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"{where}: not a line of JSON: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise JournalError(f'{where}: must be an object with a name as its "event"')
    return event


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON's")
