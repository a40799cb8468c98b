import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_adacc.kernels import rank_outliers
from ds_adacc.kernels.reference.scores import channel_sums, scores_of_sums, tree_sum


def oracle_sums(rows):
    """Sums number by number: runs of 64 rows, then the sums of the runs."""
    totals = []
    for column in zip(*rows, strict=True):
        total = 0.0
        for start in range(0, len(column), 64):
            run = 0.0
            for x in column[start : start + 64]:
                run += abs(x)
            total += run
        totals.append(total)
    return totals


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 128, 200, 641])
def test_sums_are_added_in_the_defined_order(kit, rows, dtype, monkeypatch):
    x = kit.sample("outlier", (rows, 7), dtype) * torch.logspace(-6, 6, 7).to(dtype)
    expected = oracle_sums(x.double().tolist())
    assert channel_sums(x).tolist() == expected
    monkeypatch.setattr("ds_adacc.kernels.reference.scores.CHUNK", 1)
    assert channel_sums(x).tolist() == expected


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_tree_sum_adds_halves(values):
    tree = values + [0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(tree) > 1:
        half = len(tree) // 2
        tree = [a + b for a, b in zip(tree[:half], tree[half:], strict=True)]
    assert tree_sum(torch.tensor(values, dtype=torch.float64)).item() == tree[0]


def channel_scores(x):
    return scores_of_sums(channel_sums(x))


def test_scores_are_equation_1(dtype):
    x = torch.randn(40, 3, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = np.abs(x.float().double().numpy()).reshape(-1, 33).sum(0)
    expected = (sums - sums.mean()) / sums.std()
    scores = channel_scores(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor(expected).float(), atol=1e-4, rtol=1e-4)


def test_scores_do_not_see_the_chunks(monkeypatch):
    x = torch.randint(-9, 9, (100, 7)).float()
    whole = channel_scores(x)
    monkeypatch.setattr("ds_adacc.kernels.reference.scores.CHUNK", 16)
    assert torch.equal(channel_scores(x), whole)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30, 1e-30])
def test_equal_channels_score_zero(value):
    assert torch.equal(channel_scores(torch.full((10, 7), value)), torch.zeros(7))


@pytest.mark.parametrize("size", [(), (1,), (5, 1), (0, 4), (3, 0), (0,)], ids=str)
def test_scores_of_degenerate_shapes_are_zero(size):
    assert torch.equal(channel_scores(torch.ones(size)), torch.zeros(size[-1] if size else 1))


def test_non_finite_channels_are_outliers():
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    normal = [c for c in range(20) if c not in (3, 8)]
    x[7, 3], x[9, 8] = torch.nan, -torch.inf
    scores = channel_scores(x)
    assert scores[[3, 8]].tolist() == [torch.inf, torch.inf]
    torch.testing.assert_close(scores[normal], channel_scores(x[:, normal]))
    assert channel_scores(torch.full((2, 3), torch.nan)).tolist() == [torch.inf] * 3


def test_ranking_orders_all_channels_and_counts_those_above_the_threshold():
    x = torch.ones(8, 100)
    x[:, 42], x[:, 7] = 50, 60
    order, count, is_finite = rank_outliers(x, 3.0)
    assert (order.dtype, count.dtype, count.shape) == (torch.int64, torch.int64, ())
    assert order[:2].tolist() == [7, 42]
    assert order[2:].tolist() == [c for c in range(100) if c not in (7, 42)]
    assert int(count) == 2
    assert is_finite.dtype is torch.bool and is_finite
    x[3, 5] = torch.nan
    order, _, is_finite = rank_outliers(x, 3.0)
    assert order[0] == 5 and not is_finite
    x[3, 5] = 1
    assert int(rank_outliers(x, 100.0)[1]) == 0


def test_the_host_never_waits_for_a_ranking():
    with FakeTensorMode():
        order, count, is_finite = rank_outliers(torch.empty(30, 8, dtype=torch.float16), 3.0)
    assert (order.shape, count.shape, is_finite.shape) == ((8,), (), ())
