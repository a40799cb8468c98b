"""What one call of a block holds for its backward.

A *cell* stands for a value: retained, compressed, offloaded, or rebuilt by replaying an operator. A *slot* is what the
pack hook returns for one saved tensor: a view of a cell's value, or a parameter. Rules obeyed here:

1. Slots refer to cells, cells to the cells they are rebuilt from, nothing back: no reference cycle, so autograd's
   release of a node frees at once what only that node needed.
2. `get` is idempotent and its order is not assumed: `retain_graph`, partial and repeated backward passes work. The
   count of uses only decides how long a rebuilt tensor stays cached.
3. A retained or offloaded tensor that has been written to since raises, as autograd itself does without hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from ds_adacc.geometry import Geometry
from ds_adacc.kernels import Codec
from ds_adacc.offload import Offloads
from ds_adacc.replay import Rerun, live, modified, replay

UNPLANNED = "unplanned"


class Retained:
    """A value kept as it is."""

    __slots__ = ("__weakref__", "name", "tensor", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensor: torch.Tensor | None = None
        self.version = 0

    def fill(self, root: torch.Tensor) -> None:
        self.tensor = root
        self.version = root._version

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            raise _never_saved(self.name)
        if self.tensor._version != self.version:
            raise modified(f"value {self.name}", self.tensor, self.version)
        return self.tensor

    def held(self) -> tuple[torch.Tensor, ...]:
        return () if self.tensor is None else (self.tensor,)


class Restored(ABC):
    """A value kept in another form: restored on first use, as a flat tensor, and cached until its last."""

    __slots__ = ("__weakref__", "_cached", "_left", "geometry", "name", "uses")

    def __init__(self, name: str, geometry: Geometry, uses: int) -> None:
        self.name = name
        self.geometry = geometry
        self.uses = self._left = uses
        self._cached: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        root = self._cached
        if root is None:
            root = self._cached = self._restore().as_strided(self.geometry.size, self.geometry.stride)
        self._left -= 1
        if self._left <= 0:
            self._cached, self._left = None, self.uses
        return root

    @abstractmethod
    def _restore(self) -> torch.Tensor:
        """All elements, in the order in which they lie in memory. Raises RuntimeError if the cell is empty."""


class Compressed(Restored):
    """A value kept as a codec's payload."""

    __slots__ = ("_device", "codec", "payload", "rows")

    def __init__(self, name: str, codec: Codec, geometry: Geometry, rows: tuple[int, int], uses: int) -> None:
        super().__init__(name, geometry, uses)
        self.codec = codec
        self.rows = rows
        self.payload: tuple[torch.Tensor, ...] | None = None
        self._device: torch.device | None = None

    def fill(self, root: torch.Tensor) -> None:
        self._device = root.device
        flat = root.as_strided(self.rows, (self.rows[1], 1))
        self.payload = self.codec.compress(flat)

    def held(self) -> tuple[torch.Tensor, ...]:
        """What of the payload lies where the value did."""
        return tuple(tensor for tensor in self.payload or () if tensor.device == self._device)

    def _restore(self) -> torch.Tensor:
        if self.payload is None:
            raise _never_saved(self.name)
        return self.codec.decompress(self.payload, torch.Size(self.rows), self.geometry.dtype)


class Offloaded(Restored):
    """A value in host memory, fetched ahead of its use or, if nobody did, at its first use."""

    __slots__ = ("_coming", "_handle", "_version", "_witness", "offloads")

    def __init__(self, name: str, geometry: Geometry, uses: int, offloads: Offloads) -> None:
        super().__init__(name, geometry, uses)
        self.offloads = offloads
        offloads.add(self)
        self._handle: Any = None
        self._coming = False
        self._witness: torch.Tensor | None = None
        self._version = 0

    def fill(self, root: torch.Tensor) -> None:
        self._witness, self._version = _witness(root), root._version
        self._handle = self.offloads.transfer.out(root.as_strided((self.geometry.numel,), (1,)))

    def settle(self) -> None:
        """Wait until the copy to the host is done."""
        if self._handle is not None:
            self.offloads.transfer.settle(self._handle)

    def prefetch(self) -> None:
        """Let the value come back, if it is not here or on its way already."""
        if self._handle is not None and not self._coming and self._cached is None:
            self.offloads.transfer.back(self._handle)
            self._coming = True

    def get(self) -> torch.Tensor:
        if self._witness is not None and self._witness._version != self._version:
            raise modified(f"value {self.name}", self._witness, self._version)
        return super().get()

    def held(self) -> tuple[torch.Tensor, ...]:
        """Nothing on the device."""
        return ()

    def _restore(self) -> torch.Tensor:
        if self._handle is None:
            raise _never_saved(self.name)
        self.offloads.expect()
        self.prefetch()
        self._coming = False
        return self.offloads.transfer.take(self._handle)


