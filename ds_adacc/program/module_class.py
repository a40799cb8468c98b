"""The class of a module, also of one that `torch.compile` has wrapped."""

from __future__ import annotations

from torch import nn


def class_of(module: nn.Module) -> type:
    """The module's class. For the result of `torch.compile(module)`, the class of `module`."""
    return type(getattr(module, "_orig_mod", module))


def name_in_model(name: str, module: nn.Module) -> str:
    """What the user would call the module, which has this `name` in its model: "layers.0 (Block)"."""
    return f"{name or 'the whole model'} ({class_name(module)})"


def class_name(module: nn.Module) -> str:
    """The name of the module's class (`class_of`)."""
    return class_of(module).__name__
