"""The benchmark of all strategies, on a small model: each row has the figures that its table shows."""

from argparse import Namespace
from functools import partialmethod

import pytest
import strategies
from torch import nn

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 32, "batch": 2, "rounds": 2}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_times_and_memory(compiled, monkeypatch):
    names = ("none", "adacc auto 0.9", "adacc none smallest")
    assert set(names[::2]) <= set(strategies.strategies(compiled))
    monkeypatch.setattr(strategies, "strategies", lambda compiled: names)
    # without Inductor, whose kernels for the CPU take half a minute to compile
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    args = Namespace(**SMALL, compiled=compiled)
    rows = strategies.measure_times(args)["rows"]
    assert list(rows) == list(names)
    assert rows["adacc none smallest"]["gradient_error"] == 0 <= rows["adacc auto 0.9"]["gradient_error"] < 0.1
    for row in rows.values():
        row["peak"] = 1.0
    assert len(strategies.table(rows).splitlines()) == 2 + len(names)
    assert strategies.measure_memory(args, "adacc none smallest") > 0
