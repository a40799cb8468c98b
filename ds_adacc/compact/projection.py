"""The random projection of a layer, drawn from a seed: which signs it has, and the products with it.

P (n × r) has the entries ±1/√r. Its signs are those of a Walsh-Hadamard matrix: entry (i, j) is negative if the binary
digits that `rows[i]` and `columns[j]` have in common are odd in number. With N the smallest power of two that is at
least n, the columns are r distinct ones of N, drawn by lot, and the rows n distinct ones, each with a sign drawn by
lot. (The sign is one more binary digit of the row, which all columns have.) So E[P Pᵀ] = I.

Why not the N(0, 1/r) of Shamshoum et al. (CompAct, NAACL 2025, section 3):

* Same bits everywhere. The draw is whole numbers only, and ±1 is exact in every dtype. Normal numbers need a logarithm
  and a cosine, which round differently on CPUs and GPUs.
* Orthogonal columns: if n is a power of two, then PᵀP = (n/r) I exactly, and P is orthonormal for r = n. P D is then
  D at the length n/r in every direction; with normal entries lengths vary by the factor ((√n + √r) / (√n − √r))².
* n + r whole numbers are all that a layer holds between two draws. Entries are made from them as products need them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ds_adacc.kernels.reference.philox import philox

TILE = 1 << 22  # entries of P that a product makes at a time
_LOW = 7  # binary digits of the smaller of two tables
_INDEX = 24  # binary digits of the numbers of rows and columns


def draw(seed: int, layer: str, epoch: int, features: int, rank: int) -> tuple[Tensor, Tensor]:
    """Draw the projection of the layer with this name in this epoch: `rows` (n,) and `columns` (r,), int64, on the CPU.

    A function of its arguments alone, computed with whole numbers: Philox (kernels/reference/philox.py) with a key made
    of seed, name and epoch. `features` is n, `rank` is r, at most n.
    """
    size = size_of(features)
    key = key_of(seed, "projection", layer, epoch)
    words = philox(torch.arange(-(-3 * size // 4), device="cpu"), key).flatten()
    negative = words[2 * size : 2 * size + features] & 1
    return _order(words[:size])[:features] + size * negative, _order(words[size : 2 * size])[:rank] + size


def key_of(*parts: object) -> int:
    """A key of 64 binary digits for Philox."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def signs(rows: Tensor, columns: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The entries of √r P in some rows and columns: ±1, `dtype` (rows, columns). `size` is that of the matrix, N.

    A sign is the product of those of the lower and the higher digits. Two small tables have them, so that counting
    digits costs little beside looking them up.
    """
    low = torch.arange(1 << _LOW, device=rows.device)
    high = torch.arange((2 * size >> _LOW) + 1, device=rows.device)
    lower = _parity(low[:, None] & columns, dtype)
    higher = _parity(high[:, None] & (columns >> _LOW), dtype)
    return lower.index_select(0, rows & low[-1]).mul_(higher.index_select(0, rows >> _LOW))


def _parity(digits: Tensor, dtype: torch.dtype) -> Tensor:
    """-1 where the number of ones among the binary digits is odd, else 1. Numbers are below 2 to the power of 32."""
    for half in (16, 8, 4, 2, 1):
        digits = digits ^ (digits >> half)
    return (1 - 2 * (digits & 1)).to(dtype)


def size_of(features: int) -> int:
    """The size of the matrix for so many input features: the smallest power of two that is at least as large."""
    return 1 << (features - 1).bit_length()


@torch.library.custom_op("ds_adacc::project", mutates_args=())
def project(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x P: `x` is (..., n) of any floating-point dtype, the result (..., r) of the same.

    One operator to whoever records it, so that it is replayed and timed as one: 2 · tokens · n · r operations.
    """
    flat = x.reshape(-1, x.shape[-1])
    z, size = flat.new_empty(flat.shape[0], len(columns)), size_of(len(rows))
    for part in tiles(len(columns), len(rows)):
        # In one step with the product, the factor is applied before anything is rounded to 16 bits.
        z[:, part].addmm_(flat, signs(rows, columns[part], size, x.dtype), beta=0, alpha=len(columns) ** -0.5)
    return z.view(*x.shape[:-1], len(columns))


@project.register_fake
def _(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(columns))


def lifted(update: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`update` Pᵀ in fp32: (m, r) to (m, n)."""
    update, factor = update.float(), len(columns) ** -0.5
    result, size = update.new_empty(update.shape[0], len(rows)), size_of(len(rows))
    for part in tiles(len(rows), len(columns)):
        result[:, part].addmm_(update, signs(rows[part], columns, size, torch.float32).T, beta=0, alpha=factor)
    return result


def tiles(count: int, width: int, entries: int = TILE) -> Iterator[slice]:
    """Ranges that cover `count` lines of `width` entries each: at most `entries` in a range, and at least one line."""
    step = max(entries // width, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _order(words: Tensor) -> Tensor:
    """A permutation, drawn by lot with these words of 32 binary digits. Ties go by place, so that it is unique."""
    return torch.argsort((words << _INDEX) | torch.arange(len(words), device="cpu"))
