"""The policies one would write by hand."""

import pytest

from ds_adacc.planner import BlockType, InfeasibleBudget, Problem, compress_all, recompute_all, retain_all


def only(solution, block_type):
    """The one policy of all blocks, with values by name."""
    (policies,) = solution.policies
    assert policies == policies[:1] * block_type.blocks
    values = zip(block_type.profile.graph.values, policies[0].stores, strict=True)
    return {value.name: store for value, store in values if store is not None}, policies[0].replays


def test_retain_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(retain_all(Problem((block_type,)), 2**20, max_seconds=1), block_type)
    assert stores == dict.fromkeys("xabc", "retain")
    assert replays == (2,)  # d cannot be stored


def test_recompute_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(recompute_all(Problem((block_type,)), 2**20, max_seconds=1), block_type)
    assert (stores, replays) == ({"x": "retain"}, (0, 1, 2))


def test_compress_all(block):
    block_type = BlockType("block", block, 3)
    stores, replays = only(compress_all(Problem((block_type,)), 2**20, max_seconds=1), block_type)
    assert (stores, replays) == ({"x": "retain", "a": "retain", "b": "retain", "c": "int4"}, (2,))


def test_gpt(gpt):
    plain = retain_all(Problem((gpt,)), 2**50, max_seconds=1)
    recompute = recompute_all(Problem((gpt,)), 2**50, max_seconds=1)
    compress = compress_all(Problem((gpt,)), 2**50, max_seconds=1)
    assert plain.added_seconds == plain.error == recompute.error == 0
    assert max(recompute.peak, compress.peak) < plain.peak / 2
    assert min(recompute.added_seconds, compress.added_seconds, compress.error) > 0
    assert only(recompute, gpt)[0] == {"x": "retain"}
    assert only(compress, gpt)[1] == ()


@pytest.mark.parametrize("baseline", [retain_all, recompute_all, compress_all])
def test_over_budget(gpt, baseline):
    peak = baseline(Problem((gpt,)), 2**50, max_seconds=1).peak
    assert baseline(Problem((gpt,)), peak, max_seconds=1).peak == peak
    with pytest.raises(InfeasibleBudget) as caught:
        baseline(Problem((gpt,)), peak - 1, max_seconds=1)
    assert (caught.value.budget, caught.value.smallest) == (peak - 1, peak)
