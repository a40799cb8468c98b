"""The comparison: its budgets, its configs and its table."""

import json

import compare
import pytest
from compare import Ratio, Row, Run

MEBIBYTE = 2**20


def measured(overhead, smallest=0):
    """A stand-in for a run: its peak is the budget and what else there is; nothing fits below `smallest`."""
    asked = []

    def found(budget, at_most):
        asked.append((budget, at_most))
        return {"smallest_bytes": smallest} if budget < smallest else {"peak_bytes": budget + overhead}

    return asked, found


def test_the_first_budget_leaves_a_margin_and_what_no_budget_covers():
    asked, found = measured(overhead=20)
    assert compare.fit(1000, 20, found) == ({"peak_bytes": 980}, "")
    assert asked == [(960, 1000)]


def test_what_a_run_takes_too_much_is_taken_off():
    asked, found = measured(overhead=58)
    assert compare.fit(1000, 0, found) == ({"peak_bytes": 1000}, "")
    assert asked == [(980, 1000), (942, 1000)]


def test_where_nothing_fits_the_smallest_budget_is_measured_whatever_it_takes():
    asked, found = measured(overhead=8, smallest=1200)
    assert compare.fit(1000, 0, found) == ({"peak_bytes": 1208}, compare.LEAST)
    assert asked == [(980, 1000), (1200, None)]


def test_a_peak_that_does_not_fall_is_told_and_loses_no_result():
    asked = []
    found = compare.fit(100, 0, lambda budget, at_most: asked.append(at_most) or {"peak_bytes": 101})
    assert found == ({"peak_bytes": 101}, compare.MORE)
    assert asked == [100, 100, 100, None], "the last run is not broken off"


def test_a_smallest_budget_that_cannot_be_met_is_an_error():
    with pytest.raises(RuntimeError, match="no plan fits the smallest budget that was named, 200 bytes"):
        compare.fit(100, 0, lambda budget, at_most: {"smallest_bytes": 200})


def test_a_config_has_the_changes_and_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    strategy = next(each for each in compare.STRATEGIES if each.name == "lossless")
    ready = json.loads((compare.ROOT / "ds_configs" / "adacc.json").read_text())
    file = compare.configured(strategy, 12345678)
    assert file == tmp_path / "lossless.json"
    assert json.loads(file.read_text()) == ready | {
        "zero_optimization": {"stage": 0},
        "adacc": {"memory_budget": 12345678, "codecs": "none"},
    }


def run_of(peak, instead=""):
    found = {
        "losses": [5.5, 4.5],
        "validation_loss": 4.25,
        "peak_bytes": peak,
        "first_steps_peak_bytes": 2 * peak,
        "planned_peak_bytes": None,
        "held_bytes": peak // 2,
    }
    return Run(None, found, instead)


def time_of(computing, error):
    return {"seconds": [{"computing": each, "wall": 3 * each} for each in computing], "gradient_error": error}


def rows(error=0.03, strategies=compare.STRATEGIES):
    """Two rounds, of which the second met a slower machine. One strategy takes 1.1 times what the base does."""
    names = [each.name for each in strategies]
    runs = {name: run_of(200 * MEBIBYTE) for name in names}
    runs["adacc_half"] = run_of(50 * MEBIBYTE, compare.LEAST)
    times = {name: time_of([2.0, 4.0], 0.0) for name in names} | {"adacc_half": time_of([2.2, 4.4], error)}
    return compare.rows_of(strategies, runs, times)


def test_ratios_are_to_the_base_in_the_same_round():
    row = next(row for row in rows() if row.name == "adacc_half")
    assert row.time == row.wall == Ratio.of([2.2, 4.4], [2.0, 4.0])
    assert row.time.median == pytest.approx(1.1)
    assert (row.peak, row.losses, row.validation_loss) == (0.25, [5.5, 4.5], 4.25)
    assert [row.name for row in rows()] == [each.name for each in compare.STRATEGIES]


def test_the_table():
    table = compare.markdown(rows()).splitlines()
    ratio = "1.10 (1.10-1.10)"
    assert f"| Adacc, in the least that fits | 50.0 MiB | 0.25 | {ratio} | {ratio} | 25.0 MiB | 0.03 | 4.250 |" in table
    assert "| no checkpointing | 200.0 MiB | 1.00 | 1 | 1 | 100.0 MiB | 0 | 4.250 |" in table
    assert len({line.count("|") for line in table}) == 1


def test_with_compact_there_is_one_more_row():
    more = rows(strategies=(*compare.STRATEGIES, compare.COMPACT))
    assert more[:-1] == rows()
    assert "| Adacc with CompAct, a quarter of the features, in that memory |" in compare.markdown(more)


def test_a_gradient_that_is_not_finite_is_named_so():
    assert "| not finite |" in compare.markdown(rows(error=None))


def test_the_picture_shows_every_strategy(tmp_path):
    compare.draw(rows(), compare.FRONTIER, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_result_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    compare.save(rows(), "a device")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert {"commit", "date", "command", "device", "versions", "rows"} == set(found)
    assert [compare.row_from(each) for each in found["rows"]] == rows()
    assert isinstance(rows()[0], Row)
