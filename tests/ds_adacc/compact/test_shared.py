"""One projection for the layers that read one tensor."""

import copy
import pickle

import pytest
import torch

from ds_adacc.compact.projection import draw, project
from ds_adacc.compact.shared import Shared, partners

ROWS, COLUMNS = draw(0, "a", 0, 16, 4)


def projected(shared, x, dtype=torch.float32):
    return shared.project(x, ROWS, COLUMNS, dtype)


def test_the_same_tensor_is_projected_once_for_all_readers_and_then_forgotten():
    shared, x = Shared(3), torch.randn(5, 16)
    first, *others = [projected(shared, x) for _ in range(3)]
    assert all(other is first for other in others)
    assert torch.equal(first, project(x, ROWS, COLUMNS))
    assert projected(shared, x) is not first


@pytest.mark.parametrize("change", ["another tensor", "a write", "another dtype"])
def test_whatever_else_is_projected_anew(change):
    shared, x = Shared(2), torch.randn(5, 16)
    projected(shared, x)
    dtype = torch.bfloat16 if change == "another dtype" else torch.float32
    if change == "another tensor":
        x = x.clone()
    if change == "a write":
        x += 1
    assert torch.equal(projected(shared, x, dtype), project(x.to(dtype), ROWS, COLUMNS))


def test_copies_hold_nothing():
    shared, x = Shared(2), torch.randn(5, 16)
    first = projected(shared, x)
    for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert projected(other, x) is not first
    assert projected(shared, x) is first


def test_partners_are_known_by_their_names():
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "a.o_proj", "m.up_proj", "m.gate_proj", "m.down_proj"]
    assert partners(names) == {
        "a.q_proj": "a.q_proj",
        "a.k_proj": "a.q_proj",
        "b.q_proj": "b.q_proj",
        "a.o_proj": "a.o_proj",
        "m.up_proj": "m.up_proj",
        "m.gate_proj": "m.up_proj",
        "m.down_proj": "m.down_proj",
    }
