"""The error of a budget that no plan fits, in the user's words: what to set, and which values hold the budget up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.config import MemoryBudget
from ds_adacc.log import named
from ds_adacc.plan.budget import budget_bytes
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.program.recording import RecordedValue, Recording

_MOST_VALUES = 3
_FEW_OPERATORS = 3
_FRACTION_DIGITS = 4


class BudgetTooSmall(planner.InfeasibleBudget):
    """No plan fits `adacc.memory_budget`. `text` says which budget would do, and what takes the memory."""

    def __init__(self, refusal: planner.InfeasibleBudget, text: str) -> None:
        super().__init__(refusal.budget, refusal.smallest, refusal.proven, refusal.hint)
        self.args = (text,)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        plain = planner.InfeasibleBudget(self.budget, self.smallest, self.proven, self.hint)
        return type(self), (plain, str(self))


def explained(
    refusal: planner.InfeasibleBudget,
    asked: str,
    request: PlanRequest,
    without: int,
    recordings: Mapping[str, Recording],
) -> BudgetTooSmall:
    """The refusal with all that the user needs. `asked`: as of `Budget`. `without`: peak bytes without checkpointing.

    `recordings` are by block type; those of other ranks' block types are not known here.
    """
    problems = [request.problem(names) for names in request.live_sets]
    words = "smallest budget that fits" if refusal.proven else "smallest budget found to fit"
    if any(map(_awaits_trial, problems)):
        words += ", if its lossy choices keep adacc.max_gradient_error when they are tried,"
    lines = [
        f"{asked}: this is too small for the blocks' activations, which take {planner.human_bytes(without)} without "
        "checkpointing.",
        f"The {words} is {planner.human_bytes(refusal.smallest)}: {as_key(refusal.smallest, without)}{refusal.hint}.",
        "These are for the batches of this step. A smaller micro-batch needs less. Larger batches need more: a "
        "fraction grows with them, but longer inputs may need a larger fraction too.",
    ]
    solutions = [planner.leanest(problem) for problem in problems]
    problem, solution = max(zip(problems, solutions, strict=True), key=lambda pair: pair[1].peak)
    cached = planner.cached_bytes(problem, solution.policies) if _falls_in_forward(problem, solution) else 0
    in_one_block = solution.peak - sum(solution.held) - cached
    if all(_runs_little(block_type, recordings) for block_type in problem.block_types):
        lines.append(
            f"No block runs more than {_FEW_OPERATORS} operators, so hardly anything can be recomputed within one: "
            "larger blocks (adacc.blocks), such as whole layers, take less."
        )
    elif 2 * in_one_block > solution.peak:
        lines.append(
            f"About {planner.human_bytes(in_one_block)} are taken only while the backward of a single block runs; "
            "smaller blocks (adacc.blocks) take less."
        )
    if cached:
        lines.append(
            f"About {planner.human_bytes(cached)} of it are casts of weights that torch.autocast keeps until its "
            "context ends. With cache_enabled=False it keeps none."
        )
    largest = _held_up_by(problem, solution, recordings)
    if largest:
        lines.append(f"The largest tensors that even a lean plan holds, over all blocks: {'; '.join(largest)}.")
    about: dict[str, dict[str, None]] = {}  # by reason, the names of the blocks, each once
    for recording in (recordings[each.name] for each in problem.block_types if each.name in recordings):
        about.setdefault(". ".join(recording.remarks_on_replays), {})[recording.name] = None
    lines += [f"Why no more of {named([*names])} is recomputed: {reason}." for reason, names in about.items() if reason]
    return BudgetTooSmall(refusal, "\n  ".join(lines))


def as_key(nbytes: int, without: int) -> str:
    """How the section says so many bytes. `without`: the peak without checkpointing."""
    of = fraction(nbytes, without)
    return f'"memory_budget": {nbytes} or, as a fraction of the peak without checkpointing, "memory_budget": {of}'


def fraction(nbytes: int, without: int) -> str:
    """The `memory_budget` that allows so many bytes, as a fraction of `without`, the peak without checkpointing."""
    parts = -(-nbytes * 10**_FRACTION_DIGITS // without)
    of = MemoryBudget("fraction", parts / 10**_FRACTION_DIGITS)
    if budget_bytes(of, without, 0) < nbytes:  # by one byte, for what a floating-point number loses
        of = MemoryBudget("fraction", (parts + 1) / 10**_FRACTION_DIGITS)
    return "1.0" if of.amount == 1 else f"{of.amount:g}"  # 1 reads like a byte


def _awaits_trial(problem: planner.Problem) -> bool:
    """Whether a plan may choose a lossy codec, of whose error an estimate is all that is known before its trial."""
    costs = (cost for block_type in problem.block_types for offers in block_type.profile.codecs for cost in offers)
    return problem.max_gradient_error is not None and not all(cost.lossless for cost in costs)


def _runs_little(block_type: planner.BlockType, recordings: Mapping[str, Recording]) -> bool:
    """Whether the block runs a few operators only. One operator may be a compiled graph, or the whole block."""
    recording = recordings.get(block_type.name)
    hides_more = recording is not None and (recording.is_whole or bool(recording.graphs))
    return len(block_type.profile.graph.ops) <= _FEW_OPERATORS and not hides_more


def _falls_in_forward(problem: planner.Problem, solution: planner.Solution) -> bool:
    """Whether forward has the peak, and what caches hold then is a part of it."""
    uncached = tuple(
        replace(block_type, profile=replace(block_type.profile, graph=block_type.profile.graph.uncached))
        for block_type in problem.block_types
    )
    return planner.peak_bytes(replace(problem, block_types=uncached), solution.policies) < solution.peak


def _held_up_by(problem: planner.Problem, solution: planner.Solution, recordings: Mapping[str, Recording]) -> list[str]:
    """The values that take the most bytes between forward and backward even in `solution`, of about the least peak."""
    sizes: list[tuple[int, str]] = []
    for block_type, policies in zip(problem.block_types, solution.policies, strict=True):
        if block_type.name in recordings:
            recording = recordings[block_type.name]
            for value in recording.values:
                held = sum(policy.stored_bytes(block_type.profile, value.index) for policy in policies)
                sizes.append((held * block_type.calls_per_block, f"{_named(value)} of {recording.name}"))
    sizes.sort(reverse=True)
    return [f"{name}, {planner.human_bytes(nbytes)}" for nbytes, name in sizes[:_MOST_VALUES] if nbytes]


def _named(value: RecordedValue) -> str:
    return f"dropout mask {value.label!r}" if value.role == "dropout_mask" else f"{value.label!r}"
