"""The random generators that a block may draw from: put them back (Rule R10), and draw again (Rule R14)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def default_generators() -> tuple[torch.Generator, ...]:
    """Torch's own generators: that of the CPU, and those of all CUDA devices once CUDA is in use."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *cuda)


def identity_of(generator: torch.Generator) -> int:
    """The same for all Python objects of one generator: each operator is given a new one."""
    return generator._cdata  # pyrefly: ignore [missing-attribute]: torch's stub lacks it


def same_state(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two states of a generator (bytes on the host) are equal.

    It calls no operator, so that nothing records it: `torch.equal` would, and `Tensor.numpy` detaches.
    """
    return _content(a) == _content(b)


def _content(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


@contextmanager
def torch_unmoved(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Put back torch's generators and `generators`, whatever is drawn inside, also if it raises."""
    states = [(generator, generator.get_state()) for generator in (*default_generators(), *generators)]
    try:
        yield
    finally:
        for generator, state in states:
            if not same_state(generator.get_state(), state):
                generator.set_state(state)


@contextmanager
def unmoved(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Put back Python's and NumPy's generators too."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch_unmoved(generators):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def drawing_again(generator: torch.Generator, before: torch.Tensor, after: torch.Tensor) -> Iterator[None]:
    """Let an operator draw from `generator` in the state `before`, and put back the state that it has now.

    Raises RuntimeError if that does not leave the generator in the state `after`: then the operator has drawn its
    numbers from another state in forward.
    """
    now = generator.get_state()
    generator.set_state(before)
    try:
        yield
        if not same_state(generator.get_state(), after):
            raise RuntimeError(
                f"a random operator cannot be replayed: in forward, its generator ({generator.device}) was not in the "
                "state that it had when autograd saved the tensor before. Another thread has drawn from it or set it "
                "meanwhile, or the block sets it in some calls only; give that thread, or that part of the block, a "
                "torch.Generator of its own"
            )
    finally:
        generator.set_state(now)
