"""Whose code is it? What code of a library reads besides its arguments does not change; that of the user's may."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

_INSTALLED = frozenset({"site-packages", "dist-packages"})  # the folders of what is installed and not edited
# Libraries wherever they lie. DeepSpeed's hooks reach its whole engine, and some install it from a clone of their own.
TRUSTED = frozenset({"torch", "deepspeed", "ds_adacc", "triton", "numpy"})


def is_library(module: str | None) -> bool:
    """Whether code of this Python module is not the user's: what it reads besides its arguments does not change.

    That is the standard library, the packages in `TRUSTED`, and every package that is installed. `__main__` never is:
    if an installed package runs the user's script, as `python -m viztracer` does, both have that name.
    """
    package = (module or "__main__").partition(".")[0]
    if package == "__main__":
        return False
    return is_trusted(package) or (package in sys.modules and _is_installed(package))


def is_trusted(module: str) -> bool:
    """Whether this Python module is of the standard library, or of a package in `TRUSTED`."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in TRUSTED


@functools.cache  # where a loaded package lies does not change, and guards ask for every module of every block
def _is_installed(package: str) -> bool:
    module = sys.modules[package]
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    folder, name = os.path.split(path)
    folder = os.path.dirname(folder) if name.startswith("__init__.") else folder
    return bool(path) and (not _INSTALLED.isdisjoint(path.split(os.sep)) or package in _listed_in(folder))


@functools.cache  # a folder may have hundreds of packages
def _listed_in(folder: str) -> frozenset[str]:
    """The packages whose files are in lists that pip has written in this folder, as `pip install --target` does.

    Beside a clone there is none, and that of an editable package names other files.
    """
    lists = [each.read_text(encoding="utf-8", errors="replace") for each in Path(folder).glob("*.dist-info/RECORD")]
    return frozenset(re.split("[/.]", line, maxsplit=1)[0] for text in lists for line in text.splitlines())


def is_of_package(value: Any) -> bool:
    """Whether the object belongs to an installed package: it is of a class, or calls a function, that is defined there.

    Its state is read as far as it can be. What cannot be read of it is trusted: packages keep locks, caches and whole
    engines there, and a block that refers to one would otherwise never be recomputed.
    """
    owner = value.func if isinstance(value, functools.partial) else type(value)
    module = getattr(owner, "__module__", None)
    if hasattr(owner, "__array__"):  # of numbers
        return False
    return module is not None and is_library(module) and module.partition(".")[0] not in sys.stdlib_module_names
