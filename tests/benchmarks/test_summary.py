"""The tables that are made of the rows of run_gpu.sh."""

import json

import pytest
from processes import ROOT
from tables import table

RAN = {"tokens_per_second": 500.0, "peak_bytes": 1 << 30, "gradient_error": 0.0}
ROWS = {
    "training": [
        {"name": "GPT none", **RAN, "tokens_per_second": 1000.0, "peak_bytes": 4 << 30},
        {"name": "GPT full", **RAN, "relative_speed": 0.51, "relative_speed_low": 0.5, "relative_speed_high": 0.53},
        {"name": "GPT ours", **RAN, "is_smallest": True, "planned_peak_bytes": 11, "blocks_peak_bytes_observed": 10},
        {"name": "GPT compiled", "skipped": "3 s are left"},
        {"name": "LLaMA none", "error": "Traceback"},
        {"name": "LLaMA ours", **RAN},
    ],
    "largest_batch": [
        {"name": "begin", "left_bytes": 5},
        {"name": "none", "batch": 9, "tokens_per_second": 70.4, "refused_batch": 10, "tried": [9, 10]},
        {"name": "ours", "refused_batch": 60, "tried": [60]},
    ],
    "probe": [
        {"name": "machine"},
        {"name": "attention a", "verdicts": {"flash: is replayed": 7, "flash: differs": 1}},
        {"name": "attention b", "verdicts": {"flash: is replayed": 8}},
        {"name": "attention c", "unavailable": "no kernel"},
    ],
}
TABLES = {
    "training": [
        ["GPT", "none", "1000", "1.000", "4.00", "1.000", "", "0"],
        ["GPT", "full", "500", "0.510 (0.500-0.530)", "1.00", "0.250", "", "0"],
        ["GPT", "ours (the least that fits)", "500", "0.500", "1.00", "0.250", "1.100", "0"],
        ["LLaMA", "ours", "500", "", "1.00", "", "", "0"],
    ],
    "largest_batch": [["none", "9", "10"], ["ours", "", "60"]],
    "attention": [["flash", "16", "15"]],
}


@pytest.fixture
def summary(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    import summary

    return summary


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_what_was_measured(summary, tmp_path, name):
    for stage, rows in ROWS.items():
        (tmp_path / f"{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = summary.markdown(tmp_path, name)
    header = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    assert table(text, header) == TABLES[name]


def test_codecs_have_a_column_for_each_size(summary, tmp_path):
    rows = [
        {
            "name": f"group bfloat16 {size} MiB",
            "codec": "group",
            "dtype": "bfloat16",
            "mebibytes": size,
            "compress_of_ideal": size / 1000,
            "decompress_of_ideal": 0.9,
        }
        for size in (512, 128)
    ]
    rows.append(rows[0] | {"name": "bits bfloat16 512 MiB", "codec": "bits"})
    (tmp_path / "codecs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary.markdown(tmp_path, "codecs").splitlines() == [
        "| codec | dtype | compress, 128 MiB | decompress, 128 MiB | compress, 512 MiB | decompress, 512 MiB |",
        "|---|---|---|---|---|---|",
        "| group | bfloat16 | 0.13 | 0.90 | 0.51 | 0.90 |",
        "| bits | bfloat16 |  |  | 0.51 | 0.90 |",
    ]
