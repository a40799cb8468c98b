"""The recorder and the planner see the projection as a value of its own; the layer's input is free to be dropped."""

import weakref

import pytest
import torch
import zoo
from recorded import profile_of, record
from replayed import replayed
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ds_adacc import planner
from ds_adacc.compact.compact import convert
from ds_adacc.compact.optimized import groups_of
from ds_adacc.config import CompactConfig, load
from ds_adacc.runtime.compiled_blocks import compile_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.ModuleList([zoo.GPTBlock(dropout=0.0), zoo.GPTBlock(dropout=0.0)])
    blocks = {"0": model[0], "1": model[1]}
    compact = convert(model, blocks, CompactConfig(rank=8, update_interval=1), groups_of(model, None, None))
    compact.draw(0)
    model.compact = compact
    return model


def x():
    return torch.randn(2, 16, zoo.WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model, function, given):
    given = given.clone().requires_grad_()
    model.zero_grad()
    function(given).square().sum().backward()
    return [given.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_saved_is_the_projection_and_not_the_input(model):
    recording = record(model[0], (x(),), {})
    by_label = {value.label: value for value in recording.values}
    saved = {recording.values[index].label for index in recording.saved}
    assert {"qkv projection", "fc1 projection", "fc2 projection"} <= saved
    assert not {"ln1 out", "ln2 out", "gelu"} & saved  # the inputs of the three layers
    for name in ("qkv", "fc1", "fc2"):
        value = by_label[f"{name} projection"]
        assert value.role == "linear"
        assert value.geometry.size == (2, 16, 8)
        producer = recording.ops[value.producer]
        assert producer.replayable
        assert str(producer.func) == "ds_adacc.project.default"
        (given,) = (index for index in producer.reads if recording.values[index].origin != "buffer")
        assert recording.values[given].label in ("ln1 out", "ln2 out", "gelu")
    assert recording.remarks == ()


def test_held_inputs_of_served_layers_are_r_over_n_of_before(model):
    def input_bytes(block):
        recording = record(block, (x(),), {})
        values = [recording.values[index] for index in recording.saved]
        names = ("ln1 out", "ln2 out", "gelu", "qkv projection", "fc1 projection", "fc2 projection")
        return {value.label: value.nbytes for value in values if value.label in names}

    plain, tokens, width = input_bytes(zoo.GPTBlock(dropout=0.0)), 2 * 16, zoo.WIDTH
    assert plain == {"ln1 out": 4 * tokens * width, "ln2 out": 4 * tokens * width, "gelu": 4 * tokens * 4 * width}
    assert set(input_bytes(model[0]).values()) == {4 * tokens * 8}


@pytest.mark.parametrize(
    "section",
    [{"codecs": "none", "memory_budget": 0.65}, {"codecs": "quantization", "memory_budget": 1.0}],
    ids=["recomputed", "compressed"],
)
def test_training_under_a_plan(model, section):
    exact = gradients(model, lambda given: model[1](model[0](given)), x())
    runtime = Runtime(load({"adacc": {"solver": {"max_seconds": 30.0}, **section}}), has_engine=True)
    wrap_blocks({"0": model[0], "1": model[1]}, runtime)
    for _ in range(4):
        found = gradients(model, lambda given: model[1](model[0](given)), x())
        runtime.controller.end_backward()
        runtime.controller.end_step()
    recording = next(iter(runtime.agreement.known_types.values())).recording
    projections = [value.index for value in recording.values if value.label.endswith("projection")]
    (policies,) = runtime.controller.plan.policies.values()
    if section["codecs"] == "none":
        assert any(replayed(runtime.controller.plan))
        zoo.assert_same(found, exact)
    else:
        assert {policy.stores[index] for policy in policies for index in projections} == {"token"}
        assert all((one - other).norm() < 0.5 * other.norm() for one, other in zip(found, exact, strict=True))


def test_recomputing_a_projection_gives_its_bits(model):
    recording = record(model[0], (x(),), {})
    policy = planner.recompute_policy(profile_of(recording))
    stored = {recording.values[i].label for i, store in enumerate(policy.stores) if store is not None}
    assert not [label for label in stored if label.endswith("projection")]


def test_another_epoch_draws_other_projections_and_records_nothing_anew(model):
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 1.0}}), has_engine=True)
    wrap_blocks({"0": model[0], "1": model[1]}, runtime)
    seen = []
    for step in range(3):
        model.compact.draw(step)
        seen.append(gradients(model, lambda given: model[1](model[0](given)), x()))
        runtime.controller.end_backward()
        runtime.controller.end_step()
    assert len(runtime.agreement.known_types) == 1
    assert runtime.profiler.measured == 1
    assert torch.equal(seen[0][0], seen[1][0])  # the input's gradient
    names = ["input", *(name for name, parameter in model.named_parameters() if parameter.requires_grad)]
    changed = {name for name, one, other in zip(names, *seen[:2], strict=True) if not torch.equal(one, other)}
    assert changed == {f"{name}.compact_update" for name in model.compact.layers}


