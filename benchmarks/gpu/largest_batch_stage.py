"""Stage `largest_batch`: the largest batch that each strategy trains in the same memory, as in the paper's Table 3.

The paper's GPT-345M in bf16, with its gradients and AdamW, may take LIMIT bytes. That is less than a GPU has: larger
batches would only take longer. What small batches take tells about how many fit; that batch is tried, and those beside
it until one fits and the next does not. There is no engine: after a step that ran out of memory, none would go on.

The first steps of ds_adacc take the memory of full checkpointing. So the largest batch of that is tried first, and none
above it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import stage
import torch
from memory import PeakMemory
from models import SMALL, Size, build, precision, text
from rows import Row, Rows
from strategy import Full, Ours, Selective, Strategy
from timing import seconds
from torch import Tensor
from trainer import release

from ds_adacc import planner

PAPER = Size(layers=24, width=1024, heads=16, length=1024, batch=1)
LIMIT = 10 << 30  # bytes
SMALL_LIMIT = 8 << 20  # of activations, in a rehearsal
MARGIN = 0.03  # of the memory for activations: logits, and what the allocator cannot use
SMALL_MARGIN = 0.4  # small blocks are not much wider than the logits
SMALL_BATCHES = (2, 4)
ATTEMPTS = 4
STEPS = 3
REHEARSED = ("none", "full", "ours lossless")
PATIENCE = 30  # steps until one is steady


class TooLarge(Exception):
    """The batch does not fit; the text says why. `fitting`: the part of it that may fit."""

    def __init__(self, reason: str, fitting: float = 1.0) -> None:
        super().__init__(reason)
        self.fitting = fitting


class Limited:
    """A model with its optimizer. `left`: the bytes that the activations of a step may take; `budget`: the blocks'."""

    def __init__(self, device: torch.device, rehearses: bool) -> None:
        self.size, self.device = SMALL if rehearses else PAPER, device
        self.most = 64 if rehearses else 1 << 10  # sequences
        self.model = build("GPT", self.size, device).to(precision(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.step(Strategy(), text(self.size.with_batch(1), device))  # now all is there that stays
        release(device)
        if rehearses:
            self.left = SMALL_LIMIT
        else:
            self.left = LIMIT - torch.cuda.memory_allocated(device)
            torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.mem_get_info(device)[1], device)
        self.budget = int((1 - (SMALL_MARGIN if rehearses else MARGIN)) * self.left)

    def step(self, strategy: Strategy, data: tuple[Tensor, Tensor]) -> None:
        self.model.checkpoint = strategy.checkpoint
        self.model(*data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients stay: they are no activations
        strategy.end_step()

    def train(self, strategy: Strategy, batch: int) -> Row:
        """Some steps at this batch: peak bytes of the activations, and tokens a second. Raises TooLarge."""
        data = text(self.size.with_batch(batch), self.device)
        memory, taken = PeakMemory(self.device), 0
        try:
            while taken < 2 or not strategy.is_steady:
                if taken > PATIENCE:
                    raise RuntimeError(f"none of {taken} steps only trained; the log tells what they did")
                self.step(strategy, data)
                taken += 1
            memory.start()
            took = [seconds(lambda: self.step(strategy, data), self.device) for _ in range(STEPS)]
        except torch.OutOfMemoryError as error:
            raise TooLarge(str(error).splitlines()[0]) from None
        except planner.InfeasibleBudget as error:
            raise TooLarge(str(error), error.budget / error.smallest) from None
        if (peak := memory.peak_bytes()) > self.left:
            raise TooLarge(f"its peak of {peak} bytes is above {self.left}", self.left / peak)
        tokens = self.size.with_batch(batch).tokens
        return {"tokens_per_second": tokens / statistics.median(each.computing for each in took), "peak_bytes": peak}

    def attempt(self, make: Callable[[], Strategy], batch: int) -> Row | TooLarge:
        """What `train` returns or raises. Nothing of the steps is left in memory, nor are frames that hold it."""
        try:
            return self.train(make(), batch)
        except TooLarge as error:
            return TooLarge(str(error), error.fitting)
        finally:
            self.model.checkpoint = None
            self.optimizer.zero_grad(set_to_none=False)
            release(self.device)


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    def begin() -> Row:
        nonlocal limited
        limited = Limited(device, rehearses)
        return {"left_bytes": limited.left, "tokens": limited.size.tokens}

    limited: Limited | None = None
    if rows.write("begin", begin) is None:
        return
    for name, make in strategies(limited):
        if rehearses and name not in REHEARSED:
            continue
        first = rows.measured.get("full", {}).get("batch") if name.startswith("ours") else None
        rows.measure(name, partial(largest, limited, make, first), name.split()[0])


def strategies(limited: Limited) -> Iterator[tuple[str, Callable[[], Strategy]]]:
    """Names, and how to make them."""
    yield from (("none", Strategy), ("full", Full), ("selective", Selective))
    for words, offload in (("", False), (", offload", True)):
        for name, codecs in (("lossless", "none"), ("default", "auto")):
            section = {"codecs": codecs, "offload": offload, "memory_budget": limited.budget}
            yield f"ours {name}{words}", partial(Ours, section)


def guess_by_peaks(limited: Limited, make: Callable[[], Strategy]) -> int:
    """The largest batch if the peak goes on to grow as it does from one small batch to the next."""
    few, many = (limited.attempt(make, batch) for batch in SMALL_BATCHES)
    if isinstance(few, TooLarge) or isinstance(many, TooLarge):
        return SMALL_BATCHES[0]
    each = (many["peak_bytes"] - few["peak_bytes"]) / (SMALL_BATCHES[1] - SMALL_BATCHES[0])
    return SMALL_BATCHES[0] + int((limited.left - few["peak_bytes"]) / max(each, 1))


def largest(limited: Limited, make: Callable[[], Strategy], first: int | None) -> Row:
    """The largest batch found to fit, what its steps take, and the smallest found not to. `tried`: all batches.

    `first`: the one to try first, and none above it; None: a guess, and any.
    """
    most = first or limited.most
    guessed = first or guess_by_peaks(limited, make)
    batch, fits, refused, tried = max(1, min(guessed, most)), {}, {}, []
    while len(tried) < ATTEMPTS and 1 <= batch <= most and not (fits and refused):
        found = limited.attempt(make, batch)
        tried.append(batch)
        stride = max(1, batch // 16)
        if isinstance(found, TooLarge):
            refused = {"refused_batch": batch, "refusal": str(found)}
            batch = min(batch - stride, int(found.fitting * batch))
        else:
            fits = {"batch": batch, **found}
            batch += stride
    return {**fits, **refused, "guess": guessed, "most": most, "tried": tried}


if __name__ == "__main__":
    stage.run("largest_batch", measure)
