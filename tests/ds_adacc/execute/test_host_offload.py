"""Offloaded values come back bit for bit, ahead of their use, and leave nothing behind: with copies made on the CPU."""

from dataclasses import replace

import pytest
import torch
import zoo
from fake_transfer import FakeTransfer
from recorded import offloading, profile_of, random_policy, record, tensors_of, under
from storages import Storages

from ds_adacc import planner
from ds_adacc.execute.alive_calls import AliveCalls, Forward
from ds_adacc.execute.block import Block
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.execute.pinned_pool import pinned
from ds_adacc.execute.variant import Variant
from ds_adacc.observe.observer import Observer
from ds_adacc.program.slots import unpack


class PoisoningTransfer(FakeTransfer):
    """Keeps what it copies, to overwrite it behind autograd's back."""

    def out(self, tensors):
        self.sources += [tensor.data for tensor in tensors]
        return super().out(tensors)

    def poison(self):
        for source in self.sources:
            source.fill_(float("nan") if source.is_floating_point() else 0)


@pytest.fixture
def transfer():
    return FakeTransfer()


def past(prefetcher):
    """Two more calls begin: what was offloaded leaves the device."""
    for _ in range(2):
        prefetcher.pass_over()


def everything(recording):
    return offloading(recording, planner.retain_policy(profile_of(recording)))


def only(recording, *names):
    """The policy that offloads the values named, and retains the rest."""
    policy = planner.retain_policy(profile_of(recording))
    stores = [
        planner.OFFLOAD if value.name in names else store
        for value, store in zip(recording.values, policy.stores, strict=True)
    ]
    assert stores.count(planner.OFFLOAD) == len(names)
    return planner.Policy(tuple(stores))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_gradients_have_the_same_bits(name, transfer):
    block, args, kwargs = zoo.example(name)
    expected = zoo.gradients(block, args, kwargs)
    recording = record(block, args, kwargs)
    policies = [everything(recording), *(offloading(recording, random_policy(recording, seed)) for seed in range(10))]
    for policy in policies:
        run, calls = under(block, recording, policy, prefetcher=Prefetcher(transfer))
        zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
        assert not any(call.diverged for call in calls)
    assert sum(what == "take" for what, _ in transfer.log) > len(policies)


def test_several_values_of_a_gpt_block_are_offloaded(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    run, _ = under(block, recording, everything(recording), prefetcher=Prefetcher(transfer))
    run(*args, **kwargs)
    assert [recording.values[i].role for i, s in enumerate(everything(recording).stores) if s == planner.OFFLOAD] == [
        value.role for value in recording.values if value.owned and value.index in recording.saved
    ]
    assert len(transfer.handles) > 8


def test_it_is_the_fetched_copy_that_backward_uses():
    block, args, kwargs = zoo.example("gpt")
    expected = zoo.gradients(block, args, kwargs)
    recording, transfer = record(block, args, kwargs), PoisoningTransfer()
    prefetcher = Prefetcher(transfer)
    run, _ = under(block, recording, everything(recording), prefetcher=prefetcher)
    run_and_poison = lambda *given: poisoned(run(*given), transfer, prefetcher)  # noqa: E731
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run_and_poison))


def poisoned(output, transfer, prefetcher):
    output = output * 1.0  # the copies' sources may be the block's input, but never this
    past(prefetcher)
    transfer.poison()
    return output


def three_calls(transfer, *names):
    """The output of a block called three times over, which offloads the values named."""
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    run, calls = under(block, recording, only(recording, *names), prefetcher=Prefetcher(transfer))
    output = run(run(run(*args)))
    assert not any(call.diverged for call in calls)
    return output


def test_the_call_before_is_fetched_when_backward_comes_to_a_call(transfer):
    output = three_calls(transfer, "input.0", "addmm1")
    # the numbers of the handles: 0 and 1 of the first call, 2 and 3 of the second, 4 and 5 of the third
    outs = [("out", number) for number in range(6)]
    assert transfer.log == [*outs[:4], ("drop", 0), ("drop", 1), *outs[4:]]
    began = len(transfer.log)
    output.sum().backward()
    # what the last two calls have offloaded is still there
    assert transfer.since(began) == [
        *(("take", 5), ("take", 4)),
        *(("back", 1), ("back", 0), ("take", 3), ("take", 2)),
        *(("take", 1), ("take", 0)),
    ]


