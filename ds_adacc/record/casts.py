"""Casts of parameters, which autocast makes at their first use and keeps until its context ends.

A call that finds a cast there runs one operator less than the call that made it. Both are to have one program. So a
cast counts as an operator of every call that reads it, in the place where the call first does, or first saves it.

What autocast keeps: `cached_cast` in aten/src/ATen/autocast_mode.cpp.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.program.arguments import ParameterRef, tensors_in
from ds_adacc.program.function_operator import autocast_now
from ds_adacc.program.geometry import storage_of
from ds_adacc.program.same_bits import all_same_bits, pieces
from ds_adacc.record.known_tensors import KnownTensors

CAST = torch.ops.aten._to_copy.default


class Cast(NamedTuple):
    """The cast of a parameter, at this version of it. `is_found`: an earlier call has made it."""

    parameter: torch.Tensor
    version: int
    cast: torch.Tensor
    is_found: bool

    def while_alive(self) -> Callable[[], Cast | None]:
        """A function that returns this, or None once nobody holds the cast any more. Autocast's cache would hold it."""
        parameter, version, cast, is_found = self.parameter, self.version, weakref.ref(self.cast), self.is_found

        def alive() -> Cast | None:
            tensor = cast()
            return None if tensor is None else Cast(parameter, version, tensor, is_found)

        return alive


class Casts:
    """The casts that autocast keeps where the block is called, as far as the block has not read them yet."""

    def __init__(self) -> None:
        keeps = torch.is_autocast_cache_enabled()
        self._kinds = {(device, dtype) for device, is_on, dtype in autocast_now() if is_on and keeps}
        self._unread: dict[int, Cast] = {}  # by storage

    def makes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call makes a cast that autocast keeps."""
        return func is CAST and kwargs.keys() == {"dtype"} and self._is_kept(args[0], kwargs["dtype"])

    def add(self, parameter: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        """Remember a cast that was just made, so that `read` tells of its first use. Returns the cast."""
        self._unread[storage_of(cast)] = Cast(parameter, parameter._version, cast, False)
        return cast

    def read(self, given: Any, known: KnownTensors) -> Iterator[Cast]:
        """The tensors in `given` that are casts and are read for the first time. Each must become known at once."""
        for tensor in tensors_in(given) if self._kinds else ():
            if tensor.layout is torch.strided:
                cast = self._unread.pop(storage_of(tensor), None) or self._found(tensor, known)
                if cast is not None and cast.parameter._version == cast.version:
                    yield cast

    def _is_kept(self, parameter: Any, dtype: torch.dtype) -> TypeGuard[nn.Parameter]:
        is_kept = isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.dtype is torch.float32
        return is_kept and (parameter.device.type, dtype) in self._kinds

    def _found(self, tensor: torch.Tensor, known: KnownTensors) -> Cast | None:
        """The tensor as a cast that an earlier call has made: its node in the autograd graph tells of what.

        None if it is not, or if the parameter has changed since, so that the cast can be made of it no more.
        """
        # (Torch looks at the base of a view before it tells its node, and may raise.)
        node = tensor.grad_fn if tensor.requires_grad and not tensor._is_view() else None
        if node is None or type(node).__name__ != "ToCopyBackward0":
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)
        if not self._is_kept(parameter, tensor.dtype) or parameter.device != tensor.device:
            return None
        if parameter.shape != tensor.shape or known.find(tensor) is not None:
            return None
        with torch.no_grad():
            parts = pieces(parameter.detach(), tensor.detach())
            is_same = all_same_bits((one.to(tensor.dtype), other) for one, other in parts)
        is_of_block = is_same and isinstance(known.find(parameter), ParameterRef)
        return Cast(parameter, parameter._version, tensor, True) if is_of_block else None


class _Asking(TorchDispatchMode):
    """Notes what autocast hands to a matrix product, which it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.given: torch.Tensor | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        self.given = args[0]
        return args[0].new_empty((1, 1))


def is_autocasts(cast: Cast) -> bool:
    """Whether autocast would hand out this very cast now. A program may keep casts of its own, and renew them seldom.

    Autocast is asked to cast the parameter. If it has not, it does so, and keeps the result as it would at the
    parameter's first use.
    """
    with torch.enable_grad(), _Asking() as asking:
        torch.mm(cast.parameter, cast.parameter)
    return asking.given is not None and storage_of(asking.given) == storage_of(cast.cast)
