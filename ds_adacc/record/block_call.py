"""One call of a block, as the recorder needs to know it."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

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

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """All tensors that it is given, in objects too."""
        return (*self.inputs, *self.inner)

    @property
    def is_forward(self) -> bool:
        """Whether it is the forward of a module. The module's own hooks run around it."""
        func = self.run.func
        is_method = isinstance(func, types.MethodType) and isinstance(func.__self__, nn.Module)
        return is_method and func.__name__ == "forward"
