"""Show what is installed and works here, and how to mend what does not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ds_adacc.cli.answer import Answer, BadInput
from ds_adacc.cli.checks import Finding, cache_size, finding_of, findings
from ds_adacc.report.grid import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --script."""
    parser.add_argument("--config", metavar="DS_CONFIG", help="also check the section of this ds_config")
    parser.add_argument("--script", metavar="FILE", help="also check that this training script enables ds_adacc")


def run(arguments: argparse.Namespace) -> Answer:
    """What was found. The answer is no if something required is missing, or the script does not use ds_adacc.

    Raises BadInput for a file that is not there.
    """
    of_the_program = _of_the_program(arguments)
    with Console(stderr=True).status("importing and trying out what is installed, up to half a minute"):
        here = findings()
    found = [*here, *of_the_program]
    missing, unused = _wanting(here), _wanting(of_the_program)
    verdict = f"ds_adacc cannot run here. Missing or not working: {missing}" if missing else "ds_adacc can run here"
    if unused:
        verdict += f"\nYour program cannot use ds_adacc as it is: see {unused} above"
    fine = not (missing or unused)
    document = {"fine": fine, "findings": [asdict(finding) for finding in found], "cache": _cache()}
    return Answer(document, _view(found, verdict), fine)


def _of_the_program(arguments: argparse.Namespace) -> list[Finding]:
    looked = []
    for name, path, check in (("section", arguments.config, _config), ("script", arguments.script, _script)):
        if path is not None:
            if not Path(path).is_file():
                raise BadInput(f"there is no file {path!r} in {Path.cwd()}")
            looked.append(finding_of(name, partial(check, path), required=True))
    return looked


def _config(path: str) -> str:
    from ds_adacc.cli.script import check_config  # imported here, as it needs torch, which may be missing

    return check_config(path)


def _script(path: str) -> str:
    from ds_adacc.cli.script import check_script

    return check_script(path)


def _wanting(found: Sequence[Finding]) -> str:
    return ", ".join(finding.name for finding in found if finding.required and finding.fine is False)


def _cache() -> dict[str, Any] | None:
    """None for a folder that cannot be read, or where a package is missing; then a finding says why."""
    try:
        return cache_size()
    except Exception:
        return None


def _view(found: Sequence[Finding], verdict: str) -> RenderableType:
    works = {True: "yes", False: "NO", None: "?"}
    rows = [(f.name, works[f.fine], "required" if f.required else "optional", f.detail) for f in found]
    mended: dict[str, list[str]] = {}
    for finding in found:
        if finding.remedy:
            mended.setdefault(finding.remedy, []).append(finding.name)
    remedies = [f"  {', '.join(names)}: {remedy}" for remedy, names in mended.items()]
    lines = [*(["To fix:", *remedies] if remedies else []), verdict]
    return Group(table("ds_adacc doctor", ("what", "works", "need", "detail"), rows), *map(Text, lines))
