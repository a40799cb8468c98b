"""The roles of what a compiled graph saves, as those operators inside tell which the dispatcher sees (Rule R17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.geometry import storage_of
from ds_adacc.program.known_functions import ATTENTION
from ds_adacc.record.roles import ACTIVATION, MATMUL, NORM, PROJECTION, SOFTMAX

_STRONGEST_FIRST = ("query", "key", "value", "softmax", "statistic", "attention", "layernorm", "gelu", "linear")


class RolesInside:
    """Collects roles while a graph runs, by the storage of the tensors."""

    def __init__(self) -> None:
        self._roles: dict[int, str] = {}

    def note(self, func: Any, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note an operator that has run."""
        read = {storage_of(tensor) for tensor in tensors_in(args)}
        for key in {storage_of(tensor) for tensor in tensors_in(outputs)} - read:
            self._roles.pop(key, None)  # the memory was another tensor's
        is_known = getattr(func, "namespace", None) in ("aten", "ds_adacc")
        for tensor, role in _roles(func.overloadpacket.__name__, args, outputs) if is_known else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                key = storage_of(tensor)
                self._roles[key] = min(role, self._roles.get(key, role), key=_STRONGEST_FIRST.index)

    def of(self, tensor: torch.Tensor) -> str | None:
        return self._roles.get(storage_of(tensor))


def _roles(name: str, args: Sequence[Any], outputs: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    if ATTENTION in name:
        yield from zip(args, ("query", "key", "value"), strict=False)
        yield from _main_and_statistics(outputs, "attention")
    elif name in NORM:
        yield from zip(args[:1], ("layernorm",), strict=False)
        yield from _main_and_statistics(outputs, "layernorm")
    elif name in SOFTMAX:
        yield from zip(outputs[:1], ("softmax",), strict=False)
    elif name in ACTIVATION:
        yield from zip(args[:1], ("gelu",), strict=False)
    elif name in MATMUL:
        yield from zip(args[name == "addmm" :], ("linear",), strict=False)
    elif name in PROJECTION:
        yield from zip(outputs[:1], ("linear",), strict=False)


def _main_and_statistics(outputs: Sequence[Any], role: str) -> Iterator[tuple[Any, str]]:
    yield from ((output, "statistic" if number else role) for number, output in enumerate(outputs))