class Replay:
    """One operator replayed in backward; its outputs stay cached until each one's last use."""

    __slots__ = ("_cached", "_left", "inputs", "rerun", "versions")

    def __init__(self, rerun: Rerun, inputs: dict[int, Cell]) -> None:
        self.rerun = rerun
        self.inputs = inputs
        self.versions = [parameter._version for parameter in rerun.read_parameters]
        self._left = list(rerun.uses)
        self._cached: list[torch.Tensor | None] = [None] * len(rerun.uses)

    def get(self, output: int) -> torch.Tensor:
        tensor, uses = self._cached[output], self.rerun.uses
        if tensor is None:
            outputs = self._run()
            self._cached = [t if n else None for t, n in zip(outputs, uses, strict=False)]
            tensor = outputs[output]
        self._left[output] -= 1
        if self._left[output] <= 0:
            self._cached[output], self._left[output] = None, uses[output]
        return tensor

    def _run(self) -> tuple[torch.Tensor, ...]:
        for parameter, version in zip(self.rerun.read_parameters, self.versions, strict=True):
            if parameter._version != version:
                raise modified("a parameter", parameter, version)
        roots = {index: cell.get() for index, cell in self.inputs.items()}
        return replay(self.rerun.op, roots.__getitem__, self.rerun.parameters)


class Rebuilt:
    """One output of a replay.

    Until the values it is rebuilt from have all been saved, the tensor itself is kept: a forward that takes another
    turn than the recorded one must not lose it.
    """

    __slots__ = ("__weakref__", "name", "output", "pending", "replay")

    def __init__(self, name: str, replay: Replay, output: int) -> None:
        self.name = name
        self.replay = replay
        self.output = output
        self.pending: Retained | None = None

    def hold(self, root: torch.Tensor) -> None:
        self.pending = Retained(self.name)
        self.pending.fill(root)

    def get(self) -> torch.Tensor:
        return self.pending.get() if self.pending is not None else self.replay.get(self.output)

    def held(self) -> tuple[torch.Tensor, ...]:
        return self.pending.held() if self.pending is not None else ()


Cell = Retained | Compressed | Offloaded | Rebuilt


class ValueSlot:
    """A saved tensor that is a view of a cell's value."""

    __slots__ = ("cell", "view")

    def __init__(self, cell: Cell, view: Geometry | None) -> None:
        self.cell = cell
        self.view = view

    def unpack(self) -> torch.Tensor:
        root = self.cell.get()
        return root if self.view is None else self.view.view(root)


class ParameterSlot:
    """A saved view of a parameter, taken from the live parameter: holding the alias would keep a gathered one alive."""

    __slots__ = ("parameter", "version", "view")

    def __init__(self, parameter: torch.Tensor, view: Geometry) -> None:
        self.parameter = parameter
        self.view = view
        self.version = parameter._version

    def unpack(self) -> torch.Tensor:
        if self.parameter._version != self.version:
            raise modified("a parameter", self.parameter, self.version)
        return self.view.view(live(self.parameter))


Slot = ValueSlot | ParameterSlot


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that counts the writes to `tensor`, and has its shape, but not its memory."""
    witness = tensor.detach()
    witness.data = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
    return witness


def _never_saved(name: str) -> RuntimeError:
    return RuntimeError(f"value {name} is asked for, but this call never saved it")


def unpack(slot: Slot) -> torch.Tensor:
    """The unpack hook."""
    return slot.unpack()
