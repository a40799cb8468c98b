"""Blocks of one block type whose gradient errors differ, as block types of their own for the solver.

Blocks with one program share a profile, but not their data: attention is sharp in a few layers, and there a codec does
more harm than the profile says. The solver sees such blocks as a block type of their own, with larger errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import BlockType
from ds_adacc.planner.solution import Solution, evaluate_per_block


def split(problem: Problem) -> Problem:
    """The problem with a block type for each strictness. `merged` reverses it."""
    if not any(block_type.strictness for block_type in problem.block_types):
        return problem
    block_types, names = [], {}
    for block_type in problem.block_types:
        of_blocks = block_type.strictness or (None,) * block_type.blocks
        kinds = list(dict.fromkeys(of_blocks))
        called = {kind: f"{block_type.name}/{number}" for number, kind in enumerate(kinds)}
        names[block_type.name] = [called[kind] for kind in of_blocks]
        for kind in kinds:
            profile = block_type.profile if kind is None else kind.applied_to(block_type.profile)
            count = block_type.calls_per_block * of_blocks.count(kind)
            block_types.append(BlockType(called[kind], profile, count, block_type.calls_per_block))
    following = {name: iter(each) for name, each in names.items()}
    order = tuple(next(following[name]) for name in problem.order)
    return Problem(tuple(block_types), order, problem.max_gradient_error)


def merged(problem: Problem, solution: Solution) -> Solution:
    """The solution of `split(problem)` as one of `problem`, with the policies in the forward order of the blocks."""
    if not any(block_type.strictness for block_type in problem.block_types):
        return solution
    left = iter(solution.policies)
    policies = [_in_order(block_type, left) for block_type in problem.block_types]
    return replace(
        evaluate_per_block(problem, policies),
        proven_optimal=solution.proven_optimal,
        fallback=solution.fallback,
    )


def _in_order(block_type: BlockType, policies: Iterator[tuple[Policy, ...]]) -> tuple[Policy, ...]:
    of_blocks = block_type.strictness or (None,) * block_type.blocks
    of_kind = {kind: iter(next(policies)) for kind in dict.fromkeys(of_blocks)}
    return tuple(next(of_kind[kind]) for kind in of_blocks)
