"""Who calls what runs now: a compiler, the import of a module, ds_adacc, or the program itself."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence

from torch._dynamo.eval_frame import skip_code

from ds_adacc.python_state.libraries import is_library

COMPILED_CODE = ("torch._dynamo.eval_frame", "compile_wrapper")  # Python module and name of what runs compiled code
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.")
_MADE_BY_COMPILERS = "torch._inductor.runtime.compile_tasks."  # the Python modules that Inductor generates
# Of the standard library, what hands on to its caller what it has read outside. Others read it for themselves, as
# `logging` does the clock, and imports do folders.
_HANDS_ON = frozenset({"os", "posixpath", "ntpath", "genericpath", "pathlib", "glob", "shutil", "json", "configparser"})
_HANDS_ON |= {"uuid", "random", "secrets", "inspect"}
_STATE = frozenset({"getstate", "setstate"})  # of Python's generator


def is_import(frame: types.FrameType) -> bool:
    """Whether a module's code runs because the module is imported, and not what `eval` or `exec` is given."""
    return frame.f_back is not None and frame.f_back.f_globals.get("__name__") == "importlib._bootstrap"


def is_random_of_no_account(frame: types.FrameType | None, called: str) -> bool:
    """Whether what is drawn at random, by the function `called`, has no part in the block's values.

    A temporary file is named at random: Triton's compiler writes some when a kernel first runs. torch.compile keeps the
    state of Python's generator: in Python or, as it looks at a function, in C. And its compilers draw at random too.
    But with what Dynamo draws in place of a function of the user's, the block computes.
    """
    calls = calls_under_way(frame)
    caller = next((module for module, _ in calls if module != "random"), "")
    is_dynamo = COMPILED_CODE in calls or caller.startswith("torch._dynamo.")
    keeps_state = is_dynamo and not _STATE.isdisjoint((calls[0][1], called))
    is_temporary = any(module == "tempfile" for module, _ in calls)
    return keeps_state or is_temporary or is_of_compiler(calls)


def is_of_compiler(calls: Sequence[tuple[str, str]]) -> bool:
    """Whether a compiler is at work, and no code that it has made has called what runs now."""
    nearest = next((module for module, _ in calls if module.startswith(_COMPILERS)), "")
    return nearest != "" and not nearest.startswith(_MADE_BY_COMPILERS)


def calls_under_way(frame: types.FrameType | None) -> list[tuple[str, str]]:
    """Python module and function of each call under way, the innermost first."""
    return [(str(each.f_globals.get("__name__")), each.f_code.co_name) for each in _outward(frame)]


def is_for_user(frame: types.FrameType | None) -> bool:
    """Whether code of the user's gets to know what a function in C returns, which the code of this frame calls."""
    modules = (str(each.f_globals.get("__name__")) for each in _outward(frame))
    return not is_library(next((name for name in modules if name.partition(".")[0] not in _HANDS_ON), None))


def _outward(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_ours(frame: types.FrameType) -> bool:
    """Whether a function of ds_adacc runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "ds_adacc"


# Python also calls these while compiled code is traced for the first time: Dynamo must not compile them.
for _each in (is_import, is_random_of_no_account, is_of_compiler, is_for_user, calls_under_way, _outward, is_ours):
    skip_code(_each.__code__)
