"""Where this process runs: its device, the versions of what it runs on, and the user's cache folder."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")  # the names under which CuPy is distributed
_PACKAGES = ("ds_adacc", "torch", "numba", *CUPY)


def cache_folder() -> Path:
    """ds_adacc/ under XDG_CACHE_HOME, or ~/.cache. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_adacc"


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed; imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of ds_adacc and of what its speed depends on, of all that is installed."""
    found = ((name, installed(name)) for name in _PACKAGES)
    return {name: version for name, version in found if version is not None}


def device_name(device: torch.device) -> str:
    """The model of a CUDA device; else that of the processor, with the number of torch's threads."""
    import torch  # what reads a journal has no need of it

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The model name in /proc/cpuinfo; what the platform says, where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
