"""Count the bytes of storages that are alive, from outside: no word of the code under test is taken for it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Watches every storage that an operator makes while the mode is on; `peak` is the most ever alive at once.

    What is on the meta device takes no memory.
    """

    def __init__(self):
        super().__init__()
        self.made = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        new = [tensor.untyped_storage() for tensor in torch.utils._pytree.tree_leaves(result) if is_tensor(tensor)]
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(t)}
        if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor: what it is given has just been made
            given = set()
        for storage in new:
            if storage._cdata not in given and storage.device.type != "meta":
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        del new
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self):
        """Bytes of the storages made under this mode that still exist."""
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        return sum(size for _, size in self.made.values())


def is_tensor(thing):
    return isinstance(thing, torch.Tensor)
