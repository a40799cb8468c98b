"""A call of an `autograd.Function` as an operator of a program: which calls can be one, and how it is run again.

The kernels of a Function may write by address, unseen by the dispatcher. So the call as a whole is the operator (Rule
15): it takes what `apply` takes, and makes what `apply` returns and what it saves for backward.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_adacc.program.recording import FUNCTION
from ds_adacc.python_state.content import SCALARS, is_library
from ds_adacc.python_state.guards import Guards, guards_of_values
from ds_adacc.python_state.watch import Place, marks_of

Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # by type of device: whether it is on, and to which dtype it casts

_PLAIN = (*SCALARS, enum.Enum, torch.Generator, torch.memory_format, torch.layout)
_OF_CUSTOM_OPERATORS = "torch._library.autograd"  # makes a Function for each; the operator inside is recorded


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """Runs the forward of a Function again; it stands where ATen's operators stand in a `RecordedOp`.

    `saved`: how many tensors a call saves for backward. `places`: what its forward reads besides its arguments, and
    `marks`: what was there when it was recorded.
    """

    cls: type[torch.autograd.Function]
    saved: int
    places: Mapping[str, Place] = field(repr=False)
    marks: Guards = field(repr=False)

    def __str__(self) -> str:
        return f"{FUNCTION}.{self.cls.__name__}.{self.cls.__module__}.{self.cls.__qualname__}"

    def __call__(self, *args: Any, needs_input_grad: tuple[bool, ...], autocast: Autocast) -> tuple[Any, ...]:
        """What forward returns, and after it what it saves. In grad mode: what `apply` returns.

        Raises RuntimeError if what forward reads besides its arguments has changed.
        """
        if torch.is_grad_enabled():  # to look at its backward
            with _autocast(autocast):
                return as_tuple(self.cls.apply(*args))
        changed = changes(self.marks, marks_of(self.places))
        if changed is not None:
            raise RuntimeError(
                f"{self.cls.__name__} cannot be replayed: {changed}, which its forward reads, has changed between "
                "forward and backward. Give it as an argument, or change it after backward"
            )
        context = self.cls._backward_cls()
        context.needs_input_grad = needs_input_grad
        with torch.no_grad(), _autocast(autocast):
            given = tuple(
                arg.detach().requires_grad_() if needed else arg
                for arg, needed in zip(args, needs_input_grad, strict=True)
            )
            if has_setup_context(self.cls):
                result = self.cls.forward(*given)
                self.cls.setup_context(context, given, result)
            else:
                result = self.cls.forward(context, *given)
        saved = [tensor for tensor in context.to_save or () if tensor is not None] if self.saved else []
        if len(saved) != self.saved:
            raise RuntimeError(f"it saves {len(saved)} tensors in place of {self.saved}")
        return (*as_tuple(result), *saved)


def has_setup_context(cls: type[torch.autograd.Function]) -> bool:
    """Whether the Function sets up its context apart from forward, which then does not take the context."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def why_not_one(cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why this call is no operator of its own, but its operators are recorded one by one; None if it is one.

    An object among its arguments may hold anything, and may be another one at the next call.
    """
    if cls.__module__ == _OF_CUSTOM_OPERATORS or not issubclass(cls, torch.autograd.Function):
        return ""
    if kwargs:
        return "it is given arguments by name"
    strange = next(_strange(args), None)
    if strange is not None:
        return f"it takes a {strange.__name__}"
    if not _is_found_again(cls) and len(guards_of_values({"": cls})) > 1:
        return "its class is made inside a function, and refers to what is there"
    return None


def _strange(tree: Any) -> Iterator[type]:
    """The classes of what is neither a tensor nor a constant."""
    if type(tree) in (tuple, list, torch.Size):
        for item in tree:
            yield from _strange(item)
    elif not isinstance(tree, torch.Tensor) and not isinstance(tree, _PLAIN):
        yield type(tree)


def _is_found_again(cls: type) -> bool:
    """Whether the class's name leads to it."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def place_of(cls: type) -> dict[str, Place]:
    """Where the class of a user's Function is found, by a name for messages: it may have state of its own."""
    if is_library(cls.__module__) or not _is_found_again(cls):
        return {}
    owner: Any = sys.modules[cls.__module__]
    *outer, name = cls.__qualname__.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return {f"{cls.__module__}.{cls.__qualname__}": (vars(owner), name)}


def changes(before: Guards, after: Guards) -> str | None:
    """The name of something that differs in the two; None if nothing does."""
    if before == after:
        return None
    return next(name for name in {**before, **after} if before.get(name, marks_of) != after.get(name, marks_of))


def autocast_now() -> Autocast:
    """Whether operators are cast now: Functions run above autocast."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


@contextmanager
def _autocast(states: Autocast) -> Iterator[None]:
    """Cast as in forward. The casts are not kept for operators that follow."""
    with ExitStack() as stack:
        for device, enabled, dtype in states:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        yield


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What `apply` returns, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def attributes(result: Iterable[Any], cls: type[torch.autograd.Function]) -> list[Any]:
    """What the Function's `ctx` has as attributes. `result`: what `apply` has returned."""
    nodes = (output.grad_fn for output in result if isinstance(output, torch.Tensor))
    context = next((node for node in nodes if type(node) is cls._backward_cls), None)
    return [] if context is None else list(vars(context).values())
