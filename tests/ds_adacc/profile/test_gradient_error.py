"""The gradient errors told to the planner are those that training will see, and measuring them leaves no trace."""

import math
from dataclasses import replace

import pytest
import torch
import zoo
from recorded import tensors_of, under

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.profile.codecs import CodecMaker, empty_holder
from ds_adacc.profile.gradient_error import children, gradient_errors, random_gradients, relative_error
from ds_adacc.profile.measure import measure
from ds_adacc.record.capture import capture
from ds_adacc.record.closure import closure_of
from ds_adacc.record.recording import COLLECTIVE
from ds_adacc.runtime.runtime import Runtime

SECTION = {"codecs": "by-error", "max_gradient_error": 0.05}
MAKER = CodecMaker(load({"adacc": SECTION}))
SEED = 3


def captured(block, args, kwargs):
    torch.manual_seed(SEED)
    found = capture("block", tensors_of(args, kwargs), closure_of(block), lambda: block(*args, **kwargs))
    assert found.recording is not None, found.reason
    return found


def probed(found, maker=MAKER):
    """The profile with gradient errors."""
    return gradient_errors(found, found.recording, measure(found.recording, found.tensors, maker), maker)


def gradient(run, block, x):
    """Of the random gradient of the output with which errors are measured."""
    torch.manual_seed(SEED)
    output = run(x)
    return torch.autograd.grad(output, [x, *block.parameters()], random_gradients([output]))


class Subject:
    """A block with its capture, its profile, and its gradient under policies."""

    def __init__(self, name):
        self.block, (self.x,), _ = zoo.example(name)
        self.found = captured(self.block, (self.x,), {})
        self.recording = self.found.recording
        self.profile = probed(self.found)
        self.exact = gradient(self.block, self.block, self.x)

    def error(self, chosen):
        """The gradient error when the values `chosen` are compressed (codecs by value) and their children rebuilt."""
        readers = children(self.recording)
        saved = self.recording.saved
        ops = [op for index in chosen for op in readers.get(index, ()) if saved.intersection(op.outputs)]
        rebuilt = {index for op in ops for index in op.outputs}
        storable = [value.storable for value in self.profile.graph.values]
        stores = [
            chosen.get(index) or (planner.RETAIN if storable[index] and index not in rebuilt else None)
            for index in range(len(storable))
        ]
        policy = planner.Policy(tuple(stores), tuple(sorted({op.index for op in ops})))
        policy.check(self.profile)
        values, tensors = self.recording.values, self.found.tensors
        codecs = {i: empty_holder(name, values[i], tensors[i], MAKER).codec for i, name in chosen.items()}
        run, _ = under(self.block, self.recording, policy, codecs)
        return relative_error(gradient(run, self.block, self.x), self.exact)


@pytest.fixture(scope="module", params=["gpt", "bert"])
def subject(request):
    return Subject(request.param)


def test_lossy_codecs_have_an_error_and_bits_have_none(subject):
    costs = [cost for offers in subject.profile.codecs for cost in offers]
    assert {cost.codec for cost in costs} >= {"outlier", "group", "asymmetric", "channel"}
    assert all((cost.gradient_error == 0) == (cost.codec == "bits") for cost in costs)


def test_a_lone_values_error_is_the_actual_one(subject):
    checked = 0
    for index, costs in enumerate(subject.profile.codecs):
        for cost in costs:
            assert subject.error({index: cost.codec}) == pytest.approx(cost.gradient_error, rel=1e-6), cost
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("roles", [("gelu", "layernorm", "query", "attention", "block_input"), ("linear", "attention")])
def test_errors_of_several_values_add_up_as_squares(subject, roles):
    values = subject.recording.values
    chosen = {i: costs[0] for i, costs in enumerate(subject.profile.codecs) if costs and values[i].role in roles}
    rebuilt = {v.index for v in values if v.producer is not None and v.name.startswith(("native_layer_norm", "gelu"))}
    chosen = {i: cost for i, cost in chosen.items() if "linear" in roles or i not in rebuilt}
    assert len(chosen) > 1
    estimated = math.sqrt(sum(cost.gradient_error**2 for cost in chosen.values()))
    actual = subject.error({i: cost.codec for i, cost in chosen.items()})
    assert actual / 2 < estimated < actual * 2


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_measuring_leaves_gradients_random_state_and_hooks_alone(name, rounding):
    block, args, kwargs = zoo.example(name)
    expected = zoo.gradients(block, args, kwargs)
    maker = CodecMaker(load({"adacc": {**SECTION, "rounding": rounding}}))
    fired = []
    parameters = [p for p in block.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(fired.append)

    def run(*args, **kwargs):
        found = capture("block", tensors_of(args, kwargs), closure_of(block), lambda: block(*args, **kwargs))
        profile = measure(found.recording, found.tensors, maker)
        state = torch.get_rng_state()
        slots = [slot.slot for slot in found.slots]
        gradient_errors(found, found.recording, profile, maker)
        assert torch.equal(state, torch.get_rng_state())
        assert [slot.slot for slot in found.slots] == slots
        assert not fired and all(tensor.grad is None for tensor in (*parameters, args[0]))
        return found.output

    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
    assert fired


def refused(found, caplog):
    """What is offered where nothing may be measured, and the one warning."""
    with caplog.at_level("WARNING", logger="ds_adacc"):
        profile = probed(found)
    (warning,) = [record.getMessage() for record in caplog.records]
    start = "block block: no lossy codec is used, since adacc.max_gradient_error is set but cannot be checked ("
    end = "); unset it to allow lossy codecs without a bound"
    assert warning.startswith(start) and warning.endswith(end)
    return {cost.codec for costs in profile.codecs for cost in costs}, warning.removeprefix(start).removesuffix(end)


def test_an_opaque_function_is_not_run(caplog):
    offered, reason = refused(captured(*zoo.example("opaque")), caplog)
    assert (offered, reason) == (set(), "its backward runs _OpaqueBackward, which may hold a collective")


def test_a_collective_is_not_run(caplog):
    found = captured(*zoo.example("gpt"))
    first = replace(found.recording.ops[0], refusal=COLLECTIVE)
    found.recording = replace(found.recording, ops=(first, *found.recording.ops[1:]))
    offered, reason = refused(found, caplog)
    assert (offered, reason) == ({"bits"}, "it calls aten.native_layer_norm.default, a collective")


def test_hooks_on_gradients_are_not_fired(caplog):
    block, args, kwargs = zoo.example("gpt")
    fired = []
    block.fc1.weight.register_hook(fired.append)
    offered, reason = refused(captured(block, args, kwargs), caplog)
    assert (offered, reason) == ({"bits"}, "a hook on a parameter or an input waits for its gradient")
    assert not fired


def test_the_graph_before_the_block_is_left_alone():
    block, _, _ = zoo.example("gpt")
    start = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    ran = []
    x = start * 2
    x.grad_fn.register_hook(lambda *_: ran.append(True))
    found = captured(block, (x,), {})
    assert any(cost.gradient_error for costs in probed(found).codecs for cost in costs)
    assert not ran


@pytest.mark.parametrize("bound", [None, 0.05])
def test_errors_are_measured_where_there_is_a_bound(bound):
    block, args, _ = zoo.example("gpt")
    runtime = Runtime(load({"adacc": {"codecs": "paper", "max_gradient_error": bound}}))
    runtime.checkpoint(block, *args).sum().backward()
    (block_type,) = runtime.coordinator.block_types.values()
    measured = {cost.codec for costs in block_type.profile.codecs for cost in costs if cost.gradient_error}
    assert measured == (set() if bound is None else {"outlier", "channel"})
