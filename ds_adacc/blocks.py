"""Find the model's repeated blocks and run their forwards through the runtime."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ds_adacc.config import ConfigError
from ds_adacc.runtime import Runtime


def find_blocks(model: nn.Module, wanted: str | Sequence[str]) -> dict[str, nn.Module]:
    """The model's blocks by dotted name: with "auto" its repeated layers, else the modules of the classes `wanted`.

    Repeated layers are the entries of an outermost `ModuleList` or `Sequential` that has at least two modules of one
    class with two weight matrices or more. Raises ConfigError for a class that the model has no module of.
    """
    if wanted == "auto":
        return _repeated(model)
    classes = {type(module).__name__ for module in model.modules()}
    for name in wanted:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"it has {', '.join(sorted(classes))}"
            raise ConfigError(f"adacc.blocks: the model has no module of class {name!r}; {hint}")
    return _outermost({n: m for n, m in model.named_modules() if type(m).__name__ in wanted})


def wrap_blocks(blocks: dict[str, nn.Module], runtime: Runtime) -> None:
    """Have every block's forward executed by this runtime, and no other; `unwrap_blocks` undoes it.

    A deep copy of a block runs its own weights through the same runtime; a pickled one comes back unwrapped.
    """
    unwrap_blocks(blocks)
    for name, module in blocks.items():
        forward = _through(runtime, module, f"{name} ({type(module).__name__})")
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def has_wrapped_blocks(model: nn.Module) -> bool:
    """Whether a runtime executes any of the model's modules."""
    return any(hasattr(module.forward, "covered") for module in model.modules())


def unwrap_blocks(blocks: dict[str, nn.Module]) -> None:
    """Give the blocks their own forward back."""
    for module in blocks.values():
        covered = getattr(module.forward, "covered", ())
        if covered:
            del module.forward
            if covered[0] is not None:
                module.forward = covered[0]


def _through(runtime: Runtime, module: nn.Module, name: str) -> Callable[..., Any]:
    """The block's forward as a method, so that a deep copy binds it to the copy."""
    own = vars(module).get("forward")  # an instance may have a forward that its class has not
    original = type(module).forward if own is None else own

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = types.MethodType(original, self) if own is None else own
        return runtime.run(runtime.blocks.of_module(self, name), self, run, args, kwargs)

    forward.covered = (own,)  # type: ignore[attr-defined]
    return forward


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
            counts: dict[type[nn.Module], int] = {}
            for child in children.values():
                counts[type(child)] = counts.get(type(child), 0) + 1
            found.update({n: c for n, c in children.items() if counts[type(c)] > 1 and _is_layer(c)})
    return _outermost(found)


def _is_layer(module: nn.Module) -> bool:
    """Whether it has two weight matrices or more: a block, not a list of embeddings or heads.

    Under zero.Init a parameter's own shape is that of its partition; its `ds_shape` is the whole one's.
    """
    shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters()]
    return sum(len(shape) >= 2 for shape in shapes) >= 2


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in found.items()
        if not any(name.startswith(f"{other}.") for other in found if other != name)
    }
