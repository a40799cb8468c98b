"""Whether the program has asked for checkpointing of a call of a block that ds_adacc has found (Rule T7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

ORIGINAL = "_ds_adacc_original_checkpointing"  # the attribute of a layer that keeps what ds_adacc has replaced


class Asked:
    """The modules that the program's own checkpoint function calls now. Nothing is set on them, as that is watched.

    `calls` counts those of all blocks that ds_adacc has found, `gathered` those of blocks that ZeRO-3 partitions, and
    `nodes` the nodes of autograd that were made in all of them.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module | None] = []
        self.calls = self.gathered = self.nodes = 0

    @contextmanager
    def during(self, module: nn.Module | None) -> Iterator[None]:
        """The checkpoint function has been given this module, and calls it. None: a function, which calls several."""
        try:
            self._modules.append(module)  # within `try`: an interrupt comes where a function in C returns
            yield
        finally:
            self._modules.remove(module)

    def is_asked_for(self, module: nn.Module) -> bool:
        """Whether the program has asked for checkpointing of the call of the module that begins now.

        A layer of transformers asks by two flags, which it checks itself in each call (`GradientCheckpointingLayer`).
        """
        if any(each is module or each is None for each in self._modules):
            return True
        return ORIGINAL in vars(module) and module.training and bool(getattr(module, "gradient_checkpointing", False))
