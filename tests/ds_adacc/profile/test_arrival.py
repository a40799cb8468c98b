"""One output of a block tells when its gradient arrives; all of them are otherwise what they were."""

import pytest
import torch
from torch import nn

from ds_adacc.profile.arrival import Entrance, outputs_to_watch, watch

X = torch.randn(3, 4, requires_grad=True)


def same(output):
    """Tensors that autograd has made from X, in the form of `output`."""
    return torch.utils._pytree.tree_map(lambda name: name if name is None else getattr(X, name)(), output)


@pytest.mark.parametrize("form", ["exp", ("exp", None, "sum"), {"hidden": ["sum", ("exp", "mean")]}])
def test_the_largest_output_tells_once_when_its_gradient_arrives(form):
    output, told, entrance = same(form), [], Entrance()
    watched = watch(output, [X], entrance, lambda edge, gradient: told.append((edge.node, gradient)))
    pairs = list(zip(*map(torch.utils._pytree.tree_leaves, (watched, output)), strict=True))
    (new, old) = next((new, old) for new, old in pairs if new is not None and new.shape == X.shape)
    assert all(one is two for one, two in pairs if one is not new)
    assert new is not old and new.data_ptr() == old.data_ptr()
    loss = sum((leaf * 3).sum() for leaf, _ in pairs if leaf is not None)
    loss.backward(retain_graph=True)
    loss.backward()
    ((node, gradient),) = told
    assert node is old.grad_fn and torch.equal(gradient, torch.full_like(X, 3))


def test_after_a_pass_in_vain_the_next_largest_is_watched():
    entrance, told = Entrance(), []

    def train(read):
        outputs = watch((X.sum(), X.exp(), X[0] * 2), [X], entrance, lambda edge, gradient: told.append(gradient.shape))
        outputs[read].sum().backward()
        entrance.is_reached = bool(told)  # as a probe notes it
        entrance.end_pass()
        return told.pop() if told else None

    assert [train(2) for _ in range(3)] == [None, X[0].shape, X[0].shape]
    assert [train(0) for _ in range(3)] == [None, X.sum().shape, X.sum().shape]
    assert [train(1) for _ in range(2)] == [None, X.shape]


def test_backward_runs_through_nothing_that_the_loss_does_not_read():
    """A node that all outputs share would have it run through all of them."""
    block, ran = nn.Linear(4, 4), []
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    scores, read = watch((block(X).tanh(), X[0] * 2), [X], Entrance(), lambda edge, gradient: None)
    read.sum().backward()
    assert not ran and block.weight.grad is None
    scores.sum().backward()
    assert len(ran) == 2


def test_attributes_of_a_watched_output_stay():
    output = X.exp()
    output.auxiliary = X.sum()
    watched = watch(output, [X], Entrance(), lambda *arrived: None)
    assert watched is not output and watched.auxiliary is output.auxiliary


def test_the_program_may_write_to_what_is_watched():
    def gradient(output):
        first, second = output
        first += 1
        second *= 3
        return torch.autograd.grad((first * second).sum(), X)[0]

    expected, told = gradient((X * 2, X + 1)), []
    watched = watch((X * 2, X + 1), [X], Entrance(), lambda *arrived: told.append(arrived))
    assert torch.equal(gradient(watched), expected) and len(told) == 1


def test_autograd_notices_that_a_watched_output_was_written_to_which_the_block_has_saved():
    (output,) = watch((X.exp(),), [X], Entrance(), lambda *arrived: None)
    output *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_of_outputs_that_share_memory_only_the_largest_of_all_can_be_watched():
    whole, alone = X * 2, X[0].exp()
    key, value = whole.split(2, -1)
    assert outputs_to_watch((key, alone, value), [X]) == [key, alone]
    assert outputs_to_watch((alone, whole, whole[:, -1], whole.detach()), [X]) == [whole, alone]


def test_an_input_that_is_returned_is_not_watched():
    given, made = X * 1.0, X[0].exp()
    assert outputs_to_watch((given, made, given[:2]), [given]) == [made]


def test_one_tensor_returned_twice_is_one():
    one = X.exp()
    first, second = watch((one, one), [X], Entrance(), lambda *arrived: None)
    assert first is second is not one


def test_what_backward_does_not_reach_is_not_watched():
    class Output:
        def __init__(self, hidden):
            self.hidden = hidden

    for output in (Output(X.exp()), torch.zeros(3), (None, "text", X.argmax()), X.exp().to_sparse()):
        assert watch(output, [X], Entrance(), lambda *arrived: None) is output
