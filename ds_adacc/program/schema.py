"""What the schema and the tags of an operator tell: what it writes to, computes with, and reveals of its data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_adacc.program.arguments import Constant, ParameterRef, ValueRef, tensors_in
from ds_adacc.program.geometry import Geometry, are_one_view
from ds_adacc.program.recorded_op import RecordedOp

MASKS = (torch.bool, torch.uint8)  # the dtypes of masks by which tensors are indexed
LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch calls it with each tensor that it has made of numbers or arrays
LIFTS = (LIFT_FRESH, torch.ops.aten.lift_fresh_copy.default)
CHECK_ERRORS = torch.ops.aten._linalg_check_errors.default  # raises an error if a matrix is singular, say
_STATISTICS = frozenset(("running_mean", "running_var"))  # arguments of batch norms
_COUNTING = ("aten::arange", "aten::range")  # their scalars are a size
# They add a product to beta times a tensor.
_ADDING = frozenset(f"aten::{name}" for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm"))
_OF_FLASH_ATTENTION = "flash_attn"  # how the namespaces of its operators begin; they have no tags


def written_tensors(func: Any, given: tuple[Any, Any]) -> list[torch.Tensor]:
    """The argument tensors that `func` writes to, by its schema. The schemas of c10d do not say so: its names do."""
    args, kwargs = given
    if getattr(func, "_schema", None) is None:
        return []
    if _arguments_of(func).are_written_by_name:
        return list(tensors_in(args[0]))
    return [item for item in _written(func, args, kwargs) if isinstance(item, torch.Tensor)]


def written_values(op: RecordedOp) -> list[int]:
    """The values that a recorded operator of torch writes to, by its schema."""
    if getattr(op.func, "_schema", None) is None:
        return []
    return [item.index for item in _written(op.func, op.args, dict(op.kwargs)) if isinstance(item, ValueRef)]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for position, name in _arguments_of(func).written:
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from value if isinstance(value, tuple | list) else (value,)


def keeps_memory(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func` gives a tensor the memory that it has already: nothing is other than before."""
    return func is torch.ops.aten.set_.source_Tensor and are_one_view(*args)


@dataclass(frozen=True)
class _Arguments:
    """What a schema says of an operator's arguments. Torch takes long to tell.

    `written`: position and name of those that it writes to. `are_written_by_name`: it writes to the first, as its name
    says, though not its schema. `computed`: the names of those that it computes with. `defaults`: of those that have
    a whole number as a default, and are given by name only.
    """

    names: tuple[str, ...]
    written: tuple[tuple[int, str], ...]
    are_written_by_name: bool
    computed: frozenset[str]
    defaults: tuple[tuple[str, int], ...]


@functools.cache
def _arguments_of(func: Any) -> _Arguments:
    schema = func._schema
    arguments = list(schema.arguments)
    infos = [argument.alias_info for argument in arguments] if schema.is_mutable else []
    computed = [argument for argument in arguments if _is_computed_with(argument.type)]
    return _Arguments(
        tuple(argument.name for argument in arguments),
        tuple((i, arguments[i].name) for i, info in enumerate(infos) if info is not None and info.is_write),
        schema.name.startswith("c10d::") and schema.name.endswith("_"),
        frozenset(argument.name for argument in computed),
        tuple((a.name, a.default_value) for a in computed if a.kwarg_only and type(a.default_value) is int),
    )


def without_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `func` without running statistics, if it is a batch norm in training.

    It updates these, which its schema does not mention, and normalises by the statistics of the batch alone.
    """
    updated = set(map(id, updated_statistics(func, args)))
    return tuple(None if id(arg) in updated else arg for arg in args)


def updated_statistics(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The running statistics that `func` updates, if it is a batch norm in training. No version counts that."""
    if not is_training_batch_norm(func, args):
        return []
    named = zip(_arguments_of(func).names, args, strict=False)
    return [arg for name, arg in named if name in _STATISTICS and arg is not None]


