"""Offload: hold a copy in host memory."""

from __future__ import annotations

import torch

from ds_adacc.execute.holders.restored import Restored, ValueFacts
from ds_adacc.execute.host_offload import Offloads
from ds_adacc.program.replay import modified
from ds_adacc.program.slots import never_saved


class Offloaded(Restored[ValueFacts]):
    """A value in host memory. It is fetched before backward asks for it, or at the latest then."""

    __slots__ = ("_copy", "_version", "_witness")

    def __init__(self, facts: ValueFacts, offloads: Offloads) -> None:
        super().__init__(facts)
        self._copy = offloads.open()
        self._witness: torch.Tensor | None = None
        self._version = 0

    def fill(self, root: torch.Tensor) -> None:
        self._witness, self._version = _witness(root), root._version
        self._copy.start((root.as_strided((self.facts.geometry.numel,), (1,)),))

    def get(self) -> torch.Tensor:
        if self._witness is not None and self._witness._version != self._version:
            raise modified(f"value {self.facts.name}", self._witness, self._version)
        return super().get()

    unpack = get

    def held(self) -> tuple[torch.Tensor, ...]:
        """Nothing on the device."""
        return ()

    def _restore(self) -> torch.Tensor:
        if not self._copy.is_started:
            raise never_saved(self.facts.name)
        (root,) = self._copy.take()
        return root


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that counts the writes to `tensor` (Rule E7) and has its shape, without keeping its memory."""
    witness = tensor.detach()
    witness.data = torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return witness
