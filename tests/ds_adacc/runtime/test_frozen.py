"""Frozen blocks that no gradient reaches: they hold nothing, and their forward takes memory that no plan can change."""

import pytest
import torch
import zoo
from any_size import Training


def steps(training, count=3):
    """Steps under a head that is trained, on an input without a gradient."""
    head, rope = torch.nn.Linear(zoo.WIDTH, 1), zoo.rope(9)
    x = torch.randn(2, 9, zoo.WIDTH)
    for _ in range(count):
        hidden = x
        for block in training.blocks:
            hidden = training.runtime.checkpoint(block, hidden, rope=rope)
        head(hidden).sum().backward()
        training.adacc.end_step()


@pytest.mark.parametrize("budget", [0.1, 1.0])
def test_a_frozen_model_under_a_new_head_needs_no_plan(budget, caplog):
    training = Training(memory_budget=budget)
    training.blocks.requires_grad_(False)
    steps(training)
    assert training.runtime.controller.plan is None and training.runtime.recordings == 0
    assert caplog.text.count("is no part of backward, so it holds nothing") == 1
    assert "does nothing" not in caplog.text


def test_a_block_in_which_gradients_begin_is_planned(caplog):
    """A model of energies differentiates by positions that it makes require a gradient itself."""

    class Begins(zoo.LlamaBlock):
        def forward(self, x, rope=None):
            return super().forward(x.detach().requires_grad_(), rope)

    training = Training(Begins, memory_budget=0.7)
    training.blocks.requires_grad_(False)
    steps(training)
    assert training.runtime.controller.plan is not None
    assert "is no part of backward" not in caplog.text
