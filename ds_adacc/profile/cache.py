"""Profiles kept on disk: a block that one run has measured is not measured again by the next."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from ds_adacc import kernels, planner
from ds_adacc.config import AdaccConfig
from ds_adacc.environment import device_name, versions
from ds_adacc.kernels.atomic_write import atomic_write
from ds_adacc.log import get_logger
from ds_adacc.profile.cache_folder import SUFFIX

_MEASURED = ("backend", "group_size", "scale", "rounding", "zscore_threshold")
_SOURCES = (".py", ".cu", ".cuh")
_ROOM = Path(__file__).parent

Result = TypeVar("Result")


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
    """Device and versions in words, for a person who opens a file."""
    return f"{device_name(device)}; " + ", ".join(f"{name} {version}" for name, version in versions().items())


@dataclass(frozen=True)
class _Kept:
    """What a file holds. All but the profile is for a person who opens it."""

    description: str
    saved: str
    profile: planner.Profile


_KEPT = TypeAdapter(_Kept)


class ProfileCache:
    """Profiles by key, each a JSON file in one folder, which any number of processes may use at once.

    No lock is needed, as network file systems often have none that works: a file is written under another name, then
    renamed, so that nobody reads half of it, and the one renamed last counts. Another version has other keys.

    Rule P8: the cache never stops a run. If the disk fails, it warns once, and this process no longer uses the folder.
    A damaged file counts as none until its profile is saved again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed = False

    def load(self, key: str) -> planner.Profile | None:
        """The profile saved under `key`, or None."""
        return self._attempt(lambda: _read(self._path(key)))

    def save(self, key: str, profile: planner.Profile, description: str = "") -> None:
        """Keep `profile` under `key` in place of an earlier one. `description` is for a person who opens the file."""
        saved = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = _KEPT.dump_json(_Kept(description, saved, profile))
        self._attempt(lambda: atomic_write(self._path(key), content))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"

    def _attempt(self, operation: Callable[[], Result]) -> Result | None:
        """What `operation` returns; None if the folder cannot be used, with a warning the first time."""
        if self._failed:
            return None
        try:
            return operation()
        except OSError as error:
            self._failed = True
            text = (
                "the profile cache %s cannot be used (%s): from now on this run measures every new block and keeps no "
                "profile. Set XDG_CACHE_HOME to another folder that can be written to, or make room there"
            )
            get_logger().warning(text, self._folder, str(error))
            return None


def _read(path: Path) -> planner.Profile | None:
    try:
        return _KEPT.validate_json(path.read_bytes()).profile
    except FileNotFoundError:
        return None
    except ValidationError as error:
        # Not deleted: another process may have put a good one in its place by now.
        text = "a profile in the cache is damaged (%s): its block is measured again, and %s is then replaced"
        get_logger().warning(text, _first(error), path)
        return None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'profile'}: {detail['msg']}"
