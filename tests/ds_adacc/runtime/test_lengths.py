"""Batches of varying sizes: exact from the first step on, recorded at a few sizes only, and within the budget."""

import functools
import itertools
import random
from collections import Counter

import pytest
import torch
import zoo
from any_size import LAYERS, Training
from cases import further
from held import planned_peak, watch_held
from recomputing import recomputing
from torch import nn

from ds_adacc import planner
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.runtime.warnings import Warnings
from ds_adacc.sizes.adopter import Adopter
from ds_adacc.sizes.policy_search import PolicySearch
from ds_adacc.steps import binder, pending_live_sets, step_controller
from ds_adacc.steps.step_schedule import Purpose


def lengths(count, steps, seed=0):
    lot = random.Random(seed)
    known = lot.sample(range(8, 8 + 4 * count), count)
    return [lot.choice(known) for _ in range(steps)]


def test_lengths_are_recorded_at_three_sizes_and_predicted_at_all_others():
    training = Training(rectifier={"enabled": False})
    for time in (20, 12, 17):
        training.compare(time)
    recorded = training.runtime.recordings
    assert recorded == LAYERS + 2, "at further sizes, one block is recorded"
    plan = training.runtime.controller.plan
    for time in lengths(20, 40):
        if time <= 20:
            training.compare(time)
    assert training.runtime.recordings == recorded
    assert training.runtime.controller.plan is plan, "no further plan"


class Masked(zoo.GPTBlock):
    """Is given a mask as convolutions shorten it: every fourth of its marks. Their strides follow the whole one."""

    def forward(self, x, mask):
        return super().forward(x) * mask.unsqueeze(-1)


def test_the_strides_of_a_mask_that_is_a_part_of_a_larger_one_are_predicted():
    training = Training(Masked, rectifier={"enabled": False})
    wholes = (80, 50, 71, 60, *lengths(20, 20))
    for whole in wholes:
        mask = (torch.rand(2, whole, generator=torch.Generator().manual_seed(whole)) < 0.8)[:, 2::4]
        training.compare(mask.shape[1], mask=mask)
    assert training.runtime.recordings <= LAYERS + 3, "at further sizes, one block is recorded"
    for whole in (64, 72, 80, *lengths(20, 4)):
        mask = (torch.rand(2, whole, generator=torch.Generator().manual_seed(whole)) < 0.8)[:, 2::4].contiguous()
        training.compare(mask.shape[1], mask=mask)
    assert training.runtime.recordings <= 2 * (LAYERS + 3), "masks that are no parts are a program of their own"


def test_a_mask_that_is_whole_at_its_greatest_length_is_predicted_at_all_others():
    training, whole = Training(Masked, rectifier={"enabled": False}), torch.rand(2, 88) < 0.8
    for time in (88, 40, 50, 30, 88, *lengths(20, 20), 88):
        training.compare(time, mask=whole[:, :time])
    assert training.runtime.recordings <= 2 * LAYERS + 2, "one recording of each block is of the whole mask"


def test_a_fraction_is_of_the_largest_batch_so_far():
    training = Training(rectifier={"enabled": False})
    for time in (10, 12, 9):
        training.compare(time)
    first = training.agreement.budget.limit
    for time in (40, 41, 10):
        training.compare(time)
    assert 3 * first < training.agreement.budget.limit < 6 * first
    assert not training.agreement.undecided


def test_a_budget_in_bytes_holds_at_every_size():
    training = Training(rectifier={"enabled": False})
    training.compare(30)
    budget = training.agreement.budget.limit
    training = Training(memory_budget=f"{budget}B", rectifier={"enabled": False})
    for time in (30, 20, 25, 29, 31, 12, 27):
        training.compare(time)
        held = training.agreement
        for digest in held.known_types:
            known = held.known_types[digest]
            if known.plan is not None:
                assert sum(p.held_bytes(known.plan.spec.profile) for p in known.policies) <= budget
    assert training.agreement.budget.limit == budget
    shortest = min(held.known_types.values(), key=lambda known: sum(v.nbytes for v in known.recording.values))
    longest = max(held.known_types.values(), key=lambda known: sum(v.nbytes for v in known.recording.values))
    kept = [sum(store is not None for p in known.policies for store in p.stores) for known in (shortest, longest)]
    assert kept[0] > kept[1], "a short batch keeps more"


