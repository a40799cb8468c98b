"""The state of a call of a block that is recomputed as a whole (Rule E17)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ds_adacc.execute.alive_calls import AliveCall
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.program import transforms
from ds_adacc.program.geometry import Geometry, span
from ds_adacc.program.replay import check_parameters
from ds_adacc.program.slots import Holder, ParameterSlot, Slot
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.second_forward import SecondForward

Around = Callable[[], AbstractContextManager[None]]


class WholeCall:
    """A `PackedCall` of which only the arguments are held: its pack hook, and its state."""

    def __init__(
        self,
        bound: BoundPolicy,
        inputs: Sequence[torch.Tensor],
        beginning: Beginning,
        around: Around,
        alive: AliveCall,
    ) -> None:
        """`beginning`: of its forward. `around`: what its second forward runs in. `alive`: what autograd is to hold."""
        self.bound = bound
        self.alive = alive
        self.diverged = False  # whatever the call saves, its second forward makes that
        given = ((value.index, beginning.held.get(id(inputs[value.source]))) for value in bound.recording.inputs)
        self.holders: dict[int, Holder] = {index: holder for index, holder in given if holder is not None}
        parameters = tuple(bound.recording.parameters)
        self._parameters = {parameter.data_ptr(): parameter for parameter in parameters}
        versions = [parameter._version for parameter in parameters]
        (segment,) = bound.segments.values()
        updates, began_after = segment.updates, segment.updates.count

        @contextmanager
        def in_backward() -> Iterator[None]:
            alive.note_backward()
            check_parameters(parameters, versions, updates.count != began_after)
            with transforms.left(), around():  # Rule R11
                yield

        self._second: SecondForward | None = SecondForward(
            bound.recording.name, beginning, in_backward, keeps=bound.recording.repeats_collectives
        )

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook: a slot that holds nothing, or a parameter."""
        assert self._second is not None, "a call packs nothing once its forward has ended"
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            parameter = self._parameters.get(tensor.data_ptr())
            if parameter is not None and 0 < span(tensor)[1] <= span(parameter)[1]:
                self._second.skip(tensor)
                return ParameterSlot(parameter, Geometry.of(tensor))  # Rule E8
        return self._second.slot(tensor)

    def run_at_gradient_of(self, output: Any, arguments: Any) -> None:
        """As of `SecondForward`."""
        assert self._second is not None, "the forward of the call has just ended"
        self._second.run_at_gradient_of(output, arguments)

    def diverge(self) -> None:
        """There is no course that it could leave."""

    def confirm(self, output: Any) -> None:
        """No compiled graph runs in it."""

    def release(self) -> None:
        """It keeps nothing for a while."""

    def close(self) -> None:
        """Let go of everything at the end of the forward (Rule E5)."""
        self.holders, self._parameters, self._second = {}, {}, None
