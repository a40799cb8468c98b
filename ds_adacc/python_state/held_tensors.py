"""Tensors that lie deeper in what a module holds: in its lists, dicts and objects, and inside other tensors.

A quantized weight is a tensor of a class of its own, in which lie the tensors that its operators read.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_adacc.python_state.content import SCALARS, Items, is_known_by_identity

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, types.NoneType)
_DEPTH = 4
_MOST = 256  # things that are looked at within one attribute

Path = tuple[Any, ...]


def inside(tensor: torch.Tensor | None) -> Items:
    """What a tensor of a class of its own holds, by attribute.

    Those are the tensors that it wraps. A frozen parameter that wraps none has its attributes, in which bitsandbytes
    keeps scales. Those of a trained one are mostly an optimizer's, and change at every step.
    """
    if tensor is None or type(tensor) in _PLAIN or is_lazy(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        return [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return [(name, value) for name, value in vars(tensor).items() if not _is_deepspeeds(name, value)]
    return []


def held_tensors(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors in an attribute of a module, parameters left out: each with the steps that lead there from `value`.

    What a tensor wraps comes in its place.
    """
    return _found(value, (), set())


def _found(thing: Any, path: Path, met: set[int]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Those in what the path leads to. `met`: the identities of what was looked at before."""
    if type(thing) in (*SCALARS, *weakref.ProxyTypes) or id(thing) in met or len(met) >= _MOST:
        return
    met.add(id(thing))
    parts = _parts(thing)
    if not parts and isinstance(thing, torch.Tensor) and not isinstance(thing, nn.Parameter):
        yield path, thing
    elif len(path) < _DEPTH:
        for key, part in parts:
            yield from _found(part, (*path, key), met)


def tensor_at(holder: Any, path: Path) -> Any:
    """What the steps lead to now; None if they lead nowhere."""
    for key in path:
        base = _container(holder)
        try:
            holder = _attribute(holder, key) if base is None else base.__getitem__(holder, key)
        except LookupError:
            return None
    return holder


def _attribute(holder: Any, name: str) -> Any:
    """What the object itself holds under this name, as `held_tensors` has found it: a property may compute more."""
    own = getattr(holder, "__dict__", {})
    return own[name] if name in own else getattr(holder, name, None)


def _is_deepspeeds(name: str, value: Any) -> bool:
    """Whether DeepSpeed may have set this attribute of a parameter: it sets functions, and objects of its own."""
    return name.startswith("ds_") or callable(value) or type(value).__module__.partition(".")[0] == "deepspeed"


def _parts(thing: Any) -> Items:
    if isinstance(thing, torch.Tensor):
        return inside(thing)
    base = _container(thing)
    if base is dict:  # a recording holds the keys, and must keep no object alive by them
        return [(key, value) for key, value in dict.items(thing) if type(key) in SCALARS]
    if base is not None:
        return list(enumerate(base.__iter__(thing)))
    if isinstance(thing, nn.Module) or callable(thing) or is_known_by_identity(thing):
        return []
    own = getattr(thing, "__dict__", None)
    return list(own.items()) if type(own) is dict else []


def _container(thing: Any) -> type | None:
    """The type of container that it is, of which what a class derived from it has overridden is not asked."""
    return next((base for base in (list, tuple, dict) if isinstance(thing, base)), None)