@pytest.fixture
def at_once(monkeypatch):
    """A plan for larger inputs does not wait until the last plan is some steps old."""
    monkeypatch.setattr(pending_live_sets, "_PAUSE", 0)


def test_inputs_that_outgrow_the_plan_get_one_of_their_own(at_once):
    """The first plan retains everything. Adopted at larger sizes, it leaves a block everything or nothing."""
    alone = Training(memory_budget=1.0)
    alone.step(40)
    budget = int(0.7 * alone.runtime.controller.plan.without)
    training = Training(memory_budget=f"{budget}B", rectifier={"enabled": False})
    controller, agreement = training.runtime.controller, training.agreement
    for time in (10, 12, 9):
        training.compare(time)
    first = controller.plan
    assert first.added_seconds == 0
    training.compare(20)
    assert controller.plan is first, "all of it still fits"
    training.compare(40)
    (own,) = controller.plan.block_types
    assert controller.plan.reason == "larger inputs came than were planned for"
    assert controller.plan.peak <= budget and own.name not in agreement.origins
    whole = planner.retain_policy(own.profile), planner.recompute_policy(own.profile)
    assert not set(controller.plan.policies[own.name]) <= set(whole), "the solver decides value by value"
    for time in (40, 41, 42, 10, 39):
        training.compare(time)
        assert own.name in controller.plan.policies, "the same plan, or the same one corrected"
    assert set(agreement.origins.values()) == {own.name}
    program = controller.planning.new_sizes.symbolic_types.of(own.name)
    program.origin, program.origin_bytes = first.block_types[0].name, first.without  # as if another rank had met it
    controller.planning.pending.forget_planned()
    training.compare(40)
    assert program.origin == own.name


def test_a_plan_for_larger_inputs_waits_until_the_last_one_is_some_steps_old():
    """So that one is made for all that other ranks meet by then. Adopted policies are in force so long."""
    alone = Training(memory_budget=1.0)
    alone.step(40)
    budget = int(0.7 * alone.runtime.controller.plan.without)
    training = Training(memory_budget=f"{budget}B", rectifier={"enabled": False})
    controller, made = training.runtime.controller, []
    for time in (10, 12, 9, 40, 10, 9, 10, 10, 10):
        training.compare(time)
        made.append(controller.plan is not None and controller.plan.reason)
    assert set(made[:8]) == {"first step recorded"} and made[8] == "larger inputs came than were planned for"


def test_what_another_rank_has_planned_for_runs_without_a_plan_of_its_own():
    """Its lossy policies are by the blocks' indices, which this rank knows from other sizes."""
    section = {"codecs": "auto", "memory_budget": 0.4, "max_gradient_error": 0.5, "rectifier": {"enabled": False}}
    there, here = Training(**section), Training(**section)
    for time in (12, 12, 12):
        there.step(time)
    for time in (16, 14, 10):
        here.step(time)
    controller, theirs = here.runtime.controller, there.agreement
    (name,) = theirs.type_plans
    here.agreement.set_planned([theirs.type_plans[name]])
    here.agreement.live_sets = (*here.agreement.live_sets, frozenset((name,)))
    here.agreement.approvals.blocks.update(theirs.approvals.blocks)
    plan, recorded = controller.plan, here.runtime.recordings
    for _ in range(3):
        here.step(12)
    assert controller.plan is plan and not controller.planning.pending
    assert here.runtime.recordings == recorded and name not in here.agreement.origins
    ran = [block.variants()[0] for block in controller.blocks.all()]
    assert [variant.digest for variant in ran] == [name] * LAYERS
    assert tuple(variant.policy for variant in ran) == theirs.type_plans[name].policies
    assert theirs.type_plans[name].has_lossy


