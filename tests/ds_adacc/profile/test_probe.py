"""A probe measures what training will see, under the gradient that backward brings, and leaves no trace."""

import pytest
import torch
import zoo
from overwriting import FunctionBlock, OverwritingSilu
from recorded import call_of, profile_of, record, tensors_of, under
from storages import Storages
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.planner import HOPELESS
from ds_adacc.profile.arrival import Entrance, outputs_to_watch
from ds_adacc.profile.codec_maker import CodecMaker, empty_holder
from ds_adacc.profile.probe import Probe, _Counting, _even, _Lent, relative_error
from ds_adacc.profile.unmeasurable import why_unmeasurable
from ds_adacc.program.arguments import ParameterRef
from ds_adacc.program.slots import CopyingSlot, keep, unpack
from ds_adacc.record.capture import capture

MAKER = CodecMaker(load({"adacc": {"codecs": "auto"}}))


def probed(block, args, kwargs, recording, study, entrance=None):
    """Call the block under full recomputation with a probe; its output."""
    bound = bind(recording, planner.recompute_policy(profile_of(recording)), {})
    inputs = tensors_of(args, kwargs)
    call, probe = Call(bound, inputs), Probe(recording, inputs, study, entrance or Entrance())
    with torch.autograd.graph.saved_tensors_hooks(probe.pack(call.pack), unpack):
        output = block(*args, **kwargs)
    call.close()
    return probe.watch(output)


def lossy(recording, tensors):
    """A policy that compresses all that it may, bound with codecs for these tensors."""
    stores = list(planner.retain_policy(profile_of(recording)).stores)
    codecs = {}
    for value in recording.values:
        offered = [name for name in MAKER.on_offer(value, recording) if name != "bits"]
        if stores[value.index] == planner.RETAIN and offered:
            stores[value.index] = offered[0]
            codecs[value.index] = empty_holder(offered[0], value, tensors[value.index], MAKER).facts.codec
    return planner.Policy(tuple(stores)), codecs


def captured(block, args, kwargs):
    torch.manual_seed(3)
    return capture("block", call_of(block, *args, **kwargs))


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_error_is_that_of_training_under_the_policy(name):
    block, args, kwargs = zoo.example(name)
    found = captured(block, args, kwargs)
    recording, (policy, codecs) = found.recording, lossy(found.recording, found.tensors)
    starts = [t for t in (*tensors_of(args, kwargs), *block.parameters()) if t.requires_grad]
    weight = torch.randn_like(outputs_to_watch(found.output, ())[0])

    def gradients(run):
        torch.manual_seed(3)
        output = outputs_to_watch(run(*args, **kwargs), ())[0]
        return torch.autograd.grad(output, starts, weight, allow_unused=True)

    exact = gradients(block)
    actual = gradients(under(block, recording, policy, codecs)[0])
    count = len([t for t in tensors_of(args, kwargs) if t.requires_grad])
    expected = max(relative_error(actual[:count], exact[:count]), relative_error(actual[count:], exact[count:]))
    errors = []

    def study(measure, is_training):
        errors.append(measure(bind(recording, policy, codecs)))

    assert gradients(lambda *a, **k: probed(block, a, k, recording, study)) is not None
    assert errors == [pytest.approx(expected, rel=1e-6)]
    assert errors[0] > 0


@pytest.mark.parametrize("name", zoo.NAMES)
def test_training_goes_on_to_the_bit(name):
    block, args, kwargs = zoo.example(name)
    expected = zoo.gradients(block, args, kwargs)
    recording = record(block, args, kwargs)
    retained = bind(recording, planner.retain_policy(profile_of(recording)), {})
    fired, measured = [], []
    for parameter in (p for p in block.parameters() if p.requires_grad):
        parameter.register_post_accumulate_grad_hook(fired.append)

    def study(measure, is_training):
        state = torch.get_rng_state()
        measured.append(measure(retained))
        assert torch.equal(state, torch.get_rng_state())
        assert not fired

    actual = zoo.gradients(block, args, kwargs, lambda *a, **k: probed(block, a, k, recording, study))
    zoo.assert_same_bits(expected, actual)
    assert measured in ([0.0], [])
    assert fired


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("place", ["parameter", "input"])
def test_a_hook_that_waits_for_a_gradient_runs_once(place, is_late):
    """The block that was recorded first of its type may have none."""
    block, (x,), kwargs = zoo.example("gpt")
    recording, fired, measured = record(block, (x,), kwargs), [], []
    tensor = block.fc1.weight if place == "parameter" else x

    def run():
        return probed(block, (x,), kwargs, recording, lambda measure, is_training: measured.append(measure))

    if is_late:
        output = run()
    handle = tensor.register_hook(fired.append)
    (output if is_late else run()).sum().backward()
    assert len(fired) == 1 and not measured
    handle.remove()
    run().sum().backward()
    assert len(fired) == len(measured) == 1


