"""What autograd holds in place of a saved tensor: a *slot*, which unpacks to the tensor.

A slot is a *holder*, if the whole value was saved; or a view of a holder's value, or of a live parameter.
`ds_adacc.execute.holders` has a holder for each choice; recording needs only the one that retains a value as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ds_adacc.program.geometry import Geometry
from ds_adacc.program.replay import live, modified
from ds_adacc.program.stand_in import StandIn
from ds_adacc.python_state.tensor_marks import stride_of

UNPLANNED = "unplanned"  # the name of a value that no plan knows


class Slot(Protocol):
    """Stands for one saved tensor of one call."""

    def unpack(self) -> torch.Tensor:
        """The tensor. May be called any number of times, in any order. Raises RuntimeError if it was never saved."""


class Holder(ABC):
    """Stands for one value of one call, from forward to backward. As a slot, it unpacks to the whole value.

    A holder that stores its value has `fill`. One that may have to keep the tensor itself for a while has `hold` and
    `release`. Only a holder that has them is asked.
    """

    __slots__ = ("__weakref__",)

    @abstractmethod
    def get(self) -> torch.Tensor:
        """The value. May be called any number of times, in any order. Raises RuntimeError if it was never saved."""

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """As `get`."""

    @abstractmethod
    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the holder keeps on the value's device."""

    def fill(self, value: torch.Tensor, /) -> None:
        """Store the value."""
        raise NotImplementedError(f"a {type(self).__name__} stores no value")

    def hold(self, tensor: torch.Tensor, /) -> None:
        """Keep the tensor itself until `release`."""
        raise NotImplementedError(f"a {type(self).__name__} keeps no tensor for a while")

    def release(self) -> None:
        """Let go of the tensor that `hold` has kept."""
        raise NotImplementedError(f"a {type(self).__name__} keeps no tensor for a while")


class Retained(Holder):
    """A value kept as it is."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensor: torch.Tensor | None = None
        self.version = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Retained:
        """The holder of this value, which is no part of the autograd graph."""
        holder = cls(name)
        holder.fill(tensor)
        return holder

    def fill(self, root: torch.Tensor) -> None:
        self.tensor = root
        self.version = root._version

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            raise never_saved(self.name)
        if self.tensor._version != self.version:
            what = "a saved tensor" if self.name == UNPLANNED else f"value {self.name}"
            raise modified(what, self.tensor, self.version)
        return self.tensor

    unpack = get

    def unchanged(self) -> torch.Tensor | None:
        """The value, if nobody has written to it since; else None."""
        return self.tensor if self.tensor is not None and self.tensor._version == self.version else None

    def held(self) -> tuple[torch.Tensor, ...]:
        return () if self.tensor is None else (self.tensor,)


class ValueSlot:
    """A saved tensor that is a view of a holder's value: a part of it, or of another shape."""

    __slots__ = ("holder", "view")

    def __init__(self, holder: Holder, view: Geometry) -> None:
        self.holder = holder
        self.view = view

    def unpack(self) -> torch.Tensor:
        return self.view.part_of(self.holder.get())


