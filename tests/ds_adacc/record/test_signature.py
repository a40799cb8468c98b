"""What tells two calls of a block apart, and what does not."""

import torch

from ds_adacc.record.signature import flatten


def test_keyword_arguments_in_any_order_are_one_call():
    first, second = torch.zeros(2), torch.ones(3)
    found, other = [], []
    key = flatten(((), {"mask": first, "rope": second, "causal": True}), found)
    assert flatten(((), {"causal": True, "rope": second, "mask": first}), other) == key
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in other]


def test_a_name_and_its_value_belong_together():
    one, two = ({"a": 1, "b": 2}, {"a": 2, "b": 1})
    assert flatten(one, []) != flatten(two, [])
