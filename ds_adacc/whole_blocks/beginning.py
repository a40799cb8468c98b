"""What the forward of a call begins with: all that a second forward of it must find as it was (Rule E17)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ds_adacc.program.arguments import generators_in
from ds_adacc.program.dispatch_modes import modes_now, under
from ds_adacc.program.function_operator import autocast_now, casting
from ds_adacc.program.random_states import RandomStates
from ds_adacc.program.recording import Recording
from ds_adacc.program.slots import Retained
from ds_adacc.python_state.changes import is_number, rewritten
from ds_adacc.python_state.content import SCALARS
from ds_adacc.python_state.guards import Guards, guards_of_values
from ds_adacc.python_state.identity import identity_mark
from ds_adacc.python_state.tensor_marks import TensorMark, version_of
from ds_adacc.record.block_call import BlockCall
from ds_adacc.whole_blocks.reached import Reached
from ds_adacc.whole_blocks.written_buffers import WrittenBuffers


class Beginning:
    """The arguments of a call and what is set around it, taken before its forward.

    Tensors are held without their graph. Lists, tuples and dicts are copied, so that the forward may change its own.
    What is the same object at two places is so in the second forward too. All other objects are the caller's, as they
    are with torch.utils.checkpoint. So a number or a tensor in one of them must not change. `held`: the tensors among
    the arguments, by identity. `reached`: what the function reaches by itself. `buffers`: those to which the forward
    writes. `random`: the states of the random generators.
    """

    def __init__(self, call: BlockCall, recording: Recording | None = None) -> None:
        """`recording`: that of the block; None: it is recorded now."""
        run = call.run
        self.buffers = WrittenBuffers(call.closure, recording)
        self.reached = Reached(run.func)
        self.held: dict[int, Retained] = {}
        self._function: Callable[..., Any] = run.func
        self._objects: list[Any] = []
        self._arguments = _copied((run.args, run.keywords), self._taken, {})
        # What the block's own modules hold is seen to by `SameAgain` and `buffers`.
        own = {id(tensor) for *_, tensor in call.closure.buffers()} if self._objects else ()
        self._contents = _contents_of(self._objects, own)
        self.random = RandomStates((*call.closure.generators(), *generators_in(call.arguments)))
        self._autocast, self._caches_casts = autocast_now(), torch.is_autocast_cache_enabled()
        self._modes = modes_now()
        self._devices = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)][-1:]

    def run(self) -> Any:
        """Run the forward once more. All random generators are put back afterwards.

        Raises RuntimeError if an argument was written to since, if a number or a tensor in an object among them has
        changed, or if the function reaches something else by itself.
        """
        self.reached.check()
        if (changed := self.changed()) is not None:
            raise RuntimeError(
                "backward runs the forward of a block a second time, as torch.utils.checkpoint does. But "
                f"{changed} has changed since the first began, so the second would compute something else. Change "
                "it after backward, or give each call an object of its own"
            )
        state = self.random, casting(self._autocast, self._caches_casts), under(self._modes), self.buffers.as_before()
        with ExitStack() as stack:
            for context in (*state, *self._devices, torch.enable_grad()):
                stack.enter_context(context)
            args, kwargs = _copied(self._arguments, _given, {})
            return self._function(*args, **kwargs)

    def changed(self) -> str | None:
        """A number or a tensor in an object among the arguments that is another now; None if there is none."""
        return min(rewritten(self._contents, _contents_of(self._objects)), default=None) if self._contents else None

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) not in SCALARS:
                self._objects.append(leaf)
            return leaf
        holder = self.held[id(leaf)] = Retained.of("an argument of the block", leaf.detach())
        # Without a graph of its own it keeps nothing else alive, so it is passed again itself.
        return _Given(holder, leaf if leaf.grad_fn is None else None, dict(leaf.__dict__))


def _contents_of(objects: Sequence[Any], but: Collection[int] = ()) -> Guards:
    """The marks of the numbers that these objects hold; of the tensors, which ones they are and how often written to.

    `but`: the identities of tensors that are left out.
    """
    found: list[torch.Tensor] = []
    values = {f"argument of type {type(each).__name__} ({number})": each for number, each in enumerate(objects)}
    marks = guards_of_values(values, found)
    numbers = {name: mark for name, mark in marks.items() if is_number(mark)}
    looks = (name for name, mark in marks.items() if type(mark) is TensorMark)
    tensors = ((name, tensor) for name, tensor in zip(looks, found, strict=False) if id(tensor) not in but)
    return numbers | {name: (identity_mark(each), version_of(each)) for name, each in tensors}


class _Given:
    """A tensor among the arguments: `itself`, or what its `holder` has."""

    __slots__ = ("_attributes", "_holder", "_itself")

    def __init__(self, holder: Retained, itself: torch.Tensor | None, attributes: dict[str, Any]) -> None:
        self._holder = holder
        self._itself = itself
        self._attributes = attributes

    def tensor(self) -> torch.Tensor:
        held = self._holder.get()  # which raises if it was written to
        if self._itself is not None:
            return self._itself
        leaf = held.detach().requires_grad_()
        tensor = leaf.view_as(leaf)  # no leaf, as the argument was none
        tensor.__dict__.update(self._attributes)
        return tensor


def _given(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, _Given) else leaf


def _copied(tree: Any, leaf: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """A copy of a tree of plain tuples, lists and dicts, with `leaf` of each leaf. `known`: the copies, by identity."""
    if id(tree) not in known:
        if type(tree) in (tuple, list):
            copy = type(tree)([_copied(item, leaf, known) for item in tree])
        elif type(tree) is dict:
            copy = {key: _copied(item, leaf, known) for key, item in tree.items()}
        else:
            copy = leaf(tree)
        known[id(tree)] = copy
    return known[id(tree)]
