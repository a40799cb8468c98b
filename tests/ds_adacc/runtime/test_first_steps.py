"""The first steps fit where full checkpointing fits: those that record, try policies or look at them again.

The blocks have the proportions of one that is 512 wide, on 16 sequences of 512 tokens: weights, attention and the rest.
"""

from stack import WIDTH, Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step_schedule import Purpose

LAYERS = 12
# One step records. At most four plans follow, as the memory model is corrected three times. Each is tried and measured.
# Two trials may reject a policy. The last step tracks.
MOST_STEPS = 1 + 4 * 2 + 2 + 1
# bytes: errors are summed in double precision, piece by piece; a piece is not small beside such blocks
PIECES = 1 << 20


def bert():
    return nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.1, "gelu", batch_first=True)


def test_steps_that_measure_take_what_full_checkpointing_takes():
    model = Model(bert, LAYERS)
    full = model.peak(lambda block, x: checkpoint(block, x, use_reentrant=False))
    runtime = Runtime(load({"adacc": {"memory_budget": full}}), has_engine=True)
    adacc, purposes = Adacc(runtime), []
    while Purpose.TRACK not in purposes:
        purposes.append(runtime.controller.step.purpose)
        assert model.peak(runtime.checkpoint) <= 1.03 * full + PIECES, purposes
        adacc.end_step()
        assert len(purposes) <= MOST_STEPS
    assert {Purpose.OBSERVE, Purpose.MEASURE, Purpose.TRY} <= set(purposes)
