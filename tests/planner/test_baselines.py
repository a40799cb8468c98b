"""The policies one would write by hand."""

import pytest

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    Event,
    Op,
    Policy,
    Problem,
    Profile,
    Value,
    compress_policy,
    everywhere,
    no_checkpointing,
    peak_bytes,
    peak_without,
    recompute_policy,
    retain_policy,
    simulate,
    solve_per_block,
)


def only(solution, block_type):
    """What the one policy of all blocks stores, by name of value; and the ops that it replays."""
    (policies,) = solution.policies
    assert policies == policies[:1] * block_type.blocks
    graph, stores = block_type.profile.graph, policies[0].stores
    values = zip(graph.values, stores, strict=True)
    return {value.name: store for value, store in values if store is not None}, graph.replayed(stores)


def test_retaining_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(everywhere(retain_policy, Problem((block_type,))), block_type)
    assert stores == dict.fromkeys("xabc", "retain")
    assert replays == (2,)  # d cannot be stored


def test_recomputing_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(everywhere(recompute_policy, Problem((block_type,))), block_type)
    assert (stores, replays) == ({"x": "retain"}, (0, 1, 2))


def test_compressing_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(everywhere(compress_policy, Problem((block_type,))), block_type)
    assert (stores, replays) == ({"x": "retain", "a": "retain", "b": "retain", "c": "int4"}, (2,))


def lender():
    """A block that makes 64 bytes of two inputs. Backward needs these; it lends the second input, of 8 bytes."""
    values = Value("x", "", 4, None, True), Value("bias", "", 8, None, True, lent=True), Value("y", "", 64, 0, True)
    graph = BlockGraph(values, (Op("add", (0, 1), (2,), True),), (Event("y", (2, 1), 0),))
    return BlockType("lender", Profile(graph, (1e-6,), ((), (), ())), 1)


def test_what_is_lent_is_held_by_all_policies_but_the_one_without_checkpointing():
    profile = lender().profile
    assert no_checkpointing(profile).stores == (None, None, "retain")
    assert retain_policy(profile).stores == (None, "retain", "retain")
    assert recompute_policy(profile).stores == ("retain", "retain", None)
    for policy in (no_checkpointing(profile), retain_policy(profile)):
        assert policy.lending(profile) == retain_policy(profile)
    assert simulate(profile, no_checkpointing(profile)).timeline == (64,)
    assert simulate(profile, retain_policy(profile)).timeline == (72,)
    assert simulate(profile, recompute_policy(profile)).timeline == (76,)
    with pytest.raises(ValueError, match="replayed op 'add' needs value 'bias', which cannot be rebuilt: store it"):
        simulate(profile, Policy(("retain", None, None)))


def test_what_is_lent_counts_in_backward_if_and_only_if_a_block_replays_something():
    """Blocks may come together that were not planned together: who is given the bias holds it for nothing."""
    values = Value("x", "", 4, None, True), Value("y", "", 64, 0, True)
    graph = BlockGraph(values, (Op("exp", (0,), (1,), True),), (Event("y", (1,), 100),))
    other = BlockType("other", Profile(graph, (1e-6,), ((), ())), 1)
    problem = Problem((lender(), other), ("lender", "other"))
    lent, plain = retain_policy(lender().profile), no_checkpointing(lender().profile)
    retained, replayed = retain_policy(other.profile), recompute_policy(other.profile)
    for own in (lent, plain):
        assert peak_bytes(problem, [(own,), (retained,)]) == 64 + (64 + 100)
        assert peak_bytes(problem, [(own,), (replayed,)]) == (64 + 8) + (4 + 64 + 100)


def test_without_checkpointing_nothing_is_lent():
    """Another block that is given the bias holds 64 bytes too, or the bias and 4 bytes."""
    graph = lender().profile.graph
    values = graph.values[0], Value("bias", "", 0, None, True), graph.values[2]
    held = BlockGraph(values, graph.ops, (Event("y", (2,), 0),))
    borrower = BlockType("borrower", Profile(held, (1e-6,), ((), (), ())), 1)
    problem = Problem((lender(), borrower), ("lender", "borrower"))
    assert peak_without(problem) == (64 + 8) + (4 + 64)  # in forward, the inputs are there
    free = solve_per_block(problem, 140, max_seconds=60)
    assert (free.peak, free.added_seconds) == (140, 0)
    assert [policy.stores for (policy,) in free.policies] == [(None, None, "retain"), (None, None, "retain")]
    tight = solve_per_block(problem, 139, max_seconds=60)
    assert tight.peak <= 139 and tight.added_seconds > 0
    assert all(policy.stores[1] == "retain" for policy in tight.policies[0])
