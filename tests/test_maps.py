"""The maps of the house: what the rooms' docstrings and README files name is there, and no file is left out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [
    path.parent
    for path in sorted([*ROOT.glob("ds_adacc/**/__init__.py"), *ROOT.glob("planner/__init__.py")])
    if re.search(r"^\* ", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
]
WAY = "## The way of a tensor\n", "## Glossary\n"


def own_names(room):
    """The files and folders of a room, by their stems."""
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    return {path.stem for path in room.glob("*.py") if not path.stem.startswith("_")} | folders


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_names_its_files_and_no_others(room):
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert all(re.search(rf"\b{name}\b", text) for name in own_names(room)), own_names(room)
    for item in re.findall(r"^\* `?([a-z_0-9]+)(?:\.py|/)?`?[:,;]", text, re.MULTILINE):
        assert item in own_names(room)


def test_the_way_of_a_tensor_names_every_file_of_the_library_and_no_others():
    text = (ROOT / "ds_adacc" / "README.md").read_text()
    way = text[text.index(WAY[0]) : text.index(WAY[1])]
    named = set(re.findall(r"([a-z_0-9]+)\.py`", way))
    there = {path.stem for part in ("ds_adacc", "planner") for path in (ROOT / part).rglob("*.py")}
    assert named <= there, named - there
    rooms = (room for room in ROOMS if room.parent.name == "ds_adacc" and room.name not in ("cli", "plots"))
    files = {path.stem for room in rooms for path in room.glob("*.py") if not path.stem.startswith("_")}
    assert files <= named, files - named
