"""One plan for all block types under one budget (bytes): which of them share it, and what is solved for whom.

Block types whose calls are alive at once form a live set and share the budget. Every live set has the whole budget, as
no two are alive at once. Live sets that have block types in common hang together, and are solved as one group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.plan.live_sets import LiveSet, Policies, apart, judge, slowest, solve_live_sets, stricter

Orders = Mapping[LiveSet, tuple[str, ...]]  # the block type of each block in forward order, where backward reverses it

_BASELINE_SECONDS = 1.0


@dataclass(frozen=True)
class PlanRequest:
    """What there is to plan for: block types by name, the live sets, and the orders known of them."""

    block_types: Mapping[str, planner.BlockType]
    live_sets: Sequence[LiveSet]
    orders: Orders = field(default_factory=dict)
    max_gradient_error: float | None = None

    def problem(self, names: Collection[str]) -> planner.Problem:
        """The planner's problem of these block types, as if all were alive at once."""
        members = tuple(self.block_types[name] for name in sorted(names))
        return planner.Problem(members, self._order(members), self.max_gradient_error)

    def _order(self, block_types: Sequence[planner.BlockType]) -> tuple[str, ...]:
        """The order in which one forward runs these blocks, if each runs once and there are no others."""
        names = frozenset(block_type.name for block_type in block_types)
        # in another live set the same blocks may run in another order, but each has one policy for both
        if any(names & other and names != other for other in self.live_sets):
            return ()
        order = self.orders.get(names, ())
        fits = all(
            block_type.calls_per_block == 1 and order.count(block_type.name) == block_type.blocks
            for block_type in block_types
        )
        return order if fits else ()


@dataclass(frozen=True)
class Group:
    """Live sets that hang together, and the solution for all their block types.

    `problem` lists the block types; of a single live set it is the problem that was solved. In the solution, `peak` is
    that of the live set that takes the most. `shortfall` says why the budget may be broken.
    """

    problem: planner.Problem
    live_sets: tuple[LiveSet, ...]
    solution: planner.Solution
    shortfall: str = ""

    @property
    def block_types(self) -> tuple[planner.BlockType, ...]:
        return self.problem.block_types

    @property
    def held(self) -> int:
        """Bytes that all calls of the largest live set hold between forward and backward."""
        each = {block_type.name: held for block_type, held in zip(self.block_types, self.solution.held, strict=True)}
        return max(sum(each[name] for name in names) for names in self.live_sets)

    @property
    def added_seconds(self) -> float:
        """What the policies add to one forward and backward of the slowest live set."""
        return slowest(self.problem, self.live_sets, self.solution)

    def unfit(self, budget: int) -> list[LiveSet]:
        """The live sets whose predicted peak is above so many bytes."""
        each = zip(self.live_sets, apart(self.problem, self.live_sets, self.solution.policies), strict=True)
        return [names for names, (one, chosen) in each if planner.peak_bytes(one, chosen) > budget]


