"""The blocks met so far: modules for as long as they live, other functions while they are among the latest."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ds_adacc.block import Block, Record
from ds_adacc.reach import identity, name_of

_FUNCTIONS = 1024


class Registry:
    """Knows the block that a callable is."""

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, Block] = weakref.WeakKeyDictionary()
        self._functions: OrderedDict[Hashable, Block] = OrderedDict()

    def of(self, function: Callable[..., Any]) -> Block:
        """The block of a module, or of any function that has this code over the same cells."""
        if isinstance(function, nn.Module):
            return self.of_module(function, type(function).__name__)
        key = identity(function)
        block = self._functions.get(key)
        if block is None:
            block = self._functions[key] = Block(name_of(function))
            if len(self._functions) > _FUNCTIONS:
                self._functions.popitem(last=False)
        else:
            self._functions.move_to_end(key)
        return block

    def of_module(self, module: nn.Module, name: str) -> Block:
        """The block that `module` is, named `name` if it is new."""
        block = self._modules.get(module)
        if block is None:
            block = self._modules[module] = Block(name)
        return block

    def all(self) -> list[Block]:
        return [*self._modules.values(), *self._functions.values()]

    def records(self) -> list[Record]:
        """Those of all blocks that have a plan."""
        return [record for block in self.all() for record in block.records() if record.plan is not None]
