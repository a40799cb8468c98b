"""The buffers that a block writes to, such as a count of tokens: a second forward must not write to them once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ds_adacc.program.geometry import storage_of, why_not_plain
from ds_adacc.program.recording import Recording
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.held_tensors import tensor_at

_LARGEST = 1 << 20  # bytes; a count or a statistic is small, and each call holds a copy until its backward

Place = tuple[nn.Module, str]


class WrittenBuffers:
    """What the buffers that a block writes to held before a forward.

    `recording`: tells which ones these are. None: the block is recorded now, so all are kept until `keep` tells.
    """

    def __init__(self, closure: Closure, recording: Recording | None = None) -> None:
        written = None if recording is None else written_by(recording)
        self._contents: list[tuple[list[Place], torch.Tensor, torch.Tensor]] = []  # where it lies, itself, its content
        if written is None or written:
            self._contents = [
                (places, buffer, buffer.detach().clone())
                for buffer, places in _registered(closure)
                if (buffer.nbytes <= _LARGEST if written is None else id(buffer) in written)
            ]

    def keep(self, recording: Recording) -> None:
        """Keep no others than the block writes to, now that it is recorded."""
        written = written_by(recording)
        self._contents = [content for content in self._contents if id(content[1]) in written]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within, the modules have a copy of what a buffer held. Afterwards they have the buffer itself again.

        So nothing writes to a buffer, which autograd would take for a change of what it has saved.
        """
        held = [
            (module._buffers, name, module._buffers[name]) for places, *_ in self._contents for module, name in places
        ]
        try:
            for places, _, content in self._contents:
                copy = content.clone()
                for module, name in places:
                    module._buffers[name] = copy
            yield
        finally:
            for buffers, name, buffer in held:
                buffers[name] = buffer


def why_not_put_back(closure: Closure, recording: Recording) -> str | None:
    """Why a second forward of the recorded block would not find a buffer as it was, to which the first one writes."""
    for value in recording.values:
        buffer = recording.buffer(value) if value.overwritten and value.origin == "buffer" else None
        if buffer is None:
            continue
        name = value.label or value.name
        if buffer.nbytes > _LARGEST:
            return f"it writes to a large tensor that it has not made ({name})"
        for module, path, other in closure.buffers():
            is_itself = other is buffer and len(path) == 1 and path[0] in module._buffers
            if why_not_plain(other) is None and storage_of(other) == storage_of(buffer) and not is_itself:
                return f"it writes to a tensor that it has not made ({name}), of which it holds another view"
    return None


def _registered(closure: Closure) -> list[tuple[torch.Tensor, list[Place]]]:
    """The registered buffers of the modules that are plain tensors, each with the places where it lies."""
    found: dict[int, tuple[torch.Tensor, list[Place]]] = {}
    for module in closure.submodules():
        for name, buffer in module._buffers.items():
            if buffer is not None and why_not_plain(buffer) is None:
                found.setdefault(id(buffer), (buffer, []))[1].append((module, name))
    return list(found.values())


def written_by(recording: Recording) -> set[int]:
    """The identities of the buffers that the block writes to."""
    return {id(tensor_at(owner(), path)) for owner, path in recording.written_buffers}
