"""Time, peak memory and gradient error of every strategy on one GPT, beside no checkpointing and DeepSpeed's own.

    python benchmarks/strategies.py --out benchmarks/results

Time: the strategies take turns in one process, each beside no checkpointing, two steps at a time, of which the second
counts: the first leaves the allocator as this strategy leaves it. A strategy's figure is the median of the pairwise
ratios. Memory: a process for each strategy; peak resident memory (CUDA: the allocator's) above the level before
training. A step is forward, loss and backward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from memory import PeakMemory  # noqa: E402
from train import GPT, device_name, read_texts  # noqa: E402

from ds_adacc import planner  # noqa: E402
from ds_adacc.config import load  # noqa: E402
from ds_adacc.runtime.runtime import Runtime  # noqa: E402

BUDGETS = ("0.66", "0.4", "0.28", "0.25", "smallest")


def strategies():
    """Names of all strategies; an adacc one is "adacc CODECS BUDGET"."""
    return ["none", "deepspeed", *(f"adacc {codecs} {b}" for codecs in ("paper", "none") for b in BUDGETS)]


class Strategy:
    """One way to run the model's blocks, with a training step to time."""

    def __init__(self, name, model, data):
        self.name, self.model, self.data = name, model, data
        self.runtime = None
        self.checkpoint = None
        if name == "deepspeed":
            self.checkpoint = deepspeed_checkpoint(len(model.blocks))
        elif name != "none":
            _, codecs, budget = name.split()
            self.runtime = self.planned(codecs, budget)
            self.checkpoint = self.runtime.checkpoint

    def planned(self, codecs, budget):
        """A runtime under the budget; "smallest" is what the planner says of a budget that cannot be met."""
        wanted = 1 << 20 if budget == "smallest" else float(budget)
        section = {"memory_budget": wanted, "codecs": codecs, "solver": {"max_seconds": 10.0}}
        runtime = Runtime(load({"adacc": section}))
        self.checkpoint = runtime.checkpoint
        started = time.perf_counter()
        try:
            self.step()
            self.recording_seconds = time.perf_counter() - started
            self.settle()
        except planner.InfeasibleBudget as error:
            if budget != "smallest":
                raise
            runtime = Runtime(load({"adacc": {**section, "memory_budget": error.smallest}}))
            self.checkpoint = runtime.checkpoint
            self.settle()
        return runtime

    def settle(self):
        """Steps enough for the plan to be observed, and made anew by a corrected model."""
        for _ in range(6):
            self.step()

    def step(self):
        self.model.checkpoint = self.checkpoint
        self.model.zero_grad(set_to_none=False)
        loss = self.model(*self.data)
        loss.backward()
        return loss

    def gradient(self):
        self.step()
        return torch.cat([p.grad.flatten().double() for p in self.model.parameters()])


def deepspeed_checkpoint(layers):
    import deepspeed

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.checkpointing.configure(None, num_checkpoints=layers)
    return deepspeed.checkpointing.checkpoint


def build(args):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    text, _ = read_texts(None)
    starts = torch.randint(len(text) - args.context, (args.batch,))
    windows = torch.stack([text[s : s + args.context + 1] for s in starts]).to(device, torch.long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, (windows[:, :-1], windows[:, 1:]), device


def seconds(strategy, device):
    strategy.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    strategy.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure_times(args):
    """Per strategy the median ratio to "none" over the rounds, gradient error, and its plan in words."""
    model, data, device = build(args)
    rows, todo = {}, []
    for name in strategies():
        try:
            todo.append(Strategy(name, model, data))
        except planner.InfeasibleBudget as error:
            rows[name] = {"infeasible": str(error)}
    exact = todo[0].gradient()
    for strategy in todo:
        rows[strategy.name] = {"gradient_error": float((strategy.gradient() - exact).norm() / exact.norm())}
    pairs = {strategy.name: [] for strategy in todo}
    for _ in range(args.rounds):
        for strategy in todo:
            base = seconds(todo[0], device)
            pairs[strategy.name].append((seconds(strategy, device), base))
    for strategy in todo:
        took = pairs[strategy.name]
        ratios = sorted(mine / base for mine, base in took)
        rows[strategy.name] |= {
            "time": statistics.median(ratios),
            "time_range": (ratios[0], ratios[-1]),
            "seconds": statistics.median(mine for mine, _ in took),
        }
        if strategy.runtime is not None:
            plan = strategy.runtime.controller.plan
            rows[strategy.name] |= {
                "planned_peak": plan.peak / plan.without,
                "planned_peak_bytes": plan.peak,
                "solve_seconds": plan.solve_seconds,
                "recording_seconds": strategy.recording_seconds,
                "plan": strategy.runtime.controller.describe(),
            }
    return rows, device


def measure_memory(args, name):
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


def child_memory(args, name):
    # Large blocks are then mapped and unmapped one by one, and resident memory is what is in use.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    result = subprocess.run(command, env=environment | settings, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr[-2000:])
    return int(result.stdout.split()[-1])


def table(rows):
    lines = ["| strategy | time | (range) | peak | planned peak | gradient error |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if "infeasible" in row:
            lines.append(f"| {name} | infeasible | | | | |")
            continue
        planned = f"{row['planned_peak']:.2f}" if "planned_peak" in row else ""
        low, high = row["time_range"]
        holders = (
            f"{row['time']:.2f} | {low:.2f}-{high:.2f} | {row['peak']:.2f} | {planned} | {row['gradient_error']:.3f}"
        )
        lines.append(f"| {name} | {holders} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("layers", 6), ("width", 512), ("heads", 8), ("context", 512), ("batch", 4), ("rounds", 9)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure_memory(args, args.memory_of))
        return
    rows, device = measure_times(args)
    print(json.dumps({name: {k: v for k, v in row.items() if k != "plan"} for name, row in rows.items()}), flush=True)
    for name, row in rows.items():
        if "infeasible" not in row:
            row["peak_bytes"] = child_memory(args, name)
            row["peak"] = row["peak_bytes"] / rows["none"]["peak_bytes"]
    print(table(rows))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        about = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "device": device_name(device),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        name = f"strategies-{device.type}"
        (args.out / f"{name}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(f"{about['device']}, {about['date']}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
