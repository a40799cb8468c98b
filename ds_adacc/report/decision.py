"""What a plan does with the values of one block type, as plain data: the journal holds it, tables show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ds_adacc import planner
from ds_adacc.report.choices import choices

if TYPE_CHECKING:  # a journal is shown without torch
    from ds_adacc.record.recording import Recording


@dataclass(frozen=True)
class DecidedValue:
    """A value that is saved, stored or recomputed, and its choice under each policy ("-": backward does without it).

    `label` is the user's name for it, `name` the one made of ATen's operators.
    """

    label: str
    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    choices: tuple[str, ...]


@dataclass(frozen=True)
class UsedPolicy:
    """The blocks that run a policy ("all blocks", "block 1", "blocks 2-5, 9"), and what a call of one takes."""

    blocks: str
    held_bytes: int
    added_seconds: float


@dataclass(frozen=True)
class Decision:
    """Of the block type `name`: so many calls held at once, of so many operators each.

    `remarks`: which `autograd.Function`s are never replayed, and what they hold whatever the plan.
    """

    name: str
    calls: int
    operators: int
    values: tuple[DecidedValue, ...]
    policies: tuple[UsedPolicy, ...]
    remarks: tuple[str, ...] = ()


def decision_of(
    name: str, block_type: planner.BlockType, chosen: Sequence[planner.Policy], recording: Recording
) -> Decision:
    """`chosen` are the policies of the blocks in forward order."""
    profile, policies = block_type.profile, list(dict.fromkeys(chosen))
    made = [choices(profile, policy) for policy in policies]
    values = []
    for value in recording.values:
        of_value = [each[value.index] for each in made]
        if profile.graph.values[value.index].nbytes and any(choice is not None for choice in of_value):
            shape, dtype = tuple(value.geometry.size), str(value.geometry.dtype).removeprefix("torch.")
            shown = tuple(choice or "-" for choice in of_value)
            values.append(DecidedValue(value.label, value.name, value.role, shape, dtype, value.nbytes, shown))
    used = tuple(
        UsedPolicy(_blocks(policy, chosen), policy.held_bytes(profile), planner.simulate(profile, policy).seconds)
        for policy in policies
    )
    return Decision(name, block_type.count, len(profile.graph.ops), tuple(values), used, recording.remarks_on_functions)


def _blocks(policy: planner.Policy, chosen: Sequence[planner.Policy]) -> str:
    """The blocks that run this policy, counted from 1."""
    if len(set(chosen)) == 1:
        return "all blocks"
    runs, first = [], 1
    for runs_it, run in groupby(chosen, policy.__eq__):
        last = first + len(list(run)) - 1
        if runs_it:
            runs.append(str(first) if first == last else f"{first}-{last}")
        first = last + 1
    return f"block{'s' if chosen.count(policy) > 1 else ''} {', '.join(runs)}"
