"""Show what is installed and works here, and how to mend what does not."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc.cli.answer import Answer
from ds_adacc.cli.checks import Finding, cache_size, finding_of, findings
from ds_adacc.cli.script import ENABLE, SET, check_config, check_script
from ds_adacc.report.layout import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --script."""
    parser.add_argument("--config", metavar="DS_CONFIG", help="also check the section of this ds_config")
    parser.add_argument("--script", metavar="FILE", help="also check that this training script enables ds_adacc")


def run(arguments: argparse.Namespace) -> Answer:
    """What was found. The answer is no if something required is missing, or the script does not use ds_adacc."""
    found = [*findings(), *_of_the_program(arguments)]
    fine = all(finding.fine for finding in found if finding.required)
    return Answer({"fine": fine, "findings": [asdict(f) for f in found], "cache": _cache()}, _view(found, fine), fine)


def _of_the_program(arguments: argparse.Namespace) -> list[Finding]:
    looked = []
    if arguments.config is not None:
        looked.append(finding_of("section", partial(check_config, arguments.config), SET, required=True))
    if arguments.script is not None:
        looked.append(finding_of("script", partial(check_script, arguments.script), ENABLE, required=True))
    return looked


def _cache() -> dict[str, Any] | None:
    """None for a file that cannot be read; then a finding says why."""
    try:
        size = cache_size()
    except (sqlite3.Error, OSError, RuntimeError):
        return None
    return {"path": str(size.path), "bytes": size.nbytes, "profiles": size.profiles}


def _view(found: Sequence[Finding], fine: bool) -> RenderableType:
    rows = [(f.name, "yes" if f.fine else "NO", "required" if f.required else "optional", f.detail) for f in found]
    mended: dict[str, list[str]] = {}
    for finding in found:
        if finding.remedy:
            mended.setdefault(finding.remedy, []).append(finding.name)
    remedies = [f"  {', '.join(names)}: {remedy}" for remedy, names in mended.items()]
    wanting = ", ".join(finding.name for finding in found if finding.required and not finding.fine)
    verdict = "ds_adacc can run here" if fine else f"ds_adacc cannot run here: {wanting} is missing or does not work"
    lines = [*(["To fix:", *remedies] if remedies else []), verdict]
    return Group(table("ds_adacc doctor", ("what", "works", "need", "detail"), rows), *map(Text, lines))
