"""What a user would name on the command line: a tiny GPT, and factories with something wrong."""

from types import SimpleNamespace

import torch
from torch import nn
from zoo import GPTBlock

WIDTH, TOKENS, LAYERS = 32, 16, 3


class Subclass(torch.Tensor):
    pass


class GPT(nn.Module):
    """Blocks in a row behind a stem, that return whatever `wrap` makes of their output."""

    def __init__(self, blocks, wrap=lambda x: x):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.wrap = wrap

    def forward(self, x, scale=1.0):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.wrap(x * scale)


def blocks(count=LAYERS):
    torch.manual_seed(0)
    return [GPTBlock(WIDTH, 4, dropout=0.0) for _ in range(count)]


def gpt(batch=2):
    return GPT(blocks()), torch.randn(batch, TOKENS, WIDTH)


def two_kinds(batch):
    """The first block's input needs no gradient."""
    model, x = gpt(batch)
    model.stem = nn.Identity()
    return model, x


def without_default(batch):
    return gpt(batch)


def keywords(batch):
    model, x = gpt(batch)
    return model, {"x": x, "scale": 2.0}


def with_loss(batch):
    model, x = gpt(batch)
    model.wrap = lambda y: SimpleNamespace(loss=y.mean(), logits=None)
    return model, (x,)


def no_gradient(batch):
    model, x = gpt(batch)
    model.wrap = lambda y: {"class": y.argmax()}
    return model, x


def no_block(batch):
    return GPT(blocks(1)), torch.randn(batch, TOKENS, WIDTH)


def idle(batch):
    model, x = gpt(batch)
    model.forward = lambda x: model.blocks[0].ln1(x)
    return model, x


def unrecordable(batch):
    """Its blocks are given tensors of a class of their own."""
    model, x = gpt(batch)
    model.stem = nn.Module()
    model.stem.forward = lambda x: x.as_subclass(Subclass).requires_grad_()
    return model, x


def compiled_as_a_whole(batch):
    model, x = gpt(batch)
    model.compile()
    return model, x


def raises(batch):
    raise FileNotFoundError(f"no weights for micro-batch {batch}")


def fails(batch):
    return GPT(blocks()), torch.randn(batch, TOKENS, WIDTH + 1)


def other_program(batch):
    """Another activation function from three samples on."""
    model, x = gpt(batch)
    if batch > 2:
        for block in model.blocks:
            block.drop = nn.Tanh()
    return model, x


def any_length(batch):
    """Sequences as long as chance has it."""
    model, x = gpt(batch)
    return model, x if batch == 2 else x[:, :-3]


def always_two(batch):
    return gpt(2)


def no_argument():
    return gpt(2)


def only_a_model(batch):
    return gpt(batch)[0]


def no_model(batch):
    return "model", torch.ones(batch)


value = 3
