"""The emulator runs what is right, and catches what is wrong."""

import itertools
from pathlib import Path

import pytest
import torch
from device_memory import DeviceMemory
from emulation import EmulatedKernels, EmulationError
from emulator_build import CompileError, build_module, list_kernels

TOYS = Path(__file__).parent / "toys"


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def reversed(request):
    return request.param


@pytest.fixture
def launch(reversed):
    """Run a toy and return its output, which begins uninitialised; `x` may be None."""
    kernels = EmulatedKernels(TOYS, reversed)

    def run(name, x, size, *rest, dtype=torch.float32, block=32, grid=1, offset=0):
        with DeviceMemory() as memory:
            y = torch.empty(size, dtype=dtype)
            inputs = [] if x is None else [memory.place(x, offset).data_ptr()]
            kernels.get("toys.cu", name)(grid, block, (*inputs, y.data_ptr(), *rest))
            assert memory.uninitialised(y) == 0
            return y.clone()

    return run


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 31, 128, 129])
def test_copy(launch, n, offset):
    x = torch.randn(n)
    assert torch.equal(launch("copy_f32", x, n, n, grid=2, block=128, offset=offset), x)


def test_barriers(launch):
    x = torch.arange(128.0)
    assert torch.equal(launch("reverse_block", x, 128, 1, block=128), x.flip(0))


def test_warp_functions(launch):
    x = torch.arange(32, dtype=torch.int32) * 7 % 31
    exchanged, votes = launch("warp_functions", x, 64, dtype=torch.int32).view(2, 32)
    assert torch.equal(exchanged, x[torch.arange(32) ^ 5])
    multiples = sum((int(v) % 3 == 0) << i for i, v in enumerate(x))
    assert torch.equal(votes, torch.tensor(multiples).to(torch.int32).expand(32))


def test_every_half_is_read_and_written_exactly(launch):
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    read = launch("from_half", halves, 1 << 16, 1 << 16, grid=512, block=128)
    assert torch.equal(read.nan_to_num(nan=0.25), halves.float().nan_to_num(nan=0.25))
    assert torch.equal(read.isnan(), halves.isnan())


