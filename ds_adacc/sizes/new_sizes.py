"""Block types at other input sizes, predicted from recorded ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.log import is_logged
from ds_adacc.plan.agreement import Agreement
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Sizes
from ds_adacc.sizes.adopter import Adopter
from ds_adacc.sizes.origins import Origins
from ds_adacc.sizes.symbolic_program import Example, as_block, fits
from ds_adacc.sizes.symbolic_types import SymbolicTypes


class Predicted(NamedTuple):
    """A block at input sizes at which it was not recorded. `recording`: its program there.

    `has_varied_numbers`: as of `SymbolicProgram`.
    """

    recording: Recording
    has_varied_numbers: bool


class NewSizes:
    """Adds block types at other input sizes to an `Agreement`, and has them forgotten.

    Nothing is communicated: every rank adopts policies for the sizes that it meets itself.
    """

    def __init__(self, agreement: Agreement, blocks: BlockRegistry) -> None:
        self.symbolic_types = SymbolicTypes()
        self.origins = Origins(agreement, self.symbolic_types)
        self.adopter = Adopter(agreement, self.symbolic_types, self.origins)
        self._agreement = agreement
        self._blocks = blocks
        self._predicted = 0  # how many times

    def predict(
        self, example: Example, sizes: Sizes, inputs: Sequence[torch.Tensor], called: Collection[str]
    ) -> Predicted | None:
        """What a block is at these input sizes, as predicted from other sizes.

        `example` is the block's recording at other sizes. None if the recordings so far do not tell. `called`: the
        block types that this pass has called before.
        """
        recording, like = example.recording, example.recording.digest
        program = self.symbolic_types.of(like)
        if program is None or self._agreement.budget.limit is None:
            return None
        if recording.constants not in program.constants or not program.program.tells(sizes, example):
            return None
        has_varied_numbers = bool(sizes.numbers) and program.program.has_varied_numbers
        known = self._agreement.known_types.get(program.at(sizes) or "")
        if known is not None:
            predicted = as_block(known.recording, recording)
            return Predicted(predicted, has_varied_numbers) if fits(predicted, inputs) else None
        predicted = program.program.at(sizes, example)
        if predicted is None or not fits(predicted, inputs):
            return None
        known = self._agreement.known_types.get(predicted.digest)  # with other numbers that decide nothing
        if known is None:
            profile = program.profile.at(sizes, predicted)
            if profile is None:
                return None
            known = self._agreement.add(predicted, profile)
            known.take_over(self._agreement.known_types[like])
            self._log_predicted(predicted, inputs, example)
        self.symbolic_types.note_predicted(predicted.digest, like, sizes)
        self.adopter.adopt_for_type(known, like, called)
        return Predicted(predicted, has_varied_numbers)

    def _log_predicted(self, recording: Recording, inputs: Sequence[torch.Tensor], example: Example) -> None:
        self._predicted += 1
        if is_logged(self._predicted):
            before = iter(example.sizes.lengths)
            changed = [each for each in inputs if tuple(itertools.islice(before, each.dim())) != tuple(each.shape)]
            largest = max(changed or inputs, key=torch.Tensor.numel)
            text = (
                "%s: the input size %s is new. It is not recorded, since recordings at others tell what the block "
                "does, and you need do nothing (such sizes so far: %d)"
            )
            self._agreement.log.info(text, recording.name, tuple(largest.shape), self._predicted)

    def forget_adopted(self, all_but: Collection[str], most: int = 0) -> list[str]:
        """Forget the adopted block types, but for `all_but` and the `most` used last. Returns those forgotten.

        One that comes back is predicted again, and adopts from the plan that is then in force.
        """
        adopted = self._agreement.adopted_types
        names = [name for name in adopted if name not in all_but]
        dropped = names[: max(len(adopted) - most, 0)]
        if dropped:
            self._agreement.forget_adopted(dropped)
            self.symbolic_types.forget(dropped)
            for block in self._blocks.all():
                block.forget(dropped)
            self.forget_unused()
        return dropped

    def forget_unused(self) -> None:
        """Forget the block types of which no block has a variant, and from which no other is predicted or adopted."""
        kept = {variant.digest for _, variant in self._blocks.variants()}
        self._agreement.forget_all_but(kept | {*self.symbolic_types.recorded, *self._agreement.origins.values()})
