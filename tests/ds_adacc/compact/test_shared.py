"""One projection for the layers that read one tensor."""

import copy
import pickle
import weakref

import pytest
import torch

from ds_adacc.compact.projection import draw, project
from ds_adacc.compact.shared import Shared, partners

ROWS, COLUMNS = draw(0, "a", 0, 16, 4)


def projected(shared, reader, x, dtype=torch.float32):
    return shared.project(reader, x, ROWS, COLUMNS, dtype)


def test_the_same_tensor_is_projected_once_for_all_readers_and_then_forgotten():
    shared, x = Shared(3), torch.randn(5, 16)
    first, *others = [projected(shared, reader, x) for reader in "qkv"]
    assert all(other is first for other in others)
    assert torch.equal(first, project(x, ROWS, COLUMNS))
    assert projected(shared, "q", x) is not first


def test_nothing_is_held_after_a_forward_in_which_one_layer_reads_another_tensor():
    """Cross-attention: q reads the decoder's tensor, k and v the encoder's."""
    shared, decoder, encoder = Shared(3), torch.randn(5, 16), torch.randn(9, 16)
    for _ in range(2):
        made = [projected(shared, reader, x) for reader, x in (("q", decoder), ("k", encoder), ("v", encoder))]
        assert made[1] is made[2] and torch.equal(made[0], project(decoder, ROWS, COLUMNS))
        held = [weakref.ref(each) for each in made]
        del made
        assert [each() for each in held] == [None] * 3


def test_a_layer_that_does_not_run_leaves_the_next_forward_as_it_is():
    shared, x, y = Shared(2), torch.randn(5, 16), torch.randn(5, 16)
    projected(shared, "gate", x)
    gate = projected(shared, "gate", y)
    assert projected(shared, "up", y) is gate


@pytest.mark.parametrize("change", ["another tensor", "a write", "another dtype"])
def test_whatever_else_is_projected_anew(change):
    shared, x = Shared(2), torch.randn(5, 16)
    projected(shared, "gate", x)
    dtype = torch.bfloat16 if change == "another dtype" else torch.float32
    if change == "another tensor":
        x = x.clone()
    if change == "a write":
        x += 1
    assert torch.equal(projected(shared, "up", x, dtype), project(x.to(dtype), ROWS, COLUMNS))


def test_copies_hold_nothing():
    shared, x = Shared(2), torch.randn(5, 16)
    first = projected(shared, "gate", x)
    for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert projected(other, "up", x) is not first
    assert projected(shared, "up", x) is first


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
