"""Train LLaMA blocks on batches of varying lengths: plain, with gradient checkpointing, and with ds_adacc.

    python benchmarks/lengths.py --out FOLDER

Every step runs the same batch three times, one after the other, in one process of one thread: plainly, under
torch.utils.checkpoint (every block), and under ds_adacc. What counts is the process's CPU time, without that of the
solver, which has a process of its own. So the ratios hold on a busy machine. Lossless codecs; every gradient of
ds_adacc is compared with the plain one, bit for bit. The lengths are drawn from a few or many, 64 to 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime

WIDTH, HEADS, LAYERS, BATCH = 256, 4, 6, 4
SHORTEST, LONGEST = 64, 512
FIRST = 60  # steps of a fine-tuning run in which its user decides whether to stay


class Block(nn.Module):
    """RMSNorm, attention with rotary positions, SwiGLU."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@dataclass(frozen=True)
class Row:
    """CPU seconds over those of plain steps: of the first 60 steps together, and the median of steps of two kinds.

    `new_length`: the median of the steps whose length was met for the first time, after the first three lengths.
    `known_length`: that of all later steps. `recordings`: of blocks. `is_exact`: all gradients have the bits of plain
    steps.
    """

    lengths: int
    steps: int
    first_60: float
    first_60_checkpointing: float
    new_length: float | None
    known_length: float | None
    checkpointing: float
    recordings: int
    plans: int
    is_exact: bool


class Training:
    """One stack of blocks, and how a step of it runs in each way."""

    def __init__(self, budget: float) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        config = load({"adacc": {"memory_budget": budget, "codecs": "none"}})
        self.runtime = Runtime(config, stepped=True)
        self.adacc = Adacc(config, self.runtime)

    def step(self, length: int, call: Callable[..., Tensor], after: Callable[[], None]) -> tuple[float, list[Tensor]]:
        """CPU seconds of a forward, a backward and what comes `after` it; and the gradients."""
        data = torch.Generator().manual_seed(length)
        x = torch.randn(BATCH, length, WIDTH, generator=data).requires_grad_()
        angles = torch.rand(length, WIDTH // HEADS, generator=data)
        cos, sin = angles.cos(), angles.sin()
        self.blocks.zero_grad()
        began = time.process_time()
        hidden = x * 1.0
        for block in self.blocks:
            hidden = call(block, hidden, cos, sin)
        hidden.square().mean().backward()
        after()
        return time.process_time() - began, [p.grad for p in self.blocks.parameters()]


def measure(count: int, steps: int, budget: float) -> Row:
    """A run over so many lengths."""
    lot = random.Random(count)
    lengths = lot.sample(range(SHORTEST, LONGEST + 1), count)
    training = Training(budget)
    plain, checkpointed, ours, first_met = [], [], [], []
    met: set[int] = set()
    plans, is_exact = set(), True
    training.step(LONGEST, lambda block, *args: block(*args), lambda: None)  # warms the libraries up
    for _ in range(steps):
        length = lot.choice(lengths)
        first_met.append(length not in met)
        met.add(length)
        seconds, exact = training.step(length, lambda block, *args: block(*args), lambda: None)
        plain.append(seconds)
        seconds, _ = training.step(length, lambda block, *args: checkpoint(block, *args, use_reentrant=False), nothing)
        checkpointed.append(seconds)
        seconds, found = training.step(length, training.runtime.checkpoint, training.adacc.end_step)
        ours.append(seconds)
        plans.add(id(training.runtime.controller.plan))
        is_exact &= all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))
    new = [o / p for o, p, n in list(zip(ours, plain, first_met, strict=True))[3:] if n]
    known = [o / p for o, p, n in zip(ours, plain, first_met, strict=True) if not n]
    return Row(
        lengths=count,
        steps=steps,
        first_60=sum(ours[:FIRST]) / sum(plain[:FIRST]),
        first_60_checkpointing=sum(checkpointed[:FIRST]) / sum(plain[:FIRST]),
        new_length=statistics.median(new) if new else None,
        known_length=statistics.median(known) if known else None,
        checkpointing=statistics.median(c / p for c, p in zip(checkpointed, plain, strict=True)),
        recordings=training.runtime.recordings,
        plans=len(plans),
        is_exact=is_exact,
    )


def nothing() -> None:
    pass


def table(rows: list[Row]) -> str:
    """The rows for people."""
    names = ["lengths", "steps", "first 60 steps", "checkpointing"]
    names += ["new length", "known length", "checkpointing", "recorded", "plans", "exact"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        ratios = [row.first_60, row.first_60_checkpointing, row.new_length, row.known_length, row.checkpointing]
        cells = [row.lengths, row.steps, *("-" if r is None else f"{r:.2f}" for r in ratios)]
        cells += [row.recordings, row.plans, "yes" if row.is_exact else "no"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for lengths.md and lengths.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 10, 30, 200])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--budget", type=float, default=0.5, help="of the largest peak without checkpointing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ds_adacc").setLevel(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, one thread",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "budget": args.budget,
    }
    rows: list[Row] = []
    for count in args.lengths:
        rows.append(measure(count, args.steps, args.budget))
        (args.out / "lengths.json").write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=2) + "\n")
        told = "\n".join(f"- {key}: {value}" for key, value in about.items())
        (args.out / "lengths.md").write_text(f"{table(rows)}\n\n{told}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
