"""Several engines in one process: each call of `ds_adacc.checkpointing` belongs to the one whose module it reaches."""

import gc

import pytest
import torch
import zoo
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime


@pytest.fixture(autouse=True)
def fresh():
    checkpointing.use(None)
    yield
    checkpointing.use(None)


def engine(block):
    """The runtime that an engine would have for this model."""
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.5}}), stepped=True)
    checkpointing.use(runtime, nn.Sequential(block))
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


def test_a_function_of_no_engine_or_of_two_is_refused():
    actor, critic = zoo.GPTBlock(), zoo.GPTBlock()
    engines = engine(actor), engine(critic)
    with pytest.raises(RuntimeError, match="checkpointed while 2 engines run with ds_adacc, and it reaches modules of"):
        checkpointing.checkpoint(lambda x: x.sin(), batch())
    with pytest.raises(RuntimeError, match="reaches modules of 2 of them"):
        checkpointing.checkpoint(lambda x: critic(actor(x)), batch())
    with torch.no_grad():
        checkpointing.checkpoint(lambda x: x.sin(), batch())
    assert [each.calls for each in engines] == [0, 0]