def test_inputs_outgrow_the_plan_of_a_resumed_run_too(at_once):
    alone = Training(memory_budget=1.0)
    alone.step(40)
    section = {"memory_budget": f"{int(0.7 * alone.runtime.controller.plan.without)}B", "rectifier": {"enabled": False}}
    before, resumed = Training(**section), Training(**section)
    for time in (10, 12, 9):
        before.compare(time)
    resumed.runtime.restore(before.runtime.state())
    for time in (10, 12, 9, 40):
        resumed.compare(time)
    assert resumed.runtime.controller.plan.reason == "larger inputs came than were planned for"


def test_a_plan_for_larger_inputs_counts_the_calls_that_ran(at_once):
    """Two micro-batches were alive at once before, and only one of the larger inputs."""
    alone = Training(memory_budget=1.0)
    alone.step(40)
    budget = int(0.45 * alone.runtime.controller.plan.without)
    training = Training(memory_budget=f"{budget}B", rectifier={"enabled": False})
    for times in ((10, 10), (12, 12), (9, 9), (40,)):
        inputs = [torch.randn(2, time, zoo.WIDTH, requires_grad=True) for time in times]
        through = [call_all(training, x) for x in inputs]
        sum(x.sum() for x in through).backward()
        training.runtime.controller.end_backward()
        training.adacc.end_step()
    (own,) = training.runtime.controller.plan.block_types
    assert (own.count, own.calls_per_block) == (LAYERS, 1)


def call_all(training, x):
    for block in training.blocks:
        x = training.runtime.checkpoint(block, x, rope=zoo.rope(x.shape[1]))
    return x


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(zoo.WIDTH), nn.Linear(zoo.WIDTH, width), nn.GELU())
        self.out = nn.Linear(width, zoo.WIDTH)

    def forward(self, x, rope):
        return x + self.out(self.inner(x))


def test_after_a_batch_that_does_not_fit_smaller_ones_keep_the_budget_or_are_recomputed():
    """Each of several block types would fit alone."""
    widths = itertools.cycle((128, 192, 256, 320))
    section = {"layers": 4, "solver": {"max_seconds": 2.0}, "rectifier": {"enabled": False}}
    training = Training(lambda: Mlp(next(widths)), **section)
    training.step(20, rope=None)
    training = Training(lambda: Mlp(next(widths)), memory_budget=f"{training.agreement.budget.limit}B", **section)
    held = watch_held(training.runtime.controller)
    for time in (20, 20, 80, 40, 38):
        training.step(time, rope=None)
    recomputed = held[2][1]
    assert all(observed <= max(recomputed, training.agreement.budget.limit) for _, observed in held)


def test_batch_and_length_vary_with_a_rectifier_that_looks():
    training = Training(rectifier={"max_interval": 4})
    lot = random.Random(1)
    for _ in range(24):
        training.compare(lot.randrange(8, 40), lot.choice((1, 2, 4)))
    assert training.purposes.count(Purpose.TRACK) >= 4
    assert training.runtime.recordings <= LAYERS * 2 + 5 + training.purposes.count(Purpose.TRACK)


@pytest.mark.parametrize("codecs", ["none", further("auto")])
def test_a_step_binds_the_policies_of_what_it_runs(codecs, monkeypatch):
    training = Training(codecs=codecs, memory_budget=0.4, rectifier={"max_interval": 8})
    sizes, counts = range(12, 24), []
    for time in (23, *sizes, *sizes):
        training.step(time)
    monkeypatch.setattr(binder, "bind", lambda *given: counts.append(len(training.purposes)) or bind(*given))
    for time in sizes:
        training.step(time)
    assert Purpose.TRACK in training.purposes[-len(sizes) :]
    assert max(Counter(counts).values()) <= 3 * LAYERS, "of each block the policy, its trial, and full recomputation"
    while training.runtime.controller.step.purpose is not Purpose.RUN:
        training.step(20)
    training.step(20)
    for block in training.runtime.blocks.all():
        variant = block.variants()[0]
        index = training.agreement.forward_order.index(block, variant.digest)
        assert variant.bound.policy == training.agreement.known_types[variant.digest].policy(index)


