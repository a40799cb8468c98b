"""What distinguishes two calls of the same block: shapes, dtypes, strides, other arguments, and what is set around."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.utils._device import DeviceContext

from ds_adacc.program.function_operator import autocast_now
from ds_adacc.program.geometry import is_dense, span, storage_of, why_not_plain
from ds_adacc.python_state.content import Unreadable, besides_items
from ds_adacc.python_state.guards import snapshot
from ds_adacc.python_state.identity import identity_mark
from ds_adacc.python_state.tensor_marks import TensorMark, looks_of

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_HOOKS_OF_ALL_MODULES = (
    of_modules._global_forward_pre_hooks,
    of_modules._global_forward_hooks,
    of_modules._global_backward_pre_hooks,
    of_modules._global_backward_hooks,
)


def flatten(tree: Any, tensors: list[torch.Tensor], inner: list[torch.Tensor] | None = None) -> Hashable:
    """Append the tensors in nested tuples, lists and dicts to `tensors`. Returns a key of everything else (Rule R8).

    Those in other objects are appended to `inner`; the key tells how they look. So are those among the attributes of a
    list, tuple or dict of a class of its own.
    The items of a dict come as they are given: a block that takes `**kwargs` may compute with one after the other.
    """
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return "tensor"
    if isinstance(tree, tuple | list):
        return type(tree), (*[flatten(item, tensors, inner) for item in tree], *_besides_items(tree, inner))
    if isinstance(tree, dict):
        items = [(_key_of(name), flatten(item, tensors, inner)) for name, item in tree.items()]
        return type(tree), (*items, *_besides_items(tree, inner))
    return snapshot(tree, inner)


def tensors_held_by(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, as of `tensors_in`, and those in other objects."""
    tensors: list[torch.Tensor] = []
    flatten(tree, tensors, tensors)
    return tensors


class _NumberAsKey(NamedTuple):
    """A number that is the key of a dict: 1, 1.0 and True are equal, but may compute something else."""

    kind: type
    text: str


def _key_of(name: Any) -> Hashable:
    if type(name) is str or not isinstance(name, Number):
        return name
    return _NumberAsKey(type(name), repr(name))


def _besides_items(tree: Any, inner: list[torch.Tensor] | None) -> tuple[Hashable, ...]:
    """A key of the attributes of a list, tuple or dict of a class of its own, if it has any."""
    held = () if type(tree) in (tuple, list, dict) else besides_items(tree)
    if not held:
        return ()
    return (("its attributes", held if isinstance(held, Unreadable) else snapshot(held, inner)),)


