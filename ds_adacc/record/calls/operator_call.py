"""A call that the dispatcher tells of while a block is recorded, from before it runs to what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.refusals import COLLECTIVE, COMPILED, CONJUGATE, OPAQUE, REPLACED, TAINTED, refusal_of
from ds_adacc.program.schema import (
    CHECK_ERRORS,
    generator_states,
    has_dynamic_shape,
    ignores_first,
    looking_alike,
    reveals_data,
    with_constants,
    without_statistics,
    written_tensors,
)
from ds_adacc.record.calls.kernel_call import KernelCall
from ds_adacc.record.draft import Draft
from ds_adacc.record.executed_call import ExecutedCall
from ds_adacc.record.frames import checks_for_error, may_catch_errors


class OperatorCall:
    """A call of `func` that is about to run, with the arguments `given`.

    What these are before it runs is noted, and the random generators' states.
    """

    def __init__(self, func: Any, given: tuple[tuple[Any, ...], dict[str, Any]], draft: Draft) -> None:
        self._given = given
        self._func = func
        self._draft = draft
        self._encoded = self._encode()
        self._states = draft.draws.states()

    def executed(self, result: Any, kernel: KernelCall | None, has_collective: bool) -> ExecutedCall:
        """The call, which has returned `result`, as an operator that may be one of the program.

        `kernel`: what an operator of the user's has done inside. `has_collective`: a collective was called inside.
        """
        outputs = result if isinstance(result, tuple | list) else (result,)
        written = written_tensors(self._func, self._given)
        refusal = self._refusal(written, has_collective)
        of_kernel = None if kernel is None else kernel.why_not_replayed()
        if of_kernel is not None:
            refusal = refusal or of_kernel
            self._draft.remark(f"{self._func}: never replayed: {refusal}")
        is_read = not self._draft.taint.is_there and reveals_data(self._func, self._given, outputs)
        if self._func is CHECK_ERRORS or (is_read and checks_for_error()):
            is_read = may_catch_errors()
        if is_read:
            self._draft.note_read([*tensors_in(self._given)])
        args, kwargs = self._encoded
        return ExecutedCall(
            func=self._func,
            args=args,
            kwargs=kwargs,
            given=self._given,
            outputs=outputs,
            states=self._states,
            written=written,
            refusal=refusal,
            dynamic=has_dynamic_shape(self._func, self._given),
            handed_on=generator_states(self._func, outputs),
            python_reads=None if kernel is None else kernel.python_reads,
        )

    def _encode(self) -> tuple[Any, Any]:
        """The arguments as a `RecordedOp` has them, and what torch's defaults add (Rule R11)."""
        args, kwargs = self._given
        self._draft.record_unseen_writes(self._given)
        if refusal_of(self._func) in (OPAQUE, COLLECTIVE, REPLACED):
            return (), ()  # never replayed; subgraphs, process groups and memory must not be kept alive
        named = tuple((name, self._draft.encode(value)) for name, value in kwargs.items())
        return with_constants(self._func, (self._encode_positional(without_statistics(self._func, args)), named))

    def _encode_positional(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not ignores_first(self._func, self._given):
            return self._draft.encode(args)
        others = self._draft.encode(args[1:])
        alike = looking_alike(args[0], others)
        return (self._draft.encode(args[0]) if alike is None else alike, *others)

    def _refusal(self, written: Sequence[torch.Tensor], has_collective: bool) -> str | None:
        """Why the call must not be replayed; verifying finds the rest."""
        if self._draft.note_compiled():
            return COMPILED
        if has_collective:
            return COLLECTIVE
        refusal = refusal_of(self._func, self._given[0], not written or bool(self._draft.bases(written)))
        if refusal is None and self._draft.taint.is_there:
            return TAINTED
        if refusal is None and any(tensor.is_conj() or tensor.is_neg() for tensor in tensors_in(self._given)):
            return CONJUGATE
        return refusal
