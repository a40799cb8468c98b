"""Which blocks' collectives backward calls again: those that every rank can, and that the plan recomputes."""

from dataclasses import replace

import pytest
import torch
from experts import TOKENS, WIDTH, layers
from recorded import captured

from ds_adacc import planner
from ds_adacc.execute.block import Block
from ds_adacc.execute.variant import Variant
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.repeated_collectives import Repeatable, RepeatableByAll
from ds_adacc.program.signature import Signature
from ds_adacc.whole_blocks.costs import WholeCosts, whole_profile
from ds_adacc.whole_blocks.one_operator import as_whole

NAMES = {0: "layers.0", 1: "layers.1"}


@pytest.fixture(scope="module")
def recorded():
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    recording = captured(layers()[0], x).recording
    return recording, as_whole(recording, "(Experts)", repeats_collectives=True)


def block(name, *recordings, is_asked=True):
    made = Block(name)
    for number, recording in enumerate(recordings):
        variant = Variant()
        if recording is not None:
            variant.recording, variant.digest = recording, recording.digest
        made.add(Signature(number, (), (), (), True, (), is_asked), variant)
    return made


def agreed(recorded, *recomputes):
    recording, whole = recorded
    profile = whole_profile(whole, WholeCosts.of(recording))
    makers = [planner.recompute_policy if each else planner.retain_policy for each in recomputes]
    spec = planner.BlockType(whole.digest, profile, len(makers))
    return TypePlan(spec, tuple(make(profile) for make in makers), {}, Correction())


def test_a_rank_tells_of_blocks_whose_calls_would_all_run_again(recorded):
    recording, whole = recorded
    alone = as_whole(recording, "(Experts)")
    blocks = [
        block("again", whole),
        block("not recorded", None),
        block("not recorded at one size", whole, None),
        block("by its operators", recording),
        block("at one size by its operators", whole, recording),
        block("without collectives", alone),
        block("not asked", whole, is_asked=False),
        block("no call"),
    ]
    told = Repeatable.of(blocks, lambda digest: NAMES if digest == whole.digest else {})
    assert told.blocks == {"again"}
    assert told.types == {whole.digest: NAMES}


def test_of_two_blocks_with_one_name_both_must(recorded):
    recording, whole = recorded
    assert not Repeatable.of([block("f", whole), block("f", recording)], lambda _: {}).blocks


@pytest.mark.parametrize(
    "recomputes, expected",
    [((True, True), {"layers.0", "layers.1"}), ((False, True), {"layers.1"}), ((False, False), set())],
)
def test_those_are_repeated_that_the_plan_recomputes(recorded, recomputes, expected):
    _, whole = recorded
    told = Repeatable(frozenset(NAMES.values()), {whole.digest: NAMES})
    everyone = RepeatableByAll([told, told])
    assert everyone.repeated(frozenset({"layers.0"}), [agreed(recorded, *recomputes)]) == expected
    assert everyone.restrict(whole.digest, agreed(recorded, *recomputes).spec.profile).graph.ops[0].replayable


def test_what_one_rank_cannot_repeat_no_rank_does(recorded):
    _, whole = recorded
    one = Repeatable(frozenset(NAMES.values()), {whole.digest: NAMES})
    other = replace(one, blocks=frozenset({"layers.1"}))
    for everyone in (RepeatableByAll([one, other]), RepeatableByAll([other, one])):
        assert everyone.repeated(frozenset(), [agreed(recorded, True, True)]) == {"layers.1"}
        profile = everyone.restrict(whole.digest, agreed(recorded, True).spec.profile)
        assert planner.recompute_policy(profile) == planner.retain_policy(profile)


def test_ranks_may_have_their_blocks_in_another_order(recorded):
    _, whole = recorded
    one = Repeatable(frozenset(NAMES.values()), {whole.digest: NAMES})
    other = replace(one, types={whole.digest: {0: "layers.1", 1: "layers.0"}})
    assert RepeatableByAll([one, other]).repeated(frozenset(), [agreed(recorded, True, False)]) == set(NAMES.values())


def test_a_plan_supersedes_those_of_the_same_blocks_at_other_sizes(recorded):
    _, whole = recorded
    types = {whole.digest: NAMES, "other size": {0: "layers.1"}, "others": {0: "elsewhere"}}
    everyone = RepeatableByAll([Repeatable(frozenset(NAMES.values()), types)])
    planned = {whole.digest, "other size", "others", "dense"}
    assert everyone.superseded([agreed(recorded, True, True)], planned) == {"other size"}


def test_what_the_plan_leaves_out_stays(recorded):
    told = Repeatable(frozenset(NAMES.values()))
    assert RepeatableByAll([told]).repeated(frozenset({"elsewhere"}), [agreed(recorded, True)]) == {"elsewhere"}
