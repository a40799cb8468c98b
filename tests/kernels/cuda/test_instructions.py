"""How many instructions the kernels of the quantizing codecs issue for each element, on an H200 (sm_90).

A kernel cannot be faster than its instructions are issued. By the H200's data sheet, 132 multiprocessors that issue
4 warps a cycle execute 30e12 lanes' instructions a second at 1.76 GHz, while the memory moves 4.8e12 bytes. A bf16
element and its code are 2.5 bytes, a float32 element and its code 4.5: at 15 and 28 instructions an element both take
the same time.

Counted is everything that the warps of whole blocks issue, from a kernel's first instruction to its last, by walking
through the machine code with the launch's real arguments; see `sass_walk`. That is divided by these blocks' elements.
`pytest -rP` on this file shows the table.
"""

import pytest
import torch
from cupy.cuda import nvrtc
from sass import disassemble, disassembler
from sass_state import WARP
from sass_walk import count_warps

from ds_adacc.kernels import cuda, separates_outliers
from ds_adacc.kernels.codec import make
from ds_adacc.kernels.cuda.modules import compile_cubin, compile_options

SHAPE, GROUP_SIZE, CAPACITY = (512, 4096), 128, 41
NAMES = ("group", "token", "channel", "asymmetric", "outlier")
MOST = {torch.bfloat16: 15, torch.float16: 15, torch.float32: 28}
BLOCKS = 4  # of a launch are walked through, in its middle

needs_disassembler = pytest.mark.skipif(
    disassembler() is None, reason="needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)


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
def kernels():
    """The instructions of each kernel, by name."""
    options = compile_options(9, 0)
    return {
        name: instructions
        for source in ("groups.cu", "channel.cu")
        for name, instructions in disassemble(compile_cubin(source, options)).items()
    }


def instructions_an_element(kernels, launches):
    total = 0
    for _, name, blocks, threads, arguments in launches:
        some = [blocks // 2 + i for i in range(min(BLOCKS, blocks // 2))] or [0]
        walked = [warp for block in some for warp in count_warps(kernels[name], threads, block, arguments)]
        total += sum(map(len, walked)) * WARP * blocks / len(some)
    return total / (SHAPE[0] * SHAPE[1])


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


LOOP = """
extern "C" __global__ void loop(unsigned* sum, long long n, long long divisor) {
#pragma unroll 1
    for (long long left = n / divisor - threadIdx.x / 32; left > 0; --left) atomicAdd(sum + left, 1u);
}
"""


@needs_disassembler
@pytest.mark.parametrize(("n", "divisor"), [(0, 7), (41, 1), (1 << 40, 1 << 36), ((1 << 33) + 5, 1 << 30), (100, 9)])
def test_the_walk_takes_the_ways_of_the_program(n, divisor):
    program = nvrtc.createProgram(LOOP, "loop.cu", (), ())
    nvrtc.compileProgram(program, compile_options(9, 0))
    (instructions,) = disassemble(nvrtc.getCUBIN(program)).values()
    warps = count_warps(instructions, 96, 5, (1 << 20, n, divisor))
    times = [sum(each.opcode[0] in ("RED", "REDG", "ATOMG") for each in warp) for warp in warps]
    assert times == [max(0, n // divisor - warp) for warp in range(3)]
