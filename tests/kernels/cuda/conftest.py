"""How many cases the emulated kernels have been through is told at the end of the session."""

from collections import Counter

import pytest

_CASES = pytest.StashKey[Counter]()


@pytest.fixture(scope="session")
def cases(request):
    """Counts of what has been run in emulation, by name."""
    return request.config.stash.setdefault(_CASES, Counter())


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(_CASES, None)
    if counts:
        told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"emulated CUDA cases: {sum(counts.values())} ({told})")
