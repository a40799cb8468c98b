"""Which operators of a block that is being recorded draw random numbers, and from which state (Rule R14)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.generators import default_generators, identity_of, same_state
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recorded_op import Draw
from ds_adacc.program.recording import RecordedValue
from ds_adacc.record.tensors import RecordedTensors


class Draws:
    """Finds the draws of one recorded forward, by looking at the generators' states.

    A call under a plan can note a generator's state where ds_adacc runs anyway: when the call begins, and in the pack
    hook. So a draw is recorded with the states at the calls of the hook just before and just after it.
    """

    def __init__(self, own: Iterable[torch.Generator], values: list[RecordedValue], tensors: RecordedTensors) -> None:
        """`own`: the generators that belong to the block. Of any other, the state at the beginning is not known.

        `values` and `tensors` are the recorder's own; the states are appended to them.
        """
        self._strayed: dict[int, str] = {}  # by operator that drew otherwise, why it is never replayed
        found = {identity_of(each): each for each in (*default_generators(), *own)}
        self._generators, self._identities = tuple(found.values()), found.keys()
        self._values, self._tensors = values, tensors
        self._known: dict[tuple[torch.Generator, int], ValueRef] = {}
        self._pending: dict[int, Draw] = {}  # by operator, since the last call of the pack hook
        self._position = -1
        self._marked: Sequence[torch.Tensor] = self.states()

    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of the generators now."""
        return tuple(generator.get_state() for generator in self._generators)

    def of(self, given: tuple[Any, Any], before: Sequence[torch.Tensor]) -> tuple[Draw | None, str | None]:
        """The draw of an operator that has just run, or why its numbers cannot be drawn again; (None, None): no draw.

        `given`: its arguments. `before`: the states before it ran.
        """
        args, kwargs = given
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Generator) and identity_of(argument) not in self._identities:
                return None, "it draws from a generator that neither the block's modules nor its closure have"
        states = zip(self._generators, before, self.states(), self._marked, strict=True)
        moved = [(generator, *rest) for generator, *rest in states if not same_state(rest[0], rest[1])]
        if not moved:
            return None, None
        if len(moved) > 1:
            return None, "it draws from several generators"
        generator, old, new, marked = moved[0]
        if not same_state(old, marked):
            return None, "its generator was moved or set between the last saved tensor and this draw"
        here = self._position
        return Draw(generator, here + 1, self._state(generator, here, old), self._state(generator, here + 1, new)), None

    def add(self, op: int, draw: Draw) -> None:
        """Note the draw of an operator. The next call of the pack hook must find its generator where it left it."""
        self._pending[op] = draw

    def mark(self, states: Sequence[torch.Tensor]) -> None:
        """Note the states at a call of the pack hook."""
        self._position += 1
        self._marked = states
        for op, draw in self._pending.items():
            found = self._marked[self._generators.index(draw.generator)]
            if not same_state(found, self._tensors[draw.after.index]):
                self._strayed[op] = "its generator was moved or set between this draw and the next saved tensor"
                self._known.pop((draw.generator, draw.position), None)
        self._pending.clear()

    def refusals(self) -> dict[int, str]:
        """Why operators must not be replayed, by index, at the end of the forward."""
        unsaved = "autograd saves nothing after it, so the state of its generator then cannot be noted"
        return {**self._strayed, **dict.fromkeys(self._pending, unsaved)}

    def _state(self, generator: torch.Generator, position: int, state: torch.Tensor) -> ValueRef:
        """The value that is the generator's state at a call of the pack hook."""
        if (generator, position) not in self._known:
            index = len(self._values)
            ref = self._known[generator, position] = ValueRef(index, Geometry.of(state))
            facts = {"source": index, "device": generator.device.type}
            self._values.append(RecordedValue(index, f"generator{index}", "generator", ref.geometry, **facts))
            self._tensors.append(state)
        return self._known[generator, position]
