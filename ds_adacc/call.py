"""The state of one call of a block: its cells, filled position by position by the pack hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_adacc.cells import (
    UNPLANNED,
    Cell,
    Compressed,
    ParameterSlot,
    Rebuilt,
    Replay,
    Retained,
    Slot,
    ValueSlot,
)
from ds_adacc.plan import Plan, Step, rows


class Call:
    """Lives through the forward of one call; afterwards the slots alone keep the cells they need.

    A position that does not look as recorded (other routing of a mixture of experts) is retained as it comes, and
    so are all that follow: what was dropped before it can be rebuilt from what was saved before it.
    """

    __slots__ = ("_position", "cells", "diverged", "plan")

    def __init__(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.cells = _open(plan)
        self._position = 0
        self.diverged = False
        for index in plan.inputs:
            value = plan.recording.values[index]
            tensor = inputs[value.source] if value.origin == "input" else _buffer(plan, value.source)
            self.cells[index].fill(tensor.detach())

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook."""
        number = self._position
        self._position = number + 1
        steps = self.plan.steps
        if self.diverged or number >= len(steps):
            self.diverged = True
            return keep(tensor)
        step = steps[number]
        if step.dtype is None:
            slot: Slot = keep(tensor)
        elif tensor.shape != step.size or tensor.stride() != step.stride or tensor.dtype is not step.dtype:
            self.diverged = True
            return keep(tensor)
        elif step.value is not None:
            cell = self.cells[step.value]
            if step.fill:
                cell.fill(step.whole(tensor.detach()))
            elif step.hold:
                cell.hold(step.whole(tensor.detach()))
            slot = ValueSlot(cell, step.view)
        elif tensor.data_ptr() == step.parameter.data_ptr() + step.view.start:
            slot = ParameterSlot(step.parameter, step.view)
        else:
            self.diverged = True
            return keep(tensor)
        for index in step.release:
            self.cells[index].pending = None
        return slot

    @property
    def next_step(self) -> Step | None:
        """What the plan says of the next position, if the call still goes as recorded."""
        steps = self.plan.steps
        return None if self.diverged or self._position >= len(steps) else steps[self._position]

    def close(self) -> None:
        """Let go of the cells, at the end of the forward."""
        self.cells = {}


def _open(plan: Plan) -> dict[int, Cell]:
    """Empty cells for one call, linked to what they are rebuilt from."""
    recording, cells = plan.recording, {}
    replays: dict[int, Replay] = {}
    for index in plan.order:
        value = recording.values[index]
        choice = plan.policy.stores[index]
        if choice == "retain":
            cells[index] = Retained(value.name)
        elif choice is not None:
            uses = plan.uses[index]
            cells[index] = Compressed(value.name, plan.codecs[index], value.geometry, rows(value), uses)
        else:
            producer = value.producer
            if producer not in replays:
                op = recording.ops[producer]
                sources = {i: cells[i] for i in op.reads}
                replays[producer] = Replay(op, sources, recording.parameters, plan.output_uses[producer])
            cells[index] = Rebuilt(value.name, replays[producer], value.output)
    return cells


def keep(tensor: torch.Tensor) -> ValueSlot:
    """A slot that retains the tensor as it comes."""
    cell = Retained(UNPLANNED)
    cell.fill(tensor.detach())
    return ValueSlot(cell, None)


def _buffer(plan: Plan, source: int) -> torch.Tensor:
    owner, name = plan.recording.buffers[source]
    return getattr(owner, name)
