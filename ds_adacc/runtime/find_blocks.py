"""Find the modules of a model that are blocks: its repeated layers, or those of the listed classes."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from ds_adacc.config import ConfigError
from ds_adacc.program.module_class import class_name, class_of
from ds_adacc.program.parameters import whole_shape

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_blocks(
    model: nn.Module,
    wanted: str | Sequence[str],
    containers: tuple[type[nn.Module], ...] = _CONTAINERS,
    elsewhere: Collection[str] = (),
) -> dict[str, nn.Module]:
    """The model's blocks by dotted name. "auto" selects the repeated layers; else `wanted` lists class names.

    Repeated layers are the entries of an outermost module whose class is one of `containers`. The container must have
    at least two entries of the same class, and they have at least two weight matrices. In place of an entry without a
    forward, as a list of attention and MLP is one, its own entries count. Stages that differ in width, as vision and
    diffusion models have, are replaced by the repeated layers inside them (`_stages`). A layer in two containers is one
    block, by its first name.

    Raises ConfigError if the model has no module of a listed class, or such modules have no forward, unless the class
    is in `elsewhere`: the classes in the parts of the model that other processes hold.
    """
    if wanted == "auto":
        return _repeated(model, containers)
    classes = dict.fromkeys(elsewhere, True)  # by name, whether any module of the class has a forward
    for module in model.modules():
        classes[class_name(module)] = classes.get(class_name(module), False) or _has_forward(module)
    for name in wanted:
        if not classes.get(name):
            called = {each for each, has_forward in classes.items() if has_forward}
            layers = {class_name(layer) for layer in _repeated(model, containers).values()}
            what, hint = f"the model has no module of class {name!r}", _hint(name, called, layers)
            if name in classes:
                what, hint = (
                    f"modules of class {name!r} have no forward, so nothing calls them",
                    _hint("", called, layers),
                )
            raise ConfigError(f"adacc.blocks = {list(wanted)}: {what}; {hint}")
    return _outermost({n: m for n, m in model.named_modules() if class_name(m) in wanted})


def none_ran(names: Sequence[str]) -> str:
    """That none of these blocks, which were found, has run."""
    if len(names) == 1:
        return f"the only block found, {names[0]}, never ran"
    return f"none of the {len(names)} blocks found (the first: {names[0]}) ran"


def no_longer_in(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[str]:
    """The names of those blocks that are no modules of the model any more."""
    try:
        moved = {name: block for name, block in blocks.items() if model.get_submodule(name) is not block}
    except AttributeError:  # the model has no module of such a name now
        moved = dict(blocks)
    present = set(model.modules()) if moved else set()  # all of them, which takes longer: others may lie around a block
    return [name for name, block in moved.items() if block not in present]


def beside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that lie beside the blocks and have the class of one, but are none, by name.

    One that `torch.compile` has wrapped is what it wraps.
    """
    known, new = set(blocks.values()), {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        with contextlib.suppress(AttributeError):  # the model has no module of such a name now
            children = model.get_submodule(parent).named_children()
            new |= {f"{parent}.{key}".lstrip("."): child for key, child in children if child not in known}
    if not new:
        return {}
    classes = set(map(class_of, known))
    unwrapped = {name: getattr(module, "_orig_mod", module) for name, module in new.items()}
    return {name: module for name, module in unwrapped.items() if class_of(module) in classes and module not in known}


def _hint(name: str, classes: Collection[str], layers: Collection[str]) -> str:
    """What to list in place of a class that the model does not have. `layers`: the classes that "auto" finds."""
    near = difflib.get_close_matches(name, classes, n=1)
    if near:
        return f"the nearest is {near[0]!r}"
    if layers:
        return f'"auto" takes its repeated layers, {", ".join(sorted(layers))}'
    return f"it has {', '.join(sorted(classes))}"


def layers_around(model: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """The repeated layers, as "auto" finds them, that have some of these blocks inside."""
    layers = _repeated(model, _CONTAINERS).items()
    return {name: layer for name, layer in layers if any(block.startswith(f"{name}.") for block in blocks)}


def lone_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that are alone in a list: the model may run each again and again, as ALBERT does."""
    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, _CONTAINERS))
    alone = (entries[0] for entries in (list(_entries(*each)) for each in lists) if len(entries) == 1)
    return _outermost({name: module for name, module in alone if _is_layer(module)})


def _repeated(model: nn.Module, containers: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    groups: list[dict[str, nn.Module]] = []  # layers of one class in one container
    for name, module in model.named_modules():
        if isinstance(module, containers):
            by_class: dict[type[nn.Module], dict[str, nn.Module]] = {}
            for key, child in _entries(name, module):
                by_class.setdefault(class_of(child), {})[key] = child
            repeated = (group for group in by_class.values() if len(group) > 1)
            groups += [{name: module for name, module in group.items() if _is_layer(module)} for group in repeated]
    repeated = {name for group in groups for name in group}
    first: dict[nn.Module, str] = {}  # the name of each: a layer may be in two containers
    for name, module in model.named_modules(remove_duplicate=False):  # it may be an attribute too, which comes first
        if name in repeated:
            first.setdefault(module, name)
    layers = {name: module for module, name in first.items()}
    stages = {name for group in groups for name in _stages(group, layers)}
    return _outermost({name: module for name, module in layers.items() if name not in stages})


def _entries(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in the container that have a forward, by dotted name.

    In place of one without, as a list of a layer's attention and MLP is one, what it contains is returned.
    """
    for key, child in container.named_children():
        full = f"{name}.{key}".lstrip(".")
        if _has_forward(child):
            yield full, child
        else:
            yield from _entries(full, child)


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _is_layer(module: nn.Module) -> bool:
    """Whether the module has at least two weight matrices. Embeddings and heads have fewer, and are no blocks.

    One number for each channel is no matrix, though a convolution under `weight_norm` keeps these in three dimensions.
    A matrix in one column is one: bitsandbytes keeps weights of 4 bits so.
    """
    return sum(len(shape) == 2 or math.prod(shape[1:]) > 1 for shape in _shapes(module)) >= 2


def _stages(group: dict[str, nn.Module], layers: dict[str, nn.Module]) -> list[str]:
    """Those in `group` that are no repeated layers but stages of a model, mostly made up of `layers` of their own.

    Stages differ in width, so no layer of one has the shapes of a layer of another. Layers with lists of experts look
    the same inside, but their experts are alike.
    """
    inner: dict[str, dict[str, nn.Module]] = {}
    for name in group:
        own = {each: layer for each, layer in layers.items() if each.startswith(f"{name}.")}
        if own:
            inner[name] = _outermost(own)
    shapes = [shape for own in inner.values() for shape in {_shapes(layer) for layer in own.values()}]
    if len(inner) < 2 or len(set(shapes)) < len(shapes):
        return []
    in_layers = sum(_numel(layer) for own in inner.values() for layer in own.values())
    return list(inner) if in_layers >= 0.75 * sum(_numel(group[name]) for name in inner) else []


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """The shapes of its parameters."""
    return tuple(map(whole_shape, module.parameters()))


def _numel(module: nn.Module) -> int:
    return sum(map(math.prod, _shapes(module)))


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in found.items()
        if not any(name.startswith(f"{other}.") for other in found if other != name)
    }
