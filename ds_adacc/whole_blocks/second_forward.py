"""A second forward of a block, which backward runs before it gets the first saved tensor (Rule E17)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ds_adacc.program.signature import tensors_held_by
from ds_adacc.program.slots import Slot, keep, run_packed
from ds_adacc.whole_blocks.beginning import Beginning


class _Saved(NamedTuple):
    """What the first forward has saved at one position: its slot, if that is to be filled, and the tensor's look."""

    slot: weakref.ref[SecondForwardSlot] | None
    look: tuple[torch.Size, torch.dtype, torch.device]


class SecondForward:
    """The second forward of one call. It gives every slot that is still alive its tensor.

    `around`: what it runs in. `keeps`: a slot keeps its tensor as long as autograd has the slot. A backward may ask for
    one twice, and another forward would call its collectives on this rank alone.
    """

    def __init__(
        self,
        name: str,
        beginning: Beginning,
        around: Callable[[], AbstractContextManager[None]],
        keeps: bool,
    ) -> None:
        self._name = name
        self._keeps = keeps
        self._beginning = beginning
        self._around = around
        self._saved: list[_Saved] = []
        self._has_run = False

    def run_at_gradient_of(self, output: Any, arguments: Any) -> None:
        """Have backward run it as soon as a gradient of the block's output arrives (Rule T8).

        Ranks may save other tensors, so the first one that backward asks for may come at another place on each.
        `arguments`: of the block, which may return one.
        """
        # The graph holds the slots, and they this object. If the graph's node held it too, so would it hold arguments
        # that have been given the output since, in a cycle that Python's collector cannot see.
        has_slots = any(saved.slot is not None for saved in self._saved)
        find: Callable[[], SecondForward | None] = weakref.ref(self) if has_slots else lambda: self

        def arrived(_: Any) -> None:
            forward = find()
            if forward is not None and forward.is_due:
                forward.run()

        for node in nodes_of(output) - nodes_of(arguments):
            node.register_prehook(arrived)

    @property
    def is_due(self) -> bool:
        """Whether it has not run yet, or backward has taken what it has made."""
        slots = (saved.slot() for saved in self._saved if saved.slot is not None)
        return not self._has_run or any(slot is not None and slot.is_empty for slot in slots)

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
        hook = _FillingHook(self)
        try:
            with self._around():
                run_packed(hook, self._beginning.run)
        finally:
            hook.forward = None
        if hook.difference is None and hook.count != len(self._saved):
            hook.difference = f"saves {hook.count} tensors, and the first saved {len(self._saved)}"
        if hook.difference is not None:
            raise self._differs(hook.difference)
        self._has_run = True

    def fill(self, number: int, tensor: torch.Tensor) -> str | None:
        """Fill the slot of what the first forward has saved at this position, if that is alive.

        Returns how the tensor differs from that one, if it does.
        """
        saved = self._saved[number] if number < len(self._saved) else None
        slot = None if saved is None or saved.slot is None else saved.slot()
        if saved is not None and slot is not None:
            if (look := _look(tensor)) != saved.look:
                first, second = _text(*saved.look), _text(*look)
                return f"saves a tensor of {second} where the first saved one of {first}"
            # Whoever asks twice may ask many times, and for all of them: one more forward is enough.
            slot.fill(keep(tensor), keeps=self._keeps or self._has_run)
        return None

    def _differs(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"block {self._name} reads data into Python, so backward runs its forward a second time, as "
            f"torch.utils.checkpoint does. The second forward {what}. The block must compute the same both times. It "
            "does not if something that it reads has changed in between, or if an operator of it is not deterministic. "
            "If you cannot change that, call the block without a checkpoint"
        )


class SecondForwardSlot:
    """A saved tensor that a second forward makes.

    The slot lets go of the tensor as soon as backward has got it. If backward asks again, the forward runs once more.
    From then on all slots of the call keep their tensors.
    """

    __slots__ = ("__weakref__", "_forward", "_inner", "_keeps")

    def __init__(self, forward: SecondForward) -> None:
        self._forward = forward
        self._inner: Slot | None = None
        self._keeps = False

    def fill(self, inner: Slot, keeps: bool) -> None:
        self._inner, self._keeps = inner, keeps

    @property
    def is_empty(self) -> bool:
        """Whether it has no tensor."""
        return self._inner is None

    def unpack(self) -> torch.Tensor:
        if self._inner is None:
            self._forward.run()
        inner = self._inner
        assert inner is not None, "a second forward fills every slot that is alive"
        if not self._keeps:
            self._inner = None
        return inner.unpack()


class _FillingHook:
    """The pack hook of a second forward. Autograd keeps it as long as any part of the graph, so `forward` is cleared.

    `count`: how many tensors were saved. `difference`: the first between what both forwards save. An exception here
    would lose its text where TorchScript saves the tensor.
    """

    def __init__(self, forward: SecondForward) -> None:
        self.forward: SecondForward | None = forward
        self.count = 0
        self.difference: str | None = None

    @torch._disable_dynamo
    def __call__(self, tensor: torch.Tensor) -> _Passed:
        if self.forward is not None and self.difference is None:
            self.difference = self.forward.fill(self.count, tensor)
        self.count += 1
        return _PASSED  # the graph of this forward must hold nothing: the block may keep a part of it


class _Passed:
    """What the graph of a second forward has in place of a saved tensor."""

    def unpack(self) -> torch.Tensor:
        raise RuntimeError(
            "a backward has come to the second forward of a block, which has no graph. Your program calls backward on "
            "a tensor that the block has left in a list or another object, and the block's second forward has replaced "
            "it. Use that tensor before the block's backward, or return it from the block"
        )


_PASSED = _Passed()


def nodes_of(tree: Any) -> set[Any]:
    """Autograd's nodes that have made the tensors in nested containers and objects, and those that they are views of.

    A write in place to a view replaces its own node in the graph.
    """
    tensors = tensors_held_by(tree)
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    return {tensor.grad_fn for tensor in (*tensors, *bases) if tensor.grad_fn is not None}


def _look(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {tuple(shape)} and dtype {str(dtype).removeprefix('torch.')} on {device}"
