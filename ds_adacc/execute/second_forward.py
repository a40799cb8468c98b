"""A second forward of a block, which backward runs as soon as it asks for the first saved tensor (Rule E17)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ds_adacc.execute.beginning import Beginning
from ds_adacc.program.slots import Slot, keep, run_packed


class _Saved(NamedTuple):
    """What the first forward has saved at one position: its slot, if that is to be filled, and the tensor's look."""

    slot: weakref.ref[SecondForwardSlot] | None
    look: tuple[torch.Size, torch.dtype, torch.device]


class SecondForward:
    """The second forward of one call. It gives every slot that is still alive its tensor.

    `around`: what it runs in. It must see to it that the blocks inside the block are left alone.
    """

    def __init__(self, name: str, beginning: Beginning, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name = name
        self._beginning = beginning
        self._around = around
        self._saved: list[_Saved] = []

    def slot(self, tensor: torch.Tensor) -> SecondForwardSlot:
        """A slot without its tensor, for a tensor that the first forward saves."""
        slot = SecondForwardSlot(self)
        self._saved.append(_Saved(weakref.ref(slot), _look(tensor)))
        return slot

    def skip(self, tensor: torch.Tensor) -> None:
        """Count a saved tensor that has a slot of another kind."""
        self._saved.append(_Saved(None, _look(tensor)))

    def run(self) -> None:
        """Run the forward again, and fill the slots. Raises RuntimeError if it saves other tensors than the first."""
        count = 0

        def pack(tensor: torch.Tensor) -> _Passed:
            nonlocal count
            if count < len(self._saved):
                self._fill(self._saved[count], tensor)
            count += 1
            return _PASSED  # the graph of this forward must hold nothing: the block may keep a part of it

        with self._around():
            run_packed(pack, self._beginning.run)
        if count != len(self._saved):
            raise self._differs(f"saves {count} tensors, and the first saved {len(self._saved)}")

    def _fill(self, saved: _Saved, tensor: torch.Tensor) -> None:
        slot = None if saved.slot is None else saved.slot()
        if slot is not None:
            if (look := _look(tensor)) != saved.look:
                raise self._differs(
                    f"saves a tensor of {_text(*look)} where the first saved one of {_text(*saved.look)}"
                )
            slot.inner = keep(tensor)

    def _differs(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"block {self._name} reads data into Python, so backward runs its forward a second time, as "
            f"torch.utils.checkpoint does. The second forward {what}. The block must compute the same both times. It "
            "does not if something that it reads has changed in between, or if an operator of it is not deterministic. "
            "If you cannot change that, call the block without a checkpoint"
        )


class SecondForwardSlot:
    """A saved tensor that a second forward makes. The slot gives it up when backward has got it.

    If backward asks again, it keeps the tensor from then on: it may ask many times.
    """

    __slots__ = ("__weakref__", "_forward", "_was_asked", "inner")

    def __init__(self, forward: SecondForward) -> None:
        self._forward = forward
        self._was_asked = False
        self.inner: Slot | None = None

    def unpack(self) -> torch.Tensor:
        if self.inner is None:
            self._forward.run()
        inner = self.inner
        assert inner is not None, "a second forward fills every slot that is alive"
        if not self._was_asked:
            self.inner, self._was_asked = None, True
        return inner.unpack()


class _Passed:
    """What the graph of a second forward has in place of a saved tensor."""

    def unpack(self) -> torch.Tensor:
        raise RuntimeError(
            "a backward has come to the second forward of a block, which only makes what the first one has not kept. "
            "After backward, a tensor that the block has left in an attribute or a list is that of the second forward: "
            "use it before backward, or call the block without a checkpoint"
        )


_PASSED = _Passed()


def _look(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {tuple(shape)} and dtype {str(dtype).removeprefix('torch.')} on {device}"
