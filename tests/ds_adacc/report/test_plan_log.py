"""What the log says of plans: one table, and then lines; of several sizes, and of a budget that has grown."""

import re
from dataclasses import replace

import pytest
import torch
from any_size import Training
from torch import nn

from ds_adacc.config import load
from ds_adacc.observe.calibration import Observation, Pair
from ds_adacc.plan.ranks import Ranks
from ds_adacc.planner import human_bytes
from ds_adacc.report.journal import Journal, read
from ds_adacc.report.plan_log import PlanLog
from ds_adacc.report.plan_text import decision_table, decisions_here, merge_decisions
from ds_adacc.runtime.runtime import Runtime

SEEN = Observation(Pair(100, 100), Pair(2048, 1024), None)


def steps(*lengths, **section):
    training = Training(rectifier={"enabled": False}, **section)
    for time in lengths:
        training.compare(time)
    return training


@pytest.fixture
def log(caplog):
    caplog.set_level("INFO", logger="ds_adacc")
    return lambda: caplog.messages


def test_the_first_plan_that_stays_is_shown_as_a_table_and_later_ones_as_lines(log):
    training = steps(9, 9)
    plan, told = training.runtime.controller.plan, PlanLog(training.agreement, Journal(None), Ranks())
    other = steps(12, 12).runtime.controller.plan
    other = replace(other, reason="new shapes recorded", without=plan.without)
    log_before = len(log())
    seen = replace(SEEN, held=Pair(plan.held, plan.held + 7))
    told.observed(plan, seen, 2, is_corrected=True)
    told.observed(plan, seen, 3, is_corrected=False)
    told.observed(replace(plan, reason="a reason"), seen, 5, is_corrected=False)
    told.observed(other, seen, 9, is_corrected=False)
    told.observed(plan, replace(seen, peak=None), 11, is_corrected=True)
    corrected, table, same, later, by_forward = log()[log_before:]
    assert re.fullmatch(
        r"step 2: peak planned \S+ KiB, observed 1.00 KiB. The memory model is corrected, and another plan follows",
        corrected,
    )
    assert table.startswith("plan (first step recorded):\n") and "instead" in table
    assert re.search(r"\n  held between forward and backward: planned (\S+ KiB), observed \S+ KiB\n", table)
    assert re.search(r"\n  peak: planned \S+ KiB, observed 1.00 KiB; budget ", table)
    assert same.startswith("step 5: the solver has found the same plan again (a reason): peak planned ")
    assert later.startswith("step 9: a new plan is in force (new shapes recorded): peak planned ")
    assert later.endswith(" ms to a forward and backward. `ds_adacc report` shows its table")
    assert re.fullmatch(
        r"step 11: peak planned \S+ KiB, of which the forwards took more or less than planned. The memory model is "
        "corrected, and another plan follows",
        by_forward,
    )


def test_a_plan_above_the_budget_is_called_so(log):
    training = steps(9)
    told = PlanLog(training.agreement, Journal(None), Ranks())
    told.decided(replace(training.runtime.controller.plan, budget=1 << 10), 1)
    assert re.search(r"\): its peak is \S+ KiB, above the budget of 1.00 KiB\.", log()[-1])


def test_a_plan_for_much_larger_inputs_gets_a_table_of_its_own(log):
    training = steps(9, 9)
    plan, told = training.runtime.controller.plan, PlanLog(training.agreement, Journal(None), Ranks())
    before = len(log())
    for step, more in enumerate((1.0, 1.25, 1.26, 1.27), 1):
        told.observed(replace(plan, without=int(more * plan.without)), SEEN, step, is_corrected=False)
    assert [text.startswith("plan (") for text in log()[before:]] == [True, False, True, False]


def test_steps_that_take_longer_say_why(log):
    training, before = steps(9), len(log())
    told = PlanLog(training.agreement, Journal(None), Ranks())
    told.tries(2)
    told.tracks(4)
    told.tracks(8)
    assert [text.split()[:3] for text in log()[before:]] == [["step", "2", "tries"], ["step", "4", "is"]]


def test_a_step_of_other_sizes_than_the_planned_ones_is_called_so(log):
    training = steps(9, 9)
    plan, told = training.runtime.controller.plan, PlanLog(training.agreement, Journal(None), Ranks())
    told.observed(plan, SEEN, 2, is_corrected=False)
    table = log()[-1]
    assert re.search(
        r"\n  held between forward and backward: planned \S+ KiB\n"
        r"    the observed step had other sizes or calls: planned for it 100 B, observed 100 B\n"
        r"  peak: planned \S+ KiB, 1.00 KiB as estimated from the observed step, which had other sizes or calls; ",
        table,
    )


