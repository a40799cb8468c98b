"""Run a training script unchanged; its `deepspeed.initialize` is `ds_adacc.initialize`.

If it calls `deepspeed.checkpointing.checkpoint`, that is `ds_adacc.checkpointing.checkpoint` for engines that run with
ds_adacc.

    deepspeed --module ds_adacc.run train.py ...
    deepspeed --module ds_adacc.run -m package.train ...
    accelerate launch --module ds_adacc.run train.py ...

The exit code is the script's own, or 2 if there is no such script. A script that ends well, but has never called
`deepspeed.initialize`, has run without ds_adacc; a warning says so.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ds_adacc import checkpointing
from ds_adacc.engine.patch_checkpointing import patch_checkpointing
from ds_adacc.engine.patch_initialize import patch_deepspeed
from ds_adacc.log import get_logger

_USAGE = "usage: deepspeed --module ds_adacc.run [-m] SCRIPT [ARGUMENT ...]"
_HELP = frozenset({"-h", "--help"})
_OF_THE_LAUNCHER = ("--local_rank=", "--local-rank=")


def main(arguments: Sequence[str]) -> None:
    """Run the script or module that `arguments` name as `__main__`, with the rest of them as its arguments.

    A `--local_rank=N` before its name comes from the launcher, which puts it after the name of what it starts. It
    becomes the script's first argument.
    """
    given = list(arguments)
    handed_on = [given.pop(0)] if given and given[0].startswith(_OF_THE_LAUNCHER) else []
    is_module = given[:1] == ["-m"]
    if is_module:
        given.pop(0)
    if _HELP.intersection(given[:1]):
        print(__doc__)
        return
    if not given:
        _refuse(_USAGE)
    target, *own = given
    sys.argv = [target, *handed_on, *own]
    (_run_module if is_module else _run_file)(target)


def _run_file(path: str) -> None:
    if not os.path.isfile(path):
        _refuse(f"ds_adacc.run: there is no script {path!r} in {os.getcwd()}\n{_USAGE}")
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with _deepspeed_patched():
        runpy.run_path(path, run_name="__main__")


def _run_module(name: str) -> None:
    if not _exists(name):
        _refuse(f"ds_adacc.run: there is no module {name!r} to import\n{_USAGE}")
    with _deepspeed_patched():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextmanager
def _deepspeed_patched() -> Iterator[None]:
    patch_deepspeed()
    patch_checkpointing()
    try:
        yield
    except SystemExit as ended:
        if not ended.code:
            _warn_unless_started()
        raise
    _warn_unless_started()


def _warn_unless_started() -> None:
    if not (checkpointing.registry.has_started or _HELP.intersection(sys.argv)):
        get_logger().warning(
            "adacc did nothing: the script has ended without a call of deepspeed.initialize or ds_adacc.attach. Does "
            "it train with DeepSpeed? accelerate, say, uses DeepSpeed only where its own config says so"
        )


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # raised if its parent package does not exist
        return False


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
