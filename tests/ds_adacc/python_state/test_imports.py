"""What a function imports when it runs is guarded, under whatever name."""

import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
import zoo
from changing import recordings
from torch import nn


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 8)
        self.scale = scale

    def forward(self, x):
        return self.fc2(torch.sin(F.gelu(self.fc1(x)) * self.scale()))


@pytest.fixture(params=[True, False], ids=["imported before", "imported by the block"])
def settings(request, tmp_path, monkeypatch):
    """The Python module `settings_here.inner.sub`, by a function that returns it."""
    folder = tmp_path / "settings_here" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "settings_here" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("def relative():\n    from .sub import SCALE\n    return SCALE\n")
    (folder / "sub.py").write_text("SCALE = 1.0\ndef scale():\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["settings_here", "settings_here.inner", "settings_here.inner.sub"]
    if request.param:
        __import__(names[-1])
    yield lambda: sys.modules[names[-1]]
    for name in names:
        sys.modules.pop(name, None)


def plain():
    import settings_here.inner.sub

    return settings_here.inner.sub.SCALE


def renamed():
    import settings_here.inner.sub as other

    return other.SCALE


def taken():
    from settings_here.inner.sub import SCALE

    return SCALE


def taken_and_renamed():
    from settings_here.inner.sub import SCALE as scale

    return scale


def module_taken():
    from settings_here.inner import sub

    return sub.SCALE


def function_taken():
    from settings_here.inner.sub import scale

    return scale()


def relative():
    from settings_here import inner

    return inner.relative()


def in_a_closure():
    from settings_here.inner import sub

    def scale():
        return sub.SCALE

    return scale()


def by_text():
    return importlib.import_module("settings_here.inner.sub").SCALE


def by_pythons_own_function():
    return __import__("settings_here.inner.sub", fromlist=("SCALE",)).SCALE


FUNCTIONS = (
    by_text,
    by_pythons_own_function,
    plain,
    renamed,
    taken,
    taken_and_renamed,
    module_taken,
    function_taken,
    relative,
    in_a_closure,
)


@pytest.mark.parametrize("scale", FUNCTIONS, ids=lambda each: each.__name__)
def test_what_a_function_imports_may_change(scale, settings):
    def change():
        settings().SCALE = 3.0
        settings().scale = lambda: 3.0

    assert recordings(Block(scale), change) == 2


def test_an_import_that_fails_is_the_blocks_own():
    def scale():
        try:
            from not_there import SCALE
        except ImportError:
            return 1.0
        return SCALE

    assert recordings(Block(scale), lambda: None) == 1
