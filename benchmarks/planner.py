"""What the planner offers for one GPT, beside simpler planners, and how long it takes.

    python benchmarks/planner.py --out benchmarks/results

With codecs "paper" and "none". Profiles are measured here; what plans cost is the planner's word, which
benchmarks/strategies.py holds against real steps. The frontier is that of one block. Baselines, and the mix (a policy
for each block) beside one policy for all, at budgets that are fractions of the peak without checkpointing: milliseconds
added to a forward and backward of all blocks. The planner's own seconds are the least of three runs for one block
and for frontier and mix of all, and of one run for a made-up chain of 2000 values with four choices each.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from origin import origin, publish
from train import GPT

from ds_adacc import planner
from ds_adacc.cli import plots
from ds_adacc.cli.factory import record
from ds_adacc.config import load
from ds_adacc.environment import device_name
from ds_adacc.plan.comparison import RULES
from ds_adacc.report.decision import named_choices

CODECS = ("paper", "none")
BUDGETS = [round(0.05 * step, 2) for step in range(4, 20)]
Planner = Callable[[planner.Problem, int, float], planner.Solution]
SHOWN = 0.3  # the budget of the table of baselines and of the figures
MIB, VALUES = 1 << 20, 2000  # values of the made-up chain
PLANNERS: dict[str, Planner] = {  # of a problem, a budget in bytes, and seconds for one search
    **{name: lambda problem, *_, rule=rule: planner.everywhere(rule, problem) for name, rule in RULES.items()},
    "greedy": lambda problem, budget, _: planner.greedy(problem, budget),
    "one policy": lambda problem, budget, limit: planner.solve_uniform(problem, budget, max_seconds=limit),
    "mix": lambda problem, budget, limit: planner.solve_per_block(problem, budget, max_seconds=limit),
}


class Example:
    """The GPT on random bytes, as `record` wants it."""

    text = "GPT of examples/train.py"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def make(self, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = GPT(self.args.layers, self.args.width, self.args.heads, self.args.context).to(device)
        tokens = torch.randint(256, (batch, self.args.context + 1), device=device)
        return model, (tokens[:, :-1], tokens[:, 1:]), {}


def chain() -> planner.Problem:
    """Values one after the other, each to be retained, recomputed, or held in one of two codecs."""
    lot = random.Random(0)
    sizes = [lot.choice((1, 2, 4, 8)) * MIB for _ in range(VALUES)]
    values = [planner.Value(f"v{n}", "", size, n - 1 if n else None, True) for n, size in enumerate(sizes)]
    ops = [planner.Op(f"op{n}", (n,), (n + 1,), lot.random() < 0.95) for n in range(VALUES - 1)]
    events = [planner.Event(f"e{n}", (n,), MIB) for n in reversed(range(VALUES))]
    codecs = tuple((cost("int8", size, 2, lot), cost("int4", size, 4, lot)) for size in sizes)
    graph = planner.BlockGraph(tuple(values), tuple(ops), tuple(events))
    profile = planner.Profile(graph, tuple(lot.uniform(1e-4, 3e-3) for _ in ops), codecs)
    return planner.Problem((planner.BlockType("chain", profile, 1),))


def cost(name: str, nbytes: int, ratio: int, lot: random.Random) -> planner.CodecCost:
    """A codec of about 4 GiB a second."""
    took = nbytes / MIB * lot.uniform(1.5e-4, 3.5e-4)
    return planner.CodecCost(name, nbytes // ratio, took, took, 0.1, 0)


def planned(plan: Planner, problem: planner.Problem, budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """The solution as plain numbers; why there is none, if so."""
    began = time.perf_counter()
    try:
        solution = plan(problem, budget, args.max_seconds)
    except planner.InfeasibleBudget as error:
        return {"infeasible": error.smallest}
    except planner.NoSolutionInTime as error:
        return {"out_of_time": str(error)}
    if solution.peak > budget:
        return {"infeasible": solution.peak}
    policies = [list(dict.fromkeys(chosen)) for chosen in solution.policies]
    return {
        "peak": solution.peak,
        "added_seconds": solution.added_seconds,
        "distinct_policies": sum(map(len, policies)),
        "proven_optimal": solution.proven_optimal,
        "solve_seconds": time.perf_counter() - began,
    }


def seconds(work: Callable[[], object], runs: int = 3) -> float:
    """The least of several runs."""
    took = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return min(took)


def compare(problem: planner.Problem, args: argparse.Namespace) -> dict[str, Any]:
    """All that is said of one problem."""
    without = planner.peak_without(problem)
    points = {
        block_type.name: planner.frontier(block_type.profile, max_seconds=args.max_seconds)
        for block_type in problem.block_types
    }
    shown = int(SHOWN * without)
    return {
        "without": without,
        "frontier": {
            block_type.name: [
                {
                    "held": point.simulation.held,
                    "added_seconds": point.simulation.seconds,
                    "choices": named_choices(
                        block_type.profile, point.policy, [v.name for v in block_type.profile.graph.values]
                    ),
                }
                for point in points[block_type.name]
            ]
            for block_type in problem.block_types
        },
        "baselines": {name: planned(plan, problem, shown, args) for name, plan in PLANNERS.items()},
        "budgets": {
            str(budget): {
                name: planned(PLANNERS[name], problem, int(budget * without), args) for name in ("one policy", "mix")
            }
            for budget in BUDGETS
        },
    }


def solve_times(problem: planner.Problem, args: argparse.Namespace) -> dict[str, float]:
    """The planner's own seconds."""
    name = problem.block_types[0].name
    block = planner.Problem((planner.BlockType(name, problem.block_types[0].profile, 1),))
    made_up = chain()
    alone, peak, most = (planner.peak_without(each) for each in (block, problem, made_up))
    limit = {"max_seconds": args.max_seconds}
    return {
        "one block": seconds(lambda: planned(PLANNERS["one policy"], block, int(0.6 * alone), args)),
        "frontier of one block": seconds(lambda: planner.frontier(block.block_types[0].profile, **limit)),
        "frontier and mix of all blocks": seconds(lambda: planned(PLANNERS["mix"], problem, int(SHOWN * peak), args)),
        f"{VALUES} values, four choices": seconds(
            lambda: planned(PLANNERS["one policy"], made_up, most // 2, args), runs=1
        ),
    }


def figures(problem: planner.Problem, args: argparse.Namespace, codecs: str) -> None:
    """The frontier with the baselines, and the bytes through backward, at the budget shown."""
    without = planner.peak_without(problem)
    budget, plans = int(SHOWN * without), {}
    for name, plan in PLANNERS.items():
        with contextlib.suppress(planner.InfeasibleBudget):
            solution = plan(problem, budget, args.max_seconds)
            if name in RULES or solution.peak <= budget:
                plans[name] = solution.policies
    chosen = plans.pop("mix", [()] * len(problem.block_types))
    for place, block_type in enumerate(problem.block_types):
        points = planner.frontier(block_type.profile, max_seconds=args.max_seconds)
        others = {name: policies[place][0] for name, policies in plans.items()}
        plots.save(
            plots.frontier_figure(block_type, points, others, chosen[place]), args.out, f"planner-frontier-{codecs}"
        )
    lines = {"full checkpointing": plans["recompute all"], **({"mix": chosen} if all(chosen) else {})}
    plots.save(plots.timeline_figure(problem, lines, budget), args.out, f"planner-timeline-{codecs}")


def milliseconds(row: Mapping[str, Any]) -> str:
    if "infeasible" in row:
        return f"infeasible (smallest {row['infeasible'] / MIB:.0f} MiB)"
    if "out_of_time" in row:
        return "none in time"
    return f"{1000 * row['added_seconds']:.1f}"


def tables(results: Mapping[str, Mapping[str, Any]], times: Mapping[str, float]) -> str:
    lines = []
    for codecs, row in results.items():
        lines += [f"## codecs {codecs!r}: {row['without'] / MIB:.0f} MiB without checkpointing", ""]
        for name, points in row["frontier"].items():
            found = [(f"{p['held'] / MIB:.2f}", f"{1000 * p['added_seconds']:.3f}") for p in points]
            lines += [f"Frontier of {name}, a call:", "", markdown_table(["held MiB", "added ms"], found)]
        simpler = []
        for name, each in row["baselines"].items():
            simpler.append([name, f"{each['peak'] / MIB:.1f}" if "peak" in each else "", milliseconds(each)])
        lines += ["", f"At a budget of {SHOWN}, all blocks:", ""]
        lines += [markdown_table(["planner", "peak MiB", "added ms"], simpler), ""]
        plans = []
        for budget, both in row["budgets"].items():
            one, mix = both["one policy"], both["mix"]
            plans.append([budget, milliseconds(one), milliseconds(mix), mix.get("distinct_policies", "")])
        header = ["budget", "one policy: added ms", "mix: added ms", "policies in the mix"]
        lines += [markdown_table(header, plans), ""]
    took = [(name, f"{seconds:.3f}") for name, seconds in times.items()]
    return "\n".join([*lines, markdown_table(["what is planned", "seconds"], took)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("layers", 6), ("width", 512), ("heads", 8), ("context", 512), ("batch", 4)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--max-seconds", type=float, default=60.0, help="for one search")
    parser.add_argument("--out", type=Path, help="a folder for the tables, JSON and figures")
    args = parser.parse_args()
    # the solver sets the process's OpenMP threads to one: all is measured before it runs
    found = {c: record(Example(args), load({"adacc": {"codecs": c}}), args.batch) for c in CODECS}
    device = device_name(found["paper"].device)
    results = {codecs: compare(one.problem, args) for codecs, one in found.items()}
    times = solve_times(found["paper"].problem, args)
    print(tables(results, times))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for codecs, one in found.items():
            figures(one.problem, args, codecs)
        text = tables(results, times)
        publish(args.out / "planner", origin(device), text, results=results, solve_seconds=times)


if __name__ == "__main__":
    main()
