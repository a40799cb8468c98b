"""Which modules are installed packages, whose code is not the user's."""

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
