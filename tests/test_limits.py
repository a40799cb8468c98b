"""LIMITS.md quotes the log, tables and errors, by which users find a part of it. The code must say the same."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUOTES = [
    quote
    for paragraph in re.findall(r"^(?:Log|Table|Error): .*(?:\n.+)*", (ROOT / "LIMITS.md").read_text(), re.MULTILINE)
    for quote in re.findall(r"`([^`]+)`", paragraph)
]
# The code puts it together: "block %s runs a %s that is never recomputed", and "compiled graph".
IN_PARTS = {"runs a compiled graph that is never recomputed": "that is never recomputed"}


def texts_of(path):
    """The text literals of a file; what is put into one counts as "8"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "8" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub("%[sd]", "8", node.value)


@pytest.fixture(scope="module")
def texts():
    return [text for path in (ROOT / "ds_adacc").glob("**/*.py") for text in texts_of(path)]


@pytest.mark.parametrize("quote", QUOTES)
def test_what_is_quoted_is_said(quote, texts):
    pattern = ".+?".join(map(re.escape, IN_PARTS.get(quote, quote).split("...")))
    assert any(re.search(pattern, text) for text in texts)


def test_there_are_quotes():
    assert len(QUOTES) > 20 and IN_PARTS.keys() <= set(QUOTES)
