"""Imports go one way, and the planner costs neither torch nor CUDA nor DeepSpeed."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import ds_adacc

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def imported(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return names


@pytest.mark.parametrize(("room", "own"), [("planner", "ds_adacc.planner"), ("kernels", "ds_adacc.kernels")])
def test_planner_and_kernels_know_nobody(room, own):
    for path in (ROOT / room).rglob("*.py"):
        foreign = [name for name in imported(path) if name.split(".")[0] == "ds_adacc" and not name.startswith(own)]
        assert not foreign, f"{path} imports {foreign}"


def test_planner_needs_python_mip_alone():
    allowed = {"ds_adacc", "mip", *sys.stdlib_module_names}
    for path in (ROOT / "planner").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imported(path)} - allowed
        assert not foreign, f"{path} imports {foreign}"


def test_importing_the_planner_loads_no_torch():
    code = "import sys, ds_adacc.planner; print([m for m in ('torch', 'deepspeed', 'cupy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_without_a_home_folder_it_is_told_what_to_set():
    homeless = "import pathlib\ndef home():\n    raise RuntimeError('No home.')\npathlib.Path.home = home\n"
    told = subprocess.run([sys.executable, "-c", homeless + "import ds_adacc.planner"], capture_output=True, text=True)
    assert told.stderr.endswith("python-mip, the solver, cannot be imported: No home. Set HOME to a folder\n")


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'deepspeed.x'"), AttributeError("no attribute")]
)
@pytest.mark.parametrize("name", ["initialize", "checkpointing"])
def test_a_package_of_another_version_is_told_how_to_be_found(monkeypatch, error, name):
    """As an older DeepSpeed fails, which lacks a module: that alone does not tell what to do."""

    def fail(_):
        raise error

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ImportError) as raised:
        ds_adacc.__getattr__(name)
    hint = "`ds_adacc doctor` tells which package is missing, or has the wrong version"
    assert str(raised.value) == f"ds_adacc.{name} cannot be imported: {type(error).__name__}: {error}. {hint}"
    assert raised.value.__cause__ is error


def test_no_class_is_derived_from_what_python_3_10_cannot_subscript():
    """Python 3.11 came with `LoggerAdapter[...]`; nothing of ds_adacc could be imported before that."""
    older = "import logging\nfor each in (logging.LoggerAdapter, logging.StreamHandler):\n"
    older += "    if '__class_getitem__' in vars(each): del each.__class_getitem__\n"
    rooms = [path.parent for path in (ROOT / "ds_adacc").glob("**/__init__.py") if path.parent != ROOT / "ds_adacc"]
    names = [path.relative_to(ROOT).with_suffix("") for room in rooms for path in room.glob("[a-z]*.py")]
    code = older + "".join(f"import {'.'.join(name.parts)}\n" for name in names if "cuda" not in name.parts)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_doctor_itself_needs_no_package_that_it_looks_for():
    code = "import sys, ds_adacc.cli.doctor; print([m for m in ('torch', 'mip', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_checkpointing_comes_with_the_package_and_needs_no_deepspeed_nor_rich_before_a_table():
    code = "import sys, ds_adacc; ds_adacc.checkpointing.checkpoint(lambda: None); import ds_adacc.report.plan_text; "
    code += "print([name for name in ('deepspeed', 'rich.table') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_matplotlib_is_needed_by_the_plots_alone():
    for path in (ROOT / "ds_adacc").rglob("*.py"):
        drawn = [name for name in imported(path) if name.split(".")[0] == "matplotlib"]
        assert not drawn or path.parent.name == "plots", f"{path} imports {drawn}"


def test_transformers_is_needed_by_its_callback_alone():
    for path in (ROOT / "ds_adacc").rglob("*.py"):
        named = [name for name in imported(path) if name.split(".")[0] in ("transformers", "accelerate")]
        assert not named or path.name == "huggingface.py", f"{path} imports {named}"
