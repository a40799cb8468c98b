"""A call of a block that has come in, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_adacc.execute.block import Block
from ds_adacc.program.signature import Signature
from ds_adacc.python_state.guards import Guards
from ds_adacc.record.block_call import BlockCall


class Incoming(NamedTuple):
    """What is known of the call. `guards`: the marks of what the block depends on now; `held`: the tensors among it."""

    block: Block
    signature: Signature
    guards: Guards
    held: Sequence[torch.Tensor]
    call: BlockCall
