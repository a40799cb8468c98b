"""Offloads values on the CPU: a stand-in for `host_offload.CudaTransfer`."""

import weakref

import torch


class Handle:
    def __init__(self, number, tensors):
        self.number = number
        self.tensors = tensors
        self.hosts = [tensor.numpy().copy() for tensor in tensors]


class FakeTransfer:
    """Copies to NumPy arrays, whose bytes no count of tensors sees; `log` has what was done to which handle."""

    def reserve(self, sizes):
        self.log.append(("reserve", sorted(sizes)))

    def __init__(self):
        self.log = []
        self.handles = []
        self.sources = []

    def out(self, tensors):
        assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors)
        handle = Handle(len(self.handles), tensors)
        self.handles.append(weakref.ref(handle))
        self.log.append(("out", handle.number))
        return handle

    def drop(self, handle):
        handle.tensors = None
        self.log.append(("drop", handle.number))

    def back(self, handle):
        if handle.tensors is None:
            handle.tensors = tuple(torch.from_numpy(host.copy()) for host in handle.hosts)
            self.log.append(("back", handle.number))

    def take(self, handle):
        tensors, handle.tensors = handle.tensors, None
        self.log.append(("take", handle.number))
        return tensors

    @property
    def alive(self):
        return sum(reference() is not None for reference in self.handles)

    def since(self, start):
        return self.log[start:]
