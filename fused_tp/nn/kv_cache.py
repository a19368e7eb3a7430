"""Keys and values of the tokens that attention has seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.nn.linear import check_positive
from fused_tp.ops.arguments import autocast_dtype, cast, check_tensor


class KVCache:
    """One attention layer's keys and values on this rank, [batch, length, kv_heads / W, head_dim].

    Args:
        max_length: room for this many tokens is allocated at once and never moves (static); None lets the cache grow,
            by doubling, so that a token costs a constant time on average.

    Raises:
        ValueError: more tokens than `max_length`; keys and values that do not fit each other or what is held; use while
            autograd records.

    Example:
        >>> cache = KVCache(max_length=2048)
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache)           # [1, 100, hidden]
        ...     y = attention(next_token, kv_cache=cache)       # [1, 1, hidden], sees 101 tokens
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None:
            check_positive("max_length", max_length)
        self.max_length = max_length
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v [batch, new, heads, head_dim]; returns views of all keys and values, oldest first."""
        for name, t in (("k", k), ("v", v)):
            check_tensor(name, t)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a KVCache is written in place, which autograd cannot follow; generate under torch.no_grad()."
            )
        dtype = autocast_dtype(k)
        if dtype is not None:
            k, v = cast(dtype, k, v)  # rotary embeddings leave k in another dtype than v
        if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(
                f"k and v must be alike, [batch, new, heads, head_dim]; got {tuple(k.shape)} {k.dtype} and "
                f"{tuple(v.shape)} {v.dtype}."
            )
        start, stop = self.length, self.length + k.shape[1]
        keys, values = self._reserve(k, stop)
        keys[:, start:stop] = k
        values[:, start:stop] = v
        self.length = stop
        return keys[:, :stop], values[:, :stop]

    def reset(self) -> None:
        """Forgets all tokens; the memory is kept for the next sequence of the same batch."""
        self.length = 0

    def _reserve(self, k: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"the KVCache has room for max_length={self.max_length} tokens and {needed} are needed; make it "
                "longer, or leave max_length out to let it grow."
            )
        keys, values = self._keys, self._values
        if keys is not None and values is not None:
            held = (keys.shape[0], *keys.shape[2:])
            if held != (k.shape[0], *k.shape[2:]) or keys.dtype != k.dtype:
                if self.length > 0:
                    raise ValueError(
                        f"the KVCache holds keys of (batch, heads, head_dim) = {held}, {keys.dtype}, and got "
                        f"{(k.shape[0], *k.shape[2:])}, {k.dtype}; reset() it before another batch."
                    )
                keys = values = None
            elif needed <= keys.shape[1]:
                return keys, values
        capacity = self.max_length or max(needed, 2 * self.length, 16)
        shape = (k.shape[0], capacity, *k.shape[2:])
        self._keys, self._values = k.new_empty(shape), k.new_empty(shape)
        if keys is not None and values is not None:
            self._keys[:, : self.length] = keys[:, : self.length]
            self._values[:, : self.length] = values[:, : self.length]
        return self._keys, self._values
