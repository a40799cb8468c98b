"""What a policy does with each value, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ds_adacc import planner

RECOMPUTE = "recompute"


def choices(profile: planner.Profile, policy: planner.Policy) -> list[str | None]:
    """For each value its store in the policy, "recompute", or None if backward does not need it."""
    rebuilt = {value for op in profile.graph.replayed(policy.stores) for value in profile.graph.ops[op].outputs}
    return [store or (RECOMPUTE if value in rebuilt else None) for value, store in enumerate(policy.stores)]


def named_choices(profile: planner.Profile, policy: planner.Policy, names: Sequence[str]) -> dict[str, str]:
    """The choices by these names of the values. Values without bytes of their own, or not needed, are left out."""
    triples = zip(names, profile.graph.values, choices(profile, policy), strict=True)
    return {name: choice for name, value, choice in triples if choice is not None and value.nbytes}
