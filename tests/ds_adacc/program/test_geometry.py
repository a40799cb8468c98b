"""Where views lie in memory."""

import random

import pytest
import torch

from ds_adacc.program.geometry import Geometry, cover

X = torch.zeros(4, 6, 12)


def seen(*views):
    return cover([Geometry.of(view, X.data_ptr()) for view in views], Geometry.of(X))


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ((X,), True),
        ((X.transpose(0, 2),), True),
        ((X[..., :8],), False),
        (X.chunk(3, -1), True),
        (X.chunk(3, -1)[:2], False),
        ((X[..., 8:], X[..., :9]), True),
        ((X[..., ::2], X[..., 1::2]), True),
        ((X[:, :, :1].expand(4, 6, 5), X[..., 1:]), True),
        ((X[:1], X[1:].transpose(1, 2)), True),
        ((X[:1], X[1:].view(torch.int32)), False),
        ((X[:0], X[0, 0, :1]), False),
        ((), False),
    ],
)
def test_whether_views_cover_a_tensor(views, expected):
    assert seen(*views) == expected


def test_whether_random_views_cover_a_tensor():
    """As told by writing to them."""
    lot, answers = random.Random(0), set()
    for _ in range(300):
        views, X[...] = [], 0.0
        for _ in range(lot.randint(1, 4)):
            view = X
            for dim in range(3):
                low = lot.choice([0, 0, lot.randrange(view.shape[dim])])
                part = slice(low, lot.choice([None, None, low + 3]), lot.choice([1, 1, 2]))
                view = view[(slice(None),) * dim + (part,)]
            view.fill_(1.0)
            views.append(view)
        answers.add(seen(*views))
        assert seen(*views) == bool(X.all())
    assert answers == {True, False}


def test_an_empty_tensor_is_covered():
    empty = Geometry.of(torch.zeros(0, 3))
    assert cover([empty], empty)
