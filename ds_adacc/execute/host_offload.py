"""What waits in host memory between forward and backward: the copies out and back, and when they start.

That is values, and payloads of compressed values. The copies run while the blocks compute. What is copied out stays on
the device while the next call runs; at the call after that it is dropped. Backward goes through the calls in reverse
order: when it comes to one call, the copies of that call and of the call before it start to come back.

The host never waits for a copy. Memory that a copy reads or writes is freed in the order of the stream on which it was
allocated, after that stream has waited for the copy. So what is allocated is what the plan counts, at every moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ds_adacc.execute.pinned_pool import Buffer, Event, PinnedPool

Tensors = tuple[torch.Tensor, ...]


class Transfer(Protocol):
    """Copies to the host and back. Whatever a copy needs, host memory above all, is freed with its handle."""

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make room in host memory for copies of these bytes at once."""

    def out(self, tensors: Tensors) -> Any:
        """Start the copy of contiguous tensors to the host; returns a handle, which keeps the tensors."""

    def drop(self, handle: Any) -> None:
        """Let the handle's tensors go, as soon as the copy to the host is done. The host does not wait for that."""

    def back(self, handle: Any) -> None:
        """Start the copy back to the device, unless the tensors are still there."""

    def take(self, handle: Any) -> Tensors:
        """The tensors, for use on the current stream. Each `take` needs its own `back` before."""


class CudaHandle:
    """A copy of tensors in pinned memory; and the tensors, before they are dropped or after they have come back.

    `tensors` were allocated on `stream`; while there are none, the tuple is empty. `copied` is the event of the last
    copy between them and `hosts`, which are parts of `memory`. `device`: where the tensors were and will be.
    """

    __slots__ = ("__weakref__", "copied", "device", "hosts", "memory", "pool", "stream", "tensors")

    def __init__(
        self,
        tensors: Tensors,
        stream: torch.cuda.Stream,
        copied: Event,
        hosts: Tensors,
        memory: torch.Tensor,
        pool: PinnedPool,
    ) -> None:
        self.tensors = tensors
        self.device = tensors[0].device
        self.stream = stream
        self.copied = copied
        self.hosts = hosts
        self.memory = memory
        self.pool = pool

    def let_go(self) -> None:
        """Free the tensors in the order of their stream: whoever gets their memory runs after the copy."""
        if self.tensors:
            self.stream.wait_event(self.copied)
        self.tensors = ()

    def __del__(self) -> None:
        self.let_go()  # never taken
        self.pool.give(Buffer(self.memory, self.copied))


