"""A stack of blocks of which only the activations are counted."""

import gc

import torch
from storages import Storages
from torch import nn

ALLOWANCE = 64
LAYERS, WIDTH, TIME = 6, 64, 256


class Model:
    """A stack of blocks whose parameters' gradients exist before, so that only activations are counted."""

    def __init__(self, make, layers=LAYERS):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        # a leaf lives as long as the graph: the blocks' input is made from it
        self.leaf = torch.randn(4, TIME, WIDTH, requires_grad=True)
        self.leaf.grad = torch.zeros_like(self.leaf)
        self.weight = torch.randn(4, TIME, WIDTH)

    def step(self, call):
        x = self.leaf * 1.0
        for block in self.blocks:
            x = call(block, x)
        loss = (x * self.weight).sum()  # with a gradient that takes room
        del x  # the output of the last block is not the blocks' to hold
        loss.backward()

    def peak(self, call):
        gc.collect()
        gc.disable()
        with Storages() as storages:
            self.step(call)
        gc.enable()
        return storages.peak
