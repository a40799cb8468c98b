"""What the user would call each value of a block: a module's path within the block, and which of its tensors it is.

`attention.qkv out`, `norm2 rstd`, `mlp.act out`, `input hidden_states`. Which module runs is read from Python's own
call stack while the block is recorded. So nothing is registered on the modules: no hook can change what is recorded,
trip the guards, have compiled code compiled anew, or be left behind when the block raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.python_state.closure import Closure
from ds_adacc.record.frames import frames_of_block

_CALL = nn.Module._call_impl.__code__  # each call of a module has one frame of this function
_NOT_THE_BLOCK = ("ds_adacc", "deepspeed")  # packages whose functions also take the block's arguments
_COMPILED = "_orig_mod."  # torch.compile wraps a module in another one, which the user did not write
_ATTENTION = ("query", "key", "value")  # roles that say more of a value than the operator that made it
_WORDS = {"_to_copy": "cast", "clone": "copy", "project": "projection"}
_OUTPUTS = {  # of operators whose schema does not name them
    "native_layer_norm": ("out", "mean", "rstd"),
    "native_group_norm": ("out", "mean", "rstd"),
    "native_batch_norm": ("out", "mean", "rstd"),
    "_fused_rms_norm": ("out", "rstd"),
    "native_dropout": ("out", "mask"),
}


class Labels:
    """Notes which module runs each operator of a block that is being recorded, and then labels the block's values."""

    def __init__(self, inputs: Sequence[torch.Tensor], closure: Closure) -> None:
        self._inputs = inputs
        self._paths = _paths(closure.modules)
        self._modules: list[str] = []  # by operator
        self._arguments: dict[int, str] = {}  # by input

    def note(self) -> None:
        """The next operator is run by the module that runs now."""
        frames = frames_of_block()
        running = (id(frame.f_locals["self"]) for frame in frames if frame.f_code is _CALL)
        self._modules.append(next((self._paths[module] for module in running if module in self._paths), ""))
        if not self._arguments:
            self._arguments = next(filter(None, map(self._named_by, reversed(frames))), {})
        frames.clear()  # this call's own frame is among them: a cycle would keep all frames' tensors until a collection

    def give(self, recording: Recording) -> Recording:
        """The recording, each value with a label of its own."""
        shown = _without_common_part(self._modules)
        states = {ref.index: op for op in recording.ops for draw in op.draws for ref in (draw.before, draw.after)}
        readers: dict[int, list[str]] = {}
        for op in recording.ops:
            for index in op.reads:
                readers.setdefault(index, []).append(shown[op.index])
        taken: set[str] = set()
        values = []
        for value in recording.values:
            if value.index in states:
                label = " ".join(filter(None, (shown[states[value.index].index], "random state")))
            elif value.producer is None:
                label = self._from_outside(value, recording)
            else:
                op, module = recording.ops[value.producer], shown[value.producer]
                main = op.outputs[0] if op.outputs else None
                is_result = main is not None and _leaves(module, readers.get(main, ()), recording.values[main])
                label = _made(value, op, module, is_result)
            values.append(replace(value, label=_unique(label, taken)))
        return replace(recording, values=tuple(values))

    def _named_by(self, frame: FrameType) -> dict[int, str]:
        """The inputs by their names as arguments of this call, if it is one of the user's functions."""
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_BLOCK:
            return {}
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = {}
        for name in names:
            for place, tensor in _parts(name, frame.f_locals.get(name)):
                position = next((n for n, given in enumerate(self._inputs) if given is tensor), None)
                if position is not None:
                    found.setdefault(position, place)
        return found

    def _from_outside(self, value: RecordedValue, recording: Recording) -> str:
        if value.origin == "input":
            return f"input {self._arguments.get(value.source, value.source)}"
        if value.origin == "buffer":
            owner, path = recording.buffers[value.source]
            return f"{_dotted(self._paths.get(id(owner()), ''), '.'.join(map(str, path)))} buffer"
        if value.origin == "state":
            return f"{value.name} random state"
        return f"{value.origin} {value.source}"


def _paths(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Each module's path within the block, by the module's id; a module with two paths has the first."""
    paths: dict[int, str] = {}
    for number, root in enumerate(modules):
        for name, module in root.named_modules():
            path = f"{name}.".replace(_COMPILED, "").rstrip(".")
            paths.setdefault(id(module), path if len(modules) == 1 else _dotted(str(number), path))
    return paths


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _parts(name: str, argument: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument: itself, or what a tuple, list or dict holds."""
    if isinstance(argument, torch.Tensor):
        yield name, argument
    elif isinstance(argument, tuple | list):
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(argument))
    elif isinstance(argument, dict):
        yield from ((f"{name}.{key}", item) for key, item in argument.items())


def _without_common_part(paths: Sequence[str]) -> list[str]:
    """The paths without what all begin with: a closure may reach a whole model, and run two of its layers."""
    split = [path.split(".") for path in paths]
    common = 0
    while len(set(paths)) > 1 and len({tuple(parts[: common + 1]) for parts in split}) == 1:
        common += 1
    return [".".join(path[common:]) for path in split]


def _leaves(module: str, readers: Iterable[str], value: RecordedValue) -> bool:
    """Whether the module hands the value on: what reads it runs outside of the module, or nothing in the block does."""
    inside = [reader == module or reader.startswith(f"{module}.") for reader in readers]
    return module != "" and not value.overwritten and not all(inside or [False])


def _made(value: RecordedValue, op: RecordedOp, module: str, is_result: bool) -> str:
    """The label of an operator's output. `is_result`: its first output is what the module returns."""
    word = _word(op)
    number = 0 if _is_written(value, op) else value.output
    output = _output(op, number)
    if word == "projection":
        return f"{module} {word}"
    if "attention" in word:  # the module that calls SDPA is the attention, whatever the user has named it
        return f"{module or word} {output}"
    if value.role == "dropout_mask":
        parts = [module, "mask"]
    elif value.role in _ATTENTION and not is_result:
        parts = [module, value.role]
    else:
        parts = [module, "" if is_result else word, output if is_result or number else ""]
    return " ".join(filter(None, parts))


def _word(op: RecordedOp) -> str:
    name = op.short_name
    if name.startswith("_scaled_dot_product"):
        return "attention"
    return _WORDS.get(name) or name.removeprefix("native_").removeprefix("_fused_").strip("_")


def _is_written(value: RecordedValue, op: RecordedOp) -> bool:
    """Whether the operator returns no tensor of its own for it, but has written to it in place."""
    schema = getattr(op.func, "_schema", None)
    return schema is not None and value.output >= len(schema.returns)


def _output(op: RecordedOp, number: int) -> str:
    schema = getattr(op.func, "_schema", None)
    names = _OUTPUTS.get(op.short_name) or [each.name for each in schema.returns] if schema is not None else ()
    name = names[number] if number < len(names) else ""
    if number == 0 and name in ("", "output"):
        return "out"
    return name or f"output {number}"


def _unique(label: str, taken: set[str]) -> str:
    """The label, with " 2" and so on after it if a value before has it."""
    number, unique = 1, label
    while unique in taken:
        number += 1
        unique = f"{label} {number}"
    taken.add(unique)
    return unique
