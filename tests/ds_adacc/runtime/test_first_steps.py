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
    "gpt with dropout": lambda: zoo.GPTBlock(64, 4, 0.1),
    "llama": lambda: zoo.LlamaBlock(64, 4),
}
CASES = [("llama", "none"), ("gpt with dropout", "auto")]


@pytest.mark.parametrize(("name", "codecs"), CASES)
def test_steps_that_measure_take_what_full_checkpointing_takes(name, codecs):
    model = Model(MAKES[name], LAYERS)
    full = model.peak(lambda block, x: checkpoint(block, x, use_reentrant=False))
    # The gradients of one block are compared, so they are held twice. Here that is much: tokens are few.
    gradients = sum(tensor.nbytes for tensor in (model.leaf, *model.blocks[0].parameters()))
    runtime = Runtime(load({"adacc": {"memory_budget": full, "codecs": codecs}}), stepped=True)
    adacc, purposes = Adacc(runtime.config, runtime), []
    while Purpose.TRACK not in purposes:
        purposes.append(runtime.controller.step.purpose)
        measures = codecs != "none" and purposes[-1] is not Purpose.MEASURE
        assert model.peak(runtime.checkpoint) <= 1.06 * full + 2 * measures * gradients, purposes
        adacc.end_step()
        assert len(purposes) < 9
    assert {Purpose.RECORD, Purpose.MEASURE} <= set(purposes)
    assert codecs == "none" or Purpose.TRY in purposes
