"""What a step has taken of a CUDA device: the bytes allocated, and those that torch has reserved for them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_WORTH_SAYING = 0.1


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the whole process, at its peak. `reserved` beyond `allocated` lies in gaps that no tensor fits into.

    `expandable`: whether torch may close such gaps by expandable segments.
    """

    allocated: int
    reserved: int
    expandable: bool

    @classmethod
    def of(cls, device: torch.device | None) -> DeviceMemory | None:
        """None on the CPU."""
        if device is None or device.type != "cuda":
            return None
        settings = ",".join(os.environ.get(name, "") for name in _SETTINGS).replace(" ", "")
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return cls(*peaks, _EXPANDABLE in settings)

    @property
    def advice(self) -> str | None:
        """What would help, if much is reserved in gaps."""
        if self.expandable or self.reserved - self.allocated <= _WORTH_SAYING * self.reserved:
            return None
        return f"to use the gaps, set {_SETTINGS[0]}={_EXPANDABLE} before the run"