def why_unrecordable(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why a block with these arguments cannot be recorded; None if it can."""
    for tensor in tensors:
        reason = why_not_plain(tensor)
        if reason is not None:
            return f"an argument is a {reason}"
        if tensor.is_inference():
            return "an argument was made within torch.inference_mode, so writes to it cannot be noticed"
    return None


def surroundings() -> str | None:
    """Why no block may be recorded or planned where it is called now; None if it may.

    Hooks of the caller's are to see what they see without ds_adacc, and torch calls the innermost hooks only.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyrefly: ignore [missing-attribute]
        return "it is called within saved_tensors_hooks, as those of save_on_cpu or torch.utils.checkpoint"
    if is_in_backward():
        return (
            "it is called within a backward, as by cached losses (GradCache), or by torch.utils.checkpoint with "
            "use_reentrant=True"
        )
    return why_unhooked()


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def why_unhooked() -> str | None:
    """Why nothing can decide what is held for the backward of a call that begins now; None if something can."""
    autograd: Any = torch._C._autograd
    if torch._C._functorch.maybe_current_level() is not None:
        return "it is called within a transform of torch.func"
    if not autograd._saved_tensors_hooks_is_enabled():
        return "it is called where hooks for saved tensors are disabled"
    if torch._C._is_tracing():
        return "it is called while torch.jit.trace traces it"
    if torch._C._get_dispatch_mode(_PROXY) is not None:
        return "it is called while torch.fx traces it, as in make_fx"
    if forward_ad._current_level >= 0:
        return "it is called within forward-mode differentiation"
    return None


def describe(tensors: Sequence[torch.Tensor]) -> Hashable:
    """A key of what the recorded program depends on in the tensors: shape, stride, dtype, device, `requires_grad`.

    For tensors that share a storage (chunks of one projection) their distance counts too: a recorded geometry may span
    several of them.
    """
    parts = tuple(map(looks_of, tensors))
    return parts, _sharing(tensors) if len(tensors) > 1 else ()


def aliases(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Hashable:
    """Which of `others`, which the block reaches in other ways than as arguments, are parts of arguments or each other.

    While a block is recorded, tensors are told apart by their memory: what was one then may be two in a later call.
    """
    if not others:
        return ()
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate((*tensors, *others)):
        groups.setdefault(storage_of(tensor), []).append((number, tensor))
    found = []
    for group in groups.values():
        if len(group) > 1 and group[-1][0] >= len(tensors):
            spans = [(number, *span(tensor)) for number, tensor in group]
            found += [
                (number, earlier, start - low)
                for place, (number, start, stop) in enumerate(spans)
                for earlier, low, high in spans[:place]
                if number >= len(tensors)
                and ((low <= start and stop <= high) or (earlier >= len(tensors) and start <= low and high <= stop))
            ]
    return tuple(found)


def own_parameters(tensors: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor]) -> Hashable:
    """Which of `tensors`, the arguments, are parameters that the block has too, or views of such.

    What the block reads of the parameter is then recorded as read of the argument.
    """
    wholes = [tensor if tensor._base is None else tensor._base for tensor in tensors]
    if not any(isinstance(whole, nn.Parameter) for whole in wholes):  # as in most calls
        return ()
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return tuple([places.get(id(whole)) for whole in wholes])


def hooks_on(tensors: Iterable[torch.Tensor]) -> Hashable:
    """The hooks that `tensors` have: a backward within the block runs them, as if they were part of it."""
    hooks = [(n, hook) for n, tensor in enumerate(tensors) for hook in (tensor._backward_hooks or {}).values()]
    return tuple([(n, snapshot(hook)) for n, hook in hooks])


class Sizes(NamedTuple):
    """What differs between two calls of one program at two sizes.

    `lengths`: of the dimensions of its input tensors, and the distances of those that share a storage. `numbers`: the
    whole numbers among the arguments, such as the length of the longest text in a packed batch. `strides`: of the input
    tensors that are parts of larger ones, whose lengths they follow.
    """

    lengths: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def distance(self, other: Sizes) -> float:
        """How far apart the lengths are: the sum of the logarithms of their ratios."""
        pairs = zip(self.lengths, other.lengths, strict=False)  # inputs that share a storage have more
        return sum(abs(math.log(max(one, 1) / max(two, 1))) for one, two in pairs)


class _Fields(NamedTuple):
    """The fields of `Signature`: a NamedTuple itself has no room for what follows from them."""

    arguments: Hashable
    tensors: Any
    shared: tuple[Hashable, ...] = ()
    ambient: Hashable = None
    training: bool | None = None
    held_before: tuple[int, ...] = ()
    is_asked: bool = False


class Signature(_Fields):
    """What tells two calls of a block apart, besides what its function can reach.

    `arguments`: what `flatten` returned; `tensors`: how those among the arguments look (`describe`); `shared`: what
    `aliases`, `own_parameters` and `hooks_on` returned; `ambient`: of the state outside the block; `training`: the
    module's flag; None: it has none; `held_before`: the places of the inputs that an earlier call of the same forward
    holds. `is_asked`: whether the program has asked for checkpointing of just this call, so that its forward may run
    twice (Rule R20).

    What is asked of it is worked out once: each new size is compared with all those that the block has met.
    """

    def with_hooks(self, hooks: Hashable) -> Signature:
        """The signature of a call of a block that runs these hooks, of `hooks_on`, in its forward."""
        of_aliases, own, _ = self.shared
        return self._replace(shared=(of_aliases, own, hooks))

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes of the call's arguments."""
        looks, sharing = self.tensors
        numbers: list[int] = []
        _without_numbers(self.arguments, numbers)
        lengths = (*(length for look in looks for length in look.shape), *(distance for *_, distance in sharing))
        parts = (look for look in looks if not is_dense(look.shape, look.stride))
        return Sizes(lengths, tuple(numbers), tuple([stride for look in parts for stride in look.stride]))

    @functools.cached_property
    def without_sizes(self) -> tuple[Hashable, tuple[int, ...]]:
        """What it says apart from sizes; and the sizes of tensors inside objects."""
        looks, sharing = self.tensors
        inner: list[int] = []
        pattern = tuple((number, earlier) for number, earlier, _ in sharing)
        arguments = _opened(_without_numbers(self.arguments, []), inner)
        return self._replace(arguments=arguments, tensors=(_opened(looks, []), pattern)), tuple(inner)


def apart(signature: Signature) -> tuple[Hashable, tuple[int, ...]]:
    """What a call's signature says apart from sizes; and all sizes, with numbers and lengths of tensors in objects."""
    (others, inner), sizes = signature.without_sizes, signature.sizes
    return others, (*sizes.lengths, *sizes.numbers, *inner)


def differ_in_sizes(one: Signature, other: Signature) -> bool:
    """Whether two calls' signatures differ in nothing but sizes and strides, and do differ in sizes.

    Such calls may run one program at two sizes (`sizes/symbolic_program.py`). Whether strides are as predicted is
    checked with the tensors at hand. A tensor inside an object, as in a cache of keys, may change with the arguments,
    not by itself.
    """
    mine, its = one.sizes, other.sizes
    if mine == its:
        return False
    (my_others, my_inner), (its_others, its_inner) = one.without_sizes, other.without_sizes
    if my_others != its_others:
        return False
    if my_inner == its_inner:  # as where there are none
        return True
    follow = set(zip(mine.lengths, its.lengths, strict=True))
    return all(a == b or (a, b) in follow for a, b in zip(my_inner, its_inner, strict=True))


def _without_numbers(key: Any, numbers: list[int]) -> Hashable:
    """What `flatten` returned, without the whole numbers among the arguments, which are appended to `numbers`.

    Those inside objects stay: the object may hold more that follows them.
    """
    if isinstance(key, TensorMark) or type(key) is not tuple or len(key) != 2:
        return key
    kind, inside = key
    if kind is int:
        numbers.append(inside)
        return kind
    if isinstance(kind, type) and issubclass(kind, dict):
        return kind, tuple([(name, _without_numbers(item, numbers)) for name, item in inside])
    if isinstance(kind, type) and issubclass(kind, tuple | list):
        return kind, tuple([_without_numbers(item, numbers) for item in inside])
    return key


def _opened(key: Any, sizes: list[int]) -> Hashable:
    if isinstance(key, TensorMark):
        sizes += key.shape
        return len(key.shape), *key[2:]
    return tuple([_opened(item, sizes) for item in key]) if type(key) is tuple else key


def differing_numbers(one: Signature, other: Signature) -> dict[str, tuple[Any, Any]] | None:
    """The numbers among the arguments that differ between two calls' signatures, by the argument's name.

    The sizes of tensors may differ too. None if anything else does.
    """
    found: dict[str, tuple[Any, Any]] = {}
    mine, its = dict(_named(one.arguments)), dict(_named(other.arguments))
    is_alike = mine.keys() == its.keys() and all(_note_numbers(name, mine[name], its[name], found) for name in mine)
    return found if is_alike else None


def _named(key: Any) -> Iterator[tuple[str, Any]]:
    """The keys of the single arguments, as `flatten` made them of a tuple and a dict."""
    _, ((_, positional), (_, keywords)) = key
    yield from ((f"argument {number}", each) for number, each in enumerate(positional, start=1))
    yield from ((f"argument {name!r}", each) for name, each in keywords)


def _note_numbers(name: str, one: Any, other: Any, found: dict[str, tuple[Any, Any]]) -> bool:
    if isinstance(one, TensorMark) or type(one) is not tuple or type(other) is not tuple or len(one) != len(other):
        return isinstance(one, TensorMark) or one == other
    if one and one[0] is other[0] and one[0] in (int, float):
        if one != other:
            found[name] = one[1], other[1]
        return True
    return all(_note_numbers(name, mine, its, found) for mine, its in zip(one, other, strict=True))


def ambient() -> Hashable:
    """A key of the state outside the block that changes its operators.

    That is the default dtype; autocast on any device, and whether it keeps its casts; the modes that see every function
    of torch, among which is the default device; and the hooks of all modules. The arguments do not tell on which
    devices the block runs: a mask on the host may come first, or there may be none.
    """
    more: list[Hashable] = []
    if torch._C._is_any_autocast_enabled():
        keeps = torch.is_autocast_cache_enabled()
        more += [(device, dtype, keeps) for device, enabled, dtype in autocast_now() if enabled]
    if _len_torch_function_stack():
        more += [(type(mode), mode.device if type(mode) is DeviceContext else None) for mode in _modes()]
    for hooks in _HOOKS_OF_ALL_MODULES:
        if hooks:
            more.append(tuple(map(_mark_of_hook, hooks.values())))
    return (torch.get_default_dtype(), *more) if more else torch.get_default_dtype()


def _mark_of_hook(hook: Any) -> Hashable:
    return snapshot(hook) if isinstance(hook, types.FunctionType) else identity_mark(hook)


def _sharing(tensors: Sequence[torch.Tensor]) -> Hashable:
    first: dict[int, tuple[int, int]] = {}
    shared = []
    for number, tensor in enumerate(tensors):
        storage = storage_of(tensor)
        if storage in first:
            earlier, address = first[storage]
            shared.append((number, earlier, tensor.data_ptr() - address))
        else:
            first[storage] = number, tensor.data_ptr()
    return tuple(shared)
