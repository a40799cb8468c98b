"""What `ds_adacc doctor` looks at: what is installed, and whether it works on this machine."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_adacc.environment import CUPY, installed
from ds_adacc.profile.cache_folder import default_path, sizes

_NOTHING_KEPT = "no profile is kept, and no journal"
_CPU_CAPABILITY = 8, 0  # what NVRTC is asked for where there is no device
_COMPILED_ON_CPU = "DeepSpeed builds an operator with it, once, when training on the CPU begins"
_COMPILED_ELSEWHERE = (
    "only for operators that DeepSpeed builds when they are first used, such as FusedAdam, and CPUAdam for "
    "offload_optimizer"
)


class Unclear(Exception):
    """It cannot be told whether something works; the text says why."""


class Absent(Exception):
    """Something is missing or does not work; the text says what, and `remedy` how to mend it."""

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


@dataclass(frozen=True)
class Finding:
    """One check: the version or state found, or why it does not work and which command mends it.

    `fine` is None if it cannot be told whether it works.
    """

    name: str
    fine: bool | None
    required: bool
    detail: str
    remedy: str = ""


def findings() -> list[Finding]:
    """The results of all checks."""
    cuda = f"pip install 'ds_adacc[{_cuda_extra()}]'" if _has_cuda_device() else ""  # it serves nothing else
    return [
        finding_of("Python", _python, "install another Python: https://www.python.org", required=True),
        *map(_requirement, _requirements()),
        finding_of("ds_adacc", _engine, required=True),
        finding_of("CBC", _cbc, "pip install --force-reinstall mip", required=True),
        finding_of("CuPy", _cupy, cuda),
        finding_of("NVRTC", _nvrtc, cuda),
        finding_of("matplotlib", partial(_import, "matplotlib"), "pip install 'ds_adacc[plots]'"),
        finding_of("C++ compiler", _compiler, "apt install g++", required=_runs_on_cpu()),
        finding_of("CUDA devices", _cuda_devices),
        finding_of("backend reference", partial(_backend, "reference"), required=True),
        finding_of("backend cpu", partial(_backend, "cpu"), "pip install --force-reinstall numba", required=True),
        finding_of("backend cuda", partial(_backend, "cuda"), cuda),
        finding_of("profile cache", _cache),
    ]


def cache_size() -> dict[str, Any]:
    """The profile cache at its default path: its "path", its "bytes", and how many "profiles" it holds.

    Raises OSError for a folder that cannot be read.
    """
    path = default_path()
    of_each = sizes(path)
    return {"path": str(path), "bytes": sum(of_each), "profiles": len(of_each)}


def finding_of(name: str, look: Callable[[], str], remedy: str = "", required: bool = False) -> Finding:
    """What `look` returns, or the error that it raises: an error in another package is a finding too."""
    try:
        return Finding(name, True, required, look())
    except Unclear as unclear:
        return Finding(name, None, required, f"cannot tell: {unclear}")
    except Absent as absent:
        return Finding(name, False, required, str(absent), absent.remedy or remedy)
    except Exception as error:
        return Finding(name, False, required, f"{type(error).__name__}: {error}".strip(), remedy)


def _python() -> str:
    version, valid = platform.python_version(), metadata.metadata("ds_adacc")["Requires-Python"]
    if version not in SpecifierSet(valid):
        raise Absent(f"{version}, which is not {valid}")
    return version


def _requirements() -> list[Requirement]:
    """The packages that ds_adacc requires, without its extras."""
    requirements = map(Requirement, metadata.requires("ds_adacc") or ())
    return [requirement for requirement in requirements if requirement.marker is None]


def _requirement(requirement: Requirement) -> Finding:
    def look() -> str:
        version = installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            raise Absent(f"{version}, which is not {requirement.specifier}")
        return _import(requirement.name)

    again = "--force-reinstall " if installed(requirement.name) else ""
    return finding_of(requirement.name, look, f"pip install {again}'{requirement}'", required=True)


def _import(name: str) -> str:
    """The version of a package, once its module of the same name has been imported."""
    if (version := installed(name)) is None:
        raise Absent("not installed")
    importlib.import_module(name)
    return version


def _engine() -> str:
    """The version, once all that training takes is imported: a release of torch or DeepSpeed may have moved it."""
    importlib.import_module("ds_adacc.engine.api")
    return metadata.version("ds_adacc")


def _cuda_extra() -> str:
    """The extra for torch's version of CUDA; the newer one if torch has no CUDA."""
    try:
        from torch.version import cuda
    except Exception:
        cuda = None
    return f"cuda{cuda.split('.')[0]}" if cuda else "cuda13"