def test_a_mask_of_the_same_length_varies_along():
    training = Training(rectifier={"enabled": False})
    for time in (20, 12, 17, 9, 15, 19):
        mask = torch.zeros(time, time).masked_fill(torch.ones(time, time).triu(1).bool(), -1e9)
        training.compare(time, rope=zoo.rope(time), attention_mask=mask)
    assert training.runtime.recordings <= LAYERS + 3


@pytest.mark.parametrize("make", [zoo.EagerBlock, zoo.BertBlock, zoo.GPTBlock])
def test_other_blocks(make):
    training = Training(make, rectifier={"enabled": False})
    for time in (20, 12, 17, 9, 15, 19, 11):
        training.compare(time)


def compare_pair(training, *times, batch=2):
    """A step with two forwards of these lengths before its backward, as those of a siamese model."""

    def both(call):
        torch.manual_seed(0)
        total = 0.0
        for time in times:
            x = torch.randn(batch, time, zoo.WIDTH, requires_grad=True)
            arguments = {"rope": zoo.rope(time)} if training.make is zoo.LlamaBlock else {}
            for block in training.blocks:
                x = call(block, x, **arguments)
            total = total + x.square().sum()
        training.blocks.zero_grad()
        total.backward()
        return [p.grad for p in training.blocks.parameters()]

    exact, found = both(lambda block, x, **kwargs: block(x, **kwargs)), both(training.runtime.checkpoint)
    training.adacc.end_step()
    zoo.assert_same(exact, found)


def test_pairs_of_sizes_that_do_not_fit_are_recomputed_and_not_planned_one_by_one():
    training, plans = Training(layers=4, rectifier={"enabled": False}, memory_budget=0.3), []
    compare_pair(training, 100, 100)
    lot = random.Random(0)
    for _ in range(30):
        compare_pair(training, *(lot.randrange(12, 100, 2) for _ in range(2)))
        plans.append(training.runtime.controller.plan)
    assert len(set(map(id, plans[20:]))) == 1
    assert not training.agreement.undecided


@pytest.mark.usefixtures("equal_times")
def test_where_two_sizes_are_always_alive_at_once_new_ones_recompute_before_a_plan_is_made_for_them():
    """As in contrastive training: no size has ever been planned for alone, so that others could adopt from it."""
    section = {"rectifier": {"enabled": False}, "memory_budget": 0.46}
    training, plans, lot = Training(lambda: zoo.GPTBlock(dropout=0.0), layers=2, **section), [], random.Random(3)
    for _ in range(40):
        compare_pair(training, lot.randrange(12, 121), lot.randrange(12, 121), batch=4)
        plans.append(training.runtime.controller.plan)
    assert len(set(map(id, plans))) <= 2
    assert not training.agreement.undecided


def test_sizes_that_wait_for_a_plan_are_known_until_it_is_made(monkeypatch):
    """However many other sizes come in the same step."""
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 4)
    training = Training(rectifier={"enabled": False})
    for time in (120, 100, 110, 90, 80, 120, 120, 120, 120):
        training.step(time)
    controller = training.runtime.controller
    plan, total = controller.plan, torch.zeros(())
    for time in (118, 117):
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        for block in training.blocks:
            x = training.runtime.checkpoint(block, x, rope=zoo.rope(time))
        total = total + x.sum()
    total.backward()
    controller.end_backward()
    assert controller.planning.pending and controller.planning.pending.names <= training.agreement.origins.keys()
    for time in range(6, 16):
        training.micro_batch(time)
    training.adacc.end_step()
    assert controller.plan is not plan and not controller.planning.pending


