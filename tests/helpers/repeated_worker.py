"""One rank of the tests of blocks that read data and call collectives: each program with and without ds_adacc."""

from __future__ import annotations

import functools
import itertools
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from zero_cases import Case, ds_config

import ds_adacc
from ds_adacc import checkpointing

WIDTH, LAYERS, STEPS = 16, 4, 4
LENGTHS = (24,) * STEPS
VARYING = ((24, 16), (20, 28), (32, 24), (28, 20), (24, 36))  # of the first rank and of the second


class Exchange(torch.autograd.Function):
    """Rows for the other rank, as dropless mixtures of experts send them."""

    @staticmethod
    def forward(ctx, x, sizes, given):
        ctx.sizes = sizes, given
        return _exchanged(x, sizes, given)

    @staticmethod
    def backward(ctx, gradient):
        sizes, given = ctx.sizes
        return _exchanged(gradient, given, sizes), None, None


def _exchanged(x, sizes, given):
    out = x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), sizes, given)
    return out


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each rank has one expert. It takes all rows that are sent to it, and counts them in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.expert, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2), Mlp(), nn.Dropout(0.1)
        self.register_buffer("counted", torch.zeros(2))

    def forward(self, x):
        h = self.norm(x)
        weights, chosen = self.gate(h).softmax(-1).max(-1)
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=2)
        self.counted += counts
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, got = counts.tolist(), theirs.tolist()
        back = Exchange.apply(self.expert(Exchange.apply(h[order], got, sent)), sent, got)
        return x + self.drop(torch.zeros_like(x).index_add(0, order, back * weights[order, None]))


class Collapsed(Experts):
    """All rows go to the expert of the first rank. The other rank skips its own, so it saves other tensors.

    The last operator saves a frozen weight alone, which no second forward has to make.
    """

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x):
        h = self.norm(x) * self.gate(x).softmax(-1).max(-1).values[:, None]
        counts = torch.tensor([len(x), 0])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, got = counts.tolist(), theirs.tolist()
        mine = Exchange.apply(h, got, sent)
        # Each rank has a gradient of each weight, for DeepSpeed.
        unused = 0 * sum(parameter.sum() for parameter in self.parameters())
        return x + self.out(Exchange.apply(self.expert(mine) if sum(got) else mine, sent, got)) + unused


class Reading(nn.Module):
    """No collective of its own. ZeRO-3 gathers its parameters before its forward, and again for its backward."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero(as_tuple=True)
        return x.index_put(rows, x[rows] + self.mlp(self.norm(x[rows])))


class ReadByOne(nn.Module):
    """Only the first rank reads data, as it prints them."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        h = self.norm(x)
        if dist.get_rank() == 0:
            print(h.abs().mean().item())
        total = h.detach().clone()
        dist.all_reduce(total)
        return x + self.mlp(h + total / 2)


class Quantizing(nn.Module):
    """It turns out not to be recordable only when it is recorded. `forwards`: how often its forward has run."""

    def __init__(self):
        super().__init__()
        self.mlp, self._counter = Mlp(), itertools.count()  # a number would be watched

    @property
    def forwards(self):
        return int(repr(self._counter).removeprefix("count(").removesuffix(")"))

    def forward(self, x):
        next(self._counter)
        return self.mlp(x) + torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize()


class Model(nn.Module):
    def __init__(self, kinds, call):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.call = call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


def plainly(layer, x):
    return layer(x)


def made(kinds, stage, section, asks):
    torch.manual_seed(0)
    asked = section is not None and asks
    model = Model(kinds, checkpointing.checkpoint if asked else plainly)
    config = ds_config(Case(stage), section)
    return ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def resumed(engine, folder, *arguments):
    """Another engine, which goes on from a checkpoint of this one in the folder."""
    random, buffers = torch.get_rng_state(), [buffer.clone() for buffer in engine.module.buffers()]
    engine.save_checkpoint(folder)
    another = made(*arguments)
    another.load_checkpoint(folder)
    torch.set_rng_state(random)
    for buffer, own in zip(another.module.buffers(), buffers, strict=True):
        buffer.copy_(own)  # each rank has its own counts, and only those of the first are saved
    return another


def train(kinds, stage, lengths, section=None, asks=True, watch=None, resumes=None, folder=None):
    """What is computed, and by step the layers whose collectives all ranks repeat and the number of recordings."""
    engine = made(kinds, stage, section, asks)
    rank = engine.global_rank
    torch.manual_seed(1 + rank)
    losses, repeated, recordings = [], [], []
    for step, length in enumerate(lengths):
        if step == resumes:
            engine = resumed(engine, folder, kinds, stage, section, asks)
        model = engine.module
        length = length if isinstance(length, int) else length[rank]
        x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        sys.setprofile(_looks_on if watch == (rank, step) else None)
        loss = engine(x.to(next(iter(model.parameters())).dtype))
        sys.setprofile(None)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if section is not None:
            runtime = engine.adacc.runtime
            repeated.append(sorted(runtime.agreement.repeated))
            recordings.append(runtime.recordings)
    told = {"losses": losses, "buffers": [b.tolist() for b in model.buffers()], "repeated": repeated}
    told["recordings"], told["forwards"] = recordings, [getattr(layer, "forwards", None) for layer in model.layers]
    if section is not None:
        variants = runtime.blocks.variants()
        told["whole"] = [variant.recording.is_whole for _, variant in variants]
        told["remarks"] = sorted({remark for _, variant in variants for remark in variant.recording.remarks})
        told["peaks"] = runtime.controller.plan.groups[0].solution.peak, runtime.controller.plan.without
    return told


def _looks_on(*_):
    pass


def section(budget, kinds):
    blocks = sorted({kind.__name__ for kind in kinds})
    return {"memory_budget": budget, "codecs": "none", "blocks": blocks, "solver": {"max_seconds": 30}}


CASES = {
    "experts": ([Experts] * LAYERS, 1, LENGTHS, 0.5, {}),
    "experts under ZeRO-3": ([Experts] * LAYERS, 3, LENGTHS, 0.6, {}),
    "gathered": ([Reading] * LAYERS, 3, LENGTHS, 0.6, {}),
    "lengths": ([Experts] * LAYERS, 2, VARYING, 0.6, {}),
    "watched by a profiler": ([Experts] * LAYERS, 1, (24, 24, 30, 24), 0.5, {"watch": (1, 2)}),
    "collapsed": ([Collapsed] * LAYERS, 1, (24, 24, 30, 24), 0.5, {"watch": (1, 2)}),
    "read by one rank": ([ReadByOne] * LAYERS, 1, LENGTHS, 1.0, {}),
    "not recorded": ([Experts, Quantizing, Experts], 1, LENGTHS, 0.8, {}),
    "resumed": ([Experts] * LAYERS, 1, LENGTHS, 0.5, {"resumes": 2}),
    "not asked": ([Experts] * LAYERS, 1, LENGTHS, 1.0, {"asks": False}),
}


@functools.cache
def plain(kinds, stage, lengths):
    return train(kinds, stage, lengths)


def case(out, kinds, stage, lengths, budget, options):
    folder = out / "checkpoint"
    return {
        "plain": plain(tuple(kinds), stage, lengths),
        "ours": train(kinds, stage, lengths, section(budget, kinds), folder=folder, **options),
    }


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    return {name: case(out, *each) for name, each in CASES.items()}
