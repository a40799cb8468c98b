"""The projection: its signs digit by digit, its moments, and the same bits in every dtype and tile."""

import pytest
import torch
import zoo
from compact_reference import matrix

from ds_adacc.compact import projection
from ds_adacc.compact.projection import draw, lifted, project, signs, size_of, tiles

SHAPES = [(32, 32), (32, 8), (24, 6), (5, 3), (1, 1), (200, 130)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("features", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_are_those_counted_digit_by_digit(features, rank, dtype):
    rows, columns = draw(3, "mlp.0", 2, features, rank)
    counted = (matrix(3, "mlp.0", 2, features, rank) * rank**0.5).round()
    assert torch.equal(signs(rows, columns, size_of(features), dtype), counted.to(dtype))


@pytest.mark.parametrize(("features", "rank"), SHAPES)
def test_rows_and_columns_are_drawn_without_repetition(features, rank):
    rows, columns = draw(0, "a", 0, features, rank)
    assert len(rows) == len((rows % size_of(features)).unique()) == features
    assert len(columns) == len(columns.unique()) == rank


def test_the_draw_is_on_the_cpu_whatever_the_default_device():
    expected = draw(3, "mlp.0", 2, 24, 6)
    with torch.device("meta"):
        zoo.assert_same(draw(3, "mlp.0", 2, 24, 6), expected)


@pytest.mark.parametrize(("features", "rank"), [(64, 16), (64, 64), (1, 1)])
def test_columns_are_orthogonal_where_the_input_has_a_power_of_two_of_features(features, rank):
    p = matrix(1, "a", 0, features, rank)
    torch.testing.assert_close(p.T @ p, torch.eye(rank) * features / rank)


def test_the_expectation_of_p_times_its_transpose_is_the_identity():
    draws, features, rank = 2000, 24, 6
    ps = torch.stack([matrix(7, "a", epoch, features, rank) for epoch in range(draws)])
    mean = (ps @ ps.transpose(1, 2)).mean(0)
    torch.testing.assert_close(mean.diagonal(), torch.ones(features))
    off = mean - torch.diag(mean.diagonal())
    deviation = (rank * draws) ** -0.5  # of the mean of `draws` numbers, each a sum of `rank` signs over `rank`
    assert off.abs().max() < 5 * deviation
    assert 0.5 * deviation < off.square().sum().div(features * (features - 1)).sqrt() < 1.5 * deviation


def test_seed_layer_and_epoch_each_give_another_projection():
    ones = [draw(*given, 32, 8) for given in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1))]
    assert len({(tuple(rows.tolist()), tuple(columns.tolist())) for rows, columns in ones}) == 4


def test_the_draw_is_what_it_was():
    """Checkpoints hold the seed alone: a later version must draw the same."""
    rows, columns = draw(42, "blocks.0.fc1", 3, 6, 4)
    assert rows.tolist() == [12, 0, 3, 13, 2, 7]
    assert columns.tolist() == [10, 13, 11, 9]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_with_the_matrix(dtype):
    x = torch.randint(-4, 5, (3, 5, 24)).to(dtype)  # exact sums
    rows, columns = draw(3, "a", 0, 24, 4)
    z = project(x, rows, columns)
    assert z.dtype is dtype
    assert torch.equal(z.float(), x.float() @ matrix(3, "a", 0, 24, 4))


def test_tiles_change_nothing(monkeypatch):
    x, update = torch.randint(-4, 5, (7, 24)).float(), torch.randint(-4, 5, (9, 4)).float()
    rows, columns = draw(3, "a", 0, 24, 4)
    whole = project(x, rows, columns), lifted(update, rows, columns)
    monkeypatch.setattr(projection, "tiles", lambda count, width: tiles(count, width, entries=2 * width))
    assert torch.equal(project(x, rows, columns), whole[0])
    assert torch.equal(lifted(update, rows, columns), whole[1])
    assert torch.equal(whole[1], update @ matrix(3, "a", 0, 24, 4).T)


def test_tiles_cover_all_lines_within_the_limit():
    assert list(tiles(5, 10, entries=20)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(tiles(2, 10, entries=3)) == [slice(0, 1), slice(1, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_on_a_gpu():
    rows, columns = draw(3, "a", 0, 200, 130)
    for dtype in DTYPES:
        on_device = signs(rows.cuda(), columns.cuda(), 256, dtype)
        assert torch.equal(on_device.cpu(), signs(rows, columns, 256, dtype))
