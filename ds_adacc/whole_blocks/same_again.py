"""Has a second forward compute the same again: what it reads must not have changed, and what it leaves is put back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ds_adacc.execute.block import Block
from ds_adacc.execute.incoming import Incoming
from ds_adacc.execute.variant import Variant
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.replay import modified
from ds_adacc.python_state.changes import rewritten
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.guard_history import in_short
from ds_adacc.python_state.guards import Guards
from ds_adacc.python_state.held_tensors import Path, tensor_at
from ds_adacc.python_state.places import marks_of
from ds_adacc.python_state.tensor_marks import TensorMark, version_of
from ds_adacc.whole_blocks.whole_call import Around
from ds_adacc.whole_blocks.written_buffers import written_by

_SECOND_FORWARD = "a second forward"  # beside the modules' numbers, by which ZeRO-3 knows who uses a parameter


class SameAgain:
    """What the second forward of one call runs in (`WholeCall`).

    Make it before the forward or, of a recorded call, right after it. Call `end_forward` when the forward has ended.

    It sees to the block and to globals; `reached` sees to the variables around its function.

    `inside`: what has the blocks inside the block left alone. `on_effects` is told if the second forward has changed
    something: the block, and whether its forward will be run again all the same.
    """

    def __init__(
        self,
        incoming: Incoming,
        variant: Variant,
        inside: Around,
        on_effects: Callable[[Block, bool], None],
    ) -> None:
        self._block: Block = incoming.block
        self._closure: Closure = incoming.call.closure
        self._is_forward = incoming.call.is_forward
        self._guards: Guards = self._read_by_forward(incoming.guards)
        self._unread = variant.history.unread
        self._stays = variant.recording.repeats_collectives
        self._buffers = [(owner, path, _reference(owner(), path)) for owner, path in variant.recording.buffers]
        self._inside = inside
        self._on_effects = on_effects
        # What the forward itself writes to, the second one finds as it was (`WrittenBuffers`).
        written = written_by(variant.recording)
        self._held = {  # by identity, with the version that each must have
            id(tensor): (weakref.ref(tensor), None if id(tensor) in written else version_of(tensor))
            for tensor in incoming.held
        }

    def end_forward(self) -> None:
        """The forward has ended. What it has put another tensor in the place of, the second may do that with too."""
        _, held = self._read()
        self._held = {address: self._held[address] for address in map(id, held) if address in self._held}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Raises RuntimeError if a number, an object or a tensor that the block holds is another than before."""
        now, held = self._read()
        changed = rewritten(self._guards, now) - self._unread
        changed = {name for name in changed if not isinstance(now.get(name), TensorMark)}
        if changed:
            raise RuntimeError(
                f"block {self._block.name} reads data into Python, so backward runs its forward a second time, as "
                f"torch.utils.checkpoint does. But {in_short(changed)} has changed since the first began, so the "
                "second would compute something else. If your code changes it, do that after backward. If the forward "
                "itself does, keep it outside of the block, or call the block without a checkpoint"
            )
        for owner, path, reference in self._buffers:
            if tensor_at(owner(), path) is not reference():
                raise RuntimeError(
                    f"block {self._block.name} reads data into Python, so backward runs its forward a second time, as "
                    f"torch.utils.checkpoint does. But its tensor {'.'.join(map(str, path))} is another one than when "
                    "the first began. Replace it after backward, or call the block without a checkpoint"
                )
        present, is_replaced = set(map(id, held)), False
        for address, (reference, version) in self._held.items():
            tensor = reference()
            if tensor is None or address not in present:
                is_replaced = True
            elif version is not None and version_of(tensor) != version:
                change = modified("a tensor that a block holds", tensor, version)
                remedy = "If the block's own forward does that with some data only, keep it outside of the block"
                raise RuntimeError(f"block {self._block.name}: {change}. {remedy}")
        # In the place of what is gone may be a tensor that the block never reads, as in a table of many blocks.
        others = {address for address in present if address not in self._held} if is_replaced else set()
        with (
            undisturbing(self._closure, self._inside),
            _Refusing(self._block.name, others) if others else nullcontext(),
        ):
            yield
        effects = rewritten(now, self._read()[0])
        if effects:
            self._block.note_effects(in_short(effects))
            self._on_effects(self._block, self._stays)

    def _read(self) -> tuple[Guards, list[torch.Tensor]]:
        """The marks of what there is now, in globals too, and the tensors in it."""
        found: list[torch.Tensor] = []
        reading, held = self._closure.read(marks_of(self._block.places, found), self._block.last_reading)
        return self._read_by_forward(reading.marks), [*held, *found]

    def _read_by_forward(self, marks: Guards) -> Guards:
        """The marks without those of the block's own hooks, if the call is its forward, around which they run."""
        module = marks.get("block")
        if not (self._is_forward and isinstance(module, tuple)):
            return marks
        # The last item of a module's mark tells of its hooks.
        others = {name: mark for name, mark in marks.items() if not name.startswith("block.hook ")}
        return {**others, "block": module[:-1]}


class _Refusing(TorchFunctionMode):
    """Raises RuntimeError if the second forward of a block reads one of these tensors, told by their identity."""

    def __init__(self, name: str, others: Collection[int]) -> None:
        super().__init__()
        self._name = name
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(tensor) in self._others for tensor in tensors_in((args, kwargs or {}))):
            raise RuntimeError(
                f"block {self._name} reads data into Python, so backward runs its forward a second time, as "
                "torch.utils.checkpoint does. But a tensor that the block or a global had when the first began is "
                "there no more, and the second reads another one. Replace it after backward, or call the block without "
                "a checkpoint"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def undisturbing(closure: Closure, inside: Around) -> Iterator[None]:
    """What any second forward runs in: neither the blocks nor the tensors of modules, nor ZeRO-3 are to notice it.

    `inside`: what has the blocks inside the block left alone.
    """
    with inside(), _put_back(closure), kept_gathered(closure.parameters):
        yield


@contextmanager
def _put_back(closure: Closure) -> Iterator[None]:
    """Put back what modules have as attributes in place of tensors, such as an auxiliary loss with its forward's graph.

    The program may have taken it away since the first forward: then it is away afterwards, too.
    """
    every = [attributes for module in closure.submodules() for attributes in (vars(module), module._buffers)]
    held = [dict(attributes) for attributes in every]
    try:
        yield
    finally:
        for attributes, before in zip(every, held, strict=True):
            for name in _tensors(attributes) - before.keys():
                del attributes[name]
            names = _tensors(attributes) | _tensors(before)
            attributes.update({name: before[name] for name in names})


@contextmanager
def kept_gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have ZeRO-3 keep those of the parameters that it has gathered for the backward of a module.

    The hooks of the module would release them after its second forward, before its backward has used them.
    """
    partitioned = (parameter for parameter in parameters if hasattr(parameter, "ds_id"))
    users_of_each: list[set[object]] = [vars(parameter)["ds_active_sub_modules"] for parameter in partitioned]
    before = [set(users) for users in users_of_each]
    try:
        for users in filter(None, users_of_each):
            users.add(_SECOND_FORWARD)
        yield
    finally:
        for users, earlier in zip(users_of_each, before, strict=True):
            users.clear()
            users.update(earlier)


def _reference(owner: Any, path: Path) -> Callable[[], torch.Tensor | None]:
    tensor = tensor_at(owner, path)
    return (lambda: None) if tensor is None else weakref.ref(tensor)


def _tensors(attributes: dict[str, Any]) -> set[str]:
    """The names of those that are tensors."""
    return {name for name, value in attributes.items() if type(value) is torch.Tensor}
