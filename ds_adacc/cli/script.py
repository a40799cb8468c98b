"""What `ds_adacc doctor` reads off a ds_config and a training script: whether anything enables ds_adacc in it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from ds_adacc.cli.checks import Absent
from ds_adacc.config import SECTION, load

_SET = f'add a section to it: "{SECTION}": {{"memory_budget": 0.4}}; or set ADACC_CONFIG to that section'
_ENABLE = (
    "call ds_adacc.initialize in place of deepspeed.initialize; or leave the script as it is and launch it by "
    "`deepspeed --module ds_adacc.run SCRIPT`"
)
_ENTRIES = {"initialize": "deepspeed", "Trainer": "transformers", "Accelerator": "accelerate"}


def check_config(path: str) -> str:
    """What the section says. Raises Absent if nothing gives one, ConfigError if it is wrong."""
    section = load(path)
    if section is None:
        raise Absent(f'{path} has no "{SECTION}" section, or says "enabled": false in it', _SET)
    origin = "from ADACC_CONFIG" if os.environ.get("ADACC_CONFIG") else f"of {path}"
    return f'the "{SECTION}" section {origin} is valid'


def check_script(path: str) -> str:
    """Where the script enables ds_adacc. Raises Absent if it makes an engine and nothing enables ds_adacc in it.

    Only this file is read, not what it imports. Raises OSError or SyntaxError for a file that cannot be read.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    own = [line for line, module in _imports(tree) if module.partition(".")[0] == "ds_adacc"]
    if own:
        return f"{path} imports ds_adacc in line {own[0]}"
    imported = {module.partition(".")[0] for _, module in _imports(tree)}
    for line, name in _calls(tree):
        if _ENTRIES.get(name) in imported:
            raise Absent(
                f"{path} calls {_ENTRIES[name]}'s {name} in line {line}, and nothing of ds_adacc: the section does "
                "nothing",
                _ENABLE,
            )
    raise Absent(
        f"{path} does not import ds_adacc, so the section does nothing, unless another module enables it", _ENABLE
    )


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the module of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def _calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each call, and the last part of the name that it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.lineno, node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.lineno, node.func.id