@pytest.mark.usefixtures("equal_times")
def test_two_sizes_that_have_adopted_policies_apart_are_priced_together():
    """Each may have used what was left of the budget beside the largest size of the other one."""
    section = {"rectifier": {"enabled": False}, "memory_budget": 0.47}
    training, lot, priced = Training(lambda: zoo.GPTBlock(dropout=0.0), layers=6, **section), random.Random(3), 0
    agreement, controller = training.agreement, training.runtime.controller
    for pair in ((40, 100), *((lot.randrange(12, 70), lot.randrange(70, 121)) for _ in range(13))):
        total = torch.zeros(())
        for time, blocks in zip(pair, (training.blocks[:4], training.blocks[4:]), strict=True):
            x = torch.randn(4, time, zoo.WIDTH, requires_grad=True)
            for block in blocks:
                x = training.runtime.checkpoint(block, x)
            total = total + x.sum()
        ran = controller.step.current_pass.called.copy()
        total.backward()
        controller.end_backward()
        agreed = [agreement.type_plans.get(name) for name in ran]
        if not controller.planning.pending and None not in agreed:
            priced += 1
            assert planned_peak(agreement, agreed) <= agreement.budget.limit
        training.adacc.end_step()
    assert priced > 6


@pytest.mark.usefixtures("equal_times")
@pytest.mark.parametrize(
    "equal", [36, further(35), 28]
)  # the length that was planned for, and two that adopt its policies
def test_two_forwards_of_equal_lengths_keep_the_budget_of_those_that_differ(equal):
    """They are twice as many calls of one size, not one call of each of two."""
    section = {"memory_budget": 0.35, "rectifier": {"enabled": False}}
    training = Training(**section)
    held = watch_held(training.runtime.controller)
    pairs = ((36, 20), (30, 33), (25, 22), (33, 21), (equal, equal), (equal, equal), (20, 30), (equal, equal))
    for pair in pairs:
        two_forwards(training, pair)
    limit = training.agreement.budget.limit
    _, *later = [observed for pair, (_, observed) in zip(pairs, held, strict=True) if pair == (equal, equal)]
    assert max(later) <= limit
    largest = Training(**section)
    two_forwards(largest, max(pairs, key=sum))
    assert limit == pytest.approx(0.35 * largest.runtime.controller.plan.without, rel=1e-5)


def test_the_calls_of_a_size_are_counted_by_block_whichever_passes_ran():
    """Those of its most calls, also if the pass that is observed has fewer of them."""
    training = Training(memory_budget=0.35, rectifier={"enabled": False})
    for pair in ((36, 20), (36, 36), (36, 20), (36, 36), (36, 20), (20, 36), (36, 30)):
        two_forwards(training, pair)
    counts = {(known.count, known.calls_per_block) for known in training.agreement.known_types.values()}
    assert counts == {(2 * LAYERS, 2), (LAYERS, 1)}
    assert {len(known.policies) for known in training.agreement.known_types.values()} == {LAYERS}


def two_forwards(training, pair):
    """A step with a forward for each of two lengths, and one backward."""
    losses = []
    for time in pair:
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        for block in training.blocks:
            x = training.runtime.checkpoint(block, x, rope=zoo.rope(time))
        losses.append(x.square().sum())
    sum(losses).backward()
    training.runtime.controller.end_backward()
    training.adacc.end_step()


def test_two_sizes_alive_at_once_share_the_budget():
    training = Training(rectifier={"enabled": False})
    for time in (30, 20, 25, 28):
        training.compare(time)
    budget = training.agreement.budget.limit
    for _ in range(2):
        compare_pair(training, 30, 29)
    plan = training.runtime.controller.plan
    assert len(plan.block_types) == 2, "both sizes are planned together"
    assert plan.peak <= plan.budget
    assert plan.budget > 1.5 * budget