def test_a_run_shows_one_table(log):
    training = steps(9, 9, 9)
    training.runtime.controller.planning.decide(
        training.runtime.controller.step, training.agreement.live_sets, "a reason"
    )
    for time in (9, 9):
        training.compare(time)
    told = [text for text in log() if "plan (" in text or "same plan again" in text]
    assert [text.startswith("plan (") for text in told] == [True, False]


def test_a_restored_plan_is_called_so(log):
    training = steps(9, 9)
    plan, before = training.runtime.controller.plan, len(log())
    told = PlanLog(training.agreement, Journal(None), Ranks())
    told.restored(plan, SEEN, 1)
    told.observed(plan, SEEN, 2, is_corrected=False)
    table, line = log()[before:]
    assert table.startswith("plan (restored from the checkpoint):\n")
    assert line.startswith("step 2: the solver has found the same plan again")


def test_tables_of_one_block_at_two_sizes_tell_which_is_which():
    """Two lengths whose calls are alive at once."""
    training = Training(rectifier={"enabled": False})
    for time in (9, 15):
        training.compare(time)
    training.runtime.controller.planning.decide(
        training.runtime.controller.step, [frozenset(training.agreement.known_types)], "both at once"
    )
    text = table_of(training.runtime.controller.plan, training)
    assert "LlamaBlock at 2x9x32: 3 calls" in text and "LlamaBlock at 2x15x32: 3 calls" in text


class Reader(nn.Module):
    """Reads a text of another length, as a decoder's layer does."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, text, mask):
        scores = self.query(x) @ text.mT + mask
        return x + self.out(scores.softmax(-1) @ text)


def test_tables_of_one_block_at_two_pairs_of_lengths_tell_which_is_which():
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 1.0, "rectifier": {"enabled": False}}}))
    block = Reader()
    for time in (3, 5):
        x, text = (torch.randn(2, length, 8, requires_grad=True) for length in (time, 7))
        runtime.checkpoint(block, x, text, torch.zeros(2, time, 7)).sum().backward()
    runtime.controller.planning.decide(
        runtime.controller.step, [frozenset(runtime.agreement.known_types)], "both at once"
    )
    met = decisions_here(runtime.controller.plan, runtime.agreement)
    lengths = {
        name: known.recording.inputs[0].geometry.size[1] for name, known in runtime.agreement.known_types.items()
    }
    assert sorted(lengths.values()) == [3, 5]
    assert [*met] == sorted(lengths)
    assert {name: each.size for name, each in met.items()} == {n: f"2x{lengths[n]}x8 and 2x7x8" for n in lengths}


def test_a_plan_for_some_block_types_is_new_only_if_theirs_change(log):
    training = steps(9, 9)
    plan, told = training.runtime.controller.plan, PlanLog(training.agreement, Journal(None), Ranks())
    other = steps(12, 12).runtime.controller.plan
    both = replace(plan, groups=(*plan.groups, *other.groups), without=other.without)
    before = len(log())
    for step, each in enumerate((both, plan, other), 1):
        told.observed(replace(each, reason="a reason"), SEEN, step, is_corrected=False)
    table, *lines = log()[before:]
    assert table.startswith("plan (a reason)") and len(lines) == 2
    assert all("the solver has found the same plan again" in line for line in lines)


def test_a_restored_table_says_which_block_types_it_leaves_out(log):
    training = steps(9, 15)
    training.runtime.controller.planning.decide(
        training.runtime.controller.step, [frozenset(training.agreement.known_types)], "both at once"
    )
    plan = training.runtime.controller.plan
    training.agreement.known_types.popitem()
    before = len(log())
    PlanLog(training.agreement, Journal(None), Ranks()).restored(plan, SEEN, 1)
    (table,) = log()[before:]
    assert "  1 more block types, of which this rank has run no block since the run was resumed\n" in table


class WithAnother(Ranks):
    """The first rank, beside one that has met other block types."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def gather(self, thing):
        return [thing, self._told]


