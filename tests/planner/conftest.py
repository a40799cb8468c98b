import pytest

from ds_adacc.planner import BlockGraph, BlockType, CodecCost, Event, Op, Profile, Value

HIDDEN, TOKENS, HEADS = 1024, 4096, 16
ROW = 2 * HIDDEN * TOKENS

# per op: its name, what it reads, what it makes (name, role, bytes), its microseconds
OPS = [
    ("ln1", ["x"], [("ln1", "layernorm out", ROW), ("mean1", "", 4 * TOKENS), ("rstd1", "", 4 * TOKENS)], 30),
    ("qkv", ["ln1"], [("q", "query", ROW), ("k", "key", ROW), ("v", "value", ROW)], 210),
    ("sdpa", ["q", "k", "v"], [("attention", "linear in", ROW), ("lse", "", 4 * HEADS * TOKENS)], 120),
    ("proj", ["attention"], [("proj", "not saved", ROW)], 70),
    ("add", ["x", "proj"], [("x2", "layernorm in", ROW)], 25),
    ("ln2", ["x2"], [("ln2", "layernorm out", ROW), ("mean2", "", 4 * TOKENS), ("rstd2", "", 4 * TOKENS)], 30),
    ("fc1", ["ln2"], [("fc1", "gelu in", 4 * ROW)], 280),
    ("gelu", ["fc1"], [("gelu", "linear in", 4 * ROW)], 65),
]
# per step of backward: its name, what it unpacks, bytes of gradients
EVENTS = [
    ("fc2", ["gelu"], 5 * ROW),
    ("gelu", ["fc1"], 8 * ROW),
    ("fc1", ["ln2"], 5 * ROW),
    ("ln2", ["x2", "mean2", "rstd2"], 3 * ROW),
    ("proj", ["attention"], 3 * ROW),
    ("sdpa", ["q", "k", "v", "attention", "lse"], 5 * ROW),
    ("qkv", ["ln1"], 5 * ROW),
    ("ln1", ["x", "mean1", "rstd1"], 3 * ROW),
]


def int4(nbytes):
    return CodecCost("int4", nbytes // 4 + nbytes // 64, nbytes * 1.7e-12, nbytes * 1.3e-12, 0.1, nbytes // 16)


def int8(nbytes):
    return CodecCost("int8", nbytes // 2 + nbytes // 64, nbytes * 2.1e-12, nbytes * 1.6e-12, 0.006, nbytes // 16)


@pytest.fixture
def gpt():
    """Twelve GPT-like blocks: LayerNorm, fused QKV, attention with two outputs, MLP; INT4 and INT8 on offer."""
    values = [Value("x", "block input", ROW, None, True)]
    for index, (_, _, outputs, _) in enumerate(OPS):
        values += [Value(name, role, nbytes, index, role != "not saved") for name, role, nbytes in outputs]
    number = {value.name: index for index, value in enumerate(values)}
    ops = tuple(
        Op(name, tuple(number[v] for v in inputs), tuple(number[v] for v, _, _ in outputs), True)
        for name, inputs, outputs, _ in OPS
    )
    events = tuple(Event(name, tuple(number[v] for v in needed), grads) for name, needed, grads in EVENTS)
    large = (value.nbytes if value.storable and value.nbytes >= ROW else 0 for value in values)
    codecs = tuple((int4(nbytes), int8(nbytes)) if nbytes else () for nbytes in large)
    profile = Profile(BlockGraph(tuple(values), ops, events), tuple(op[3] * 1e-6 for op in OPS), codecs)
    return BlockType("gpt", profile, 12)


@pytest.fixture
def block():
    """Four ops small enough to follow by hand; see test_simulate for its backward.

    x -> (a, b); a -> c; c -> d, which cannot be stored; c -> e, which nothing needs.
    """
    values = (
        Value("x", "block input", 100, None, True),
        Value("a", "", 40, 0, True),
        Value("b", "", 10, 0, True),
        Value("c", "", 60, 1, True),
        Value("d", "", 30, 2, False),
        Value("e", "", 20, 3, True),
    )
    ops = (
        Op("split", (0,), (1, 2), True),
        Op("grow", (1,), (3,), True),
        Op("shrink", (3, 3), (4,), True),
        Op("spare", (3,), (5,), False),
    )
    events = (Event("d", (4,), 5), Event("cb", (3, 2), 0), Event("a", (1,), 20), Event("x", (0,), 1))
    codecs = ((), (), (), (CodecCost("int4", 15, 3.0, 4.0, 0.1, 7),), (), ())
    return Profile(BlockGraph(values, ops, events), (1.0, 2.0, 0.5, 8.0), codecs)


@pytest.fixture
def quick_solver():
    """Here solvers start as they do for users."""