class OtherAlone(zoo.GPTBlock):
    """It runs another program for a batch of one, as kernels of torch may."""

    def forward(self, x):
        return super().forward(torch.tanh(x) if len(x) == 1 else x)


@pytest.mark.parametrize("batches", [(3,), (3, 4)])
def test_a_batch_of_one_now_and_then_is_a_program_of_its_own_and_the_others_stay_known(batches):
    """Four batches of one are recorded or found out: their program is known then."""
    training = Training(OtherAlone, rectifier={"enabled": False})
    lot = random.Random(0)
    times = [(64, max(batches)), *((lot.randrange(8, 60), lot.choice(batches)) for _ in range(11))]
    for step in range(60):
        time, batch = times[step] if step < len(times) else (lot.randrange(8, 60), lot.choice(batches))
        training.compare(time, 1 if step >= len(times) and step % 6 == 0 else batch)
        if step == 40:
            recorded, plans = training.runtime.recordings, len(training.agreement.live_sets)
    assert training.runtime.recordings == recorded < 20
    assert len(training.agreement.live_sets) == plans <= 3


class Chunked(zoo.GPTBlock):
    """It runs its text in chunks of 16: the last has what is left, and there are fewer in a shorter text."""

    def forward(self, x):
        return torch.cat([super(Chunked, self).forward(part) for part in x.split(16, 1)], 1)


def test_a_program_is_not_predicted_where_a_tensor_of_it_would_have_a_negative_size():
    training = Training(Chunked, layers=2, rectifier={"enabled": False})
    for time in (60, 56, 58, 62, 20, 40, 34, 18):
        training.compare(time)


class Bucketed(zoo.GPTBlock):
    """It scales by a factor that several lengths have in common."""

    def forward(self, x):
        return super().forward(x * (1 / (1 + x.shape[1] // 8)))


def test_a_constant_that_several_sizes_have_in_common_is_not_taken_for_that_of_all(monkeypatch):
    """Once this was found out, the blocks are recorded at each size: a call that differs takes more than planned."""
    mistaken = []
    monkeypatch.setattr(Warnings, "mispredicted", lambda *given: mistaken.append(given))
    training = Training(Bucketed, rectifier={"enabled": False})
    lot = random.Random(0)
    for step, time in enumerate((64, *(lot.randrange(8, 60) for _ in range(40)))):
        training.compare(time)
        if step == 20:
            early = len(mistaken)
    assert len(mistaken) == early <= 2 * LAYERS


class Windowed(nn.Module):
    """A block whose slice stops following the length where it is long."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        y = torch.tanh(self.up(x))
        window = min(x.shape[1], 24)
        return x + self.down(torch.nn.functional.gelu(y[:, -window:]).mean(1, keepdim=True))


def test_new_sizes_are_told_at_first_and_then_counted(caplog):
    training = Training(rectifier={"enabled": False})
    with caplog.at_level("INFO", logger="ds_adacc"):
        for time in range(20, 36):
            training.step(time)
    told = [line for line in caplog.messages if "such sizes so far" in line]
    assert [text.rpartition("(")[2] for text in told] == [f"such sizes so far: {n})" for n in (1, 2, 3, 10)]
    assert ": the input size (2, 23, 32) is new. It is not recorded, since recordings at others tell" in told[0]


class Scheduled(nn.Module):
    """A feed-forward block with a dropout and a scale of its own. `by_size` makes the scale from the input's size."""

    def __init__(self, rate, scale=1.0, by_size=None):
        super().__init__()
        self.rate, self.scale, self.by_size = rate, scale, by_size
        self.up, self.down = nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH), nn.Linear(4 * zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        scale = self.by_size(x.shape[1]) if self.by_size else self.scale
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x)) * scale), self.rate)


