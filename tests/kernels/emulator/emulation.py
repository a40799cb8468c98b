"""Run CUDA kernels on the CPU: the same .cu files, compiled by g++, every access to memory checked."""

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from emulator_build import build_module, build_runtime, list_kernels

Launch = Callable[[int, int, tuple[int, ...]], None]


class EmulationError(Exception):
    """A kernel did what no kernel may do; the message tells which kernel, block and thread, and where."""


class _SharedVariable(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("bytes", ctypes.c_size_t)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_longlong)),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("reversed", ctypes.c_bool),
        ("shared_base", ctypes.c_void_p),
        ("shared", ctypes.POINTER(_SharedVariable)),
        ("shared_count", ctypes.c_size_t),
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [
        ("failed", ctypes.c_bool),
        ("block", ctypes.c_uint),
        ("thread", ctypes.c_uint),
        ("code", ctypes.c_void_p),
        ("message", ctypes.c_char * 512),
    ]


@cache
def runtime() -> ctypes.PyDLL:
    """Return the emulator's runtime. It runs one launch at a time, so its calls keep the interpreter's lock."""
    library = ctypes.PyDLL(str(build_runtime()))
    library.emulator_uninitialised.restype = ctypes.c_size_t
    return library


class EmulatedKernels:
    """The `Kernels` that the codecs of `ds_adacc.kernels.cuda` launch, in this process.

    `folder` holds the .cu files. `reversed` runs blocks, warps and lanes from the last to the first: results that
    depend on the order differ. `launches` counts what has been launched.

    A launch raises EmulationError if a thread reads or writes outside the tensors of the open `DeviceMemory` and
    the shared variables, reads what nobody has written, accesses misaligned, races with another thread, overflows
    or converts what C++ leaves undefined, or if a barrier or warp intrinsic is not reached by all whom it names.
    """

    def __init__(self, folder: Path, reversed: bool = False) -> None:
        self.folder = folder
        self.reversed = reversed
        self.launches = 0

    def get(self, source: str, name: str) -> Launch:
        """Return the kernel `name` of a file in the folder. Raises KeyError if the file has none of that name."""
        module = _module(self.folder / source)
        if name not in module.kernels:
            raise KeyError(f"{source} has no kernel {name!r} (valid: {', '.join(module.kernels)})")

        def launch(grid: int, block: int, arguments: tuple[int, ...]) -> None:
            self.launches += 1
            module.launch(name, grid, block, arguments, self.reversed)

        return launch


@cache
def _module(path: Path) -> "_Module":
    return _Module(path)


class _Module:
    """One compiled .cu file."""

    def __init__(self, path: Path) -> None:
        self.kernels = list_kernels(path)
        self.path = build_module(path, self.kernels)
        runtime()
        self.library = ctypes.PyDLL(str(self.path))
        self.library.emulator_marker_address.restype = ctypes.c_void_p
        variables = _thread_local(self.path)
        self.marker = next(offset for name, offset, _ in variables if "emulator_marker" in name)
        shared = [_SharedVariable(name.encode(), *place) for name, *place in variables if "emulator_marker" not in name]
        self.shared = (_SharedVariable * len(shared))(*shared)

    def launch(self, name: str, grid: int, block: int, arguments: tuple[int, ...], reversed: bool) -> None:
        self._check(name, grid, block, len(arguments))
        slots = (ctypes.c_longlong * len(arguments))(*arguments)
        kernel = ctypes.cast(self.library[f"run_{name}"], ctypes.c_void_p)
        base = self.library.emulator_marker_address() - self.marker
        launch = _Launch(kernel, slots, grid, block, reversed, base, self.shared, len(self.shared))
        outcome = _Outcome()
        runtime().emulator_launch(ctypes.byref(launch), ctypes.byref(outcome))
        if outcome.failed:
            place = f"kernel {name}, block {outcome.block} of {grid}, thread {outcome.thread} of {block}"
            raise EmulationError(f"{place}: {outcome.message.decode()}{self._line(outcome.code)}")

    def _check(self, name: str, grid: int, block: int, given: int) -> None:
        bound, taken = self.library[f"bound_{name}"](), self.library[f"arguments_{name}"]()
        if not 1 <= grid < 1 << 31:
            raise EmulationError(f"kernel {name}: a grid has 1 to 2^31 - 1 blocks; got {grid}")
        if block % 32 or not 32 <= block <= bound:
            raise EmulationError(f"kernel {name}: a block has 32 to {bound} threads, in whole warps; got {block}")
        if given != taken:
            raise EmulationError(f"kernel {name} takes {taken} arguments; got {given}")

    def _line(self, code: int | None) -> str:
        """Return where in the sources a return address lies, innermost first."""
        if not code:
            return ""
        offset = code - 1 - _load_address(self.path)
        command = ["addr2line", "-fiCse", str(self.path), hex(offset)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return "".join(f"\n  in {function} ({place})" for function, place in zip(lines[::2], lines[1::2], strict=True))


def _thread_local(path: Path) -> list[tuple[str, int, int]]:
    """Return (name, offset, bytes) of each thread-local variable of a shared library."""
    table = subprocess.run(["readelf", "-sWC", str(path)], capture_output=True, text=True, check=True).stdout
    full = table[table.index("'.symtab'") :]
    rows = [line.split(None, 7) for line in full.splitlines() if " TLS " in line]
    return [(row[7], int(row[1], 16), int(row[2], 0)) for row in rows]


def _load_address(path: Path) -> int:
    """Return where in this process the first byte of a shared library lies."""
    with open("/proc/self/maps") as maps:
        return next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(str(path)))
