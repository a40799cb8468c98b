"""Several engines in one process: each call of `ds_adacc.checkpointing` belongs to the one whose module it reaches."""

import gc

import pytest
import torch
import zoo
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

pytestmark = pytest.mark.usefixtures("afresh")


def engine(block):
    """The runtime that an engine would have for this model."""
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.5}}), has_engine=True)
    checkpointing.registry.register(runtime, nn.Sequential(block))
    return runtime


def batch():
    return torch.randn(2, 5, zoo.WIDTH, requires_grad=True)


def test_each_block_runs_under_its_own_engine():
    actor, critic = zoo.GPTBlock(), zoo.GPTBlock()
    of_actor, of_critic = engine(actor), engine(critic)
    checkpointing.checkpoint(actor, batch()).sum().backward()
    assert (of_actor.calls, of_critic.calls) == (1, 0)
    checkpointing.checkpoint(lambda x: critic(x), batch()).sum().backward()
    checkpointing.checkpoint(lambda block, x: block(x), critic, batch()).sum().backward()
    assert (of_actor.calls, of_critic.calls) == (1, 2)


def test_an_engine_goes_on_when_a_later_one_is_gone():
    actor, critic = zoo.GPTBlock(), zoo.GPTBlock()
    of_actor, of_critic = engine(actor), engine(critic)
    del of_critic
    gc.collect()
    checkpointing.checkpoint(actor, batch()).sum().backward()
    assert of_actor.calls == 1 and checkpointing.is_configured()


class Frees(nn.ReLU):
    """Frees an engine after this module was looked up in sets a few times, as Python's collector may at any time."""

    def __init__(self):
        super().__init__()
        self.engines, self.lookups = [], 0

    def __hash__(self):
        self.lookups -= 1
        if self.lookups == 0:
            self.engines.clear()
        return id(self)


@pytest.mark.parametrize("lookups", range(1, 5))
def test_an_engine_may_be_freed_while_those_of_a_model_are_forgotten(lookups):
    model = Frees()
    model.engines.append(engine(zoo.GPTBlock()))
    of_model = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.5}}), has_engine=True)
    checkpointing.registry.register(of_model, model)
    model.lookups = lookups
    checkpointing.registry.unregister_model(model)
    assert checkpointing.registry.runtime is None and not model.engines


def test_a_function_of_two_engines_is_refused():
    actor, critic = zoo.GPTBlock(), zoo.GPTBlock()
    engines = engine(actor), engine(critic)
    with pytest.raises(RuntimeError, match="while 2 engines run with ds_adacc, and it reaches modules of 2 of them"):
        checkpointing.checkpoint(lambda x: critic(actor(x)), batch())
    with torch.no_grad():
        checkpointing.checkpoint(lambda x: critic(actor(x)), batch())
    assert [each.calls for each in engines] == [0, 0]


def test_a_function_of_no_engine_runs_plain_with_a_warning(caplog):
    engines = engine(zoo.GPTBlock()), engine(zoo.GPTBlock())
    checkpointing.checkpoint(lambda x: x.sin(), batch()).sum().backward()
    assert [each.calls for each in engines] == [0, 0]
    assert "several engines run with ds_adacc, and it uses no module of any of them" in caplog.text


def test_of_two_engines_of_one_model_the_last_one_serves():
    model = zoo.GPTBlock()
    engines = engine(model), engine(model)
    checkpointing.checkpoint(model, batch()).sum().backward()
    assert [each.calls for each in engines] == [0, 1]


def test_a_function_that_a_block_checkpoints_is_part_of_the_block(caplog):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)

        def forward(self, x):
            return checkpointing.checkpoint(torch.sin, self.inner(x))

    block = Outer()
    of_block, other = engine(block), engine(zoo.GPTBlock())
    checkpointing.checkpoint(block, batch()).sum().backward()
    assert (of_block.calls, other.calls) == (1, 0)
    assert "without ds_adacc" not in caplog.text
