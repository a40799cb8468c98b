"""Which backwards of torch.compile's graphs may be run ahead of training's own."""

from types import SimpleNamespace

import pytest
import torch
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module

from ds_adacc.program.compiled_backward import has_run, why_not_ahead

CPU = torch.device("cpu")


def module_that_calls(target):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def cached(module):
    """What AOTAutograd has of a backward that it finds on disk."""
    return SimpleNamespace(bw_module_fn=serialize_graph_module(module).deserialize)


COPIES = module_that_calls(torch.ops.aten.clone.default)
REDUCES = module_that_calls(torch.ops._c10d_functional.wait_tensor.default)


def node_of(info, **held):
    """A node of autograd as it is after the forward of a graph."""
    node = type("CompiledFunctionBackward", (), {"_forward_cls": SimpleNamespace(_lazy_backward_info=info)})()
    vars(node).update({"symints": (3,), "opaque_objects": (), "_tensors_no_vc_check": [], **held})
    return node


def test_a_backward_that_only_computes_may_run_ahead():
    assert why_not_ahead(node_of(SimpleNamespace(bw_module=COPIES)), CPU) is None
    assert why_not_ahead(node_of(cached(COPIES)), CPU) is None


@pytest.mark.parametrize(
    "info",
    [SimpleNamespace(bw_module=REDUCES), cached(REDUCES)],
    ids=["traced", "cached"],
)
def test_a_collective_must_not_run_ahead(info):
    name = "torch.ops._c10d_functional.wait_tensor.default"
    assert why_not_ahead(node_of(info), CPU) == f"its compiled backward calls {name}, which may hold a collective"


def test_what_nothing_tells_of_must_not_run_ahead():
    for info in (None, SimpleNamespace(bw_module_fn=len)):
        assert why_not_ahead(node_of(info), CPU) == (
            "nothing tells what its compiled backward calls, which may be a collective"
        )


@pytest.mark.parametrize("held", [{"_tensors_no_vc_check": [torch.zeros(2)]}, {"opaque_objects": (object(),)}])
def test_what_no_hook_sees_cannot_be_copied(held):
    reason = why_not_ahead(node_of(SimpleNamespace(bw_module=COPIES), **held), CPU)
    assert reason == "its backward reads tensors or objects that torch.compile keeps where no hook sees them"


def test_cuda_graphs_must_not_run_ahead(monkeypatch):
    monkeypatch.setattr("ds_adacc.program.compiled_backward.run_in_cuda_graphs", lambda device: True)
    assert "CUDA graph" in why_not_ahead(node_of(SimpleNamespace(bw_module=COPIES)), CPU)


def test_a_backward_is_compiled_when_it_runs_first():
    torch._dynamo.reset()
    linear = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
    output = linear(torch.randn(2, 4))
    cls = output.grad_fn._forward_cls
    assert not has_run(cls)
    assert why_not_ahead(output.grad_fn, CPU) is None
    output.sum().backward()
    assert has_run(cls)