def test_values_start_to_come_back_when_backward_comes_to_their_call_whichever_it_asks_for_first(transfer):
    """Backward of a block asks for its input last, and finds the gradient of its last layer first."""
    prefetcher, (output,) = Prefetcher(transfer), zoo.example("gpt")[1]
    for number in range(2):
        block, _, kwargs = zoo.example("gpt")
        recording = record(block, (output.detach().requires_grad_(),), kwargs)
        run, _ = under(block, recording, only(recording, "input.0"), prefetcher=prefetcher)
        output = run(output)
        block.fc2.weight.register_hook(lambda _, number=number: transfer.log.append(("fc2", number)))
    past(prefetcher)
    began = len(transfer.log)
    output.sum().backward()
    assert transfer.since(began) == [("back", 1), ("back", 0), ("fc2", 1), ("take", 1), ("fc2", 0), ("take", 0)]


def test_a_call_that_offloads_nothing_counts_too(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    prefetcher = Prefetcher(transfer)
    run, _ = under(block, recording, only(recording, "addmm1"), prefetcher=prefetcher)
    output = run(args[0])
    prefetcher.pass_over()
    assert transfer.log == [("out", 0)]
    output = run(output)
    assert transfer.log == [("out", 0), ("drop", 0), ("out", 1)]
    past(prefetcher)
    past(prefetcher)
    assert transfer.log == [("out", 0), ("drop", 0), ("out", 1), ("drop", 1)]
    output.sum().backward()
    assert transfer.log[4:] == [("back", 1), ("back", 0), ("take", 1), ("take", 0)]


def test_what_comes_back_is_not_dropped_by_a_later_call(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    prefetcher = Prefetcher(transfer)
    run, _ = under(block, recording, only(recording, "addmm1"), prefetcher=prefetcher)
    first, second = run(args[0]), run(args[0])
    second.sum().backward()  # the first call's value is to be used next
    past(prefetcher)
    first.sum().backward()
    assert transfer.log == [("out", 0), ("out", 1), ("take", 1), ("take", 0)]


def test_retained_graph_fetches_again(transfer):
    loss = three_calls(transfer, "addmm1").sum()
    began = len(transfer.log)
    loss.backward(retain_graph=True)
    again = len(transfer.log)
    loss.backward()
    first = [("take", 2), ("back", 0), ("take", 1), ("take", 0)]
    assert transfer.log[began:again] == first
    assert transfer.since(again) == [(what, number) for number in (2, 1, 0) for what in ("back", "take")]


def test_repeated_partial_and_retained_backward(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    expected = zoo.repeated_gradients(block, args, kwargs)
    run, _ = under(block, recording, everything(recording), prefetcher=Prefetcher(transfer))
    zoo.assert_same(expected, zoo.repeated_gradients(block, args, kwargs, run))


def test_between_forward_and_backward_the_device_holds_nothing_of_it(transfer, uncollected):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy, prefetcher = everything(recording), Prefetcher(transfer)
    run, _ = under(block, recording, policy, prefetcher=prefetcher)
    with Storages() as storages:
        output = run(*args, **kwargs)
    past(prefetcher)
    node = output.grad_fn
    del output
    retained = [v.nbytes for v, s in zip(recording.values, policy.stores, strict=True) if s == planner.RETAIN]
    shapes_only = 4 * policy.stores.count(planner.OFFLOAD)
    assert storages.alive() == sum(retained) + shapes_only
    assert transfer.alive == policy.stores.count(planner.OFFLOAD)
    del node
    assert (storages.alive(), transfer.alive) == (0, 0)


def test_backward_frees_everything_without_the_collector(transfer, uncollected):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    prefetcher = Prefetcher(transfer)
    run, _ = under(block, recording, everything(recording), prefetcher=prefetcher)
    zoo.gradients(block, args, kwargs, run)
    with Storages() as storages:
        loss = zoo.loss_of(run(run(*args)))
        loss.backward()
    del loss
    block.zero_grad()
    args[0].grad = None
    assert (storages.alive(), transfer.alive) == (0, 0)
    assert [reference() for reference in (prefetcher._last, *prefetcher._behind)] == [None] * 3


def test_what_was_fetched_goes_with_its_last_use(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    call = Call(bind(recording, everything(recording), {}, Prefetcher(transfer)), tensors_of(args, kwargs))
    with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
        output = block(*args, **kwargs)
    holders = [holder for index, holder in call.holders.items() if call.bound.policy.stores[index] == planner.OFFLOAD]
    output.sum().backward(retain_graph=True)
    assert [holder._cached for holder in holders] == [None] * len(holders)
    assert [reference().tensors for reference in transfer.handles] == [None] * len(holders)


def test_exception_in_forward_leaves_nothing(transfer, uncollected):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)

    def failing(x):
        block(x)
        raise ValueError("after the block")

    run, calls = under(failing, recording, everything(recording), prefetcher=Prefetcher(transfer))
    with Storages() as storages:
        try:
            run(*args)
        except ValueError:
            calls.pop().close()
    assert len(transfer.handles) > 8
    assert (storages.alive(), transfer.alive) == (0, 0)


def test_another_course_than_recorded(transfer):
    block, args, kwargs = zoo.example("router")
    recording = record(block, args, kwargs)
    other = (torch.randn_like(args[0]).requires_grad_(),)
    expected = zoo.gradients(block, other, kwargs)
    run, calls = under(block, recording, everything(recording), prefetcher=Prefetcher(transfer))
    zoo.assert_same_bits(expected, zoo.gradients(block, other, kwargs, run))
    assert calls[0].diverged


def test_value_written_to_after_the_forward_raises(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    run, _ = under(block, recording, only(recording, "input.0"), prefetcher=Prefetcher(transfer))
    h = args[0] * 1.0
    output = run(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"value input\.0 of shape \(2, 9, 32\).*modified by an in-place operation"):
        output.sum().backward()


def test_nothing_is_counted_as_held(transfer):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy = only(recording, "addmm1", "gelu11")
    bound = bind(recording, policy, {}, Prefetcher(transfer))
    observer, call = Observer(), Call(bound, args)
    known = Variant(digest="digest", policy=policy)
    alive = AliveCalls().begin("digest", Forward(lambda: None))
    ticket = observer.begin(known, Block("block"), alive, times_forward=True, times_backward=True)
    pack, done = observer.watch(ticket, call, args, call.pack)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = block(*args, **kwargs)
    done(output)
    output.sum().backward()
    cost = planner.CodecCost.offload(8, 0.0, 0.0)
    offers = tuple((cost,) if store == planner.OFFLOAD else () for store in policy.stores)
    assert observer.held_bytes == policy.held_bytes(replace(profile_of(recording), codecs=offers)) > 0
    del output


def test_plans_that_offload_nothing_know_no_prefetcher(transfer):
    recording = record(*zoo.example("gpt"))
    retained = planner.retain_policy(profile_of(recording))
    bound = bind(recording, retained, {}, Prefetcher(transfer))
    assert bound.prefetcher is None and bound.is_trivial
    assert not bind(recording, only(recording, "addmm1"), {}, Prefetcher(transfer)).is_trivial


def test_offloading_needs_a_prefetcher():
    recording = record(*zoo.example("gpt"))
    with pytest.raises(ValueError, match="the policy offloads value addmm1, which needs a prefetcher; got None"):
        bind(recording, only(recording, "addmm1"), {})


def test_no_pinned_memory_names_the_size(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    text = r"cannot get 24 bytes of pinned host memory .*: CUDA error: out of memory; .* or set adacc.offload to false"
    with pytest.raises(RuntimeError, match=text):
        pinned(24)