def _cupy() -> str:
    found = [f"{name} {version}" for name in CUPY if (version := installed(name))]
    if not found:
        raise Absent("not installed")
    if len(found) > 1:
        raise Absent(f"{' and '.join(found)} are in each other's way: uninstall all of them first")
    importlib.import_module("cupy")
    return found[0]


def _nvrtc() -> str:
    _cupy()  # through which it is called
    import torch
    from cupy.cuda import nvrtc

    from ds_adacc.kernels.cuda.compiler import compile_cubin, compile_options

    options = compile_options(*(torch.cuda.get_device_capability() if _has_cuda_device() else _CPU_CAPABILITY))
    compile_cubin("bits.cu", options)
    return f"{'.'.join(map(str, nvrtc.getVersion()))}, compiles a kernel ({options[-1]})"


def _cbc() -> str:
    """Solve a small problem in a process of its own: two calls, and a budget that holds the saved value of one."""
    from ds_adacc import planner

    values = (planner.Value("x", "block_input", 0, None, True), planner.Value("y", "other", 64, 0, True))
    graph = planner.BlockGraph(values, (planner.Op("op", (0,), (1,), True),), (planner.Event("end", (1,), 0),))
    block_type = planner.BlockType("block", planner.Profile(graph, (1.0,), ((), ())), count=2)
    began = time.perf_counter()
    solution = planner.solve_in_process(planner.Problem((block_type,)), 100, max_seconds=10.0)
    seconds = time.perf_counter() - began
    if solution.fallback:
        raise Absent(solution.fallback)
    return f"solves a model in {seconds:.3f} s"


def _compiler() -> str:
    """The compiler that torch takes for DeepSpeed's operators. Nothing of ds_adacc's own needs it."""
    name, needed = os.environ.get("CXX", "c++"), _COMPILED_ON_CPU if _runs_on_cpu() else _COMPILED_ELSEWHERE
    if (path := shutil.which(name)) is None:
        raise Absent(f"{name} is not on the PATH: {needed}")
    return f"{path}: {needed}"


def _runs_on_cpu() -> bool:
    """Whether DeepSpeed trains on the CPU: there is no CUDA device, or the environment says so."""
    return os.environ.get("DS_ACCELERATOR", "cuda" if _has_cuda_device() else "cpu") == "cpu"


def _has_cuda_device() -> bool:
    try:
        import torch
    except Exception:  # of which a finding tells
        return False
    return torch.cuda.is_available()


def _cuda_devices() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Absent("none" if torch.version.cuda else "none: torch is built for the CPU")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return "\n".join(f"cuda:{i} {d.name}, {d.total_memory / 2**30:.1f} GiB" for i, d in enumerate(devices))


def _backend(name: str) -> str:
    """Compress and decompress a tensor, and compare with the reference."""
    import torch

    from ds_adacc.kernels import make_codec

    if name == "cuda" and not torch.cuda.is_available():
        raise Absent("no CUDA device")
    x = torch.arange(-128.0, 128.0, device="cpu").reshape(2, 128)
    results = []
    for backend, device in (("reference", "cpu"), (name, "cuda" if name == "cuda" else "cpu")):
        codec = make_codec("group", backend=backend, group_size=128)
        results.append(codec.decompress(codec.compress(x.to(device)), x.shape, x.dtype).cpu())
    if not torch.equal(*results):
        raise Absent("runs, but gives other bits than the reference")
    return "runs here"


def _cache() -> str:
    remedy = "set XDG_CACHE_HOME to a folder that you may write to"
    try:
        size = cache_size()
    except OSError as error:
        raise Absent(f"{type(error).__name__}: {error}", remedy) from error
    path = Path(size["path"]).absolute()
    folder = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not folder.exists():
        raise Absent(f"{folder} is a link to {os.readlink(folder)}, which does not exist: {_NOTHING_KEPT}", remedy)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise Absent(f"{folder} cannot be written to: {_NOTHING_KEPT}", remedy)
    count = size["profiles"]
    return f"{size['path']}, {size['bytes'] / 2**20:.1f} MiB, {count} profile{'' if count == 1 else 's'}"
