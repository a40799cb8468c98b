"""Recompute: hold nothing, and replay the operator that made the value (Rule E1)."""

from __future__ import annotations

import torch

from ds_adacc.program.replay import Rerun, modified, replay, updated
from ds_adacc.program.slots import Holder, Retained

_ONCE = (1,)  # the uses of an operator's only output


class Replay:
    """One operator that backward replays, with those before it that serve it alone.

    Each of its outputs stays cached until its last use (Rule E6).
    """

    __slots__ = ("_cached", "_left", "_updates", "inputs", "parameters", "rerun", "versions")

    def __init__(self, rerun: Rerun, inputs: dict[int, Holder]) -> None:
        self.rerun = rerun
        self.inputs = inputs
        self.parameters: dict[int, torch.Tensor] = {}
        if rerun.read_parameters:  # most operators read none
            self.parameters = {index: rerun.parameters[index] for index in rerun.read_parameters}
            self.versions = [parameter._version for parameter in self.parameters.values()]
            self._updates = rerun.updates.count
        self._cached: list[torch.Tensor | None] | None = None  # until its first use
        self._left: list[int]  # by output, the uses to come of what is cached

    def get(self, output: int) -> torch.Tensor:
        uses = self.rerun.uses
        if uses == _ONCE:  # as most are: nothing is cached
            return self._run()[output]
        if self._cached is None:
            self._cached, self._left = [None] * len(uses), list(uses)
        tensor = self._cached[output]
        if tensor is None:
            outputs = self._run()
            self._cached = [t if n else None for t, n in zip(outputs, uses, strict=False)]
            tensor = outputs[output]
        self._left[output] -= 1
        if self._left[output] <= 0:
            self._cached[output], self._left[output] = None, uses[output]
        return tensor

    def _run(self) -> tuple[torch.Tensor, ...]:
        if self.parameters:
            self._check_parameters()
        # Rule E16. What others make comes first.
        roots = {index: holder.get() for index, holder in self.inputs.items()}
        for op, done in self.rerun.before:
            roots.update(zip(op.outputs, replay(op, roots.__getitem__, self.parameters), strict=False))
            for index in done:
                del roots[index]
        return replay(self.rerun.op, roots.__getitem__, self.parameters)

    def _check_parameters(self) -> None:
        """Rule E7."""
        for parameter, version in zip(self.parameters.values(), self.versions, strict=True):
            if parameter._version != version:
                raise modified("a parameter", parameter, version)
            if self._updates != self.rerun.updates.count:
                raise updated(parameter)


class Rebuilt:
    """One output of a replay.

    Rule E4: until all its sources are saved, the tensor itself is held in `pending`. A forward that diverges in between
    could not rebuild it.
    """

    __slots__ = ("__weakref__", "name", "output", "pending", "replay")

    def __init__(self, name: str, replay: Replay, output: int) -> None:
        self.name = name
        self.replay = replay
        self.output = output
        self.pending: Retained | None = None

    def hold(self, root: torch.Tensor) -> None:
        self.pending = Retained(self.name)
        self.pending.fill(root)

    def get(self) -> torch.Tensor:
        return self.pending.get() if self.pending is not None else self.replay.get(self.output)

    unpack = get

    def held(self) -> tuple[torch.Tensor, ...]:
        return self.pending.held() if self.pending is not None else ()
