"""Find outlier channels while a step runs under its plan (section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_adacc.execute.call import Call
from ds_adacc.execute.variant import Variant
from ds_adacc.profile.codec_maker import CodecMaker


class OutlierTracker:
    """A pack hook for `call` that also finds the outlier channels of `values`, and stores them in the variant."""

    def __init__(
        self,
        call: Call,
        variant: Variant,
        codecs: CodecMaker,
        values: Sequence[int],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._call = call
        self._variant = variant
        self._codecs = codecs
        self._values = frozenset(values)
        for index, _ in call.bound.course.inputs:
            if index in self._values:
                self._look(index, inputs[call.bound.recording.values[index].source])

    def __call__(self, tensor: torch.Tensor) -> Any:
        instruction = self._call.next_instruction
        slot = self._call.pack(tensor)
        # The call knows by now whether this is the tensor that the plan expects. Another may be smaller.
        is_expected = instruction is not None and not self._call.diverged
        if is_expected and instruction.root is not None and instruction.value in self._values:
            self._look(instruction.value, instruction.root.view(tensor.detach()))
        return slot

    def _look(self, index: int, root: torch.Tensor) -> None:
        with torch.no_grad():
            value = self._call.bound.recording.values[index]
            self._variant.note_outliers(index, *self._codecs.outliers(root, value))
