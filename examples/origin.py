"""Where a recorded result comes from."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path


def origin(device: str) -> dict[str, str]:
    """Commit, date, command, device and versions of this run, for people to read."""
    packages = ("torch", "deepspeed", "numba")
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": device,
        "versions": ", ".join(
            [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
        ),
    }


def _commit() -> str:
    """The commit of this source tree, with a mark if files have changed since; "unknown" if it is not a clone.

    Results do not count: a script that writes some after each part would mark the next part.
    """
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
