"""One rank of the tensor-parallel tests: trains Megatron-style layers several ways and tells what it saw."""

from __future__ import annotations

import functools
from dataclasses import asdict

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from recorded import profile_of, record, under
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_adacc
from ds_adacc import checkpointing, planner
from ds_adacc.execute.input_placement import PARTITION
from ds_adacc.program.refusals import COLLECTIVE
from ds_adacc.sizes.policy_search import PolicySearch

WIDTH, STEPS, LAYERS = 8, 4, 3
ROWS = 601  # of each sample: an odd number, and so many that the states of generators, 10 KB, matter little
SECTION = {"memory_budget": 0.8, "codecs": "none", "rectifier": {"max_interval": 2}, "solver": {"max_seconds": 30.0}}


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class FunctionalReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Exchange(torch.autograd.Function):
    """Half of each rank's rows goes to the other, and gradients go back."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class Layer(nn.Module):
    """LayerNorm, a column-parallel and a row-parallel Linear, a residual; each rank has weights of its own."""

    def __init__(self, reduce=Reduce.apply, width=WIDTH):
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(width), reduce
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        h = nn.functional.gelu(self.fc1(Copy.apply(self.norm(x))))
        return x + nn.functional.dropout(nn.functional.gelu(self.reduce(self.fc2(h))), 0.1)


class Mpu:
    """DeepSpeed's model-parallel unit: all ranks hold one model."""

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.own

    def __init__(self):
        self.own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


class Counting(TorchDispatchMode):
    """Counts the collectives that run under it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def gradients(run, layer, x):
    """Gradients of one step, and the collectives of its backward."""
    layer.zero_grad()
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = run(x)
    with Counting() as counting:
        y.square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())], counting.seen


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def collectives():
    """Each block type with all recomputed that can be, beside plain autograd."""
    told = {}
    reductions = {
        "megatron": Reduce.apply,
        "functional": FunctionalReduce.apply,
        "all_to_all": Exchange.apply,
        "zeros": Reduce.apply,
    }
    for name, reduce in reductions.items():
        torch.manual_seed(1 + dist.get_rank())
        layer, x = Layer(reduce), shared(4, WIDTH)
        weight = layer.fc2.weight.detach().clone()
        with torch.no_grad():
            layer.fc2.weight.mul_(name != "zeros")  # a sum of zeros is as if it had not been summed
        recording = record(layer, (x.clone().requires_grad_(),), {})
        with torch.no_grad():
            layer.fc2.weight.copy_(weight)
        policy = planner.recompute_policy(profile_of(recording))
        replayed = recording.segments.replayed(policy.stores)
        run, _ = under(layer, recording, policy)
        (plain, without), (ours, with_) = gradients(layer, layer, x), gradients(run, layer, x)
        told[name] = {
            "same": same(plain, ours),
            "recorded": sum(op.refusal == COLLECTIVE for op in recording.ops),
            "replayed": [op.short_name for op in recording.ops if op.index in replayed],
            "without": without,
            "with": with_,
        }
    return told


def shared(*shape):
    """The same random numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def stack():
    torch.manual_seed(1 + dist.get_rank())
    return nn.ModuleList(Layer() for _ in range(LAYERS))


def train(layers, rows, call):
    """Gradients of each step of a stack of layers, and the collectives of its backward."""
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = shared(rows * ROWS, WIDTH).add_(step).requires_grad_()
        y = functools.reduce(lambda h, layer: call(layer, h), layers, x)
        layers.zero_grad()
        with Counting() as counting:
            y.square().sum().backward()
        seen.append(([x.grad, *(p.grad.clone() for p in layers.parameters())], counting.seen))
    return seen


def partitioned(mpu, rows, **options):
    """Training by `configure` alone, beside plain autograd."""
    plain = train(stack(), rows, lambda layer, h: layer(h))
    section = SECTION if options.pop("planned", True) else SECTION | {"memory_budget": 1.0}
    checkpointing.configure(mpu, {"adacc": section}, **options)
    layers = stack()
    ours = train(layers, rows, checkpointing.checkpoint)
    runtime = checkpointing.registry.runtime
    checkpointing._run(lambda x: x.exp(), (torch.ones(2, requires_grad=True),), {})  # the last step ends
    told = {
        "same": [same(a, b) for (a, _), (b, _) in zip(plain, ours, strict=True)],
        "gathers": [sum("allgather" in name for name in seen) for _, seen in ours],
        "held": [runtime.controller.observation.held.planned, runtime.controller.observation.held.observed],
        "inputs": [[plan.policy.stores[0], plan.recording.values[0].nbytes] for plan in plans(runtime)],
        "policies": [asdict(plan.policy) for plan in plans(runtime)],
        "replays": [sorted(plan.segments) for plan in plans(runtime)],
    }
    checkpointing.registry.reset()
    return told


