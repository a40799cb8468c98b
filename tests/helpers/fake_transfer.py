"""Offloads values on the CPU: a stand-in for `host_offload.CudaTransfer`."""

import weakref

import torch


class Handle:
    def __init__(self, number, tensor):
        self.number = number
        self.tensor = tensor
        self.host = tensor.numpy().copy()


class FakeTransfer:
    """Copies to NumPy arrays, whose bytes no count of tensors sees; `log` has what was done to which handle."""

    def reserve(self, sizes):
        self.log.append(("reserve", sorted(sizes)))

    def __init__(self):
        self.log = []
        self.handles = []
        self.sources = []

    def out(self, tensor):
        assert tensor.is_contiguous() and not tensor.requires_grad
        handle = Handle(len(self.handles), tensor)
        self.handles.append(weakref.ref(handle))
        self.log.append(("out", handle.number))
        return handle

    def drop(self, handle):
        handle.tensor = None
        self.log.append(("drop", handle.number))

    def back(self, handle):
        if handle.tensor is None:
            handle.tensor = torch.from_numpy(handle.host.copy())
            self.log.append(("back", handle.number))

    def take(self, handle):
        tensor, handle.tensor = handle.tensor, None
        self.log.append(("take", handle.number))
        return tensor

    @property
    def alive(self):
        return sum(reference() is not None for reference in self.handles)

    def since(self, start):
        return self.log[start:]
