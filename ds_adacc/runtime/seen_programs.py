"""Which predicted programs were seen to run, so that no block need be followed that is like one which was followed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from ds_adacc.execute.block import Block
from ds_adacc.python_state.content import SCALARS
from ds_adacc.python_state.guards import Guards


class SeenPrograms:
    """Programs by block type, each with what Python may have decided by: the block's numbers and its arguments.

    Two layers may run one program up to a length, and from there on two, as where a window is set for one of them.
    A number that is another one in every block is taken for that of the layer, by which nothing is decided.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._numbers: weakref.WeakKeyDictionary[Block, tuple[Any, frozenset[Any]]] = weakref.WeakKeyDictionary()

    def key(self, block_type: str, signature: Hashable, block: Block, blocks: Iterable[Block]) -> Hashable:
        """Names a program of this block type as `block` runs it, one of the `blocks`, in a call of this signature."""
        arguments, _, *ambience = signature
        alike = [each for each in blocks if each.name == block.name and each.state is not None]
        of = (block.state, len(alike))
        known = self._numbers.get(block)
        if known is None or known[0] != of:
            known = self._numbers[block] = of, _numbers(block, alike)
        return block_type, arguments, *ambience, known[1]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._seen

    def add(self, key: Hashable) -> None:
        self._seen.add(key)


def _numbers(block: Block, alike: list[Block]) -> frozenset[Any]:
    of_all = [_plain(each.state.marks) for each in alike]

    def is_of_the_layer(name: str) -> bool:
        return len(of_all) > 1 and len({each.get(name) for each in of_all}) == len(of_all)

    return frozenset(item for item in _plain(block.state.marks).items() if not is_of_the_layer(item[0]))


def _plain(marks: Guards) -> dict[str, Any]:
    """The marks of numbers, strings and the like."""
    return {name: mark for name, mark in marks.items() if type(mark) is tuple and mark and mark[0] in SCALARS}
