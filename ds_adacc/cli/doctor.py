"""Show what is installed and works here, and how to mend what does not."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc.cli.answer import Answer
from ds_adacc.cli.checks import Finding, cache_size, findings
from ds_adacc.report.layout import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments of its own."""


def run(arguments: argparse.Namespace) -> Answer:
    """What was found. The answer is no if something that ds_adacc requires is missing."""
    found = findings()
    fine = all(finding.fine for finding in found if finding.required)
    return Answer({"fine": fine, "findings": [asdict(f) for f in found], "cache": _cache()}, _view(found, fine), fine)


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
    verdict = "ds_adacc can run here" if fine else f"ds_adacc cannot run here, for want of {wanting}"
    lines = [*(["To mend:", *remedies] if remedies else []), verdict]
    return Group(table("ds_adacc doctor", ("what", "works", "need", "detail"), rows), *map(Text, lines))