class Returning(nn.Module):
    """Returns scores, larger than the block's output, that a loss may read; and what it was given."""

    def __init__(self):
        super().__init__()
        self.block, _, _ = zoo.example("gpt")
        self.scores = nn.Linear(zoo.WIDTH, 2 * zoo.WIDTH)

    def forward(self, x):
        return self.scores(x.sin()).exp().tanh(), self.block(x), x


@pytest.mark.parametrize("read", ["output", "scores"])
def test_what_backward_does_not_read_must_not_be_altered(read):
    block, x = Returning(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True).mul(1.0)
    found = captured(block, (x,), {})
    recording, (policy, codecs) = found.recording, lossy(found.recording, found.tensors)
    weights = [torch.randn_like(output) for output in found.output]
    entrance = Entrance()
    if read == "output":
        entrance.end_pass()  # the scores, which are larger, were watched in vain

    def gradients(run):
        torch.manual_seed(3)
        scores, output, given = run(x)
        loss = (output * weights[1] + given * weights[2]).sum() if read == "output" else (scores * weights[0]).sum()
        return torch.autograd.grad(loss, [x, *block.parameters()], allow_unused=True)

    of_scores = {value.index for value in recording.values if value.label in ("sin", "exp", "tanh")} & codecs.keys()
    assert of_scores and of_scores < codecs.keys()
    safe = {index: codec for index, codec in codecs.items() if (index in of_scores) == (read == "scores")}
    retained = planner.retain_policy(profile_of(recording)).stores
    stores = [policy.stores[index] if index in safe else store for index, store in enumerate(retained)]
    kept = planner.Policy(tuple(stores))
    exact, errors = gradients(block), []

    def study(measure, is_training):
        assert is_training
        errors.extend(measure(bind(recording, *each)) for each in ((kept, safe), (policy, codecs)))

    trained = gradients(lambda x: probed(block, (x,), {}, recording, study, entrance))
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(trained, exact, strict=True))
    measured, hopeless = errors
    assert 0 < measured < 1 and hopeless == HOPELESS


def test_all_slots_have_given_their_tensors_equally_often():
    slots = [_Counting(keep(torch.zeros(2))) for _ in range(3)]
    for slot, times in zip(slots, (1, 0, 2), strict=True):
        for _ in range(times):
            slot.unpack()
    _even(slots)
    assert [slot.times for slot in slots] == [2, 2, 2]


def test_a_dropped_graph_takes_its_probe_along(uncollected):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    with Storages() as storages:
        output = probed(block, args, kwargs, recording, lambda measure, _: None)
        del output
    assert storages.alive() == 0
    with Storages() as storages:
        probed(block, args, kwargs, recording, lambda measure, _: None).sum().backward()
        block.zero_grad()
        args[0].grad = None
    assert storages.alive() == 0


def test_the_graph_before_the_block_is_left_alone_although_a_weight_is_tied():
    """Autograd runs whatever lies on the way to a tensor that it is asked for."""
    block, _, _ = zoo.example("gpt")
    ran, measured = [], []
    start = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    x = block.proj(start) if hasattr(block, "proj") else start @ block.fc1.weight.T[:, : zoo.WIDTH]
    x.grad_fn.register_hook(lambda *_: ran.append(len(measured)))
    recording = record(block, (x,), {})
    retained = bind(recording, planner.retain_policy(profile_of(recording)), {})
    probed(block, (x,), {}, recording, lambda measure, _: measured.append(measure(retained))).sum().backward()
    assert measured == [0.0]
    assert ran == [1]  # in training's own backward, after the measurement


