"""Estimates of what calls of the block types that this rank has run take together, in bytes.

They are for the policies in force of an `Agreement`, and for no checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import AdoptedPlan, TypePlan
from ds_adacc.plan.live_sets import Alive, LiveSet
from ds_adacc.plan.plan import PlanRequest


def peak_without(agreement: Agreement, alive: Alive) -> int:
    """Peak bytes without checkpointing, if so many calls of each block type are alive."""
    types = {name: agreement.known_types[name] for name in sorted(alive)}
    specs = [
        planner.BlockType(name, agreement.profile_of(known), known.count, known.calls_per_block)
        if known.plan is None
        else known.plan.spec
        for name, known in types.items()
    ]
    return _request(agreement, specs, alive).peak_without()


def largest_pass(agreement: Agreement, live_set: LiveSet) -> Alive:
    """The pass of just these block types that takes the most; if none is known, the most calls of each."""
    passes = agreement.passes.of(live_set)
    return max(passes, key=lambda alive: peak_without(agreement, alive), default=agreement.alive(live_set))


def estimated_peak(agreement: Agreement, plans: Iterable[TypePlan], alive: Alive) -> int:
    """Predicted peak bytes of so many calls of these block types together."""
    plans = [each.of_calls(alive[each.spec.name]) for each in plans]
    request = _request(agreement, [each.spec for each in plans])
    own = {each.spec.name: each.policies for each in plans}
    problem = request.problem(request.block_types)
    policies = {agreement.origin(name): chosen for name, chosen in own.items()} | own
    return planner.peak_bytes(problem, [policies[each.name] for each in problem.block_types])


def estimated_held(agreement: Agreement, calls: Mapping[tuple[str, planner.Policy], int]) -> int:
    """Bytes that `calls` hold: the number of calls by block type and by the policy that they ran."""
    total = 0
    for (digest, policy), count in calls.items():
        known = agreement.known_types[digest]
        profile = agreement.profile_of(known) if known.plan is None else known.plan.spec.profile
        total += count * policy.held_bytes(profile)
    return total


def have_plan(agreement: Agreement, alive: Alive) -> bool:
    """Whether these block types were planned together, or together fit the budget under their current policies."""
    names = frozenset(alive)
    plans = [plan for name in alive if (plan := agreement.known_types[name].plan) is not None]
    if len(plans) < len(alive):
        return False
    # An adopted type was priced in the live sets of its origin, beside what was planned there. Not beside another size
    # of the same program, nor beside others that have adopted: each may have used what was left of the budget.
    origins, planned = frozenset(map(agreement.origin, names)), (*agreement.live_sets, *agreement.unfit)
    is_known = len(origins) == len(names) and any(origins <= known for known in planned)
    adopted = [each for each in plans if isinstance(each, AdoptedPlan)]
    is_known = is_known and all(each.is_priced for each in adopted) and len(adopted) <= 1
    if is_known and all(alive[each.spec.name] <= each.spec.count for each in plans):
        return True
    return agreement.budget.limit is not None and estimated_peak(agreement, plans, alive) <= agreement.budget.limit


def _request(agreement: Agreement, specs: Sequence[planner.BlockType], alive: Alive | None = None) -> PlanRequest:
    """What the planner is asked about these block types together. `alive`: the calls of the one pass that they had.

    Backward is thought to take them in the order of the sizes that were planned for, if that is known. Each then has
    the name of the size from which it has adopted.
    """
    names = {spec.name: agreement.origin(spec.name) for spec in specs}
    orders = agreement.forward_order.orders
    if len(set(names.values())) < len(names):
        names, orders = {name: name for name in names}, {}  # two sizes of one program have no order
    types = {names[spec.name]: replace(spec, name=names[spec.name]) for spec in specs}
    passes = () if alive is None else ({names[name]: calls for name, calls in alive.items()},)
    return PlanRequest(types, [frozenset(types)], orders, passes=passes)
