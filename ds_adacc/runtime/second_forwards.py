"""What a second forward of a block runs in: what it reads must not have changed, and what it leaves is put back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_adacc.execute.block import Block
from ds_adacc.execute.variant import Variant, in_short
from ds_adacc.execute.whole_call import Around
from ds_adacc.program.replay import modified
from ds_adacc.python_state.changes import rewritten
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.guards import Guards, Look
from ds_adacc.python_state.held_tensors import Path, tensor_at
from ds_adacc.python_state.places import marks_of
from ds_adacc.runtime.incoming import Incoming
from ds_adacc.runtime.warnings import Warnings


class SecondForwards:
    """What the second forward of one call runs in (`WholeCall`). Make it before the forward of the call.

    `inside`: what has the blocks inside the block left alone.
    """

    def __init__(self, incoming: Incoming, variant: Variant, inside: Around, warnings: Warnings) -> None:
        self._block: Block = incoming.block
        self._closure: Closure = incoming.call.closure
        self._guards: Guards = incoming.guards
        self._unread = variant.unread
        self._buffers = [(owner, path, _reference(owner(), path)) for owner, path in variant.recording.buffers]
        self._inside = inside
        self._warnings = warnings
        self._versions = [(weakref.ref(tensor), tensor._version) for tensor in incoming.held]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Raises RuntimeError if a number, an object or a tensor that the block holds is another than before."""
        now = self._read()
        changed = rewritten(self._guards, now) - self._unread
        changed = {name for name in changed if not isinstance(now.get(name), Look)}
        if changed:
            raise RuntimeError(
                f"block {self._block.name} reads data into Python, so backward runs its forward a second time, as "
                f"torch.utils.checkpoint does. But {in_short(changed)} has changed since the first began, so the "
                "second would compute something else. If your code changes it, do that after backward. If the forward "
                "itself does, keep it outside of the block, or call the block without a checkpoint"
            )
        for owner, path, reference in self._buffers:
            if tensor_at(owner(), path) is not reference():
                raise RuntimeError(
                    f"block {self._block.name} reads data into Python, so backward runs its forward a second time, as "
                    f"torch.utils.checkpoint does. But its tensor {'.'.join(map(str, path))} is another one than when "
                    "the first began. Replace it after backward, or call the block without a checkpoint"
                )
        for reference, version in self._versions:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise modified("a tensor that a block holds", tensor, version)
        with self._inside(), _put_back(self._closure):
            yield
        effects = rewritten(now, self._read())
        if effects:
            self._block.note_effects(in_short(effects))
            self._warnings.ran_twice(self._block)

    def _read(self) -> Guards:
        reading, _ = self._closure.read(marks_of(self._block.places), self._block.last_reading)
        return reading.marks


@contextmanager
def _put_back(closure: Closure) -> Iterator[None]:
    """Put back the tensors that modules have as attributes, such as an auxiliary loss with the graph of its forward."""
    every = (attributes for module in closure.submodules() for attributes in (vars(module), module._buffers))
    held = [(attributes, _tensors(attributes)) for attributes in every]
    try:
        yield
    finally:
        for attributes, tensors in held:
            attributes.update(tensors)


def _reference(owner: Any, path: Path) -> Callable[[], torch.Tensor | None]:
    tensor = tensor_at(owner, path)
    return (lambda: None) if tensor is None else weakref.ref(tensor)


def _tensors(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in attributes.items() if type(value) is torch.Tensor}
