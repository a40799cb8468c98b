"""What is measured of gradient errors: estimates for the planner, and the error of the policy that it proposes.

The planner adds up errors of single values as squares. That is a guess: errors of values that backward combines do not
add up so. So a policy comes into force only after all of its choices have been measured together, on the block that is
to run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.profile.probe import Measure

Bind = Callable[[planner.Policy], BoundPolicy]


@dataclass(frozen=True)
class CodecErrors:
    """Relative gradient errors of one block type: of each value under its coarsest codec, and of each stale op.

    `coarsest`: by value, the codec, its relative error of the value, and the gradient error that was measured.
    """

    coarsest: Mapping[int, tuple[str, float, float]] = field(default_factory=dict)
    stale: Mapping[int, float] = field(default_factory=dict)

    def applied_to(self, profile: planner.Profile) -> planner.Profile:
        """The profile with these errors. A finer codec of a value is taken to err less in proportion.

        A lossy codec of a value without a finite error is no longer on offer.
        """
        codecs = tuple(
            tuple(known for cost in costs if (known := self._known(index, cost)) is not None)
            for index, costs in enumerate(profile.codecs)
        )
        stale = tuple(self.stale.get(op, 0.0) for op in range(len(profile.graph.ops)))
        return replace(profile, codecs=codecs, stale_errors=stale)

    def _known(self, index: int, cost: planner.CodecCost) -> planner.CodecCost | None:
        if cost.lossless:
            return cost
        _, error, gradient_error = self.coarsest.get(index, ("", cost.error, planner.HOPELESS))
        scaled = gradient_error * (cost.error / error if error else 1.0)
        return replace(cost, gradient_error=scaled) if gradient_error < planner.HOPELESS else None


@dataclass(frozen=True)
class PolicyError:
    """The measured relative gradient error of a policy on one block.

    If it is above the bound, `strictness` tells the planner by how much the block's errors exceed the estimates.
    """

    policy: planner.Policy
    error: float
    strictness: planner.Strictness | None = None


def measure_codecs(measure: Measure, profile: planner.Profile, bind: Bind) -> CodecErrors:
    """Measure each value under the coarsest codec on offer, and each op with the coarsest of its inputs while stale."""
    coarsest, stale = {}, {}
    together = profile.graph.read_together
    for index, costs in enumerate(profile.codecs):
        lossy = [cost for cost in costs if not cost.lossless]
        if not lossy:
            continue
        worst = max(lossy, key=lambda cost: cost.error)
        coarsest[index] = worst.codec, worst.error, measure(bind(alone(profile, index, worst.codec)))
        read_by = [op for op, (inputs, _) in together.items() if index in inputs]
        if read_by:
            error = measure(bind(alone(profile, index, worst.codec, replays=False)))
            stale.update((op, max(error, stale.get(op, 0.0))) for op in read_by)
    return CodecErrors(coarsest, stale)


def measure_policy(
    measure: Measure, profile: planner.Profile, policy: planner.Policy, bind: Bind, max_error: float
) -> PolicyError:
    """Measure all choices of the policy together. If that exceeds the bound, measure each of its lossy values alone.

    `profile` has the estimates by which the planner chose.
    """
    error = measure(bind(policy))
    if error <= max_error:
        return PolicyError(policy, error)
    lossy = policy.lossy_values(profile)
    chosen = {value: store for value, store in enumerate(policy.stores) if store is not None and value in lossy}
    single = {v: measure(bind(alone(profile, v, store))) for v, store in chosen.items()}
    together = profile.graph.read_together
    read = {op: chosen.keys() & set(together[op][0]) for op in planner.stale_ops(profile, policy)}
    unreplayed = {
        v: measure(bind(alone(profile, v, chosen[v], replays=False))) for v in sorted(set().union(*read.values()))
    }
    stale = [0.0] * len(profile.graph.ops)
    for op, values in read.items():
        # If no input is compressed itself, but one is altered, the operator is to blame.
        stale[op] = max((unreplayed[v] for v in values), default=0.0) or error
    of_parts = math.hypot(*single.values(), *stale)
    # What the parts do not explain is laid on all of them.
    excess = max(1.0, error / of_parts) if of_parts else planner.HOPELESS
    factors = [1.0] * len(profile.graph.values)
    for value, alone_error in single.items():
        estimate = profile.codec(value, chosen[value]).gradient_error
        factor = excess * alone_error / estimate if estimate else planner.HOPELESS
        factors[value] = min(max(1.0, factor), planner.HOPELESS)
    errors = tuple(min(excess * each, planner.HOPELESS) for each in stale)
    return PolicyError(policy, error, planner.Strictness(tuple(factors), errors))


def alone(profile: planner.Profile, value: int, codec: str, replays: bool = True) -> planner.Policy:
    """The policy that compresses one value and retains all else, but for what replays of its readers make of it.

    A reader is replayed if its outputs are saved and its other inputs are at hand. Without `replays`, none is.
    """
    graph, stores = profile.graph, [*planner.retain_policy(profile).stores]
    stores[value] = codec
    for op in graph.ops if replays else ():
        others = [other for other in op.inputs if other != value]
        at_hand = all(graph.values[other].storable for other in others)
        if op.replayable and value in op.inputs and at_hand and any(output in graph.saved for output in op.outputs):
            for other in others:
                stores[other] = stores[other] or planner.RETAIN
            for output in op.outputs:
                stores[output] = None
    return planner.Policy(tuple(stores))
