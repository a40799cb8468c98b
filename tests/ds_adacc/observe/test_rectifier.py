"""The rectifier tracks at ever rarer steps, re-plans when outliers appear or go, and leaves a steady run alone."""

from dataclasses import replace

import pytest
import torch
import zoo
from launch import on_ranks, told
from rectifier_worker import SECTION
from torch import nn
from torch.nn import functional as F

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.kernels import separates_outliers
from ds_adacc.observe.rectifier import Review, Verdict
from ds_adacc.profile import codec_costs
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps import after_step
from ds_adacc.steps.step_schedule import Purpose

pytestmark = pytest.mark.usefixtures("slow_replays")
CHANNEL = 5


class Training:
    """A loop without DeepSpeed that calls what the engine's step would call."""

    def __init__(self, layers=3, others=SECTION, **rectifier):
        torch.manual_seed(0)
        section = load({"adacc": {"max_gradient_error": None, **others, "rectifier": {"max_interval": 8, **rectifier}}})
        self.runtime = Runtime(section, has_engine=True)
        self.adacc = Adacc(self.runtime)
        self.blocks = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(layers))
        self.scale = torch.ones(zoo.WIDTH)  # of the inputs' channels
        self.tracked = []
        self.decisions = []

    @property
    def block_type(self):
        return next(iter(self.runtime.agreement.known_types.values()))

    def step(self):
        if self.runtime.controller.step.is_tracking:
            self.tracked.append(self.runtime.controller.planning.schedule.ended + 1)
        x = (torch.randn(2, 64, zoo.WIDTH) * self.scale).requires_grad_()
        for block in self.blocks:
            x = self.runtime.checkpoint(block, x)
        zoo.loss_of(x).backward()
        self.adacc.end_step()
        if self.runtime.controller.plan not in self.decisions:
            self.decisions.append(self.runtime.controller.plan)

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def norms(self):
        """Indices of the first LayerNorm's output."""
        values = self.block_type.recording.values
        return [v.index for v in values if v.role == "layernorm" and v.name.startswith("native_layer_norm")][:1]

    def inject(self, factor):
        with torch.no_grad():
            self.blocks[1].ln1.weight[CHANNEL] = factor


def test_tracking_steps_back_off_and_a_steady_run_is_left_alone(caplog):
    training = Training()
    with caplog.at_level("INFO", logger="ds_adacc"):
        training.run(40)
    assert sum("peak: planned" in record.getMessage() for record in caplog.records) == 1
    assert training.tracked == [3, 5, 9, 17, 25, 33]
    assert len(training.decisions) == 1


def test_injected_outliers_have_the_plan_made_anew():
    training = Training(others={**SECTION, "memory_budget": 0.5}, drift=0.05)
    training.run(5)
    (norm,) = training.norms()
    assert training.block_type.capacity[norm] == 0
    training.inject(40.0)
    training.run(5)
    assert training.tracked == [3, 5, 9]
    assert len(training.decisions) == 2
    assert training.block_type.capacity[norm] == 1
    assert training.decisions[1].reason.startswith("the outliers of ")
    training.run(10)
    assert training.tracked == [3, 5, 9, 17]
    assert len(training.decisions) == 2
    training.inject(1.0)
    training.run(8)
    assert training.block_type.capacity[norm] == 0
    assert len(training.decisions) == 3


def test_a_codec_that_separates_other_channels_is_measured_before_it_comes_into_force():
    training = Training(others={**SECTION, "max_gradient_error": 0.9}, drift=0.05)
    training.run(7)
    assert not training.runtime.agreement.has_trials(training.runtime.controller.plan)
    for factor in (40.0, 1.0):
        training.inject(factor)
        known = len(training.decisions)
        while len(training.decisions) == known:
            training.step()
        assert training.runtime.controller.step.purpose is Purpose.TRY
        training.step()
        assert not training.runtime.agreement.has_trials(training.runtime.controller.plan)


@pytest.mark.parametrize("budget", [0.6, 1.0])
def test_outliers_bring_no_new_plan_where_no_codec_separates_them(monkeypatch, budget):
    """At 0.6 other values are compressed, at 1.0 none is."""

    def dear(name, *of):
        return replace(cost(name, *of), compress_seconds=1.0 if separates_outliers(name) else 1e-6)

    cost = codec_costs._cost
    monkeypatch.setattr(codec_costs, "_cost", dear)
    codecs = {"layernorm": ["outlier"], "gelu": ["group"], "query": ["channel"]}
    training = Training(others={**SECTION, "codecs": codecs, "memory_budget": budget})
    training.run(5)
    (norm,) = training.norms()
    assert {policy.stores[norm] for policy in training.block_type.policies} == {"retain"}
    assert training.block_type.adds_time == (budget < 1)
    training.inject(40.0)
    training.run(5)
    assert training.tracked == [3, 5, 9]
    assert len(training.decisions) == 1


def test_an_outlier_that_comes_and_goes_brings_one_new_plan():
    """It raises the compression rate by a sixth, and lowers it by a seventh."""
    training = Training(drift=0.12)
    training.run(5)
    for factor in (40.0, 1.0, 40.0, 1.0):
        training.inject(factor)
        tracked = len(training.tracked)
        while len(training.tracked) == tracked:
            training.step()
    assert len(training.decisions) == 2


