"""The blocks met so far: modules while they live, other functions while they are among the last thousand or so used."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from ds_adacc.execute.block import Block
from ds_adacc.execute.variant import Variant
from ds_adacc.program.module_class import class_name, name_in_model
from ds_adacc.python_state.closure import closure_of, identity, name_of

_FUNCTIONS = 1024  # closures are made anew at every forward, and some never come back


class BlockRegistry:
    """Finds the block that a callable is."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.restore(())

    def name_modules(self, model: nn.Module) -> None:
        """Call the modules of the model by their names in it, which are the same on all ranks.

        Others are called by their classes.
        """
        self._names.update({module: name_in_model(name, module) for name, module in model.named_modules()})

    def restore(self, past: Sequence[Mapping[str, Any]]) -> None:
        """Begin anew. `past`: the blocks of the run that this one resumes, as `to_plain` gave them.

        Blocks of one name are matched in the order in which they are met, which is the same in both runs: that of the
        forward.
        """
        self._past = [Block.from_plain(data) for data in past]
        self._modules: weakref.WeakKeyDictionary[nn.Module, Block] = weakref.WeakKeyDictionary()
        self._functions: OrderedDict[Hashable, Block] = OrderedDict()
        self._called_once: set[Hashable] = set()  # those functions

    def of(self, function: Callable[..., Any]) -> Block:
        """The block of a module, or of a function: the same code over the same closure cells is the same block."""
        if isinstance(function, nn.Module):
            return self.of_module(function, self._names.get(function) or class_name(function))
        key = identity(function)
        block = self._functions.get(key)
        if block is None:
            block = self._functions[key] = self._meet(name_of(function))
            block.live_with(closure_of(function).modules)
            self._called_once.add(key)
            if len(self._functions) > _FUNCTIONS:
                forgotten, _ = self._functions.popitem(last=False)
                block.is_always_new = forgotten in self._called_once
                self._called_once.discard(forgotten)
        else:
            self._functions.move_to_end(key)
            self._called_once.discard(key)
        return block

    def of_module(self, module: nn.Module, name: str) -> Block:
        """The block of `module`; a new one is named `name`."""
        block = self._modules.get(module)
        if block is None:
            block = self._modules[module] = self._meet(name)
            block.live_with([module])
        return block

    def _meet(self, name: str) -> Block:
        known = next((position for position, block in enumerate(self._past) if block.name == name), None)
        return Block(name) if known is None else self._past.pop(known)

    def all(self) -> list[Block]:
        return [*self._modules.values(), *self._functions.values()]

    def every(self) -> list[Block]:
        """All blocks, also those of the past that are yet to be met."""
        return [*self.all(), *self._past]

    def variants(self) -> list[tuple[Block, Variant]]:
        """The variants of all blocks that have a recording, each with its block."""
        return [(block, variant) for block in self.all() for variant in block.variants() if variant.is_recorded]
