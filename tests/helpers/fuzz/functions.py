"""Random blocks of opaque `autograd.Function`s: small, so that one case takes milliseconds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from opaque import array
from recorded import call_of, profile_of, random_policy, under
from torch import nn

from ds_adacc import planner
from ds_adacc.program.function_operator import FunctionOperator
from ds_adacc.record.capture import capture

SHAPE = (3, 4)
# What a Function does besides; each by itself leaves it replayable, or has it refused.
HARMLESS = ("address", "hidden", "view", "twice", "output", "unwritten", "noise", "nested", "needs", "attribute", "two")
HARMFUL = ("state", "in place", "dirty", "reads", "table", "returns table", "reads by numpy")
PLAIN = ("tanh", "linear", "multiply", "add", "transposed", "dropout", "relu_", "buffer", "detach", "overwritten")

calls = [0]
table = torch.full(SHAPE, 0.5)


def _count():
    calls[0] += 1
    return calls[0]


class Odd(torch.autograd.Function):
    """Does what `traits` name. Its gradient is not the derivative, but depends on every bit that it has saved."""

    @staticmethod
    def forward(ctx, traits, number, *xs):
        x, saved = xs[0], [xs[-1]]
        factor = number
        if "state" in traits:
            factor += _count()
        if "raises" in traits:
            raise ValueError("as it should")
        if "in place" in traits and x.is_contiguous():
            array(x)[...] *= np.float32(1.5)
        if "dirty" in traits:
            x.mul_(0.5)
        if "address" in traits:
            y, rows = torch.empty(SHAPE), x.contiguous()
            array(y)[...] = array(rows) * np.float32(factor)
        else:
            y = x * factor
        for other in xs[1:]:
            y = y + other.tanh()
        if "reads" in traits:
            y = y * (2.0 if x.sum() > 0 else 3.0)
        if "reads by numpy" in traits:
            y = y * float(x.detach().numpy()[0, 0])
        if "table" in traits:
            y = y + table
        if "noise" in traits:
            mask = torch.rand(SHAPE) > 0.3
            y = y * mask
            saved.append(mask)
        if "nested" in traits:
            y = Odd.apply(("address", "output"), 1.25, y)
        if "hidden" in traits:
            hidden, rows = torch.empty(SHAPE), y.contiguous()
            array(hidden)[...] = array(rows) + 1
            saved.append(hidden)
            saved += [hidden[1:, :2].t()] if "view" in traits else []
        if "needs" in traits:
            saved.append(y * 2 if any(ctx.needs_input_grad) else None)
        if "attribute" in traits:
            ctx.kept = {"y": [y * 3, x]}
        ctx.unwritten = "unwritten" in traits
        saved += [y] if "output" in traits else []
        saved += [xs[-1]] if "twice" in traits else []
        ctx.save_for_backward(*([torch.empty(5)] if ctx.unwritten else []), *saved)
        if "dirty" in traits:
            ctx.mark_dirty(x)
            return y, x
        if "returns table" in traits:
            ctx.mark_non_differentiable(table)
            return y, table
        if "two" in traits:
            return y, "a word", y.exp()
        return y

    @staticmethod
    def backward(ctx, *grads):
        saved = [t for t in ctx.saved_tensors[ctx.unwritten :] if t is not None]
        saved += ctx.kept["y"] if hasattr(ctx, "kept") else []
        mix = sum(t.double().flatten() @ torch.arange(1, t.numel() + 1).double() for t in saved)
        grad = sum(each for each in grads if each is not None) + (0.01 * mix).float()
        return None, None, *(grad * (n + 1) if needed else None for n, needed in enumerate(ctx.needs_input_grad[2:]))


class Overwriting(torch.autograd.Function):
    """Its backward puts the gradient where the input was, by address, as Liger-Kernel's SwiGLU does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        array(x)[...] = (2 * x * grad).numpy()
        return x


