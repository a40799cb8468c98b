"""The hash of a Function's code changes with what its methods run, and with nothing else."""

import importlib
import subprocess
import sys
import types

import pytest
import torch

from ds_adacc.profile.function_code import digest_of

SOURCE = """
import functools, torch
TIMES = 1
STATE = {"seen": 0}

def thrice(x):
    return x * 3

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

class Op(torch.autograd.Function):
    @staticmethod
    @logged
    def forward(ctx, x):
        for _ in range(TIMES):
            x = x.tanh() if x.device.type in {"cpu", "cuda", "xpu"} else thrice(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return (lambda z: grad * (1 - z * z))(y)

class Other(torch.autograd.Function):
    pass
"""


def digest(*changes):
    """The digest of the Function in a module of the user's with these changes to its source."""
    source = SOURCE
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    module = types.ModuleType("edited")
    exec(compile(source, "edited.py", "exec"), vars(module))
    return digest_of([module.Op])


@pytest.mark.parametrize(
    "change",
    [
        ("x.tanh()", "x.sin()"),
        ("range(TIMES)", "range(2)"),
        ("(1 - z * z)", "(1 - z)"),
        ("TIMES = 1", "TIMES = 60"),
        ("x * 3", "x * 4"),
        ('"xpu"', '"mps"'),
    ],
    ids=["forward", "a number", "backward", "a global number", "a function that it calls", "a set"],
)
def test_an_edit_changes_it(change):
    assert digest(change) != digest()


@pytest.mark.parametrize(
    "change", [("class Other", "class Another"), ("\nimport functools", "# a comment\nimport functools")]
)
def test_an_edit_elsewhere_does_not(change):
    assert digest(change) == digest()


def test_it_is_the_same_in_every_process(tmp_path, monkeypatch):
    """Python gives strings other hashes in each, and so sets another order."""
    (tmp_path / "edited.py").write_text(SOURCE)
    told = "import edited; from ds_adacc.profile.function_code import digest_of; print(digest_of([edited.Op]))"
    found = subprocess.run(
        [sys.executable, "-c", told], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    monkeypatch.syspath_prepend(tmp_path)
    assert found.strip() == digest_of([importlib.import_module("edited").Op])


def test_a_function_written_in_c_has_no_code_to_read():
    class Strange(torch.autograd.Function):
        forward = staticmethod(len)

    assert len(digest_of([Strange])) == 64
