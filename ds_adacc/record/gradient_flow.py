"""What a node of autograd's does with the gradients that it gets: its class tells, of which each operator has one."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ds_adacc.program.backward_graph import Gradient
from ds_adacc.program.graphs import run_of
from ds_adacc.program.parameters import whole_shape

# What these give is what they get, if that looks as it should: else it is summed up, or cast.
_PASS_ON = {
    "AddBackward0",
    "AliasBackward0",
    "CloneBackward0",
    "ConjBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "SubBackward0",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "TransposeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewAsComplexBackward0",
    "ViewAsRealBackward0",
    "ViewBackward0",
}
_TURN = {"PermuteBackward0", "TBackward0", "TransposeBackward0", "TransposeBackward1"}
_GIVE_VIEWS = {"CatBackward0", "StackBackward0"}  # of what they get
_JOIN = {"SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"}  # all that they get


def kind_of(node: Node) -> str:
    """The name of its class. (`Node.name` may be something else: a user's Function may have an attribute `name`.)"""
    return type(node).__name__


def is_leaf(node: Node) -> bool:
    """Whether it adds what it gets to the `.grad` of a tensor."""
    return kind_of(node) == "AccumulateGrad"


def parameter_of(node: Node) -> nn.Parameter | None:
    """The parameter to whose `.grad` it adds what it gets, if any."""
    variable = getattr(node, "variable", None) if is_leaf(node) else None
    return variable if isinstance(variable, nn.Parameter) else None


def targets(node: Node) -> list[tuple[Node, int] | None]:
    """Where each gradient goes to that it gives: a node, and which of those that this one gets. None: nobody asks."""
    return [None if target is None else (target, place) for target, place in node.next_functions]


def is_cast(node: Node) -> bool:
    """Whether it is of the cast of a parameter, as autocast makes it."""
    leaves = (target[0] for target in targets(node) if target is not None)
    return kind_of(node) == "ToCopyBackward0" and any(parameter_of(leaf) is not None for leaf in leaves)


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node that gets the gradient of a tensor, if it is no leaf."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was written to: backward refuses it
        return None


def gets(node: Node) -> tuple[Gradient, ...]:
    """The gradients that it gets, of all outputs of the call that has made it."""
    parameter = parameter_of(node)
    if parameter is not None:  # ZeRO-3 may have but a part of it here now
        return (Gradient(whole_shape(parameter), parameter.dtype),)
    return tuple(Gradient(tuple(each.shape), each.dtype) for each in node._input_metadata)


def makes_zeros(node: Node) -> bool:
    """Whether it makes zeros in place of the gradients that do not arrive. (A compiled graph does not ask for them.)"""
    is_function = isinstance(node, BackwardCFunction) and run_of(node) is None
    return is_function or kind_of(node) in _JOIN


def transposes(node: Node) -> bool:
    """Whether it gives a view of what it gets that has other strides."""
    return kind_of(node) in _TURN


def gives_views(node: Node) -> bool:
    """Whether what it gives are views of parts of what it gets."""
    return kind_of(node) in _GIVE_VIEWS


def is_passed_on(node: Node, number: int, makes_nothing: bool) -> bool:
    """Whether the gradient `number` that it gives is the one that it gets, or a view of that, if the sizes allow it.

    `makes_nothing`: the call that has made it returned what it was given. ZeRO-3 has such Functions around modules.
    """
    kind, target = kind_of(node), targets(node)[number]
    if target is None or gives_views(node):
        return target is not None
    # A Function that is recorded operator by operator may make nothing either, but computes with what it has saved.
    is_idle = isinstance(node, BackwardCFunction) and makes_nothing and not node._raw_saved_tensors
    if not (is_idle or kind in _PASS_ON):
        return False
    if number == 1 and (kind == "SubBackward0" or getattr(node, "_saved_alpha", 1) != 1):
        return False
    return gets(node)[0].dtype == gets(target[0])[target[1]].dtype
