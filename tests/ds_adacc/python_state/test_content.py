"""What objects hold: those that compute something else are told apart."""

import collections
import copy
import typing
from decimal import Decimal

import numpy as np
import pytest
import torch

from ds_adacc.python_state.content import is_same_number, mark_of_number
from ds_adacc.python_state.guards import guards_of_values, unreadable


def test_a_number_is_equal_to_itself_and_zeros_are_told_apart():
    for number in (
        float("nan"),
        np.float64("nan"),
        complex(float("nan"), 1),
        -0.0,
        complex(-0.0, 0.0),
        1.5,
        3,
        True,
        "text",
    ):
        assert mark_of_number(number) == mark_of_number(type(number)(number))
    for one, other in (
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (complex(0, 0), complex(0, -0.0)),
        (complex(0.0, 1), complex(-0.0, 1)),
        (float("nan"), 1.0),
        (np.float32(0.0), np.float32(-0.0)),
        (np.float64(0.0), np.float64(-0.0)),  # which is a float, too
        (Decimal("1.0"), Decimal("1.00")),
    ):
        assert mark_of_number(one) != mark_of_number(other)
        assert not is_same_number(one, other)
    assert is_same_number(float("1.5"), 1.5) and not is_same_number(torch.ones(2), 1.0)


@pytest.mark.parametrize(
    "one, other",
    [
        (collections.deque([1], 2), collections.deque([1], 3)),
        (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
        ([np.float64(0.0)], [np.float64(-0.0)]),
        ({"share": Decimal("1.0")}, {"share": Decimal("1.00")}),
    ],
)
def test_objects_that_are_equal_but_compute_something_else_are_told_apart(one, other):
    assert guards_of_values({"x": one}) != guards_of_values({"x": other})
    assert guards_of_values({"x": one}) == guards_of_values({"x": copy.deepcopy(one)})


def test_an_annotation_is_known_by_identity_however_deep_it_lies():
    signature = {"inputs": [[[("x", typing.Annotated[torch.Tensor, "nodes"])]]]}
    marks = guards_of_values({"signature": signature})
    assert unreadable(marks) is None
    assert marks == guards_of_values({"signature": signature})
