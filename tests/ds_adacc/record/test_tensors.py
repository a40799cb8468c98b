"""While a block is recorded, its values die as they do in a plain forward, and are rebuilt when they are asked for."""

import types
import weakref

import pytest
import torch
import zoo
from quantized import scaled, wrapping
from recomputing import compare
from recorded import captured, record, under
from storages import Storages

from ds_adacc.profile.block_graph import block_graph
from ds_adacc.record.tensors import RecordedTensors


def chain(x):
    """Autograd saves the input of each sine. Doubled values are saved by nobody."""
    for _ in range(4):
        x = (x * 2).sin() * 2
    return x


def test_what_nobody_needs_dies_and_is_rebuilt_to_the_same_bits():
    found = captured(chain, torch.randn(64, requires_grad=True))
    values = found.recording.values
    dead = [value.index for value in values if found.tensors.at_hand(value.index) is None]
    # Each sine and what is made of it. A sine's input is saved, and the last result is the output.
    assert [values[index].producer for index in dead] == [1, 2, 4, 5, 7, 8, 10]
    expected, made = found.tensors[0], {}
    for op in found.recording.ops:
        expected = expected * 2 if op.short_name == "mul" else expected.sin()
        made[op.outputs[0]] = expected
    for index, tensor in made.items():
        assert torch.equal(found.tensors[index], tensor)


def test_a_write_to_what_was_made_of_a_value_that_has_died():
    """LoRA's sum, say, which Liger-Kernel's RoPE overwrites: both are replayed together."""

    block, x = torch.nn.Module(), torch.randn(64, requires_grad=True)
    block.forward = lambda x: (x.sin() * 2).relu_() * x
    expected = zoo.gradients(block, (x,), {})
    recording = captured(block, x).recording
    assert [(op.short_name, op.refusal) for op in recording.ops] == [
        ("sin", None),
        ("mul", "what it makes is overwritten in place"),
        ("relu_", None),
        ("mul", None),
    ]
    run, _ = under(block, recording)
    zoo.assert_same_bits(expected, zoo.gradients(block, (x,), {}, run))


def test_recording_holds_no_more_than_a_forward_and_one_result():
    x = torch.randn(1 << 16, requires_grad=True)
    with Storages() as plain:
        chain(x)
    with Storages() as recorded:
        captured(chain, x)
    assert recorded.peak <= plain.peak + x.nbytes + 8192


def test_a_storage_whose_memory_is_used_again_is_another_value():

    def block(x):
        out = x
        for step in range(6):
            thrown = x.detach() + step
            out = out + thrown.cos() * x
            del thrown
        return out

    found = captured(block, torch.randn(1 << 12, requires_grad=True))
    addresses = [found.tensors.span(index)[0] for index in range(len(found.recording.values))]
    assert len(set(addresses)) < len(addresses)
    thrown = [op for op in found.recording.ops if op.short_name == "add" and 0 in op.reads and len(op.reads) == 1]
    assert len({op.outputs for op in thrown}) == 6
    for step, op in enumerate(thrown):
        assert torch.equal(found.tensors[op.outputs[0]], found.tensors[0] + step)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_whatever_a_policy_may_replay_can_be_rebuilt(name):
    block, args, kwargs = zoo.example(name)
    found = captured(block, *args, **kwargs)
    for index in block_graph(found.recording).rebuildable_ops:
        for need in found.recording.ops[index].needs:
            assert found.tensors[need].shape == found.recording.values[need].geometry.size
    for position, tensor in zip(found.recording.positions, found.saved, strict=True):
        if position.value is not None:
            assert torch.equal(position.ref.geometry.view(found.tensors[position.ref.index]), tensor)


def test_a_value_may_be_held_again_while_its_storage_lives():
    tensors, whole = RecordedTensors(), torch.arange(24.0).view(4, 6)[1:]
    tensors.append(whole)
    tensors.release([0])
    assert torch.equal(tensors.hold(0), whole)
    assert tensors.span(0) == (whole.data_ptr(), whole.data_ptr() + whole.nbytes)


