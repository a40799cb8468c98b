"""Run one recorded operator again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from ds_adacc.program import transforms
from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.generators import drawing_again
from ds_adacc.program.parameters import is_released, whole_shape
from ds_adacc.program.recorded_op import RecordedOp

Indexed = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]  # parameters by index


def replay(op: RecordedOp, root: Callable[[int], torch.Tensor], parameters: Indexed) -> tuple[torch.Tensor, ...]:
    """Run `op` on the roots that `root(value index)` gives and on the live `parameters`; returns its outputs.

    Rule R11: the recorded operators lie below autograd, autocast and vmap, so all are off here.
    """

    def tensor_of(ref: ValueRef | ParameterRef) -> torch.Tensor:
        return ref.geometry.view(root(ref.index) if type(ref) is ValueRef else live(parameters[ref.index]))

    is_plain = not (torch.is_grad_enabled() or transforms.are_on())
    if is_plain:  # as in most backwards; a context would take longer than a short kernel
        return run(op, tensor_of)
    with torch.no_grad(), transforms.left():
        return run(op, tensor_of)


def run(op: RecordedOp, tensor_of: Callable[[ValueRef | ParameterRef], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call `op` on what `tensor_of` gives for each reference among its arguments; returns its outputs."""
    if not op.bases:
        return _call(op, tensor_of)
    # Rule R4: it writes to what its bases make for this replay alone.
    pairs = zip(op.written, op.bases, strict=True)
    fresh = {index: run(base, tensor_of)[base.outputs.index(index)] for index, base in pairs}

    def inner(ref: ValueRef | ParameterRef) -> torch.Tensor:
        is_fresh = type(ref) is ValueRef and ref.index in fresh
        return ref.geometry.view(fresh[ref.index]) if is_fresh else tensor_of(ref)

    return (*_call(op, inner), *fresh.values())


def _call(op: RecordedOp, tensor_of: Callable[[ValueRef | ParameterRef], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if op.python_reads is not None:
        op.python_reads.check(op.short_name)
    args, kwargs = op.template.filled(tensor_of)
    casts_itself = op.is_function  # as in forward
    is_cast = torch._C._is_any_autocast_enabled() and not casts_itself
    has_default = op.default_dtype is torch.get_default_dtype()
    if op.draw is None and not is_cast and has_default:
        result = op.func(*args, **kwargs)
    else:
        with ExitStack() as ambience:
            if not has_default:
                ambience.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(op.default_dtype)
            if is_cast:
                ambience.enter_context(torch._C._DisableAutocast())
            if op.draw is not None:
                states = tensor_of(op.draw.before), tensor_of(op.draw.after)
                ambience.enter_context(transforms.left())
                ambience.enter_context(drawing_again(op.draw.generator, *states))
            result = op.func(*args, **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def live(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's data as it is now. Raises RuntimeError if ZeRO-3 has it partitioned away."""
    if is_released(parameter):
        raise _released(parameter)
    return parameter.detach()


def modified(what: str, tensor: torch.Tensor, expected: int) -> RuntimeError:
    """The error for a tensor that was written to after its version was `expected`; it reads like autograd's own."""
    return RuntimeError(
        f"{what} of shape {tuple(tensor.shape)}, needed for gradient computation, has been modified by an in-place "
        f"operation: it is at version {tensor._version}, expected {expected}"
    )


def check_parameters(parameters: Iterable[torch.Tensor], versions: Sequence[int], are_updated: bool) -> None:
    """Raises RuntimeError if a parameter is not as it was in forward (Rule E7).

    `versions`: of each, that of forward. `are_updated`: the optimizer has made a step since.
    """
    for parameter, version in zip(parameters, versions, strict=True):
        if parameter._version != version:
            raise modified("a parameter", parameter, version)
        if are_updated:
            raise RuntimeError(
                f"a parameter of shape {whole_shape(parameter)}, needed to recompute a tensor of its block, has been "
                "changed by a step of the optimizer since the block's forward: call backward before the step, or run "
                "the forward again after it"
            )


def _released(parameter: torch.Tensor) -> RuntimeError:
    """The error for a parameter that ZeRO-3 has partitioned away. It marks the parameters of its leaf modules."""
    if getattr(parameter, "ds_z3_leaf_module", None) is None:
        remedy = (
            "make the block's class a ZeRO-3 leaf module, by zero_optimization.leaf_module in ds_config or by "
            "deepspeed.utils.set_z3_leaf_modules before deepspeed.initialize"
        )
    else:
        remedy = (
            "ZeRO-3 releases it when the gradients of its module's inputs are ready, and supports no second backward "
            "of one forward (retain_graph): add up the losses and call backward once, or run the forward again"
        )
    return RuntimeError(
        f"parameter {getattr(parameter, 'ds_id', '?')} of shape {whole_shape(parameter)} is partitioned away while "
        f"its block's backward needs it: {remedy}"
    )
