"""The comparison's table."""

import compare


def end(peak, held):
    return [{"peak_activation_bytes": peak * 2**20, "bytes_held": held, "validation_loss": 2.5}]


def test_ratios_are_taken_within_a_round():
    names = list(compare.STRATEGIES)
    seconds = {name: [1.0, 2.0] for name in names} | {"adacc": [1.1, 2.2]}
    curves = {name: end(200, None) for name in names} | {"adacc": end(50, 40 * 2**20)}
    rows = {row.strategy: row for row in compare.tabulate(seconds, curves)}
    assert abs(rows["Adacc"].time_ratio - 1.1) < 1e-9
    assert rows["Adacc"].memory_ratio == 0.25
    assert "| Adacc | 1.650 s | 1.10 | 50 MiB | 0.25 | 40 MiB | 2.5000 |" in compare.markdown(list(rows.values()))


def test_a_line_still_being_written_is_not_read(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert compare.read(metrics) == []
    metrics.write_text('{"step": 1}\n{"ste')
    assert compare.read(metrics) == [{"step": 1}]
