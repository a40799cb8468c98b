"""The costs of a block as one operator: those of its operators, taken together."""

from dataclasses import replace

import torch
from experts import TOKENS, WIDTH, layers
from recorded import captured, profile_of

from ds_adacc import planner
from ds_adacc.profile.block_graph import whole_graph
from ds_adacc.program.signature import Sizes
from ds_adacc.sizes.symbolic_profile import SymbolicProfile
from ds_adacc.whole_blocks.costs import WholeCosts, whole_profile
from ds_adacc.whole_blocks.one_operator import as_whole

INPUT = TOKENS * WIDTH * 4


def recorded(size=TOKENS):
    return captured(
        layers()[0], torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ).recording


def test_retained_it_takes_what_its_operators_take():
    recording = recorded()
    costs = WholeCosts.of(recording)
    profile = whole_profile(as_whole(recording, "(Experts)"), costs)
    by_operators = planner.simulate(profile_of(recording), planner.retain_policy(profile_of(recording)))
    whole = planner.simulate(profile, planner.retain_policy(profile))
    assert whole.held == by_operators.held == INPUT + costs.saved_bytes
    assert max(whole.timeline) == max(by_operators.timeline)
    assert max(whole.forward) == max(by_operators.forward)


def test_recomputed_it_holds_its_input_and_makes_the_rest_in_one_replay():
    costs = WholeCosts.of(recorded())
    profile = whole_profile(as_whole(recorded(), "(Experts)"), costs)
    run = planner.simulate(profile, planner.recompute_policy(profile))
    assert run.held == INPUT
    assert run.timeline == (
        max(INPUT + costs.saved_bytes + costs.backward, INPUT + costs.saved_bytes + costs.arriving + costs.forward),
    )
    assert run.seconds == 0, "nothing has timed it yet"


def test_it_is_worth_it_unless_replays_make_seven_eighths():
    costs = WholeCosts(saved_bytes=800, kept_bytes=101, forward=0, backward=0, arriving=0)
    assert costs.are_worth_it
    assert not replace(costs, kept_bytes=100).are_worth_it


def test_at_another_size_it_takes_as_much_for_each_byte_as_data_have_made_it_take():
    program = SymbolicProfile()
    for size, saved in ((10, 1100), (12, 1000)):  # the longer one has met other data
        whole = as_whole(recorded(size), "(Experts)")
        costs = WholeCosts(saved, saved, forward=saved, backward=2 * saved, arriving=0)
        program.learn(Sizes((size, WIDTH)), whole, whole_profile(whole, costs))
    whole = as_whole(recorded(40), "(Experts)")
    profile = program.at(Sizes((40, WIDTH)), whole)
    assert profile.graph.values == whole_graph(whole, 4400).values
    assert profile.graph.ops[0].workspace_bytes == 4400
    assert profile.graph.events[0].gradient_bytes == 8800


def test_at_another_size_its_bytes_follow_those_of_its_inputs():
    program = SymbolicProfile()
    for size, saved, seconds in ((10, 1000, 1.0), (20, 2600, 2.0)):
        whole = as_whole(recorded(size), "(Experts)")
        costs = WholeCosts(saved, saved, forward=10 * size, backward=20 * size, arriving=0)
        program.learn(Sizes((size, WIDTH)), whole, replace(whole_profile(whole, costs), op_seconds=(seconds,)))
    whole = as_whole(recorded(30), "(Experts)")
    profile = program.at(Sizes((30, WIDTH)), whole)
    assert profile.graph.values == whole_graph(whole, 4200).values
    assert profile.graph.ops[0].workspace_bytes == 300
    assert profile.graph.events[0].gradient_bytes == 600
    assert profile.op_seconds[0] > 2.0