def test_an_empty_part_may_be_overwritten():
    def block(x):
        shifted = torch.zeros_like(x)
        shifted[..., 1:] = x[..., :-1]  # nothing, in a tensor of one column
        return shifted.sin() * x

    found = captured(block, torch.randn(3, 1, requires_grad=True))
    assert torch.equal(found.output, torch.zeros(3, 1))


def test_a_buffer_that_autograd_saves_before_any_operator_reads_it():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return x * self.scale

    recording = captured(Scaled(), torch.randn(3, 4, requires_grad=True)).recording
    assert [value.origin for value in recording.values] == ["input", "buffer", "made"]


class Tables(torch.nn.Module):
    """A layer that reads tensors which it holds in a list, a dict and an object."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.listed = [None, torch.rand(4)]
        self.named = {"scale": (torch.rand(4),)}
        self.kept = types.SimpleNamespace(shift=torch.rand(4))

    def forward(self, x):
        x = self.fc(x * self.listed[1].exp())
        return (x * self.named["scale"][0].exp() + self.kept.shift.exp()).tanh()


@pytest.mark.parametrize("make", [Tables, lambda: wrapping(4, 4), lambda: scaled(4, 4)], ids=["held", "in", "of"])
def test_what_is_computed_from_tensors_deep_in_what_the_block_holds_is_recomputed(make):
    block, x = make(), torch.randn(3, 4, requires_grad=True)
    recording = record(block, (x,), {})
    assert {value.origin for value in recording.values} == {"input", "buffer", "made"}
    assert all(op.replayable for op in recording.ops)
    run, calls = under(block, recording)
    zoo.assert_exact(block, (x,), {}, run)
    assert not calls[0].diverged


def test_a_recording_keeps_no_key_alive_under_which_the_block_holds_a_tensor():
    block, key = Tables(), torch.rand(4)
    block.named = {key: torch.rand(4), "scale": (torch.rand(4),)}
    block.forward = lambda x: block.fc(x) * block.named[next(iter(block.named))].exp()
    recording = record(block, (torch.randn(3, 4, requires_grad=True),), {})
    key = weakref.ref(key)
    block.named = {}
    assert key() is None and not recording.buffers


class Doubled:
    """Gives twice the tensor that it was set to."""

    @property
    def shift(self):
        return vars(self)["shift"] * 2

    @shift.setter
    def shift(self, shift):
        vars(self)["shift"] = shift


def test_a_tensor_that_a_property_reads_is_the_one_that_the_block_holds():
    block, x = Tables(), torch.randn(3, 4, requires_grad=True)
    block.kept = Doubled()
    block.kept.shift = torch.rand(4)
    run, _ = under(block, record(block, (x,), {}))
    zoo.assert_exact(block, (x,), {}, run)


def test_a_tensor_deep_in_what_the_block_holds_is_read_anew_at_each_call():
    block, x = Tables(), torch.randn(3, 4, requires_grad=True)
    run, calls = under(block, record(block, (x,), {}))
    block.listed[1], block.named = torch.rand(4), {"scale": (torch.rand(4),)}
    zoo.assert_exact(block, (x,), {}, run)
    assert not calls[0].diverged
    block.named = {}
    with pytest.raises(KeyError):
        run(x)
    assert calls[1].diverged


class Grows(torch.nn.Linear):
    """Enlarges a tensor that an operator of its own has made: its storage gets other memory."""

    def forward(self, x):
        x = super().forward(x).tanh()
        grown = x.detach().cos()
        scale = grown.sin()
        grown.resize_(64, 64).fill_(0.5)
        return (x * (scale + grown[:1, :4])).exp().sin()


def test_a_tensor_may_be_enlarged():
    compare(lambda: Grows(4, 4), 3, lambda *_: (torch.randn(3, 4, requires_grad=True),))
