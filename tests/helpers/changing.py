"""How often a block is recorded while what it depends on changes."""

import functools

import torch
import zoo
from recomputing import recomputing


def recordings(block, *changes, arguments=lambda: ((), {})):
    """How often `block` is recorded in two calls, and two more after each of the changes.

    Nothing is planned: all that is proven is recomputed. The gradients must be those of plain autograd. `arguments`
    returns the positional and the keyword arguments of a call, after the first.
    """
    work = recomputing()
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            args, kwargs = arguments()
            args = (torch.randn(2, 3, zoo.WIDTH, requires_grad=True), *args)
            zoo.assert_exact(block, args, kwargs, functools.partial(work.checkpoint, block))
    return work.recordings
