"""Values whose last dimension is the length: their channels are positions, so outliers of one length say nothing of
another.
"""

import pytest
import torch
import zoo
from any_size import Training
from torch import nn
from torch.nn import functional as F

from ds_adacc.kernels import separates_outliers
from ds_adacc.steps.binder import Binder

RECORDED, PREDICTED = (48, 40, 56), (36, 64, 44)
SECTION = {"codecs": "paper", "max_gradient_error": None, "rectifier": {"enabled": False}}


class OverTime(nn.Module):
    """A convolution over time, as a Conformer has: inside, tensors are (batch, features, length)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH), nn.Linear(4 * zoo.WIDTH, zoo.WIDTH)
        self.conv = nn.Conv1d(4 * zoo.WIDTH, 4 * zoo.WIDTH, 3, padding=1)

    def forward(self, x):
        h = self.up(x).transpose(1, 2)
        return x + self.down(F.silu(self.conv(h)).transpose(1, 2))


def separated(variant):
    """The channels of each value that an outlier codec holds, and how many the variant has ranked."""
    stores, values = variant.bound.policy.stores, variant.recording.values
    indices = [i for i, store in enumerate(stores) if store is not None and separates_outliers(store)]
    return [(values[i].channels, len(variant.outliers[i][0])) for i in indices]


@pytest.mark.usefixtures("slow_replays")
def test_outlier_channels_of_one_length_are_not_used_at_another():
    training = Training(OverTime, layers=4, memory_budget=0.62, **SECTION)
    for time in (*RECORDED, *PREDICTED):
        (loss, exact), (found_loss, found) = training.step(time)
        assert torch.equal(loss, found_loss)
        for name, expected in exact.items():
            assert (found[name] - expected).norm() < 0.2 * expected.norm(), name
    records = [variant for _, variant in training.runtime.blocks.variants()]
    by_prediction = {False: [], True: []}
    for variant in records:
        by_prediction[variant.is_predicted] += separated(variant)
    assert any(channels in RECORDED for channels, _ in by_prediction[False]), "positions were never channels"
    assert by_prediction[True], "no outlier codec was used at a predicted length"
    for channels, ranked in (*by_prediction[False], *by_prediction[True]):
        assert channels == ranked
    assert not any(channels in PREDICTED for channels, _ in by_prediction[True])
    assert training.runtime.recordings <= 4 + len(RECORDED)


@pytest.mark.usefixtures("slow_replays")
def test_a_policy_is_not_approved_by_calls_that_cannot_run_it(monkeypatch):
    """At a length without outliers the calls would retain what the policy compresses, and find no error."""
    measured = []

    def noted(self, variant, known, policy):
        bound = bind(self, variant, known, policy)
        if variant.trial is not None and policy == variant.trial.policy:
            measured.append(bound.policy == policy)
        return bound

    bind = Binder.bound_to_measure
    monkeypatch.setattr(Binder, "bound_to_measure", noted)
    for budget in (0.62, 0.65):
        section = {**SECTION, "memory_budget": budget, "max_gradient_error": 0.9}
        training = Training(OverTime, layers=4, **section)
        for time in (48, 40, 48, 40):
            training.step(time)
    assert measured
    assert all(measured)
