import pytest

from ds_adacc.planner import BlockGraph, BlockType, CodecCost, Event, Op, Problem, Profile, Value

MIB = 1 << 20


def int4(nbytes):
    return CodecCost("int4", nbytes // 4, 0.5e-3, 0.5e-3, 0.1, 0)


def offload(nbytes):
    return CodecCost.offload(nbytes, 1e-3, 1e-3)


@pytest.fixture
def block_type():
    """Four blocks x -> (a, b) -> c, and x + c -> d; all but d can be stored, a compressed, c moved to the host."""
    values = (
        Value("x", "block_input", MIB, None, True),
        Value("a", "linear", 8 * MIB, 0, True),
        Value("b", "statistic", 4, 0, True),
        Value("c", "gelu", 4 * MIB, 1, True),
        Value("d", "other", MIB, 2, False),
    )
    ops = (Op("split", (0,), (1, 2), True), Op("join", (1, 2), (3,), True), Op("add", (0, 3), (4,), True))
    events = (Event("join", (3,), MIB), Event("split", (1, 2), 2 * MIB), Event("x", (0,), 0))
    codecs = ((), (int4(8 * MIB),), (), (offload(4 * MIB),), ())
    return BlockType("block <1>", Profile(BlockGraph(values, ops, events), (1e-3, 4e-3, 1e-3), codecs), 4)


@pytest.fixture
def problem(block_type):
    return Problem((block_type,), order=(block_type.name,) * 4)
