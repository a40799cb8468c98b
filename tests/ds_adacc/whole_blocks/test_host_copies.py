"""What a call saves while the ranks have yet to agree on a plan: on the host, and to the bit on the device again."""

import weakref

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.program.slots import ParameterSlot, Retained, keep, run_packed
from ds_adacc.whole_blocks.host_copies import HostCopies


def copies(pack=keep):
    return HostCopies(pack, moves=lambda tensor: True)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, 2:],
        lambda x: x[:, None].expand(4, 3, 6),
        lambda x: x.view(torch.int32),
        lambda x: x[2],
    ],
)
def test_every_view_comes_back_as_it_was(view):
    root = torch.randn(4, 6)
    tensor = view(root)
    slot = copies().pack(tensor)
    expected, strides = tensor.clone(), tensor.stride()
    root.fill_(torch.nan)
    for _ in range(2):
        assert torch.equal(slot.unpack(), expected)
        assert slot.unpack().stride() == strides


def test_it_keeps_nothing_on_the_device_and_views_of_one_storage_once():
    root = torch.randn(4, 6)
    gone = weakref.ref(root.untyped_storage())
    hook = copies()
    one, other = hook.pack(root[0]), hook.pack(root[1:])
    assert one._bytes.untyped_storage()._cdata == other._bytes.untyped_storage()._cdata
    expected = root.clone()
    del root
    assert gone() is None
    assert torch.equal(one.unpack(), expected[0]) and torch.equal(other.unpack(), expected[1:])


def test_after_a_write_another_copy_is_made():
    root, hook = torch.zeros(3), copies()
    before = hook.pack(root)
    root += 1
    after = hook.pack(root)
    assert before.unpack().tolist() == [0.0] * 3
    assert after.unpack().tolist() == [1.0] * 3


def test_parameters_and_what_has_no_plain_memory_stay_where_they_are():
    weight = nn.Parameter(torch.randn(3))
    from_weight = copies(lambda tensor: ParameterSlot(weight, None)).pack(weight)
    assert isinstance(from_weight, ParameterSlot)
    for tensor in (torch.randn(3).to_sparse(), torch.randn(3, dtype=torch.complex64).conj(), torch.empty(0)):
        assert isinstance(copies().pack(tensor), Retained)


def test_on_the_host_itself_nothing_is_copied():
    assert isinstance(HostCopies(keep).pack(torch.randn(3)), Retained)


def test_gradients_have_the_bits_of_plain_ones():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(5, 8)

    def gradients(run):
        layer.zero_grad()
        torch.manual_seed(1)
        run().square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    plain = gradients(lambda: layer(x))
    zoo.assert_same(gradients(lambda: run_packed(copies().pack, lambda: layer(x))), plain)
