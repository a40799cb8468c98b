"""Recompute: hold nothing, and replay the operator that made the value (Rule E1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.execute.bound_segment import BoundSegment
from ds_adacc.program.dispatch_modes import under
from ds_adacc.program.replay import check_parameters, replay
from ds_adacc.program.slots import Holder, Retained

_ONCE = (1,)  # the uses of an operator's only output
Roots = dict[int | None, torch.Tensor]  # by value; None: an output that is no value of its own


class Replay:
    """One operator that backward replays, with those before it that serve it alone.

    Each of its outputs stays cached until its last use (Rule E6).
    """

    __slots__ = ("_cached", "_left", "_updates", "inputs", "modes", "parameters", "segment", "versions")

    def __init__(self, segment: BoundSegment, inputs: dict[int, Holder], modes: Sequence[TorchDispatchMode]) -> None:
        """`modes`: the dispatch modes of the user's in forward, under which it replays too."""
        self.segment = segment
        self.inputs = inputs
        self.modes = modes
        self.parameters: dict[int, torch.Tensor] = {}
        if segment.read_parameters:  # most operators read none
            self.parameters = {index: segment.parameters[index] for index in segment.read_parameters}
            self.versions = [parameter._version for parameter in self.parameters.values()]
            self._updates = segment.updates.count
        self._cached: list[torch.Tensor | None] | None = None  # until its first use
        self._left: list[int]  # by output, the uses to come of what is cached

    def get(self, output: int) -> torch.Tensor:
        """This output, made anew unless it is cached. What it is made from is made first.

        A loop and not a recursion: a scan over hundreds of steps in a block is a chain of as many replays, which would
        exceed the depth of calls that Python allows.
        """
        tensor = self.cached(output)
        if tensor is not None:
            return tensor
        runs = [_Run(self, output)]
        while True:
            run = runs[-1]
            for index, holder in run.inputs:
                if type(holder) is not Recomputed or holder.pending is not None:
                    run.roots[index] = holder.get()
                    continue
                tensor = holder.replay.cached(holder.output)
                if tensor is None:
                    run.waits_for = index
                    runs.append(_Run(holder.replay, holder.output))
                    break
                run.roots[index] = tensor
            else:
                tensor = run.replay.run(run.output, run.roots)
                runs.pop()
                if not runs:
                    return tensor
                runs[-1].roots[runs[-1].waits_for] = tensor

    def cached(self, output: int) -> torch.Tensor | None:
        """This output, if an earlier run has left it: one use of it."""
        cached = self._cached
        if cached is None:
            return None
        tensor = cached[output]
        if tensor is not None:
            self._count(cached, output)
        return tensor

    def run(self, output: int, roots: Roots) -> torch.Tensor:
        """This output, made from `roots`, which it uses up. The others are cached for their uses."""
        if self.modes:
            with under(self.modes):
                outputs = self._outputs(roots)
        else:
            outputs = self._outputs(roots)
        uses = self.segment.uses
        if uses != _ONCE:  # as most are: nothing is cached then
            if self._cached is None:
                self._left = list(uses)
            cached = self._cached = [t if n else None for t, n in zip(outputs, uses, strict=False)]
            self._count(cached, output)
        return outputs[output]

    def _outputs(self, roots: Roots) -> tuple[torch.Tensor, ...]:
        # Rule E16
        for op, done in self.segment.before:
            roots.update(zip(op.outputs, replay(op, roots.__getitem__, self.parameters), strict=False))
            for index in done:
                del roots[index]
        return replay(self.segment.op, roots.__getitem__, self.parameters)

    def _count(self, cached: list[torch.Tensor | None], output: int) -> None:
        self._left[output] -= 1
        if self._left[output] <= 0:
            cached[output], self._left[output] = None, self.segment.uses[output]

    def check_parameters(self) -> None:
        """Rule E7."""
        check_parameters(self.parameters.values(), self.versions, self._updates != self.segment.updates.count)


class _Run:
    """A replay that has begun, with those of its inputs that it has got; it `waits_for` one that is being made."""

    __slots__ = ("inputs", "output", "replay", "roots", "waits_for")

    def __init__(self, replay: Replay, output: int) -> None:
        if replay.parameters:
            replay.check_parameters()
        self.replay = replay
        self.output = output
        self.inputs = iter(replay.inputs.items())
        self.roots: Roots = {}
        self.waits_for = -1


class Recomputed(Holder):
    """One output of a replay.

    Rule E4: until all its sources are saved, the tensor itself is held in `pending`. A forward that diverges in between
    could not rebuild it.
    """

    __slots__ = ("name", "output", "pending", "replay")

    def __init__(self, name: str, replay: Replay, output: int) -> None:
        self.name = name
        self.replay = replay
        self.output = output
        self.pending: Retained | None = None

    def hold(self, root: torch.Tensor) -> None:
        self.pending = Retained.of(self.name, root)

    def release(self) -> None:
        self.pending = None

    def get(self) -> torch.Tensor:
        return self.pending.get() if self.pending is not None else self.replay.get(self.output)

    unpack = get

    def held(self) -> tuple[torch.Tensor, ...]:
        return self.pending.held() if self.pending is not None else ()
