"""The peak of each of the first steps under ds_adacc, beside that of full checkpointing.

    python benchmarks/first_steps.py --out benchmarks/results

The first steps record, measure, and put lossy policies on trial. Whoever chose the largest batch with which full
checkpointing fits must not run out of memory in them. Each model trains in two processes of its own: first with
torch.utils.checkpoint around every block, then with ds_adacc, whose budget is the peak of the first process. Memory is
resident memory above the level before the step; freed memory is given back at once. Gradients exist before the first
step, and the libraries were warmed up by a small model of the same kind. Results of other models stay in the files.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import train
import varying
from markdown_table import markdown_table
from memory import PeakMemory
from origin import origin
from processes import EXACT_MALLOC, alone

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime

STEPS = 5
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batches."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int


@dataclass(frozen=True)
class Row:
    """A model's peaks in bytes. `checkpointed`: with full checkpointing; `ours`: of each step, with its purpose.

    `about`: where the figures come from.
    """

    model: str
    size: Size
    codecs: str
    checkpointed: int
    ours: Sequence[tuple[str, int]]
    about: Mapping[str, str]


def gpt(size: Size) -> nn.Module:
    return train.Block(size.width, size.heads, 0.0)


def llama(size: Size) -> nn.Module:
    return varying.LlamaBlock(size.width, size.heads)


def bert(size: Size) -> nn.Module:
    """Normalised after each half; dropout 0.1 on attention's probabilities, both halves and within the MLP."""
    return nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, 0.1, "gelu", batch_first=True)


MODELS = {
    "gpt": (gpt, Size(layers=12, width=512, heads=8, batch=16, context=512)),
    "llama": (llama, Size(layers=12, width=256, heads=8, batch=16, context=256)),
    "bert": (bert, Size(layers=12, width=256, heads=8, batch=16, context=256)),
}


class Training:
    """A stack of blocks, whose steps all take the same batch."""

    def __init__(self, model: str, size: Size) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MODELS[model][0](size) for _ in range(size.layers))
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.x, self.weight = torch.randn(2, size.batch, size.context, size.width)
        self.rest = ()
        if model == "llama":
            angles = torch.rand(size.context, size.width // size.heads)
            self.rest = angles.cos(), angles.sin()

    def step(self, call: Call) -> None:
        self.blocks.zero_grad(set_to_none=False)
        hidden = self.x.clone().requires_grad_()
        for block in self.blocks:
            hidden = call(block, hidden, *self.rest)
        loss = (hidden * self.weight).mean()
        del hidden  # the output of the last block is not the blocks' to hold
        loss.backward()

    def checkpointed(self) -> int:
        """The peak of a step with full checkpointing, in bytes."""
        return self._peak(partial(checkpoint, use_reentrant=False))

    def ours(self, codecs: str, budget: float, steps: int) -> list[tuple[str, int]]:
        """The purposes and the peaks, in bytes, of steps under ds_adacc."""
        section = {"memory_budget": budget, "codecs": codecs, "solver": {"max_seconds": 30.0}}
        runtime = Runtime(load({"adacc": section}), has_engine=True)
        adacc, found = Adacc(runtime), []
        for _ in range(steps):
            purpose = runtime.controller.step.purpose.value
            found.append((purpose, self._peak(runtime.checkpoint)))
            adacc.end_step()
        return found

    def _peak(self, call: Call) -> int:
        memory = PeakMemory(torch.device("cpu"))
        memory.start()
        self.step(call)
        return memory.peak_bytes()


def measure(model: str, codecs: str, budget: int) -> list[tuple[str, int]]:
    """In a process of its own: the peaks of the first steps, under ds_adacc if there is a budget."""
    warm = Training(model, Size(layers=2, width=64, heads=2, batch=2, context=32))
    training = Training(model, MODELS[model][1])
    if not budget:
        warm.checkpointed()
        return [("checkpointed", training.checkpointed())]
    warm.ours(codecs, 0.5, STEPS)
    return training.ours(codecs, budget, STEPS)


def in_a_process(model: str, codecs: str, budget: int) -> list[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "part.json"
        part = ["--part", model, "--codecs", codecs, "--budget", str(budget), "--result", str(result)]
        return [(purpose, nbytes) for purpose, nbytes in alone(__file__, part, EXACT_MALLOC, result)]


def table(rows: Iterable[Row]) -> str:
    """The rows for people."""
    header = ["model", "size", "codecs", "checkpointing, MiB", *(f"step {number}" for number in range(1, STEPS + 1))]
    lines = []
    for row in rows:
        size = f"{row.size.layers} x {row.size.width}, {row.size.batch} x {row.size.context}"
        steps = (f"{nbytes / row.checkpointed:.2f} {purpose}" for purpose, nbytes in row.ours)
        lines.append([row.model, size, row.codecs, f"{row.checkpointed / 2**20:.0f}", *steps])
    return markdown_table(header, lines)


def read(path: Path) -> dict[str, Row]:
    """The rows of a file of results, by model."""
    found = json.loads(path.read_text()) if path.exists() else []
    return {row["model"]: Row(**row | {"size": Size(**row["size"])}) for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--codecs", default="auto")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/first-steps"), help="a folder for first-steps.md and first-steps.json"
    )
    for option, kind in (("part", str), ("budget", int), ("result", Path)):
        parser.add_argument(f"--{option}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("ds_adacc").setLevel(logging.WARNING)
    if args.part:
        args.result.write_text(json.dumps(measure(args.part, args.codecs, args.budget)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = read(args.out / "first-steps.json")
    for model in args.models:
        ((_, full),) = in_a_process(model, args.codecs, 0)
        ours = in_a_process(model, args.codecs, full)
        rows[model] = Row(model, MODELS[model][1], args.codecs, full, ours, origin("CPU, one thread"))
        (args.out / "first-steps.json").write_text(json.dumps([asdict(row) for row in rows.values()], indent=2) + "\n")
        told = "\n".join(f"- {row.model}: {', '.join(row.about.values())}" for row in rows.values())
        (args.out / "first-steps.md").write_text(f"{table(rows.values())}\n\n{told}\n")
    print(table(rows.values()))


if __name__ == "__main__":
    main()
