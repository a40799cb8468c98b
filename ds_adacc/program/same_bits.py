"""Compare tensors piece by piece: what is computed of a whole tensor may take as much memory as a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ds_adacc.program.geometry import Geometry
from ds_adacc.python_state.tensor_marks import stride_of

PIECE = 1 << 17  # elements; 1 MiB in double precision, so that it stays in a cache of the CPU
DEVICE_PIECE = 1 << 21  # on a device, which computes on smaller pieces faster than Python asks it to
_SUMMED = {1: torch.uint8, 2: torch.int16}  # no wider than 4 bytes: sums of these do not run over
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, which are of one shape, in corresponding parts that take little memory. All parts are views."""
    first = tensors[0]
    most = PIECE if first.device.type == "cpu" else DEVICE_PIECE
    if first.numel() <= most:
        yield tensors
    elif all(stride_of(each) == stride_of(first) for each in tensors) and Geometry.of(first).is_dense:
        flat = (each.as_strided((each.numel(),), (1,)) for each in tensors)
        yield from zip(*(each.split(most) for each in flat), strict=True)
    else:
        dim = max(range(first.ndim), key=first.size)
        length = max(most * first.size(dim) // first.numel(), 1)
        for parts in zip(*(each.split(length, dim) for each in tensors), strict=True):
            yield from pieces(*parts)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same size, stride, dtype and bits (NaN equals NaN, 0.0 differs from -0.0)."""
    return _are_alike(a, b) and all_same_bits(pieces(a, b))


def all_same_bits(pairs: Iterable[Sequence[torch.Tensor]]) -> bool:
    """As `same_bits`, of the two tensors of every pair; `pairs` makes them one after another."""
    differs = None
    for one, other in pairs:
        if not _are_alike(one, other):
            return False
        if one.device.type == "cpu":  # where `torch.equal` takes no memory, and the first difference ends it
            if not torch.equal(_as_words(one), _as_words(other)):
                return False
        else:  # on a device the host waits once, at the end
            found = (_as_words(one) != _as_words(other)).any()
            differs = found if differs is None else differs | found
    return differs is None or not differs


def checksum(tensor: torch.Tensor) -> list[list[int]]:
    """Of each piece two sums of its bits, the second weighted by place: equal for equal bits, else all but surely not.

    On a device the host waits once.
    """
    own = tensor.detach().resolve_conj().resolve_neg()
    if not own.numel():
        return []
    size = [1 if not step else length for length, step in zip(own.shape, own.stride(), strict=True)]  # not expanded
    return torch.stack([_sums(piece) for (piece,) in pieces(own.as_strided(size, own.stride()))]).tolist()


def _sums(piece: torch.Tensor) -> torch.Tensor:
    words = _flat(piece).view(_SUMMED.get(piece.dtype.itemsize, torch.int32))
    return torch.stack((words.sum(dtype=torch.int64), words.cumsum(0, dtype=torch.int64).sum()))


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and stride_of(a) == stride_of(b)


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
