"""Values that wait in host memory between forward and backward: the copies out and back, and when they start.

The copies run while the blocks compute. Backward goes through the calls in reverse order: when it asks for a value of
one call, the values of that call and of the call before it start to come back.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch


class Transfer(Protocol):
    """Copies to the host and back. Whatever a copy needs, host memory above all, is freed with its handle."""

    def out(self, tensor: torch.Tensor) -> Any:
        """Start the copy of a contiguous tensor to the host; returns a handle. The tensor may be dropped at once."""

    def settle(self, handle: Any) -> None:
        """Block the calling thread until the copy to the host is done."""

    def back(self, handle: Any) -> None:
        """Start the copy back to the device."""

    def take(self, handle: Any) -> torch.Tensor:
        """The tensor that came back, for use on the current stream. Each `take` needs its own `back` before."""


class Fetched(Protocol):
    """An offloaded value's holder, as far as it is needed here."""

    def settle(self) -> None: ...

    def prefetch(self) -> None: ...


class CudaHandle:
    """A tensor's copy in pinned memory, and the copy on the device that is coming back, if any."""

    __slots__ = ("copied", "fetched", "homeward", "host", "ready")

    def __init__(self, host: torch.Tensor, copied: torch.cuda.Event, homeward: torch.cuda.Stream) -> None:
        self.host = host
        self.copied = copied
        self.homeward = homeward
        self.fetched: torch.Tensor | None = None
        self.ready: torch.cuda.Event | None = None

    def __del__(self) -> None:
        if self.fetched is not None:  # never taken: the copy may still be writing to it
            self.fetched.record_stream(self.homeward)


class CudaTransfer:
    """Copies on two streams of their own, one each way. Torch's allocator reuses pinned memory.

    What comes back is allocated on the stream that asks for it, as the output of a replay would be. Memory of another
    stream's pool is reused only after the host has seen its last use, and the host runs far ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)
        self._homeward = torch.cuda.Stream(device)

    def out(self, tensor: torch.Tensor) -> CudaHandle:
        host = pinned(tensor)
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            host.copy_(tensor, non_blocking=True)
            copied = self._outward.record_event()
        tensor.record_stream(self._outward)
        return CudaHandle(host, copied, self._homeward)

    def settle(self, handle: CudaHandle) -> None:
        handle.copied.synchronize()

    def back(self, handle: CudaHandle) -> None:
        current = torch.cuda.current_stream(self._device)  # Rule 9
        handle.fetched = torch.empty_like(handle.host, device=self._device, pin_memory=False)
        self._homeward.wait_stream(current)  # its memory may still be in use there
        self._homeward.wait_event(handle.copied)
        with torch.cuda.stream(self._homeward):
            handle.fetched.copy_(handle.host, non_blocking=True)
            handle.ready = self._homeward.record_event()

    def take(self, handle: CudaHandle) -> torch.Tensor:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(handle.ready)
        tensor, handle.fetched, handle.ready = handle.fetched, None, None
        tensor.record_stream(current)  # nothing to record where it was allocated on this stream
        return tensor


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor like `tensor` in pinned host memory. Raises RuntimeError with the size if there is no room."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        text = (
            f"cannot get {tensor.nbytes} bytes of pinned host memory to offload a value to: {error}; free host memory, "
            "or set adacc.offload to false"
        )
        raise RuntimeError(text) from error


class Offloads:
    """The offloaded values of one call. Their holders keep it alive; it refers to them weakly (Rule 5)."""

    __slots__ = ("__weakref__", "_before", "_expected", "_holders", "transfer")

    def __init__(self, transfer: Transfer, before: Offloads | None) -> None:
        self.transfer = transfer
        self._before = None if before is None else weakref.ref(before)
        self._holders: list[weakref.ref[Fetched]] = []
        self._expected = False

    def add(self, holder: Fetched) -> None:
        self._holders.append(weakref.ref(holder))

    def settle(self) -> None:
        """Wait until all values are in host memory."""
        for holder in self._alive():
            holder.settle()

    def expect(self) -> None:
        """Backward has come to this call: start to bring back its values, and then those of the call before it."""
        if not self._expected:
            self._expected = True
            self._prefetch()
            before = None if self._before is None else self._before()
            if before is not None:
                before._prefetch()

    def _prefetch(self) -> None:
        """The last saved comes first, as backward asks for it first."""
        for holder in reversed(self._alive()):
            holder.prefetch()

    def _alive(self) -> list[Fetched]:
        holders = [reference() for reference in self._holders]
        return [holder for holder in holders if holder is not None]


class Prefetcher:
    """Knows the last two calls that offload a value, by weak references. Each runtime has one.

    The forward may run ahead of the copies by one call, not more: a value still takes device memory while it is copied.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._last: list[weakref.ref[Offloads]] = []

    def register(self) -> Offloads:
        """Register a call that offloads values. Waits for the copies of the call before the last."""
        last = [reference() for reference in self._last]
        if len(last) == 2 and last[0] is not None:
            last[0].settle()
        offloads = Offloads(self._transfer, last[-1] if last else None)
        self._last = [*self._last[-1:], weakref.ref(offloads)]
        return offloads
