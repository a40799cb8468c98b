"""Kinds and the ranks' agreement on them: what differs from rank to rank does not part them."""

import os
import pickle
import sys
from dataclasses import replace

import pytest
import torch
import zoo
from any_size import Training
from recorded import record
from stack import WIDTH, Model
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.plan.block_type import KnownType
from ds_adacc.plan.peak_estimate import estimated_held
from ds_adacc.plan.rank_reports import RankReport, RankRequest, merge_block_type, merge_orders, merge_profiles
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.gradient_error import CodecErrors
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.runtime.runtime import Runtime

GRAPH = planner.BlockGraph((planner.Value("x", "other", 8, None, True),), (), (planner.Event("e", (0,), 0),))


class Elsewhere(Ranks):
    """The other end of a broadcast: what the first rank gave arrives pickled."""

    is_first = False

    def __init__(self, is_first, box):
        self.is_first, self._box = is_first, box

    def from_first(self, thing):
        if self.is_first:
            self._box.append(pickle.dumps(thing))
            return thing
        return pickle.loads(self._box[0])


class Unpicklable(Exception):
    def __init__(self, one, other):
        super().__init__("text")


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (planner.InfeasibleBudget(1, 2), planner.InfeasibleBudget),
        (ValueError("x"), ValueError),
        (Unpicklable(1, 2), RuntimeError),
    ],
)
def test_what_the_first_rank_raises_all_raise(error, arrives):
    def fail():
        raise error

    box = []
    with pytest.raises(type(error)):
        Elsewhere(True, box).on_first(fail)
    with pytest.raises(arrives, match=r"text|x|budget of 1 bytes"):
        Elsewhere(False, box).on_first(fail)


def test_data_and_device_numbers_do_not_part_kinds():
    block = zoo.GPTBlock(dropout=0.0)
    recording = record(block, (torch.randn(2, 9, zoo.WIDTH, requires_grad=True),), {})
    flagged = tuple(replace(v, moderate=not v.moderate, two_valued=not v.two_valued) for v in recording.values)
    assert replace(recording, values=flagged).digest == recording.digest
    digests = set()
    for number in (0, 1):
        op = RecordedOp(
            0, torch.ops.aten.empty.memory_format, ((4,),), (("device", torch.device("cuda", number)),), (None,)
        )
        digests.add(replace(recording, ops=(op,)).digest)
    assert len(digests) == 1


def cost(name):
    return planner.CodecCost(name, 4, 1.0, 1.0, 0.1, 0)


def test_only_codecs_that_every_rank_offers_are_on_offer():
    profiles = [planner.Profile(GRAPH, (), (offers,)) for offers in ((cost("group"), cost("token")), (cost("token"),))]
    reports = [RankReport(profile, 1, 1, {}) for profile in profiles]
    assert [c.codec for c in merge_profiles(reports).codecs[0]] == ["token"]


def test_a_codec_needs_the_largest_workspace_of_any_rank():
    """On a CPU it depends on the number of threads."""
    costs = [replace(cost("token"), workspace_bytes=nbytes) for nbytes in (3, 7, 5)]
    reports = [RankReport(planner.Profile(GRAPH, (), ((each,),)), 1, 1, {}) for each in costs]
    assert merge_profiles(reports).codec(0, "token").workspace_bytes == 7


def test_operators_and_steps_take_the_most_bytes_of_any_rank():
    """A rank measures no workspaces while a profiler of the user's own runs on it."""

    def measured(workspace, gradients):
        op, event = planner.Op("f", (), (0,), True, workspace), planner.Event("e", (0,), gradients)
        graph = planner.BlockGraph((planner.Value("x", "other", 8, 0, True),), (op,), (event,))
        return RankReport(planner.Profile(graph, (1.0,), ((),)), 1, 1, {})

    for reports in ([measured(0, 4), measured(16, 3)], [measured(16, 3), measured(0, 4)]):
        graph = merge_profiles(reports).graph
        assert (graph.ops[0].workspace_bytes, graph.events[0].gradient_bytes) == (16, 4)


