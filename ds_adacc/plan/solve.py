"""Choose policies for all block types. Policies in force stay where new ones would save no time worth a change."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from ds_adacc import planner
from ds_adacc.config import LARGEST_BOUND, AdaccConfig
from ds_adacc.plan.approvals import MARGIN
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
    solver = _GroupSolver(request, budget, config, in_force)
    groups: list[Group] = []
    refusals: list[planner.InfeasibleBudget] = []
    for names in components(request.live_sets):
        component = Component(request.problem(names), tuple(s for s in request.live_sets if s <= names))
        try:
            groups.append(solver.solved(component))
        except planner.NoSolutionInTime as error:
            if forgiven is Forgiven.NONE:
                raise
            group = solver.without_solver(component, str(error), smallest=None)
            if group.shortfall:
                group = replace(group, shortfall=with_advice(group.shortfall, config))
            groups.append(group)
        except planner.InfeasibleBudget as error:
            refusals.append(error.with_traceback(None))  # that would have this list, and be kept by it
            if forgiven is Forgiven.ALL:
                groups.append(solver.without_solver(component, str(error), error.smallest))
    if refusals and forgiven is not Forgiven.ALL:
        worst = max(refusals, key=lambda error: error.smallest)
        raise planner.InfeasibleBudget(worst.budget, worst.smallest, worst.proven, _hint(request, budget, config))
    return tuple(groups)


def with_advice(reason: str, config: AdaccConfig) -> str:
    """Why the solver found no plan, without a full stop, and what to do if more time may help."""
    reason = reason.rstrip(".")
    if planner.FAILED in reason:
        return reason
    return f"{reason}. If that is a lack of time, raise adacc.solver.max_seconds (now {config.solver.max_seconds})"


@dataclass(frozen=True)
class _GroupSolver:
    """Finds the policies of one group after the other. The fields are as in `solve`."""

    request: PlanRequest
    budget: int
    config: AdaccConfig
    in_force: Mapping[str, TypePolicies]

    def solved(self, component: Component) -> Group:
        """The solver's policies, or those in force if they still fit and the new ones save no time worth a change."""
        solution, kept = component.solve(self.budget, self.config), self._kept(component)
        if len(kept) == len(component.block_types):
            old = component.evaluate([kept[block_type.name] for block_type in component.block_types])
            noise = max(block_type.profile.noise for block_type in component.block_types) * old.added_seconds
            if old.peak <= self.budget and old.added_seconds - solution.added_seconds <= noise:
                solution = replace(old, proven_optimal=solution.proven_optimal)
        return Group(component.problem, component.live_sets, solution)

    def without_solver(self, component: Component, why: str, smallest: int | None) -> Group:
        """The group with policies that the solver has not found, for the reason `why`. `smallest` as of `_lean`."""
        kept = self._kept(component)
        policies = [
            kept.get(each.name) or (planner.recompute_policy(each.profile),) * each.blocks
            for each in component.block_types
        ]
        group = Group(component.problem, component.live_sets, component.evaluate(policies), shortfall=why)
        if group.unfit(self.budget):
            group = self._lean(group, {each.name for each in component.block_types} - self.in_force.keys(), smallest)
        if group.unfit(self.budget):
            return group
        # It fits all the same: the search for a better plan was cut short.
        return replace(group, solution=replace(group.solution, fallback=why), shortfall="")

    def _lean(self, group: Group, new: Collection[str], smallest: int | None) -> Group:
        """The group, which does not fit, with leaner policies. `new`: its block types that have no policies yet.

        `smallest`: bytes that some policies are known to fit; None where the solver was out of time.
        """
        is_mixed = 0 < len(new) < len(group.block_types)
        if smallest is not None and not is_mixed:
            # A search for policies of the smallest peak may end without any, too.
            with contextlib.suppress(planner.InfeasibleBudget, planner.NoSolutionInTime):
                least = replace(group, solution=group.solve(smallest, self.config))
                if self._is_leaner(least, group):
                    return least
            if not new:
                return group
        if new:
            of = self.request.problem(new)
            group = self._with_policies(planner.leanest(of), of, group)
            if is_mixed or not group.unfit(self.budget):
                return group
        least_peak = planner.least_peak_in_process(group.problem, max_seconds=self.config.solver.max_seconds)
        return self._with_policies(least_peak, group.problem, group)

    def _with_policies(self, least: planner.Solution, of: planner.Problem, group: Group) -> Group:
        """The group with the policies of `least`, which are those of the block types `of`, if that is leaner."""
        chosen = dict(zip((each.name for each in of.block_types), least.policies, strict=True))
        before = zip(group.block_types, group.solution.policies, strict=True)
        found = replace(group, solution=group.evaluate([chosen.get(each.name, own) for each, own in before]))
        return found if self._is_leaner(found, group) else group

    def _is_leaner(self, new: Group, old: Group) -> bool:
        """Whether the new group takes less than the old one, and breaks the budget for no other live sets."""
        return set(new.unfit(self.budget)) <= set(old.unfit(self.budget)) and new.solution.peak < old.solution.peak

    def _kept(self, component: Component) -> dict[str, TypePolicies]:
        """By block type, the policies in force that are still possible."""
        given = ((each, self.in_force.get(each.name, ())) for each in component.block_types)
        return {
            each.name: tuple(policy.with_asked(each.profile.graph) for policy in policies)
            for each, policies in given
            if _is_possible(policies, each)
        }


def _is_possible(policies: TypePolicies, block_type: planner.BlockType) -> bool:
    """Whether there is a policy for each block, with codecs that are still on offer."""
    are_on_offer = (policy.is_on_offer(block_type.profile) for policy in set(policies))
    return len(policies) == block_type.blocks and all(are_on_offer)


def _hint(request: PlanRequest, budget: int, config: AdaccConfig) -> str:
    """What else than a larger budget would do: a looser bound on the gradient error, if there is one."""
    bound, aim = config.max_gradient_error, request.max_gradient_error
    if bound is None or aim is None:
        return ""
    smallest = smallest_bound(request, budget, config.solver.max_seconds)
    if smallest is None:
        return ""
    of_section = smallest * bound / aim
    return (
        f" with adacc.max_gradient_error = {bound:g}; for this budget, the smallest "
        f"max_gradient_error is about {of_section:.2g}"
    )


def smallest_bound(request: PlanRequest, budget: int, seconds: float) -> float | None:
    """About the smallest bound on the gradient error with which all live sets fit the budget (bytes).

    None if none that a section may set does, or if the solver finds no plan in time. The live sets share a quarter of
    the `seconds` in each of about ten searches.
    """
    share, most = seconds / 4 / len(request.live_sets), MARGIN * LARGEST_BOUND

    def fits(bound: float | None) -> bool:
        loosened = replace(request, max_gradient_error=bound)
        try:
            for names in request.live_sets:
                planner.solve_in_process(loosened.problem(names), budget, max_seconds=share)
        except (planner.InfeasibleBudget, planner.NoSolutionInTime):
            return False
        return True

    assert request.max_gradient_error is not None
    low, high = request.max_gradient_error, 2 * request.max_gradient_error
    if not fits(None):
        return None
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(16 * high, most)
    while high > 1.1 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
