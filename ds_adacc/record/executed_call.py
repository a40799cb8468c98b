"""A call that has run while a block is recorded, and may be an operator of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.python_state.places import PythonReads


@dataclass
class ExecutedCall:
    """`args` and `kwargs` are encoded; `given` are the real ones.

    `outputs`: what it returned and, the last `saved` of them, what an `autograd.Function` saved. `states`: the random
    generators' from before. `written`: the tensors that it has written to in place. `dynamic`: its shapes depend on
    data. `handed_on`: the numbers of the outputs that are generators' states (Rule R16). `python_reads`: what its
    kernel has read besides its arguments, if that is Python. `detached`: as of `RecordedOp`. `began`: the number of the
    next node of autograd's when it began; None: its node was made earlier.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    given: tuple[Any, Any]
    outputs: Sequence[Any]
    states: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    refusal: str | None
    dynamic: bool
    handed_on: frozenset[int]
    python_reads: PythonReads | None
    saved: int = 0
    detached: bool = False
    began: int | None = None


def is_detached(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no gradient passes through a call that runs now.

    `tensors`: all arguments of a call of the dispatcher's, or all results of a Function. What runs in the forward of an
    `autograd.Function` cannot tell: its backward is the program's own.
    """
    if not torch._C._is_fwd_grad_enabled():  # torch.no_grad leaves that on
        return False
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)