def test_a_pass_lets_go_of_a_saved_tensor_when_it_was_read_as_often_as_before():
    tensor = torch.zeros(3)
    counting, storage = _Counting(keep(tensor)), StorageWeakRef(tensor.untyped_storage())
    del tensor
    for _ in range(2):
        counting.unpack()
    lent = _Lent(counting, counting.times)
    del counting
    lent.unpack()
    assert not storage.expired()
    lent.unpack()
    assert storage.expired()
    with pytest.raises(AssertionError, match="more often than it did before"):
        lent.unpack()


def test_a_second_backward_measures_nothing_more():
    block, args, kwargs = zoo.example("gpt")
    recording, calls = record(block, args, kwargs), []
    loss = probed(block, args, kwargs, recording, lambda *given: calls.append(given)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(calls) == 1


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_replaced_by_a_random_one(bad):
    block, args, kwargs = zoo.example("gpt")
    found = captured(block, args, kwargs)
    policy, codecs = lossy(found.recording, found.tensors)
    errors = []

    def study(measure, is_training):
        errors.append((measure(bind(found.recording, policy, codecs)), is_training))

    output = probed(block, args, kwargs, found.recording, study)
    output.backward(torch.full_like(output, bad))
    ((error, is_training),) = errors
    assert 0 < error < 10 and not is_training


def test_errors_are_relative_to_all_and_to_each():
    exact = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 5.0])]
    assert relative_error(exact, exact) == 0
    # one tensor off by 10 % of a norm of 5, of two: sqrt(0.5² / 50) in all, sqrt((0.1² + 0²) / 2) each
    assert relative_error([exact[0] + torch.tensor([0.5, 0.0]), exact[1]], exact) == pytest.approx(0.1 / 2**0.5)
    # a tensor whose exact gradient is zero counts with the root mean square of the norms
    assert relative_error([exact[0], torch.tensor([1.0])], [exact[0], torch.zeros(1)]) == pytest.approx(
        max(1 / 5, 1 / (5 / 2**0.5) / 2**0.5)
    )
    assert relative_error([None], [torch.zeros(2)]) == 0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == HOPELESS
    assert relative_error([torch.tensor([torch.nan])], [torch.ones(1)]) == HOPELESS
    assert relative_error([], []) == 0


def test_a_backward_that_writes_to_what_it_has_saved_is_measured_on_copies():
    block, args = FunctionBlock(OverwritingSilu), (torch.randn(8, 64, requires_grad=True),)
    expected, errors = zoo.gradients(block, args, {}), []
    found = captured(block, args, {})
    assert why_unmeasurable(found.output, found.inputs, found.recording) is None
    policy, codecs = lossy(found.recording, found.tensors)
    assert codecs

    def study(measure, is_training):
        errors.extend(measure(bind(found.recording, policy, codecs)) for _ in range(2))

    zoo.assert_same_bits(
        expected, zoo.gradients(block, args, {}, lambda x: probed(block, (x,), {}, found.recording, study))
    )
    assert 0 < errors[0] == errors[1] < 1


@pytest.fixture
def compiled_anew():
    torch._dynamo.reset()


def compiled_mlp(backend):
    """Inductor compiles each kernel for some seconds, and this has few."""
    torch.manual_seed(0)
    width = zoo.WIDTH
    block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return torch.compile(block, backend=backend), (torch.randn(2, 9, width, requires_grad=True),), {}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_backward_reuses_memory_and_is_measured_on_copies(backend, compiled_anew):
    block, args, kwargs = compiled_mlp(backend)
    found = captured(block, args, kwargs)
    assert why_unmeasurable(found.output, found.inputs, found.recording) is None
    expected, errors, policy = zoo.gradients(block, args, kwargs), [], lossy(found.recording, found.tensors)
    (graph,) = found.recording.graphs
    assert graph.cls.metadata.bw_donated_idxs

    def study(measure, is_training):
        errors.extend(measure(bind(found.recording, *policy)) for _ in range(2))

    zoo.assert_same_bits(
        expected, zoo.gradients(block, args, kwargs, lambda *a, **k: probed(block, a, k, found.recording, study))
    )
    assert 0 < errors[0] == errors[1] < 1
    actual = zoo.gradients(block, args, kwargs, under(block, found.recording, *policy)[0])
    (_, off), (_, exact) = actual, expected
    of_input, of_others = ([name for name in exact if (name == "input") == is_input] for is_input in (True, False))
    parts = (([of[name] for name in names] for of in (off, exact)) for names in (of_input, of_others))
    assert errors[0] == pytest.approx(max(relative_error(*part) for part in parts), rel=1e-5)


