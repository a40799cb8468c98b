"""A call of a block that has come in, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_adacc.execute.block import Block
from ds_adacc.program.signature import Signature
from ds_adacc.python_state.guards import Guards
from ds_adacc.record.block_call import BlockCall

Run = functools.partial[Any]  # the function of a call, with its arguments


class PlainCall(NamedTuple):
    """A call that no plan decides on. `run` runs it. `is_asked`: as of `Signature`."""

    block: Block
    run: Run
    is_asked: bool


class Incoming(NamedTuple):
    """What is known of the call. `guards`: the marks of what the block depends on now; `held`: the tensors among it.

    The tensors of globals are those at the places that earlier calls have read.
    """

    block: Block
    signature: Signature
    guards: Guards
    held: Sequence[torch.Tensor]
    call: BlockCall

    @property
    def as_plain(self) -> PlainCall:
        """The call, if no plan decides on it."""
        return PlainCall(self.block, self.call.run, self.signature.is_asked)
