"""Uniform numbers from a counter-based generator: the number of element i depends on i and the seed alone."""

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def philox(calls: Tensor, seed: int) -> Tensor:
    """Return four 32-bit numbers for each of `calls`, int64 (n,): int64 (n, 4).

    Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with the counter
    (low word of the call, its high word, 0, 0) and the key (low word of `seed`, its high word).
    """
    zero = torch.zeros_like(calls)
    a, b, c, d = calls & WORD, calls >> 32 & WORD, zero, zero
    low, high = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        # The products wrap around at 64 bits, which leaves both of their words right.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, c = second >> 32 & WORD ^ b ^ low, first >> 32 & WORD ^ d ^ high
        b, d = second & WORD, first & WORD
        low, high = low + WEYL[0] & WORD, high + WEYL[1] & WORD
    return torch.stack([a, b, c, d], 1)


def uniform(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """Return the numbers in [0, 1) of the elements from `start` to `stop`: float32 (stop - start,).

    That of element i is the upper 24 bits of lane i % 4 of call i // 4.
    """
    first, last = start // 4, -(-stop // 4)
    words = philox(torch.arange(first, last, device=device), seed).view(-1)
    return (words[start - 4 * first : stop - 4 * first] >> 8).float() * 2.0**-24
