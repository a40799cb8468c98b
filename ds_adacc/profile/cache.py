"""Profiles kept on disk: a block that one run has measured is not measured again by the next."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from ds_adacc import kernels, planner
from ds_adacc.config import AdaccConfig
from ds_adacc.environment import cache_folder, device_name, versions
from ds_adacc.log import get_logger

BUSY_SECONDS = 10.0  # how long to wait for another process's lock
APPLICATION_ID = 0x41444143  # "ADAC": marks the SQLite file as ours
SCHEMA_VERSION = 1

_SCHEMA = "CREATE TABLE profiles (key TEXT PRIMARY KEY, description TEXT, saved TEXT, profile TEXT NOT NULL)"
_MEASURED = ("backend", "group_size", "scale", "rounding", "zscore_threshold")
_SOURCES = (".py", ".cu", ".cuh")
_ROOM = Path(__file__).parent
_PROFILE = TypeAdapter(planner.Profile)

# application_id, user_version and number of tables
_NEW = (0, 0, 0)
_OURS = (APPLICATION_ID, SCHEMA_VERSION, 1)

Result = TypeVar("Result")


def default_path() -> Path:
    """`profiles.sqlite` in the user's cache folder."""
    return cache_folder() / "profiles.sqlite"


def profile_key(
    digest: str, code: str, offers: Sequence[Sequence[str]], device: torch.device, section: AdaccConfig
) -> str:
    """A SHA-256, in hexadecimal, of everything that a measurement depends on (Rule P7).

    That is the `digest` of the block's recording, that of the `code` of its Functions, the names of the codecs in
    `offers` for each value, the device, the versions of the packages, the sources of the kernels and of this room,
    which says how things are measured, those keys of the section that change what a codec does, and torch's switches.
    """
    measured = {key: getattr(section, key) for key in _MEASURED}
    sources = [_sources_digest(folder) for folder in (Path(kernels.__file__).parent, _ROOM)]
    offered = [list(names) for names in offers]
    parts = [digest, code, offered, device_name(device), versions(), sources, measured, _switches()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _switches() -> list[object]:
    """Torch's switches that decide with which kernels an operator runs."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    # `torch.get_float32_matmul_precision` raises an error if a program has set one of these.
    precise = (cuda, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    half = (cuda.allow_fp16_accumulation, cuda.allow_fp16_reduced_precision_reduction)
    half += (cuda.allow_bf16_reduced_precision_reduction,)
    how = (torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.deterministic, cudnn.benchmark)
    return [*(each.fp32_precision for each in precise), *half, *how]


@functools.cache  # this process runs the kernels that it has loaded: a later edit does not concern it
def _sources_digest(folder: Path) -> str:
    """A SHA-256, in hexadecimal, of all Python and CUDA sources under `folder`.

    A version stays the same while somebody edits a kernel, or installs from another commit; its times do not.
    """
    hashed = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()


def describe(device: torch.device) -> str:
    """Device and versions in words, for a person who opens the file."""
    return f"{device_name(device)}; " + ", ".join(f"{name} {version}" for name, version in versions().items())


class ProfileCache:
    """Profiles by key, in an SQLite file that any number of processes may use at once.

    Rule P8: the cache never stops a run. If the disk or the lock fails, it warns once, and this process no longer uses
    the file. A file that is damaged, or that another program or another version wrote, is renamed, and an empty one
    takes its place. Each operation opens a connection of its own, so that no connection crosses a fork.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def load(self, key: str) -> planner.Profile | None:
        """The profile saved under `key`, or None."""
        return self._attempt(lambda connection: _read(connection, key))

    def save(self, key: str, profile: planner.Profile, description: str = "") -> None:
        """Keep `profile` under `key` in place of an earlier one. `description` is for a person who opens the file."""
        saved = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = (key, description, saved, _PROFILE.dump_json(profile).decode())
        self._attempt(lambda connection: connection.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", row))

    def count(self) -> int:
        """How many profiles the file holds; 0 if there is no file. Writes nothing. Raises sqlite3.Error if it cannot
        read the file, and sqlite3.DatabaseError if the file is not a cache of this version."""
        if not self._path.exists():
            return 0
        address = f"{self._path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=BUSY_SECONDS, uri=True)) as connection:
            if (identity := _identity(connection)) == _NEW:
                return 0
            _check(identity)
            return connection.execute("SELECT count(*) FROM profiles").fetchone()[0]

    def _attempt(self, operation: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """What `operation` returns; None if the file cannot be used, with a warning the first time."""
        if self._failed:
            return None
        try:
            try:
                return self._run(operation)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside()
                return self._run(operation)
        except (sqlite3.Error, OSError) as error:
            self._failed = True
            text = (
                "the profile cache %s cannot be used (%s): from now on this run measures every new block and keeps no "
                "profile. Set XDG_CACHE_HOME to another folder that can be written to, or make room there"
            )
            get_logger().warning(text, self._path, str(error))
            return None

    def _run(self, operation: Callable[[sqlite3.Connection], Result]) -> Result:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connect(self._path)) as connection:
            _prepare(connection)
            return operation(connection)

    def _set_aside(self) -> None:
        """Rename the file, unless another process has done so by now."""
        # The lock is an SQLite file: waiting for it has a time limit, and it is free again when its holder dies.
        with closing(_connect(self._path.with_name(f"{self._path.name}.lock"))) as lock:
            lock.execute("BEGIN EXCLUSIVE")
            if damage := self._damage():
                aside = _free_name(self._path)
                os.replace(self._path, aside)
                text = (
                    "the profile cache %s is damaged, or another version wrote it (%s): it was renamed to %s, which "
                    "you may delete; a new file takes its place, and blocks are measured again"
                )
                get_logger().warning(text, self._path, damage, aside)

    def _damage(self) -> str | None:
        try:
            return self._run(_fault)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return str(error)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection on which each statement is a transaction of its own."""
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)


def _free_name(path: Path) -> Path:
    """The first of path.bad, path.bad1, path.bad2, ... that does not exist yet."""
    names = (path.with_name(f"{path.name}.bad{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table in a new file. Raises sqlite3.DatabaseError for a database that is not ours."""
    if _identity(connection) == _NEW:
        connection.execute("BEGIN IMMEDIATE")  # takes the lock: another process may have made the table just now
        if _identity(connection) == _NEW:
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    _check(_identity(connection))


def _identity(connection: sqlite3.Connection) -> tuple[int, ...]:
    tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table'"
    queries = ("PRAGMA application_id", "PRAGMA user_version", tables)
    return tuple(connection.execute(query).fetchone()[0] for query in queries)


def _check(identity: tuple[int, ...]) -> None:
    if identity != _OURS:
        raise sqlite3.DatabaseError(f"application_id, user_version and number of tables are {identity}, not {_OURS}")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file's content is at fault. For disks, locks and statements sqlite3 raises a subclass."""
    return type(error) is sqlite3.DatabaseError


def _fault(connection: sqlite3.Connection) -> str | None:
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return None if verdict == "ok" else verdict.splitlines()[-1]


def _read(connection: sqlite3.Connection, key: str) -> planner.Profile | None:
    # As bytes: sqlite3 raises an error of its own for a text that damage has made no UTF-8.
    row = connection.execute("SELECT CAST(profile AS BLOB) FROM profiles WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    try:
        return _PROFILE.validate_json(row[0])
    except ValidationError as error:
        # The text is compared too: another process may have put a good profile in its place.
        connection.execute("DELETE FROM profiles WHERE key = ? AND CAST(profile AS BLOB) = ?", (key, row[0]))
        text = "a profile in the cache is damaged (%s): it was deleted, and its block is measured again"
        get_logger().warning(text, _first(error))
        return None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'profile'}: {detail['msg']}"
