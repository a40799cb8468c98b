"""Where this process runs: its device, the installed versions, and the user's cache folder."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")  # the names under which CuPy is distributed
_KERNELS = ("triton", "liger-kernel", "flash-attn", "transformer-engine", "xformers")  # whose speed a profile has
_PACKAGES = ("ds_adacc", "torch", "deepspeed", "numba", *CUPY, *_KERNELS)


def cache_folder() -> Path:
    """ds_adacc/ under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_adacc"


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed. Imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of ds_adacc and of the packages that its speed depends on, as far as they are installed."""
    found = ((name, installed(name)) for name in _PACKAGES)
    return {name: version for name, version in found if version is not None}


def device_name(device: torch.device) -> str:
    """The model of a CUDA device; for any other, that of the processor and the number of torch's threads."""
    import torch  # imported here: commands that only read a journal must not wait for it

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor() -> str:
    """The model name in /proc/cpuinfo; without such a file, what Python's `platform` says."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
