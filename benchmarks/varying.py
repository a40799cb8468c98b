"""Programs whose batches vary in size as in practice: a model that gives its loss, and a batch of each size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Size = Hashable
SHORTEST, LONGEST = 64, 512  # tokens
BATCH = 4


@dataclass(frozen=True)
class Program:
    """`model(**batch(size))` is the loss. `sizes` has that of each step, and has no end. Evaluation has no backward."""

    model: nn.Module
    batch: Callable[[Any], dict[str, Tensor]]
    sizes: Iterator[Size]
    largest: Size
    is_evaluation: Callable[[Any], bool] = lambda size: False


class LlamaBlock(nn.Module):
    """RMSNorm, attention with rotary positions, SwiGLU."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
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


class Subset(nn.Module):
    """A residual branch with drop path on subsets of the batch, as DINOv2 has it: some samples skip the branch."""

    def __init__(self, branch: nn.Module, width: int, rate: float) -> None:
        super().__init__()
        self.branch, self.norm, self.rate = branch, nn.LayerNorm(width), rate

    def forward(self, x: Tensor) -> Tensor:
        kept = max(int(len(x) * (1 - self.rate)), 1)
        chosen = torch.randperm(len(x))[:kept]
        return torch.index_add(x, 0, chosen, self.branch(self.norm(x[chosen])), alpha=len(x) / kept)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Stack(nn.Module):
    """Blocks in a row between a scale, whose gradient goes through all of them, and a loss."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x, **rest)
        return x.square().mean()


class Loss(nn.Module):
    """A model of transformers that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss


def llama(lengths: int, width: int = 256, heads: int = 4, layers: int = 6) -> Program:
    """Six blocks; each batch has one of so many lengths, drawn from 64 to 512 tokens."""
    lot = random.Random(lengths)
    known = lot.sample(range(SHORTEST, LONGEST + 1), lengths)
    return Program(
        Stack([LlamaBlock(width, heads) for _ in range(layers)]),
        lambda length: tokens(BATCH, length, width, heads),
        iter(lambda: lot.choice(known), None),
        LONGEST,
    )


def tokens(batch: int, length: int, width: int, heads: int) -> dict[str, Tensor]:
    """The inputs of LLaMA's blocks."""
    angles = torch.rand(length, width // heads)
    return {"x": torch.randn(batch, length, width), "cos": angles.cos(), "sin": angles.sin()}


def last_batch() -> Program:
    """Epochs of seven batches of 8 and a last one of 3, each followed by an evaluation on 8, 8 and 3."""
    width, heads = 256, 4
    training = [("train", 8)] * 7 + [("train", 3)]
    return Program(
        Stack([LlamaBlock(width, heads) for _ in range(6)]),
        lambda size: tokens(size[1], 256, width, heads),
        itertools.cycle([*training, ("evaluate", 8), ("evaluate", 8), ("evaluate", 3)]),
        ("train", 8),
        lambda size: size[0] == "evaluate",
    )


def whisper() -> Program:
    """Four layers of encoder over sound of one length, four of decoder over text of 30 lengths, 16 to 128 tokens."""
    lot = random.Random(30)
    known = lot.sample(range(16, 129), 30)
    config = transformers.WhisperConfig(
        vocab_size=999,
        d_model=128,
        max_source_positions=256,
        max_target_positions=128,
        **{f"{side}_layers": 4 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,  # checkpointing would fill it twice
    )

    def batch(length: int) -> dict[str, Tensor]:
        return {"input_features": torch.randn(BATCH, 80, 512), "labels": torch.randint(3, 999, (BATCH, length))}

    return Program(
        Loss(transformers.WhisperForConditionalGeneration(config)),
        batch,
        iter(lambda: lot.choice(known), None),
        128,
    )


def crops() -> Program:
    """Six blocks of a vision transformer with drop path on subsets, over 4 large or 12 small crops of an image."""
    lot, width = random.Random(2), 192
    blocks = []
    for number in range(6):
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        branches = [Attention(width, 3), mlp]
        blocks.append(nn.Sequential(*(Subset(branch, width, 0.05 * (1 + number)) for branch in branches)))
    return Program(
        Stack(blocks),
        lambda size: {"x": torch.randn(*size, width)},
        iter(lambda: lot.choice(((4, 197), (12, 37))), None),
        (4, 197),
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    "llama, 1 length": lambda: llama(1),
    "llama, 10 lengths": lambda: llama(10),
    "llama, 30 lengths": lambda: llama(30),
    "llama, 200 lengths": lambda: llama(200),
    "llama, last batch smaller": last_batch,
    "whisper, 30 lengths": whisper,
    "vision, 2 sizes of crops": crops,
}
