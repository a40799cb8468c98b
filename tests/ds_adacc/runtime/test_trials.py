"""No block runs a lossy policy whose gradient error, measured on that block, is above the bound."""

import functools
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zoo
from cases import further
from equal_times import SECONDS
from replayed import replayed
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.plan.approvals import Approvals
from ds_adacc.profile.gradient_error import PolicyError, measure_codecs
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps import trials
from ds_adacc.steps.after_step import _measured, why_rejected
from ds_adacc.steps.step_schedule import Purpose

WIDTH, HEADS, LAYERS, TIME = 64, 4, 3, 64
BOUND = 0.1
# no lossless policies fit this budget, and the first lossy ones keep this bound
LOSSY = {"budget": 0.3, "max_gradient_error": 0.5}

pytestmark = pytest.mark.usefixtures("slow_replays")


def sharpened(block, scale, bias):
    """Queries and keys scaled; a bias of ±`bias` in two channels of each head's keys, which softmax does not see."""
    with torch.no_grad():
        block.qkv.weight[: 2 * WIDTH] *= scale
        keys = block.qkv.bias[WIDTH : 2 * WIDTH].view(HEADS, WIDTH // HEADS)
        keys[:, 0] += bias
        keys[:, 1] -= bias


class Training:
    """Blocks in a row, with and without ds_adacc on the same data; no optimizer."""

    def __init__(self, make=None, budget=0.4, has_engine=True, layers=LAYERS, **section):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList((make or (lambda: zoo.GPTBlock(WIDTH, HEADS, 0.0)))() for _ in range(layers))
        # "paper" offers few codecs, so the solver is quick.
        section = {"memory_budget": budget, "codecs": "paper", "solver": {"max_seconds": 1.5}, **section}
        config = load({"adacc": section})
        self.has_engine = has_engine
        self.runtime = Runtime(config, has_engine=has_engine)
        self.adacc = Adacc(self.runtime)
        self.x, self.weight = torch.randn(2, 4, TIME, WIDTH).unbind()
        self.purposes = []

    def gradients(self, call):
        x = self.x.clone().requires_grad_(all(p.requires_grad for p in self.blocks.parameters()))
        hidden = x * 1.0
        for block in self.blocks:
            output = call(block, hidden)
            hidden = output[block.place] if isinstance(output, tuple) else output
        parameters = [p for p in self.blocks.parameters() if p.requires_grad]
        self.blocks.zero_grad(set_to_none=False)  # a gradient that is there before takes no memory
        (hidden * self.weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def step(self):
        """The relative error of the whole gradient in one step."""
        exact = self.gradients(lambda block, x: block(x))
        self.purposes.append(self.runtime.controller.step.purpose)
        found = self.gradients(self.runtime.checkpoint)
        if self.has_engine:
            self.adacc.end_step()
        return float((found - exact).norm() / exact.norm())

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    @property
    def policies(self):
        return [policy for policies in self.runtime.controller.plan.policies.values() for policy in policies]

    @property
    def is_lossy(self):
        (known,) = self.runtime.agreement.known_types.values()
        profile = known.plan.spec.profile
        return any(policy.lossy_values(profile) for policy in self.policies)


def test_a_lossy_plan_is_tried_before_it_runs_and_the_steps_until_then_are_exact():
    training = Training(**LOSSY)
    errors = training.run(8)
    assert training.purposes[:2] == [Purpose.OBSERVE, Purpose.TRY]
    measuring = Purpose.OBSERVE, Purpose.TRY, Purpose.TRACK
    assert training.is_lossy
    for error, purpose in zip(errors, training.purposes, strict=True):
        assert (error == 0) == (purpose in measuring)
        assert error < 2 * LOSSY["max_gradient_error"]
    assert training.purposes.count(Purpose.TRACK) >= 2
    in_force = training.runtime.agreement.errors_in_force()
    assert in_force and all(0 < error <= 0.5 for error in in_force.values())
    seen = training.runtime.controller.observation
    assert seen.held.planned == seen.held.observed


class Scoring(zoo.GPTBlock):
    """Returns scores as well, which no loss reads."""

    place = 0  # of the output that the next block gets

    def __init__(self):
        super().__init__(WIDTH, HEADS, 0.0)
        self.scores = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        output = super().forward(x)
        return output, (self.scores(output).exp() * output).tanh()


class LargeScoring(Scoring):
    """Its scores are larger than its output, as the weights of attention are."""

    place = 1

    def forward(self, x):
        output, scores = super().forward(x)
        return torch.cat([scores, scores]), output


@pytest.mark.parametrize("make", [Scoring, LargeScoring])
def test_outputs_that_no_loss_reads_leave_the_rest_of_the_block_to_lossy_policies(make):
    training = Training(make, budget=0.35, max_gradient_error=0.5)
    errors = training.run(8)
    assert max(errors) <= 2 * 0.5
    (known,) = training.runtime.agreement.known_types.values()
    assert known.errors_are_measured and training.is_lossy and max(errors) > 0
    hopeless = {value for value, (*_, error) in known.errors.coarsest.items() if error >= planner.HOPELESS}
    labels = {value.index: value.label for value in known.recording.values}
    assert {labels[value] for value in hopeless} >= {"exp", "tanh"}


class Balanced(Scoring):
    """Puts an auxiliary loss aside, which it does not return."""

    def forward(self, x):
        output, scores = super().forward(x)
        self.auxiliary = scores.square().mean()
        return output


def test_what_only_a_loss_reads_that_the_block_has_put_aside_is_never_altered():
    training = Training(Balanced, budget=0.35, max_gradient_error=0.5)
    training.run(3)
    (known,) = training.runtime.agreement.known_types.values()
    assert known.errors_are_measured and training.is_lossy
    hopeless = {value for value, (*_, error) in known.errors.coarsest.items() if error >= planner.HOPELESS}
    labels = {value.index: value.label for value in known.recording.values}
    assert {labels[value] for value in hopeless} >= {"exp", "tanh"}


@pytest.mark.matrix
@pytest.mark.parametrize("codecs", ["auto", "paper"])
@pytest.mark.parametrize(("scale", "bias"), [(1, 10), (1, 100), (3, 0), (3, 40)])
def test_sharp_attention_keeps_the_bound(codecs, scale, bias):
    training = Training(codecs=codecs)
    for block in training.blocks:
        sharpened(block, scale, bias)
    assert max(training.run(6)) <= 2 * BOUND
    assert training.is_lossy or codecs == "paper"  # whose codecs may be too coarse here


def test_one_sharp_layer_is_planned_by_its_own_errors():
    training = Training(codecs={"query": "group", "gelu": "group8", "linear": "group8"}, budget=0.5)
    sharpened(training.blocks[1], 3, 40)
    assert max(training.run(6)) <= 2 * BOUND
    (policies,) = training.runtime.controller.plan.policies.values()
    (known,) = training.runtime.agreement.known_types.values()
    for index, policy in enumerate(policies):
        assert training.runtime.agreement.permits(known.recording.digest, index), policy


def test_an_error_that_rises_above_the_bound_is_caught_at_the_next_tracking_step(caplog):
    caplog.set_level("INFO", logger="ds_adacc")
    training = Training(**LOSSY, rectifier={"max_interval": 4})
    training.run(9)
    assert training.is_lossy
    training.runtime.agreement.approvals.max_error = 1e-6  # in place of data that changes
    errors, purposes = training.run(9), training.purposes[9:]
    tracked = purposes.index(Purpose.TRACK)
    assert all(errors[:tracked])
    assert not any(errors[tracked:])
    assert re.search(
        r"the gradient errors of 3 blocks are above adacc.max_gradient_error = 1e-06 "
        r"\(the largest: \S+, of GPTBlock\)",
        training.runtime.controller.plan.reason,
    )
    assert re.search(r"step \d+: the new plan stores \d+ values in another way than the old one", caplog.text)


def test_a_plan_made_in_a_tracking_step_loses_no_error_that_was_measured_in_it():
    training = Training(**LOSSY, rectifier={"max_interval": 1})
    training.run(9)
    assert training.is_lossy
    assert training.runtime.controller.step.is_tracking
    training.runtime.agreement.approvals.max_error = 1e-6  # in place of data that changes
    training.blocks.append(zoo.BertBlock(WIDTH))  # has no policy yet, so all are planned for
    assert training.step() == 0, "blocks hold everything exactly in a tracking step"
    assert len(training.runtime.agreement.known_types) == 2
    assert training.step() <= 1e-6


@pytest.fixture
def out_of_time(monkeypatch):
    def busy(*_, **__):
        raise planner.NoSolutionInTime("the solver found no policy in 1.5 seconds")

    def search_in_vain():
        monkeypatch.setattr(planner, "solve_in_process", busy)

    return search_in_vain


@pytest.mark.parametrize("enabled", (False, True))
def test_where_the_solver_is_out_of_time_after_the_first_trials_the_plan_that_takes_least_runs(
    caplog, out_of_time, enabled
):
    """A plan whose policies are above the bound cannot stay: its blocks would recompute, above the budget unsaid."""
    training = Training(**LOSSY, rectifier={"enabled": enabled})
    training.step()
    out_of_time()
    controller = training.runtime.controller
    assert controller.step.purpose is Purpose.TRY
    training.runtime.agreement.approvals.max_error = 1e-6
    errors = training.run(5)
    assert not any(errors)
    assert controller.observation.held.planned == controller.observation.held.observed == controller.plan.held
    assert controller.plan.peak > controller.plan.budget
    (warning,) = [line for line in caplog.messages if "no plan is known that fits" in line]
    assert re.fullmatch(
        r"no plan is known that fits the budget of [\d.]+ .iB. New policies are in force, with a peak of [\d.]+ .iB. "
        r'"memory_budget": 0\.\d+ would allow it. A smaller micro-batch needs less. '
        "The reason: the solver found no policy in 1.5 seconds. "
        r"If that is a lack of time, raise adacc.solver.max_seconds \(now [\d.]+\)",
        warning,
    )


def test_a_block_that_was_not_called_in_the_step_of_trials_is_tried_again():
    training = Training(**LOSSY, rectifier={"enabled": False})
    training.step()
    controller = training.runtime.controller
    assert controller.step.purpose is Purpose.TRY
    every, training.blocks = training.blocks, training.blocks[:2]  # LayerDrop: the last block is not called
    training.step()
    assert controller.planning.schedule.try_from is not None
    training.blocks = every
    training.run(4)
    assert controller.planning.schedule.try_from is None
    assert not controller.planning.trials.unfinished(controller.blocks)


def test_a_trial_is_judged_by_the_profile_that_its_policy_was_made_for():
    """A block may run another policy at this size, whose profile does not have all the codecs of the trial's."""
    training = Training(**LOSSY, rectifier={"enabled": False})
    training.step()
    ((name, known),), agreement = training.runtime.agreement.known_types.items(), training.runtime.agreement
    assert training.runtime.controller.step.purpose is Purpose.TRY
    planned, profile = known.plan, replace(known.profile, codecs=((),) * len(known.profile.codecs))
    policies = (planner.recompute_policy(profile),) * len(planned.policies)
    agreement.type_plans[name] = replace(planned, spec=replace(planned.spec, profile=profile), policies=policies)
    agreement.approvals.max_error = 1e-6
    training.gradients(training.runtime.checkpoint)
    agreement.type_plans[name] = planned
    results = training.runtime.controller.planning.trials.results(training.runtime.controller.step)
    assert [found.error > 1e-6 for _, _, found in results] == [True] * LAYERS


def test_where_ranks_have_two_blocks_for_one_index_the_one_with_the_larger_error_is_named():
    """As with LayerDrop, which leaves out other layers on each rank."""
    policy, key = planner.Policy((planner.RETAIN,)), ("block type", 1)
    mine, others = (
        (key, "layers.1 (Block)", PolicyError(policy, 0.9)),
        (key, "layers.5 (Block)", PolicyError(policy, 0.2)),
    )
    written = []
    planning = SimpleNamespace(
        ranks=SimpleNamespace(gather=lambda own: [own, [others]]),
        trials=SimpleNamespace(results=lambda step: [mine]),
        agreement=SimpleNamespace(approvals=Approvals(BOUND)),
        journal=SimpleNamespace(write=lambda event, **fields: written.append(fields)),
        schedule=SimpleNamespace(ended=7),
    )
    measured, names = _measured(planning, None)
    assert names == {key: "layers.1 (Block)"}
    assert written == [{"step": 7, "bound": BOUND, "errors": [["layers.1 (Block)", 0.9]]}]
    assert measured == [(key, mine[2])]


def test_the_reason_of_a_new_plan_names_the_block_also_one_of_another_rank():
    policy = planner.Policy((planner.RETAIN,))
    rejected = {("here", 0): PolicyError(policy, 0.11), ("elsewhere", 1): PolicyError(policy, 0.25)}
    names = {("here", 0): "layers.0 (Block)", ("elsewhere", 1): "layers.7 (Block)"}
    assert why_rejected(rejected, names, BOUND) == (
        "the gradient errors of 2 blocks are above adacc.max_gradient_error = 0.1 (the largest: 0.25, of layers.7 "
        "(Block))"
    )
    for error, shown in ((0.10002, "0.10002"), (0.5, "0.5"), (float("nan"), "nan")):
        rejected = {("here", 0): PolicyError(policy, error)}
        text = why_rejected(rejected, names, BOUND)
        assert text == f"the gradient error of layers.0 (Block) is {shown}, above adacc.max_gradient_error = 0.1"


def test_errors_that_differ_from_batch_to_batch_make_tracking_steps_no_more_frequent():
    """A step that measures takes as long as three others."""
    training = Training(**LOSSY)
    for step in range(40):
        training.x = torch.randn(4, TIME, WIDTH)
        share = 1 / 16 ** (step % 3)  # of the tokens that have a loss
        training.weight = torch.randn(4, TIME, WIDTH) * (torch.rand(4, TIME, 1) < share)
        training.step()
    assert training.is_lossy
    assert max(training.runtime.agreement.errors_in_force().values()) < LOSSY["max_gradient_error"] / 3
    assert training.purposes.count(Purpose.TRACK) <= 8


@pytest.mark.parametrize("bound", [1e-6, 0.003])
def test_where_the_bound_rules_out_the_budget_while_training_the_plan_that_takes_least_runs(caplog, bound):
    training = Training(**LOSSY, rectifier={"max_interval": 4})
    training.run(9)
    controller = training.runtime.controller
    budget = controller.plan.budget
    assert training.is_lossy and controller.plan.peak <= budget
    training.runtime.agreement.approvals.max_error = bound  # in place of data that changes
    errors = training.run(16)
    assert max(errors[-8:]) <= 2 * bound
    assert not (training.is_lossy and bound == 1e-6)
    problem = planner.Problem(controller.plan.block_types, max_gradient_error=training.runtime.agreement.approvals.aim)
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        planner.solve_in_process(problem, budget, max_seconds=10)
    assert budget < controller.plan.peak <= 1.05 * refusal.value.smallest
    assert controller.observation.held.planned == controller.observation.held.observed
    assert "no plan is known that fits the budget" in caplog.text


@pytest.mark.parametrize("name", [further("bert"), "eager", "llama", "experts"])
def test_other_blocks_keep_the_bound(name):
    makes = {
        "bert": lambda: zoo.BertBlock(WIDTH, HEADS),
        "eager": lambda: Eager(),
        "llama": lambda: Llama(WIDTH, HEADS),
        "experts": lambda: Experts(),
    }
    training = Training(makes[name], budget=0.95 if name == "experts" else 0.5, codecs="auto")
    assert max(training.run(6)) <= 2 * BOUND


@pytest.mark.parametrize("codecs", ["auto", further("paper")])
def test_operators_that_read_a_buffer_are_replayed_while_errors_are_measured(codecs, monkeypatch):
    """A buffer is read as it was before the forward, also by a replay of a measurement."""

    def seconds(op, *_):
        """That operator, and the next one, whose output is saved, are quicker than a codec. All else is slow."""
        return SECONDS / 10 if op.short_name in ("mul", "sigmoid") else 1e-2

    monkeypatch.setattr("ds_adacc.profile.operator_costs.replay_seconds", seconds)
    training = Training(Scaled, codecs=codecs, budget=0.4)
    errors = training.run(6)
    assert training.purposes.count(Purpose.TRY) and max(errors) <= 2 * BOUND
    assert training.is_lossy and any(replayed(training.runtime.controller.plan))


def test_without_a_bound_nothing_is_tried():
    training = Training(max_gradient_error=None)
    training.run(3)
    assert Purpose.TRY not in training.purposes
    assert training.is_lossy


def test_lossless_plans_are_not_tried():
    training = Training(codecs="none", budget=0.6)
    assert training.run(3) == [0, 0, 0]
    assert Purpose.TRY not in training.purposes


def test_a_bound_that_no_lossy_codec_keeps_has_everything_exact():
    training = Training(max_gradient_error=1e-9, budget=0.6)
    assert training.run(4) == [0, 0, 0, 0]
    assert not training.is_lossy


def test_a_first_plan_of_simple_rules_that_trials_reject_ends_in_the_error_too(monkeypatch):
    """As where the machine was busy in step 1 alone: then the solver tells in step 2 that nothing fits."""
    solve = planner.solve_in_process

    def late(*arguments, **options):
        monkeypatch.setattr(planner, "solve_in_process", solve)
        return replace(solve(*arguments, **options), fallback="the machine was busy")

    training = Training(**LOSSY)
    monkeypatch.setattr(planner, "solve_in_process", late)
    training.step()
    (group,) = training.runtime.controller.plan.groups
    assert group.solution.fallback == "the machine was busy" and training.is_lossy
    training.runtime.agreement.approvals.max_error = 1e-6
    with pytest.raises(planner.InfeasibleBudget, match="this is too small for the blocks' activations"):
        training.step()


def test_a_contradiction_names_the_smallest_budget_and_the_smallest_bound():
    training = Training(max_gradient_error=1e-6, budget=0.33)
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        training.run(3)
    text = str(refusal.value)
    assert "this is too small for the blocks' activations" in text
    _, named = text.split(
        "with adacc.max_gradient_error = 1e-06; for this budget, the smallest max_gradient_error is about "
    )
    named = float(named.split()[0].rstrip("."))
    assert 1e-6 < named < 1
    fits = Training(max_gradient_error=None, budget=refusal.value.smallest)
    fits.run(2)


def test_a_model_that_cannot_be_measured_is_exact_with_one_warning(caplog):
    training = Training()
    for block in training.blocks:
        block.fc1.weight.register_hook(lambda gradient: None)
    with caplog.at_level("WARNING", logger="ds_adacc"):
        assert max(training.run(3)) == 0
    (warning,) = [line for line in caplog.messages if "no lossy codec" in line]
    assert 'set "max_gradient_error" to null' in warning


class Eager(nn.Module):
    """Attention written out, before a residual MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        probabilities = ((q * 3) @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((probabilities @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Scaled(zoo.GPTBlock):
    """Its output is scaled by a buffer, and then goes through another function."""

    def __init__(self):
        super().__init__(WIDTH, HEADS, 0.0)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x):
        return x + torch.sigmoid(super().forward(x) * self.scale).square()


class Llama(zoo.LlamaBlock):
    """RMSNorm, SwiGLU and RoPE."""

    def forward(self, x):
        return super().forward(x, zoo.rope(TIME, WIDTH // HEADS))


class Experts(nn.Module):
    """Two experts, each for the tokens that the router sends there."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, where, expert(y[where]) * weights[where, None])
        return x + out.view_as(x)


def test_a_trial_that_was_broken_off_is_repeated():
    training = Training(**LOSSY)
    training.step()
    assert training.runtime.controller.step.purpose is Purpose.TRY
    hidden = training.x.clone().requires_grad_()
    for block in training.blocks:
        hidden = training.runtime.checkpoint(block, hidden)
    del hidden  # no backward
    training.adacc.end_step()
    assert training.runtime.controller.step.purpose is Purpose.TRY
    assert training.step() == 0
    assert training.runtime.agreement.errors_in_force() or training.runtime.controller.step.purpose is Purpose.TRY


def test_after_a_backward_that_failed_the_next_one_of_the_step_measures():
    def fail(gradient):
        raise RuntimeError("no gradient today")

    def run(fails):
        training = Training(**LOSSY)
        training.step()
        assert training.runtime.controller.step.purpose is Purpose.TRY
        if fails:
            hidden = training.x.clone().requires_grad_()
            for block in training.blocks:
                hidden = training.runtime.checkpoint(block, hidden)
            hidden.register_hook(fail)
            with pytest.raises(RuntimeError, match="no gradient today"):
                hidden.sum().backward()
            training.runtime.controller.abandon()  # as `engine.backward` does
        assert training.step() == 0
        return training.runtime.agreement.approvals.blocks.keys()

    assert run(fails=True) == run(fails=False) != set()


def test_what_was_measured_before_a_backward_failed_counts():
    training = Training(**LOSSY, rectifier={"enabled": False})
    training.step()

    def fail(_):
        raise RuntimeError("out of memory")

    start = training.x.clone().requires_grad_()
    start.register_hook(fail)  # after the backward of all blocks
    hidden = start * 1.0
    for block in training.blocks:
        hidden = training.runtime.checkpoint(block, hidden)
    with pytest.raises(RuntimeError, match="out of memory"):
        (hidden * training.weight).sum().backward()
    training.runtime.controller.abandon()  # as `engine.backward` does
    training.adacc.end_step()
    assert len(training.runtime.agreement.approvals.blocks) == LAYERS


def test_codecs_that_a_failed_forward_was_to_measure_are_measured_in_the_next():
    training = Training(**LOSSY)

    def fail(_):
        raise RuntimeError("out of memory")

    hidden = training.runtime.checkpoint(training.blocks[0], training.x.clone().requires_grad_())
    assert training.runtime.controller.step.probed
    with pytest.raises(RuntimeError, match="out of memory"):
        training.runtime.checkpoint(fail, hidden)
    training.step()
    (known,) = training.runtime.agreement.known_types.values()
    assert known.errors_are_measured


@pytest.mark.parametrize("bound", [0.5, 1e-6])
def test_what_was_measured_at_a_predicted_size_counts_though_a_plan_forgets_the_size(bound):
    training = Training(**LOSSY, rectifier={"max_interval": 1})
    for time in (TIME, TIME - 4, TIME - 8, TIME - 4, TIME - 8, TIME, TIME - 8, TIME - 12):
        training.x, training.weight = torch.randn(2, 4, time, WIDTH).unbind()
        training.step()
    (origin,) = {*training.runtime.agreement.origins.values()}
    assert training.runtime.controller.step.is_tracking
    approvals = training.runtime.agreement.approvals
    approvals.max_error = bound
    training.blocks.append(zoo.BertBlock(WIDTH))  # has no policy yet, so a plan is made
    training.step()
    judged = [known for (name, index), known in approvals.blocks.items() if name == origin and index is not None]
    assert len(judged) == LAYERS
    assert any(known.rejected is not None for known in judged) == (bound < 0.5)
    training.run(2)


@functools.cache
def errors_of_a_steady_run():
    """What codecs do to gradients that are finite from the first step."""
    training = Training(**LOSSY)
    training.run(12)
    (known,) = training.runtime.agreement.known_types.values()
    return known.errors


@pytest.mark.parametrize("weight", [torch.inf, 0.0])
def test_steps_without_a_gradient_of_training_approve_and_reject_nothing(weight):
    """The first steps in fp16 overflow. Or their loss has a weight of 0: then all that is lossy seems to be exact."""
    training = Training(**LOSSY)
    finite, training.weight = training.weight, torch.full_like(training.weight, weight)
    training.run(4)
    approvals = training.runtime.agreement.approvals
    assert not approvals.blocks
    training.weight = finite
    training.run(12)
    assert all(known.rejections == 0 for known in approvals.blocks.values())
    (found,) = training.runtime.agreement.known_types.values()
    assert found.errors == errors_of_a_steady_run() and found.errors_are_measured
    assert training.is_lossy and training.runtime.controller.step.purpose is not Purpose.TRY
    errors = training.runtime.agreement.errors_in_force()
    assert len(errors) == LAYERS and all(0 < error <= 0.5 for error in errors.values())


@pytest.mark.matrix
@pytest.mark.parametrize("zeros", [5, further(9)])
def test_lengths_that_adopted_while_nothing_could_be_measured(zeros):
    """Once gradients come, several of them are measured late. A plan is made for one, and the others are forgotten."""
    training, lot = Training(budget=0.5, max_gradient_error=0.5), random.Random(0)
    for step in range(zeros + 12):
        for _ in range(2):
            shape = 4, lot.randint(6, 40), WIDTH
            training.x, training.weight = torch.randn(shape), torch.randn(shape) * (step >= zeros)
            training.gradients(training.runtime.checkpoint)
            training.runtime.controller.end_backward()
        training.adacc.end_step()
    assert training.runtime.agreement.errors_in_force()


def test_while_gradients_are_zero_only_steps_that_measure_anyway_measure_codecs(monkeypatch):
    """To measure them takes several backwards, and a weight of 0 may last for the whole run."""
    training, measured = Training(**LOSSY), []

    def noted(*args):
        measured.append(len(training.purposes))
        return measure_codecs(*args)

    monkeypatch.setattr(trials, "measure_codecs", noted)
    training.weight = torch.zeros_like(training.weight)
    training.run(24)
    purposes = {training.purposes[number - 1] for number in measured if number > 1}
    assert measured[0] == 1 and purposes == {Purpose.TRY, Purpose.TRACK}
    assert training.purposes.count(Purpose.RUN) > 10


def test_whatever_the_default_device():
    """`torch.set_default_device` says nothing of where the blocks' tensors are."""
    training = Training(**LOSSY)
    with torch.device("meta"):
        assert max(training.run(6)) > 0
    assert training.is_lossy and len(training.runtime.agreement.errors_in_force()) == LAYERS


def test_a_batch_with_inf_in_a_tracking_step_forbids_no_codec_for_good():
    """Tracking steps record a block anew. What a codec could not hold in that one batch, it may hold in the next."""
    training = Training(**LOSSY, rectifier={"max_interval": 2})
    while training.runtime.controller.step.purpose is not Purpose.TRACK:
        training.step()
    (known,) = training.runtime.agreement.known_types.values()
    offered, finite, plan = known.profile.codecs, training.x, training.runtime.controller.plan
    training.x = finite.clone()
    training.x[0, 0, 0] = torch.inf
    training.step()
    training.x = finite
    assert max(training.run(4)) > 0
    assert training.purposes.count(Purpose.TRACK) == 3
    assert known.profile.codecs == offered
    assert training.is_lossy and len(training.runtime.agreement.errors_in_force()) == LAYERS
    assert training.runtime.controller.plan is plan  # such a batch tells nothing of the outliers to come
    for _, variant in training.runtime.blocks.variants():
        assert all(count < len(order) for order, count in variant.outliers.values())


@pytest.mark.parametrize(("has_engine", "weight"), [(True, torch.inf), (False, torch.inf), (True, 0.0)])
def test_trials_are_repeated_until_gradients_are_finite_and_not_zero(has_engine, weight, caplog):
    """Nothing else would bring the plan into force: there is no rectifier."""
    training = Training(**LOSSY, rectifier={"enabled": False}, has_engine=has_engine)
    finite = training.weight
    training.step()
    training.weight = torch.full_like(finite, weight)
    training.run(7)
    training.weight = finite
    assert training.run(11)[-1] > 0
    tried = [number for number, purpose in enumerate(training.purposes, start=1) if purpose is Purpose.TRY]
    # without an engine a step ends when the next one begins, after its purpose is noted here
    assert tried == ([2, 3, 5, 9] if has_engine else [3, 4, 6, 10])
    assert len(training.runtime.agreement.errors_in_force()) == LAYERS
    assert caplog.text.count("of 3 blocks could not be measured (the first: GPTBlock)") == 2
    assert "measured again in step 9" in caplog.text


@pytest.mark.parametrize("called", [slice(0, 2), slice(0, 0)])
def test_blocks_on_trial_correct_no_memory_model(called):
    """They take other bytes than the plan says: they recompute all that they can."""
    training = Training(**LOSSY, rectifier={"enabled": False})
    training.step()
    blocks, finite = training.blocks, training.weight
    if called.stop:
        training.blocks = blocks[called]  # LayerDrop: the last block is not called in the step of trials
        training.run(1)
    else:
        training.weight = torch.full_like(finite, torch.inf)
        training.run(2)
    training.blocks, training.weight = blocks, finite
    training.run(4)
    (known,) = training.runtime.agreement.known_types.values()
    assert known.plan.correction.backward == 0
    seen = training.runtime.controller.observation
    assert seen.held.observed == seen.held.planned


def test_blocks_that_come_before_the_measured_ones_are_measured_themselves():
    """The first four of eight are frozen at first. Then they train too, and blocks have other numbers than before."""
    training = Training(
        budget=0.7, max_gradient_error=0.5, layers=8, codecs={"gelu": "group", "linear": "group"},
        rectifier={"enabled": False},
    )  # fmt: skip
    runtime, ran, measured = training.runtime, [], set()
    number = {runtime.blocks.of(block): n for n, block in enumerate(training.blocks)}
    note_call = runtime.controller.note_call

    def noted(block, recording, inputs):
        digest = recording.digest
        profile = runtime.agreement.known_types[digest].profile
        for variant in block.variants():
            if variant.digest != digest:  # also while it is recorded
                continue
            lossy = bool(variant.policy.lossy_values(profile))
            ran.extend([(number[block], digest, variant.policy)] * lossy)
        note_call(block, recording, inputs)

    runtime.controller.note_call = noted
    training.blocks[:4].requires_grad_(False)
    for step in range(20):
        if step == 8:
            training.blocks.requires_grad_(True)
        trials = {(number[b], r.digest): r.trial for b, r in runtime.blocks.variants() if r.trial is not None}
        ran.clear()
        training.step()
        assert set(ran) <= measured, step
        measured |= {(*which, trial.policy) for which, trial in trials.items() if trial.result is not None}
    assert {n for n, *_ in ran} >= set(range(7)), "every block but the last has come to run a lossy policy"


def test_a_policy_that_was_exact_only_for_zeros_is_judged_again():
    """A gate that begins at zero, as LoRA's and adaLN-Zero's do, is not zero for long."""

    def gated():
        block = zoo.GPTBlock(WIDTH, HEADS, 0.0)
        nn.init.zeros_(block.fc1.weight)
        nn.init.zeros_(block.fc1.bias)
        return block

    training = Training(gated, 0.5, codecs={"gelu": "group"}, max_gradient_error=0.01, rectifier={"max_interval": 2})
    training.run(4)
    assert training.is_lossy
    for block in training.blocks:
        nn.init.normal_(block.fc1.weight)
    errors = training.run(8)
    assert max(errors[4:]) <= 0.01
