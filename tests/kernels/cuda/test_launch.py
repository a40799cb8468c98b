"""How kernels are chosen, compiled, cached and launched; none of it needs a device."""

import ctypes
import fcntl
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ds_adacc.kernels import CODECS, cuda, separates_outliers
from ds_adacc.kernels.codec import make
from ds_adacc.kernels.cuda import compiler
from ds_adacc.kernels.cuda.launch import Planned
from ds_adacc.kernels.reference.bits import TILE

QUANTIZED = [name for name in CODECS if name != "bits"]


class Recorder:
    """Kernels that note what is looked up and launched."""

    def __init__(self):
        self.looked_up, self.launched = [], []

    def get(self, source, name):
        self.looked_up.append((source, name))
        return lambda blocks, threads, args: self.launched.append((name, blocks, threads, args))


def build(name, recorder, channels=(3, 1), group_size=128, scale="extreme", rounding="nearest"):
    channels = torch.tensor(channels, dtype=torch.int64) if separates_outliers(name) else None
    return make(cuda.CLASSES, name, group_size, channels, scale, rounding, kernels=recorder)


def pointers(tensors):
    return tuple(t.data_ptr() for t in tensors)


@pytest.mark.parametrize("name", ["outlier", "outlier8"])
def test_arguments_are_pointers_then_numbers(name):
    recorder = Recorder()
    codec = build(name, recorder, scale="paper")
    x = torch.randn(64, 256).bfloat16()
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    (mask,) = codec._masks.values()
    inputs = (x.data_ptr(), *pointers(payload), codec.channels.data_ptr(), mask.data_ptr())
    outliers = (256, 2, 2, (1 << 56) - 1)  # channels, capacity, lanes, reciprocal
    assert recorder.launched == [
        (f"{name}_compress_bf16", 1, 256, (*inputs, 64 * 256, 128, 2, 1, *outliers)),
        (f"{name}_decompress_bf16", 1, 256, (*pointers(payload), y.data_ptr(), 64 * 256, 128, 2, *outliers)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_mask_of_outlier_channels_is_made_once(dtype):
    codec = build("outlier", Recorder(), channels=(5, 0))
    for rows in (4, 4, 9):
        codec.compress(torch.zeros(rows, 8, dtype=dtype))
    (mask,) = codec._masks.values()
    assert (mask.tolist(), mask.itemsize) == ([0, -1, -1, -1, -1, 0, -1, -1], dtype.itemsize)


@pytest.mark.parametrize("name", ["outlier", "outlier8"])
def test_without_outlier_channels_the_kernels_are_those_of_groups(name):
    recorder = Recorder()
    codec = build(name, recorder, channels=())
    x = torch.zeros(6, 8)
    codec.decompress(codec.compress(x), x.shape, x.dtype)
    group = name.replace("outlier", "group")
    assert [launch[0] for launch in recorder.launched] == [f"{group}_compress_f32", f"{group}_decompress_f32"]
    assert codec._masks == {}


def test_groups_beyond_32_bit_places_are_refused():
    with pytest.raises(ValueError, match=r"groups have at most 268435456 elements on CUDA; got 536870912 for shape"):
        build("token", Recorder()).compress(torch.empty(2, 1 << 29, device="meta", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "size", "kernels"),
    [
        ("token", (5, 7), ["blocks_fit_f32", "blocks_encode_f32"]),
        ("token", (5, 6), ["group_compress_f32"]),
        ("token", (1, 7), ["group_compress_f32"]),
        ("channel", (5, 8), ["channel_compress_f32"]),
        ("channel", (5, 6), ["blocks_fit_f32", "blocks_encode_f32"]),
        ("asymmetric", (5, 7), ["asymmetric_compress_f32"]),
        ("token8", (5, 7), ["blocks8_fit_f32", "blocks8_encode_f32"]),
        ("token8", (5, 6), ["group8_compress_f32"]),
        ("channel8", (5, 8), ["channel8_compress_f32"]),
        ("asymmetric8", (5, 7), ["asymmetric8_compress_f32"]),
    ],
)
def test_kernels_are_chosen_by_the_shape(name, size, kernels):
    recorder = Recorder()
    build(name, recorder).compress(torch.randn(size))
    assert [launch[0] for launch in recorder.launched] == kernels


def test_bits_are_compressed_in_one_launch():
    recorder = Recorder()
    build("bits", recorder).compress(torch.zeros(TILE + 1, dtype=torch.bool))
    assert [launch[:3] for launch in recorder.launched] == [("bits_compress_1", 2, 256)]


def test_unaligned_channels_take_the_kernels_for_any_address():
    recorder = Recorder()
    build("channel", recorder).compress(torch.randn(41)[1:].view(5, 8))
    assert [launch[0] for launch in recorder.launched] == ["blocks_fit_f32", "blocks_encode_f32"]


@pytest.mark.parametrize("name", CODECS)
def test_kernels_are_looked_up_once_a_shape(name):
    recorder = Recorder()
    codec = build(name, recorder)
    x = torch.zeros(6, 8)
    payload = codec.compress(x)
    codec.decompress(payload, x.shape, x.dtype)
    found = len(recorder.looked_up)
    for _ in range(3):
        codec.decompress(codec.compress(x), list(x.shape), x.dtype)
    assert len(recorder.looked_up) == found


def test_plans_do_not_pile_up():
    codec = build("group", Recorder())
    for n in range(Planned.LIMIT + 50):
        codec.compress(torch.zeros(n))
    assert len(codec._plans) == 50


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_seed_is_drawn_for_stochastic_rounding_alone(name):
    recorder = Recorder()
    x = torch.randn(6, 8)
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    payload = build(name, recorder, rounding="stochastic").compress(x)
    kernel, _, _, args = recorder.launched[-1]
    assert "_stochastic_" in kernel
    assert args[1 + len(payload) + 2 * separates_outliers(name)] == seed
    before = torch.get_rng_state()
    build(name, recorder).compress(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CODECS)
def test_payloads_are_allocated_on_the_tensors_device_and_nothing_else_is(name):
    codec = build(name, Recorder())
    if separates_outliers(name):
        codec.channels = codec.channels.to("meta")
    x = torch.empty(64, 8, device="meta")
    assert codec.workspace_bytes(x.shape, x.dtype) == 0
    payload = codec.compress(x)
    assert {t.device.type for t in payload} == {"meta"}
    assert sum(t.nbytes for t in payload) == codec.payload_bytes(x.shape, x.dtype)


def test_tensors_elsewhere_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: None)
    codec = build("group", None)
    with pytest.raises(ValueError, match="takes tensors on a CUDA device; got one on cpu"):
        codec.compress(torch.zeros(4))


# ---- what is missing ----


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


def test_a_cubin_is_compiled_once(cache, monkeypatch):
    first = compiler.cached_cubin("sums.cu", 8, 0)
    assert first[:4] == b"\x7fELF"
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
