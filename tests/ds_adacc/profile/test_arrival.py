"""The outputs of a block tell when their gradients arrive, and are otherwise what they were."""

import pytest
import torch

from ds_adacc.profile.arrival import outputs_to_watch, watch

X = torch.randn(3, 4, requires_grad=True)


def same(output):
    """Tensors that autograd has made from X, in the form of `output`."""
    return torch.utils._pytree.tree_map(lambda name: name if name is None else getattr(X, name)(), output)


@pytest.mark.parametrize("form", ["exp", ("exp", None, "sin"), {"hidden": ["exp", ("tanh", "sin")]}])
def test_gradients_arrive_once_and_together(form):
    output, told = same(form), []
    watched = watch(output, told.append)
    leaves, before = (torch.utils._pytree.tree_leaves(each) for each in (watched, output))
    assert [leaf is None for leaf in leaves] == [leaf is None for leaf in before]
    pairs = [(leaf, old) for leaf, old in zip(leaves, before, strict=True) if leaf is not None]
    assert all(leaf.data_ptr() == old.data_ptr() and leaf is not old for leaf, old in pairs)
    loss = sum((leaf * number).sum() for number, (leaf, _) in enumerate(pairs, 2))
    loss.backward(retain_graph=True)
    loss.backward()
    (arrived,) = told
    assert [edge.node for edge, _ in arrived] == [old.grad_fn for _, old in pairs]
    assert all(torch.equal(grad, torch.full_like(X, number)) for number, (_, grad) in enumerate(arrived, 2))


def test_what_the_loss_does_not_depend_on_has_no_gradient():
    told = []
    unused, read = watch((X.exp(), X.sin()), told.append)
    read.sum().backward()
    assert unused.grad_fn is read.grad_fn
    ((_, gradient), (_, other)) = told[0]
    assert gradient is None and torch.equal(other, torch.ones_like(X))


def test_the_program_may_write_to_what_is_watched():
    def gradient(output):
        first, second = output
        first += 1
        second *= 3
        return torch.autograd.grad((first * second).sum(), X)[0]

    expected = gradient((X * 2, X + 1))
    told = []
    assert torch.equal(gradient(watch((X * 2, X + 1), told.append)), expected) and len(told) == 1


def test_autograd_notices_that_a_watched_output_was_written_to_which_the_block_has_saved():
    (output,) = watch((X.exp(),), lambda arrived: None)
    output *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_outputs_that_share_memory_stay_as_they_are():
    whole = X * 2
    key, value = whole.split(2, -1)
    alone = X.exp()
    assert outputs_to_watch((key, alone, value)) == [alone]
    output = whole, whole.view(-1)
    assert watch(output, lambda arrived: None) is output


def test_one_tensor_returned_twice_is_one():
    told, one = [], X.exp()
    first, second = watch((one, one), told.append)
    assert first is second
    first.sum().backward()
    assert len(told[0]) == 1


def test_what_backward_does_not_reach_is_not_watched():
    class Output:
        def __init__(self, hidden):
            self.hidden = hidden

    for output in (Output(X.exp()), torch.zeros(3), (None, "text", X.argmax()), X.exp().to_sparse()):
        assert watch(output, lambda arrived: None) is output


def test_tensors_on_other_devices_than_the_largest_are_not_watched():
    elsewhere, here = torch.ones(2, device="meta", requires_grad=True) * 2, X.exp()
    assert outputs_to_watch((elsewhere, here)) == [here]
