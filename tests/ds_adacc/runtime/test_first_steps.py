"""The first steps fit where full checkpointing fits: those that record, try policies or look at them again."""

import pytest
import zoo
from stack import Model
from torch.utils.checkpoint import checkpoint

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.step import Purpose

LAYERS = 12
MAKES = {
    "gpt": lambda: zoo.GPTBlock(64, 4, 0.0),
    "gpt with dropout": lambda: zoo.GPTBlock(64, 4, 0.1),
    "bert": lambda: zoo.BertBlock(64, 4),
    "llama": lambda: zoo.LlamaBlock(64, 4),
}
CASES = [("gpt", "none"), *((name, "auto") for name in MAKES)]
AT_MOST = 1.05  # of the peak of full checkpointing
NOISE = 0.03  # the states of random generators, and statistics of outliers, matter more than in a model of real size


@pytest.mark.parametrize(("name", "codecs"), CASES)
def test_steps_that_measure_take_what_full_checkpointing_takes(name, codecs):
    model = Model(MAKES[name], LAYERS)
    full = model.peak(lambda block, x: checkpoint(block, x, use_reentrant=False))
    section = {"memory_budget": full, "codecs": codecs, "solver": {"max_seconds": 30.0}}
    runtime = Runtime(load({"adacc": section}), stepped=True)
    adacc, purposes = Adacc(runtime.config, runtime), []
    while Purpose.TRACK not in purposes:
        purposes.append(runtime.controller.step.purpose)
        assert model.peak(runtime.checkpoint) <= (AT_MOST + NOISE) * full, purposes
        adacc.end_step()
        assert len(purposes) < 9
    assert {Purpose.RECORD, Purpose.MEASURE} <= set(purposes)
    assert codecs == "none" or Purpose.TRY in purposes
