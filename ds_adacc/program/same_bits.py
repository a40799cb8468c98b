"""Compare tensors piece by piece: what is computed of a whole tensor may take as much memory as a block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_adacc.program.geometry import Geometry

PIECE = 1 << 17  # elements; 1 MiB in double precision
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, which are of one shape, in corresponding parts of at most `PIECE` elements. All parts are views."""
    first = tensors[0]
    if first.numel() <= PIECE:
        yield tensors
    elif all(each.stride() == first.stride() for each in tensors) and Geometry.of(first).is_dense:
        flat = (each.as_strided((each.numel(),), (1,)) for each in tensors)
        yield from zip(*(each.split(PIECE) for each in flat), strict=True)
    else:
        dim = max(range(first.ndim), key=first.size)
        length = max(PIECE * first.size(dim) // first.numel(), 1)
        for parts in zip(*(each.split(length, dim) for each in tensors), strict=True):
            yield from pieces(*parts)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same size, stride, dtype and bits (NaN equals NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.device.type == "cpu":  # where `torch.equal` takes no memory, and stops at the first difference
        return all(torch.equal(_as_words(one), _as_words(other)) for one, other in pieces(a, b))
    differs = torch.zeros((), dtype=torch.bool, device=a.device)
    for one, other in pieces(a, b):  # on a device the host waits once, at the end
        differs |= (_as_words(one) != _as_words(other)).any()
    return not differs


def as_bytes(piece: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 (bytes,): a view, or a copy if the elements do not lie side by side."""
    return _flat(piece).view(torch.uint8)


def _as_words(piece: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers of as many bytes."""
    return _flat(piece).view(_WORDS[piece.dtype.itemsize])


def _flat(piece: torch.Tensor) -> torch.Tensor:
    """The elements one after another, in memory order if they lie side by side. Viewing them takes a stride of 1."""
    dense = piece if Geometry.of(piece).is_dense else piece.contiguous()
    return dense.as_strided((dense.numel(),), (1,))
