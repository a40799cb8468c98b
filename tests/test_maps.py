"""The maps of the house: a room's docstring names all its files; what the README's tables name is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [
    path.parent
    for room in ("ds_adacc", "kernels", "planner")
    for path in sorted(ROOT.glob(f"{room}/**/__init__.py"))
    if re.search(r"^\* ", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
]
PATH = "## The way of a tensor\n", "## Glossary\n"
OBJECTS = "## What the rooms hand on\n", "## The way of a tensor\n"


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


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_names_the_files_that_other_rooms_know(room):
    """Where it says so, as in `record/`: who comes to the room needs these first, and may leave out the rest."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    for sentence in re.findall(r"Other rooms know ([^.]*)\.", text):
        others = (path for path in (ROOT / "ds_adacc").glob("**/*.py") if room not in path.parents)
        imported = rf"^ *from ds_adacc\.{room.name}(?:\.(\w+)| import (\w+))"
        found = {a or b for path in others for a, b in re.findall(imported, path.read_text(), re.MULTILINE)}
        assert set(re.findall(r"`(\w+)`", sentence)) == found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_each_rule_is_cited_where_it_is_obeyed(room):
    rules = re.findall(
        r"^([A-Z]\d+)\. ", ast.get_docstring(ast.parse((room / "__init__.py").read_text())), re.MULTILINE
    )
    text = "".join(path.read_text() for path in (ROOT / "ds_adacc").glob("**/*.py") if path.name != "__init__.py")
    cited = {
        rule
        for found in re.findall(r"Rules? ([A-Z]\d+(?:(?:, | and )[A-Z]\d+)*)", text)
        for rule in re.split(r", | and ", found)
    }
    assert set(rules) <= cited, set(rules) - cited


def test_the_main_path_names_files_that_are_there():
    text = (ROOT / "ds_adacc" / "README.md").read_text()
    path = text[text.index(PATH[0]) : text.index(PATH[1])]
    named = re.findall(r"^\| `([a-z_0-9./]+)`", path, re.MULTILINE)
    assert len(named) > 20
    assert all((ROOT / "ds_adacc" / name).exists() for name in named), named


def test_the_objects_that_rooms_hand_on_are_where_it_says():
    text = (ROOT / "ds_adacc" / "README.md").read_text()
    table = text[text.index(OBJECTS[0]) : text.index(OBJECTS[1])]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) > 10
    for classes, files in rows:
        sources = "".join((ROOT / "ds_adacc" / name).read_text() for name in re.findall(r"`([^`]+)`", files))
        assert all(re.search(rf"^class {name}\b", sources, re.MULTILINE) for name in re.findall(r"`(\w+)`", classes))
