from __future__ import annotations

from markdown_table import markdown_table


def test_a_table_has_a_line_for_each_row():
    assert markdown_table(["name", "MiB"], [["a", 1], ["b", ""]]) == "| name | MiB |\n|---|---|\n| a | 1 |\n| b |  |"


def test_a_table_without_rows_has_its_header():
    assert markdown_table(["name"], []) == "| name |\n|---|"
