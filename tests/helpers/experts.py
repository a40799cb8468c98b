"""Blocks that read data into Python, as mixtures of experts do, and programs that train them under checkpointing."""

from __future__ import annotations

import torch
from torch import nn

from ds_adacc import checkpointing

WIDTH, EXPERTS, LAYERS, TOKENS = 16, 4, 4, 48


class Experts(nn.Module):
    """Each token goes to one of four experts. Which tokens an expert gets, Python reads; some get none."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.drop = nn.Dropout(dropout)
        self.forwards = 0

    def routed(self, x):
        h = self.norm(x)
        weights, chosen = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            if tokens.numel():
                out = out.index_add(0, tokens, (expert(h[tokens]) * weights[tokens, None]).to(x.dtype))
        return x + self.drop(out)

    def forward(self, x):
        return self.routed(x)


def layers(kind=Experts, count=LAYERS, **options):
    torch.manual_seed(0)
    return nn.ModuleList(kind(**options) for _ in range(count))


def plainly(block, *args):
    return block(*args)


def train(blocks, call, sizes=(TOKENS,) * 4, run=None):
    """(losses, gradients of each step, the next random number) of a program that calls its blocks so."""
    torch.manual_seed(1)
    losses, gradients = [], []
    for step, size in enumerate(sizes):
        blocks.zero_grad()
        x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        for block in blocks:
            x = (run or (lambda call, block, x: call(block, x)))(call, block, x)
        loss = x.square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append([None if p.grad is None else p.grad.clone() for p in blocks.parameters()])
        with torch.no_grad():
            for parameter in blocks.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return losses, gradients, torch.randn(1).item()


def configured(**section):
    """The runtime that serves `checkpointing.checkpoint` with this section.

    The budget is 0.5 of the peak without checkpointing. Replays of operators alone do not reach it.
    """
    checkpointing.registry.reset()
    section = {"memory_budget": 0.5, "codecs": "none", "solver": {"max_seconds": 30.0}, **section}
    checkpointing.configure(None, {"adacc": section})
    return checkpointing.registry.runtime


def same(one, other):
    """Whether two results of `train` have the same bits."""
    (losses, gradients, number), (its_losses, its_gradients, its_number) = one, other
    return (losses, number) == (its_losses, its_number) and all(
        (a is None and b is None) or torch.equal(a, b)
        for of_step, its in zip(gradients, its_gradients, strict=True)
        for a, b in zip(of_step, its, strict=True)
    )


def recordings(runtime):
    """Those of the blocks that have run. Keep the blocks: with them their recordings are gone."""
    found = [variant.recording for _, variant in runtime.blocks.variants()]
    assert found, "no block has run that is still alive"
    return found
