"""What the user tells of an `autograd.Function` that cannot be read off it: whether to replay it, and roles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ds_adacc.config.presets import ROLES
from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.function_operator import arguments_of
from ds_adacc.program.known_functions import aten_counterpart, roles_by_name
from ds_adacc.program.recorded_op import RecordedOp

_REPLAY = ("auto", "never", "operators")
_OUTPUT = re.compile("output( [1-9][0-9]*)?")  # the first one has no number
_PLACE = "__ds_adacc__"  # on the class itself, which alone owns it; guards do not read such names

Function = TypeVar("Function", bound=type[torch.autograd.Function])


@dataclass(frozen=True)
class Registration:
    replay: str = "auto"
    roles: Mapping[str, str] = field(default_factory=dict)


def register_function(cls: Function, replay: str = "auto", roles: Mapping[str, str] | None = None) -> Function:
    """Tell ds_adacc of an `autograd.Function` what it cannot find out, before the first forward. Returns `cls`.

    `replay`: "auto" recomputes what the Function makes where that is proven to give the same bits; "never" does not,
    for a Function with effects that cannot be seen; "operators" records the operators of its forward one by one, for a
    Function whose forward consists of plain operators that the dispatcher sees. `roles`: by name of an argument of
    forward, or by "output", "output 1", ... for what it returns, the role that decides which codecs are on offer for
    that tensor. Subclasses do not inherit any of it.

    Whoever registers a Function also says that its backward only computes gradients, without collectives and without
    effects: it is run more often, on copies, to measure its memory and the errors of codecs. Raises TypeError for what
    is no Function, and ValueError for an unknown name.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
        raise TypeError(f"register_function takes a subclass of torch.autograd.Function; got {cls!r}")
    if replay not in _REPLAY:
        raise ValueError(f"replay must be one of {', '.join(map(repr, _REPLAY))}; got {replay!r}")
    roles = dict(roles or {})
    for name, role in roles.items():
        if role not in ROLES:
            raise ValueError(f"{role!r} is no role; the roles are {', '.join(ROLES)}")
        if name not in arguments_of(cls) and not _OUTPUT.fullmatch(name):
            raise ValueError(f"forward of {cls.__name__} has no argument {name!r}, and it is no output either")
    setattr(cls, _PLACE, Registration(replay, roles))
    return cls


def registration_of(cls: type[torch.autograd.Function]) -> Registration:
    """What was told of the class itself."""
    return vars(cls).get(_PLACE) or Registration()


def computes_only(cls: type[torch.autograd.Function]) -> bool:
    """Whether its backward may be run by itself. That of a parallel Linear may hold a collective."""
    return _PLACE in vars(cls) or aten_counterpart(cls) not in (None, "linear")


def roles_of_function(op: RecordedOp) -> tuple[dict[int, str], dict[int, str]]:
    """By value, the roles of what a Function reads and of what it makes, as its arguments' names or its user tell."""
    if not op.is_function:
        return {}, {}
    roles = {**roles_by_name(op.func.cls), **registration_of(op.func.cls).roles}
    read: dict[int, str] = {}
    for name, given in zip(arguments_of(op.func.cls), op.args, strict=False):
        if isinstance(given, ValueRef) and name in roles:
            read.setdefault(given.index, roles[name])
    outputs = (("output" if number == 0 else f"output {number}", index) for number, index in enumerate(op.outputs))
    made = {index: roles[name] for name, index in outputs if index is not None and name in roles}
    inside = zip(op.outputs[op.func.place_of_saved], op.func.roles, strict=False)  # only a graph's are known
    return read, {**{index: role for index, role in inside if None not in (index, role)}, **made}
