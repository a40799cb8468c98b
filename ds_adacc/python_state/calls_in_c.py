"""Which functions in C read or write the data of tensors, or hand work to another thread, and no dispatcher tells."""

from __future__ import annotations

import _queue
import functools
from typing import Any

import torch

from ds_adacc.python_state.content import Unreadable

_OF_TENSORS = frozenset({"numpy", "tolist", "_to_dlpack", "_to_dlpack_versioned", "toDLPack"})
# These compute with numbers that they read from a tensor on the host; the dispatcher is told of the numbers alone. They
# may be given numbers in place of the tensor: that cannot be seen either.
_COMPOSED = frozenset({"tensor_split", "_pad_packed_sequence", "_reshape_from_tensor"})
_OF_GENERATORS = frozenset({"initial_seed", "seed", "get_offset"})  # they tell a number that each step may set
_WRITES = frozenset({"apply_", "map_", "map2_"})  # methods that put the results of a function in place of the elements
_STARTS_THREAD = frozenset({"start_new_thread", "start_joinable_thread"})
# What of TorchScript's operators does the same as the above.
_IN_SCRIPT = ("prim::tolist", "aten::tensor_split", "aten::_pad_packed_sequence", "aten::_reshape_from_tensor")


def reads_data(owner: Any, name: str) -> bool:
    """Whether the function `name` in C gives Python data, or what follows from data. `owner`: its `__self__`."""
    if isinstance(owner, torch.Generator):
        return name in _OF_GENERATORS
    if isinstance(owner, torch.Tensor) or owner is torch._C:
        return name in _OF_TENSORS or name in _COMPOSED or name in _WRITES
    return owner is None and name in _COMPOSED


def writes_data(owner: Any, name: str) -> bool:
    """Whether it writes to `owner`, a tensor, one element after the other."""
    return name in _WRITES and isinstance(owner, torch.Tensor)


def hands_over_work(owner: Any, name: str) -> bool:
    """Whether it starts a thread, or gives work to one that waits for it."""
    return name in _STARTS_THREAD or (name == "put" and isinstance(owner, _queue.SimpleQueue))


def why_unseen(value: Any) -> Unreadable | None:
    """Why it cannot be seen what a function, a method or a module of TorchScript computes with.

    None if it can, and for whatever else the value is.
    """
    if isinstance(value, torch.jit.ScriptFunction):
        return _why_function_is_unseen(value)
    if isinstance(value, torch.jit.ScriptModule):
        methods = [getattr(value, name) for name in value._c._method_names()]
        return next(filter(None, map(_reason, methods)), None)
    return _reason(value) if isinstance(value, torch._C.ScriptMethod) else None


def _reason(script: Any) -> Unreadable | None:
    graph = script.inlined_graph
    kinds = [kind for kind in _IN_SCRIPT if graph.findAllNodes(kind, recurse=True)]
    return Unreadable(type(script), f"it calls {kinds[0]}, which reads data where nothing sees it") if kinds else None


_why_function_is_unseen = functools.lru_cache(256)(_reason)  # a search takes long, and a guard asks at each call
