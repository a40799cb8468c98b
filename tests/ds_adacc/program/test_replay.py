"""What a replay says of a parameter that ZeRO-3 has partitioned away; and what it calls an operator with."""

import pytest
import torch
from torch import nn

from ds_adacc.program.arguments import Template
from ds_adacc.program.replay import live


def partitioned(**attributes):
    """A parameter as ZeRO-3 leaves it when it has released its data."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_numel, parameter.ds_shape = 7, 12, torch.Size((3, 4))
    vars(parameter).update(attributes)
    return parameter


def test_a_block_that_is_no_leaf_module_should_become_one():
    with pytest.raises(
        RuntimeError, match=r"parameter 7 of shape \(3, 4\) is partitioned away .* a ZeRO-3 leaf module"
    ):
        live(partitioned())


def test_a_leaf_module_is_released_after_its_first_backward():
    with pytest.raises(RuntimeError, match="supports no second backward of one forward") as error:
        live(partitioned(ds_z3_leaf_module=nn.Linear(4, 3)))
    assert "initialize" not in str(error.value)


def test_what_was_empty_from_the_start_is_live():
    assert live(nn.Parameter(torch.empty(0))).numel() == 0


def test_a_function_may_write_to_the_lists_it_is_given():
    template = Template(([1, 2], (3, [4])), (("dims", [5]),))
    (first, (_, second)), kwargs = template.filled(None)
    for given in (first, second, kwargs["dims"]):
        given.append(6)
    assert template.filled(None) == ([[1, 2], (3, [4])], {"dims": [5]})
