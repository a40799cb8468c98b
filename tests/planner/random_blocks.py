"""Small random blocks, and every policy of them: what the planners are held against."""

import itertools
import math
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ds_adacc.planner import (
    RETAIN,
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    Op,
    Point,
    Policy,
    Problem,
    Profile,
    Value,
)

MICROSECOND = 1e-6
SMALL = st.integers(0, 12)
# no common divisor, gigabytes: what CBC's tolerances cannot tell apart
LARGE = st.integers(0, 12).flatmap(lambda k: st.sampled_from([k * 10**9, k * 10**9 + 7]))
# the root of an integer: sums of squares stay away from the square of a bound that is a half more than one
ERRORS = st.integers(0, 9).map(math.sqrt)
ERROR_BOUNDS = st.integers(0, 12).map(lambda square: math.sqrt(square + 0.5))
UNBOUNDED = st.none()
TIMES = st.integers(0, 9).map(lambda count: count * MICROSECOND)


def examples(count):
    """So many of them, the same each time."""
    checks = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


@st.composite
def graphs(draw, sizes, ops=5):
    """Up to `ops` with one or two outputs each, some not replayable, values some not storable; up to four events."""
    values = [("input", None, True)]
    made, cached = [], [False]
    for index in range(draw(st.integers(1, ops))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2))
        outputs = tuple(range(len(values), len(values) + draw(st.sampled_from([1, 1, 2]))))
        values += [(f"v{output}", index, draw(st.sampled_from([True, True, False]))) for output in outputs]
        cached += [draw(st.sampled_from([False, False, True])) for _ in outputs]
        replayable = draw(st.sampled_from([True, True, True, False]))
        made.append(Op(f"op{index}", tuple(inputs), outputs, replayable, draw(sizes)))
    values = tuple(
        Value(name, "any", draw(sizes), producer, storable, cached=each)
        for (name, producer, storable), each in zip(values, cached, strict=True)
    )
    usable = BlockGraph(values, tuple(made), ()).rebuildable_ops
    needed = [index for index, value in enumerate(values) if value.storable or value.producer in usable]
    events = draw(st.lists(st.lists(st.sampled_from(needed), unique=True, max_size=3), min_size=1, max_size=4))
    events = tuple(
        Event(f"e{time}", tuple(event), *(draw(sizes) for _ in range(4))) for time, event in enumerate(events)
    )
    return BlockGraph(values, tuple(made), events, draw(sizes), draw(sizes))


@st.composite
def measured_costs(draw, sizes, count, transfers, nbytes):
    """The costs of so many codecs of a value of `nbytes`, of which the last may be a transfer if `transfers`.

    A payload is then of a size that makes the time of its own transfer a whole number of microseconds.
    """
    codecs = [
        CodecCost(f"c{i}", draw(sizes) // 2, draw(TIMES), draw(TIMES), i / 4, draw(sizes), draw(ERRORS))
        for i in range(count)
    ]
    if codecs and draw(st.booleans()):
        codecs[0] = replace(codecs[0], gradient_error=0.0, lossless=True)
    if transfers and codecs and nbytes and draw(st.sampled_from([True, False, False])):
        out, back = draw(TIMES), draw(TIMES)
        codecs[-1] = CodecCost.offload(nbytes, 2 * out, 2 * back)
        payload = draw(st.sampled_from([nbytes, 2 * nbytes] if nbytes % 2 else [nbytes // 2, nbytes]))
        codecs[:-1] = [replace(codec, nbytes=payload) for codec in codecs[:-1]]
    return tuple(codecs)


@st.composite
def profiles(draw, sizes, ops=5, transfers=True, may_keep=True):
    """A graph with its times; up to four codecs and transfers, two a value at most.

    `may_keep`: backward may keep what is stored. It cannot where blocks have an order.
    """
    graph = draw(graphs(sizes, ops))
    codecs, left = [], 4
    for value in graph.values:
        count = draw(st.integers(0, min(2, left))) if value.storable else 0
        left -= count
        codecs.append(draw(measured_costs(sizes, count, transfers, value.nbytes)))
    overlap = (draw(TIMES), draw(TIMES))
    stale = tuple(draw(ERRORS) for _ in graph.ops) if draw(st.booleans()) else ()
    if may_keep and draw(st.booleans()):
        graph = graph.kept
    return Profile(graph, tuple(draw(TIMES) for _ in graph.ops), tuple(codecs), overlap, stale_errors=stale)


@st.composite
def problems(draw, sizes, bounds=UNBOUNDED):
    """One or two block types of up to three calls, all alive together."""
    drawn = draw(st.lists(st.tuples(profiles(sizes), st.integers(1, 3)), min_size=1, max_size=2))
    block_types = tuple(BlockType(f"k{i}", profile, count) for i, (profile, count) in enumerate(drawn))
    return Problem(block_types, max_gradient_error=draw(bounds))


def points(profile, max_gradient_error=None):
    """Every policy that can be carried out, as a point."""
    graph = profile.graph
    stores = [
        (None, RETAIN, *(offer.codec for offer in profile.offers_within(index, max_gradient_error)))
        if value.storable
        else (None,)
        for index, value in enumerate(graph.values)
    ]
    for policy in map(Policy, itertools.product(*stores)):
        try:
            point = Point.of(profile, policy)
        except ValueError:
            continue
        if max_gradient_error is None or point.gradient_error <= max_gradient_error:
            yield point


def walk(calls):
    """The peak of one forward over the calls, and of one backward, last first."""
    most, alive, cached = 0, [], 0
    for call in calls:
        copied = calls[len(alive) - 1].fetched if alive else 0
        most = max(most, sum(alive) + cached + copied + max(call.forward, default=0))
        alive.append(call.held)
        cached += call.cached
    most = max(most, sum(alive) + sum(call.fetched for call in calls[-2:]))
    while alive:
        most = max(most, sum(alive))
        at_work = calls[len(alive) - 1]
        carried = at_work.carried if len(alive) == len(calls) else 0
        alive.pop()
        fetched = next((call.fetched for call in reversed(calls[: len(alive)]) if call.fetched), 0)
        most = max(most, sum(alive) + fetched + max(at_work.timeline, default=0) - carried)
    return most


def microseconds(seconds):
    return round(seconds / MICROSECOND, 3)


def undominated(results):
    """Those tuples that no other is at most as large as in every place."""
    results = set(results)
    return {r for r in results if not any(o != r and all(a <= b for a, b in zip(o, r, strict=True)) for o in results)}
