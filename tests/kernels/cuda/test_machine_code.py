"""What the kernels become when they are compiled: without a warning or a spill, and of few instructions on an H200.

NVRTC compiles every kernel for every architecture, with no header but ours. The H200's is compiled always; `--all`
compiles for the rest, each of which takes 40 s of CPU time. `pytest -rP` on this file shows the registers, the shared
memory and the instructions of each.

A kernel cannot be faster than its instructions are issued. By the H200's data sheet, 132 multiprocessors that issue
4 warps a cycle execute 30e12 lanes' instructions a second at 1.76 GHz, while the memory moves 4.8e12 bytes. A bf16
element and its code are 2.5 bytes, a float32 element and its code 4.5: at 15 and 28 instructions an element both take
the same time.

Counted is everything that the warps of whole blocks issue, from a kernel's first instruction to its last, by walking
through the machine code with the launch's real arguments; see `sass_walk`. That is divided by these blocks' elements.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cupy.cuda import nvrtc
from emulator_build import list_kernels
from sass import disassemble, disassembler
from sass_state import WARP
from sass_walk import count_warps, list_stores

from ds_adacc.kernels import cuda, separates_outliers
from ds_adacc.kernels.codec import make
from ds_adacc.kernels.cuda.compiler import FOLDER, HEADER, SOURCES, compile_cubin, compile_options, read

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
H200 = 90
SHAPE, GROUP_SIZE, CAPACITY = (512, 4096), 128, 41
NAMES = ("group", "token", "channel", "asymmetric", "outlier")
MOST = {torch.bfloat16: 15, torch.float16: 15, torch.float32: 28}
BLOCKS = 4  # of a launch are walked through, in its middle
UNIT, LINE = 16, 128  # bytes: what a thread stores at once, what the caches keep together

needs_disassembler = pytest.mark.skipif(
    disassembler() is None, reason="needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)
_USAGE = re.compile(
    r"entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def compiled(source, architecture):
    """Return (cubin, log) of a source, by the package's options; the cubin is empty if NVRTC refuses it."""
    program = nvrtc.createProgram(read(source), source, (read(HEADER).encode(),), (HEADER.encode(),))
    try:
        nvrtc.compileProgram(program, (*compile_options(*divmod(architecture, 10)), "-Xptxas=-v"))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        return b"", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def pytest_generate_tests(metafunc):
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", architectures(metafunc.config))


def architectures(config):
    return ARCHITECTURES if config.getoption("--all") else (H200,)


@pytest.fixture(scope="module")
def builds(request):
    """What `compiled` returns for each source and architecture, made by all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = [(source, architecture) for source in SOURCES for architecture in architectures(request.config)]
        yield {each: pool.submit(compiled, *each) for each in wanted}
        pool.shutdown(cancel_futures=True)


def usage(log):
    """Return {kernel: (registers, shared bytes, stack bytes, spilled bytes)} by the assembler's account."""
    table = {}
    for found in _USAGE.finditer(log):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        spilled = int(found["stores"]) + int(found["loads"])
        row = int(found["registers"]), int(shared[1]) if shared else 0, int(found["stack"]), spilled
        table[found["kernel"]] = row
    return table


@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_warnings_or_spills(builds, source, architecture):
    cubin, log = builds[source, architecture].result()
    table = usage(log)
    print(f"{'sm_' + str(architecture):42} registers  shared  stack  spills")
    for kernel, (registers, shared, stack, spilled) in sorted(table.items()):
        print(f"{kernel:42} {registers:9} {shared:7} {stack:6} {spilled:7}")
    assert cubin[:4] == b"\x7fELF", log
    assert "warning" not in log, log
    assert f"for 'sm_{architecture}'" in log
    assert set(table) == set(list_kernels(FOLDER / source))
    assert {kernel: row for kernel, row in table.items() if row[2] or row[3]} == {}


def test_all_sources_are_compiled_and_include_the_header_alone():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted([HEADER, *SOURCES])
    for name in (HEADER, *SOURCES):
        assert re.findall(r"#\s*include.*", read(name)) == ([f'#include "{HEADER}"'] if name != HEADER else [])


