"""A dispatch mode of the user's that is on in forward only: a replay runs under it all the same."""

import pytest
import torch
import zoo
from recorded import record, under
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.program.dispatch_modes import modes_now


class Rounding(TorchDispatchMode):
    """Emulates the products of another device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_product = func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return result.bfloat16().float() if is_product else result


def rounded(run):
    def call(*args):
        with Rounding():
            return run(*args)

    return call


@pytest.mark.parametrize("is_on_while_recorded", [False, True])
def test_what_a_mode_computed_in_forward_is_recomputed(is_on_while_recorded):
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU())
    args = (torch.randn(3, 8, requires_grad=True),)
    if is_on_while_recorded:
        with Rounding():
            recording = record(block, args, {})
    else:
        recording = record(block, args, {})
    run, _ = under(block, recording)
    expected = zoo.gradients(block, args, {}, rounded(block))
    zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, rounded(run)))
    assert modes_now() == ()
    zoo.assert_exact(block, args, {}, run)
