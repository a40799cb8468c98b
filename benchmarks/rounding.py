"""The bias of the codecs' rounding in a block's gradient, by the role of the value that is compressed.

    python benchmarks/rounding.py --out benchmarks/results

One block of a GPT that has trained a little sees many draws of real data, with the gradient of the loss at its output.
The values of one role are compressed with the INT4 codec that the preset "paper" names for it; all others are retained.
The error of a draw is e = g - g₀, where g is the gradient of the block's parameters and g₀ that of plain autograd. Over
n draws, and beside the root mean square of ‖g₀‖:

* error: the root mean square of ‖e‖;
* spread: ‖std(e)‖, the part that differs from draw to draw and averages out in training;
* mean: ‖mean(e)‖. Unbiased rounding leaves spread / sqrt(n) here, which is pure chance;
* bias: what the mean is beyond chance, sqrt(mean² - spread² / n), and 0 if chance explains it. It stays in training.
  Beside it, in standard errors, how far bias² is from 0 (sigmas).
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accuracy_run import Setting, Training
from markdown_table import markdown_table
from origin import origin, publish
from torch import Tensor, nn
from train import Attention

from ds_adacc import planner
from ds_adacc.config import codecs_for, load
from ds_adacc.environment import device_name
from ds_adacc.execute.bound_policy import BoundPolicy, bind
from ds_adacc.execute.call import Call
from ds_adacc.profile.codec_maker import CodecMaker, empty_holder
from ds_adacc.program.slots import unpack
from ds_adacc.python_state.closure import closure_of
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.capture import Capture, capture

ROUNDINGS = ("nearest", "stochastic")
TRAINED = 100  # exact steps before the first draw


class SplitAttention(nn.Module):
    """The attention of examples/train.py, but query, key and value are tensors of their own, each made by a Linear."""

    def __init__(self, fused: Attention) -> None:
        super().__init__()
        self.heads, self.projection = fused.heads, fused.projection
        self.parts = nn.ModuleList(nn.Linear(fused.qkv.in_features, fused.qkv.in_features) for _ in range(3))
        weights, biases = fused.qkv.weight.detach().chunk(3), fused.qkv.bias.detach().chunk(3)
        for part, weight, bias in zip(self.parts, weights, biases, strict=True):
            part.weight, part.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in self.parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


@dataclass(frozen=True)
class Draw:
    """A block's input, and the gradient of the loss at its output."""

    input: Tensor
    output_gradient: Tensor


def norms(errors: Tensor, exact: Tensor) -> dict[str, float | None]:
    """The norms of the errors (draws, parameters), beside the root mean square of ‖g₀‖; see above.

    `sigmas` is the squared bias in units of its standard error, by the jackknife; None if that is 0.
    """
    n = len(errors)
    products = errors.double() @ errors.double().T
    total, each, own = products.sum().item(), products.sum(1), products.diag()
    mean = total / n**2
    spread = max(0.0, (own.sum().item() - n * mean) / (n - 1))
    between = total - own.sum().item()  # products of different draws: chance is not in them
    left = (between - 2 * (each - own)) / ((n - 1) * (n - 2))
    deviation = math.sqrt((n - 1) / n * (left - left.mean()).square().sum().item())
    bias = between / (n * (n - 1))
    found = {"error": own.mean().item(), "spread": spread, "mean": mean, "chance": spread / n, "bias": max(0.0, bias)}
    scale = exact.double().square().sum(1).mean().item()
    sigmas = bias / deviation if deviation else None
    return {name: math.sqrt(square / scale) for name, square in found.items()} | {"sigmas": sigmas}


def draws(training: Training, index: int, count: int) -> list[Draw]:
    """What the block with this index sees of batches that training has not used."""
    found = []
    model = training.model
    for number in range(count):
        tokens, targets = training.batch(training.text, training.seed, training.setting.exact + 1 + number)
        met: dict[str, Tensor] = {}

        def watch(block: nn.Module, x: Tensor, met: dict[str, Tensor] = met) -> Tensor:
            output = block(x)
            if block is model.blocks[index]:
                met.update(input=x, output=output)
            return output

        model.checkpoint = watch
        loss = model(tokens, targets)
        (gradient,) = torch.autograd.grad(loss, met["output"])
        found.append(Draw(met["input"].detach(), gradient))
    model.checkpoint = None
    return found


