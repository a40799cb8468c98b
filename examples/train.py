"""Train a byte-level GPT with DeepSpeed, written as a user of ds_adacc would write it.

deepspeed --num_gpus 1 examples/train.py --deepspeed --deepspeed_config ds_configs/adacc.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TextIO

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from tqdm import tqdm

import ds_adacc

BYTES = 256
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_BATCHES = 4

Batch = tuple[Tensor, Tensor]
Checkpoint = Callable[[nn.Module, Tensor], Tensor]


# Data


def standard_library() -> tuple[bytes, bytes]:
    """Text that every machine has: Python's own sources. One file in ten, by its name, is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name in names:
        if NOT_OURS.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
            parts[held_out].append((root / name).read_bytes())
    return b"".join(parts[0]), b"".join(parts[1])


def read_texts(file: Path | None) -> tuple[Tensor, Tensor]:
    """The training and the validation text; of a single file, the last tenth is for validation."""
    if file is None:
        texts = standard_library()
    else:
        text = file.read_bytes()
        cut = len(text) * 9 // 10
        texts = text[:cut], text[cut:]
    training, validation = (torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()) for text in texts)
    return training, validation


def batches(engine: DeepSpeedEngine, text: Tensor, context: int, seed: int) -> Iterator[Batch]:
    """Endless micro batches of random windows: a function of seed, rank and position, and of nothing else."""
    for position in count():
        random = np.random.default_rng((seed, engine.global_rank, position))
        starts = random.integers(len(text) - context, size=engine.train_micro_batch_size_per_gpu())
        windows = torch.stack([text[start : start + context + 1] for start in starts])
        windows = windows.to(engine.device, torch.long)
        yield windows[:, :-1], windows[:, 1:]


# Model


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block, normalised before each half."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A GPT over bytes that returns its loss; `checkpoint(block, x)`, if given, runs each block."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        dropout: float = 0.0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.checkpoint = checkpoint
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def bias_keys(model: GPT, size: float) -> None:
    """Shift two channels of each head's keys by +`size` and -`size`, as some large models do after long training.

    The function of the model stays as it is: a shift of all keys adds the same to all logits of a query, which softmax
    does not see. But it makes keys harder to compress.
    """
    for block in model.blocks:
        _, keys, _ = block.attention.qkv.bias.view(3, block.attention.heads, -1)
        keys[:, 0] += size
        keys[:, 1] -= size


def build_model(args: argparse.Namespace, checkpoint: Checkpoint | None) -> GPT:
    """The model that the command line asks for; the same weights at every call."""
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context, args.dropout, checkpoint)
    if args.key_bias:
        bias_keys(model, args.key_bias)
    return model


def deepspeed_checkpoint(config: str) -> Checkpoint | None:
    """DeepSpeed's own checkpointing if ds_config asks for it: DeepSpeed leaves it to the model to call it."""
    if "activation_checkpointing" not in json.loads(Path(config).read_text()):
        return None
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    return deepspeed.checkpointing.checkpoint


# Training


def train_step(engine: DeepSpeedEngine, data: Iterator[Batch]) -> float:
    """One optimizer step; returns the mean loss of this rank's micro batches."""
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        tokens, targets = next(data)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return statistics.mean(losses)


@torch.no_grad()
def validate(engine: DeepSpeedEngine, text: Tensor, context: int) -> float:
    """The mean loss over the same few batches at every call, of all ranks."""
    engine.eval()
    data = batches(engine, text, context, seed=0)
    loss = torch.stack([engine(*next(data)) for _ in range(VALIDATION_BATCHES)]).mean()
    engine.train()
    deepspeed.comm.all_reduce(loss)
    return loss.item() / deepspeed.comm.get_world_size()


def train(args: argparse.Namespace, engine: DeepSpeedEngine, metrics: TextIO | None) -> None:
    """The whole run; rank 0 shows its progress."""
    training, validation = read_texts(args.data)
    data = batches(engine, training, args.context, args.seed)
    progress = tqdm(range(1, args.steps + 1), disable=engine.global_rank != 0)
    for step in progress:
        loss = train_step(engine, data)
        progress.set_postfix(loss=f"{loss:.3f}")
        record(metrics, step=step, loss=loss)
        if args.eval_every and step % args.eval_every == 0:
            record(metrics, step=step, validation_loss=validate(engine, validation, args.context))
    final = validate(engine, validation, args.context)
    progress.write(f"validation loss {final:.4f}")
    record(metrics, validation_loss=final)


def record(metrics: TextIO | None, **values: object) -> None:
    """One JSON line, at once: others may be reading along."""
    if metrics:
        print(json.dumps(values), file=metrics, flush=True)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What defines the model and the data it meets."""
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--key-bias", type=float, default=0.0, help="shift two channels of each head's keys by this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a text file (default: the sources of Python's standard library)")


def arguments() -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    add_model_options(parser)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between validations; 0: at the end only")
    parser.add_argument("--compile", action="store_true", help="have torch.compile compile the model, block by block")
    parser.add_argument("--metrics", type=Path, help="write the losses here, as JSON lines")
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is missing")
    return args


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    model = build_model(args, deepspeed_checkpoint(args.deepspeed_config))
    engine, _, _, _ = ds_adacc.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.compile:
        engine.compile()
    if args.metrics and engine.global_rank == 0:
        args.metrics.parent.mkdir(parents=True, exist_ok=True)
        with args.metrics.open("w") as metrics:
            train(args, engine, metrics)
    else:
        train(args, engine, None)


if __name__ == "__main__":
    main()
