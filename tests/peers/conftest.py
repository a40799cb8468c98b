"""Runs a case of another project's suite under plain autograd and under `ds_adacc.checkpointing.checkpoint`.

Each case runs under two policies. "replayed": an engine's step that never ends, in which all that can be is recomputed.
"planned": three steps, under a plan for 0.3 of the peak, or for the smallest budget that fits.
"""

import copy

import pytest
import torch
import zoo

from ds_adacc import checkpointing, planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

SECTION = {"codecs": "none", "solver": {"max_seconds": 30.0}}
SEED = 7


class Peer:
    """`compare` runs a case. `runtime` is the one of the last run; `warnings` what it warned of."""

    def __init__(self, is_planned, caplog):
        self.is_planned = is_planned
        self.caplog = caplog
        self.runtime = None

    @property
    def warnings(self):
        return [r.getMessage() for r in self.caplog.records if r.name == "ds_adacc" and r.levelname == "WARNING"]

    def compare(self, case, quiet=True):
        """The case shows the same in each run as under plain autograd, bit for bit.

        `case(call)` runs a forward and backward with `call(function, *args)` and returns a tree of what it saw.

        `quiet`: the block is recorded, and nothing is warned of.
        """
        expected = seeded(case, plain)
        for actual in self.runs(case):
            zoo.assert_same(expected, actual)
        assert not quiet or (self.runtime.recordings and not self.warnings)

    def runs(self, case):
        """What the case returns in each of its runs under `checkpoint`."""
        try:
            return self._runs(case, 0.3)
        except planner.InfeasibleBudget as error:
            return self._runs(case, f"{error.smallest}B")

    def _runs(self, case, budget):
        self.runtime = Runtime(load({"adacc": {**SECTION, "memory_budget": budget}}), has_engine=True)
        checkpointing.registry.register(self.runtime)
        seen = []
        for _ in range(3 if self.is_planned else 2):
            seen.append(seeded(case, checkpointing.checkpoint))
            if self.is_planned:
                self.runtime.controller.end_step()
        return seen

    def policies(self):
        """The policies that the blocks run."""
        return [variant.bound.policy for _, variant in self.runtime.blocks.variants()]


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def seeded(case, call):
    torch.manual_seed(SEED)
    return copied(case(call))


def copied(tree):
    """The tree with copies of its tensors, which the next run may overwrite."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, tuple | list):
        return tuple(copied(item) for item in tree)
    return copy.copy(tree)


@pytest.fixture(params=["replayed", "planned"])
def peer(request, caplog):
    yield Peer(request.param == "planned", caplog)
    checkpointing.registry.reset()
