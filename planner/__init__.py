"""Chooses for each saved value of each block whether to retain, compress, recompute or offload it.

In comes a `Problem`: the block types that share a budget, each with a `Profile` of measured numbers (the bytes of each
value, the seconds of each operator and codec). A budget in bytes and a limit on the solver's time come with it. Out
comes a `Solution`: a `Policy` for every block, which together keep the peak within the budget and add the least time.
If no policies fit, `InfeasibleBudget` names a budget that would do.

Read the files in this order:

* the question: `graph` (one block: values, operators, steps of backward), `segments` (which operators are replayed
  together), `profile` (what was measured), `units` (of these numbers), `problem`;
* the answer: `policy`, and `solution` with the errors;
* what a policy costs: `simulate` (one call of a block), `peak` (a whole step), `error_estimate` (of a gradient error);
* policies without a solver: `baselines`, `greedy`;
* the mixed-integer program (MILP): `schedule` (what holds whatever the policy), `milp_choices` (choices and replays),
  `milp_memory` (bytes), `milp` (what all searches share, and the call of CBC);
* the planners that search it: `solve_uniform` (one policy for all blocks of a type), `frontier` (the best policies of
  one block), `milp_per_block` and `solve_per_block` (a policy for each block);
* where the solver gives no policies, or not the best: `mix_points` mixes those of the frontiers (`mix_in_order`, where
  the order of the blocks is known), `without_solver` needs nothing of the solver, `least_bytes` is a bound that none
  can go below;
* `solver_process` runs the solver in a child process; `split_by_strictness` shows it blocks with larger errors
  as a type of their own.

The planner needs python-mip and knows neither torch nor what a codec does. *The paper*, in all of its files, is Chen
et al., *Adacc: An Adaptive Framework Unifying Compression and Activation Recomputation for LLM Training*.
"""

try:
    import mip  # noqa: F401
except RuntimeError as error:  # it looks for its settings in the user's home folder
    raise RuntimeError(f"python-mip, the solver, cannot be imported: {error} Set HOME to a folder") from error

from ds_adacc.planner.baselines import (
    Baseline,
    compress_policy,
    everywhere,
    no_checkpointing,
    peak_without,
    recompute_policy,
    retain_policy,
)
from ds_adacc.planner.error_estimate import gradient_error, stale_ops
from ds_adacc.planner.frontier import Point, frontier
from ds_adacc.planner.graph import BlockGraph, Event, Value
from ds_adacc.planner.greedy import greedy, greedy_policies
from ds_adacc.planner.peak import Policies, Simulations, added_seconds, cached_bytes, held_bytes, peak_bytes
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import (
    HOPELESS,
    OFFLOAD,
    RETAIN,
    BlockType,
    CodecCost,
    Profile,
    Strictness,
    combined_offers,
    is_codec,
    is_offloaded,
    nearest_offer,
    on_device,
)
from ds_adacc.planner.segments import Op, Segment, Segments
from ds_adacc.planner.simulate import Simulation, chosen_codecs, simulate
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    evaluate_per_block,
    human_bytes,
)
from ds_adacc.planner.solve_per_block import solve_per_block
from ds_adacc.planner.solve_uniform import solve_uniform
from ds_adacc.planner.solver_process import FAILED, NoAnswer, in_process, least_peak_in_process, solve_in_process
from ds_adacc.planner.without_solver import leanest

__all__ = [
    "FAILED",
    "HOPELESS",
    "OFFLOAD",
    "RETAIN",
    "Baseline",
    "BlockGraph",
    "BlockType",
    "CodecCost",
    "Event",
    "InfeasibleBudget",
    "NoAnswer",
    "NoSolutionInTime",
    "Op",
    "Point",
    "Policies",
    "Policy",
    "Problem",
    "Profile",
    "Segment",
    "Segments",
    "Simulation",
    "Simulations",
    "Solution",
    "Strictness",
    "Value",
    "added_seconds",
    "cached_bytes",
    "chosen_codecs",
    "combined_offers",
    "compress_policy",
    "evaluate_per_block",
    "everywhere",
    "frontier",
    "gradient_error",
    "greedy",
    "greedy_policies",
    "held_bytes",
    "human_bytes",
    "in_process",
    "is_codec",
    "is_offloaded",
    "leanest",
    "least_peak_in_process",
    "nearest_offer",
    "no_checkpointing",
    "on_device",
    "peak_bytes",
    "peak_without",
    "recompute_policy",
    "retain_policy",
    "simulate",
    "solve_in_process",
    "solve_per_block",
    "solve_uniform",
    "stale_ops",
]
