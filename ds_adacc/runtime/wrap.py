"""Have a runtime run the forwards of a model's blocks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ds_adacc.program.module_class import class_name, name_in_model
from ds_adacc.python_state.covered import cover, covered_by
from ds_adacc.runtime.compiled_blocks import is_compiled
from ds_adacc.runtime.runtime import Runtime


def wrap_blocks(blocks: dict[str, nn.Module], runtime: Runtime) -> None:
    """Make this runtime, and no other, run the forward of every block. `unwrap_blocks` undoes it.

    For a block that is compiled in place (`nn.Module.compile`), the runtime runs the compiled call. A deep copy of a
    block runs its own weights through the same runtime. A block that was pickled and loaded again is not wrapped.
    """
    unwrap_blocks(blocks.values())
    for name, module in blocks.items():
        attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        method = _through(runtime, module, attribute, name_in_model(name, module))
        setattr(module, attribute, types.MethodType(method, module))


def unwrap_blocks(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Restore the original forward of each wrapped module. The function that this returns wraps them as before."""
    wrapped = [(module, attribute, vars(module)[attribute]) for module in modules for attribute in _wrapped(module)]
    for module, attribute, method in wrapped:
        delattr(module, attribute)
        covered = covered_by(method)
        if covered is not None and covered.own is not None:
            setattr(module, attribute, covered.own)

    def wrap_again() -> None:
        for module, attribute, method in wrapped:
            setattr(module, attribute, method)

    return wrap_again


def is_wrapped(module: nn.Module) -> bool:
    """Whether a runtime runs the forward of the module."""
    return bool(_wrapped(module))


def runs(runtime: Runtime, module: nn.Module) -> bool:
    """Whether it is this runtime that runs the forward of the module."""
    return runtime in runtimes_of([module])


def runtimes_of(modules: Iterable[nn.Module]) -> set[Runtime]:
    """The runtimes that run the forwards of these modules."""
    return {vars(module)[attribute].runtime for module in modules for attribute in _wrapped(module)}


def call_asked(layer: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the layer, which the program has given to its checkpoint function.

    `layer` is a module, a method of one, or a `functools.partial` of these. Any other function is only called: which of
    the blocks that it may run are to be checkpointed is not known.
    """
    function = without_partials(layer)
    module = getattr(function, "__self__", function)
    attributes = _wrapped(module) if isinstance(module, nn.Module) and not torch.compiler.is_compiling() else []
    if not attributes:
        return layer(*args, **kwargs)
    with vars(module)[attributes[0]].runtime.asked.during(module):
        return layer(*args, **kwargs)


def without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a `functools.partial` calls, perhaps through others; any other function as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _wrapped(module: nn.Module) -> list[str]:
    """The attributes of the module that `wrap_blocks` has set."""
    attributes = ("forward", "_compiled_call_impl")
    return [attribute for attribute in attributes if covered_by(vars(module).get(attribute))]


def _through(runtime: Runtime, module: nn.Module, attribute: str, name: str) -> Callable[..., Any]:
    """The block's forward as a method, so that a deep copy binds it to the copy.

    That of its class is looked up in each call, as Python does: a program may patch it, or change the block's class.
    A graph that torch.compile makes of the code around the block breaks here, and does not include the block.
    """
    own = vars(module).get(attribute)  # a forward set on the instance hides the one of its class
    is_gathered = hasattr(next(module.parameters(), None), "ds_id")  # by ZeRO-3
    original = type(module).forward if own is None else own

    def bound_to(self: nn.Module) -> Callable[..., Any]:
        return types.MethodType(type(self).forward, self) if own is None else _rebound(own, module, self)

    @functools.wraps(original, updated=())  # with the original's attributes dynamo would bypass the runtime
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not is_compiled(type(self).forward if own is None else own):
            runtime.warnings.compiled_around(class_name(module))
        return _run(runtime, self, name, bound_to, args, kwargs, is_gathered)

    cover(forward, own)
    forward.runtime = runtime  # type: ignore[attr-defined]
    return forward


@torch._disable_dynamo  # not within `_through`: a function that it decorates keeps itself alive, and with it the model
def _run(
    runtime: Runtime,
    module: nn.Module,
    name: str,
    bound_to: Callable[[nn.Module], Callable[..., Any]],
    args: Any,
    kwargs: Any,
    is_gathered: bool,
) -> Any:
    block, asked, first = runtime.blocks.of_module(module, name), runtime.asked, torch.autograd._get_sequence_nr()
    output = runtime.run(block, module, bound_to(module), args, kwargs, asked.is_asked_for(module))
    asked.note_call((args, kwargs), torch.autograd._get_sequence_nr() - first, is_gathered)
    return output


def _rebound(own: Callable[..., Any], module: nn.Module, copy: nn.Module) -> Callable[..., Any]:
    """A forward that was set on `module`, for a deep copy of it, which has the copy where it has the module."""
    if copy is module:
        return own
    if isinstance(own, types.MethodType) and own.__self__ is module:  # Liger-Kernel patches modules so
        return types.MethodType(own.__func__, copy)
    if isinstance(own, functools.partial):  # accelerate's hooks do so
        return functools.partial(own.func, *(copy if arg is module else arg for arg in own.args), **own.keywords)
    return own
