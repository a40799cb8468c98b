"""Whether the program has asked for checkpointing of a call of a block that ds_adacc has found (Rule T7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_adacc.program.arguments import tensors_in

ORIGINAL = "_ds_adacc_original_checkpointing"  # the attribute of a layer that keeps what ds_adacc has replaced


@dataclass(eq=False)
class CallsWithin:
    """The calls of blocks within the call of a function.

    `count`: how many. `nodes`: how many of autograd's nodes were made in them. `given`: the tensors they were given.
    """

    count: int = 0
    nodes: int = 0
    given: list[torch.Tensor] = field(default_factory=list)


class Asked:
    """The modules that the program's own checkpoint function calls now. Nothing is set on them, as that is watched.

    `calls` counts those of blocks that ds_adacc has found, and `gathered` those of blocks that ZeRO-3 partitions.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module | None] = []
        self.calls = self.gathered = 0
        self._within: list[CallsWithin] = []

    @contextmanager
    def during(self, module: nn.Module | None) -> Iterator[None]:
        """The checkpoint function has been given this module, and calls it. None: a function, which calls several."""
        try:
            self._modules.append(module)  # within `try`: an interrupt comes where a function in C returns
            yield
        finally:
            self._modules.remove(module)

    @contextmanager
    def trying(self) -> Iterator[CallsWithin]:
        """As `during` a function, whose calls of blocks are noted."""
        within = CallsWithin()
        try:
            self._within.append(within)
            with self.during(None):
                yield within
        finally:
            self._within.remove(within)

    def note_call(self, given: Any, nodes: int, is_gathered: bool) -> None:
        """A block has been called, with these arguments, and so many nodes were made in it."""
        self.calls += 1
        self.gathered += is_gathered
        for within in self._within:  # a function may call another
            within.count += 1
            within.nodes += nodes
            within.given += tensors_in(given)

    def is_asked_for(self, module: nn.Module) -> bool:
        """Whether the program has asked for checkpointing of the call of the module that begins now.

        A layer of transformers asks by two flags, which it checks itself in each call (`GradientCheckpointingLayer`).
        """
        if any(each is module or each is None for each in self._modules):
            return True
        return ORIGINAL in vars(module) and module.training and bool(getattr(module, "gradient_checkpointing", False))
