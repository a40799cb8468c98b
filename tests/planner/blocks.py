"""Blocks of one or two values, small enough to plan for by hand, and what every solution keeps."""

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    InfeasibleBudget,
    Op,
    Profile,
    Value,
    gradient_error,
    solve_uniform,
)

_MICROSECOND = 1e-6


def packable(name, count, calls_per_block=1, error=0.0):
    """Calls that hold 8 bytes, or for a microsecond 2; then backward needs the 8 besides."""
    graph = BlockGraph((Value("x", "", 8, None, True),), (), (Event("x", (0,), 0),))
    packed = CodecCost("packed", 2, _MICROSECOND, 0.0, 0.0, 0, error)
    return BlockType(name, Profile(graph, (), ((packed,),)), count, calls_per_block)


def replayable(count):
    """Blocks that hold 6 bytes, or for a microsecond 2; 11 are alive in both passes, if replayed 16 in backward."""
    values = (Value("x", "", 2, None, True), Value("y", "", 4, 0, True))
    graph = BlockGraph(values, (Op("op", (0,), (1,), True, 5),), (Event("xy", (0, 1), 5),))
    return BlockType("r", Profile(graph, (_MICROSECOND,), ((), ())), count)


def smallest_budget(problem):
    """The smallest budget that one policy for each block type can keep: what a refusal names, rounded up as it is."""
    try:
        return solve_uniform(problem, 0, max_seconds=60).peak
    except InfeasibleBudget as error:
        return error.smallest


def check_gradient_errors(problem, solution):
    """Each block has a policy, which keeps the bound if there is one."""
    for block_type, chosen in zip(problem.block_types, solution.policies, strict=True):
        assert len(chosen) == block_type.blocks
        if problem.max_gradient_error is not None:
            assert all(gradient_error(block_type.profile, each) <= problem.max_gradient_error for each in set(chosen))
