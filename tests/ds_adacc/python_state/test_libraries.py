"""Which modules are installed packages, whose code is not the user's."""

import importlib
import sys
import types

import deepspeed
import pytest

from ds_adacc.python_state import libraries
from ds_adacc.python_state.libraries import is_library


@pytest.fixture
def package(monkeypatch):
    """Import a package that lies in site-packages; as a namespace it has no file."""

    def load(name, is_namespace):
        module = types.ModuleType(name)
        folder = f"/usr/lib/python3/site-packages/{name}"
        module.__path__ = [folder]
        module.__file__ = None if is_namespace else f"{folder}/__init__.py"
        monkeypatch.setitem(sys.modules, name, module)

    return load


@pytest.mark.parametrize("is_namespace", [False, True])
def test_a_package_is_known_once_it_is_loaded(package, is_namespace):
    """Code that imports it as it runs is asked about before."""
    name = f"late_package_{is_namespace}"
    assert not is_library(f"{name}.inner")
    package(name, is_namespace)
    assert is_library(f"{name}.inner")


def test_the_users_own_modules_are_not_libraries():
    assert is_library("torch.nn") and is_library("math") and is_library("ds_adacc.run")
    assert not is_library("__main__") and not is_library(None) and not is_library(__name__)


def test_what_runs_as_main_is_no_library_though_an_installed_package_has_started_it(package, nothing_known):
    """The user's script may run under the same name."""
    package("__main__", is_namespace=False)
    assert not is_library("__main__") and not is_library(None)


@pytest.fixture
def nothing_known():
    """No package has been looked at."""
    libraries._is_installed.cache_clear()
    yield
    libraries._is_installed.cache_clear()


@pytest.fixture
def elsewhere(monkeypatch):
    """DeepSpeed lies in a clone of its repository, as after `pip install -e DeepSpeed`."""
    libraries._is_installed.cache_clear()
    monkeypatch.setattr(deepspeed, "__file__", "/home/user/DeepSpeed/deepspeed/__init__.py")
    yield
    libraries._is_installed.cache_clear()


def test_deepspeed_is_a_library_wherever_it_lies(elsewhere):
    assert is_library("deepspeed.runtime.zero")


def installed_in(folder, names, files):
    """As `pip install --target` does it: the packages, and beside them a list of their files."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    notes = folder / "some_project-1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Name: some-project\nVersion: 1.0\n")
    (notes / "RECORD").write_text("".join(f"{file},sha256=x,0\n" for file in files))


def test_a_package_is_installed_wherever_pip_has_put_it(tmp_path, monkeypatch):
    """As in images and clusters where `PYTHONPATH` names a folder of libraries."""
    listed, namespace, module, own = "target_listed", "target_namespace", "target_module", "beside_the_target"
    files = [f"{listed}/__init__.py", f"{namespace}/part/code.py", f"{module}.py", f"../{own}/__init__.py"]
    installed_in(tmp_path, [listed, own], files)
    (tmp_path / namespace / "part").mkdir(parents=True)
    (tmp_path / f"{module}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in (listed, namespace, module, own):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert [is_library(name) for name in (listed, namespace, module, own)] == [True, True, True, False]


def test_a_clone_is_not_installed_though_pip_has_a_note_of_it(tmp_path, monkeypatch):
    """An editable one may be edited; its list names no file of the package."""
    installed_in(tmp_path, ["edited_clone"], ["__editable__.some_project.pth", "some_project-1.0.dist-info/RECORD"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "edited_clone", importlib.import_module("edited_clone"))
    assert not is_library("edited_clone")
