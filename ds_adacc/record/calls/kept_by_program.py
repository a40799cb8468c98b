"""What the program itself keeps of a call until backward or longer, which no plan frees: remarks for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.program.arguments import ParameterRef, tensors_in
from ds_adacc.program.geometry import storage_of
from ds_adacc.python_state.guards import snapshot
from ds_adacc.record.calls.function_call import FunctionCall
from ds_adacc.record.known_tensors import KnownTensors


def kept_by_context(running: FunctionCall, context: Any, known: KnownTensors) -> str:
    """A remark on what the context of a Function holds, which backward will get; "" if that is nothing.

    No hook is told of it, so `known` pins it.
    """
    held = [tensor for tensor in tensors_in(vars(context)) if not isinstance(known.find(tensor), ParameterRef)]
    for tensor in held:
        known.pin(tensor)
    if not held:
        return ""
    return f"{running.cls.__name__}: keeps {_size(held)} in attributes of ctx until backward; no plan frees them"


def kept_by_arguments(arguments: Iterable[Any], known: KnownTensors) -> Iterator[str]:
    """A remark on each argument that keeps what the block has made, as a cache of keys and values does."""
    for each in arguments:
        tensors: list[torch.Tensor] = []
        if isinstance(each, tuple | list | dict):
            items = tuple(each.values()) if isinstance(each, dict) else each
            yield from kept_by_arguments(items, known)
            tensors += (item for item in items if isinstance(item, torch.Tensor))
        elif not isinstance(each, torch.Tensor):
            snapshot(each, tensors)
        kept = [t for t in tensors if any(known.values[index].producer is not None for index in known.in_storage(t))]
        if kept:
            yield (
                f"{type(each).__name__}: an argument of this class keeps {_size(kept)} of what the block has made. No "
                "plan frees that as long as it lives. If it is a cache of keys and values, call the model with "
                "use_cache=False"
            )


def _size(tensors: Iterable[torch.Tensor]) -> str:
    """The bytes of their storages, each counted once."""
    sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return planner.human_bytes(sum(sizes.values()))
