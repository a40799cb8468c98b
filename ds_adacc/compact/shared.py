"""One projection for the layers that read one tensor: q, k and v of attention, gate and up of an MLP.

Each would save a projection of the same tensor, where a plain Linear saves that tensor once for all of them. So they
have the same P, and the first of them to run projects for all. Which layers these are is guessed by their names. A
layer that reads another tensor, as k and v of cross-attention do, projects it itself. If one of the layers does not run
in a forward, the last projection is held until the next forward. Compiled code does without all this: torch.compile
merges equal operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from ds_adacc.compact.projection import project

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)


class Shared:
    """Projects for `readers` layers. It holds the last projection until each of them has had one."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._forget()

    def project(self, reader: Hashable, x: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """x P in `dtype`, or what an earlier call has made of the same tensor, if that was not written to since.

        `reader` tells which of the layers asks.
        """
        if reader in self._served:  # another forward
            self._forget()
        z, looks = self._made, (x._version, columns._version, dtype)
        if z is None or self._source() is not x or self._looks != looks:
            z = project(x.to(dtype), rows, columns)
            # The tensor itself is not held: it may be what the plan drops.
            self._made, self._source, self._looks = z, weakref.ref(x), looks
        self._served.add(reader)
        if len(self._served) == self._readers:
            self._forget()
        return z

    def _forget(self) -> None:
        self._made: Tensor | None = None
        self._source: Any = _nothing
        self._looks: Any = None
        self._served: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, (self._readers,)  # a copy of the model has none of its activations


def _nothing() -> None:
    return None


def partners(names: Iterable[str]) -> dict[str, str]:
    """By the name of each layer, the name of the first one that reads the same tensor, which may be itself."""
    firsts: dict[tuple[str, tuple[str, ...]], str] = {}
    found = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        family = next((each for each in _TOGETHER if leaf in each), (leaf,))
        found[name] = firsts.setdefault((parent, family), name)
    return found
