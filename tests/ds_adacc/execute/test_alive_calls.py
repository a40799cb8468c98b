"""The calls of a block type that are alive at once, under any policy."""

import pytest
import torch
import zoo
from any_size import LAYERS, Training

from ds_adacc.execute.alive_calls import AliveCalls, Forward


def test_the_most_at_once_are_counted_by_block_type():
    told, calls = [], AliveCalls()
    forward = Forward(lambda: told.append("backward"))
    held = [calls.begin("a", forward), calls.begin("a", forward), calls.begin("b", forward)]
    del held[0]
    held.append(calls.begin("a", forward))
    assert calls.end_pass() == {"a": 2, "b": 1}
    assert calls.end_pass() == {"a": 2, "b": 1}, "they are alive in the next pass, too"
    held.pop().note_backward()
    held.clear()
    calls.end_pass()
    assert not calls.end_pass() and told == ["backward"]


def test_the_end_of_a_call_counts_once():
    told, calls = [], AliveCalls()
    forward = Forward(lambda: told.append("backward"))
    first, second = calls.begin("a", forward), calls.begin("a", forward)
    first.end()
    first.end()
    del first
    calls.end_pass()
    assert calls.end_pass() == {"a": 1} and told == ["backward"] * 2
    del second


@pytest.fixture(params=[0.4, 1.0])  # with hooks; and without, as everything is retained
def training(request):
    training = Training(memory_budget=request.param, rectifier={"enabled": False})
    for time in (9, 12, 15, 9):
        training.compare(time)
    return training


def forward(training, time=9):
    x, rope = torch.randn(2, time, zoo.WIDTH, requires_grad=True), zoo.rope(time)
    for block in training.blocks:
        x = training.runtime.checkpoint(block, x, rope=rope)
    return x.square().sum()


def most_alive(training):
    """Ends the pass. The most calls of each block type."""
    return sorted(called.alive for called in training.runtime.controller.step.end_pass().values())


class WithPenalty(zoo.GPTBlock):
    """Computes a penalty first, which the program throws away."""

    def forward(self, x):
        penalty = x.tanh().mean()
        return super().forward(x.sin()), penalty


@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_calls_of_which_an_output_is_thrown_away_are_alive(budget):
    training = Training(WithPenalty, memory_budget=budget, rectifier={"enabled": False})
    for _ in range(4):
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        for block in training.blocks:
            x, _ = training.runtime.checkpoint(block, x)
        x.square().sum().backward()
        training.runtime.controller.end_backward()
        training.adacc.end_step()
        (block_type,) = training.runtime.controller.plan.block_types
        assert (block_type.count, block_type.blocks) == (LAYERS, LAYERS)


def test_a_loss_that_is_kept_after_its_backward_keeps_no_call_alive(training):
    losses = []
    for _ in range(3):
        losses.append(forward(training))
        losses[-1].backward()
        assert most_alive(training) == [LAYERS]


def test_two_forwards_before_one_backward_are_alive_together(training):
    (forward(training) + forward(training)).backward()
    assert most_alive(training) == [2 * LAYERS]
    (forward(training) + forward(training, 12)).backward()
    assert most_alive(training) == [LAYERS, LAYERS]


def test_a_forward_that_is_thrown_away_is_not_alive_with_the_next(training):
    kept = forward(training, 12)
    for _ in range(3):
        forward(training).item()
    (kept + forward(training)).backward()
    assert most_alive(training) == [LAYERS, LAYERS]
