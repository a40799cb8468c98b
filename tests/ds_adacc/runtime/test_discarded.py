"""Blocks that discard an output: what autograd saved for it dies with the block's call, so nothing of it is planned."""

import torch
import zoo
from any_size import Training

from ds_adacc.planner import HOPELESS

LENGTHS = (9, 12, 9, 15, 9, 18, 12, 33, 9, 21)


def test_planned_bytes_are_those_that_calls_hold():
    training = Training(zoo.IndexedBlock)
    seen = []
    for length in LENGTHS:
        training.compare(length)
        if (observation := training.runtime.controller.observation) is not None and observation.held is not None:
            seen.append(observation.held)
    assert seen and all(held.observed == held.planned for held in seen)
    for _, variant in training.runtime.blocks.variants():
        saved = {variant.recording.values[index].label for index in variant.recording.saved}
        assert saved >= {"norm out", "softmax"} and not saved & {"query out", "key out", "relu", "exp", "topk indices"}


def test_their_gradient_error_is_measured():
    training = Training(zoo.IndexedBlock, codecs="auto", memory_budget=0.7, max_gradient_error=0.2)
    for _ in range(6):
        training.step(33)
    (known,) = training.agreement.known_types.values()
    assert known.errors_are_measured
    errors = [error for *_, error in known.errors.coarsest.values()]
    assert errors and max(errors) < HOPELESS


def test_calls_are_held_until_their_backward_though_their_first_saved_tensors_are_discarded():
    training = Training(zoo.IndexedBlock)
    while training.runtime.controller.step.observer is not None or len(training.purposes) < 4:
        training.compare(9)
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    for block in training.blocks:
        x = training.runtime.checkpoint(block, x)
    assert not training.runtime.controller.step.is_pass_over
    x.sum().backward()
    assert training.runtime.controller.step.is_pass_over
    assert training.runtime.controller.step.current_pass.has_backward


class Branching(zoo.IndexedBlock):
    """Data decide whether it keeps what it has computed first."""

    def forward(self, x):
        first = self.query(x).exp().tanh()
        return super().forward(x) + (0.0 if bool(x[0, 0, 0] < 99) else first)


def test_where_data_decide_everything_counts_as_kept(caplog):
    training = Training(Branching, memory_budget=0.9)
    for length in (9, 9, 9, 12, 9):
        training.compare(length)
    assert "differs from the recorded" not in caplog.text
    recordings = [variant.recording for _, variant in training.runtime.blocks.variants()]
    assert recordings and not any(position.discarded for recording in recordings for position in recording.positions)
