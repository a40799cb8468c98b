"""Compile the kernels for a device with NVRTC, once for all processes of a machine, and load them through CuPy."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..atomic_write import atomic_write
from .kernel import Kernel

if TYPE_CHECKING:
    from cupy.cuda.function import Function, Module

FOLDER = Path(__file__).parent / "sources"
HEADER = "common.cuh"
SOURCES = ("bits.cu", "blocks.cu", "channel.cu", "groups.cu", "sums.cu")

BUFFER_END, BUFFER_POINTER, BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_* of the driver


def missing() -> str | None:
    """Return why CUDA codecs cannot run here, with the command that mends it; None if they can."""
    if torch.version.cuda is None:
        return "CUDA codecs need a torch that is built for CUDA; see https://pytorch.org/get-started for its command"
    extra = f"cuda{torch.version.cuda.split('.')[0]}"
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return f"CUDA codecs need CuPy with NVRTC: pip install 'ds-adacc[{extra}]' ({error})"
    return None


def warm_up(device: torch.device) -> None:
    """Compile and load all kernels for a CUDA device, before the first step rather than in it."""
    kernels = device_kernels(torch.device(device).index or 0)
    for source in SOURCES:
        kernels.load(source)


@functools.cache  # a module is loaded once a device; it lives as long as the process
def device_kernels(index: int) -> DeviceKernels:
    """Return the kernels of a CUDA device; raises RuntimeError if there is no CuPy."""
    if reason := missing():
        raise RuntimeError(reason)
    return DeviceKernels(index)


class DeviceKernels:
    """Kernels of one CUDA device, launched on torch's current stream there, from any thread."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._modules = {}
        self._lock = threading.Lock()

    def load(self, source: str) -> Module:
        """Return the module of sources/`source`, compiled and loaded at the first call."""
        from cupy.cuda import runtime
        from cupy.cuda.function import Module

        with self._lock, torch.cuda.device(self._index):
            if source not in self._modules:
                runtime.setDevice(self._index)  # CuPy loads to the device that its own runtime has, not torch's
                module = Module()
                module.load(cached_cubin(source, *torch.cuda.get_device_capability(self._index)))
                self._modules[source] = module
            return self._modules[source]

    def get(self, source: str, name: str) -> Kernel:
        """See `kernel.Kernels`."""
        return DeviceKernel(self.load(source).get_function(name), self._index)


class DeviceKernel:
    """A kernel on a device. CuPy's own call would make a NumPy number of each argument, at a microsecond apiece."""

    def __init__(self, function: Function, index: int) -> None:
        from cupy.cuda import driver, runtime

        self._function = function  # keeps the module loaded
        self._pointer, self._index = function.ptr, index
        self._launch_kernel, self._set_device = driver.launchKernel, runtime.setDevice
        self._thread = threading.local()

    def __call__(self, blocks: int, threads: int, args: tuple[int, ...]) -> None:
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._launch(blocks, threads, args)
        return self._launch(blocks, threads, args)

    def _launch(self, blocks: int, threads: int, args: tuple[int, ...]) -> None:
        if not hasattr(self._thread, "bound"):
            self._set_device(self._index)  # a new thread has no context until a CUDA call makes it current
            self._thread.bound = True
        # All are 64 bits wide, so that an array has room for the kernel's parameters, after what tells where they are.
        size = 8 * len(args)
        buffer = array("q", (BUFFER_POINTER, 0, BUFFER_SIZE, 0, BUFFER_END, *args, size))
        address = buffer.buffer_info()[0]
        buffer[1], buffer[3] = address + 40, address + 40 + size
        stream = torch._C._cuda_getCurrentRawStream(self._index)  # without making a Python object of it
        self._launch_kernel(self._pointer, blocks, 1, 1, threads, 1, 1, 0, stream, 0, address)


def cached_cubin(source: str, major: int, minor: int) -> bytes:
    """Return the cubin of sources/`source` for a compute capability, from the disk if it has been compiled before.

    The cache is ds_adacc/ under XDG_CACHE_HOME, or ~/.cache. One process compiles, the others wait for it. If the cache
    cannot be used, as on a file system without locks, every process compiles, after a warning.
    """
    options = compile_options(major, minor)
    try:
        return _kept(source, options)
    except OSError as error:
        text = (
            "the CUDA kernels in %s are compiled in every process (%s); to keep them, set XDG_CACHE_HOME to a folder "
            "that you may write to, on a file system with locks"
        )
        logging.getLogger("ds_adacc").warning(text, source, error)
        return compile_cubin(source, options)


def _kept(source: str, options: tuple[str, ...]) -> bytes:
    """The cubin in the cache; compiled if it is not there. Raises OSError if the cache cannot be used."""
    from cupy.cuda import nvrtc

    parts = (HEADER, read(HEADER), source, read(source), *options, str(nvrtc.getVersion()))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_adacc"
    except RuntimeError as error:  # this user has no home
        raise OSError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source}-{key[:32]}.cubin"
    with open(folder / f"{source}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text = "compiling the CUDA kernels in %s, which takes some seconds; the result is kept in %s"
            logging.getLogger("ds_adacc").info(text, source, folder)
            atomic_write(path, compile_cubin(source, options))
    return path.read_bytes()


def compile_options(major: int, minor: int) -> tuple[str, ...]:
    """Return NVRTC's options for a compute capability.

    Raises RuntimeError if this NVRTC knows no architecture whose code runs there.
    """
    from cupy.cuda import nvrtc

    # Code for one minor version runs on later ones of the same major.
    known = [arch for arch in nvrtc.getSupportedArchs() if 10 * major <= arch <= 10 * major + minor]
    if not known:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise RuntimeError(f"NVRTC {version} does not compile for compute capability {major}.{minor}; update CuPy")
    return "-std=c++17", f"-arch=sm_{max(known)}"


def compile_cubin(source: str, options: tuple[str, ...]) -> bytes:
    """Return sources/`source` compiled by NVRTC. Raises RuntimeError with the compiler's log if it fails."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(read(source), source, (read(HEADER).encode(),), (HEADER.encode(),))
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC cannot compile {source}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def read(name: str) -> str:
    """Return the text of a file of the sources."""
    return (FOLDER / name).read_text(encoding="utf-8")