def test_the_table_and_the_journal_are_for_the_block_types_of_all_ranks(log, tmp_path):
    """One rank has met one length, the other rank another one of the same blocks."""
    training = steps(9, 15)
    training.runtime.controller.planning.decide(
        training.runtime.controller.step, [frozenset(training.agreement.known_types)], "both at once"
    )
    plan, journal = training.runtime.controller.plan, tmp_path / "journal.jsonl"
    (mine, here), (others, there) = decisions_here(plan, training.agreement).items()
    del training.agreement.known_types[others]
    told = PlanLog(training.agreement, Journal(journal), WithAnother({others: there}))
    before = len(log())
    told.decided(plan, 1)
    told.observed(plan, SEEN, 2, is_corrected=False)
    line, table = log()[before:]
    assert re.match(r"step 1: a plan is made in \d+\.\d s \(.+\): its peak is \S+ KiB, the budget ", line)
    assert line.endswith(". A table follows after a step under it, or under the next plan")
    names = [f"{met.decision.name} at {met.size}" for met in (here, there)]
    assert all(f"  {name}: 3 calls held at once" in table for name in names)
    assert [each["name"] for each in read(journal)[0]["block_types"]] == names
    assert mine in training.agreement.known_types


def test_a_plan_for_one_of_several_lengths_tells_which():
    training = steps(9, 15)
    longer = list(training.agreement.known_types)[1]
    training.runtime.controller.planning.decide(training.runtime.controller.step, [frozenset({longer})], "the longer")
    assert "  LlamaBlock at 2x15x32: 3 calls" in table_of(training.runtime.controller.plan, training)
    training = steps(9, 9)
    assert "  LlamaBlock: 3 calls" in table_of(training.runtime.controller.plan, training)


@pytest.mark.parametrize(("budget", "is_told"), [("1GiB", True), (1.0, False), (0.6, False)])
def test_where_everything_fits_the_table_says_how_to_take_less(budget, is_told):
    """Where nothing is to be saved, the model takes as much memory as without ds_adacc, and users wonder why."""
    training = steps(9, 9, memory_budget=budget)
    text = table_of(training.runtime.controller.plan, training)
    hint = "all of this batch fits the budget, so all is retained; a smaller memory_budget, such as 0.4, takes less"
    assert (f"; the plan takes 1.00 of it\n    {hint}\n  added to a forward and backward: 0.0 ms\n" in text) == is_told
    assert (hint in text) == is_told


def test_where_copies_to_the_host_take_no_time_the_table_does_not_say_that_all_is_retained():
    training = steps(9, 9, memory_budget="1GiB")
    plan = training.runtime.controller.plan
    (group,) = plan.groups
    offloading = replace(group, solution=replace(group.solution, peak=group.solution.peak - 1024))
    assert plan.added_seconds == 0
    assert "all is retained" not in table_of(replace(plan, groups=(offloading,)), training)


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_what_autocast_keeps_is_told(cache_enabled):
    """Casts that are recomputed stay until forward ends, and are no part of what is held."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        training = steps(9, 9, memory_budget=0.8)
    plan = training.runtime.controller.plan
    line = f"    until forward ends, autocast keeps {human_bytes(plan.cached)} of casts of weights besides; "
    assert (plan.cached > 0) == (line in table_of(plan, training)) == cache_enabled


def test_a_budget_that_has_grown_since_the_plan_is_told_of():
    training = steps(9, 9, memory_budget=0.6)
    plan, budget = training.runtime.controller.plan, training.agreement.budget
    assert "of the largest" not in table_of(plan, training)
    budget.limit = 2 * plan.budget
    text = table_of(plan, training)
    assert f"the budget has grown to {_kib(budget.limit)}, 0.6 of the peak of the largest batch so far" in text
    larger = replace(plan, budget=budget.limit)
    text = table_of(larger, training)
    assert f"the budget is 0.6 of {_kib(budget.limit / 0.6)}, the largest peak predicted so far" in text


def test_a_budget_in_bytes_is_of_no_batch():
    training = steps(9, 9, memory_budget="1MiB")
    assert "of the largest" not in table_of(training.runtime.controller.plan, training)


def table_of(plan, training):
    here = decisions_here(plan, training.agreement)
    observation = Observation(Pair(plan.held, plan.held), None, None)
    return decision_table(plan, merge_decisions(plan, [here]), training.agreement, observation)


def _kib(nbytes):
    return f"{nbytes / 1024:.2f} KiB"
