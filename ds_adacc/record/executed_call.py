"""A call that has run while a block is recorded, and may be an operator of its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.python_state.python_reads import PythonReads


@dataclass
class ExecutedCall:
    """`args` and `kwargs` are encoded; `given` are the real ones.

    `outputs`: what it returned and, the last `saved` of them, what an `autograd.Function` saved. `states`: the random
    generators' from before. `written`: the tensors that it has written to in place. `dynamic`: its shapes depend on
    data. `handed_on`: the numbers of the outputs that are generators' states (Rule R16). `python_reads`: what its
    kernel has read besides its arguments, if that is Python.
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
    saved: int = 0
    handed_on: frozenset[int] = frozenset()
    python_reads: PythonReads | None = None
