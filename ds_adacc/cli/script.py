"""What `ds_adacc doctor` reads off a ds_config and a training script: whether anything enables ds_adacc in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ds_adacc.cli.checks import Absent, Unclear
from ds_adacc.config import SECTION, load, origin

_SET = f'add a section to it: "{SECTION}": {{"memory_budget": 0.4}}; or set ADACC_CONFIG to that section'
_LAUNCH = "; or leave the script as it is and launch it by `{} --module ds_adacc.run SCRIPT`"
_ENABLE = "call ds_adacc.initialize in place of deepspeed.initialize" + _LAUNCH.format("deepspeed")
# names in the package ds_adacc, and * for all of them
_ENABLING = frozenset({"initialize", "attach", "checkpointing", "huggingface", "engine", "run", "*"})
_ON_FIT_START = "call ds_adacc.attach(trainer.strategy.model) in the on_fit_start of a callback" + _LAUNCH.format(
    "deepspeed"
)
_CALLBACK = (
    "`from ds_adacc.huggingface import AdaccCallback`, and pass callbacks=[AdaccCallback()] to the Trainer"
    + _LAUNCH.format("deepspeed")
)
_ENTRIES = {  # what makes the engine, by package: a pattern of its name, and what to do in a script that calls it
    "deepspeed": ("initialize", _ENABLE),
    "transformers": ("*Trainer", _CALLBACK),
    "trl": ("*Trainer", _CALLBACK),
    "lightning": ("Trainer", _ON_FIT_START),
    "pytorch_lightning": ("Trainer", _ON_FIT_START),
    "accelerate": (
        "Accelerator",
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

    Raises Unclear if the script passes ds_adacc on as a value, as in `(ds_adacc if on else deepspeed).initialize()`.
    Only this file is read, not what it imports. Raises OSError or SyntaxError for a file that cannot be read.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    own = sorted(_uses(tree))
    for line, name in own:
        if name in _ENABLING:
            return f"{path} uses ds_adacc.{name} in line {line}"
    if (line := _passed_on(tree)) is not None:
        raise Unclear(
            f"{path} uses ds_adacc itself as a value in line {line}, so only a run shows whether that enables it. Then "
            "the log says how many blocks were found"
        )
    for line, package, name in _calls(tree):
        if _makes_engine(package, name):
            raise Absent(
                f"{path} calls {package}'s {name} in line {line}, and nothing that enables ds_adacc: the section does "
                "nothing",
                _ENTRIES[package][1],
            )
    what = "uses nothing that enables ds_adacc" if own else "does not import ds_adacc"
    raise Absent(f"{path} {what}, so the section does nothing, unless another module enables it", _ENABLE)


class _Import(NamedTuple):
    """`path`: the names that lead to what is imported. `name`: what the script calls it, or for `import a.b`, a."""

    line: int
    path: list[str]
    name: str
    is_module: bool


def _imports(tree: ast.AST) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name.split(".")
                yield _Import(node.lineno, path, alias.asname or path[0], True)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                path = [*node.module.split("."), alias.name]
                yield _Import(node.lineno, path, alias.asname or alias.name, False)


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each thing of ds_adacc that the script imports, or has by `ds_adacc.name`."""
    for line, (package, *names), _, _ in _imports(tree):
        if package == "ds_adacc":
            yield line, names[0] if names else ""
    bound = _names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.lineno, node.attr


def _names(tree: ast.AST) -> set[str]:
    """What the script calls the package ds_adacc, or a module of it."""
    return {each.name for each in _imports(tree) if each.path[0] == "ds_adacc" and each.is_module}


def _passed_on(tree: ast.AST) -> int | None:
    """The first line that has the package for a value, and not for what it looks up in it."""
    bound, looked_up = _names(tree), {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    reads = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return min((n.lineno for n in reads if n.id in bound and id(n) not in looked_up), default=None)


def _calls(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Of each call the line, the package that what it calls comes from, and its name there.

    The package is "" if that is not known. A class of the script counts as the one that it inherits from, of
    several the one that may make an engine. Another name for something counts as that, as in `T = trl.DPOTrainer`.
    """
    origins = {each.name: (each.path[0], each.path[-1]) for each in _imports(tree) if _is_known(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            bases = [_origin(base, origins) for base in node.bases]
            origins[node.name] = next((base for base in bases if _makes_engine(*base)), bases[0])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):  # a method may have the name of what is imported
            origins.setdefault(node.name, ("", node.name))
        elif isinstance(node, ast.Assign) and (origin := _origin(node.value, origins))[0]:
            origins |= {target.id: origin for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, *_origin(node.func, origins)


def _is_known(imported: _Import) -> bool:
    """Whether it is known what names are imported. `from x import *` may import those of a package that is known."""
    return imported.name != "*" or imported.path[0] in _ENTRIES


def _makes_engine(package: str, name: str) -> bool:
    return package in _ENTRIES and fnmatchcase(name, _ENTRIES[package][0])


def _origin(node: ast.expr, origins: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """The package and the name there of what an expression names; `origins` has those of the script's own names.

    A name that `origins` does not have is from where it has "*".
    """
    if isinstance(node, ast.Name):
        return origins.get(node.id) or (origins.get("*", ("", ""))[0], node.id)
    if isinstance(node, ast.Subscript):  # of a generic class, such as `Trainer[Model]`
        return _origin(node.value, origins)
    if isinstance(node, ast.Attribute):
        package, _ = _origin(node.value, origins)
        return package, node.attr
    return "", ""