@dataclass(frozen=True)
class Baseline:
    """What a simpler planner would have cost: peak bytes, and seconds added to a forward and backward.

    `added_seconds` is None if the planner found no policies within the budget, and `peak` the smallest that it can do.
    """

    name: str
    peak: int
    added_seconds: float | None
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The result of planning, the same on every rank.

    `budget` and `without` (the peak without checkpointing) are in bytes.
    """

    groups: tuple[Group, ...]
    budget: int
    without: int
    reason: str
    baselines: tuple[Baseline, ...] = ()

    @property
    def policies(self) -> dict[str, Policies]:
        """By the name of the block type."""
        pairs = [zip(group.block_types, group.solution.policies, strict=True) for group in self.groups]
        return {block_type.name: chosen for of_group in pairs for block_type, chosen in of_group}

    @property
    def block_types(self) -> tuple[planner.BlockType, ...]:
        return tuple(block_type for group in self.groups for block_type in group.block_types)

    @property
    def peak(self) -> int:
        """Predicted peak bytes."""
        return max(group.solution.peak for group in self.groups)

    @property
    def held(self) -> int:
        """Bytes held between forward and backward by the live set that holds the most."""
        return max(group.held for group in self.groups)

    @property
    def added_seconds(self) -> float:
        """What the policies add to one forward and backward of the slowest live set."""
        return max(group.added_seconds for group in self.groups)

    @property
    def solve_seconds(self) -> float:
        return sum(group.solution.solve_seconds for group in self.groups)

    @property
    def proven_optimal(self) -> bool:
        return all(group.solution.proven_optimal for group in self.groups)


def solve(
    request: PlanRequest,
    budget: int,
    config: AdaccConfig,
    in_force: Mapping[str, Policies],
    forgiven: tuple[type[Exception], ...],
) -> tuple[Group, ...]:
    """Choose policies for all block types, group by group. The budget is in bytes.

    Policies `in_force` stay where new ones would save less time than measured seconds scatter; () stands for policies
    that may not run any more. Raises planner.InfeasibleBudget with a budget that all groups would fit, and
    planner.NoSolutionInTime.

    An error among the `forgiven` is not raised. The group then keeps its policies in force; a block type without any,
    or whose policies need a codec that is no longer on offer, is recomputed. If that breaks the budget for a group of
    which no block type is new, as may happen after a correction or when the bound on the gradient error rules policies
    out, it takes the policies of the smallest peak, unless these break the budget for more live sets.
    """
    groups: list[Group] = []
    refusals: list[planner.InfeasibleBudget] = []
    for names in components(request.live_sets):
        problem, live_sets = request.problem(names), tuple(s for s in request.live_sets if s <= names)
        is_known = {each.name for each in problem.block_types} <= in_force.keys()
        try:
            new = solve_live_sets(problem, live_sets, budget, config)
            group = Group(problem, live_sets, _keep_or_replace(problem, live_sets, in_force, budget, new))
        except planner.InfeasibleBudget as error:
            refusals.append(error)
            group = Group(problem, live_sets, _keep_or_recompute(problem, live_sets, in_force), str(error))
            if planner.InfeasibleBudget in forgiven and is_known:
                group = _with_least(group, error.smallest, budget, config)
        except planner.NoSolutionInTime as error:
            if planner.NoSolutionInTime not in forgiven:
                raise
            reason = f"adacc.solver.max_seconds: {error}"
            group = Group(problem, live_sets, _keep_or_recompute(problem, live_sets, in_force), reason)
            if is_known and group.unfit(budget):
                group = _with_least_peak(group, budget, config)
        groups.append(group)
    if refusals and planner.InfeasibleBudget not in forgiven:
        worst = max(refusals, key=lambda error: error.smallest)
        hint = "" if request.max_gradient_error is None else _hint(request, budget, config)
        raise planner.InfeasibleBudget(worst.budget, worst.smallest, worst.proven, hint)
    return tuple(groups)


def _hint(request: PlanRequest, budget: int, config: AdaccConfig) -> str:
    """What else than a larger budget would do: a looser bound on the gradient error."""
    smallest = smallest_bound(request, budget, config.solver.max_seconds)
    if smallest is None:
        return ""
    of_section = smallest * config.max_gradient_error / request.max_gradient_error
    return (
        f" with adacc.max_gradient_error = {config.max_gradient_error:g}; for this budget, the smallest "
        f"max_gradient_error is about {of_section:.2g}"
    )


def smallest_bound(request: PlanRequest, budget: int, seconds: float) -> float | None:
    """About the smallest bound on the gradient error with which all live sets fit the budget (bytes).

    None if the budget is too small without a bound as well. Each of about ten searches gets a quarter of the `seconds`.
    """

    def fits(bound: float | None) -> bool:
        loosened = replace(request, max_gradient_error=bound)
        try:
            for names in request.live_sets:
                planner.solve_in_process(loosened.problem(names), budget, max_seconds=seconds / 4)
        except (planner.InfeasibleBudget, planner.NoSolutionInTime):
            return False
        return True

    assert request.max_gradient_error is not None
    low, high = request.max_gradient_error, 2 * request.max_gradient_error
    if not fits(None):
        return None
    while not fits(high):
        low, high = high, 4 * high
    while high > 1.1 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def compare(groups: Sequence[Group], budget: int) -> tuple[Baseline, ...]:
    """What simpler planners would have cost under the same budget."""
    planners = {
        "retain all": planner.retain_all,
        "recompute all": planner.recompute_all,
        "compress all": planner.compress_all,
        "greedy": planner.greedy,
    }
    return tuple(_baseline(name, plan, groups, budget) for name, plan in planners.items())


def most_without(request: PlanRequest) -> int:
    """Peak bytes without checkpointing, of the live set that takes the most."""
    return max(peak_when(planner.retain_policy, request.problem(names)) for names in request.live_sets)


def peak_when(plan: Callable[[planner.Profile], planner.Policy], problem: planner.Problem) -> int:
    """Peak bytes if every block's policy is what `plan` makes of its profile."""
    policies = [plan(block_type.profile) for block_type in problem.block_types]
    return planner.evaluate_uniform(problem, policies).peak