def test_floats_are_rounded_to_halves_as_torch_does(launch):
    exact = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    exact = exact[exact.isfinite()]
    ties = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, ties, ties * (1 + 2**-23), ties * (1 - 2**-23), torch.tensor([65519.996, 65520.0, 1e38])])
    x = torch.cat([x, -x, torch.tensor([torch.inf, -torch.inf])])
    y = launch("to_half", x, len(x), len(x), dtype=torch.float16, grid=len(x) // 128 + 1, block=128)
    assert torch.equal(y.view(torch.int16), x.half().view(torch.int16))
    assert launch("to_half", torch.tensor([torch.nan]), 1, 1, dtype=torch.float16).isnan()


def test_minimum_and_maximum_are_the_hardwares(launch):
    pairs = list(itertools.product([0.0, -0.0, 1.0, torch.nan, torch.inf], repeat=2))
    x = torch.tensor([pair[0] for pair in pairs] + [0.0] * 7 + [pair[1] for pair in pairs] + [0.0] * 7)
    y = launch("extremes", x, 64)
    for (a, b), low, high in zip(pairs, y[:32].tolist(), y[32:].tolist(), strict=False):
        numbers = [v for v in (a, b) if v == v] or [torch.nan]
        order = sorted(numbers, key=lambda v: (v, str(v)[0] != "-"))
        assert [str(low), str(high)] == [str(order[0]), str(order[-1])]


WRONG = {
    "write one past the end": (
        lambda run: run("write_past_the_end", None, 20, 20),
        r"kernel write_past_the_end, block 0 of 1, thread 20 of 32: out of bounds: writes 4 bytes at byte 80 of "
        r"aten::empty \(20,\) torch.float32, which has 80\n  in write_past_the_end \(toys.cu:\d+",
    ),
    "read one before the start": (
        lambda run: run("read_before_the_start", torch.ones(20), 20, 20, offset=3),
        "thread 0 of 32: out of bounds: reads 4 bytes at byte -4 of the input, which has 80",
    ),
    "read a vector past the end": (
        lambda run: run("copy_vectors", torch.ones(30), 32, 32),
        "thread 7 of 32: out of bounds: reads",
    ),
    "vectors at a misaligned address": (
        lambda run: run("copy_vectors", torch.ones(32), 32, 32, offset=1),
        r"misaligned: address \.\.\.\w+ is not aligned for the type accessed \(.*toys.cu:1[01]\)",
    ),
    "shared memory that nobody wrote": (
        lambda run: run("read_shared_uninitialised", None, 64, block=64),
        "thread 5 of 64: uninitialised: reads byte 20 of shared read_shared_uninitialised::values",
    ),
    "shared memory past its end": (
        lambda run: run("overrun_shared", None, 32),
        r"thread 31 of 32: undefined: out_of_bounds \(.*toys.cu:40\)",
    ),
    "shared memory past its end by a pointer": (
        lambda run: run("overrun_shared_by_pointer", None, 32, 1 << 20),
        "thread 31 of 32: out of bounds: reads 4 bytes far from any tensor",
    ),
    "missing barrier": (
        lambda run: run("reverse_block", torch.ones(128), 128, 0, block=128),
        "(uninitialised: reads|race: writes) byte .* of shared reverse_block::values",
    ),
    "shuffle that some lanes do not reach": (
        lambda run: run("shuffle_in_a_branch", None, 32, dtype=torch.int32),
        "thread 19 of 32: __shfl_xor_sync with mask 0xffffffff waits for thread 20, which is at its end",
    ),
    "two intrinsics of one mask": (
        lambda run: run("two_intrinsics_at_once", None, 32, dtype=torch.int32),
        "__ballot_sync with mask 0xffffffff waits for thread 0, which is at __shfl_xor_sync",
    ),
    "barrier that one thread does not reach": (
        lambda run: run("barrier_in_a_branch", None, 64, dtype=torch.int32, block=64),
        "__syncthreads waits for thread 40, which is at its end",
    ),
    "two threads write a byte": (
        lambda run: run("share_a_byte", None, 16, dtype=torch.uint8),
        r"race: writes byte \d+ of .*, which block 0, thread \d+ wrote, with nothing to order them",
    ),
    "two blocks write an int": (
        lambda run: run("share_between_blocks", None, 1, dtype=torch.int32, grid=2),
        "race: writes byte 0 of .*, which block [01], thread 0 wrote",
    ),
    "signed overflow": (
        lambda run: run("overflow", None, 32, 1, dtype=torch.int32),
        "undefined: add_overflow",
    ),
    "argument too few": (lambda run: run("copy_f32", torch.ones(2), 2), "kernel copy_f32 takes 3 arguments; got 2"),
    "block beyond its launch bounds": (
        lambda run: run("reverse_block", torch.ones(160), 160, 1, block=160),
        "32 to 128 threads, in whole warps; got 160",
    ),
    "half a warp": (lambda run: run("copy_f32", torch.ones(2), 2, 2, block=48), "got 48"),
    "no blocks": (lambda run: run("copy_f32", torch.ones(2), 2, 2, grid=0), "got 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_is_caught(launch, wrong):
    act, message = WRONG[wrong]
    with pytest.raises(EmulationError, match=message):
        act(launch)


def test_the_emulator_survives_a_failure(launch):
    x = torch.arange(128.0)
    for wrong in ("missing barrier", "barrier that one thread does not reach", "signed overflow"):
        with pytest.raises(EmulationError):
            WRONG[wrong][0](launch)
        assert torch.equal(launch("reverse_block", x, 128, 1, block=128), x.flip(0))


def test_blocks_run_in_either_order(launch, reversed):
    with pytest.raises(EmulationError, match=f"which block {int(reversed)}, thread 0 wrote"):
        WRONG["two blocks write an int"][0](launch)


def test_a_tensor_that_nobody_wrote_is_not_to_be_read():
    with DeviceMemory():
        x, y = torch.empty(8), torch.empty(8)
        with pytest.raises(EmulationError, match=r"uninitialised: reads byte 0 of aten::empty \(8,\)"):
            EmulatedKernels(TOYS).get("toys.cu", "copy_f32")(1, 32, (x.data_ptr(), y.data_ptr(), 8))


def test_tensors_of_a_closed_memory_are_unknown():
    with DeviceMemory() as memory:
        x = memory.place(torch.ones(8))
        y = torch.empty(8)
    with pytest.raises(EmulationError, match="reads 4 bytes far from any tensor"):
        EmulatedKernels(TOYS).get("toys.cu", "copy_f32")(1, 32, (x.data_ptr(), y.data_ptr(), 8))


def test_memory_knows_what_torch_writes():
    with DeviceMemory() as memory:
        x = torch.empty(10)
        assert memory.uninitialised(x) == 40
        x[2:5] = 1
        assert memory.uninitialised(x) == 28
        x.view(2, 5)[:, 0].zero_()
        assert memory.uninitialised(x) == 0
        assert memory.uninitialised(torch.zeros(3) + 1) == 0
        assert memory.uninitialised(torch.empty_like(x)) == 40
        assert torch.empty(3, dtype=torch.float16).isnan().all()


def test_unknown_kernels_are_named():
    with pytest.raises(KeyError, match=r"toys.cu has no kernel 'copy_f16' \(valid: copy_f32, "):
        EmulatedKernels(TOYS).get("toys.cu", "copy_f16")


def test_kernels_made_by_macros_are_listed(tmp_path):
    source = tmp_path / "made.cu"
    source.write_text(
        '#define MAKE(T, S) extern "C" __global__ void __launch_bounds__(64, 2) make_##S(T* x) { x[0] = 0; }\n'
        "MAKE(float, f32)\nMAKE(int, i32)\n"
    )
    assert list_kernels(source) == {"make_f32": "64", "make_i32": "64"}


@pytest.mark.parametrize("parameter", ["int n", "double n", "float4 n"])
def test_parameters_are_pointers_and_long_long(tmp_path, parameter):
    source = tmp_path / "wrong.cu"
    source.write_text(f'extern "C" __global__ void wrong({parameter}) {{ (void)n; }}\n')
    with pytest.raises(CompileError, match="kernels take pointers and long long"):
        build_module(source, {"wrong": "32"})
