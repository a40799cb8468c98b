"""Profiles kept on disk, so that a block measured once is not measured anew by the next run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.environment import cache_folder, device_name, versions
from ds_adacc.log import get_logger

BUSY_SECONDS = 10.0  # how long another process's lock is waited for
APPLICATION_ID = 0x41444143  # "ADAC", by which SQLite tells whose file it is
SCHEMA_VERSION = 1

_SCHEMA = "CREATE TABLE profiles (key TEXT PRIMARY KEY, description TEXT, saved TEXT, profile TEXT NOT NULL)"
_MEASURED = ("backend", "group_size", "scale", "rounding", "zscore_threshold")
_PROFILE = TypeAdapter(planner.Profile)

# application_id, user_version and number of tables
_NEW = (0, 0, 0)
_OURS = (APPLICATION_ID, SCHEMA_VERSION, 1)

Result = TypeVar("Result")


def default_path() -> Path:
    """profiles.sqlite in the user's cache folder."""
    return cache_folder() / "profiles.sqlite"


def open_default() -> ProfileCache | None:
    """The store at `default_path`; None, with a warning, for a user without a home."""
    try:
        return ProfileCache(default_path())
    except RuntimeError as error:
        get_logger().warning("profiles are not kept: %s", error)
        return None


def profile_key(digest: str, offers: Sequence[Sequence[str]], device: torch.device, section: AdaccConfig) -> str:
    """What a measurement depends on, as a SHA-256 in hexadecimal.

    `digest` is that of the block's recording, `offers` names the codecs on offer for each value; device, versions and
    the keys of the section that change what a codec does come besides.
    """
    measured = {key: getattr(section, key) for key in _MEASURED}
    measured["gradient_errors"] = section.max_gradient_error is not None
    parts = [digest, [list(names) for names in offers], device_name(device), versions(), measured]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def describe(device: torch.device) -> str:
    """Device and versions in words, for people who look into the file."""
    return f"{device_name(device)}; " + ", ".join(f"{name} {version}" for name, version in versions().items())


class ProfileCache:
    """Profiles by key, in an SQLite file that any number of processes may use at once.

    It never stops a run. A disk or a lock that fails is one warning, and nothing is read or written from then on. A
    file that is damaged, or not of this store and version, is moved aside and begun anew. A connection lives for one
    operation, so that none crosses a fork.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def load(self, key: str) -> planner.Profile | None:
        """The profile saved under `key`, or None."""
        return self._attempt(lambda connection: _read(connection, key))

    def save(self, key: str, profile: planner.Profile, description: str = "") -> None:
        """Keep a profile, in the place of an earlier one; `description` is for people."""
        saved = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = (key, description, saved, _PROFILE.dump_json(profile).decode())
        self._attempt(lambda connection: connection.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?)", row))

    def count(self) -> int:
        """How many profiles there are, 0 without a file. Changes nothing; raises sqlite3.Error if it cannot tell."""
        if not self._path.exists():
            return 0
        address = f"{self._path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=BUSY_SECONDS, uri=True)) as connection:
            if (identity := _identity(connection)) == _NEW:
                return 0
            _check(identity)
            return connection.execute("SELECT count(*) FROM profiles").fetchone()[0]

    def _attempt(self, operation: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """What the operation gives; None, with a warning the first time, if the store cannot be used."""
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
            get_logger().warning("profiles are not kept in %s: %s", self._path, error)
            return None

    def _run(self, operation: Callable[[sqlite3.Connection], Result]) -> Result:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connect(self._path)) as connection:
            _prepare(connection)
            return operation(connection)

    def _set_aside(self) -> None:
        """Move the file away, unless another process has done so by now."""
        # an SQLite file as the lock: it can be waited for with a limit, and is free again when its holder dies
        with closing(_connect(self._path.with_name(f"{self._path.name}.lock"))) as lock:
            lock.execute("BEGIN EXCLUSIVE")
            if damage := self._damage():
                aside = _free_name(self._path)
                os.replace(self._path, aside)
                text = "%s cannot hold profiles (%s); it is now %s, and a new file takes its place"
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
    """`path` with .bad after it, or .bad1, .bad2, ... where earlier ones lie."""
    names = (path.with_name(f"{path.name}.bad{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table in a new file. Raises sqlite3.DatabaseError for a database that is not of this store."""
    if _identity(connection) == _NEW:
        connection.execute("BEGIN IMMEDIATE")
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
    """Whether the file is at fault: for disks, locks and statements sqlite3 has subclasses."""
    return type(error) is sqlite3.DatabaseError


def _fault(connection: sqlite3.Connection) -> str | None:
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return None if verdict == "ok" else verdict.splitlines()[-1]


def _read(connection: sqlite3.Connection, key: str) -> planner.Profile | None:
    row = connection.execute("SELECT profile FROM profiles WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    try:
        return _PROFILE.validate_json(row[0])
    except ValidationError as error:
        # the text is named too: another process may have put a good one in its place
        connection.execute("DELETE FROM profiles WHERE key = ? AND profile = ?", (key, row[0]))
        get_logger().warning("the profile %s was no good and is deleted: %s: %s", key, type(error).__name__, error)
        return None
