"""Where a recorded result comes from, and how it is written down."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from ds_adacc.environment import CUPY, installed


def origin(device: str) -> dict[str, str]:
    """Commit, date, command, device and versions of this run, for people to read."""
    versions = {name: installed(name) for name in ("torch", "deepspeed", "numba", *CUPY)}
    versions = {"python": platform.python_version()} | {name: each for name, each in versions.items() if each}
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": device,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def as_list(about: Mapping[str, object]) -> str:
    """What `origin` tells, as a list in Markdown."""
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def publish(path: Path, about: Mapping[str, object], text: str, **found: object) -> None:
    """Write `path`.md for people and `path`.json, with what was found, for programs. `about`: what `origin` tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.json").write_text(json.dumps({**about, **found}, indent=1) + "\n")
    path.with_name(f"{path.name}.md").write_text(f"{text}\n\n{as_list(about)}\n")


def _commit() -> str:
    """The commit of this source tree, with a mark if files have changed since.

    The variable COMMIT of the environment tells, if it is set: a copy of the tree may be no clone, or one with another
    history. Without it, the commit of a tree that is no clone is "unknown".

    Results do not count: a script that writes some after each part would mark the next part.
    """
    if told := os.environ.get("COMMIT"):
        return told
    try:
        name = _git("describe", "--always", "--exclude=*")
        changed = _git("diff", "--name-only", "HEAD", "--", ".", ":(top,exclude)benchmarks/results")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no clone
        return "unknown"
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    """What git says of the source tree. Raises FileNotFoundError without git, and CalledProcessError if git fails."""
    root = Path(__file__).parent.parent
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