def overflown(mpu, *ranks):
    """Training with lossy codecs whose first gradient is not finite on these ranks: they measure the codecs later.

    By step, whether all ranks share the block inputs, and the number of all-gathers in backward.
    """
    checkpointing.configure(mpu, {"adacc": {"memory_budget": 1.0}}, partition_activations=True)
    layers = plain_stack()
    told = [
        shares(layers, ROWS, step, factor=torch.inf if step == 0 and dist.get_rank() in ranks else 1.0)
        for step in range(4)
    ]
    checkpointing.registry.reset()
    return told


def forgotten(mpu):
    """As `overflown`, where one rank does not know the codecs' errors any more after a plan, as in a resumed run."""
    checkpointing.configure(mpu, {"adacc": {"memory_budget": 1.0}}, partition_activations=True)
    layers, told = plain_stack(), []
    for step in range(4):
        controller = checkpointing.registry.runtime.controller
        if step == 2 and dist.get_rank() == 1:
            for known in controller.agreement.known_types.values():
                known.errors_are_measured = False
            controller.choose_policies(controller.agreement.known_types)
        told.append(shares(layers, ROWS, step))
    checkpointing.registry.reset()
    return told


def new_lengths(mpu):
    """Training at several lengths, where the ranks adopt unlike policies: one retains the inputs, one compresses them.

    As `overflown`, with whether the type of this length has adopted its policies.
    """
    section = {"memory_budget": 1.0, "max_gradient_error": None}
    checkpointing.configure(mpu, {"adacc": section}, partition_activations=True)
    layers, told = plain_stack(), []
    with pytest.MonkeyPatch.context() as patch:
        policy_of = planner.compress_policy if dist.get_rank() else planner.retain_policy
        patch.setattr(PolicySearch, "policies", lambda self, limit: (policy_of(self.spec.profile),) * LAYERS)
        for step, rows in enumerate((64, 48, 56, 52, 64)):
            seen = shares(layers, rows, step)
            agreement, first = checkpointing.registry.runtime.agreement, next(iter(variants()))
            told.append([*seen, first.digest in agreement.origins])
    checkpointing.registry.reset()
    return told


def plain_stack():
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(LAYERS)]


def shares(layers, rows, step, factor=1.0):
    """Whether all blocks share their inputs among the ranks in this step, and the all-gathers of its backward."""
    x = shared(rows, 64).add_(step).requires_grad_()
    y = functools.reduce(lambda h, layer: checkpointing.checkpoint(layer, h), layers, x)
    with Counting() as counting:
        (y.square().sum() * factor).backward()
    are_shared = [variant.bound.policy.stores[0] == PARTITION for variant in variants()]
    return [all(are_shared), sum("allgather" in name for name in counting.seen)]


def variants():
    """What each block has run last, in `plain_stack`."""
    blocks = checkpointing.registry.runtime.blocks.all()
    return [block.variants()[0] for block in blocks if len(block.variants()[0].recording.ops) > 2]


def plans(runtime):
    return [variant.bound for _, variant in runtime.blocks.variants() if len(variant.bound.recording.ops) > 2]


def engine(mpu, section):
    """Losses of an engine over the tensor-parallel ranks, and its plan."""
    torch.manual_seed(1 + dist.get_rank())
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": 1 << 30,
    }
    if section:
        checkpointing.configure(mpu, config, partition_activations=True)
        config["adacc"] = section
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    losses, inputs = [], []
    for micro in range(4 * STEPS):
        if section and micro == 2 * STEPS:
            inputs.append([plan.policy.stores[0] for plan in plans(engine.adacc.runtime)])
            checkpointing.partition_activations_in_checkpoint(False)
        torch.manual_seed(micro)
        loss = engine(shared(4 * ROWS, WIDTH).add_(micro).requires_grad_()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    told = {"losses": losses}
    if section:
        runtime = engine.adacc.runtime
        told["inputs"] = [*inputs, [plan.policy.stores[0] for plan in plans(runtime)]]
        told["policies"] = [asdict(plan.policy) for plan in plans(runtime)]
        told["replays"] = [sorted(plan.segments) for plan in plans(runtime)]
        told["ranks"] = runtime.controller.ranks.size
        told["held"] = [engine.adacc.planned_held_bytes, engine.adacc.observed_held_bytes]
        checkpointing.registry.reset()
    return told


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    mpu = Mpu()
    return {
        "collectives": collectives(),
        "whole": partitioned(mpu, 6),
        "partitioned": partitioned(mpu, 6, partition_activations=True),
        "retained": partitioned(mpu, 6, partition_activations=True, planned=False),
        "odd": partitioned(mpu, 1, partition_activations=True, checkpoint_in_cpu=True),
        "on host": partitioned(mpu, 6, checkpoint_in_cpu=True),
        "overflown": overflown(mpu, 0, 1),
        "overflown on one": overflown(mpu, 1),
        "forgotten": forgotten(mpu),
        "new lengths": new_lengths(mpu),
        "engine": {"plain": engine(mpu, None), "adacc": engine(mpu, SECTION)},
    }
