"""The models of the stages: a GPT and a LLaMA of 1.2 billion parameters each, and small ones to rehearse with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from train import BYTES, GPT, read_texts

MODELS = ("GPT", "LLaMA")


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of a batch: `batch` sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int

    def with_batch(self, batch: int) -> Size:
        return replace(self, batch=batch)

    @property
    def tokens(self) -> int:
        return self.batch * self.length


LARGE = Size(layers=24, width=2048, heads=16, length=2048, batch=8)  # at 4, the host limits the speed
SMALL = Size(layers=4, width=64, heads=2, length=64, batch=2)


class LLaMA(nn.Module):
    """A LLaMA over bytes that returns its loss; `checkpoint(block, x, rope)`, if it is set, runs each block."""

    checkpoint: Callable[..., Tensor] | None = None

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, size.width)
        groups = max(1, size.heads // 4)  # of queries that share keys and values
        blocks = (zoo.LlamaBlock(size.width, size.heads, groups) for _ in range(size.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = zoo.RMSNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        cos, sin = zoo.rope(size.length, size.width // size.heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rope = self.cos.to(x.dtype), self.sin.to(x.dtype)  # DeepSpeed leaves buffers as they are
        for block in self.blocks:
            x = self.checkpoint(block, x, rope) if self.checkpoint else block(x, rope)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def build(name: str, size: Size, device: torch.device) -> GPT | LLaMA:
    """The model, in float32 on the device; the same weights at every call."""
    torch.manual_seed(0)
    with device:
        if name == "GPT":
            return GPT(size.layers, size.width, size.heads, size.length)
        return LLaMA(size)


def precision(device: torch.device) -> torch.dtype:
    """What to train in: bfloat16; on the CPU float32, as not every CPU multiplies bfloat16 without larger copies."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def text(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of random windows of a text, the same at every call: tokens and targets, int64 (batch, length)."""
    source, _ = read_texts(Path(argparse.__file__))  # a text that every machine has
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(source) - size.length, (size.batch,), generator=generator)
    windows = torch.stack([source[start : start + size.length + 1] for start in starts]).to(device, torch.long)
    return windows[:, :-1], windows[:, 1:]