class CopyingSlot:
    """A slot that gives a copy each time, with the same strides, for a backward that may write to what it is given."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def unpack(self) -> torch.Tensor:
        return copy_of(self.slot.unpack().detach())  # a parameter's copy has none of its attributes


class NotifyingSlot:
    """A slot that notifies when backward asks for it. Whatever `notify` is bound to lives as long as the slot."""

    __slots__ = ("notify", "slot")

    def __init__(self, slot: Slot, notify: Callable[[], object]) -> None:
        self.slot = slot
        self.notify = notify

    def unpack(self) -> torch.Tensor:
        self.notify()
        return self.slot.unpack()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = tensor.clone()
    if copy.stride() == stride_of(tensor):
        return copy
    whole = tensor.as_strided((Geometry.of(tensor).span // tensor.element_size(),), (1,))  # with its gaps
    return whole.clone().as_strided(tensor.shape, stride_of(tensor))


class ParameterSlot:
    """A saved view of a parameter, taken from the live parameter when backward asks (Rule R5)."""

    __slots__ = ("parameter", "version", "view")

    def __init__(self, parameter: torch.Tensor, view: Geometry) -> None:
        self.parameter = parameter
        self.view = view
        self.version = parameter._version

    def unpack(self) -> torch.Tensor:
        parameter = self.parameter
        if parameter._version != self.version:
            raise modified("a parameter", parameter, self.version)
        data = live(parameter)
        if (not parameter.requires_grad or parameter.__dict__) and self._is_whole():
            return StandIn.of(parameter) if parameter.requires_grad else parameter
        return self.view.view(data)

    def _is_whole(self) -> bool:
        """Whether the parameter itself was saved, not a view of another shape."""
        view, parameter = self.view, self.parameter
        is_same_shape = view.size == parameter.shape and view.stride == stride_of(parameter)
        return is_same_shape and view.start == 0 and view.dtype is parameter.dtype


def keep(tensor: torch.Tensor) -> Retained:
    """A slot that retains `tensor` itself."""
    held = tensor.detach()
    if held.numel() == 0:  # an empty view would keep its whole storage alive; this one still counts writes
        held.data = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
    return Retained.of(UNPLANNED, held)


class SideSlot:
    """A slot whose node runs on another stream than the one on which the call began (Rule E9).

    Its tensor is restored on the latter, `home`. The stream of the node waits for that.
    """

    __slots__ = ("home", "slot")

    def __init__(self, slot: Slot, home: torch.cuda.Stream) -> None:
        self.slot = slot
        self.home = home

    def unpack(self) -> torch.Tensor:
        home, current = self.home, torch.cuda.current_stream(self.home.device)
        home.wait_stream(current)  # for what was done there for this node, such as to gather a parameter
        with torch.cuda.stream(home):
            tensor = self.slot.unpack()
        current.wait_stream(home)
        tensor.record_stream(current)
        return tensor


def never_saved(name: str) -> RuntimeError:
    return RuntimeError(
        f"backward needs the value {name}, which this forward did not save. This is a bug in ds_adacc; please report it"
    )


def unpack(slot: Slot) -> torch.Tensor:
    """The unpack hook."""
    return slot.unpack()


def run_packed(pack: Callable[[torch.Tensor], Slot], run: Callable[[], Any]) -> Any:
    """What `run` returns. Autograd holds in place of each saved tensor what `pack` makes of it.

    Torch's own `saved_tensors_hooks` leaves the hooks there for good if an interrupt (KeyboardInterrupt) comes while it
    begins: Python raises that where a function in C returns. Here the hooks are gone even then.

    A backward within `run` stays on this thread, also on a GPU, for which autograd has threads of its own. There nobody
    would be told of the Python that it runs, and two threads would race for the order in which it saves tensors.
    """
    threads = torch._C._is_multithreading_enabled()
    try:
        torch._C._set_multithreading_enabled(False)
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
            return run()
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:
        torch._C._set_multithreading_enabled(threads)


def on_one_stream(pack: Callable[[torch.Tensor], Slot]) -> Callable[[torch.Tensor], Slot]:
    """The pack hook of a call that begins now, on the current streams: `pack`, and a `SideSlot` where it is needed."""
    if not torch.cuda.is_initialized():
        return pack
    # It runs for each saved tensor (Rule E2), so it makes no stream of Python's.
    current_stream = torch._C._cuda_getCurrentStream
    first = torch._C._cuda_getDevice()
    homes = {first: current_stream(first)}

    def packed(tensor: torch.Tensor) -> Slot:
        slot, device = pack(tensor), tensor.get_device()
        if device < 0:
            return slot
        current = current_stream(device)
        home = homes.setdefault(device, current)
        return slot if home == current else _beside(home, slot, tensor)

    return packed


def _beside(stream: tuple[int, int, int], slot: Slot, tensor: torch.Tensor) -> Slot:
    """The slot of a tensor that was saved on another stream than this. Replays on this may read what is held of it."""
    home = torch.cuda.Stream(**dict(zip(("stream_id", "device_index", "device_type"), stream, strict=True)))
    inner: Any = slot
    while hasattr(inner, "slot"):
        inner = inner.slot
    holder = getattr(inner, "holder", inner)
    if isinstance(holder, Holder):
        for each in (tensor, *holder.held()):
            each.record_stream(home)
    is_as_it_was = inner is slot or type(slot) is ValueSlot
    return slot if is_as_it_was and isinstance(holder, Retained | ParameterSlot) else SideSlot(slot, home)
