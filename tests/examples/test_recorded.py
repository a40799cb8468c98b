"""The README's table of the demo is the recorded one."""

import json

import compare
from tables import cells, table

RESULTS = compare.ROOT / "benchmarks" / "results"
LEFT_OUT = ("wall clock", "held")  # of the README's table


def recorded():
    return json.loads((RESULTS / "demo.json").read_text())


def test_the_readme_has_the_recorded_figures():
    header, _, *rows = map(cells, compare.markdown(list(map(compare.row_from, recorded()["rows"]))).splitlines())
    shown = [number for number, title in enumerate(header) if title not in LEFT_OUT]
    readme = (compare.ROOT / "README.md").read_text()
    assert table(readme, [header[number] for number in shown]) == [[row[number] for number in shown] for row in rows]


def test_the_table_and_the_data_are_of_one_run():
    found = recorded()
    table = (RESULTS / "demo.md").read_text()
    assert compare.markdown([compare.row_from(row) for row in found["rows"]]) in table
    assert all(found[key] in table for key in ("commit", "date", "command", "device", "versions"))


def test_adacc_keeps_to_the_memory_of_its_rival():
    rows = {row.name: row for row in map(compare.row_from, recorded()["rows"])}
    rival = rows[compare.RIVAL].peak_bytes
    assert all(rows[name].peak_bytes <= rival for name in ("lossless", "adacc", "no_outliers"))
