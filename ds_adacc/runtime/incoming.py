"""A call of a block that has come in, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ds_adacc.execute.block import Block
from ds_adacc.program.signature import Signature
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.guards import Guards


class Incoming(NamedTuple):
    """What is known of the call. `run` runs it, and returns what the block's own forward returns.

    `guards`: the marks of what the block depends on now. `closure`: all that its function can reach. `tensors`: its
    inputs, and after them the tensors that it reaches, without parameters. `inner`: those in objects among its
    arguments.
    """

    block: Block
    signature: Signature
    guards: Guards
    closure: Closure
    tensors: Sequence[torch.Tensor]
    inner: Sequence[torch.Tensor]
    run: Callable[[], Any]
