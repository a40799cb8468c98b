"""What a program gives to `checkpoint` under ZeRO-3, on two ranks: modules, and functions that call blocks or not."""

import pytest
from asked_worker import FORMS, LAYERS, STEPS, WITHOUT_ENGINE
from launch import told_by

pytestmark = pytest.mark.ranks
BY_TORCH = (
    "block {} runs under torch.utils.checkpoint in place of ds_adacc, as you ask for checkpointing: ZeRO-3 releases "
    "its parameters before the call has ended. To have a plan for the modules that it calls, {}"
)


ranks = told_by("asked_worker")


@pytest.mark.parametrize("form", [*FORMS, WITHOUT_ENGINE])
def test_losses_are_bit_identical(ranks, form):
    for rank in ranks:
        assert len(rank[form]["plain"]["losses"]) == STEPS
        assert rank[form]["adacc"]["losses"] == rank[form]["plain"]["losses"]


@pytest.mark.parametrize("form", [*FORMS, WITHOUT_ENGINE])
def test_nothing_that_was_gathered_in_forward_waits_for_backward(ranks, form):
    for rank in ranks:
        assert rank[form]["adacc"]["gathered"] > 0
        assert rank[form]["adacc"]["alive"] == rank[form]["plain"]["alive"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_engines_blocks_are_planned_and_nothing_else(ranks, form):
    for rank in ranks:
        assert rank[form]["adacc"]["recorded"] == [f"blocks.{number} (GPTBlock)" for number in range(LAYERS)]
        planned, observed = rank[form]["adacc"]["held"]
        assert planned == observed > 0


def test_a_function_that_calls_no_block_runs_under_torchs_checkpoint(ranks):
    (line,) = by_torch(ranks[0]["a function without a block"])
    advice = "list their class names in adacc.blocks"
    assert line.endswith(BY_TORCH.format("Model.forward.<locals>.<lambda>", advice))  # behind the name of the engine


def test_without_an_engine_every_function_does(ranks):
    advice = "train with ds_adacc.initialize or ds_adacc.attach: it finds repeated layers, or those of adacc.blocks"
    assert set(by_torch(ranks[0][WITHOUT_ENGINE])) == {BY_TORCH.format("Model.layers.<locals>.run", advice)}


def by_torch(results):
    """What the log says of calls that torch checkpoints."""
    return [line for line in results["adacc"]["log"] if "torch.utils.checkpoint" in line]
