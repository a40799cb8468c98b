"""Blocks of many shapes, small enough to run in milliseconds."""

from __future__ import annotations

import math
import types

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 32, 4


class GPTBlock(nn.Module):
    """Pre-LN, fused QKV, SDPA, GELU, residual dropout."""

    def __init__(self, width=WIDTH, heads=HEADS, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(self.ln1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.drop(self.proj(y))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Tiny(nn.Module):
    """Two Linear layers around a tanh, for four features."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    """RMSNorm, RoPE with cosine and sine as arguments, separate q/k/v, grouped queries, SwiGLU."""

    def __init__(self, width=WIDTH, heads=HEADS, groups=2):
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.head, bias=False)
        self.v = nn.Linear(width, groups * self.head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, rope=None, attention_mask=None):
        batch, time, _ = x.shape
        h = self.norm1(x)
        q = self._rotate(self.q(h).view(batch, time, self.heads, self.head).transpose(1, 2), rope)
        k = self._rotate(self.k(h).view(batch, time, self.groups, self.head).transpose(1, 2), rope)
        v = self.v(h).view(batch, time, self.groups, self.head).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _rotate(self, t, rope):
        if rope is None:
            return t
        cos, sin = rope
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-second, first), dim=-1) * sin


def rope(time, head=WIDTH // HEADS):
    angles = torch.arange(time)[:, None] / 100 ** (torch.arange(0, head, 2) / head)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class EagerBlock(nn.Module):
    """Explicit attention: matmul, scale, mask buffer, softmax, dropout on the probabilities."""

    def __init__(self, width=WIDTH, heads=HEADS, dropout=0.1, longest=64):
        super().__init__()
        self.heads, self.temperature = heads, 1.0
        self.qkv, self.proj, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(longest, longest, dtype=torch.bool).tril())

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / (self.temperature * math.sqrt(width // self.heads))
        score = score.masked_fill(~self.mask[:time, :time], float("-inf"))
        y = self.drop(score.softmax(-1)) @ v
        return x + self.proj(y.transpose(1, 2).reshape(batch, time, width))


class BertBlock(nn.Module):
    """Post-LN; the block's output is a LayerNorm's."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = self.ln1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.ln2(x + self.fc2(F.gelu(self.fc1(x))))


class _Opaque(torch.autograd.Function):
    """A kernel that the dispatcher does not see: NumPy writes into fresh memory."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        y.numpy()[...] = x.detach().numpy() ** 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * 2 * x + 0 * y


class OpaqueBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.fc2(F.gelu(_Opaque.apply(self.fc1(self.norm(x)))))


class InPlaceBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        h = F.relu_(self.fc1(self.norm(x)))
        h = F.dropout(h * 1.5, 0.1, self.training, inplace=True)
        y = self.fc2(h)
        y.mul_(0.5).add_(x)
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, :-1]
        return torch.sigmoid(y) * z + y


class RouterBlock(nn.Module):
    """Top-k routing: shapes and the experts that run depend on data."""

    def __init__(self, width=WIDTH, experts=4, k=2):
        super().__init__()
        self.k, self.norm = k, nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        flat = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(self.k, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return x + out.view_as(x)


class IndexedBlock(nn.Module):
    """Each token attends to those with the highest scores. No gradient flows into the scores: their graph is discarded.

    Indexers of sparse attention are like that, and routers whose logits only a loss would read.
    """

    def __init__(self, width=WIDTH, k=4):
        super().__init__()
        self.k, self.norm = k, nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, h = self.query(x), self.norm(x)
        scores = F.relu(query @ self.key(h).transpose(-1, -2)).exp()
        chosen = scores.topk(self.k, dim=-1).indices
        mask = torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        return x + self.proj((q @ k.transpose(-1, -2) + mask).softmax(-1) @ v)


class ManyBlock(nn.Module):
    """Several outputs, keyword, None and number arguments, tied weights, a frozen parameter, complex views."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, other, *, flag, factor=2.0, extra=None):
        z = torch.view_as_complex(self.one(x).reshape(*x.shape[:-1], -1, 2))
        y = torch.view_as_real(z * z.conj().exp()).flatten(-2)
        y = self.frozen(F.silu(y)) * factor * self.scale
        if flag and extra is None:
            y = y + self.two(other["mask"] * x).tanh()
        return y, {"sum": y.exp().sum(-1), "none": None, "number": 7}, x.detach()


class HolderBlock(nn.Module):
    """Holds things of every type that its program depends on."""

    def __init__(self, number=None, width=WIDTH):
        super().__init__()
        self.fc1, self.fc2, self.inner = nn.Linear(width, width), nn.Linear(width, width), nn.GELU()
        self.act, self.number, self.pair, self.scalar = F.gelu, number, (1.0,), 1.0
        self.config, self.step = types.SimpleNamespace(t=1.0), 0
        self.use = None

    def forward(self, x, extra=None):
        h = self.fc1(x) * (1.0 if self.number is None else self.number)
        h = self.inner(h * self.pair[0]) * self.config.t
        h = self.act(h * float(self.scalar))
        h = h if self.use is None else self.use(h, self.step)
        return self.fc2(_apply(extra, h))


def _apply(extra, h):
    if isinstance(extra, slice):
        return torch.tanh(h[:, extra]) * h[:, extra]
    if isinstance(extra, range):
        return torch.tanh(h * extra[0])
    if extra is None or isinstance(extra, torch.Tensor):
        return h
    return torch.tanh(extra(h) if callable(extra) else h * float(extra))


def example(name, batch=2, time=9):
    """(block, args, kwargs) by name, seeded."""
    torch.manual_seed(0)
    x = torch.randn(batch, time, WIDTH, requires_grad=True)
    if name == "llama":
        mask = torch.zeros(time, time).masked_fill(torch.ones(time, time).triu(1).bool(), -1e9)
        return LlamaBlock(), (x,), {"rope": rope(time), "attention_mask": mask}
    if name == "many":
        return ManyBlock(), (x, {"mask": (torch.rand(batch, time, WIDTH) > 0.5).float()}), {"flag": True}
    blocks = {
        "gpt": GPTBlock,
        "eager": EagerBlock,
        "bert": BertBlock,
        "opaque": OpaqueBlock,
        "inplace": InPlaceBlock,
        "router": RouterBlock,
        "indexed": IndexedBlock,
    }
    return blocks[name](), (x,), {}


NAMES = ("gpt", "llama", "eager", "bert", "opaque", "inplace", "router", "indexed", "many")


def loss_of(output):
    """A scalar that depends on every differentiable output."""
    if isinstance(output, torch.Tensor):
        weights = torch.linspace(-1, 1, output.numel(), device=output.device)
        return (output.float() * weights.view_as(output)).sum()
    items = output.values() if isinstance(output, dict) else output
    return sum(loss_of(o) for o in items if isinstance(o, torch.Tensor | dict | tuple))


def gradients(block, args, kwargs, run=None, seed=3):
    """(loss, gradients of inputs and parameters by name) of one step of `run` (default: the block itself)."""
    block.zero_grad()
    x = args[0]
    x.grad = None
    torch.manual_seed(seed)
    loss = loss_of((run or block)(*args, **kwargs))
    loss.backward()
    named = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return loss.detach(), named if x.grad is None else {"input": x.grad, **named}


def repeated_gradients(block, args, kwargs, run=None):
    """Of one forward of `run`: gradients of the last two parameters, then of all, and then of the input too."""
    parameters = list(block.parameters())
    torch.manual_seed(3)
    loss = loss_of((run or block)(*args, **kwargs))
    partial = torch.autograd.grad(loss, parameters[-2:], retain_graph=True)
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    return [*partial, *first, *torch.autograd.grad(loss, [args[0], *parameters])]


def assert_same_bits(expected, actual):
    assert torch.equal(expected[0], actual[0])
    assert expected[1].keys() == actual[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(gradient, actual[1][name]), name


def assert_exact(block, args, kwargs, run, seed=3):
    """One step of `run` has the loss and the gradients of the plain block, to the bit."""
    plain = gradients(block, args, kwargs, seed=seed)
    assert_same_bits(plain, gradients(block, args, kwargs, run, seed))


def assert_same(expected, actual):
    """Two tensors, or tuples and lists of whatever, are the same: types, numbers of items, bits of tensors."""
    assert type(expected) is type(actual)
    if isinstance(expected, tuple | list):
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual)
        assert (expected.dtype, expected.requires_grad) == (actual.dtype, actual.requires_grad)
    else:
        assert expected == actual
