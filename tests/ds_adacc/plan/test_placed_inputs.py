"""Block inputs that are held as shares or in host memory: what they hold there, and what a copy of them costs."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from ds_adacc import planner
from ds_adacc.plan.placed_inputs import with_placed_inputs


@dataclass
class Placement:
    """Holds so many bytes of each block input."""

    held: int

    def store(self, value):
        return "partition"

    def held_bytes(self, value):
        return self.held


@pytest.mark.parametrize("held", [50, 0])
def test_a_copy_to_the_host_is_one_of_the_whole_input(held):
    graph = planner.BlockGraph((planner.Value("x", "", 400, None, True),), (), (planner.Event("e", (0,), 0),))
    costs = planner.CodecCost("int4", 100, 0.0, 0.0, 0.1, 0), planner.CodecCost.offload(400, 2.0, 4.0)
    profile = planner.Profile(graph, (), (costs,), (1.0, 1.0))
    recording = SimpleNamespace(values=[SimpleNamespace(index=0, nbytes=400)])
    counted = with_placed_inputs(profile, recording, Placement(held))
    assert counted.graph.values[0].nbytes == held
    assert counted.offers == profile.offers
    whole, payload = (counted.codec(0, store) for store in ("offload", "offload int4"))
    assert (whole.moved_bytes, whole.out_seconds, whole.back_seconds) == (400, 2.0, 4.0)
    assert (payload.moved_bytes, payload.out_seconds, payload.back_seconds) == (100, 0.5, 1.0)
