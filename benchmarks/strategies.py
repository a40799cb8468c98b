"""Time, peak memory and gradient error of every strategy on one GPT, beside no checkpointing and DeepSpeed's own.

    python benchmarks/strategies.py --out benchmarks/results
    python benchmarks/strategies.py --compiled --rounds 11 --out benchmarks/results

`--compiled`: torch.compile compiles each block, in every strategy, "none" too.

Time: the strategies take turns in one process, on one thread, each once in a round, in an order that is drawn anew. A
strategy's figures are the ratios to no checkpointing in the same round: their median, with its 95 % confidence
interval. The planned time is 1 plus what the plan adds, over the median step of no checkpointing. Memory: a process for
each strategy; peak resident memory (CUDA: the allocator's) above the level before training. A step is forward, loss and
backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from memory import PeakMemory
from origin import origin, publish
from processes import EXACT_MALLOC, KEEPING_MALLOC, alone
from timing import Ratio, in_turns, seconds
from train import GPT, read_texts

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.environment import device_name
from ds_adacc.runtime.runtime import Runtime

Batch = tuple[Tensor, Tensor]  # tokens, and the tokens that follow them: (batch, context), int64
CODECS = ("auto", "none")
BUDGETS = ("0.66", "0.4", "0.28", "0.25", "smallest")
COMPILED_BUDGETS = ("0.66", "0.5", "smallest")
SETTLING_STEPS = 6  # enough for a plan to be tried, observed, and made anew by a corrected model


def strategies(compiled: bool) -> list[str]:
    """Names of all strategies; an adacc one is "adacc CODECS BUDGET"."""
    budgets = COMPILED_BUDGETS if compiled else BUDGETS
    return ["none", "deepspeed", *(f"adacc {codecs} {b}" for codecs in CODECS for b in budgets)]


class Strategy:
    """One way to run the model's blocks, with a training step to time."""

    def __init__(self, name: str, model: GPT, data: Batch) -> None:
        self.name, self.model, self.data = name, model, data
        self.runtime: Runtime | None = None
        self.checkpoint: Callable[..., Any] | None = None
        if name == "deepspeed":
            self.checkpoint = deepspeed_checkpoint(len(model.blocks))
        elif name != "none":
            _, codecs, budget = name.split()
            self.runtime = self.planned(codecs, budget)
            self.checkpoint = self.runtime.checkpoint

    def planned(self, codecs: str, budget: str) -> Runtime:
        """A runtime under the budget; "smallest" is what the planner says of a budget that cannot be met."""
        wanted = 1 << 20 if budget == "smallest" else float(budget)
        while True:
            section = {"memory_budget": wanted, "codecs": codecs, "solver": {"max_seconds": 10.0}}
            runtime = Runtime(load({"adacc": section}))
            self.checkpoint = runtime.checkpoint
            try:
                self.settle()
                return runtime
            except planner.InfeasibleBudget as error:
                if budget != "smallest" or wanted >= error.smallest:
                    raise
                wanted = error.smallest

    def settle(self) -> None:
        for _ in range(SETTLING_STEPS):
            self.step()

    def step(self) -> Tensor:
        self.model.checkpoint = self.checkpoint
        self.model.zero_grad(set_to_none=False)
        loss = self.model(*self.data)
        loss.backward()
        return loss

    def gradient(self) -> Tensor:
        self.step()
        return torch.cat([p.grad.flatten().double() for p in self.model.parameters()])


def deepspeed_checkpoint(layers: int) -> Callable[..., Any]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.checkpointing.configure(None, num_checkpoints=layers)
    return deepspeed.checkpointing.checkpoint


def build(args: argparse.Namespace) -> tuple[GPT, Batch, torch.device]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    text, _ = read_texts(None)
    starts = torch.randint(len(text) - args.context, (args.batch,))
    windows = torch.stack([text[s : s + args.context + 1] for s in starts]).to(device, torch.long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if args.compiled:
        for block in model.blocks:
            block.compile()
    return model, (windows[:, :-1], windows[:, 1:]), device


def measure_times(args: argparse.Namespace) -> dict[str, Any]:
    """Per strategy its ratios to "none", its gradient error, and its plan in words."""
    model, data, device = build(args)
    rows, todo = {}, []
    for name in strategies(args.compiled):
        try:
            todo.append(Strategy(name, model, data))
        except planner.InfeasibleBudget as error:
            rows[name] = {"infeasible": str(error)}
    exact = todo[0].gradient()
    for strategy in todo:
        rows[strategy.name] = {"gradient_error": float((strategy.gradient() - exact).norm() / exact.norm())}
    taken = in_turns({strategy.name: partial(seconds, strategy.step, device) for strategy in todo}, args.rounds)
    base = taken[todo[0].name]
    step = statistics.median(each.computing for each in base)
    for strategy in todo:
        mine = taken[strategy.name]
        rows[strategy.name] |= {
            "time": asdict(Ratio.of([s.computing for s in mine], [s.computing for s in base])),
            "wall": asdict(Ratio.of([s.wall for s in mine], [s.wall for s in base])),
            "seconds": [asdict(s) for s in mine],
        }
        if strategy.runtime is not None:
            plan = strategy.runtime.controller.plan
            rows[strategy.name] |= {
                "planned_time": 1 + plan.added_seconds / step,
                "planned_peak": plan.peak / plan.without,
                "planned_peak_bytes": plan.peak,
                "solve_seconds": plan.solve_seconds,
            }
    return {"device": device_name(device), "kind": device.type, "rows": rows}


def measure_memory(args: argparse.Namespace, name: str) -> int:
    """In a process of its own: peak bytes above the level before training."""
    model, data, device = build(args)
    strategy = Strategy(name, model, data)
    for _ in range(2):
        strategy.step()
    memory = PeakMemory(device)
    memory.start()
    for _ in range(4):
        strategy.step()
    return memory.peak_bytes()


def in_a_process(part: str, malloc: Mapping[str, str]) -> Any:
    """What this script measures with `--part`, in a process of its own: on one thread, and with this malloc."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "part.json"
        return alone(__file__, [*sys.argv[1:], "--part", part, "--result", str(result)], malloc, result)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["strategy", "time", "planned time", "wall clock", "peak", "planned peak", "gradient error"]
    lines = []
    for name, row in rows.items():
        if "infeasible" in row:
            lines.append([name, "infeasible", *[""] * 5])
            continue
        time, wall = (Ratio(**row[clock]) if name != "none" else "1" for clock in ("time", "wall"))
        planned_time, planned_peak = (
            f"{row[key]:.2f}" if key in row else "" for key in ("planned_time", "planned_peak")
        )
        lines.append(
            [name, time, planned_time, wall, f"{row['peak']:.2f}", planned_peak, f"{row['gradient_error']:.2g}"]
        )
    return markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("layers", 6), ("width", 512), ("heads", 8), ("context", 512), ("batch", 4))
    for option, default in (*sizes, ("rounds", 21)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        found = measure_times(args) if args.part == "time" else measure_memory(args, args.part)
        args.result.write_text(json.dumps(found))
        return
    found = in_a_process("time", KEEPING_MALLOC)
    rows = found["rows"]
    for name, row in rows.items():
        if "infeasible" not in row:
            row["peak_bytes"] = in_a_process(name, EXACT_MALLOC)
            row["peak"] = row["peak_bytes"] / rows["none"]["peak_bytes"]
    print(table(rows))
    if args.out:
        name = f"strategies-{found['kind']}{'-compiled' if args.compiled else ''}"
        publish(args.out / name, origin(found["device"]), table(rows), rows=rows)


if __name__ == "__main__":
    main()
