"""One rank of the tests of ZeRO-3's leaf modules: losses with ds_adacc and without, in uses that leaves could break."""

from __future__ import annotations

import functools

import deepspeed
import torch
import zoo
from torch import nn
from zero_cases import Case, ds_config

import ds_adacc
from ds_adacc import checkpointing

STEPS, LAYERS = 4, 3
SECTION = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}


class Mixture(nn.Module):
    """Experts, of which each rank chooses its own in every call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(zoo.WIDTH)
        self.experts = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(3))

    def forward(self, x, chosen):
        return x + nn.functional.gelu(self.experts[chosen](self.norm(x)))


class Model(nn.Module):
    """`use` is one of USES. `is_plain`: there is no ds_adacc."""

    def __init__(self, use, is_plain):
        super().__init__()
        make = Mixture if use == "mixture" else zoo.GPTBlock
        self.use, self.gathered = use, []
        self.is_checkpointed = use.startswith("checkpointed by hand") and not is_plain
        self.blocks = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(self, x, chosen):
        x.requires_grad_()
        for block in (*self.blocks, *self.blocks) if self.use == "twice in one forward" else self.blocks:
            if self.use == "mixture":
                x = block(x, chosen)
            elif self.is_checkpointed:  # so ZeRO-3's hooks run within the call
                given = functools.partial(block) if block is self.blocks[1] else block
                x = checkpointing.checkpoint(given, x)
            elif self.use == "keywords":
                x = block(x=x)
                x.register_hook(lambda _: self.gathered.append(self.blocks_gathered()))
            else:
                x = block(x)
        return x.pow(2).mean()

    def blocks_gathered(self):
        return sum(any(p.numel() for p in block.parameters()) for block in self.blocks)


AHEAD = "checkpointed by hand, gathered ahead"  # after an evaluation, by which ZeRO-3 knows what comes next
USES = (
    AHEAD,  # before others measure the same block
    "keywords",
    "checkpointed by hand",
    "mixture",
    "two forwards before a backward",
    "twice in one forward",
)


def train(use, section):
    """The losses, and how many blocks' parameters are gathered whenever the gradient of a block's output arrives."""
    torch.manual_seed(0)
    model = Model(use, section is None)
    if use == "mixture" and section is None:
        for block in model.blocks:
            deepspeed.utils.set_z3_leaf_module(block, True)
    config = ds_config(Case(3), section)
    if use == AHEAD:
        config["zero_optimization"] |= {"stage3_max_live_parameters": 10**6, "stage3_prefetch_bucket_size": 10**6}
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    random, losses = torch.Generator().manual_seed(engine.global_rank), []
    if use == AHEAD:
        with torch.no_grad():
            engine(torch.zeros(2, 8, zoo.WIDTH), 0)
    for step in range(STEPS):
        torch.manual_seed(10 * step + engine.global_rank)
        chosen = (step + engine.global_rank) % 3
        loss = engine(torch.randn(2, 8, zoo.WIDTH, generator=random), chosen)
        if use == "two forwards before a backward":
            loss = -nn.functional.logsigmoid(engine(torch.randn(2, 8, zoo.WIDTH, generator=random), chosen) - loss)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del loss  # whose graph would keep the nodes that add up the gradients of parameters
    return {"losses": losses, "gathered": model.gathered}


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    return {use: {"plain": train(use, None), "adacc": train(use, SECTION)} for use in USES}
