"""What a policy does with each value, in words; and what a plan decides for a block type, as plain data.

The journal holds that data, and tables show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ds_adacc import planner

if TYPE_CHECKING:  # a journal is shown without torch
    from ds_adacc.program.recording import Recording

RECOMPUTE = "recompute"


def choices(profile: planner.Profile, policy: planner.Policy) -> list[str | None]:
    """For each value its store in the policy, "recompute", or None if backward does not need it."""
    rebuilt = {value for op in profile.graph.replayed(policy.stores) for value in profile.graph.ops[op].outputs}
    return [store or (RECOMPUTE if value in rebuilt else None) for value, store in enumerate(policy.stores)]


def named_choices(profile: planner.Profile, policy: planner.Policy, names: Sequence[str]) -> dict[str, str]:
    """The choices by these names of the values. Values without bytes of their own, or not needed, are left out."""
    triples = zip(names, profile.graph.values, choices(profile, policy), strict=True)
    return {name: choice for name, value, choice in triples if choice is not None and value.nbytes}


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
    """The blocks that run a policy ("all blocks", "layers.0", "layers.2-5, 9"), and what a call of one takes."""

    blocks: str
    held_bytes: int
    added_seconds: float


@dataclass(frozen=True)
class Decision:
    """What is decided for the block type `name`: so many calls held at once, of so many operators each.

    `remarks`: why there is less to choose from than the user may expect: Functions that are never replayed, data that
    Python reads.
    """

    name: str
    calls: int
    operators: int
    values: tuple[DecidedValue, ...]
    policies: tuple[UsedPolicy, ...]
    remarks: tuple[str, ...] = ()


def decision_of(
    name: str,
    blocks: Sequence[str],
    block_type: planner.BlockType,
    chosen: Sequence[planner.Policy],
    recording: Recording,
) -> Decision:
    """`blocks` and `chosen` are the names and the policies of the blocks, both in forward order."""
    profile, policies = block_type.profile, list(dict.fromkeys(chosen))
    made = [choices(profile, policy) for policy in policies]
    values = []
    for value in recording.values:
        of_value = [each[value.index] for each in made]
        nbytes = profile.graph.values[value.index].nbytes
        if nbytes and any(choice is not None for choice in of_value):
            shape, dtype = tuple(value.geometry.size), str(value.geometry.dtype).removeprefix("torch.")
            if recording.is_whole and value.producer is not None:  # it stands for many tensors
                shape, dtype = (), ""
            shown = tuple(choice or "-" for choice in of_value)
            whole = value.nbytes or nbytes  # a rank may hold a share of it
            values.append(DecidedValue(value.label, value.name, value.role, shape, dtype, whole, shown))
    used = tuple(
        UsedPolicy(
            _running(policy, chosen, blocks), policy.held_bytes(profile), planner.simulate(profile, policy).seconds
        )
        for policy in policies
    )
    return Decision(name, block_type.count, len(profile.graph.ops), tuple(values), used, recording.remarks_on_replays)


def span(names: Iterable[str]) -> str:
    """The names as one: "blocks.0 (Block)" to "blocks.11 (Block)" are "blocks.0-11 (Block)".

    Names that differ in the last number of their paths are one, and what is left alone also by the number before it:
    "layers.0.1" and "layers.2.1" are "layers.[0, 2].1".
    """
    merged = _merged(dict.fromkeys(names), r"(.*?)(\d+)(\D*)")
    return ", ".join(_merged(merged, r"(.*?)(\d+)(\.\D*\d+\D*)"))


def _merged(names: Iterable[str], pattern: str) -> list[str]:
    """The names, in which those that differ only in the number of this pattern of their paths are one."""
    numbered: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        found = re.fullmatch(pattern, name.partition(" (")[0])
        if found is None:
            plain.append(name)
        else:
            numbered.setdefault((found[1], name.removeprefix(f"{found[1]}{found[2]}")), []).append(int(found[2]))
    for (start, end), numbers in numbered.items():
        runs = _runs(numbers)
        is_inside = "," in runs and end.partition(" (")[0]
        plain.append(f"{start}[{runs}]{end}" if is_inside else f"{start}{runs}{end}")
    return plain


def _runs(numbers: Iterable[int]) -> str:
    """Numbers with each run of consecutive ones as its first and last: "1, 6-9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _running(policy: planner.Policy, chosen: Sequence[planner.Policy], blocks: Sequence[str]) -> str:
    """The blocks that run this policy.

    By number, from 0, where the blocks have no names of their own, as functions have none, or this rank has not met all
    of them.
    """
    if len(set(chosen)) == 1:
        return "all blocks"
    running = [number for number, each in enumerate(chosen) if each == policy]
    paths = _without_parents([name.partition(" ")[0] for name in blocks])
    are_distinct = len(set(paths)) == len(paths) == len(chosen)
    named = span(paths[number] for number in running) if are_distinct else _runs(running)
    return f"block{'s' if len(running) > 1 else ''} {named}" if named[:1].isdigit() else named


def _without_parents(paths: Sequence[str]) -> list[str]:
    """Paths of modules from the innermost module on that they share: "layers.0" of "model.layers.0"."""
    modules = [path.split(".") for path in paths]
    shared = len([*takewhile(lambda each: len(set(each)) == 1, zip(*modules, strict=False))])
    return [".".join(each[max(shared - 1, 0) :]) for each in modules]
