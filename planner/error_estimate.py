"""The estimated error of a block's gradient under a policy: what the planner bounds until all of it is measured.

Two things put a gradient off. A compressed value does, by its codec's measured error. And a step of backward does that
reads an op's input and its output together if the two do not agree: flash attention's backward forms
exp(q k' - logsumexp), whose error has no bound when q is lossy and the logsumexp belongs to the exact q. An input is
*altered* if it is compressed by a lossy codec, or rebuilt from an altered value. An output agrees with an altered input
only if it is rebuilt by a replay. Such an op with an output that is stored is *stale*.
"""

from __future__ import annotations

import math

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import Profile
from ds_adacc.planner.simulate import chosen_codecs


def altered_values(profile: Profile, policy: Policy) -> frozenset[int]:
    """The values that backward does not find as forward made them."""
    altered = set(policy.lossy_values(profile))
    for op in profile.graph.replayed(policy.stores):  # in forward order: sources come first
        if altered.intersection(profile.graph.ops[op].inputs):
            altered.update(v for v in profile.graph.ops[op].outputs if policy.stores[v] is None)
    return frozenset(altered)


def stale_ops(profile: Profile, policy: Policy) -> tuple[int, ...]:
    """The ops of which backward reads an altered input together with an output that is stored."""
    altered = altered_values(profile, policy)
    return tuple(
        op
        for op, (inputs, outputs) in profile.graph.read_together.items()
        if altered.intersection(inputs) and any(policy.stores[output] is not None for output in outputs)
    )


def gradient_error(profile: Profile, policy: Policy) -> float:
    """The estimated relative error of the block's gradient: the root of the sum of squares of all that puts it off."""
    codecs = (offer.gradient_error for offer in chosen_codecs(profile, policy).values())
    stale = (profile.stale_errors[op] for op in stale_ops(profile, policy)) if profile.stale_errors else ()
    return math.hypot(*codecs, *stale)