def test_blocks_of_one_program_share_what_is_found_out_about_it():
    training = Training(rectifier={"enabled": False}, memory_budget="1GiB")
    for time in (20, 12, 17, 15, 16, 15):
        training.compare(time)
    records = [training.runtime.blocks.all()[layer].variants()[0] for layer in range(LAYERS)]
    assert all(variant.is_predicted for variant in records)
    assert len({id(variant.recording.ops) for variant in records}) == 1
    assert len({id(variant.bound.course) for variant in records}) == 1
    assert len({id(variant.recording.parameters) for variant in records}) == LAYERS


@pytest.mark.parametrize("scales", [(1.0, 2.0, 3.0), (0.0, -0.0, 0.5)])
def test_a_constant_of_each_block_makes_no_type_of_its_own(scales):
    own = iter(scales)
    training = Training(lambda: Scheduled(0.1, next(own)), rectifier={"enabled": False})
    training.compare(20)
    assert len(training.agreement.known_types) == 1
    for time in (30, 40, 50, 30):
        training.compare(time)
    recorded = training.runtime.recordings
    assert recorded <= 3 * LAYERS, "each block shows at two sizes that its constants do not follow them"
    for time in (60, 70, 20, 50):
        training.compare(time)
    assert training.runtime.recordings == recorded
    blocks = training.runtime.blocks.all()
    constants = [{repr(variant.recording.constants) for variant in block.variants()} for block in blocks]
    assert [len(found) for found in constants] == [1] * LAYERS and len(set.union(*constants)) == LAYERS


@pytest.mark.parametrize("by_size", [lambda time: 1.0 / time, int], ids=["decimal", "whole"])
def test_a_constant_that_follows_the_size_is_recorded_at_each(by_size):
    training = Training(lambda: Scheduled(0.1, by_size=by_size), rectifier={"enabled": False})
    for time in (20, 30, 40, 50, 20, 60):
        training.compare(time)
    assert training.runtime.recordings >= 5 * LAYERS


def test_a_block_that_is_recorded_at_each_size_is_told_of_once(caplog):
    work, block = recomputing(), Scheduled(0.1, by_size=int)
    for count in range(1, 11):
        arguments = (torch.randn(2, 3 + count, zoo.WIDTH),), {}
        call = functools.partial(work.checkpoint, block)
        zoo.assert_same_bits(zoo.gradients(block, *arguments), zoo.gradients(block, *arguments, call))
        said = [line for line in caplog.messages if "sizes of its tensors" in line]
        assert len(said) == (count >= 8)
    assert "has been recorded at 8 sizes of its tensors" in said[0]
    assert work.recordings == 10


def test_sizes_at_which_a_prediction_is_verified_are_not_told_of(caplog):
    """Tracking steps record a block at sizes that were predicted. That is no sign that they could not be."""
    training = Training(rectifier={"max_interval": 1})
    for time in 2 * [*range(20, 32)]:
        training.compare(time)
    assert training.purposes.count(Purpose.TRACK) >= 20
    assert "sizes of its tensors" not in caplog.text


def test_a_block_that_cannot_be_recorded_is_tried_at_a_few_sizes_and_its_sizes_are_not_told_of(caplog):
    work, block = recomputing(), nn.GRUCell(zoo.WIDTH, zoo.WIDTH)
    for count in range(1, 13):
        args = (torch.randn(count, zoo.WIDTH, requires_grad=True),)
        found = zoo.gradients(block, args, {}, functools.partial(work.checkpoint, block))
        zoo.assert_same_bits(zoo.gradients(block, args, {}), found)
    assert work.recordings == 8
    assert "GRUCell runs without ds_adacc" in caplog.text
    assert "sizes of its tensors" not in caplog.text


class Warming(nn.Module):
    """It cannot be recorded before it is warm."""

    def __init__(self):
        super().__init__()
        self.cell, self.is_warm = nn.GRUCell(zoo.WIDTH, zoo.WIDTH), False

    def forward(self, x):
        return torch.tanh(x.sin()) if self.is_warm else self.cell(x)