@pytest.mark.parametrize(("changed", "interval"), [(3, 1), (0, 8)])
def test_only_a_policy_that_changed_resets_the_backoff(monkeypatch, changed, interval):
    training = Training()
    training.run(8)
    assert training.runtime.controller.planning.schedule.interval == 4
    monkeypatch.setattr(after_step, "judge", lambda *_: Verdict({}, ("drifted",), "a reason"))
    monkeypatch.setattr(after_step, "_replan", lambda *_, **__: Review(True, changed))
    training.run(1)
    assert training.runtime.controller.planning.schedule.interval == interval


def test_a_rank_that_ran_no_block_in_a_step_has_the_same_tracking_steps():
    """At the end of a tracking step the ranks meet: whether a step is one must not depend on what a rank has seen."""

    def tracked(idle):
        training, purposes = Training(), []
        for step in range(1, 10):
            purposes.append(training.runtime.controller.step.is_tracking)
            if step == idle:
                training.adacc.end_step()
            else:
                training.step()
        return purposes

    assert tracked(idle=None) == tracked(idle=2) == tracked(idle=3)
    assert any(tracked(idle=None))


def test_codecs_keep_the_channels_last_seen():
    training = Training()
    training.inject(40.0)
    training.run(3)
    (norm,) = training.norms()
    variant = training.runtime.blocks.variants()[1][1]
    assert variant.outliers[norm][0][0] == CHANNEL
    assert int(variant.outliers[norm][1]) == 1


@pytest.mark.parametrize("codecs", ["none", "paper"])
def test_after_a_tracking_step_policies_are_bound_to_what_it_saw(codecs):
    training = Training(others={**SECTION, "codecs": codecs})
    training.run(6)
    before = [variant.bound for _, variant in training.runtime.blocks.variants()]
    while not training.runtime.controller.step.is_tracking:
        training.run(1)
    training.run(1)
    after = [variant.bound for _, variant in training.runtime.blocks.variants()]
    assert len(after) == len(before) == 3 and not any(new is old for new, old in zip(after, before, strict=True))


def test_an_outlier_that_moves_moves_in_the_codecs_too():
    training = Training(others={**SECTION, "memory_budget": 0.34, "codecs": "paper"})

    def channels():
        """Of each value whose outliers a block holds apart: the block's number, the value's, and the channels."""
        found = enumerate(variant.bound for _, variant in training.runtime.blocks.variants())
        codecs = ((number, index, codec) for number, bound in found for index, codec in bound.codecs.items())
        apart = ((n, index, codec.channels.tolist()) for n, index, codec in codecs if separates_outliers(codec.name))
        return [found for found in apart if found[-1]]

    training.scale[5] = 40.0
    training.run(6)
    before = channels()
    assert before and all(seen == [5] for *_, seen in before)
    training.scale[5], training.scale[9] = 1.0, 40.0
    training.run(8)
    assert len(training.decisions) == 1, "there are as many outliers as before"
    assert channels() == [(number, index, [9]) for number, index, _ in before]


def test_roles_that_are_not_chosen_are_not_looked_at():
    training = Training(roles=["gelu"])
    training.run(5)
    training.inject(40.0)
    training.run(10)
    (norm,) = training.norms()
    assert training.block_type.capacity[norm] == 0


def test_a_disabled_rectifier_never_tracks():
    training = Training(enabled=False)
    training.run(6)
    assert not training.adacc.runtime.controller.tracks
    assert training.tracked == []


def test_a_budget_that_no_longer_fits_keeps_the_policy(monkeypatch):
    training = Training()
    training.run(5)
    before = training.block_type.policies, dict(training.block_type.capacity)

    def refuse(*_, **__):
        raise planner.InfeasibleBudget(1, 2)

    monkeypatch.setattr(planner, "solve_in_process", refuse)
    training.inject(40.0)
    training.run(5)
    assert (training.block_type.policies, training.block_type.capacity) == before


@pytest.mark.ranks
def test_both_ranks_change_in_the_same_step(tmp_path):
    """Outliers appear on one rank alone; both change their plan, to the same one, in the same step."""
    on_ranks("rectifier_worker", tmp_path)
    first, second = told(tmp_path)
    assert first["steps_of_decisions"] == second["steps_of_decisions"]
    assert len(first["steps_of_decisions"]) == 2
    assert first["policies"] == second["policies"]
    assert first["capacity"] == second["capacity"]
    assert first["capacity_before"] != first["capacity"]


class Branching(nn.Module):
    """Sends fewer tokens through its layer where the data says so."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        count = 32 if x.sum().item() > 0 else 8
        return x + F.pad(self.layer(F.gelu(2.0 * self.norm(x)[:, :count])), (0, 0, 0, 32 - count))


def test_a_call_that_takes_another_branch_in_a_tracking_step_is_exact():
    torch.manual_seed(0)
    section = {"codecs": "paper", "max_gradient_error": None, "memory_budget": 0.6, "rectifier": {"max_interval": 2}}
    runtime = Runtime(load({"adacc": section}), has_engine=True)
    adacc = Adacc(runtime)
    blocks = nn.ModuleList(Branching() for _ in range(3))
    has_diverged_while_tracking = False
    for number in range(10):
        is_tracking = runtime.controller.step.is_tracking
        signs = (1, 1, 1) if number < 4 else (1, 1, -1)
        has_diverged_while_tracking |= is_tracking and -1 in signs
        inputs = [torch.randn(4, 32, zoo.WIDTH).abs() * sign for sign in signs]
        outputs = [runtime.checkpoint(block, x.requires_grad_()) for block, x in zip(blocks, inputs, strict=True)]
        for block, x, output in zip(blocks, inputs, outputs, strict=True):
            assert torch.equal(output, block(x.detach()))
        torch.stack(outputs).sum().backward()
        adacc.end_step()
    assert has_diverged_while_tracking
