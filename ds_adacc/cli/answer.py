"""What a subcommand gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType


class BadInput(ValueError):
    """A file or an argument is wrong; the text tells the user which, and what would be right."""


@dataclass(frozen=True)
class Answer:
    """`document` is shown with --json, `view` without; `is_yes` false is exit code 1."""

    document: Mapping[str, Any]
    view: RenderableType
    is_yes: bool = True
