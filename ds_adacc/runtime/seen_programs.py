"""Predicted programs that one block was seen to run. Blocks like it need not be followed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from ds_adacc.execute.block import Block
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Signature
from ds_adacc.python_state.guards import without_identity

_MOST = 4096  # each combination of input sizes is one


class SeenPrograms:
    """Programs by block type, each with what Python may have decided by: the block's marks and its arguments.

    Two layers may run one program up to a length, and from there on two, as where a window is set for one of them.
    Only what tells which layer it is has no part in it: its modules and parameters, and the number that counts layers.

    When there are too many, all are forgotten: a block is then followed once more.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._marks: weakref.WeakKeyDictionary[Block, tuple[Any, Hashable]] = weakref.WeakKeyDictionary()

    def key(self, recording: Recording, signature: Signature, block: Block, blocks: Iterable[Block]) -> Hashable:
        """Names a program as `block` runs it, one of the `blocks`, in a call of this signature.

        Its constants count, which are no part of its digest: a block that was recorded may compute them from the size,
        and another one may be predicted with those of a smaller size.
        """
        alike = [each for each in blocks if each.kind == block.kind and each.last_reading is not None]
        of = (block.last_reading, len(alike))
        known = self._marks.get(block)
        if known is None or known[0] != of:
            known = self._marks[block] = of, _marks(block, alike)
        return recording.digest, recording.constants, block.kind, signature._replace(tensors=None), known[1]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._seen

    def add(self, key: Hashable) -> None:
        if len(self._seen) >= _MOST and key not in self._seen:
            self._seen.clear()
        self._seen.add(key)


def _marks(block: Block, alike: list[Block]) -> Hashable:
    of_all = [_unnamed(each.last_reading.marks) for each in alike]
    return tuple((name, mark) for name, mark in _unnamed(block.last_reading.marks).items() if not _counts(name, of_all))


def _unnamed(marks: Mapping[str, Hashable]) -> dict[str, Hashable]:
    return {name: without_identity(mark) for name, mark in marks.items() if not _is_wrapper(mark)}


def _is_wrapper(mark: Hashable) -> bool:
    """Whether it is that of the forward which `wrap` has put on a block: each has its own."""
    return isinstance(mark, weakref.ref) and hasattr(mark(), "covered")


def _counts(name: str, of_all: list[dict[str, Hashable]]) -> bool:
    """Whether this number counts the layers: in all of them together it has consecutive values."""
    marks = [each.get(name) for each in of_all]
    if len(marks) < 2 or not all(type(mark) is tuple and mark and mark[0] is int for mark in marks):
        return False
    numbers = sorted(mark[1] for mark in marks)
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
