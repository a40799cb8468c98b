"""A call that this rank cannot run as planned, while the other ranks run a second forward of the block (Rule T8)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_adacc.execute.block import Block
from ds_adacc.program.replay import check_parameters
from ds_adacc.program.slots import on_one_stream, run_packed
from ds_adacc.python_state.closure import closure_of
from ds_adacc.record.block_call import BlockCall
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.same_again import undisturbing
from ds_adacc.whole_blocks.second_forward import SecondForward
from ds_adacc.whole_blocks.whole_call import Around


def run_as_other_ranks(block: Block, run: functools.partial[Any], inside: Around) -> Any:
    """Run the call, and have backward run it again at the same place as on the other ranks.

    `inside`: what has the blocks inside the block left alone.
    """
    closure = closure_of(run)
    known = next((v.recording for v in block.variants() if v.is_recorded and v.recording.is_whole), None)
    call, parameters = BlockCall((), (), closure, run), list(closure.parameters)
    versions = [parameter._version for parameter in parameters]

    @contextmanager
    def around() -> Iterator[None]:
        check_parameters(parameters, versions, are_updated=False)
        with undisturbing(closure, inside):
            yield

    second = SecondForward(block.name, Beginning(call, known), around, keeps=True)
    with inside():
        output = run_packed(on_one_stream(second.slot), run)
    second.run_at_gradient_of(output, call.arguments)
    return output
