"""What `ds_adacc doctor` reads off a ds_config and a training script: whether anything enables ds_adacc in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ds_adacc.cli.checks import Absent
from ds_adacc.config import SECTION, load, origin

_SET = f'add a section to it: "{SECTION}": {{"memory_budget": 0.4}}; or set ADACC_CONFIG to that section'
_LAUNCH = "; or leave the script as it is and launch it by `{} --module ds_adacc.run SCRIPT`"
_ENABLE = "call ds_adacc.initialize in place of deepspeed.initialize" + _LAUNCH.format("deepspeed")
# names in the package ds_adacc, and * for all of them
_ENABLING = frozenset({"initialize", "attach", "checkpointing", "huggingface", "engine", "run", "*"})
_ENTRIES = {  # what makes the engine: its package, and what to do in a script that calls it
    "initialize": ("deepspeed", _ENABLE),
    "Trainer": (
        "transformers",
        "`from ds_adacc.huggingface import AdaccCallback`, and pass callbacks=[AdaccCallback()] to the Trainer"
        + _LAUNCH.format("deepspeed"),
    ),
    "Accelerator": (
        "accelerate",
        "call ds_adacc.attach(model) with the model that accelerator.prepare returns"
        + _LAUNCH.format("accelerate launch"),
    ),
}


def check_config(path: str) -> str:
    """What the section says. Raises Absent if nothing gives one, ConfigError if it is wrong."""
    section = load(path)
    if section is None:
        raise Absent(f'{path} has no "{SECTION}" section, or says "enabled": false in it', _SET)
    return f'the "{SECTION}" section {origin(path)} is valid'


def check_script(path: str) -> str:
    """Where the script enables ds_adacc. Raises Absent if it makes an engine and nothing enables ds_adacc in it.

    Only this file is read, not what it imports. Raises OSError or SyntaxError for a file that cannot be read.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    own = sorted(_uses(tree))
    for line, name in own:
        if name in _ENABLING:
            return f"{path} uses ds_adacc.{name} in line {line}"
    imported = {module.partition(".")[0] for _, module in _imports(tree)}
    for line, name in _calls(tree):
        package, remedy = _ENTRIES.get(name, ("", ""))
        if package in imported:
            raise Absent(
                f"{path} calls {package}'s {name} in line {line}, and nothing that enables ds_adacc: the section does "
                "nothing",
                remedy,
            )
    what = "uses nothing that enables ds_adacc" if own else "does not import ds_adacc"
    raise Absent(f"{path} {what}, so the section does nothing, unless another module enables it", _ENABLE)


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each thing of ds_adacc that the script imports, or has by `ds_adacc.name`."""
    bound = set()  # names of the package itself
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, rest = alias.name.partition(".")
                if package == "ds_adacc":
                    bound.add(alias.asname or package)
                    yield node.lineno, rest.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            package, _, rest = node.module.partition(".")
            if package == "ds_adacc":
                names = [rest.partition(".")[0]] if rest else [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.lineno, node.attr


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
