"""One rank of the tests of what a program gives to `checkpoint` under ZeRO-3: each form of it, and plain calls."""

from __future__ import annotations

import functools

import deepspeed
import torch
import zoo
from heard import heard
from torch import nn
from zero_cases import Case, ds_config
from zero_worker import alive_bytes, watch_gathered

import ds_adacc
from ds_adacc import checkpointing

STEPS, LAYERS = 4, 4
SECTION = {"memory_budget": 0.5, "codecs": "none", "solver": {"max_seconds": 30.0}}
WITHOUT_ENGINE = "without an engine of ds_adacc"


class Model(nn.Module):
    """`form`: what is given to `call`, the checkpoint function."""

    def __init__(self, form, call):
        super().__init__()
        self.form, self.call = form, call
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(LAYERS))
        self.head = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def layers(self, start, end):
        """A function of its own at each forward, as Megatron makes it: it holds the whole model."""

        def run(x):
            for number in range(start, end):
                x = self.blocks[number](x)
            return x

        return run

    def forward(self, x):
        if self.form == "a function of two layers":
            for start in range(0, LAYERS, 2):
                x = self.call(self.layers(start, start + 2), x)
            return self.head(x).square().mean()
        for block in self.blocks:
            x = block(x) if self.form == "a function without a block" else self.call(self.given(block), x)
        if self.form == "a function without a block":
            return self.call(lambda y: self.head(y), x).square().mean()
        return self.head(x).square().mean()

    def given(self, block):
        forms = {
            "a partial": functools.partial(block),
            "its call": block.__call__,
            "a lambda": lambda y, layer=block: layer(y),
        }
        return forms.get(self.form, block)


FORMS = ("a module", "a partial", "its call", "a lambda", "a function of two layers", "a function without a block")


def train(form, call, section):
    """What is computed; what is alive of gathered parameters after the last forward; and the blocks that were met."""
    torch.manual_seed(0)
    model = Model(form, call)
    engine, *_ = ds_adacc.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(Case(3), section)
    )
    random, losses = torch.Generator().manual_seed(engine.global_rank), []
    with watch_gathered(model.blocks) as gathered:
        for step in range(STEPS):
            torch.manual_seed(10 * step + engine.global_rank)
            gathered.clear()
            loss = engine(torch.randn(2, 8, zoo.WIDTH, generator=random))
            alive = alive_bytes(gathered)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    told = {"losses": losses, "gathered": sum(size for _, size in gathered), "alive": alive}
    adacc = getattr(engine, "adacc", None)
    if adacc is not None:
        told["recorded"] = sorted(block.name for block, _ in adacc.runtime.blocks.variants())
        told["held"] = adacc.planned_held_bytes, adacc.observed_held_bytes
    return told


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    lines = heard()
    plain = {form: train(form, lambda function, x: function(x), None) for form in FORMS}
    own = train("a function of two layers", checkpointing.checkpoint, None)  # before any engine has a section
    results = {WITHOUT_ENGINE: {"plain": plain["a function of two layers"], "adacc": own | {"log": lines[:]}}}
    for form in FORMS:
        lines.clear()
        ours = train(form, checkpointing.checkpoint, SECTION)
        results[form] = {"plain": plain[form], "adacc": ours | {"log": lines[:]}}
    return results