def test_a_graph_that_any_rank_keeps_is_kept():
    freed, kept = (planner.Profile(graph, (), ((),)) for graph in (GRAPH, GRAPH.kept))
    for profiles in ([freed, kept], [kept, freed]):
        assert merge_profiles([RankReport(profile, 1, 1, {}) for profile in profiles]) == kept


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(6, 1), (6, 1)], (6, 6)),
        ([(6, 2), (6, 2)], (6, 3)),
        ([(6, 1), (4, 1)], (6, 1)),
        ([(6, 2), (3, 1)], (6, 3)),
        ([(7, 2)], (7, 1)),
        ([(1, 2)], (1, 1)),
    ],
)
def test_blocks_have_policies_of_their_own_where_the_calls_fall_on_them_alike(counts, expected):
    profile = planner.Profile(planner.BlockGraph((), (), ()), (), ())
    block_type = merge_block_type("k", profile, [RankReport(profile, count, each, {}) for count, each in counts])
    assert (block_type.count, block_type.blocks) == expected


def test_an_order_stands_that_all_ranks_agree_on():
    ab, c = frozenset("ab"), frozenset("c")
    assert merge_orders([{ab: ("a", "b")}, {ab: ("a", "b"), c: ("c",)}]) == {ab: ("a", "b"), c: ("c",)}
    assert merge_orders([{ab: ("a", "b")}, {ab: ("b", "a")}, {ab: ()}]) == {}


def test_a_narrowed_kind_keeps_only_what_the_block_may_use():
    block_type = KnownType(None, planner.Profile(GRAPH, (), ((cost("group"), cost("token")),)), {})
    block_type.narrow([("token",)])
    assert [c.codec for c in block_type.profile.codecs[0]] == ["token"]


def test_errors_that_were_measured_are_not_taken_over_from_another_size():
    recording, profile = record(nn.GELU(), (torch.randn(2, requires_grad=True),), {}), planner.Profile(GRAPH, (), ((),))
    own, other = (KnownType(recording, profile, {}, errors=CodecErrors({})) for _ in range(2))
    other.errors_are_measured = True
    own.take_over(other)
    assert own.errors is other.errors and own.errors_are_measured
    other.errors, other.errors_are_measured = CodecErrors({}), False
    errors = own.errors
    own.take_over(other)
    assert own.errors is errors and own.errors_are_measured


def runtime():
    return Runtime(load({"adacc": {"memory_budget": "1GiB", "codecs": "none"}}), has_engine=True)


def step(runtime, blocks):
    x = torch.randn(2, 4, requires_grad=True)
    for block in blocks:
        x = runtime.checkpoint(block, x)
    x.sum().backward()
    runtime.controller.end_step()


class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.number = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        return self.outer(nn.functional.gelu(self.inner(x)))


def recount(runtime):
    runtime.controller.planning.decide(runtime.controller.step, [frozenset(runtime.agreement.known_types)], "again")
    return runtime.controller.plan.block_types[0].count


def test_calls_that_no_number_of_blocks_share_alike_have_a_peak():
    """One block may have run more often than another, as where a call ran another program in between."""
    runs, block = runtime(), Numbered()
    step(runs, [block] * 4)
    (known,) = runs.agreement.known_types.values()
    whole, origins = frozenset(runs.agreement.known_types), runs.controller.planning.new_sizes.origins
    four = origins._peak_of(whole)
    known.count, known.calls_per_block = 5, 2
    assert origins._peak_of(whole) > four


def test_a_block_recorded_often_counts_once():
    runs, blocks = runtime(), [Numbered() for _ in range(3)]
    for number in range(3):
        for block in blocks:
            block.number = number
        step(runs, blocks)
    assert recount(runs) == 3


def test_kinds_that_no_record_uses_are_forgotten():
    runs, block = runtime(), Numbered()
    step(runs, [block])
    runs.agreement.known_types["stale"] = runs.agreement.known_types[runs.blocks.variants()[0][1].digest]
    recount(runs)
    assert set(runs.agreement.known_types) == {runs.blocks.variants()[0][1].digest}


