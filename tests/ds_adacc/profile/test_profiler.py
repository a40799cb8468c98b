"""A block measured by an earlier run is not measured again, unless the cache has nothing that is its own."""

import json

import pytest
import torch
import zoo
from functions import Block, Plain, batch
from pydantic import TypeAdapter

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.cache_folder import sizes
from ds_adacc.runtime.runtime import Runtime

SECTION = {
    "memory_budget": 0.8,
    "codecs": {"gelu": "group"},
    "max_gradient_error": None,
    "solver": {"max_seconds": 30.0},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profiles"


def start(path, **section):
    return Runtime(load({"adacc": SECTION | section}), has_engine=True, cache=path and ProfileCache(path))


def pass_through(runtime, blocks):
    """One forward and backward."""
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    for block in blocks:
        x = runtime.checkpoint(block, x)
    zoo.loss_of(x).backward()
    runtime.controller.end_backward()


def meet(path, **section):
    """The block type that a process makes of the first block it meets, and how often it measured."""
    runtime = start(path, **section)
    pass_through(runtime, [zoo.GPTBlock()])
    (block_type,) = runtime.agreement.known_types.values()
    return block_type, runtime.profiler.measured


def train(path):
    """The runtime of a process that has planned for two blocks and run a step under the plan."""
    runtime, blocks = start(path), [zoo.GPTBlock() for _ in range(2)]
    pass_through(runtime, blocks)
    runtime.controller.end_step()
    pass_through(runtime, blocks)
    runtime.controller.end_step()
    assert runtime.controller.observation.held.observed == runtime.controller.observation.held.planned > 0
    return runtime


def file_in(path):
    """The only one there."""
    (file,) = path.iterdir()
    return file


def cached(path):
    return json.loads(file_in(path).read_text())["profile"]


def test_a_run_that_need_not_measure_decides_the_same(path):
    first, second = train(path), train(path)
    assert (first.profiler.measured, second.profiler.measured) == (1, 0)
    assert second.controller.plan.block_types == first.controller.plan.block_types
    assert second.controller.plan.policies == first.controller.plan.policies


def test_without_a_cache_every_run_measures():
    assert [meet(None)[1] for _ in range(2)] == [1, 1]


class Tripled(Plain):
    """A Function that the user edits."""


def test_a_block_whose_function_was_edited_is_measured_again(path, monkeypatch):
    """The program stays the same: a call of a Function is one operator of it."""

    def measured():
        runtime = start(path, codecs="none")
        runtime.checkpoint(Block(Tripled), batch()).sum().backward()
        runtime.controller.end_backward()
        return runtime.profiler.measured

    def edited(ctx, grad):
        return Plain.backward(ctx, grad) * 1

    assert [measured(), measured()] == [1, 0]
    monkeypatch.setattr(Tripled, "backward", staticmethod(edited))
    assert [measured(), measured()] == [1, 0]


def test_another_offer_of_codecs_is_measured(path):
    assert [meet(path, codecs={"gelu": codecs})[1] for codecs in ("group", ["group", "token"], "group")] == [1, 1, 0]
    assert len(sizes(path)) == 2


def test_a_damaged_cache_is_begun_anew_with_a_warning_and_the_run_goes_on(path, caplog):
    train(path)
    file_in(path).write_bytes(b"not a profile" * 400)
    caplog.clear()
    with caplog.at_level("WARNING", logger="ds_adacc"):
        assert train(path).profiler.measured == 1
    (warning,) = caplog.messages
    assert warning == (
        "a profile in the cache is damaged (profile: Invalid JSON: expected ident at line 1 column 2): its block is "
        f"measured again, and {file_in(path)} is then replaced"
    )
    assert meet(path)[1] == 0


@pytest.mark.parametrize(
    ("rows", "row", "field", "other"),
    [("values", 0, "nbytes", 1), ("values", 1, "role", "other"), ("ops", 0, "replayable", False)],
)
def test_a_profile_of_another_graph_is_measured_anew(path, rows, row, field, other):
    meet(path)
    profile = cached(path)
    assert profile["graph"][rows][row][field] != other
    profile["graph"][rows][row][field] = other
    file = file_in(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"profile": profile}))
    block_type, measured = meet(path)
    assert measured == 1
    assert block_type.profile.graph.values == block_graph(block_type.recording).values
    assert TypeAdapter(planner.Profile).validate_python(cached(path)) == block_type.profile
    assert meet(path)[1] == 0


def test_what_is_measured_beside_a_profiler_of_the_programs_own_is_not_kept(path):
    with torch.profiler.profile():
        meet(path)
    assert sizes(path) == []
    meet(path)
    assert len(sizes(path)) == 1
