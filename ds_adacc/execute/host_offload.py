"""Values that wait in host memory between forward and backward: the copies out and back, and when they start.

The copies run while the blocks compute. A tensor that is copied out stays on the device while the next call runs; at
the call after that it is dropped. Backward goes through the calls in reverse order: when it comes to one call, the
values of that call and of the call before it start to come back.

The host never waits for a copy. Memory that a copy reads or writes is freed in the order of the stream on which it was
allocated, after that stream has waited for the copy. So what is allocated is what the plan counts, at every moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ds_adacc.execute.pinned_pool import Buffer, PinnedPool


class Transfer(Protocol):
    """Copies to the host and back. Whatever a copy needs, host memory above all, is freed with its handle."""

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make room in host memory for copies of these bytes at once."""

    def out(self, tensor: torch.Tensor) -> Any:
        """Start the copy of a contiguous tensor to the host; returns a handle, which keeps the tensor."""

    def drop(self, handle: Any) -> None:
        """Let the handle's tensor go, as soon as the copy to the host is done. The host does not wait for that."""

    def back(self, handle: Any) -> None:
        """Start the copy back to the device, unless the tensor is still there."""

    def take(self, handle: Any) -> torch.Tensor:
        """The tensor, for use on the current stream. Each `take` needs its own `back` before."""


class Fetched(Protocol):
    """An offloaded value's holder, as far as it is needed here."""

    def drop(self) -> None: ...

    def prefetch(self) -> None: ...


class CudaHandle:
    """A tensor's copy in pinned memory; and the tensor on the device, before it is dropped or after it has come back.

    `tensor` was allocated on `stream`. `copied` is the event of the last copy between it and `host`, part of `memory`.
    """

    __slots__ = ("__weakref__", "copied", "host", "memory", "pool", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream, memory: torch.Tensor, pool: PinnedPool) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream
        self.memory = memory
        self.host = memory[: tensor.nbytes].view(tensor.dtype)
        self.pool = pool
        self.copied: torch.cuda.Event | None = None

    def let_go(self) -> None:
        """Free the tensor in the order of its stream: whoever gets its memory runs after the copy."""
        if self.tensor is not None and self.copied is not None:
            self.stream.wait_event(self.copied)
        self.tensor = None

    def __del__(self) -> None:
        self.let_go()  # never taken
        self.pool.give(Buffer(self.memory, self.copied))


class CudaTransfer:
    """Copies on two streams of their own, one each way.

    What comes back is allocated on the stream that asks for it, as the output of a replay would be. Memory of another
    stream's pool is reused only after the host has seen its last use, and the host runs far ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)
        self._homeward = torch.cuda.Stream(device)
        self._pool = PinnedPool()

    def reserve(self, sizes: Iterable[int]) -> None:
        self._pool.reserve(sizes)

    def out(self, tensor: torch.Tensor) -> CudaHandle:
        current, (memory, free) = torch.cuda.current_stream(self._device), self._pool.take(tensor.nbytes)
        handle = CudaHandle(tensor, current, memory, self._pool)
        self._outward.wait_stream(current)
        if free is not None:
            self._outward.wait_event(free)
        with torch.cuda.stream(self._outward):
            handle.host.copy_(tensor, non_blocking=True)
            handle.copied = self._outward.record_event()
        return handle

    def drop(self, handle: CudaHandle) -> None:
        handle.let_go()

    def back(self, handle: CudaHandle) -> None:
        if handle.tensor is not None:
            return
        current = handle.stream = torch.cuda.current_stream(self._device)  # Rule E9
        handle.tensor = torch.empty_like(handle.host, device=self._device, pin_memory=False)
        self._homeward.wait_stream(current)  # its memory may still be in use there
        self._homeward.wait_event(handle.copied)
        with torch.cuda.stream(self._homeward):
            handle.tensor.copy_(handle.host, non_blocking=True)
            handle.copied = self._homeward.record_event()

    def take(self, handle: CudaHandle) -> torch.Tensor:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(handle.copied)
        tensor, handle.tensor = handle.tensor, None
        if current != handle.stream:
            tensor.record_stream(current)  # freed in the order of one stream, it may still be in use on another
        return tensor


class Offloads:
    """The offloaded values of one call. Their holders keep it alive; it refers to them weakly (Rule E5)."""

    __slots__ = ("__weakref__", "_before", "_expected", "_holders", "transfer")

    def __init__(self, transfer: Transfer, before: Offloads | None) -> None:
        self.transfer = transfer
        self._before = None if before is None else weakref.ref(before)
        self._holders: list[weakref.ref[Fetched]] = []
        self._expected = False

    def add(self, holder: Fetched) -> None:
        self._holders.append(weakref.ref(holder))

    def drop(self) -> None:
        """Let all values go from the device that are still there."""
        for holder in self._alive():
            holder.drop()

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
    """Knows the last two calls of blocks, by weak references, if they offload a value. Each runtime has one."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._last: weakref.ref[Offloads] | None = None
        self._behind: list[weakref.ref[Offloads] | None] = [None, None]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make room in host memory for values of these bytes at once, before the step that offloads them."""
        self._transfer.reserve(sizes)

    def register(self) -> Offloads:
        """Register a call that offloads values."""
        offloads = Offloads(self._transfer, None if self._last is None else self._last())
        self._last = weakref.ref(offloads)
        self._begin(self._last)
        return offloads

    def pass_over(self) -> None:
        """Note a call that offloads nothing."""
        self._begin(None)

    def _begin(self, offloads: weakref.ref[Offloads] | None) -> None:
        """A call begins: the call before the last one gives up its tensors. Their copies had one call's time."""
        before_last, last = self._behind
        self._behind = [last, offloads]
        known = None if before_last is None else before_last()
        if known is not None:
            known.drop()
