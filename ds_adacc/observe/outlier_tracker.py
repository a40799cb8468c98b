"""Find outlier channels while a step runs under its plan (section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_adacc.execute.call import Call
from ds_adacc.execute.variant import Variant
from ds_adacc.profile.codec_maker import CodecMaker


def tracking_outliers(
    call: Call, variant: Variant, codecs: CodecMaker, values: Sequence[int], inputs: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], Any]:
    """The call's pack hook, which also finds the outlier channels of `values`, and stores them in the variant.

    Those of the block's inputs are found at once.
    """
    recorded, tracked = call.bound.recording.values, frozenset(values)

    @torch.no_grad()
    def look(index: int, root: torch.Tensor) -> None:
        variant.note_outliers(index, *codecs.outliers(root, recorded[index]))

    def pack(tensor: torch.Tensor) -> Any:
        instruction = call.next_instruction
        slot = call.pack(tensor)
        # The call knows by now whether this is the tensor that the plan expects. Another may be smaller.
        is_expected = instruction is not None and not call.diverged
        if is_expected and instruction.first is not None and instruction.value in tracked:
            look(instruction.value, instruction.first.root.view(tensor.detach()))
        return slot

    for index, _ in call.bound.course.inputs:
        if index in tracked:
            look(index, inputs[recorded[index].source])
    return pack
