"""The solver in a process of its own: the same answers, and a plan also where the process gives none."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import check_gradient_errors, packable, replayable

from ds_adacc.planner import (
    InfeasibleBudget,
    NoAnswer,
    Problem,
    everywhere,
    in_process,
    least_peak_in_process,
    peak_bytes,
    retain_policy,
    solve_in_process,
    solve_per_block,
)
from ds_adacc.planner.solve_uniform import least_peak

ISOLATED = [
    Problem((packable("a", 8),)),
    Problem((packable("a", 2), replayable(2)), order=("a", "r", "a", "r")),
    Problem((packable("a", 8, calls_per_block=2), packable("b", 4))),
    # but for the bound it would pack three rather than replay four
    Problem((packable("a", 4, error=0.2), replayable(4)), order=("r",) * 4 + ("a",) * 4, max_gradient_error=0.1),
]


@pytest.mark.parametrize("problem", ISOLATED)
def test_a_process_of_its_own_gives_the_same(problem):
    budget = 3 * everywhere(retain_policy, problem).peak // 4
    here, there = (planner(problem, budget, max_seconds=60) for planner in (solve_per_block, solve_in_process))
    assert here.added_seconds > 0
    assert there == here


def test_the_smallest_peak_from_a_process_of_its_own():
    here, there = least_peak(ISOLATED[0], 60), least_peak_in_process(ISOLATED[0], max_seconds=60)
    assert there == here


def test_a_process_of_its_own_refuses_the_same():
    problem, refusals = ISOLATED[1], []
    for planner in (solve_per_block, solve_in_process):
        with pytest.raises(InfeasibleBudget) as caught:
            planner(problem, 1, max_seconds=60)
        refusals.append((str(caught.value), caught.value.smallest, caught.value.proven))
    assert refusals[0] == refusals[1]


def test_what_is_printed_on_the_way_does_not_corrupt_the_answer(tmp_path, monkeypatch):
    """Python reads sitecustomize as it starts; the second text comes when the solver runs, and past Python's stdout."""
    patched = "import os, time; print('one'); time.perf_counter = lambda: os.write(1, b'two') and time.monotonic()"
    (tmp_path / "sitecustomize.py").write_text(patched)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problem = ISOLATED[0]
    solution = solve_in_process(problem, 40, max_seconds=60)
    assert solution.policies == solve_per_block(problem, 40, max_seconds=60).policies


def test_a_folder_of_the_same_name_in_the_current_directory_is_not_taken_for_the_package(tmp_path):
    """As in a clone of this project, whose ds_adacc/ has no planner."""
    (tmp_path / "clone" / "ds_adacc").mkdir(parents=True)
    (tmp_path / "clone" / "ds_adacc" / "__init__.py").write_text("raise SystemExit('not the package')")
    script = tmp_path / "script.py"
    script.write_text(
        "from blocks import packable\n"
        "from ds_adacc.planner import Problem, solve_in_process\n"
        "print(repr(solve_in_process(Problem((packable('a', 8),)), 40, max_seconds=60).fallback))\n"
    )
    here = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parent)}
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path / "clone", env=here, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "''\n"


STALLS = "import time; time.sleep(600)"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FAILS = "raise SystemExit('no memory')"
BROKEN = {  # what is said of them, and the seconds that they are waited for
    STALLS: ("gave no answer in 0.1 seconds", 0.1),
    DIES: ("was ended by signal 9", 5.0),
    FAILS: ("ended with code 1: no memory", 5.0),
}


