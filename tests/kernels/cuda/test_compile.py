"""Every kernel compiles for every architecture, without a warning, a spill or a header that NVRTC lacks.

The H200's is compiled always; `--all` compiles for the rest, each of which takes 40 s of CPU time. `pytest -rP` on this
file shows the registers and the shared memory of each.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from cupy.cuda import nvrtc
from emulator_build import list_kernels

from ds_adacc.kernels.cuda.modules import FOLDER, HEADER, SOURCES, compile_cubin, compile_options, read

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
ALWAYS = (90,)
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
    return ARCHITECTURES if config.getoption("--all") else ALWAYS


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
