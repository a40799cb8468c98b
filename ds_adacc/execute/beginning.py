"""What the forward of a call begins with: all that a second forward of it must find as it was (Rule E17)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ds_adacc.program.dispatch_modes import modes_now, under
from ds_adacc.program.function_operator import autocast_now, casting
from ds_adacc.program.generators import default_generators, named_states, set_named_states, unmoved
from ds_adacc.program.slots import Retained
from ds_adacc.record.block_call import BlockCall

_NAME = "an argument of the block"


class Beginning:
    """The arguments of a call and what is set around it, taken before its forward.

    Tensors are held without their graph. Lists, tuples and dicts are copied, so that the forward may change its own.
    All other objects are the caller's, as they are with torch.utils.checkpoint. `held`: the tensors among the
    arguments, by identity.
    """

    def __init__(self, call: BlockCall) -> None:
        run = call.run
        self.held: dict[int, Retained] = {}
        self._function: Callable[..., Any] = run.func
        self._args, self._kwargs = self._taken(run.args), self._taken(run.keywords)
        generators = (*default_generators(), *call.closure.generators())
        self._states = [(generator, generator.get_state()) for generator in generators]
        self._named = named_states()
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()
        self._autocast, self._caches_casts = autocast_now(), torch.is_autocast_cache_enabled()
        self._modes = modes_now()
        self._devices = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)][-1:]

    def run(self) -> Any:
        """Run the forward once more. All random generators are put back afterwards.

        Raises RuntimeError if an argument was written to since.
        """
        args, kwargs = _given(self._args), _given(self._kwargs)
        with self._as_it_was(), torch.enable_grad():
            return self._function(*args, **kwargs)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        named = named_states()
        with ExitStack() as stack:
            stack.enter_context(unmoved(generator for generator, _ in self._states))
            stack.callback(set_named_states, named)
            stack.enter_context(casting(self._autocast, self._caches_casts))
            stack.enter_context(under(self._modes))
            for mode in self._devices:
                stack.enter_context(mode)
            for generator, state in self._states:
                generator.set_state(state)
            random.setstate(self._of_python)
            np.random.set_state(self._of_numpy)
            set_named_states(self._named)
            yield

    def _taken(self, tree: Any) -> Any:
        if isinstance(tree, torch.nn.Parameter):
            return tree
        if isinstance(tree, torch.Tensor):
            holder = Retained.of(_NAME, tree.detach())
            self.held[id(tree)] = holder
            return _Given(holder, tree.requires_grad, dict(tree.__dict__))
        if type(tree) in (tuple, list):
            return type(tree)(self._taken(item) for item in tree)
        if type(tree) is dict:
            return {key: self._taken(item) for key, item in tree.items()}
        return tree


class _Given:
    """A tensor among the arguments."""

    __slots__ = ("_attributes", "_holder", "_requires_grad")

    def __init__(self, holder: Retained, requires_grad: bool, attributes: dict[str, Any]) -> None:
        self._holder = holder
        self._requires_grad = requires_grad
        self._attributes = attributes

    def tensor(self) -> torch.Tensor:
        tensor = self._holder.get().detach().requires_grad_(self._requires_grad)
        tensor.__dict__.update(self._attributes)
        return tensor


def _given(tree: Any) -> Any:
    if isinstance(tree, _Given):
        return tree.tensor()
    if type(tree) in (tuple, list):
        return type(tree)(_given(item) for item in tree)
    if type(tree) is dict:
        return {key: _given(item) for key, item in tree.items()}
    return tree