class Noisy(torch.autograd.Function):
    """Its backward draws numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * torch.rand_like(grad)


def test_a_backward_that_draws_numbers_draws_the_same_in_each_run(compiled_anew):
    block, args = torch.compile(FunctionBlock(Noisy), backend="aot_eager"), (torch.randn(8, 64, requires_grad=True),)
    found, errors = captured(block, args, {}), []
    expected, state = zoo.gradients(block, args, {}), torch.get_rng_state()
    retained = bind(found.recording, planner.retain_policy(profile_of(found.recording)), {})

    def study(measure, is_training):
        errors.append(measure(retained))

    zoo.assert_same_bits(
        expected, zoo.gradients(block, args, {}, lambda x: probed(block, (x,), {}, found.recording, study))
    )
    assert errors == [0.0]
    assert torch.equal(torch.get_rng_state(), state)


def test_no_parameter_is_copied_to_measure_a_compiled_block(compiled_anew, monkeypatch):
    block, args, kwargs = compiled_mlp("aot_eager")
    recording, copied = captured(block, args, kwargs).recording, []
    zoo.gradients(block, args, kwargs)
    copy = CopyingSlot.unpack
    monkeypatch.setattr(CopyingSlot, "unpack", lambda slot: copied.append(copy(slot)) or copied[-1])
    zoo.gradients(block, args, kwargs, lambda *a, **k: probed(block, a, k, recording, lambda *_: None))
    of_parameters = [each.ref for each in recording.positions if isinstance(each.ref, ParameterRef)]
    assert of_parameters and len(copied) <= len(recording.positions) - len(of_parameters) + 1, "but for the first slot"


@torch._functorch.config.patch(enable_autograd_cache=False)  # it has compiled backwards
def test_training_runs_a_compiled_backward_first_as_it_would_else_never_reuse_memory(compiled_anew):
    block, args, kwargs = compiled_mlp("inductor")
    found, errors = captured(block, args, kwargs), []
    policy = lossy(found.recording, found.tensors)

    def study(measure, is_training):
        errors.append(measure(bind(found.recording, *policy)))

    for count in range(3):
        zoo.gradients(block, args, kwargs, lambda *a, **k: probed(block, a, k, found.recording, study))
        assert len(errors) == count
    (graph,) = found.recording.graphs
    assert graph.cls.metadata.bw_donated_idxs


def test_a_lossy_codec_that_gives_nan_is_hopeless():
    block, args, kwargs = zoo.example("gpt")
    found = captured(block, args, kwargs)
    policy, codecs = lossy(found.recording, found.tensors)
    errors = []

    class Broken:
        def __init__(self, codec):
            self.codec = codec

        def compress(self, x):
            return self.codec.compress(x)

        def decompress(self, payload, shape, dtype):
            return self.codec.decompress(payload, shape, dtype) * torch.nan

    broken = {index: Broken(codec) for index, codec in codecs.items()}
    output = probed(
        block,
        args,
        kwargs,
        found.recording,
        lambda measure, _: errors.append(measure(bind(found.recording, policy, broken))),
    )
    output.sum().backward()
    assert errors == [HOPELESS]


@pytest.mark.parametrize("runs", [0, 1])
def test_where_memory_runs_out_training_goes_on_exactly(runs, caplog, monkeypatch):
    """In the block's backward as it is, or later."""
    block, args, kwargs = zoo.example("gpt")
    expected = zoo.gradients(block, args, kwargs)
    recording = record(block, args, kwargs)

    def study(measure, is_training):
        raise torch.OutOfMemoryError("no memory")

    if runs == 0:
        monkeypatch.setattr(Probe, "_backward", lambda *given: study(None, True))
    with caplog.at_level("WARNING", logger="ds_adacc"):
        actual = zoo.gradients(block, args, kwargs, lambda *a, **k: probed(block, a, k, recording, study))
    zoo.assert_same_bits(expected, actual)
    assert "memory ran out" in caplog.text
