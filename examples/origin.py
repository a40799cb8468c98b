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
    """The commit of this source tree, with a mark if files have changed since; "unknown" if it is not a clone."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:  # no git
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"
