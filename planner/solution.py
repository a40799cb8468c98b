"""What every planner returns, and how it fails."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds_adacc.planner.graph import check_count
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import Kind
from ds_adacc.planner.simulate import added_seconds, chosen_codecs, peak_bytes
from ds_adacc.planner.together import Together


@dataclass(frozen=True)
class Solution:
    """One policy per kind, with what the simulator says of them.

    `peak` is in bytes over all calls alive together, `held` in bytes per call of each kind, `added_seconds` over one
    run of all calls, `error` the sum over all compressed values of relative error times bytes, `solve_seconds` the
    planner's own time. `proven_optimal` says that no policy within the budget adds less time.
    """

    policies: tuple[Policy, ...]
    peak: int
    held: tuple[int, ...]
    added_seconds: float
    error: float
    solve_seconds: float
    proven_optimal: bool


class InfeasibleBudget(ValueError):
    """No policy fits; `budget` was asked for, `smallest` bytes would do (both in bytes).

    `proven` is False if time ran out before it was certain that nothing smaller would.
    """

    def __init__(self, budget: int, smallest: int, proven: bool = True) -> None:
        which = "that fits" if proven else "found in the time allowed"
        super().__init__(
            f"a budget of {budget} bytes ({human_bytes(budget)}) for activations is too small; "
            f"the smallest {which} is {smallest} bytes ({human_bytes(smallest)})"
        )
        self.budget = budget
        self.smallest = smallest
        self.proven = proven

    def __reduce__(self) -> tuple[type, tuple[int, int, bool]]:
        return type(self), (self.budget, self.smallest, self.proven)


class NoSolutionInTime(RuntimeError):
    """The time limit passed before the solver found any policy, or proved that there is none."""


def check_request(kinds: Sequence[Kind], max_seconds: float) -> None:
    """ValueError unless there is a kind to plan for and a positive, finite time limit."""
    if not kinds:
        raise ValueError("kinds is empty; give at least one kind of block")
    if not (math.isfinite(max_seconds) and max_seconds > 0):
        raise ValueError(f"max_seconds is {max_seconds!r}; it must be finite and positive")


def check_budget(budget: int) -> None:
    """ValueError unless `budget` is a non-negative int (bytes)."""
    check_count("budget", budget)


def evaluate(
    kinds: Sequence[Kind],
    policies: Sequence[Policy],
    started: float,
    proven_optimal: bool,
    together: Together = None,
) -> Solution:
    """The solution of these policies, judged by the simulator; `started` is a reading of `time.perf_counter()`."""
    return Solution(
        policies=tuple(policies),
        peak=peak_bytes(kinds, policies, together),
        held=tuple(policy.held_bytes(kind.profile) for kind, policy in zip(kinds, policies, strict=True)),
        added_seconds=added_seconds(kinds, policies),
        error=sum(kind.count * _error(kind, policy) for kind, policy in zip(kinds, policies, strict=True)),
        solve_seconds=time.perf_counter() - started,
        proven_optimal=proven_optimal,
    )


def human_bytes(nbytes: int) -> str:
    """1536 -> '1.50 KiB'."""
    exponent = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    digits = 2 if exponent else 0
    return f"{nbytes / 1024**exponent:.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def _error(kind: Kind, policy: Policy) -> float:
    offers = chosen_codecs(kind.profile, policy).items()
    return sum(offer.error * kind.profile.graph.values[value].nbytes for value, offer in offers)