def captured(block: nn.Module, draw: Draw) -> Capture:
    """The recording of one call, with its tensors."""
    x = draw.input.clone().requires_grad_()
    found = capture("block", BlockCall([x], (), closure_of(block), functools.partial(block, x)))
    if found.recording is None:
        raise RuntimeError(f"the block cannot be recorded: {found.reason}")
    return found


def compressing(found: Capture, role: str, maker: CodecMaker) -> BoundPolicy:
    """A policy that compresses the saved values of this role and retains all others."""
    recording = found.recording
    stores: list[str | None] = [planner.RETAIN if i in recording.saved else None for i in range(len(recording.values))]
    codecs = {}
    for value in members(found, role, maker):
        (name,) = maker.on_offer(value, recording)
        stores[value.index] = name
        codecs[value.index] = empty_holder(name, value, found.tensors[value.index], maker).facts.codec
    return bind(recording, planner.Policy(tuple(stores)), codecs)


def members(found: Capture, role: str, maker: CodecMaker) -> list[Any]:
    """The recorded values of this role that backward needs and a codec may hold."""
    recording = found.recording
    saved = [recording.values[index] for index in sorted(recording.saved)]
    return [value for value in saved if value.role == role and maker.on_offer(value, recording)]


def gradient(block: nn.Module, draw: Draw, bound: BoundPolicy | None) -> Tensor:
    """The gradient of the block's parameters in one vector; `bound` None: by plain autograd."""
    x = draw.input.clone().requires_grad_()
    if bound is None:
        output = block(x)
    else:
        call = Call(bound, [x])
        with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
            output = block(x)
        if call.diverged:
            raise RuntimeError("the call does not run as recorded")
        call.close()
    gradients = torch.autograd.grad(output, list(block.parameters()), draw.output_gradient)
    return torch.cat([each.flatten() for each in gradients])


def measure(block: nn.Module, seen: Sequence[Draw]) -> list[dict[str, Any]]:
    """A row for each role and rounding."""
    configs = {each: load({"adacc": {"codecs": "paper", "rounding": each}}) for each in ROUNDINGS}
    makers = {each: CodecMaker(config) for each, config in configs.items()}
    codecs = codecs_for(configs["nearest"])
    found = captured(block, seen[0])
    roles = [role for role in codecs if members(found, role, makers["nearest"])]
    exact = torch.stack([gradient(block, draw, None) for draw in seen])
    rows = []
    for role in roles:
        for each, maker in makers.items():
            bound = compressing(found, role, maker)
            errors = torch.stack([gradient(block, draw, bound) for draw in seen]) - exact
            values = [value.label for value in members(found, role, maker)]
            row = {"role": role, "codec": codecs[role][0], "values": values, "rounding": each}
            rows.append(row | norms(errors, exact))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each role and rounding."""
    header = ["role", "values", "codec", "rounding", "error", "spread", "mean", "of chance", "bias", "sigmas"]
    lines = []
    for row in rows:
        ratio = f"{row['mean'] / row['chance']:.2f}" if row["chance"] else ""
        sigmas = "" if row["sigmas"] is None else f"{row['sigmas']:.1f}"
        numbers = [*(f"{row[key]:.2g}" for key in ("error", "spread", "mean")), ratio, f"{row['bias']:.2g}", sigmas]
        lines.append([row["role"], ", ".join(row["values"]), row["codec"], row["rounding"], *numbers])
    return markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--block", type=int, default=2, help="of four, from 0")
    parser.add_argument("--trained", type=int, default=TRAINED, help="exact steps before the first draw")
    parser.add_argument("--out", type=Path, help="a folder for the table and JSON")
    args = parser.parse_args()
    training = Training(Setting(exact=args.trained, steps=0), seed=0)
    for number in range(1, args.trained + 1):
        training.step(number)
    block = training.model.blocks[args.block]
    block.attention = SplitAttention(block.attention)
    rows = measure(block, draws(training, args.block, args.draws))
    print(table(rows))
    if args.out:
        setting = {"draws": args.draws, "trained": args.trained, "block": args.block}
        about = {**origin(device_name(training.device)), **setting}
        publish(args.out / "rounding", about, table(rows), rows=rows)


if __name__ == "__main__":
    main()
