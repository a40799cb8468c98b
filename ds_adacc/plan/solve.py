"""Choose policies for all block types. Policies in force stay where new ones would save no time worth a change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum, auto

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.plan.live_sets import Component, TypePolicies, components
from ds_adacc.plan.plan import Group, PlanRequest


class Forgiven(Enum):
    """Which errors of the solver end in other policies than it would have found, instead of an exception."""

    NONE = auto()
    OUT_OF_TIME = auto()  # planner.NoSolutionInTime
    ALL = auto()  # planner.InfeasibleBudget too


def solve(
    request: PlanRequest,
    budget: int,
    config: AdaccConfig,
    in_force: Mapping[str, TypePolicies],
    forgiven: Forgiven,
) -> tuple[Group, ...]:
    """Choose policies for all block types, group by group. The budget is in bytes.

    The policies `in_force` stay where new ones would save less time than measured seconds scatter; () stands for
    policies that may not run any more. Raises planner.InfeasibleBudget with a budget that all groups would fit, and
    planner.NoSolutionInTime.

    If an error is forgiven, the group keeps its policies in force. A block type without any, or whose policies need a
    codec that is no longer on offer, is recomputed. If that breaks the budget, the group takes the policies of the
    smallest peak, unless more live sets would then break it. If only some block types of the group are new, only these
    change: the others also run in live sets that fit, and would be slower there. The new ones take the leanest policies
    that simple rules find; so does a new group if the solver was out of time and these fit.
    """
    groups: list[Group] = []
    refusals: list[planner.InfeasibleBudget] = []
    for names in components(request.live_sets):
        component = Component(request.problem(names), tuple(s for s in request.live_sets if s <= names))
        try:
            solution = _keep_or_replace(component, in_force, budget, component.solve(budget, config))
            groups.append(Group(component.problem, component.live_sets, solution))
        except planner.NoSolutionInTime as error:
            if forgiven is Forgiven.NONE:
                raise
            group = _without_solver(request, component, in_force, budget, config, str(error), smallest=None)
            if group.shortfall:
                group = replace(group, shortfall=f"{group.shortfall.rstrip('.')}. {more_time(config)}")
            groups.append(group)
        except planner.InfeasibleBudget as error:
            refusals.append(error)
            if forgiven is Forgiven.ALL:
                why, smallest = str(error), error.smallest
                groups.append(_without_solver(request, component, in_force, budget, config, why, smallest))
    if refusals and forgiven is not Forgiven.ALL:
        raise max(refusals, key=lambda error: error.smallest)
    return tuple(groups)


def more_time(config: AdaccConfig) -> str:
    """What to do where the solver found no plan, which may have another reason than a lack of time."""
    return f"If that is a lack of time, raise adacc.solver.max_seconds (now {config.solver.max_seconds})"


def _keep_or_replace(
    component: Component, in_force: Mapping[str, TypePolicies], budget: int, new: planner.Solution
) -> planner.Solution:
    """The new solution, or the policies in force if they still fit and the new ones save no time worth a change."""
    kept = _kept(component, in_force)
    if len(kept) < len(component.block_types):
        return new
    old = component.evaluate([kept[block_type.name] for block_type in component.block_types])
    old = replace(old, proven_optimal=new.proven_optimal)
    noise = max(block_type.profile.noise for block_type in component.block_types) * old.added_seconds
    return old if old.peak <= budget and old.added_seconds - new.added_seconds <= noise else new


def _keep_or_recompute(component: Component, in_force: Mapping[str, TypePolicies]) -> planner.Solution:
    """The policies in force; a block type that has none, or none that is still possible, is recomputed."""
    kept = _kept(component, in_force)
    return component.evaluate(
        [
            kept.get(each.name) or (planner.recompute_policy(each.profile),) * each.blocks
            for each in component.block_types
        ]
    )


def _without_solver(
    request: PlanRequest,
    component: Component,
    in_force: Mapping[str, TypePolicies],
    budget: int,
    config: AdaccConfig,
    why: str,
    smallest: int | None,
) -> Group:
    """The group with policies that the solver has not found, for the reason `why`. `smallest` as of `_lean`."""
    group = Group(component.problem, component.live_sets, _keep_or_recompute(component, in_force), shortfall=why)
    new = {each.name for each in component.block_types} - in_force.keys()
    group = _lean(request, group, new, budget, config, smallest)
    if group.unfit(budget):
        return group
    # It fits all the same: the search for a better plan was cut short.
    return replace(group, solution=replace(group.solution, fallback=why), shortfall="")


def _lean(
    request: PlanRequest,
    group: Group,
    new: Collection[str],
    budget: int,
    config: AdaccConfig,
    smallest: int | None,
) -> Group:
    """The group with leaner policies, if it does not fit. `new`: its block types that have no policies yet.

    `smallest`: bytes that some policies are known to fit; None where the solver was out of time.
    """
    if not group.unfit(budget):
        return group
    is_mixed = 0 < len(new) < len(group.block_types)
    if smallest is not None and not is_mixed:
        least = _with_least(group, smallest, config)
        if least is not None and _is_leaner(least, group, budget):
            return least
        if not new:
            return group
    if new:
        of = request.problem(new)
        group = _with_policies(planner.leanest(of, group.shortfall), of, group, budget)
        if is_mixed or not group.unfit(budget):
            return group
    least = planner.least_peak_in_process(group.problem, max_seconds=config.solver.max_seconds)
    return _with_policies(least, group.problem, group, budget)


def _with_least(group: Group, smallest: int, config: AdaccConfig) -> Group | None:
    """The group with policies that fit `smallest` bytes. A search for them may end without any: None."""
    try:
        return replace(group, solution=group.solve(smallest, config))
    except (planner.InfeasibleBudget, planner.NoSolutionInTime):
        return None


def _with_policies(least: planner.Solution, of: planner.Problem, group: Group, budget: int) -> Group:
    """The group with the policies of `least`, which are those of the block types `of`, if that is leaner."""
    chosen = dict(zip((each.name for each in of.block_types), least.policies, strict=True))
    policies = [
        chosen.get(each.name, before) for each, before in zip(group.block_types, group.solution.policies, strict=True)
    ]
    found = replace(group, solution=group.evaluate(policies))
    return found if _is_leaner(found, group, budget) else group


def _is_leaner(new: Group, old: Group, budget: int) -> bool:
    """Whether the new group takes less than the old one, and breaks the budget for no other live sets."""
    return set(new.unfit(budget)) <= set(old.unfit(budget)) and new.solution.peak < old.solution.peak


def _kept(component: Component, in_force: Mapping[str, TypePolicies]) -> dict[str, TypePolicies]:
    """By block type, the policies in force that are still possible."""
    given = ((each, in_force.get(each.name, ())) for each in component.block_types)
    return {each.name: policies for each, policies in given if _is_possible(policies, each)}


def _is_possible(policies: TypePolicies, block_type: planner.BlockType) -> bool:
    """Whether there is a policy for each block, with codecs that are still on offer."""
    are_on_offer = (policy.is_on_offer(block_type.profile) for policy in set(policies))
    return len(policies) == block_type.blocks and all(are_on_offer)
