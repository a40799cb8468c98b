"""The roles of what a compiled graph saves, as those operators inside tell which the dispatcher sees (Rule R17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.geometry import storage_of
from ds_adacc.program.known_functions import ATTENTION
from ds_adacc.record.naming.roles import PARTS, READ_AS, STRONGEST_FIRST, made_as


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
                self._roles[key] = min(role, self._roles.get(key, role), key=STRONGEST_FIRST.index)

    def of(self, tensor: torch.Tensor) -> str | None:
        return self._roles.get(storage_of(tensor))


def _roles(name: str, args: Sequence[Any], outputs: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    read, made = READ_AS.get(name), made_as(name)
    if ATTENTION in name:
        yield from zip(args, PARTS, strict=False)
    elif read in ("layernorm", "gelu", "linear"):
        place = 1 if name == "addmm" else 0  # after the bias
        yield from ((arg, read) for arg in args[place : place + 1])
    if made:
        yield from ((output, "statistic" if number else made) for number, output in enumerate(outputs))
