"""Tables read well at 80 columns, whatever the block and however many policies there are."""

import itertools
import re
from collections import Counter

import pytest
import zoo
from recorded import profile_of, random_policy, record

from ds_adacc import planner
from ds_adacc.report.decision import DecidedValue, Decision, UsedPolicy, decision_of
from ds_adacc.report.grid import plain, table
from ds_adacc.report.tables import decision_tables, shortened, shortened_path


def decided(name, count):
    """The decision for a zoo block's type: so many policies drawn by lot, one a block."""
    recording = record(*zoo.example(name))
    policies = list(dict.fromkeys(random_policy(recording, seed) for seed in range(10 * count)))[:count]
    block_type = planner.BlockType(name, profile_of(recording), count=len(policies))
    return recording, policies, decision_of(name, (), block_type, policies, recording)


def rows_of(text):
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def made(values, policies=("all blocks",)):
    return Decision("block", 1, 1, tuple(values), tuple(UsedPolicy(blocks, 0, 0.0) for blocks in policies))


def value(label, nbytes, role="linear", choices=("retain",)):
    return DecidedValue(label, f"aten {label}", role, (4, 8), "float32", nbytes, choices)


@pytest.mark.parametrize(("name", "count"), [*zip(zoo.NAMES, itertools.cycle([1, 3, 7]))])
def test_tables_of_zoo_blocks_have_80_columns_at_most_and_wrap_no_cell(name, count):
    _, _, decision = decided(name, count)
    text = plain(decision_tables(decision))
    assert all(len(line) <= 80 for line in text.splitlines())
    shown = Counter(row[0] for row in rows_of(text))
    for each in decision.values:
        assert shown[shortened(each.label, 28)] >= 1 or each.role == "statistic"
    for policy in decision.policies:
        assert shown[policy.blocks] == 1  # the row of its costs
    assert not any(name in text for name in ("native_", "_for_cpu", "input."))


def test_a_decision_holds_every_choice_under_both_names():
    recording, policies, decision = decided("gpt", 2)
    assert [policy.blocks for policy in decision.policies] == ["block 0", "block 1"]
    values = {each.name: each for each in decision.values}
    assert values["native_layer_norm9.1"].label == "ln2 mean"
    for index, recorded in enumerate(recording.values):
        stores = [policy.stores[index] for policy in policies]
        if recorded.name in values:
            for store, choice in zip(stores, values[recorded.name].choices, strict=True):
                assert choice in ("recompute", "-") if store is None else choice == store
        else:
            assert stores == [None, None]


def test_policies_are_told_by_the_blocks_that_run_them():
    recording, (a, b), _ = decided("gpt", 2)
    block_type = planner.BlockType("gpt", profile_of(recording), count=6)

    def running(blocks, *chosen):
        return [policy.blocks for policy in decision_of("gpt", blocks, block_type, chosen, recording).policies]

    layers = [f"model.layers.{number} (Layer)" for number in range(6)]
    assert running(layers, a, a, a, a, a, a) == ["all blocks"]
    assert running(layers, a, b, b, b, b, a) == ["layers.0, 5", "layers.1-4"]
    assert running(["h.9 (Layer)", "h.10 (Layer)"], a, b) == ["h.9", "h.10"]
    assert running(["model.encoder.layers.0.mlp (A)", "model.decoder.layers.0.mlp (A)"], a, b) == [
        "model.encoder.layers.0.mlp",
        "model.decoder.layers.0.mlp",
    ]
    assert running(["0 (Layer)", "1 (Layer)", "4 (Layer)"], a, a, b) == ["blocks 0-1", "block 4"]
    functions = ["custom_forward", "custom_forward", "custom_forward"]
    assert running(functions, a, a, b) == ["blocks 0-1", "block 2"]
    assert running(layers, a, a, b) == ["blocks 0-1", "block 2"]  # how many there are now is not known


def test_small_statistics_that_are_treated_alike_are_one_row():
    small = [value(f"norm{n} mean", 10, "statistic") for n in range(3)]
    other = value("attention logsumexp", 10, "statistic", ("recompute",))
    large = value("attention maximum", 5000, "statistic")
    text = plain(decision_tables(made([*small, other, large, value("qkv out", 10_000)])))
    assert [row[0] for row in rows_of(text)[:5]] == [
        "value",
        "attention logsumexp",
        "attention maximum",
        "qkv out",
        "3 statistics",
    ]
    assert "30 B" in text


def test_columns_are_left_out_where_there_is_no_room():
    def header(count):
        choices, blocks = ("recompute",) * count, [f"blocks {n}" for n in range(count)]
        return rows_of(
            plain(decision_tables(made([value("attention.query_key_value out", 10, choices=choices)], blocks)))
        )[0]

    assert header(1) == ["value", "role", "tensor", "raw", "blocks 0"]
    assert header(3) == ["value", "role", "raw", "blocks 0", "blocks 1", "blocks 2"]
    assert header(4) == ["value", "raw", "blocks 0", "blocks 1", "blocks 2", "blocks 3"]
    assert header(9) == ["value", "raw", *(f"blocks {n}" for n in range(4))]  # the others are in tables below


def test_a_long_name_keeps_its_beginning_and_its_end():
    assert shortened("x" * 28, 28) == shortened_path("x" * 28, 28) == "x" * 28
    short = shortened("transformer.layers.11.attention.query_key_value out", 28)
    assert len(short) == 28 and short.startswith("transformer.la") and short.endswith("ey_value out")


def test_brackets_are_no_markup():
    assert rows_of(plain(table("Of [bold]", ("a",), [("[red]x",)]))) == [["Of [bold]"], ["a"], ["[red]x"]]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("base_model.model.model.layers.1-31 (LlamaDecoderLayer)", "…model.layers.1-31 (LlamaDecoderLayer)"),
        ("model.layers.1-31 (LlamaDecoderLayer)", "model.layers.1-31 (LlamaDecoderLayer)"),
        ("layers.0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20 (Layer)", "layers.0, 2, 4, 6, 8… 16, 18, 20 (Layer)"),
        ("a.very.deep.path.of.modules.layers.0 (AClassWithAVeryLongName)", "…layers.0 (AClassWithAVeryLongName)"),
        ("net.attention_layers.layers.[0, 2, 4].1 (Attention)", "…layers.[0, 2, 4].1 (Attention)"),
    ],
)
def test_of_a_long_path_the_end_is_kept(name, shown):
    assert shortened_path(name, 40) == shown
