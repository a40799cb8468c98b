"""A call of an `autograd.Function` as an operator of a program: which calls can be one, and how it is run again.

The kernels of a Function may write by address, unseen by the dispatcher. So the call as a whole is the operator: it
takes what `apply` takes, and makes what `apply` returns and what it saves for backward (Rule R15).
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.program.graphs import Extent, extended, is_graph
from ds_adacc.python_state.content import SCALARS, is_known_by_identity
from ds_adacc.python_state.guards import refers_to_more
from ds_adacc.python_state.libraries import is_library
from ds_adacc.python_state.places import Place
from ds_adacc.python_watch.function_watch import has_setup_context

Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # by type of device: whether it is on, and to which dtype it casts

_PLAIN = (*SCALARS, enum.Enum, torch.Generator, torch.memory_format, torch.layout)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
FUNCTION = "function"  # how the names of such operators begin
_OF_CUSTOM_OPERATORS = "torch._library.autograd"  # makes a Function for each; the operator inside is recorded


@dataclass(frozen=True)
class FunctionOperator:
    """Runs the forward of a Function again; it stands where ATen's operators stand in a `RecordedOp`.

    `returned`: how many things a call returns. `saved`: how many tensors it saves for backward. Of a compiled graph:
    `roles`, those of what it saves, if operators inside tell; and what tells it from others
    (`compiled_backward.fingerprint`).
    """

    cls: type[torch.autograd.Function]
    returned: int
    saved: int
    roles: tuple[str | None, ...] = ()
    fingerprint: str = ""

    @property
    def place_of_saved(self) -> slice:
        """Where its operator has what it saves: after what it returns, and before what it has written to."""
        return slice(self.returned, self.returned + self.saved)

    def __str__(self) -> str:
        place = f"{self.cls.__module__}.{self.cls.__qualname__}"
        if not is_graph(self.cls):
            return f"{FUNCTION}.{self.cls.__name__}.{place}"
        return f"{FUNCTION}.compiled graph.{place}.{zlib.crc32(repr(self.roles).encode()):08x}.{self.fingerprint}"

    def __call__(
        self,
        *args: Any,
        needs_input_grad: tuple[bool, ...],
        autocast: Autocast,
        extents: tuple[Extent | None, ...] = (),
    ) -> tuple[Any, ...]:
        """What forward returns, and after it what it saves. In grad mode: what `apply` returns.

        `extents`: by tensor that a compiled graph saves, the memory that it stands for (`graphs.extents`).
        """
        if torch.is_grad_enabled():  # to look at its backward
            with casting(autocast):
                return as_tuple(self.cls.apply(*args))
        context = self.cls._backward_cls()
        context.needs_input_grad = needs_input_grad
        with torch.no_grad(), casting(autocast):
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
            raise RuntimeError(
                f"{self.cls.__module__}.{self.cls.__qualname__}: its forward saves {len(saved)} tensors when backward "
                f"runs it again, and saved {self.saved} in the block's forward. Something that it reads besides its "
                'arguments has changed. ds_adacc.register_function(cls, replay="never") has its results held instead'
            )
        return (*as_tuple(result), *(map(extended, saved, extents) if extents else saved))


def arguments_of(cls: type[torch.autograd.Function]) -> tuple[str, ...]:
    """The names of what `apply` takes."""
    names = tuple(inspect.signature(cls.forward).parameters)
    return names if has_setup_context(cls) else names[1:]


def why_not_one(
    cls: type[torch.autograd.Function], args: tuple[Any, ...], is_guarded: Callable[[Any], bool]
) -> str | None:
    """Why this call is no operator of its own, but its operators are recorded one by one; None if it is one.

    "": no remark for the user, as for the Functions of custom operators.
    An object among its arguments may hold anything, and may be another one at the next call. So may a class that is
    made inside a function, unless it is one that the block's guards know: `is_guarded` tells.
    """
    if cls.__module__ == _OF_CUSTOM_OPERATORS or not issubclass(cls, torch.autograd.Function):
        return ""
    strange = next(_strange(args), None)
    if strange is not None:
        return f"it takes a {strange.__name__}"
    if not (_is_found_again(cls) or is_guarded(cls)) and refers_to_more(cls):
        return "its class is made inside a function at each call, and refers to what is there"
    return None


def _strange(tree: Any) -> Iterator[type]:
    """The classes of what is neither a tensor nor a constant."""
    if type(tree) in (tuple, list, torch.Size):
        for item in tree:
            yield from _strange(item)
    elif not isinstance(tree, (torch.Tensor, *_PLAIN)) and not (isinstance(tree, _FUNCTIONS) and _is_constant(tree)):
        yield type(tree)


def _is_constant(function: types.FunctionType | types.BuiltinFunctionType) -> bool:
    """Whether the function holds nothing: what it reads elsewhere is guarded when it runs."""
    if isinstance(function, types.BuiltinFunctionType):
        return is_known_by_identity(function)
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def _is_found_again(cls: type) -> bool:
    """Whether the class's name leads to it."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def place_of(cls: type) -> dict[str, Place]:
    """Where the class of a user's Function is found, by a name for messages: it may have state of its own."""
    full_name = f"{cls.__module__}.{cls.__qualname__}"
    if is_library(cls.__module__):
        return {}
    if not _is_found_again(cls):
        return {full_name: ({full_name: cls}, full_name)}
    owner: Any = sys.modules[cls.__module__]
    *outer, name = cls.__qualname__.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return {full_name: (vars(owner), name)}


def autocast_now() -> Autocast:
    """Whether operators are cast now: Functions run above autocast."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


@contextmanager
def casting(states: Autocast, cache_enabled: bool = False) -> Iterator[None]:
    """Cast as in forward. The casts are not kept for operators that follow, unless the cache is enabled."""
    with ExitStack() as stack:
        for device, enabled, dtype in states:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled))
        yield


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What `apply` returns, as a tuple."""
    return result if isinstance(result, tuple) else (result,)
