"""The state of one call of a block: its holders, filled position by position by the pack hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.execute.bound_policy import Plan, Step, rows
from ds_adacc.execute.holders import Compressed, Holder, Offloaded, Rebuilt, Replay, Retained
from ds_adacc.log import get_logger
from ds_adacc.planner import OFFLOAD, RETAIN
from ds_adacc.record.geometry import Geometry, span
from ds_adacc.record.saved import ParameterSlot, Slot, ValueSlot, keep

_warned: set[str] = set()


class Call:
    """Lives through the forward of one call; afterwards the slots alone keep the holders they need.

    A position that does not look as recorded (other routing of a mixture of experts) is retained as it comes, and
    so are all that follow: what was dropped before it can be rebuilt from what was saved before it. A value seen
    again must lie where it was first seen. The first sighting is known by its looks alone: what decides a block's
    course is guarded, and the recorder refuses to rebuild what is first saved after Python has read data.
    """

    __slots__ = ("_position", "_seen", "diverged", "holders", "plan")

    def __init__(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.holders = _open(plan)
        self._position = 0
        self._seen: dict[int, tuple[int, StorageWeakRef | None]] = {}
        self.diverged = False
        for index in plan.inputs:
            value = plan.recording.values[index]
            if value.origin == "input":
                tensor = inputs[value.source]
            else:
                tensor = _buffer(plan, value.source)
                if not _looks_like(tensor, value.geometry):
                    self._diverge()
                    return
            self._seen[index] = tensor.data_ptr(), None
            self.holders[index].fill(tensor.detach())

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook."""
        number = self._position
        self._position = number + 1
        steps = self.plan.steps
        if self.diverged:
            return self._keep(tensor)
        if number >= len(steps) or not self._is_expected(steps[number], tensor):
            self._diverge()
            return self._keep(tensor)
        step = steps[number]
        if step.value is not None:
            slot: Slot = self._save(step, tensor)
        elif step.parameter is not None:
            slot = ParameterSlot(step.parameter, step.view)
        else:
            slot = self._keep(tensor)
        for index in step.release:
            self.holders[index].pending = None
        return slot

    @property
    def next_step(self) -> Step | None:
        """What the plan says of the next position, if the call still goes as recorded."""
        steps = self.plan.steps
        return None if self.diverged or self._position >= len(steps) else steps[self._position]

    def close(self) -> None:
        """Let go of the holders, at the end of the forward."""
        self.holders = {}

    def _is_expected(self, step: Step, tensor: torch.Tensor) -> bool:
        if step.dtype is None:
            return True
        if tensor.shape != step.size or tensor.stride() != step.stride or tensor.dtype is not step.dtype:
            return False
        if step.parameter is not None:
            return tensor.data_ptr() == step.parameter.data_ptr() + step.start
        if step.is_first:
            return step.fits(tensor)
        address, storage = self._seen[step.value]
        return tensor.data_ptr() == address + step.start and (storage is None or not storage.expired())

    def _save(self, step: Step, tensor: torch.Tensor) -> ValueSlot:
        holder = self.holders[step.value]
        if step.again:  # by then its memory may have been freed and given to another tensor
            self._seen[step.value] = tensor.data_ptr() - step.start, StorageWeakRef(tensor.untyped_storage())
        if step.fill:
            holder.fill(step.whole(tensor.detach()))
        elif step.hold:
            holder.hold(step.whole(tensor.detach()))
        return ValueSlot(holder, step.view)

    def _keep(self, tensor: torch.Tensor) -> Slot:
        """A slot for a tensor that the plan does not know; a parameter's alias would keep a gathered one alive."""
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            start, stop = span(tensor)
            for parameter in self.plan.recording.parameters:
                low, high = span(parameter)
                if low <= start < stop <= high:
                    return ParameterSlot(parameter, Geometry.of(tensor, low))
        return keep(tensor)

    def _diverge(self) -> None:
        self.diverged = True
        name = self.plan.recording.name
        if name not in _warned:
            _warned.add(name)
            get_logger().warning(
                "block %s runs a different course than recorded from saved tensor %d of %d on: what the plan does not "
                "know is retained",
                name,
                self._position,
                len(self.plan.steps),
            )


def _open(plan: Plan) -> dict[int, Holder]:
    """Empty holders for one call, linked to what they are rebuilt from."""
    recording, holders = plan.recording, {}
    replays: dict[int, Replay] = {}
    offloads = None if plan.prefetcher is None else plan.prefetcher.register()
    for index in plan.order:
        value = recording.values[index]
        choice = plan.policy.stores[index]
        if choice == RETAIN:
            holders[index] = Retained(value.name)
        elif choice == OFFLOAD:
            holders[index] = Offloaded(value.name, value.geometry, plan.uses[index], offloads)
        elif choice is not None:
            uses = plan.uses[index]
            holders[index] = Compressed(value.name, plan.codecs[index], value.geometry, rows(value), uses)
        else:
            producer = value.producer
            if producer not in replays:
                rerun = plan.replays[producer]
                replays[producer] = Replay(rerun, {i: holders[i] for i in rerun.reads})
            holders[index] = Rebuilt(value.name, replays[producer], value.output)
    return holders


def _buffer(plan: Plan, source: int) -> torch.Tensor | None:
    owner, name = plan.recording.buffers[source]
    return getattr(owner, name, None)


def _looks_like(tensor: torch.Tensor | None, geometry: Geometry) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == geometry.size
        and tensor.stride() == geometry.stride
        and tensor.dtype is geometry.dtype
    )
