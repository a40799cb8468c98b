"""What a forward has changed of what it depends on, and what it has only added."""

import torch
from torch import nn

from ds_adacc.python_state.changes import rewritten
from ds_adacc.python_state.closure import closure_of


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.cached, self.state = 0, [1], None, torch.zeros(2)
        self.layer = nn.Linear(2, 2)

    def marks(self):
        return closure_of(self).read({}, last=None)[0].marks


def changed_by(change):
    block = Changing()
    before = block.marks()
    change(block)
    return rewritten(before, block.marks())


def test_a_number_a_list_and_a_tensor_of_another_size():
    assert changed_by(lambda block: setattr(block, "calls", 1)) == {"block.calls"}
    assert "block.seen" in changed_by(lambda block: block.seen.append(2))
    assert changed_by(lambda block: setattr(block, "state", torch.zeros(3))) == {"block.state"}
    assert "block.layer.weight" in changed_by(lambda block: setattr(block, "layer", nn.Linear(2, 2)))


def test_a_hook_that_was_registered():
    assert "block.layer" in changed_by(lambda block: block.layer.register_forward_hook(print))


def test_what_has_only_come_is_no_change():
    assert changed_by(lambda block: setattr(block, "loss", torch.zeros(()))) == set()
    assert changed_by(lambda block: setattr(block, "cached", torch.zeros(3))) == set()
    assert changed_by(lambda block: setattr(block.layer, "length", 5)) == set()
    assert changed_by(lambda block: setattr(block, "state", torch.ones(2))) == set()
