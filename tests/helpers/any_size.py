"""Trains blocks on batches of any size, each step beside one of plain autograd."""

import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime

LAYERS = 3


class Training:
    """LLaMA blocks in a row whose batches have any size; each step is compared with plain autograd."""

    def __init__(self, make=zoo.LlamaBlock, layers=LAYERS, **section):
        self.make = make
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        section = {"memory_budget": 0.6, "codecs": "none", "solver": {"max_seconds": 30.0}, **section}
        self.runtime = Runtime(load({"adacc": section}), has_engine=True)
        self.adacc = Adacc(self.runtime)
        self.purposes, self.peaks = [], []

    def micro_batch(self, time, batch=2, **arguments):
        torch.manual_seed(time)
        x = torch.randn(batch, time, zoo.WIDTH, requires_grad=True)
        if isinstance(self.blocks[0], zoo.LlamaBlock):
            arguments = arguments or {"rope": zoo.rope(time)}

        def run(call):
            def through(x):
                for block in self.blocks:
                    x = call(block, x, **arguments)
                return x

            return zoo.gradients(self.blocks, (x,), {}, through)

        exact = run(lambda block, x, **kwargs: block(x, **kwargs))
        self.purposes.append(self.runtime.controller.step.purpose)
        found = run(self.runtime.checkpoint)
        self.runtime.controller.end_backward()
        return exact, found

    def step(self, time, batch=2, **arguments):
        """A micro-batch, and the end of the step. The gradients of plain autograd, and ours."""
        gradients = self.micro_batch(time, batch, **arguments)
        self.adacc.end_step()
        return gradients

    def compare(self, time, batch=2, **arguments):
        zoo.assert_same_bits(*self.step(time, batch, **arguments))

    @property
    def agreement(self):
        return self.runtime.agreement
