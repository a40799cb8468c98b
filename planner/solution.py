"""What every planner returns, and how it fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_adacc.planner.peak import Policies, Simulations, added_seconds, held_bytes, peak_bytes
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import Profile
from ds_adacc.planner.simulate import chosen_codecs
from ds_adacc.planner.units import check_count


@dataclass(frozen=True)
class Solution:
    """The policies of every block type's blocks, in forward order, with what the simulator says of them.

    `peak` is in bytes, over all calls; `held` in bytes, over all calls of each block type. `added_seconds` is over one
    run of all calls. `error` is the sum over all compressed values of relative error times bytes. `proven_optimal`: no
    other policies within the budget that this planner may choose are faster by more than the solver's gap (`milp.GAP`).
    `fallback`: why the solver found no policies, if those of simple rules take their place (`without_solver`,
    `mix_points`).
    """

    policies: tuple[tuple[Policy, ...], ...]
    peak: int
    held: tuple[int, ...]
    added_seconds: float
    error: float
    proven_optimal: bool = False
    fallback: str = ""


class InfeasibleBudget(ValueError):
    """No policies fit the `budget`; `smallest` would do (both in bytes).

    `proven` is False if a budget between the two may do as well. `hint`: what else would do.
    """

    def __init__(self, budget: int, smallest: int, proven: bool = True, hint: str = "") -> None:
        which = "that fits" if proven else "found in the time allowed"
        super().__init__(
            f"a budget of {budget} bytes ({human_bytes(budget)}) for activations is too small; "
            f"the smallest {which} is {smallest} bytes ({human_bytes(smallest)}){hint}"
        )
        self.budget = budget
        self.smallest = smallest
        self.proven = proven
        self.hint = hint

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.budget, self.smallest, self.proven, self.hint)


class NoSolutionInTime(RuntimeError):
    """The solver ended before it found any policies, or proved that there are none: in most cases for lack of time."""


def check_request(budget: int, max_seconds: float) -> None:
    """ValueError unless `budget` is a non-negative int (bytes) and the time limit positive and finite."""
    check_count("budget", budget)
    if not (math.isfinite(max_seconds) and max_seconds > 0):
        raise ValueError(f"max_seconds is {max_seconds!r}; it must be finite and positive")


def require_within(solution: Solution, budget: int) -> None:
    """RuntimeError if a solution of the integer program takes more than the budget that it was given."""
    if solution.peak > budget:
        raise RuntimeError(f"the policies take {solution.peak} bytes of a budget of {budget}: a bug in the planner")


def evaluate_uniform(problem: Problem, policies: Sequence[Policy], known: Simulations | None = None) -> Solution:
    """As `evaluate_per_block`, with one policy for all blocks of a block type."""
    pairs = zip(problem.block_types, policies, strict=True)
    return evaluate_per_block(problem, [(policy,) * block_type.blocks for block_type, policy in pairs], known)


def evaluate_per_block(problem: Problem, policies: Policies, known: Simulations | None = None) -> Solution:
    """What the simulator says of these policies. How they were found is for the planner to add.

    `known`: as in `simulations`.
    """
    known = {} if known is None else known
    return Solution(
        policies=tuple(tuple(chosen) for chosen in policies),
        peak=peak_bytes(problem, policies, known),
        held=held_bytes(problem, policies),
        added_seconds=added_seconds(problem, policies, known),
        error=sum(
            block_type.calls_per_block * quantization_error(block_type.profile, policy)
            for block_type, chosen in zip(problem.block_types, policies, strict=True)
            for policy in chosen
        ),
    )


def quantization_error(profile: Profile, policy: Policy) -> float:
    """The sum over the compressed values of one call of relative error times bytes."""
    offers = chosen_codecs(profile, policy).items()
    return sum(offer.error * profile.graph.values[value].nbytes for value, offer in offers)


def human_bytes(nbytes: float) -> str:
    """1536 -> '1.50 KiB'."""
    units, exponent = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while exponent < 4 and abs(round(nbytes / 1024**exponent, 2)) >= 1024:  # a byte less than 1 MiB is 1 MiB
        exponent += 1
    return f"{nbytes / 1024**exponent:.{2 if exponent else 0}f} {units[exponent]}"