@pytest.fixture(params=BROKEN)
def broken(request, tmp_path, monkeypatch):
    """A solver's process that runs this program instead of the solver. Returns what is said of it."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{request.param}\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", os.fspath(stand_in))
    said, seconds = BROKEN[request.param]
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solver_process"], "_START_SECONDS", seconds - 2e-3)
    return said


@pytest.mark.parametrize("problem", ISOLATED)
def test_without_an_answer_the_plan_keeps_the_budget_and_the_bound(problem, broken):
    budget = 3 * everywhere(retain_policy, problem).peak // 4
    solution = solve_in_process(problem, budget, max_seconds=1e-3)
    assert broken in solution.fallback
    assert solution.peak == peak_bytes(problem, solution.policies) <= budget
    assert not solution.proven_optimal
    check_gradient_errors(problem, solution)
    least = least_peak_in_process(problem, max_seconds=1e-3)
    assert least.peak <= solution.peak
    check_gradient_errors(problem, least)


def test_a_bug_is_told_apart_from_a_lack_of_time():
    with pytest.raises(
        NoAnswer, match=r"ended with code 1: AttributeError: .* \(File .*, line \d+, in .*\)\. `ds_adacc doctor` tells"
    ):
        in_process(solve_per_block, "no problem", 1, max_seconds=5.0)


@pytest.mark.parametrize("times", [1, 2])
def test_a_search_that_aborts_is_begun_once_more(times, tmp_path, monkeypatch):
    """CBC aborts now and then, and the same search then finds what it should."""
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        f"with open({os.fspath(log)!r}, 'a') as log: print('began', file=log)\n"
        f"if len(open({os.fspath(log)!r}).readlines()) <= {times}: os.abort()\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    exact = solve_in_process(ISOLATED[0], 40, max_seconds=60)
    monkeypatch.setattr(sys, "executable", os.fspath(stand_in))
    found = solve_in_process(ISOLATED[0], 40, max_seconds=60)
    assert log.read_text() == "began\n" * 2
    assert (found == exact) == (times == 1)
    assert ("was ended by signal 6" in found.fallback) == (times == 2)


@pytest.mark.parametrize("problem", ISOLATED)
def test_an_infeasible_budget_is_infeasible_without_an_answer(problem, broken):
    with pytest.raises(InfeasibleBudget) as caught:
        solve_in_process(problem, 1, max_seconds=1e-3)
    named = caught.value.smallest
    assert solve_in_process(problem, named, max_seconds=1e-3).peak <= named


@pytest.mark.parametrize("problem", ISOLATED)
def test_out_of_time_at_once(problem):
    budget = 3 * everywhere(retain_policy, problem).peak // 4
    solution = solve_in_process(problem, budget, max_seconds=1e-9)
    assert solution.fallback.startswith("the solver found no ")
    assert solution.peak <= budget
    with pytest.raises(InfeasibleBudget):
        solve_in_process(problem, 1, max_seconds=1e-9)


def test_a_wait_has_a_limit(monkeypatch):
    waits = []

    def late(*_, timeout, **__):
        waits.append(timeout)
        raise subprocess.TimeoutExpired("solver", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert solve_in_process(ISOLATED[0], 40, max_seconds=3).peak <= 40
    assert waits == [2 * 3 + 5]


def test_no_memory_for_a_process(monkeypatch):
    def refused(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "run", refused)
    solution = solve_in_process(ISOLATED[0], 40, max_seconds=3)
    assert "did not start: [Errno 12] Cannot allocate memory" in solution.fallback
    assert solution.peak <= 40


def test_the_collector_is_off_and_models_are_not_deleted_at_exit(tmp_path, monkeypatch):
    """python-mip's `Model.__del__`, run by the cyclic collector inside a call to CBC, waits for ever."""
    report = tmp_path / "seen"
    patched = f"""
import atexit, gc
def seen(text):
    open({os.fspath(report)!r}, "a").write(text)
def disable(disable=gc.disable):
    disable()
    gc.callbacks.append(lambda *_: seen(" collected"))
    seen("off")
gc.disable = disable
atexit.register(seen, " exit")
"""
    (tmp_path / "sitecustomize.py").write_text(patched)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert solve_in_process(ISOLATED[1], 20, max_seconds=60).peak <= 20
    assert report.read_text() == "off"
