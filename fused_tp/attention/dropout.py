"""The random bits of dropout: Philox4x32-10 of (seed; batch row, head, query, key).

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Key (seed low, seed high); counter
(key index // 4, query index, head, batch row); of the four results the one of number key index % 4. The element is
dropped where these 32 bits, unsigned, are below p * 2^32. All kernels, in C++ and Triton, draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.attention.spec import Dropout

_LOW = 0xFFFFFFFF
_ROUNDS = 10


def kept(dropout: Dropout, batch: int, heads: int, q_indices: Tensor, k_indices: Tensor) -> Tensor:
    """bool [batch, heads, queries, keys]: what is not dropped, of these tokens of the whole."""
    device = q_indices.device
    shape = (batch, heads, len(q_indices), len(k_indices))

    def along(values: Tensor, dim: int) -> Tensor:
        return values.to(torch.int64).view([-1 if d == dim else 1 for d in range(4)]).expand(shape)

    counter = [
        along(k_indices // 4, 3),
        along(q_indices, 2),
        along(torch.arange(heads, device=device) + dropout.first_head, 1),
        along(torch.arange(batch, device=device), 0),
    ]
    words = torch.stack(philox(counter, dropout.seed & _LOW, dropout.seed >> 32))
    bits = words.gather(0, along(k_indices % 4, 3).unsqueeze(0)).squeeze(0)
    return bits >= threshold(dropout.p)


def threshold(p: float) -> int:
    """Bits below it are dropped."""
    return min(int(p * 2**32), _LOW)


def philox(counter: list[Tensor], key0: int, key1: int) -> list[Tensor]:
    """Four words [...], int64 below 2^32, of four such words; one round mixes all of them."""
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, 0xD2511F53)
        high2, low2 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product; int64 wraps, so the halves of `b` are multiplied apart."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)
