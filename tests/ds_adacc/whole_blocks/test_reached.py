"""What a function reaches by the variables around it: a second forward that would find another thing is an error."""

import weakref

import pytest
import torch
from experts import TOKENS, WIDTH, configured, layers, plainly, recordings, same, train

from ds_adacc.checkpointing import checkpoint
from ds_adacc.whole_blocks.reached import Reached

pytestmark = pytest.mark.usefixtures("afresh")


def late(block, number=1.0, tensor=None):
    """A function of variables, and another that gives these what it is called with."""
    tensor = torch.ones(()) if tensor is None else tensor

    def function(x):
        return block(x) * number * tensor

    def give(**others):
        nonlocal block, number, tensor
        block = others.get("block", block)
        number = others.get("number", number)
        tensor = others.get("tensor", tensor)

    return function, give


@pytest.mark.parametrize("name", ["module", "number", "tensor"])
def test_another_one_in_the_same_variable_is_an_error(name):
    """As in a loop whose functions all read what its last round has put there."""
    others = {
        "module": {"block": layers(count=1)[0]},
        "number": {"number": 2.0},
        "tensor": {"tensor": torch.ones(())},
    }
    configured()
    (block,) = layers(count=1)
    function, give = late(block)
    y = checkpoint(function, torch.randn(TOKENS, WIDTH, requires_grad=True))
    give(**others[name])
    with pytest.raises(
        RuntimeError, match=f"But a {name} that its function reads from a variable around it is another"
    ):
        y.sum().backward()


def test_a_tensor_that_was_written_to_is_an_error():
    configured()
    tensor = torch.ones(())
    function, _ = late(layers(count=1)[0], tensor=tensor)
    y = checkpoint(lambda x: function(x) * tensor.clone(), torch.randn(TOKENS, WIDTH, requires_grad=True))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"reads from a variable around it of shape .* has been modified"):
        y.sum().backward()


def handing_on(block, bag):
    """A function that reads what the block before has left in a dict, and leaves something of its own."""

    def function(x):
        y = block(x)
        before, bag["last"] = bag.get("last"), y
        return y if before is None else y + before.tanh()

    return function


def test_blocks_that_hand_a_tensor_on_by_a_variable_are_not_recomputed_as_a_whole():
    def run_by(checkpointed):
        bag = {}

        def run(block, x):
            if block is blocks[0]:
                bag.clear()
            return checkpointed(handing_on(block, bag), x)

        return run

    blocks = layers()
    plain = train(blocks, run_by(plainly))
    runtime, blocks = configured(memory_budget=1.0), layers()
    assert same(train(blocks, run_by(checkpoint)), plain)
    remarks = [remark for each in recordings(runtime) for remark in each.remarks_on_replays]
    assert any("its forward changes a variable around it" in remark for remark in remarks), remarks


def test_what_has_only_come_is_no_error():
    """Such as losses, in a list to which the program appends."""
    losses = []
    reached = Reached(lambda: losses)
    losses.append(torch.zeros(()))
    reached.check()
    assert reached.is_changed()


def test_it_keeps_nothing_alive(uncollected):
    function, give = late(torch.nn.Linear(2, 2), tensor=torch.ones(3))
    reached, gone = Reached(function), weakref.ref(function.__closure__[2].cell_contents)
    assert type(gone()) is torch.Tensor
    assert not reached.is_changed()
    give(tensor=torch.ones(3))
    assert gone() is None
    with pytest.raises(RuntimeError, match="But a tensor"):
        reached.check()