def is_training_batch_norm(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func` is a batch norm that the `training` among its arguments tells to use the batch's statistics."""
    if "batch_norm" not in getattr(func, "__name__", ""):
        return False
    given = dict(zip(_arguments_of(func).names, args, strict=False))
    return given.keys() >= _STATISTICS and given.get("training") is True


def ignores_first(func: Any, given: tuple[Any, Any]) -> bool:
    """Whether `func` adds a product to its first argument times a `beta` of 0: torch ignores what that tensor holds.

    That of a tensor with a gradient has a meaning still: its gradient is 0.
    """
    schema, (args, kwargs) = getattr(func, "_schema", None), given
    if schema is None or schema.name not in _ADDING or kwargs.get("beta", 1) != 0 or "out" in kwargs:
        return False
    return not args[0].requires_grad


def looking_alike(tensor: torch.Tensor, others: Sequence[Any]) -> ValueRef | ParameterRef | None:
    """A reference to the first element of one of the `others` that looks like the tensor; None if none does.

    It stands for a tensor of which only the look is read: what else the operator reads is at hand anyway.
    """
    for other in others:
        if isinstance(other, ValueRef | ParameterRef) and other.geometry.numel and other.geometry.dtype is tensor.dtype:
            size = tuple(tensor.shape)
            return replace(other, geometry=Geometry(size, (0,) * len(size), tensor.dtype, other.geometry.start))
    return None


def with_constants(func: Any, encoded: tuple[Any, Any]) -> tuple[Any, Any]:
    """The arguments of `func`, in which the whole numbers that it computes with are `Constant`s.

    By its schema they are of type Scalar, or stand where a tensor may.
    """
    args, kwargs = encoded
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name in _COUNTING:
        return encoded
    arguments = _arguments_of(func)
    positional = arguments.names[: len(args)]
    given = {*positional, *(name for name, _ in kwargs)}
    # torch leaves out what equals the default, such as an alpha of 1
    named = (*kwargs, *(default for default in arguments.defaults if default[0] not in given))
    marked = [
        (name, Constant(value) if type(value) is int and name in arguments.computed else value)
        for name, value in (*zip(positional, args, strict=True), *named)
    ]
    return tuple(value for _, value in marked[: len(args)]), tuple(marked[len(args) :])


def _is_computed_with(kind: torch._C.Type) -> bool:
    of = kind.getElementType() if isinstance(kind, torch._C.OptionalType) else kind
    return isinstance(of, torch._C.NumberType | torch._C.TensorType)


def by_look(op: RecordedOp, made: torch.Tensor) -> RecordedOp:
    """The operator `op`, which has returned the uninitialised memory `made`, without a tensor among its arguments.

    `empty_like` reads only how its argument looks. A replay must not rebuild that tensor for it.
    """
    given = (("dtype", made.dtype), ("device", made.device))
    if op.func.namespace != "aten":
        return op
    return replace(op, func=torch.ops.aten.empty_strided.default, args=(tuple(made.shape), made.stride()), kwargs=given)


def reads_data(func: Any) -> bool:
    """Whether it gives Python a number of a tensor."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())


def reveals_data(func: Any, given: tuple[Any, Any], outputs: Any) -> bool:
    """Whether Python may have read data by now (Rule R7): as a number, as a shape, or from a copy on the host."""
    if reads_data(func) or has_dynamic_shape(func, given):
        return True
    states = generator_states(func, outputs) if isinstance(outputs, tuple | list) else ()
    made = [output for number, output in enumerate(outputs) if number not in states] if states else outputs
    on_host = any(tensor.device.type == "cpu" for tensor in tensors_in(made))
    return on_host and any(tensor.device.type not in ("cpu", "meta") for tensor in tensors_in(given))


def generator_states(func: Any, outputs: Sequence[Any]) -> frozenset[int]:
    """The numbers of the outputs that are the state of a random generator (Rule R16)."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    if not is_random and not getattr(func, "namespace", "").startswith(_OF_FLASH_ATTENTION):
        return frozenset()
    return small_integers(outputs)


def small_integers(outputs: Sequence[Any]) -> frozenset[int]:
    """The numbers of those outputs, but the first, that are tensors of one or two whole numbers."""
    return frozenset(number for number, output in enumerate(outputs) if number and _is_small_integer(output))


def _is_small_integer(output: Any) -> bool:
    if not isinstance(output, torch.Tensor) or not 1 <= output.numel() <= 2:
        return False
    return not (output.is_floating_point() or output.is_complex() or output.dtype in MASKS)


def has_dynamic_shape(func: Any, given: tuple[Any, Any]) -> bool:
    """Whether the output's shape depends on data (Rule R7). That of indexing does only with a mask."""
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return func is torch.ops.aten._pack_padded_sequence.default  # it lacks the tag
    if func._schema.name == "aten::index":
        return any(index is not None and index.dtype in MASKS for index in given[0][1])
    return True