class Program(nn.Module):
    """A random sequence of calls on the tensors at hand."""

    def __init__(self, seed):
        super().__init__()
        lot = random.Random(seed)
        self.steps = tuple(_step(lot) for _ in range(lot.randint(2, 6)))
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x, z):
        at_hand = [x * 1, z]
        for kind, traits, number, places in self.steps:
            xs = [at_hand[place % len(at_hand)] for place in places]
            at_hand.append(self._made(kind, traits, number, xs))
        return torch.stack(at_hand[2:]).sum(0) + at_hand[-1]

    def _made(self, kind, traits, number, xs):
        x = xs[0]
        if kind == "function":
            try:
                made = Odd.apply(traits, number, *xs)
            except ValueError:
                return x.sin()
            return made if isinstance(made, torch.Tensor) else made[0] + made[-1]
        if kind == "linear":
            return x @ self.weight
        if kind in ("multiply", "add"):
            return x * xs[-1] if kind == "multiply" else x + xs[-1]
        if kind == "overwritten":
            x = (x * 2).contiguous()
            return x.tanh() + Overwriting.apply(x)  # tanh saves its output, which may be rebuilt from x
        if kind == "transposed":
            return x.t().contiguous().t()
        if kind == "dropout":
            return nn.functional.dropout(x, 0.3)
        if kind == "buffer":
            return x * self.shift
        return {"tanh": torch.tanh, "detach": torch.detach, "relu_": lambda x: (x * 1).relu_()}[kind](x)


def _step(lot):
    places = tuple(-1 - lot.randrange(3) for _ in range(lot.randint(1, 3)))
    if lot.random() < 0.4:
        return lot.choice(PLAIN), (), 0.0, places
    traits = lot.sample(HARMLESS, lot.randint(1, 5))
    if lot.random() < 0.2:
        traits.append(lot.choice(HARMFUL))
    if lot.random() < 0.1:
        traits.append("raises")
    return "function", tuple(traits), lot.choice([0.5, 2.0, 3.0]), places


@dataclass
class Seen:
    """What one run of a block shows."""

    tensors: list
    calls: int
    error: bool = False


def look(block, run, data):
    """Outputs, gradients, the random state, and how often the state was changed."""
    calls[0] = 0
    block.zero_grad()
    generator = torch.Generator().manual_seed(data)
    x, z = (torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(2))
    torch.default_generator.manual_seed(data)
    try:
        output = run(x, z)
        done = calls[0], torch.default_generator.get_state()
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    except RuntimeError:  # what was saved has been written to since
        return Seen([], calls[0], error=True)
    return Seen([output.detach(), x.grad, z.grad, block.weight.grad, done[1]], done[0])


def assert_same(plain, ours):
    assert (plain.calls, plain.error) == (ours.calls, ours.error)
    for number, (a, b) in enumerate(zip(plain.tensors, ours.tensors, strict=True)):
        assert (a is None) == (b is None), f"number {number}: {a} is not {b}"
        assert a is None or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), number


def check(seed):
    """Record the block; two policies, on two batches, show what plain autograd shows. Returns what occurred."""
    block = Program(seed)
    plain = [look(block, block, data) for data in (seed, seed + 1)]
    captures = []

    def recorded(x, z):
        captures.append(capture("fuzz", call_of(block, x, z)))
        return captures[-1].output

    assert_same(plain[0], look(block, recorded, seed))
    traits = {each for _, traits, *_ in block.steps for each in traits}
    if plain[0].error or captures[0].recording is None:
        return {*traits, "not recorded"}
    recording = captures[0].recording
    for policy in (planner.recompute_policy(profile_of(recording)), random_policy(recording, seed)):
        for data, expected in zip((seed, seed + 1), plain, strict=True):
            run, _ = under(block, recording, policy)
            assert_same(expected, look(block, run, data))
    ops = [op for op in recording.ops if isinstance(op.func, FunctionOperator)]
    return {*traits, *("replayed" if op.replayable else "refused" for op in ops)}
