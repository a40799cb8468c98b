"""The table of a plan fits on a screen, whatever the model; what it leaves out is in the journal."""

import re
from dataclasses import replace

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.report.decision import DecidedValue, Decision, UsedPolicy, span
from ds_adacc.report.grid import plain
from ds_adacc.report.screen import alike, brief_tables
from ds_adacc.runtime.runtime import Runtime

SCREEN = 50


def made(name, values=12, policies=1, calls=1, operators=40, first="retain", nbytes=1 << 20):
    """A decision whose values grow; `first` is what becomes of the first one."""
    choices = [(first if n == 0 else "recompute",) * policies for n in range(values)]
    return Decision(
        name,
        calls,
        operators,
        tuple(
            DecidedValue(f"mlp.fc{n} out", f"addmm{n}", "linear", (4, 8), "float32", (n + 1) * nbytes, choices[n])
            for n in range(values)
        ),
        tuple(UsedPolicy(f"blocks {n}", (n + 1) * nbytes, 0.001 * (n + 1)) for n in range(policies)),
    )


def rows_of(decisions):
    text = plain(brief_tables(decisions))
    assert all(len(line) <= 80 for line in text.splitlines())
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


HINT = ["ds_adacc report --full shows everything"]


def test_a_small_plan_is_shown_whole():
    rows = rows_of([made("blocks.0-5 (Block)", policies=3, calls=6)])
    assert rows[0] == ["blocks.0-5 (Block): 6 calls held at once, 40 operators each"]
    assert [row[0] for row in rows[2:14]] == [f"mlp.fc{n} out" for n in range(12)] and HINT not in rows


@pytest.mark.parametrize(
    ("types", "values", "policies"), [(1, 60, 48), (2, 60, 48), (48, 30, 1), (48, 60, 9), (3, 5, 1)]
)
def test_every_plan_fits_on_a_screen(types, values, policies):
    decisions = [made(f"blocks.{n} (Block)", values, policies, operators=40 + n) for n in range(types)]
    rows = rows_of(decisions)
    assert len(rows) <= SCREEN - 8 and HINT in rows  # that is for the sums; other strategies take a few lines more
    assert sum("call held at once" in row[0] for row in rows) == min(types, 2)


def test_the_values_and_block_types_that_hold_most_are_kept():
    decisions = [made(f"blocks.{n} (Block)", 40, 9, operators=n, nbytes=n + 1) for n in range(20)]
    rows = rows_of(decisions)
    assert rows[0][0].startswith("blocks.19 (Block)")
    shown = [row[0] for row in rows]
    assert "mlp.fc39 out" in shown and "mlp.fc0 out" not in shown
    assert any("smaller values" in row for row in shown) and any("other policies" in row for row in shown)
    assert shown[-2] == "13 more"


def test_a_remark_says_of_which_blocks_it_is_and_stays_within_the_table():
    remark = "it depends on sys.modules, which ds_adacc cannot watch: nothing of it is recomputed"
    one, other = made("a.0 (Encoder)", operators=9), made("b.0 (Decoder)")
    doubted = replace(one, remarks=(remark,))
    wrapped = [
        "  a.0 (Encoder): it depends on sys.modules, which ds_adacc cannot watch: nothing",
        "  of it is recomputed",
    ]
    lines = plain(brief_tables([doubted, other])).splitlines()
    assert lines[-len(wrapped) - 1 : -1] == wrapped  # a hint follows
    text = plain(brief_tables([doubted]))
    assert text.count("it depends on") == 1 and "a.0 (Encoder): it depends" not in text


def test_layers_of_like_plans_are_one():
    decisions = [*(made(f"h.{n} (Layer)", calls=2) for n in range(12)), made("h.12 (Layer)", first="channel")]
    first, last = alike(decisions)
    assert (first.name, first.calls) == ("h.0-11 (Layer)", 24) and last.name == "h.12 (Layer)"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["h.0 (GPT2Block)", "h.1 (GPT2Block)", "h.2 (GPT2Block)"], "h.0-2 (GPT2Block)"),
        (["h.3 (A)", "h.1 (A)", "h.0 (A)"], "h.0-1, 3 (A)"),
        (["h.0.mlp (A)", "h.1.mlp (A)", "t.1 (A)"], "h.0-1.mlp (A), t.1 (A)"),
        (["h.0.mlp (A)", "h.1.mlp (A)", "h.3.mlp (A)"], "h.[0-1, 3].mlp (A)"),
        (["layers.0.1 (A)", "layers.2.1 (A)", "layers.4.1 (A)"], "layers.[0, 2, 4].1 (A)"),
        (["layers.0.1 (A)", "layers.1.1 (A)", "layers.0.2 (B)"], "layers.0-1.1 (A), layers.0.2 (B)"),
        (["0.0 (A)", "0.1 (A)", "1.0 (A)", "1.1 (A)"], "0.0-1 (A), 1.0-1 (A)"),
        (["Block", "Block"], "Block"),
        ([], ""),
    ],
)
def test_names_are_one_name(names, expected):
    assert span(names) == expected


class Layer(nn.Module):
    """A layer that needs another kind of attention at every other place, and knows its number."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.fc = nn.Linear(zoo.WIDTH, zoo.WIDTH * (1 + number % 2))

    def forward(self, x):
        return x + (self.fc(x) * self.number).tanh()[..., : zoo.WIDTH]


def test_a_model_of_48_layers(caplog):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(number) for number in range(1, 49))
    section = {"memory_budget": 0.8, "codecs": "none", "rectifier": {"enabled": False}}
    work = Runtime(load({"adacc": section}), has_engine=True)
    blocks = [work.blocks.of_module(layer, f"layers.{n} (Layer)") for n, layer in enumerate(layers)]
    assert len(blocks) == 48
    with caplog.at_level("INFO", logger="ds_adacc"):
        for _ in range(2):
            x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
            for layer in layers:
                x = work.checkpoint(layer, x)
            x.sum().backward()
            work.controller.end_step()
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("plan (")]
    assert len(text.splitlines()) <= SCREEN
    assert (
        "  layers.0, 2, 4, 6," in text
        and " 46 (Layer): 24 calls held at once, " in text
        and len(work.controller.plan.block_types) == 2
    )
