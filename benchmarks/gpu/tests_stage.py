"""Stage `tests`: the tests with the marker `gpu`, a row for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage
import torch
from processes import ROOT
from rows import DeviceLost, Row, Rows, check_device

MARKER = "pytest.mark.gpu"
LIMIT = 60  # seconds that a test may take
LEAST = 10  # seconds that must be left for one more


class Reporter:
    """Writes what pytest reports as rows. Ends the session when the time is over, or the device is lost.

    `waiting`: the tests that have not begun.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.waiting: set[str] = set()
        self.session: pytest.Session | None = None

    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self.session = session
        wanted = (item for item in items if self.rows.wants(item.nodeid))
        items[:] = [item for item in wanted if item.nodeid not in self.rows.known]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.waiting = {item.nodeid for item in session.items}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        name = f"collecting {report.nodeid}"
        if report.failed and name not in self.rows.known:
            self.write(name, report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self.rows.seconds_left < LEAST:
            item.session.shouldstop = f"{self.rows.seconds_left:.0f} s are left"
        self.waiting.discard(item.nodeid)
        self.rows.begin(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test is set up, called and torn down. The call is what counts, and whatever else goes wrong.
        if report.when == "call" or not report.passed:
            self.write(report.nodeid + (" (teardown)" if report.when == "teardown" else ""), report)

    def write(self, name: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        def result() -> dict[str, object]:
            if report.failed:
                raise AssertionError(report.longreprtext)
            found = {"outcome": report.outcome, "took": report.duration}
            if report.skipped:  # or expected to fail; of a skipped test pytest tells the file, the line and the reason
                found["reason"] = report.wasxfail if hasattr(report, "wasxfail") else report.longrepr[2]
            return found

        try:
            self.rows.write(name, result)
        except DeviceLost:  # pytest would not let it through
            self.session.shouldstop = "the device is lost"


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    """A rehearsal takes a few files only, and all their tests are skipped: they need a GPU."""
    # Only files that have such a test: others import packages that this machine may lack.
    files = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if MARKER in file.read_text())
    chosen = ["-m", "gpu", "-o", f"timeout={LIMIT}", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    reporter = Reporter(rows)
    pytest.main([*chosen, "--rootdir", str(ROOT), *files[: 2 if rehearses else None]], plugins=[reporter])
    check_device()
    rows.write("all tests", lambda: finished(reporter))


def finished(reporter: Reporter) -> Row:
    """Raises AssertionError if tests have not begun, for which no time was left."""
    waiting = sorted(reporter.waiting)
    assert not waiting, f"no time was left for {len(waiting)} tests; the first is {waiting[0]}"
    return {}


if __name__ == "__main__":
    stage.run("tests", measure)
