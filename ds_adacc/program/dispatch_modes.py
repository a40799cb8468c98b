"""Dispatch modes: those of the user's, under which a replay must run as its forward did (Rule R11), and our own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.program.arguments import tensors_in
from ds_adacc.python_state.libraries import is_library

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_BELOW_PYTHON = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)


class BesideCompiled(TorchDispatchMode):
    """What our own modes have in common: compiled code runs compiled under them, as it will in later calls."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.called(func, args, kwargs or {})

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator is called. Returns what the caller gets."""
        return func(*args, **kwargs)

    def into_kernel(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator's kernel with this mode on. So the mode is told of what the kernel calls.

        An operator of higher order has no kernel, and one that is given no tensor does not tell which: these are called
        as usual, and nothing is told of what they call.
        """
        keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors_in((args, kwargs))), _NO_KEYS)
        if keys == _NO_KEYS or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(keys & _BELOW_PYTHON, *args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch asks here whether compiled code may run compiled under this mode.

        If not, Dynamo marks code that it has to compile under the mode, and that code never runs compiled again.
        """
        return True


def modes_now() -> tuple[TorchDispatchMode, ...]:
    """The modes of the user's that are on. Those of torch only look on, such as a counter of operations."""
    if not _len_torch_dispatch_stack():  # as in most calls
        return ()
    modes = map(torch._C._get_dispatch_stack_at, range(_len_torch_dispatch_stack()))
    return tuple(mode for mode in modes if not is_library(type(mode).__module__))


@contextmanager
def under(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Turn on those of the modes that are off. They are not told that they are entered: they were, in the forward."""
    off = [mode for mode in modes if not any(mode is other for other in modes_now())]
    for mode in off:
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in off:
            torch._C._pop_torch_dispatch_stack(None)
