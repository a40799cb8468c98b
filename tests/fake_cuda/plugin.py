"""A fake CUDA device: `python -m pytest -p tests.fake_cuda.plugin -m gpu tests/...` runs tests for a GPU without one.

Torch must be one for the CPU. What it then takes for a CUDA device computes on the CPU, but:

* Autograd runs backward in a thread of its own, as for every device.
* The host cannot read a tensor's memory. What would wait for the device counts, or is an error where a test says so.
* Sizes are rounded as by CUDA's allocator. The profiler and `torch.cuda.memory_allocated` tell of them.
* The generator has 16 bytes of state, dropout is one operator, and attention is that of the memory-efficient kernels.

It proves nothing of what is asynchronous: streams and events do nothing. Nor has it CUDA's kernels, or a compiler for
them. A test that writes to a tensor by its address needs FAKE_CUDA_OPEN=1 in the environment.
"""

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import time
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = """
from torch.utils import cpp_extension
print(cpp_extension.load("fake_cuda", [{source!r}], extra_cflags=["-O1", "-w"]).__file__)
"""


def loaded():
    """The compiled part. Torch asks once which devices there are: as soon as it is imported it is too late."""
    if "torch" in sys.modules:
        raise RuntimeError("the fake CUDA device must be loaded before torch: pass -p tests.fake_cuda.plugin to pytest")
    command = [sys.executable, "-c", BUILD.format(source=str(HERE / "fake_cuda.cpp"))]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(libraries / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("fake_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = loaded()

import torch  # noqa: E402

ONE = torch.device("cuda", 0)


class Stream:
    """A stream by its number, 0 for the default one. Nothing is asynchronous, so there is nothing to wait for."""

    def __init__(self, *_, stream_id=None, device_index=0, device_type=1):
        self.stream_id = device.new_stream() if stream_id is None else stream_id
        self.device, self.device_index, self.device_type, self.cuda_stream = ONE, 0, 1, self.stream_id

    def __eq__(self, other):
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self):
        return self.stream_id

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        assert event.is_recorded, "nothing was recorded, so nothing would be waited for"

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        device.note_sync("cudaStreamSynchronize")

    def query(self):
        return True


class Event:
    """An event, with the host's time at which it was recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.is_recorded, self.at = False, 0.0

    def record(self, stream=None):
        self.is_recorded, self.at = True, time.perf_counter()

    def wait(self, stream=None):
        assert self.is_recorded

    def synchronize(self):
        device.note_sync("cudaEventSynchronize")

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@contextlib.contextmanager
def on_stream(stream):
    before = device.current_stream()
    if stream is not None:
        device.set_stream(stream.stream_id)
    try:
        yield
    finally:
        device.set_stream(before)


class CurrentDevice(contextlib.nullcontext):
    """`torch.cuda.device`: there is one."""


def always(value, *names):
    """Functions that return the value, by name. Dynamo knows functions of torch by identity, so each has its own."""
    return {name: (lambda *_: value) for name in names}


SYNC_MODES = {"default": 0, "warn": 1, "error": 2}
GENERATORS = (device.default_generator(),)
PROPERTIES = types.SimpleNamespace(name="fake CUDA", L2_cache_size=1 << 20, total_memory=6 << 30, major=9, minor=0)
OF_TORCH_CUDA = {
    **always(True, "is_available", "is_initialized", "is_bf16_supported"),
    **always(False, "_is_in_bad_fork", "is_current_stream_capturing"),
    **always(None, "_lazy_init", "init", "set_device", "empty_cache", "_sleep"),
    **always(0, "_exchange_device", "_maybe_exchange_device", "current_device"),
    **always(1, "device_count"),
    "_initialized": True,
    "get_device_name": lambda *_: PROPERTIES.name,
    "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda *_: PROPERTIES,
    "memory_allocated": lambda *_: device.allocated(),
    "memory_reserved": lambda *_: device.reserved(),
    "max_memory_reserved": lambda *_: device.reserved(),
    "max_memory_allocated": lambda *_: device.peak(),
    "reset_peak_memory_stats": lambda *_: device.reset_peak(),
    "memory_stats": lambda *_: {},
    "mem_get_info": lambda *_: (PROPERTIES.total_memory - device.reserved(), PROPERTIES.total_memory),
    "manual_seed": lambda number: GENERATORS[0].manual_seed(int(number)),
    "manual_seed_all": lambda number: GENERATORS[0].manual_seed(int(number)),
    "set_sync_debug_mode": lambda mode: device.set_sync_mode(SYNC_MODES.get(mode, mode)),
    "synchronize": lambda *_: device.note_sync("cudaDeviceSynchronize"),
    "default_generators": GENERATORS,
    "get_rng_state": lambda *_: GENERATORS[0].get_state(),
    "set_rng_state": lambda state, *_: GENERATORS[0].set_state(state),
    "Stream": Stream,
    "Event": Event,
    "stream": on_stream,
    "device": CurrentDevice,
    "current_stream": lambda *_: Stream(stream_id=device.current_stream()),
    "default_stream": lambda *_: Stream(stream_id=0),
}
for name, thing in OF_TORCH_CUDA.items():
    setattr(torch.cuda, name, thing)
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentStream = lambda _: (device.current_stream(), 0, 1)
torch._C._cuda_getCurrentRawStream = lambda _: device.current_stream()
torch.Tensor.record_stream = lambda *_: None
