"""One call of a block, as the recorder needs to know it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_adacc.python_state.closure import Closure


class BlockCall(NamedTuple):
    """`run` runs the call, and returns what the block's own forward returns.

    `inputs`: the tensors that it is given, and after them those that its function reaches, without parameters. `inner`:
    those in objects among its arguments. `closure`: all that its function can reach.
    """

    inputs: Sequence[torch.Tensor]
    inner: Sequence[torch.Tensor]
    closure: Closure
    run: functools.partial[Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All its arguments."""
        return (*self.run.args, *self.run.keywords.values())
