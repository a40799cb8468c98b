"""One rank of the tests of DeepSpeed's own Functions: each in a block under recompute-all, beside plain autograd."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import _AllToAll
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.sequence import cross_entropy, layer
from parallel_worker import gradients, same
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner

WIDTH, TIME = 8, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        raise NotImplementedError

    def forward(self, x):
        return self.second(self.inner(self.first(x).tanh()).tanh())


class ZeroLinear(Block):
    def inner(self, x):
        return zero3_linear_wrap(x, self.first.weight, self.first.bias)


class TiledMlp(Block):
    def inner(self, x):
        return ulysses_sp.TiledMLP.apply(lambda self, x: self.first(x).relu(), self, x, 3, [])


class TiledCompute(Block):
    def inner(self, x):
        return ulysses_sp.sequence_tiled_compute(
            lambda x: self.first(x).relu(),
            TIME,
            3,
            {"x": x},
            {},
            "x",
            [],
            output_unshard_dimension=1,
            output_reduction=None,
        )


class UlyssesAttention(Block):
    def inner(self, x):
        heads = x.unflatten(-1, (4, 2))
        attention = layer.DistributedAttention(_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return attention(heads, heads * 2, heads * 3, 0).flatten(-2)


def _attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


class Exchanged(Block):
    """An operator of DeepSpeed's own whose schema does not tell of the collective inside."""

    def inner(self, x):
        return layer._dim_zero_all_to_all(dist.group.WORLD, x)


class Experts(Block):
    def inner(self, x):
        return _AllToAll.apply(dist.group.WORLD, x)


class DroppedTokens(Block):
    """A mixture of experts of two ranks. Each expert takes as many tokens as its capacity, which Python reads."""

    def __init__(self):
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=3, min_capacity=2)
        self.experts.set_deepspeed_parallelism()

    def inner(self, x):
        return self.experts(x)[0]


class VocabularyLoss(Block):
    def inner(self, x):
        start = WIDTH * dist.get_rank()
        target = torch.arange(TIME).repeat(2, 1)
        loss = cross_entropy._VocabParallelCrossEntropy.apply(x, target, dist.group.WORLD, start, start + WIDTH, -100)
        return x * loss.unsqueeze(-1)


class Unnamed(Block):
    """A user's operator, of which neither name nor schema tells that it calls a collective."""

    def inner(self, x):
        return _mean_of_ranks(x) * x


@torch.library.custom_op("ds_adacc_tests::mean_of_ranks", mutates_args=())
def _mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    y = x / dist.get_world_size()
    dist.all_reduce(y)
    return y


_mean_of_ranks.register_autograd(lambda ctx, gradient: gradient)


BLOCKS = (
    Unnamed,
    ZeroLinear,
    TiledMlp,
    TiledCompute,
    UlyssesAttention,
    Exchanged,
    Experts,
    VocabularyLoss,
    DroppedTokens,
)


def case(make):
    torch.manual_seed(1)
    layer.register_all_to_all_group(dist.group.WORLD)
    block = make()
    x = torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    recording = record(block, (x.clone().requires_grad_(),), {})
    policy = planner.recompute_policy(profile_of(recording))
    replayed = recording.segments.replayed(policy.stores)
    run, calls = under(block, recording, policy)
    (plain, without), (ours, with_) = gradients(block, block, x), gradients(run, block, x)
    return {
        "same": same(plain, ours),
        "diverged": calls[0].diverged,
        "collectives": [without, with_],
        "refused": {op.short_name: op.refusal for op in recording.ops if not op.replayable},
        "replayed": [op.short_name for op in recording.ops if op.index in replayed],
        "remarks": recording.remarks_on_replays,
    }


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    return {make.__name__: case(make) for make in BLOCKS}
