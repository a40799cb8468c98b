"""The states of all random generators that a forward may draw from, for a second forward of it (Rule E17)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ds_adacc.program.generators import default_generators, identity_of, unmoved


class RandomStates:
    """The states of torch's, DeepSpeed's, Python's and NumPy's generators, and of `own`, when this was made.

    Within this context they have those states, and afterwards those before it. It may be entered more than once: if
    backward runs twice, torch's checkpoint enters the same object twice.
    """

    def __init__(self, own: Iterable[torch.Generator] = ()) -> None:
        self._states = [(generator, generator.get_state()) for generator in (*default_generators(), *own)]
        self._named = _named_states()
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()
        self._left: list[ExitStack] = []

    def has(self, generator: torch.Generator) -> bool:
        """Whether it has the state of this generator."""
        return identity_of(generator) in {identity_of(known) for known, _ in self._states}

    def __enter__(self) -> None:
        with ExitStack() as stack:  # if something is raised here, all is put back
            stack.enter_context(unmoved(generator for generator, _ in self._states))
            stack.callback(_set_named_states, _named_states())
            for generator, state in self._states:
                generator.set_state(state)
            random.setstate(self._of_python)
            np.random.set_state(self._of_numpy)
            _set_named_states(self._named)
            self._left.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._left.pop().close()


def _named_states() -> dict[str, torch.Tensor]:
    """The states in DeepSpeed's tracker of random generators, by name (`get_cuda_rng_tracker`): none if it has none.

    `fork` sets the device's generator to one of them, and puts the state that it leaves in its place.
    """
    tracker = _tracker()
    return {} if tracker is None else tracker.get_states()


def _set_named_states(states: dict[str, torch.Tensor]) -> None:
    """Put these states into DeepSpeed's tracker, if it has any."""
    tracker = _tracker()
    if tracker is not None and (states or tracker.get_states()):
        tracker.set_states(dict(states))  # `fork` writes to what it has


def _tracker() -> Any:
    deepspeeds = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    return None if deepspeeds is None else deepspeeds.get_cuda_rng_tracker()