class CudaTransfer:
    """Copies on two streams of their own, one each way; a model may be spread over devices, which have two each.

    What comes back is allocated on the stream that asks for it, as the output of a replay would be. Memory of another
    stream's pool is reused only after the host has seen its last use, and the host runs far ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # outward, homeward
        self._streams_of(device)
        self._pool = PinnedPool()

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def reserve(self, sizes: Iterable[int]) -> None:
        self._pool.reserve(sizes)

    def out(self, tensors: Tensors) -> CudaHandle:
        nbytes, device = sum(tensor.nbytes for tensor in tensors), tensors[0].device
        current, (memory, free) = torch.cuda.current_stream(device), self._pool.take(nbytes)
        hosts, (outward, _) = _parts(memory, tensors), self._streams_of(device)
        outward.wait_stream(current)
        if free is not None:
            outward.wait_event(free)
        with torch.cuda.stream(outward):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            copied = outward.record_event()
        return CudaHandle(tensors, current, copied, hosts, memory, self._pool)

    def drop(self, handle: CudaHandle) -> None:
        handle.let_go()

    def back(self, handle: CudaHandle) -> None:
        if handle.tensors:
            return
        current = handle.stream = torch.cuda.current_stream(handle.device)  # Rule E9
        tensors = tuple(torch.empty_like(host, device=handle.device, pin_memory=False) for host in handle.hosts)
        handle.tensors = tensors
        _, homeward = self._streams_of(handle.device)
        homeward.wait_stream(current)  # its memory may still be in use there
        homeward.wait_event(handle.copied)
        with torch.cuda.stream(homeward):
            for tensor, host in zip(tensors, handle.hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
            handle.copied = homeward.record_event()

    def take(self, handle: CudaHandle) -> Tensors:
        current = torch.cuda.current_stream(handle.device)
        current.wait_event(handle.copied)
        tensors, handle.tensors = handle.tensors, ()
        if current != handle.stream:
            for tensor in tensors:
                tensor.record_stream(current)  # freed in the order of one stream, it may still be in use on another
        return tensors


def _parts(memory: torch.Tensor, tensors: Tensors) -> Tensors:
    """Parts of `memory` for copies of these tensors, one behind the other, in the order of the tensors.

    Those of the largest elements lie first, so that each part begins at a multiple of its elements' size.
    """
    found, start = {}, 0
    for index, tensor in sorted(enumerate(tensors), key=lambda pair: -pair[1].itemsize):
        end = start + tensor.nbytes
        found[index] = memory[start:end].view(tensor.dtype).view(tensor.shape)
        start = end
    return tuple(found[index] for index in range(len(tensors)))


class HostCopy:
    """What one holder has in host memory: the tensors of a value or of a payload."""

    __slots__ = ("__weakref__", "_handle", "_is_coming", "_is_taken", "_offloads")

    def __init__(self, offloads: Offloads) -> None:
        self._offloads = offloads
        self._handle: Any = None
        self._is_coming = self._is_taken = False

    @property
    def is_started(self) -> bool:
        return self._handle is not None

    def start(self, tensors: Tensors) -> None:
        """Start the copy of contiguous tensors to the host."""
        self._handle = self._offloads.transfer.out(tensors)

    def drop(self) -> None:
        """Let the tensors go from the device: the copy to the host has had its time."""
        if self.is_started and not self._is_coming:
            self._offloads.transfer.drop(self._handle)

    def prefetch(self) -> None:
        """Start to bring the tensors back, unless backward has them or they are on their way."""
        if self.is_started and not self._is_coming and not self._is_taken:
            self._bring_back()

    def take(self) -> Tensors:
        """The tensors. What else the call has offloaded starts to come back too."""
        self._offloads.expect()
        if not self._is_coming:
            self._bring_back()
        self._is_coming, self._is_taken = False, True
        return self._offloads.transfer.take(self._handle)

    def _bring_back(self) -> None:
        self._offloads.transfer.back(self._handle)
        self._is_coming = True


class Offloads:
    """What one call has offloaded. The holders keep it and their copies alive; it refers to these weakly (Rule E5)."""

    __slots__ = ("__weakref__", "_before", "_copies", "_expected", "transfer")

    def __init__(self, transfer: Transfer, before: Offloads | None) -> None:
        self.transfer = transfer
        self._before = None if before is None else weakref.ref(before)
        self._copies: list[weakref.ref[HostCopy]] = []
        self._expected = False

    def open(self) -> HostCopy:
        """A copy for one holder, which keeps it."""
        copy = HostCopy(self)
        self._copies.append(weakref.ref(copy))
        return copy

    def drop(self) -> None:
        """Let all go from the device that is still there."""
        for copy in self._alive():
            copy.drop()

    def expect(self) -> None:
        """Backward has come to this call: start to bring back its copies, and then those of the call before it."""
        if not self._expected:
            self._expected = True
            self._prefetch()
            before = None if self._before is None else self._before()
            if before is not None:
                before._prefetch()

    def _prefetch(self) -> None:
        """The last saved comes first, as backward asks for it first."""
        for copy in reversed(self._alive()):
            copy.prefetch()

    def _alive(self) -> list[HostCopy]:
        copies = [reference() for reference in self._copies]
        return [copy for copy in copies if copy is not None]


class Prefetcher:
    """Knows the last two calls of blocks, by weak references, if they offload anything. Each runtime has one."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._last: weakref.ref[Offloads] | None = None
        self._behind: list[weakref.ref[Offloads] | None] = [None, None]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make room in host memory for copies of these bytes at once, before the step that makes them."""
        self._transfer.reserve(sizes)

    def register(self) -> Offloads:
        """Register a call that offloads something."""
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