def test_the_package_compiles_so_too():
    assert compile_cubin("sums.cu", compile_options(8, 0))[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile sums.cu: .*unrecognized option"):
        compile_cubin("sums.cu", ("-arch=sm_80", "--no-such-option"))


class Launches:
    """Kernels that note what is launched: (source, name, blocks, threads, arguments)."""

    def __init__(self):
        self.noted = []

    def get(self, source, name):
        return lambda blocks, threads, arguments: self.noted.append((source, name, blocks, threads, arguments))

    def taken(self):
        noted, self.noted = self.noted, []
        return noted


@pytest.fixture(scope="module")
def kernels(builds):
    """The instructions of each kernel, by name."""
    return {
        name: instructions
        for source in ("bits.cu", "channel.cu", "groups.cu")
        for name, instructions in disassemble(builds[source, H200].result()[0]).items()
    }


def instructions_an_element(kernels, launches):
    total = 0
    for _, name, blocks, threads, arguments in launches:
        some = [blocks // 2 + i for i in range(min(BLOCKS, blocks // 2))] or [0]
        walked = [warp for block in some for warp in count_warps(kernels[name], threads, block, arguments)]
        total += sum(map(len, walked)) * WARP * blocks / len(some)
    return total / (SHAPE[0] * SHAPE[1])


@pytest.mark.matrix
@needs_disassembler
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_instructions_leave_the_memory_its_time(kernels, name, dtype):
    launches = Launches()
    channels = torch.randperm(SHAPE[1])[:CAPACITY] if separates_outliers(name) else None
    codec = make(cuda.CLASSES, name, GROUP_SIZE, channels, "extreme", "nearest", kernels=launches)
    x = torch.empty(SHAPE, dtype=dtype)
    payload = codec.compress(x)
    compress = instructions_an_element(kernels, launches.taken())
    codec.decompress(payload, SHAPE, dtype)
    decompress = instructions_an_element(kernels, launches.taken())
    print(f"{name:12} {dtype!s:16} compress {compress:6.2f}  decompress {decompress:6.2f}")
    # Every element is multiplied and rounded, or masked and multiplied.
    assert 4 < compress <= MOST[dtype]
    assert 3 < decompress <= MOST[dtype]


@pytest.mark.matrix
@needs_disassembler
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("name", (*NAMES, "bits"))
def test_a_warp_restores_whole_lines_at_once(kernels, name, dtype):
    """Each store is passed on to the second-level cache as it is: half a line now and half a line later are two."""
    launches = Launches()
    channels = torch.randperm(SHAPE[1])[:CAPACITY] if separates_outliers(name) else None
    codec = make(cuda.CLASSES, name, GROUP_SIZE, channels, "extreme", "nearest", kernels=launches)
    payload = codec.compress(torch.empty(SHAPE, dtype=dtype))
    launches.taken()
    begin = codec.decompress(payload, SHAPE, dtype).data_ptr()
    ((_, kernel, blocks, threads, arguments),) = launches.taken()

    def unit_places(thread):
        stores = list_stores(kernels[kernel], threads, blocks // 2, arguments, thread)
        return [address - begin for address, width in stores if width == UNIT]

    for first in (0, threads - WARP):  # the first warp of the block and the last
        lanes = [unit_places(first + lane) for lane in range(WARP)]
        assert lanes[0]
        for places in zip(*lanes, strict=True):
            assert len(set(places)) == WARP
            assert len({place // LINE for place in places}) == WARP * UNIT // LINE


LOOP = """
extern "C" __global__ void loop(unsigned* sum, long long n, long long shift) {
#pragma unroll 1
    for (long long left = (n >> shift) - threadIdx.x / 32; left > 0; --left) atomicAdd(sum + left, 1u);
}
"""


@needs_disassembler
@pytest.mark.parametrize(("n", "shift"), [(0, 7), (41, 0), (1 << 40, 36), ((1 << 33) + 5, 30), (100, 3)])
def test_the_walk_takes_the_ways_of_the_program(n, shift):
    program = nvrtc.createProgram(LOOP, "loop.cu", (), ())
    nvrtc.compileProgram(program, compile_options(9, 0))
    (instructions,) = disassemble(nvrtc.getCUBIN(program)).values()
    warps = count_warps(instructions, 96, 5, (1 << 20, n, shift))
    times = [sum(each.opcode[0] in ("RED", "REDG", "ATOMG") for each in warp) for warp in warps]
    assert times == [max(0, (n >> shift) - warp) for warp in range(3)]
