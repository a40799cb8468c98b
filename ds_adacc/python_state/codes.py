"""What stands in a function's code: names that it reads, and what it imports."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Callable
from itertools import chain
from types import CodeType
from typing import TypeVar

_MOST = 4096
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")  # instructions of Python
_T = TypeVar("_T")


def kept_by_code(find: Callable[[CodeType], _T]) -> Callable[[CodeType], _T]:
    """Keep what was found in a code: it does not change, and a function that is a block is asked at each call.

    By its address, since torch.compile makes codes that hold a dict and so have no hash. Each entry keeps its code
    alive, so no other code gets its address.
    """
    kept: dict[int, tuple[CodeType, _T]] = {}

    @functools.wraps(find)
    def found(code: CodeType) -> _T:
        known = kept.get(id(code))
        if known is None:
            if len(kept) >= _MOST:
                kept.clear()
            known = kept[id(code)] = code, find(code)
        return known[1]

    return found


@kept_by_code
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names that the code reads or sets as globals, in order. Other names in it are of attributes."""
    instructions = dis.get_instructions(code)
    return tuple(dict.fromkeys(each.argval for each in instructions if each.opname in _OF_GLOBALS))


@kept_by_code
def names_in(code: CodeType) -> frozenset[str]:
    """The names in the code, and its texts: those of a pattern in `match` are in a tuple. A format holds names too."""
    constants = chain.from_iterable(each if type(each) is tuple else (each,) for each in code.co_consts)
    texts = [each for each in constants if type(each) is str]
    in_formats = chain.from_iterable(re.findall(r"\w+", text) for text in texts if "{" in text)
    return frozenset((*code.co_names, *texts, *in_formats))


@kept_by_code
def imports(code: CodeType) -> tuple[tuple[str, int], ...]:
    """The names of the Python modules that the code imports as it runs, and from how many levels up."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    before = zip(instructions[2:], instructions, strict=False)  # the level is pushed first, then what is taken of it
    return tuple((each.argval, level.argval) for each, level in before if each.opname == "IMPORT_NAME")