class Doubled(nn.Module):
    """Runs one block on all of its input, then another, by way of the runtime, on as much of it at every length."""

    def __init__(self, checkpoint):
        super().__init__()
        self.long, self.short, self.checkpoint = Numbered(), Numbered(), checkpoint

    def forward(self, x, short_first=True):
        calls = [(self.short, x[:2].clone()), (self.long, x)]
        return sum(self.checkpoint(block, part).sum() for block, part in (calls if short_first else calls[::-1]))


def without_engine():
    return Runtime(load({"adacc": {"memory_budget": "1GiB", "codecs": "none"}}))


def run(runtime, model, lengths):
    """A step for each length; the decisions met on the way."""
    decisions = []
    for length in lengths:
        model(torch.randn(length, 4, requires_grad=True)).backward()
        if runtime.controller.plan is not None and runtime.controller.plan not in decisions:
            decisions.append(runtime.controller.plan)
    return decisions


def test_without_an_engine_what_ran_earlier_in_the_forward_shares_the_budget_too():
    runs = without_engine()
    (plan,) = run(runs, Doubled(runs.checkpoint), (3, 3, 5, 5, 5))
    assert [len(names) for names in plan.groups[0].live_sets] == [2]
    assert len(plan.block_types) == 2
    assert len(runs.agreement.known_types) == 3 and not runs.agreement.undecided  # one is another's larger size


def test_without_an_engine_a_further_size_needs_no_further_plan(caplog):
    runs, block = without_engine(), Numbered()
    with caplog.at_level("INFO", logger="ds_adacc"):
        decisions = run(runs, lambda x: runs.checkpoint(block, x).sum(), (3, 3, 3, 5, 3, 5, 3, 5, 3, 5, 3))
    assert len(decisions) == 1
    assert not runs.agreement.undecided
    assert len([line for line in caplog.messages if "plan (" in line]) == 1


def test_after_a_budget_that_nothing_fits_a_smaller_batch_may_run():
    runs = Runtime(load({"adacc": {"memory_budget": "2MiB", "codecs": "none"}}))
    block = nn.Sequential(nn.Linear(4, 4096), nn.GELU(), nn.Linear(4096, 4))
    with pytest.raises(planner.InfeasibleBudget):
        run(runs, lambda x: runs.checkpoint(block, x).sum(), (200, 200))
    (plan,) = run(runs, lambda x: runs.checkpoint(block, x).sum(), (3, 3, 3))
    assert plan.peak <= plan.budget


def test_a_kind_that_comes_back_counts_as_before():
    runs = runtime()
    step(runs, [block := Numbered()] * 6)
    (block_type,) = runs.agreement.known_types.values()
    runs.agreement.forget_all_but(())
    assert runs.agreement.add(block_type.recording, block_type.profile).count == 6
    assert block is not None


def test_codecs_withdrawn_after_the_decision_do_not_break_the_report():
    runs = Runtime(load({"adacc": {"codecs": "quantization"}}), has_engine=True)
    block = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    step(runs, [block])
    ((name, block_type),) = runs.agreement.known_types.items()
    policy = block_type.policy(0)
    planned = estimated_held(runs.agreement, {(name, policy): 1})
    assert "token" in block_type.policy(0).stores
    block_type.narrow([() for _ in block_type.profile.codecs])
    step(runs, [block])
    assert runs.controller.observation.held.planned == runs.controller.observation.held.observed == planned


