"""The bytes that the blocks' activations may take at the peak of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ds_adacc import planner
from ds_adacc.config import AdaccConfig, MemoryBudget
from ds_adacc.plan.step_peak import StepPeak

UNLIMITED = 1 << 62  # bytes; a budget of so many is none


class Budget:
    """What the section asks for, and the `limit` in bytes that follows from it: None before the first plan."""

    def __init__(self, config: AdaccConfig) -> None:
        self.limit: int | None = None
        self.peak = StepPeak()
        self._asked = config.memory_budget
        self._forces_compression = config.forces_compression

    @property
    def fraction(self) -> float | None:
        """The budget as a fraction of the peak without checkpointing, if the section gives it so."""
        return float(self._asked.amount) if self._asked.kind == "fraction" else None

    def begin_with(self, module: nn.Module) -> None:
        """The first step begins with the next call of this module, such as an engine."""
        if self._asked.kind == "auto":
            self.peak.begin_with(module)

    def begin(self) -> None:
        """A step begins."""
        if self._asked.kind == "auto":
            self.peak.begin()

    def aside(self) -> AbstractContextManager[None]:
        """What is allocated here does not count in the step's peak, on which a budget of "auto" depends."""
        is_asked_for = self.limit is None and self._asked.kind == "auto"
        return self.peak.aside() if is_asked_for else nullcontext()

    def of_plan(self, without: int, available: int) -> int:
        """The budget for a plan, if the peak is `without` checkpointing, and `available` is left on the device."""
        if self._forces_compression and self._asked.kind == "auto":
            return UNLIMITED
        return budget_bytes(self._asked, without, available) if self.limit is None else self.grown(without)

    def asked(self, nbytes: int) -> str:
        """The key as the section gives it, with the bytes that follow from it."""
        are = "" if self._asked.kind == "bytes" else "here "
        return f"adacc.memory_budget = {self._asked} ({are}{planner.human_bytes(nbytes)})"

    def grow(self, without: int) -> None:
        """A pass takes so many bytes without checkpointing. Once there is a limit, it grows as `grown` says."""
        if self.limit is not None:
            self.limit = self.grown(without)

    def grown(self, without: int) -> int:
        """The budget once there is a limit. A fraction is of the largest peak without checkpointing so far."""
        assert self.limit is not None
        if self._asked.kind != "fraction":
            return self.limit
        return max(self.limit, budget_bytes(self._asked, without, 0))


def budget_bytes(budget: MemoryBudget, without: int, available: int) -> int:
    """The budget in bytes: a given number, a fraction of the peak `without` checkpointing, or the `available` bytes."""
    if budget.kind == "bytes":
        return int(budget.amount)
    if budget.kind == "fraction":
        return int(budget.amount * without)
    return available
