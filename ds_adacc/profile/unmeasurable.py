"""Why the gradient errors of a block cannot be measured: its backward must not be run ahead of training's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ds_adacc.profile.arrival import outputs_to_watch
from ds_adacc.program import compiled_backward
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.graphs import is_graph
from ds_adacc.program.nodes import nodes_behind
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import COLLECTIVE
from ds_adacc.program.registration import computes_only

# Functions of DeepSpeed whose backward holds no collective: its Linear under ZeRO-3.
_KNOWN = ("LinearFunctionForZeroStage3Backward",)


def why_unmeasurable(output: Any, inputs: Sequence[torch.Tensor], recording: Recording) -> str | None:
    """Why the block's backward must not be run ahead of training's own (Rule P4); None if it may."""
    starts = [tensor for tensor in (*inputs, *recording.parameters) if tensor.requires_grad]
    if not outputs_to_watch(output, ()) or not starts:
        return "no gradient flows through the tensors that it takes and returns"
    watched = outputs_to_watch(output, inputs)
    if not watched:
        return "it returns its inputs, or writes its results into their memory"
    for op in recording.ops:
        if op.refusal == COLLECTIVE:
            return f"it calls {op.name}, a collective"
    if is_awaited(starts):
        return "a hook on a parameter or an input waits for its gradient"
    if recording.loses_graphs:
        return "it cannot be told which of its compiled graphs a call runs"
    has_main_grad = any(hasattr(parameter, "main_grad") for parameter in recording.parameters)
    ends = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    nodes = nodes_behind(ends, {get_gradient_edge(tensor).node for tensor in starts})
    reasons = (_why_not_ahead(node, watched[0].device, has_main_grad) for node in nodes)
    of_hooks = "a hook on a tensor in it would run more than once" if recording.has_hooks else None
    return next(filter(None, reasons), of_hooks)


def is_awaited(starts: Iterable[torch.Tensor]) -> bool:
    """Whether a hook on one of these, at which a block's backward ends, waits for its gradient (Rule P4)."""
    return any(bool(tensor._backward_hooks) or tensor.retains_grad for tensor in starts)


def _why_not_ahead(node: torch.autograd.graph.Node, device: torch.device, has_main_grad: bool) -> str | None:
    """Why this node of the block's backward must not be run ahead of training's own; None if it may."""
    if node.name() == "BackwardHookFunctionBackward":
        return "a module in it has a backward hook, which would run more than once"
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction) or "CppNode" in node.name()
    reason = None
    if is_graph(getattr(node, "_forward_cls", type(node))):
        reason = compiled_backward.why_not_ahead(node, device)
    elif is_function and node.name() not in _KNOWN and not _computes_only(node):
        reason = (
            f"its backward runs {node.name()}, which may hold a collective; if it holds none, register its "
            "Function with ds_adacc.register_function"
        )
    if reason is None and is_function and has_main_grad:
        reason = f"its backward runs {node.name()}, which may add to a parameter's main_grad"
    return reason


def _computes_only(node: torch.autograd.graph.Node) -> bool:
    """Whether it is of a Function whose backward may be run by itself, all of whose tensors the pack hook has seen."""
    cls = getattr(node, "_forward_cls", None)
    is_seen = next(tensors_in(list(vars(node).values())), None) is None
    return cls is not None and computes_only(cls) and is_seen
