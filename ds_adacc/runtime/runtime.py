"""Executes every block's calls under the plan in force, and meets new blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from ds_adacc.execute.block import Block, Record
from ds_adacc.execute.call import Call
from ds_adacc.plan.block_type import BlockType
from ds_adacc.record.capture import Capture, capture
from ds_adacc.record.closure import Closure, closure_of, with_modules
from ds_adacc.record.recording import Recording
from ds_adacc.record.saved import unpack
from ds_adacc.record.signature import ambient, describe, flatten, refusal
from ds_adacc.rectify.observer import Observer
from ds_adacc.rectify.outlier_tracker import OutlierTracker
from ds_adacc.runtime.step_controller import Steps


class Runtime(Steps):
    """The calls, in the steps that they belong to. `calls` and `recordings` count them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0
        self.recordings = 0
        self._inside = False
        self._warned: set[tuple[str, str]] = set()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)`; what its backward needs is held as the plan says."""
        owner = with_modules(function, args, kwargs)
        return self.run(self.blocks.of(owner), owner, function, args, kwargs)

    def run(self, block: Block, owner: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The same for a block already known, whose tensors and numbers `owner` reaches."""
        if self._inside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key = flatten((args, kwargs), tensors)
        found = closure_of(owner)
        tensors += [t for t in found.tensors if not isinstance(t, nn.Parameter)]
        reason = refusal(tensors)
        if reason is not None:
            self._fall_back(block, reason)
            return function(*args, **kwargs)
        training = getattr(owner, "training", None)
        signature = (key, describe(tensors), ambient(tensors), training)
        self.calls += 1
        self._inside = True
        try:
            if not self._stepped:
                self._advance()
            record = block.find(signature, found.state)
            if record is None or self._is_to_verify(record):
                return self._first(block, signature, found, tensors, lambda: function(*args, **kwargs))
            return self._again(block, record, tensors, function, args, kwargs)
        except BaseException:
            self._live_sets.clear()
            if self.observer is not None:
                self.observer.restart()
            raise
        finally:
            self._inside = False

    def _again(
        self,
        block: Block,
        record: Record,
        tensors: Sequence[torch.Tensor],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        bound = record.bound
        if bound is not None:
            self._note_call(record.block_type)
        if bound is None or (bound.is_trivial and self.observer is None and not self.tracking):
            return function(*args, **kwargs)
        call = Call(bound, tensors)
        pack, done = self._hooks(block, record, call, tensors, self.tracking)
        if bound.recording.runs_compiled:
            pack = torch.compiler.disable(pack)  # where a compiled function's graph breaks, dynamo would compile it
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                output = function(*args, **kwargs)
            done()
        finally:
            call.close()
        return output

    def _hooks(
        self, block: Block, record: Record, call: Call, inputs: Sequence[torch.Tensor], tracking: bool
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[], None]]:
        """The pack hook of a call, and what to do after its forward."""
        pack: Callable[[torch.Tensor], Any] = call.pack
        if tracking:
            values = self.coordinator.block_types[record.block_type].tracked_values(self.config.rectifier.roles)
            pack = OutlierTracker(call, record, self.codecs, values, inputs)
        return (pack, _nothing) if self.observer is None else self.observer.watch(record, block, call, pack)

    def _first(
        self,
        block: Block,
        signature: Hashable,
        found: Closure,
        tensors: Sequence[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        self.recordings += 1
        captured = capture(block.name, tensors, found, run)
        if captured.recording is None:
            self._fall_back(block, captured.reason)
            block.add(signature, Record())
            return captured.output
        recalled = block.recall(captured.recording) if block.latest(signature) is None else None
        record = recalled or Record()
        record.state = found.state
        recording = self._learn(block, signature, record, captured.recording)
        block_type = self._block_type(recording, captured)
        record.block_type = recording.digest
        if recalled is None:
            record.place = block.place_in(record.block_type)
        self._note_call(record.block_type)
        self._note_device(captured.tensors)
        is_proof = self.tracking and record.block_type not in self._tracked
        self._note_outliers(record, block_type, captured.tensors, anew=is_proof)
        self._binder.bind(record, recording, block_type, self._device)
        block.add(signature, record)
        self._tracked.add(record.block_type)
        tracking = self.tracking and recalled is not None and not is_proof
        self._hand_over(block, record, captured, tensors, tracking)
        return captured.output

    def _note_call(self, digest: str) -> None:
        self._live_sets.add(digest)
        if self.observer is None and self.coordinator.block_types[digest].policies is None:
            self.observer = Observer()
            self._began_late = not self._stepped

    def _note_device(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._device is None or self._device.type == "cpu":
            self._device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    def _hand_over(
        self, block: Block, record: Record, captured: Capture, inputs: Sequence[torch.Tensor], tracking: bool
    ) -> None:
        assert record.bound is not None
        call = Call(record.bound, inputs)
        pack, done = self._hooks(block, record, call, inputs, tracking)
        captured.hand_over(pack)
        done()
        call.close()

    # -- records

    def _learn(self, block: Block, signature: Hashable, record: Record, recording: Recording) -> Recording:
        earlier = block.latest(signature)
        if earlier is not None and earlier.bound is not None:
            record.succeed(earlier, earlier.bound.recording, recording)
        return recording.refuse(record.volatile)

    def _block_type(self, recording: Recording, captured: Capture) -> BlockType:
        digest = recording.digest
        if digest not in self.coordinator.block_types:
            if self.observer is not None:
                self.observer.close()  # operators are to be measured, not to be metered
            self.coordinator.add(digest, recording, self.profiler.profile(recording, captured))
        block_type = self.coordinator.block_types[digest]
        block_type.narrow([self.codecs.on_offer(value, recording) for value in recording.values])
        return block_type

    def _note_outliers(
        self, record: Record, block_type: BlockType, tensors: Sequence[torch.Tensor], anew: bool
    ) -> None:
        """The channels that the data shows; not where the record recalls some, unless they are wanted `anew`."""
        for index in block_type.outlier_values:
            value = block_type.recording.values[index]
            if index in record.outliers and not anew:
                record.outliers[index] = tuple(each.to(tensors[index].device) for each in record.outliers[index])
                continue
            order, count = self.codecs.outliers(tensors[index], value)
            record.outliers[index] = order, count
            if block_type.policies is None:
                block_type.capacity[index] = max(int(count), block_type.capacity.get(index, 0))

    def _is_to_verify(self, record: Record) -> bool:
        """At a tracking step the first block of each type is recorded and verified anew, while little else is held."""
        return self.tracking and record.bound is not None and record.block_type not in self._tracked

    def _fall_back(self, block: Block, reason: str) -> None:
        name = block.name.split(" ")[-1]
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            self._log.warning("block %s runs without ds_adacc, under plain autograd: %s", block.name, reason)


def _nothing() -> None:
    pass