def test_a_block_that_could_not_be_recorded_is_tried_again_once_it_has_changed():
    work, block = recomputing(), Warming()
    for count in range(1, 12):
        block.is_warm = count > 10
        work.checkpoint(block, torch.randn(count, zoo.WIDTH, requires_grad=True)).sum().backward()
    assert work.recordings == 9
    assert [variant.is_recorded for variant in work.blocks.all()[0].variants()].count(True) == 1


def test_after_a_new_plan_policies_are_adopted_from_it():
    training = Training(rectifier={"enabled": False})
    for time in (20, 30, 40, 50, 20):
        training.compare(time)
    controller, agreement = training.runtime.controller, training.agreement
    controller.planning.decide(controller.step, agreement.live_sets, "a new plan")
    for time in (20, 30, 40, 50):
        training.compare(time)
        for _, variant in controller.blocks.variants():
            assert agreement.known_types[variant.digest].plan is agreement.type_plans[variant.digest]


@pytest.mark.parametrize("on_host", [False, True])
def test_what_blocks_hold_is_counted_while_they_wait_for_a_plan(monkeypatch, on_host):
    """As where no policy of another size fits: they recompute all that they can."""
    monkeypatch.setattr(PolicySearch, "policies", lambda self, limit: None)
    training = Training(rectifier={"enabled": False})
    training.runtime.controller.hold_inputs(InputPlacement(on_host=on_host))
    held = watch_held(training.runtime.controller)
    for time in (20, 12, 17, 15, 19):
        training.compare(time)
    for planned, observed in held:
        assert planned == observed > 0


def test_a_wrong_prediction_is_retained_and_that_size_recorded(caplog):
    training = Training(Windowed, memory_budget=0.8, rectifier={"enabled": False})
    for time in (20, 12, 17, 15):
        training.compare(time)
    recorded = training.runtime.recordings
    for _ in range(3):
        training.compare(40)
    assert training.runtime.recordings > recorded
    (warning,) = [line for line in caplog.messages if "a call differs" in line]
    assert "from what was predicted for its arguments" in warning


def test_lossy_policies_are_tried_once_and_run_at_every_length():
    training = Training(codecs="auto", memory_budget=0.28, max_gradient_error=0.5, rectifier={"enabled": False})
    errors = []
    for time in (40, 20, 30, 26, 38, 33, 35, 40, 29, 36):
        (_, exact), (_, found) = training.step(time)
        difference = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        errors.append((difference / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)
    assert 0 < max(errors) <= 1.0
    assert sum(error > 0 for error in errors[4:]) >= 3


def test_a_size_that_adopts_no_policies_is_planned_for_with_the_outliers_of_the_others(monkeypatch):
    """As where the origin of its program was forgotten. A plan without their number could bind no outlier codec."""
    training = Training(
        zoo.GPTBlock, codecs="paper", memory_budget=0.3, max_gradient_error=0.9, rectifier={"enabled": False}
    )
    for time in (64, 48, 56, 64, 60, 64):
        training.step(time)
    types = training.agreement.known_types
    before = set(types)
    for adoption in ("_adopt_if_fits", "adopt_for_pass"):
        monkeypatch.setattr(Adopter, adoption, lambda *_: False)
    training.micro_batch(66)
    (new,) = types.keys() - before
    assert types[new].plan is None and types[new].outlier_values
    assert set(types[new].outlier_values) <= types[new].capacity.keys()
    assert types[new].errors_are_measured


def test_quantization_compresses_everything_at_every_length():
    training = Training(codecs="quantization", memory_budget="auto", rectifier={"enabled": False})
    for time in (40, 20, 30, 26, 50):
        training.step(time)
    for known in training.agreement.known_types.values():
        assert set(known.policies) == {planner.compress_policy(known.profile)}
