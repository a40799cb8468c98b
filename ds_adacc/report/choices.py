"""A policy in words, value by value."""

from __future__ import annotations

from ds_adacc import planner

RECOMPUTE = "recompute"


def choices(profile: planner.Profile, policy: planner.Policy) -> list[str | None]:
    """Per value "retain", "offload", a codec's name, "recompute", or None for what backward does without."""
    rebuilt = {value for op in policy.replays for value in profile.graph.ops[op].outputs}
    return [store or (RECOMPUTE if value in rebuilt else None) for value, store in enumerate(policy.stores)]


def named_choices(profile: planner.Profile, policy: planner.Policy) -> dict[str, str]:
    """The same by the value's name, of values that have bytes of their own and that backward does not do without."""
    pairs = zip(profile.graph.values, choices(profile, policy), strict=True)
    return {value.name: choice for value, choice in pairs if choice is not None and value.nbytes}
