"""What is read of a block at one call: the marks of all that its function can reach (Rule R8).

Most of it never changes. What identity can tell is therefore compared with what was there at the call before, in one
pass over the modules. Everything else is read again at every call: buffers, hooks, containers, objects, classes.
So a change is seen at the next call, also within a step.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ds_adacc.python_state.content import SCALARS, is_same_number, mark_of_number, slots_of
from ds_adacc.python_state.guards import DEPTH, Guards, Walk, guarded, of_users
from ds_adacc.python_state.held_tensors import inside
from ds_adacc.python_state.identity import identity_mark
from ds_adacc.python_state.plain_objects import PlainObjects
from ds_adacc.python_state.tensor_marks import looks_of_parameter, mark_of_parameter, stride_of

# The dicts in which a module keeps all that it holds. Those of hooks come last.
_PARAMETERS, _MODULES, _HOOKS, _DICTS = 1, 2, 4, 8
_dicts_of = operator.attrgetter(
    "__dict__",
    "_parameters",
    "_modules",
    "_buffers",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class UnreadableModule(Exception):
    """A block holds a module that cannot be read. The text says which, and why."""


@dataclass(frozen=True)
class Reading:
    """What was read at one call. `marks` has all of it: those of `structure` and of `objects`, and the `others`."""

    structure: Structure
    objects: PlainObjects
    others: Guards
    marks: Guards


def read(
    modules: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    values: Iterable[Any],
    more: Guards,
    last: Reading | None,
) -> tuple[Reading, list[torch.Tensor]]:
    """Read `modules` with all that they hold, of `parameters` from elsewhere, and of other `values`.

    `more`: marks of what else the block depends on. `last`: what was read at the call before, which is
    returned if it is still the same. Beside it, the tensors that were met, without parameters: a reading keeps none.

    Raises UnreadableModule if a module is a ScriptModule, or has a parameter of inference mode.
    """
    same = None if last is None else last.structure.unchanged(modules)
    structure = Structure(modules) if last is None or same is None else last.structure
    held = structure.held(same)
    objects = None if last is None or same is None else last.objects
    tensors = None if objects is None else objects.unchanged(held)
    if objects is None or tensors is None:
        changes = {} if objects is None else objects.changes_now(held)
        objects = PlainObjects(structure.named(held), structure.names, changes)
        tensors = objects.unchanged(held) or []
    walk = Walk(objects.names)
    for kind in (*structure.kinds, *objects.kinds):
        walk.classes(kind)
    for place in objects.left:
        name, *_, depth = structure.others[place]
        walk.value(name, held[place], depth)
    for number, parameter in enumerate(parameters):
        walk.guards[f"parameter{number}"] = mark_of_parameter(parameter)
    for number, value in enumerate(values):
        walk.value(f"variable around its function ({number})", value, DEPTH)
    others = {**walk.guards, **more}
    tensors += walk.tensors
    if last is not None and objects is last.objects and others == last.others:
        return last, tensors
    return Reading(structure, objects, others, {**structure.marks, **objects.marks, **others}), tensors


class Structure:
    """What identity can tell of modules: which there are, the names of what they hold, their parameters and numbers.

    It keeps none of them alive: modules and parameters are referred to weakly. All else that it holds are plain numbers
    and strings, and classes. `marks`: of what it compares. `names`: of the modules, by identity. `kinds`: their
    classes, without those of libraries. `others`: where all else is that the modules hold.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.marks: Guards = {}
        self._roots = len(roots)
        self._met: list[int] = []  # the roots, and then each module's children: places in `_modules`; -1: None
        self._parameters: list[Any] = []  # weak references; for another tensor, what never returns it
        self._looks: list[tuple[Any, ...]] = []  # of each parameter that is not None
        self._attributes: list[tuple[int, str]] = []  # whose, and the name
        self._numbers: list[Any] = []  # these attributes: plain numbers and strings
        self.others: list[tuple[str, int, str, Any, int]] = []  # name, whose, in which dict, by which key, depth
        self.names: dict[int, str] = {}  # by identity
        modules: list[nn.Module] = []
        places: dict[int, int] = {}

        def meet(name: str, module: nn.Module | None) -> None:
            if module is None:
                self.marks[name] = None
            elif id(module) in places:
                self.marks[name] = "same", self.names[id(module)]
            else:
                places[id(module)], self.names[id(module)] = len(modules), name
                modules.append(module)
            self._met.append(-1 if module is None else places[id(module)])

        for number, root in enumerate(roots):
            meet(f"block{number or ''}", root)
        for place, module in enumerate(modules):  # it grows
            name = self.names[id(module)]
            self._note(name, place, module)
            for key, child in module._modules.items():
                meet(f"{name}.{key}", child)
        self._modules: list[Any] = [identity_mark(module) for module in modules]  # weak references
        self._types = [*map(type, modules)]
        self.kinds = of_users(self._types)
        self._lengths, self._keys = _names_in([*chain.from_iterable(map(_dicts_of, modules))])

    def _note(self, name: str, place: int, module: nn.Module) -> None:
        """Take down the marks of one module, without its children, and what is to be read at every call.

        The order of what it holds counts too: a block may compute with one child after the other, say.
        """
        if isinstance(module, torch.jit.ScriptModule):  # its dicts are C++, and its code runs as it likes
            kind = type(module).__name__
            raise UnreadableModule(f"it has a module of TorchScript ({kind}), whose code cannot be seen")
        keys, attributes = tuple(map(tuple, _dicts_of(module)[_PARAMETERS:_HOOKS])), guarded(module)
        self.marks[name] = identity_mark(module), type(module), keys, tuple(attributes), _hooks_of(module)
        for key, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                # `torch.func.functional_call` has put it there, another one at each call.
                self.others.append((f"{name}.{key}", place, "_parameters", key, 0))
                self._parameters.append(object)  # which makes one that is never there, so that all is read again
                continue
            if parameter is not None and not is_lazy(parameter) and parameter.is_inference():
                why = "was made within torch.inference_mode, so writes to it cannot be noticed"
                raise UnreadableModule(f"its parameter {key} {why}")
            mark = None if parameter is None else mark_of_parameter(parameter)
            self.marks[f"{name}.{key}"] = mark
            self._parameters.append(types.NoneType if mark is None else mark[0])
            if mark is not None:
                self._looks.append(mark[1:])
            if inside(parameter):
                self.others.append((f"{name}.{key}", place, "_parameters", key, DEPTH))
        self.others += [(f"{name}.{key}", place, "_buffers", key, 0) for key in module._buffers]
        hooks = [(held, key) for held in ("_forward_pre_hooks", "_forward_hooks") for key in getattr(module, held)]
        self.others += [(f"{name}.hook {n}", place, held, key, DEPTH) for n, (held, key) in enumerate(hooks)]
        self.others += [(f"{name}.{key}", place, "", key, DEPTH) for key in slots_of(type(module))]
        for key in attributes:
            value = module.__dict__[key]
            if type(value) in SCALARS:
                self.marks[f"{name}.{key}"] = mark_of_number(value)
                self._attributes.append((place, key))
                self._numbers.append(value)
            else:
                self.others.append((f"{name}.{key}", place, "__dict__", key, DEPTH))

    def unchanged(self, roots: Sequence[nn.Module]) -> list[nn.Module] | None:
        """The modules, if `roots` have this structure now; else None."""
        modules = [module for module in [reference() for reference in self._modules] if module is not None]
        if len(modules) != len(self._modules) or len(roots) != self._roots:
            return None
        dicts = [*chain.from_iterable(map(_dicts_of, modules))]
        if [*map(type, modules)] != self._types or _names_in(dicts) != (self._lengths, self._keys):
            return None
        children = chain.from_iterable([held.values() for held in dicts[_MODULES::_DICTS]])
        known = [*modules, None]  # at -1
        if not all(map(operator.is_, chain(roots, children), [known[place] for place in self._met])):
            return None
        parameters = [*chain.from_iterable([held.values() for held in dicts[_PARAMETERS::_DICTS]])]
        if not all(map(operator.is_, parameters, [reference() for reference in self._parameters])):
            return None
        if not self._look_the_same([each for each in parameters if each is not None]):
            return None
        attributes = dicts[::_DICTS]
        numbers = [attributes[place][key] for place, key in self._attributes]
        if not all(map(operator.is_, numbers, self._numbers)):
            if not all(map(is_same_number, numbers, self._numbers)):
                return None
            self._numbers = numbers  # equal ones, which the next call has too
        return modules

    def _look_the_same(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether `looks_of_parameter` of each is what it was. To call it for each would take twice as long."""
        looks = [
            (each.requires_grad, each.dtype, each.shape, stride_of(each)) if len(old) > 2 else looks_of_parameter(each)
            for each, old in zip(parameters, self._looks, strict=False)  # there is one less where one was freed
        ]
        return looks == self._looks

    def held(self, modules: Sequence[nn.Module] | None) -> list[Any]:
        """What the modules hold besides. `modules`: what `unchanged` has returned, if it was asked."""
        owners = modules or [reference() for reference in self._modules]
        # In no dict are the slots of a module's class.
        return [
            getattr(owners[at], held)[key] if held else getattr(owners[at], key, None)
            for _, at, held, key, _ in self.others
        ]

    def named(self, held: Sequence[Any]) -> list[tuple[str, Any, int]]:
        """What `held` has returned, each with its name and the depth to which it is to be read."""
        return [(name, value, depth) for (name, *_, depth), value in zip(self.others, held, strict=True)]


def _hooks_of(module: nn.Module) -> tuple[tuple[tuple[bool, ...], ...], ...]:
    """How each hook of the module is called, by kind and in order; what a forward hook does is read at every call.

    Not its key, which is a number that no other hook has had: the same hook, registered anew, has another.
    """
    return tuple(
        tuple(tuple(key in kind for kind in kinds) for key in held)
        for held, *kinds in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
            (module._backward_pre_hooks,),
            (module._backward_hooks,),
        )
    )


def _names_in(dicts: Sequence[dict[Any, Any]]) -> tuple[list[int], list[Any]]:
    """The length of each dict, and the keys of all, one after the other."""
    return [*map(len, dicts)], [*chain.from_iterable(dicts)]
