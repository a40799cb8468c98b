"""How kernels are compiled, cached, loaded and bound to a device; none of it needs one."""

import ctypes
import fcntl
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ds_adacc.kernels import cuda
from ds_adacc.kernels.cuda import compiler


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_the_command_that_brings_cupy(monkeypatch, version, extra):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert f"pip install 'ds-adacc[{extra}]'" in compiler.missing()


def test_nothing_is_missing_with_cupy(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert compiler.missing() is None


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "a torch that is built for CUDA" in compiler.missing()


# ---- compilation and its cache ----


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_adacc"


def test_a_cubin_is_compiled_once(cache, monkeypatch, caplog):
    with caplog.at_level("INFO", logger="ds_adacc"):
        first = compiler.cached_cubin("sums.cu", 8, 0)
    assert first[:4] == b"\x7fELF"
    assert caplog.messages == [
        f"compiling the CUDA kernels in sums.cu, which takes some seconds; the result is kept in {cache}"
    ]
    monkeypatch.setattr(compiler, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert compiler.cached_cubin("sums.cu", 8, 0) == first
    assert [path.suffix for path in cache.iterdir() if path.suffix != ".lock"] == [".cubin"]


def test_other_sources_and_architectures_have_other_cubins(cache, monkeypatch):
    monkeypatch.setattr(compiler, "compile_cubin", lambda source, options: f"{source} {options}".encode())
    found = {compiler.cached_cubin("sums.cu", 8, 0), compiler.cached_cubin("sums.cu", 9, 0)}
    found.add(compiler.cached_cubin("bits.cu", 8, 0))
    assert len(found) == 3
    read = compiler.read
    monkeypatch.setattr(compiler, "read", lambda name: read(name) + "// a change")
    monkeypatch.setattr(compiler, "compile_cubin", lambda *_: b"changed")
    assert compiler.cached_cubin("sums.cu", 8, 0) == b"changed"


def test_others_wait_for_the_one_that_compiles(cache, monkeypatch):
    def compile_cubin(source, options):
        with open(cache / "sums.cu.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return b"cubin"

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    assert compiler.cached_cubin("sums.cu", 8, 0) == b"cubin"
    with open(cache / "sums.cu.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("fault", ["no locks", "read-only", "no home"])
def test_without_a_cache_every_process_compiles(cache, monkeypatch, caplog, fault):
    def fails(*_, **__):
        raise RuntimeError("no home") if fault == "no home" else OSError(fault)

    if fault == "no locks":
        monkeypatch.setattr(fcntl, "flock", fails)
    elif fault == "read-only":
        monkeypatch.setattr(compiler.Path, "mkdir", fails)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(compiler.Path, "home", fails)
    monkeypatch.setattr(compiler, "compile_cubin", lambda *_: b"cubin")
    assert compiler.cached_cubin("sums.cu", 8, 0) == b"cubin"
    assert f"the CUDA kernels in sums.cu are compiled in every process ({fault})" in caplog.text


def test_a_failed_compilation_leaves_nothing_behind(cache, monkeypatch):
    monkeypatch.setattr(compiler, "read", lambda name: "a mistake;" if name == "sums.cu" else "")
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile sums\.cu: (.|\n)*mistake"):
        compiler.cached_cubin("sums.cu", 8, 0)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_code_for_an_earlier_minor_version_serves_a_later_one(monkeypatch):
    from cupy.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: [75, 80, 86, 90, 120])
    assert compiler.compile_options(8, 9)[-1] == "-arch=sm_86"
    assert compiler.compile_options(12, 1)[-1] == "-arch=sm_120"
    with pytest.raises(RuntimeError, match=r"does not compile for compute capability 10\.3"):
        compiler.compile_options(10, 3)


def test_all_sources_are_warmed_up(monkeypatch):
    loaded = []
    kernels = SimpleNamespace(load=loaded.append)
    monkeypatch.setattr(compiler, "device_kernels", lambda index: {2: kernels}[index])
    cuda.warm_up(torch.device("cuda", 2))
    assert loaded == sorted(path.name for path in compiler.FOLDER.glob("*.cu"))


# ---- the launch itself ----


class Driver:
    """What a kernel asks of torch and of CuPy's driver, noted."""

    def __init__(self, monkeypatch, current=0):
        self.launched, self.bound, self.current = [], [], current
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7000 + index, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def launch(self, function, bx, by, bz, tx, ty, tz, shared, stream, pointers, extra):
        """As cuLaunchKernel reads its `extra`: 1, the parameters' address, 2, their size's address, 0."""
        one, address, two, size, end = (ctypes.c_longlong * 5).from_address(extra)
        assert (one, two, end, pointers) == (1, 2, 0, 0)
        size = ctypes.c_size_t.from_address(size).value
        values = list((ctypes.c_longlong * (size // 8)).from_address(address))
        self.launched.append((self.current, function, (bx, by, bz), (tx, ty, tz), shared, stream, values))

    def kernel(self, index):
        kernel = compiler.DeviceKernel(SimpleNamespace(ptr=99), index)
        kernel._launch_kernel, kernel._set_device = self.launch, self.bound.append
        return kernel


def test_a_module_is_loaded_once_on_its_device_whichever_is_current(monkeypatch):
    driver, asked = Driver(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(compiler, "cached_cubin", lambda *of: of)
    monkeypatch.setattr("cupy.cuda.runtime.setDevice", lambda index: asked.append(("set", index)))
    load = SimpleNamespace(load=lambda cubin: asked.append((cubin, driver.current)))
    monkeypatch.setattr("cupy.cuda.function.Module", lambda: load)
    kernels = compiler.DeviceKernels(1)
    assert kernels.load("bits.cu") is kernels.load("bits.cu") is load
    assert asked == [("set", 1), (("bits.cu", 9, 1), 1)] and driver.current == 0


def test_a_launch_passes_64_bit_arguments_on_torchs_stream(monkeypatch):
    driver = Driver(monkeypatch)
    driver.kernel(0)(5, 256, (1 << 62, -3, 0))
    assert driver.launched == [(0, 99, (5, 1, 1), (256, 1, 1), 0, 7000, [1 << 62, -3, 0])]


def test_a_launch_on_another_device_makes_it_current(monkeypatch):
    driver = Driver(monkeypatch)
    driver.kernel(1)(5, 256, (1, 2, 3))
    assert [(launch[0], launch[5]) for launch in driver.launched] == [(1, 7001)]
    assert driver.current == 0


def test_each_thread_binds_its_context_once(monkeypatch):
    driver = Driver(monkeypatch)
    kernel = driver.kernel(0)
    kernel(1, 32, (1, 2, 3))
    kernel(1, 32, (1, 2, 3))
    thread = threading.Thread(target=kernel, args=(1, 32, (1, 2, 3)))
    thread.start()
    thread.join()
    assert len(driver.launched) == 3
    assert driver.bound == [0, 0]