def components(live_sets: Iterable[Collection[str]]) -> list[LiveSet]:
    """The names of the block types that hang together, because their live sets overlap; sorted."""
    found: list[LiveSet] = []
    for names in live_sets:
        overlapping = [known for known in found if known & set(names)]
        found = [known for known in found if known not in overlapping] + [frozenset(names).union(*overlapping)]
    return sorted(found, key=sorted)


def largest(live_sets: Iterable[LiveSet]) -> tuple[LiveSet, ...]:
    """The live sets that are part of no other, sorted."""
    distinct = set(live_sets) - {frozenset()}
    return tuple(sorted((s for s in distinct if not any(s < other for other in distinct)), key=sorted))


def _keep_or_replace(
    problem: planner.Problem,
    live_sets: Sequence[LiveSet],
    in_force: Mapping[str, Policies],
    budget: int,
    new: planner.Solution,
) -> planner.Solution:
    """The new solution, or the policies in force if they still fit and the new ones save no time worth a change."""
    if not _are_possible(in_force, problem):
        return new
    policies = [in_force[block_type.name] for block_type in problem.block_types]
    old = judge(problem, live_sets, policies)
    old = replace(old, solve_seconds=new.solve_seconds, proven_optimal=new.proven_optimal)
    noise = max(block_type.profile.noise for block_type in problem.block_types) * old.added_seconds
    return old if old.peak <= budget and old.added_seconds - new.added_seconds <= noise else new


def _keep_or_recompute(
    problem: planner.Problem, live_sets: Sequence[LiveSet], in_force: Mapping[str, Policies]
) -> planner.Solution:
    """The policies in force; a block type that has none, or none that is still possible, is recomputed."""
    policies = [
        in_force[block_type.name]
        if _is_possible(in_force.get(block_type.name, ()), block_type)
        else (planner.recompute_policy(block_type.profile),) * block_type.blocks
        for block_type in problem.block_types
    ]
    return judge(problem, live_sets, policies)


def _with_least(group: Group, smallest: int, budget: int, config: AdaccConfig) -> Group:
    """The group with policies that fit `smallest` bytes, if they take less and break the budget for no more live sets.

    `smallest` may be more than the least possible, and a search for it may end without any policies: the group is then
    left as it is.
    """
    try:
        least = replace(group, solution=solve_live_sets(group.problem, group.live_sets, smallest, config))
    except (planner.InfeasibleBudget, planner.NoSolutionInTime):
        return group
    return _leaner(least, group, budget)


def _with_least_peak(group: Group, budget: int, config: AdaccConfig) -> Group:
    """The group with the policies of the smallest peak found in time, one for each block type, if they take less."""
    least = planner.least_peak_in_process(group.problem, max_seconds=config.solver.max_seconds)
    solution = judge(group.problem, group.live_sets, least.policies)
    solution = replace(solution, solve_seconds=least.solve_seconds)
    return _leaner(replace(group, solution=solution), group, budget)


def _leaner(new: Group, old: Group, budget: int) -> Group:
    """The new group, unless it takes no less than the old one, or breaks the budget for other live sets."""
    is_worse = not set(new.unfit(budget)) <= set(old.unfit(budget)) or new.solution.peak >= old.solution.peak
    return old if is_worse else new


def _are_possible(policies: Mapping[str, Policies], problem: planner.Problem) -> bool:
    return all(_is_possible(policies.get(block_type.name, ()), block_type) for block_type in problem.block_types)


def _is_possible(policies: Policies, block_type: planner.BlockType) -> bool:
    """Whether there is a policy for each block, with codecs that are still on offer."""
    are_on_offer = (policy.is_on_offer(block_type.profile) for policy in set(policies))
    return len(policies) == block_type.blocks and all(are_on_offer)


def _baseline(name: str, plan: Callable[..., planner.Solution], groups: Sequence[Group], budget: int) -> Baseline:
    solutions = [stricter(lambda one: _would_be(plan, one, budget), group.problem, group.live_sets) for group in groups]
    peak = max(solution.peak for solution in solutions)
    seconds = max(slowest(g.problem, g.live_sets, solution) for g, solution in zip(groups, solutions, strict=True))
    return Baseline(name, peak, seconds, peak <= budget)


def _would_be(plan: Callable[..., planner.Solution], problem: planner.Problem, budget: int) -> planner.Solution:
    """The planner's solution; the one that it refuses, if the budget is too small for it."""
    try:
        return plan(problem, budget, max_seconds=_BASELINE_SECONDS)
    except planner.InfeasibleBudget as error:
        return plan(problem, error.smallest, max_seconds=_BASELINE_SECONDS)
