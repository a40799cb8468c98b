"""Compile the emulator's runtime and .cu files with g++, once for each content."""

import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"ds_adacc-emulator-{os.getuid()}"
COMMON = ["-std=c++17", "-gdwarf-4", "-g1", "-fPIC", "-U_FORTIFY_SOURCE"]  # -g1: lines, which errors name
KERNEL = [
    *["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-DDS_ADACC_EMULATED", "-Werror=maybe-uninitialized"],
    # The sanitizers' instrumentation without their libraries: memory.cpp has the functions that it calls.
    "-fsanitize=thread,bounds,alignment,shift-exponent,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
]
_KERNEL_NAME = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\(([^()]*)\)\s*)?(\w+)\s*\(")


class CompileError(Exception):
    """g++ does not take a kernel; the message is its own."""


@cache
def build_runtime() -> Path:
    """Return the shared library that runs kernels and checks their memory."""
    sources = [HERE / "scheduler.cpp", HERE / "memory.cpp"]
    headers = [HERE / "runtime.h", HERE / "internal.h"]
    command = ["g++", *COMMON, "-Wall", "-Wextra", "-Werror", "-O2", "-shared", *map(str, sources)]
    return _built("runtime", command, [*sources, *headers], [])


def build_module(source: Path, kernels: dict[str, str]) -> Path:
    """Return the shared library of a .cu file with an entry for each of `kernels`, as `list_kernels` has them.

    Raises CompileError with what g++ says.
    """
    runtime = build_runtime()
    headers = [HERE / name for name in ("device.h", "runtime.h", "module.h")]
    entries = "".join(f"EMULATOR_KERNEL({name}, {bound})\n" for name, bound in kernels.items())
    unit = f'#include "{source}"\n#include "module.h"\n{entries}'
    command = ["g++", *COMMON, *KERNEL, *_includes(source), "-c", "-x", "c++", "-"]
    folder = sorted([*source.parent.glob("*.cuh"), source])
    return _built(source.stem, command, [*folder, *headers, runtime], [str(runtime)], unit)


def list_kernels(source: Path) -> dict[str, str]:
    """Return the kernels of a .cu file, macros expanded, and how many threads a block may have: a C++ expression."""
    text = _run(["g++", "-E", "-P", "-DDS_ADACC_EMULATED", "-I", str(source.parent), "-x", "c++", str(source)])
    return {name: bound.split(",")[0] or "1024" for bound, name in _KERNEL_NAME.findall(text)}


def _includes(source: Path) -> list[str]:
    return ["-I", str(source.parent), "-I", str(HERE), "-include", "device.h"]


def _built(name: str, command: list[str], inputs: list[Path], libraries: list[str], unit: str = "") -> Path:
    content = [path.read_bytes() for path in inputs]
    digest = hashlib.sha256(b"\0".join([repr(command).encode(), unit.encode(), *content])).hexdigest()[:20]
    target = CACHE / f"{name}-{digest}.so"
    if target.exists():
        return target
    CACHE.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fresh = Path(folder) / target.name
        if unit:
            compiled = Path(folder) / "unit.o"
            _run([*command, "-o", str(compiled)], unit)
            command = ["g++", "-shared", "-Wl,-z,defs", str(compiled), *libraries]
        _run([*command, "-o", str(fresh)])
        os.replace(fresh, target)
    return target


def _run(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
