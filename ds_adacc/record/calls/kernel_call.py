"""What a call of an operator of the user's does inside, while a block is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.dispatch_modes import BesideCompiled
from ds_adacc.program.geometry import storage_of
from ds_adacc.program.refusals import COLLECTIVE, refusal_of
from ds_adacc.program.schema import LIFTS
from ds_adacc.python_state.places import PythonReads, places_of_kernels
from ds_adacc.record.known_tensors import Unrecordable, require_plain


class KernelCall(BesideCompiled):
    """A call of the operator `func`, which `torch.library` defines, with these arguments.

    What its kernel calls is no part of the program, but tells why not to replay it. `python_reads`: what its kernel
    reads besides its arguments, if that is Python.
    """

    supports_higher_order_operators = True

    def __init__(self, func: Any, given: tuple[Any, Any]) -> None:
        super().__init__()
        self._func = func
        self._refusal: str | None = None
        self.python_reads = PythonReads(places_of_kernels(func))
        self._own = {storage_of(tensor) for tensor in tensors_in(given)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator returns."""
        return self.into_kernel(self._func, args, kwargs)

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the kernel calls."""
        result = func(*args, **kwargs)
        if self._refusal is None:
            self._refusal = self._why_not(func, (args, kwargs), result)
        return result

    def why_not_replayed(self) -> str | None:
        """The first reason found, once the call has ended."""
        changed = self.python_reads.changed()
        return self._refusal or (None if changed is None else f"it keeps state: {changed} changes")

    def _why_not(self, func: Any, given: tuple[Any, Any], result: Any) -> str | None:
        """Why a kernel must not run again that has called this."""
        if refusal_of(func) == COLLECTIVE:
            return COLLECTIVE
        read, made = list(tensors_in(given)), list(tensors_in(result))
        try:
            for tensor in (*read, *made):
                require_plain(tensor)
        except Unrecordable as reason:
            return str(reason)
        if func not in LIFTS and not self._own.issuperset(map(storage_of, read)):
            return "its kernel reads a tensor that is not among its arguments"
        self._own.update(map(storage_of, made))
        return None
