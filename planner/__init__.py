"""Retain, compress or recompute: the choice for each saved value of a block that costs the least time in a budget.

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
from ds_adacc.planner.graph import BlockGraph, Event, Op, Value
from ds_adacc.planner.isolated import solve_isolated
from ds_adacc.planner.milp import smallest_peak, solve
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import RETAIN, CodecCost, Kind, Profile
from ds_adacc.planner.simulate import Simulation, added_seconds, peak_bytes, simulate
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, evaluate, human_bytes

__all__ = [
    "RETAIN",
    "BlockGraph",
    "CodecCost",
    "Event",
    "InfeasibleBudget",
    "Kind",
    "NoSolutionInTime",
    "Op",
    "Policy",
    "Profile",
    "Simulation",
    "Solution",
    "Value",
    "added_seconds",
    "compress_all",
    "compress_policy",
    "evaluate",
    "human_bytes",
    "peak_bytes",
    "recompute_all",
    "recompute_policy",
    "retain_all",
    "retain_policy",
    "simulate",
    "smallest_peak",
    "solve",
    "solve_isolated",
]
