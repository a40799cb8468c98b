"""Compressed values whose payloads wait in host memory come back as those whose payloads stay, bit for bit."""

import pytest
import torch
import zoo
from fake_transfer import FakeTransfer
from recorded import profile_of, record, under
from storages import Storages

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.planner.profile import payload_offloaded
from ds_adacc.profile.codec_maker import CodecMaker, empty_holder

MAKER = CodecMaker(load({"adacc": {"codecs": "auto", "group_size": 16, "backend": "reference"}}))


@pytest.fixture
def gpt():
    """A GPT block, its arguments, its recording and, by the value, a codec for all that it saves in floats."""
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    codecs = {}
    for value in recording.values:
        if value.index in recording.saved and (names := MAKER.on_offer(value, recording)):
            tensor = torch.zeros(value.geometry.span, dtype=value.geometry.dtype)
            codecs[value.index] = empty_holder(names[0], value, tensor, MAKER).facts.codec
    assert len(codecs) > 5
    return block, args, kwargs, recording, codecs


def stores(recording, codecs, is_away):
    """The policy that compresses with `codecs`, with the payload in host memory if `is_away(its number)`."""
    found = list(planner.retain_policy(profile_of(recording)).stores)
    for number, (index, codec) in enumerate(codecs.items()):
        found[index] = payload_offloaded(codec.name) if is_away(number) else codec.name
    return planner.Policy(tuple(found))


def here(number):
    return False


def away(number):
    return True


def some(number):
    return number % 2 == 0


@pytest.mark.parametrize("is_away", [away, some])
def test_gradients_are_those_of_payloads_that_stay(gpt, is_away):
    block, args, kwargs, recording, codecs = gpt
    expected = zoo.gradients(block, args, kwargs, under(block, recording, stores(recording, codecs, here), codecs)[0])
    transfer = FakeTransfer()
    run, calls = under(block, recording, stores(recording, codecs, is_away), codecs, Prefetcher(transfer))
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
    assert not any(call.diverged for call in calls)
    assert sum(what == "take" for what, _ in transfer.log) == len([n for n in range(len(codecs)) if is_away(n)])
    with pytest.raises(AssertionError):
        zoo.assert_same_bits(zoo.gradients(block, args, kwargs), expected)  # they are lossy


def test_it_is_the_copy_that_backward_uses(gpt):
    block, args, kwargs, recording, codecs = gpt
    expected = zoo.gradients(block, args, kwargs, under(block, recording, stores(recording, codecs, here), codecs)[0])
    transfer = FakeTransfer()
    prefetcher = Prefetcher(transfer)
    run, _ = under(block, recording, stores(recording, codecs, away), codecs, prefetcher)

    def run_and_poison(*given):
        output = run(*given)
        payloads = [tensor for reference in transfer.handles for tensor in reference().tensors]
        for _ in range(2):
            prefetcher.pass_over()  # they leave the device
        for tensor in payloads:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        return output

    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run_and_poison))


def test_between_forward_and_backward_the_device_holds_nothing_of_it(gpt, uncollected):
    block, args, kwargs, recording, codecs = gpt
    transfer = FakeTransfer()
    policy, prefetcher = stores(recording, codecs, away), Prefetcher(transfer)
    run, calls = under(block, recording, policy, codecs, prefetcher)
    with Storages() as storages:
        output = run(*args, **kwargs)
    for _ in range(2):
        prefetcher.pass_over()
    node = output.grad_fn
    del output
    retained = [
        v.nbytes for v, s in zip(recording.values, policy.stores, strict=True) if s == planner.RETAIN and v.owned
    ]
    assert storages.alive() == sum(retained)
    assert transfer.alive == len(codecs)
    bound = calls.pop().bound
    sizes = [sum(host.nbytes for host in reference().hosts) for reference in transfer.handles]
    assert sizes == [bound.moved_bytes(index) for index, *_ in bound.offloaded]
    del node
    assert (storages.alive(), transfer.alive) == (0, 0)


def test_a_payload_that_came_back_goes_and_comes_again(gpt):
    block, args, kwargs, recording, codecs = gpt
    transfer = FakeTransfer()
    policy = stores(recording, codecs, away)
    call = Call(bind(recording, policy, codecs, Prefetcher(transfer)), args)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, lambda slot: slot.unpack()):
        output = block(*args, **kwargs)
    first = torch.autograd.grad(output.sum(), args[0], retain_graph=True)
    assert [reference().tensors for reference in transfer.handles] == [None] * len(codecs)
    began = len(transfer.log)
    assert torch.equal(*first, *torch.autograd.grad(output.sum(), args[0]))
    assert [what for what, _ in transfer.since(began)] == ["back", "take"] * len(codecs)


def test_an_offloaded_payload_needs_a_prefetcher(gpt):
    *_, recording, codecs = gpt
    with pytest.raises(ValueError, match=r"the policy offloads value \w+.*, which needs a prefetcher; got None"):
        bind(recording, stores(recording, codecs, some), codecs)