@pytest.fixture
def llama():
    """A block with separate q, k, v, gate and up, all of whose layers are served, and their CompAct."""
    torch.manual_seed(0)
    model = nn.ModuleList([zoo.LlamaBlock()])
    config = CompactConfig(rank=8, layers=("*",), update_interval=1)
    compact = convert(model, {"0": model[0]}, config, groups_of(model, None, None))
    compact.draw(0)
    return model[0], compact


def test_layers_that_read_one_tensor_save_one_projection_of_it(llama):
    block, compact = llama
    recording = record(block, (x(),), {})
    labels = [recording.values[index].label for index in sorted(recording.saved)]
    names = ["q", "o", "gate", "down"]
    assert [label for label in labels if label.endswith("projection")] == [f"{name} projection" for name in names]
    assert sum(op.short_name == "project" for op in recording.ops) == 4
    for name in ("0.q", "0.k", "0.v"):
        assert torch.equal(compact.layers[name].columns, compact.layers["0.q"].columns)
    assert not torch.equal(compact.layers["0.o"].columns, compact.layers["0.q"].columns)
    policy = planner.recompute_policy(profile_of(recording))
    stored = {recording.values[i].label for i, store in enumerate(policy.stores) if store is not None}
    assert {label for label in stored if not label.endswith("buffer")} == {"input x"}


def test_a_projection_is_held_by_nothing_but_autograd(llama, uncollected):
    block, _ = llama
    made = []

    def pack(tensor):
        if tensor.shape[-1] == 8:
            made.append(weakref.ref(tensor))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        block(x().requires_grad_())
    assert len(made) >= 7
    assert all(tensor() is None for tensor in made)


def compiled_into(graphs):
    """A backend of torch.compile that puts its graphs there, forward and backward."""

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_compiled_block_is_one_graph_that_serves_every_epoch(llama):
    (block, compact), graphs = llama, []
    compiled = torch.compile(block, backend=compiled_into(graphs), fullgraph=True)
    for epoch in range(3):
        compact.draw(epoch)
        exact = [gradient.clone() for gradient in gradients(block, block, x() + epoch)]
        found = gradients(block, compiled, x() + epoch)
        zoo.assert_same(found, exact)
    forward, _ = graphs
    projections = [node for node in forward.graph.nodes if node.target is torch.ops.ds_adacc.project.default]
    assert len(projections) == 4  # of q, k and v; o; gate and up; down


def test_projections_in_a_graph_have_the_role_that_they_have_outside(llama):
    block, _ = llama
    compiled = torch.compile(block, backend="aot_eager")
    compiled(x())  # recorded is a later call
    recording = record(compiled, (x(),), {})
    projections = [value for value in recording.values if value.geometry.size == (2 * 16, 8)]
    assert [value.role for value in projections] == ["linear"] * 4


def test_compiled_blocks_are_recomputed():
    torch.manual_seed(0)
    model = nn.ModuleList([zoo.LlamaBlock(), zoo.LlamaBlock()])
    blocks = {"0": model[0], "1": model[1]}
    convert(model, blocks, CompactConfig(rank=8), groups_of(model, None, None)).draw(0)
    compile_blocks(blocks, "aot_eager", {})
    exact = gradients(model, lambda given: model[1](model[0](given)), x())
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.95}}), has_engine=True)
    wrap_blocks(blocks, runtime)
    for _ in range(4):
        found = gradients(model, lambda given: model[1](model[0](given)), x())
        runtime.controller.end_backward()
        runtime.controller.end_step()
        zoo.assert_same(found, exact)
    assert any(replayed(runtime.controller.plan))