def test_every_codec_that_separates_outliers_is_sized_by_the_capacity_agreed():
    runs = Runtime(
        load({"adacc": {"memory_budget": "1GiB", "codecs": {"gelu": ["outlier", "outlier8"]}}}), has_engine=True
    )
    step(runs, [nn.Sequential(nn.Linear(4, 256), nn.GELU(), nn.Linear(256, 4))])
    ((name, block_type),) = runs.agreement.known_types.items()
    (index,) = block_type.outlier_values
    for capacity in (1, 5):
        resized = runs.agreement.outlier_prices.at_capacity(block_type.profile, block_type, {index: capacity})
        sizes = {cost.codec: cost.nbytes for cost in resized.codecs[index]}
        # Two rows of 256: codes, scales of groups of 128, raw channels in float32, their indices.
        assert sizes == {"outlier": 256 + 16 + 12 * capacity, "outlier8": 512 + 16 + 12 * capacity}
    assert block_type.outlier_codec(index) == "outlier"
    stores = tuple("outlier8" if i == index else None for i in range(len(block_type.profile.codecs)))
    policies = (replace(block_type.policies[0], stores=stores),)
    runs.agreement.type_plans[name] = replace(block_type.plan, policies=policies)
    assert block_type.outlier_codec(index) == "outlier8"
    assert block_type.outlier_values == block_type.tracked_values([]) == [index]


def test_a_plan_of_simple_rules_is_told(monkeypatch, caplog):
    def hurried(problem, budget, *, max_seconds):
        return replace(planner.greedy(problem, budget), fallback="late")

    monkeypatch.setattr(planner, "solve_in_process", hurried)
    runs = runtime()
    step(runs, [Numbered()])
    assert (
        "a plan of simple rules is in force, which keeps the budget but may be slower than the solver's. The reason: "
        "late. If that is a lack of time, raise adacc.solver.max_seconds (now 5.0)" in caplog.text
    )


def test_simple_rules_that_break_the_budget_are_not_said_to_keep_it(caplog):
    runs = runtime()
    step(runs, [Numbered()])
    plan = runs.controller.plan
    (group,) = plan.groups
    group = replace(group, solution=replace(group.solution, fallback="late"), shortfall="nothing fits")
    runs.controller.planning._coordinator._warn(replace(plan, groups=(group,)))
    assert "no plan is known that fits the budget" in caplog.text
    assert "keeps the budget" not in caplog.text


def test_where_the_solvers_process_dies_the_run_goes_on_within_the_budget(tmp_path, monkeypatch, caplog):
    dies = tmp_path / "python"
    dies.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), 9)\n")
    dies.chmod(0o755)
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    exact = gradients(model, lambda block, x: block(x))
    monkeypatch.setattr(sys, "executable", os.fspath(dies))
    runs = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.6}}))
    for _ in range(4):
        zoo.assert_same(gradients(model, runs.checkpoint), exact)
    plan = runs.controller.plan
    assert plan.peak <= plan.budget < plan.without
    assert not any(group.shortfall for group in plan.groups)
    (reason,) = {each.partition("The reason: ")[2] for each in caplog.messages if "of simple rules" in each}
    assert reason == "the solver's process failed: it was ended by signal 9"  # more time would not help
    tight = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.01}}))
    with pytest.raises(planner.InfeasibleBudget):
        for _ in range(2):
            gradients(model, tight.checkpoint)


def gradients(model, call):
    torch.manual_seed(1)  # the same dropout
    for parameter in model.blocks.parameters():
        parameter.grad.zero_()
    model.step(call)
    return [parameter.grad.clone() for parameter in model.blocks.parameters()]


class BesideOneThatCalls(Ranks):
    """The first rank, on which nothing waits, beside one that calls for a plan."""

    def gather(self, thing):
        calls = isinstance(thing, RankRequest)
        return [thing, replace(thing, reason="a correction")] if calls else [thing]


def test_the_reason_of_a_plan_is_that_of_the_rank_which_calls_for_it():
    training = Training(rectifier={"enabled": False})
    training.compare(9)
    controller = training.runtime.controller
    controller.planning._coordinator.ranks = BesideOneThatCalls()
    assert controller.planning.decide(controller.step, training.agreement.live_sets, "").reason == "a correction"
    assert controller.planning.decide(controller.step, training.agreement.live_sets, "mine").reason == "mine"
