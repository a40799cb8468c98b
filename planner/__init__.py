"""Retain, compress, recompute or offload: the choice for each saved value of each block that costs the least time.

Plain numbers in, plain numbers out; needs python-mip, knows neither torch nor the codecs themselves.
"""

from ds_adacc.planner.baselines import (
    compress_all,
    compress_policy,
    recompute_all,
    recompute_policy,
    retain_all,
    retain_policy,
)
from ds_adacc.planner.frontier import Point, frontier
from ds_adacc.planner.graph import BlockGraph, Event, Op, Value
from ds_adacc.planner.greedy import greedy
from ds_adacc.planner.peak import Policies, added_seconds, held_bytes, peak_bytes
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import OFFLOAD, RETAIN, BlockType, CodecCost, Profile
from ds_adacc.planner.simulate import Simulation, chosen_codecs, simulate
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    evaluate_per_block,
    evaluate_uniform,
    gradient_error,
    human_bytes,
)
from ds_adacc.planner.solve_per_block import solve_per_block
from ds_adacc.planner.solve_uniform import least_peak, smallest_peak, solve_uniform
from ds_adacc.planner.solver_process import least_peak_in_process, solve_in_process

__all__ = [
    "OFFLOAD",
    "RETAIN",
    "BlockGraph",
    "BlockType",
    "CodecCost",
    "Event",
    "InfeasibleBudget",
    "NoSolutionInTime",
    "Op",
    "Point",
    "Policies",
    "Policy",
    "Problem",
    "Profile",
    "Simulation",
    "Solution",
    "Value",
    "added_seconds",
    "chosen_codecs",
    "compress_all",
    "compress_policy",
    "evaluate_per_block",
    "evaluate_uniform",
    "frontier",
    "gradient_error",
    "greedy",
    "held_bytes",
    "human_bytes",
    "least_peak",
    "least_peak_in_process",
    "peak_bytes",
    "recompute_all",
    "recompute_policy",
    "retain_all",
    "retain_policy",
    "simulate",
    "smallest_peak",
    "solve_in_process",
    "solve_per_block",
    "solve_uniform",
]
