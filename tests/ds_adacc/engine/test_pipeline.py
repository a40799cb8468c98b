"""A pipeline of two stages: the losses with a lossless policy are those without checkpointing, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from deepspeed.pipe import LayerSpec
from launch import told_by
from pipeline_worker import LATER, LAYERS, STEPS

from ds_adacc.engine.pipeline import layer_classes

pytestmark = pytest.mark.ranks
CASES = {
    "interval 1": {"blocks": 4, "block_types": 2},
    "interval 2": {"blocks": 2, "block_types": 2},
    "deepspeed's function": {"blocks": 2, "block_types": 2},
    "wrapped blocks": {"blocks": LAYERS // 2, "block_types": 1},
    "named blocks": {"blocks": LAYERS // 2, "block_types": 1},
    "without an engine": {"blocks": 4, "block_types": 2},
}


ranks = told_by("pipeline_worker")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_those_without(ranks, case):
    for rank in ranks:
        assert len(rank["plain"]["losses"]) == STEPS
        assert rank[case]["losses"] == rank["plain"]["losses"]
        assert rank[case]["parameters"] == rank["plain"]["parameters"]


@pytest.mark.parametrize("case", CASES)
def test_each_block_is_recorded_once_and_planned_for(ranks, case):
    for rank in ranks:
        plan = rank[case]["plan"]
        assert {key: plan[key] for key in CASES[case]} == CASES[case]
        assert plan["replays"]
        assert plan["held"][0] == plan["held"][1]


@pytest.mark.parametrize("case", [case for case in CASES if case != "without an engine"])
def test_the_micro_batches_in_flight_are_counted_and_steps_found(ranks, case):
    """The first stage holds two micro-batches when its backward begins, the last one."""
    first, last = (rank[case]["plan"] for rank in ranks)
    assert sum(first["counts"]) == 2 * first["blocks"]
    assert sum(last["counts"]) == last["blocks"]
    assert first["ranks"] == last["ranks"] == 1
    assert first["steps"] == last["steps"] == STEPS


def test_blocks_are_called_by_the_layers_that_they_run(ranks):
    first, last = (rank["interval 2"]["plan"]["names"] for rank in ranks)
    assert first == ["layers.0-1 (Embedding, GPTBlock)", "layers.2-3 (GPTBlock)"]
    assert last == ["layers.4-5 (Late)", "layers.6-7 (Late, Head)"]


def test_nothing_is_wrapped_that_is_checkpointed_already(ranks):
    for rank in ranks:
        assert {case: rank[case]["plan"]["wrapped"] for case in CASES if rank[case]["plan"]["wrapped"]} == {
            "wrapped blocks": LAYERS // 2,
            "named blocks": LAYERS // 2,
        }


@pytest.mark.parametrize("section", LATER, ids=["none", "disabled", "enabled"])
def test_the_pipelines_function_is_that_of_its_last_engine(ranks, section):
    for rank in ranks:
        assert rank["a later engine"][str(section)] == [True, section == LATER[2]]


def test_the_layers_of_all_stages_are_known_by_the_classes_that_were_compiled():
    specs = [LayerSpec(zoo.GPTBlock), torch.compile(zoo.BertBlock()), zoo.Tiny()]
    assert layer_classes(SimpleNamespace(_layer_specs=specs)) == {"GPTBlock", "BertBlock", "Tiny"}
