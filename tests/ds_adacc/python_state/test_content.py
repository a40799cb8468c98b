"""Which modules are installed packages, whose code is not the user's."""

import collections
import copy
import sys
import types
import typing
from decimal import Decimal

import deepspeed
import numpy as np
import pytest
import torch

from ds_adacc.python_state import content
from ds_adacc.python_state.content import is_library, is_same_number, mark_of_number
from ds_adacc.python_state.guards import guards_of_values, unreadable


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
    content._is_installed.cache_clear()
    yield
    content._is_installed.cache_clear()


@pytest.fixture
def elsewhere(monkeypatch):
    """DeepSpeed lies in a clone of its repository, as after `pip install -e DeepSpeed`."""
    content._is_installed.cache_clear()
    monkeypatch.setattr(deepspeed, "__file__", "/home/user/DeepSpeed/deepspeed/__init__.py")
    yield
    content._is_installed.cache_clear()


def test_deepspeed_is_a_library_wherever_it_lies(elsewhere):
    assert is_library("deepspeed.runtime.zero")


def test_a_number_is_equal_to_itself_and_zeros_are_told_apart():
    for number in (
        float("nan"),
        np.float64("nan"),
        complex(float("nan"), 1),
        -0.0,
        complex(-0.0, 0.0),
        1.5,
        3,
        True,
        "text",
    ):
        assert mark_of_number(number) == mark_of_number(type(number)(number))
    for one, other in (
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (complex(0, 0), complex(0, -0.0)),
        (complex(0.0, 1), complex(-0.0, 1)),
        (float("nan"), 1.0),
        (np.float32(0.0), np.float32(-0.0)),
        (np.float64(0.0), np.float64(-0.0)),  # which is a float, too
        (Decimal("1.0"), Decimal("1.00")),
    ):
        assert mark_of_number(one) != mark_of_number(other)
        assert not is_same_number(one, other)
    assert is_same_number(float("1.5"), 1.5) and not is_same_number(torch.ones(2), 1.0)


@pytest.mark.parametrize(
    "one, other",
    [
        (collections.deque([1], 2), collections.deque([1], 3)),
        (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
        ([np.float64(0.0)], [np.float64(-0.0)]),
        ({"share": Decimal("1.0")}, {"share": Decimal("1.00")}),
    ],
)
def test_objects_that_are_equal_but_compute_something_else_are_told_apart(one, other):
    assert guards_of_values({"x": one}) != guards_of_values({"x": other})
    assert guards_of_values({"x": one}) == guards_of_values({"x": copy.deepcopy(one)})


def test_an_annotation_is_known_by_identity_however_deep_it_lies():
    signature = {"inputs": [[[("x", typing.Annotated[torch.Tensor, "nodes"])]]]}
    marks = guards_of_values({"signature": signature})
    assert unreadable(marks) is None
    assert marks == guards_of_values({"signature": signature})
