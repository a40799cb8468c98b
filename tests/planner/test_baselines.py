"""The policies one would write by hand."""

from ds_adacc.planner import BlockType, Problem, compress_policy, everywhere, recompute_policy, retain_policy


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
