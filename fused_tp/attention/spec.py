"""Mask, scores and token layout of one attention call, independent of the kernel that computes it.

A mask defines the keys that a query sees, in global indices. Supported are causal masks, sliding windows, packed
documents, and numbers of keys that differ from the numbers of queries.

In every mask a query sees one interval of keys, [start, stop), and both ends ascend from query to query. So two
ascending vectors represent the mask of any subset of queries and keys. No S x S mask is built, and empty and full tiles
are found by comparing the ends.

The position of a query is on the axis of the keys. As in flash attention, the last query of a document is aligned to
the document's last key. If queries and keys have equal lengths, the position of a query is its own index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fused_tp.attention.layout import TokenLayout
from fused_tp.core.partition import SymInt
from fused_tp.core.pending import accumulate_dtype

Int64s = NDArray[np.int64]
UNLIMITED = -1  # a side of a window without a limit


@dataclass(frozen=True)
class AttentionMask:
    """Mask of one call, equal on all ranks.

    Attributes:
        seq_len, seq_len_kv: number of queries and of keys over all ranks.
        causal: True if a query sees only the keys up to its position.
        window: (left, right), the numbers of keys that a query sees before and after its position; -1: no limit.
        cu_seqlens, cu_seqlens_kv: start of each document and end of the last one: (0, ..., seq_len). A query sees only
            keys of its own document. Empty cu_seqlens: one document. Empty cu_seqlens_kv: the same as cu_seqlens.

    >>> mask = AttentionMask(4, 4, causal=True, window=(1, 0))
    >>> [list(map(int, ends)) for ends in mask.visible_intervals(np.arange(4))[1:]]
    [[0, 0, 1, 2], [1, 2, 3, 4]]
    """

    seq_len: int
    seq_len_kv: int
    causal: bool = False
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    cu_seqlens: tuple[int, ...] = ()
    cu_seqlens_kv: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.cu_seqlens and not self.cu_seqlens_kv:
            object.__setattr__(self, "cu_seqlens_kv", self.cu_seqlens)

    def visible_intervals(self, queries: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return (position, start, stop) of each of `queries` (ascending indices); a query sees keys [start, stop)."""
        key_starts, key_ends, offsets = self._document_bounds
        if self._has_documents:
            document = np.searchsorted(self._query_document_starts, queries, side="right") - 1
            q_positions, starts, stops = queries + offsets[document], key_starts[document], key_ends[document]
        else:
            q_positions = queries + offsets[0]
            starts, stops = np.full_like(q_positions, key_starts[0]), np.full_like(q_positions, key_ends[0])
        left, right = self.visible_window
        if left >= 0:
            starts = np.maximum(starts, q_positions - left)
        if right >= 0:
            stops = np.minimum(stops, q_positions + right + 1)
        return q_positions, starts, np.maximum(starts, stops)

    @property
    def visible_window(self) -> tuple[int, int]:
        """Return `window`, with 0 as its right side if the mask is `causal`."""
        left, right = self.window
        return left, (0 if self.causal else right)

    @property
    def is_single_tile(self) -> bool:
        """True if the mask is a rectangle or a lower triangle, which any flash attention supports."""
        is_unlimited = self.window == (UNLIMITED, UNLIMITED)
        return is_unlimited and not self._has_documents and (not self.causal or self.seq_len == self.seq_len_kv)

    @property
    def _has_documents(self) -> bool:
        return len(self.cu_seqlens) > 2

    @cached_property
    def _query_document_starts(self) -> Int64s:
        return np.asarray((self.cu_seqlens or (0, self.seq_len))[:-1], dtype=np.int64)

    @cached_property
    def _document_bounds(self) -> tuple[Int64s, Int64s, Int64s]:
        """(first key, end of keys, offset from a query's index to its position) of each document."""
        queries = np.asarray(self.cu_seqlens or (0, self.seq_len), dtype=np.int64)
        keys = np.asarray(self.cu_seqlens_kv or (0, self.seq_len_kv), dtype=np.int64)
        return keys[:-1], keys[1:], keys[1:] - queries[1:]


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities: sets each to 0 with probability p, and divides the kept ones by 1 - p.

    Only `seed` and the global indices of an element (batch row, head, query, key) decide if it is dropped, so the
    result does not depend on the number of ranks. The global head is `first_head` + the local head.

    All kernels draw the same bits. Philox4x32-10 with key (low word of seed, high word of seed) and counter
    (key index // 4, query index, head, batch row) returns four 32-bit words. An element is dropped if word
    (key index % 4) is below `threshold`. (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.)
    """

    p: float
    seed: int  # 63 bits
    first_head: int = 0

    @property
    def threshold(self) -> int:
        """Probability p as a 32-bit threshold: p * 2^32, clamped to 32 bits."""
        return min(int(self.p * 2**32), _WORD_MASK)

    def keep_mask(self, batch_size: int, num_heads: int, q_indices: Tensor, k_indices: Tensor) -> Tensor:
        """Return a mask, bool [batch_size, num_heads, queries, keys], that is False for dropped elements.

        `q_indices` and `k_indices` are global token indices.
        """
        device = q_indices.device
        shape = (batch_size, num_heads, len(q_indices), len(k_indices))

        def broadcast_along(values: Tensor, dim: int) -> Tensor:
            return values.to(torch.int64).view([-1 if d == dim else 1 for d in range(4)]).expand(shape)

        head = torch.arange(num_heads, device=device) + self.first_head
        counter = broadcast_along(k_indices // 4, 3), broadcast_along(q_indices, 2), broadcast_along(head, 1)
        words = _philox(
            *counter,
            broadcast_along(torch.arange(batch_size, device=device), 0),
            self.seed & _WORD_MASK,
            self.seed >> 32,
        )
        bits = torch.stack(words).gather(0, broadcast_along(k_indices % 4, 3).unsqueeze(0)).squeeze(0)
        return bits >= self.threshold


_WORD_MASK = 0xFFFFFFFF


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key0: int, key1: int) -> tuple[Tensor, ...]:
    """Return the four output words of Philox4x32-10 for the counter (c0, c1, c2, c3), as int64 tensors below 2^32."""
    for _ in range(10):
        high0, low0 = _wide_product(c0, 0xD2511F53)
        high2, low2 = _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _WORD_MASK, (key1 + 0xBB67AE85) & _WORD_MASK
    return c0, c1, c2, c3


def _wide_product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of the product of 32-bit words.

    `a` is multiplied by each half of `b`, so that no product overflows int64.
    """
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


@dataclass(frozen=True)
class ScoreParameters:
    """Function from q and k to a score: score = cap(scale * q.k) - slope[head] * |position of q - index of k|.

    (Press et al., ALiBi, arXiv:2108.12409; Gemma 2, arXiv:2408.00118; Xiao et al., arXiv:2309.17453; gpt-oss, 2025.)

    Attributes:
        softcap: cap(x) = softcap * tanh(x / softcap); 0.0: cap(x) = x.
        alibi_slopes: [heads], fp32 (fp64 for fp64); None: no ALiBi term.
        sinks: [heads], score of one extra key per head, with value 0. It is counted once in the softmax over the full
            sequence, not once per rank.
    """

    scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout: Dropout | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if a score is scale * q.k and nothing is dropped."""
        return self.softcap == 0.0 and self.alibi_slopes is None and self.dropout is None

    def select_heads(self, heads: slice) -> ScoreParameters:
        """Return the score function of the query heads `heads`."""
        slopes, sinks, dropout = self.alibi_slopes, self.sinks, self.dropout
        return replace(
            self,
            alibi_slopes=None if slopes is None else slopes[heads],
            sinks=None if sinks is None else sinks[heads],
            dropout=None if dropout is None else replace(dropout, first_head=dropout.first_head + heads.start),
        )


FILLED_BY_CHECK: Any = None
"""Default value (None) of fields that the argument check fills in."""


class AttentionArguments(NamedTuple):
    """Arguments of one call after q, k and v, with their default values.

    `ops.attention_arguments.checked_arguments` fills in the fields that are `FILLED_BY_CHECK`, and moves cu_seqlens to
    the CPU. The result is passed through torch.library. Only the op itself reads the values of cu_seqlens, so that
    torch.compile does not trace these reads.

    Attributes:
        window: after the check, [left, right].
        first_head: global index of q's first head.
        joined: `TokenLayout.num_joined_ranks`; 0 before the check.
    """

    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    seed: Tensor | None = None
    causal: bool = False
    window: list[int] = FILLED_BY_CHECK
    scale: float = FILLED_BY_CHECK
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_head: int = 0
    layout: str = "zigzag"
    joined: int = 0
    strided: bool = False
    seq_len: SymInt = FILLED_BY_CHECK
    seq_len_kv: SymInt = FILLED_BY_CHECK

    def __str__(self) -> str:
        return (
            f"causal={self.causal}, layout={str(self.token_layout)!r}, scale={self.scale!r}, "
            f"window={tuple(self.window)}, softcap={self.softcap!r}, dropout_p={self.dropout_p!r}, "
            f"seq_len_kv={self.seq_len_kv}"
        )

    @property
    def token_layout(self) -> TokenLayout:
        return TokenLayout(self.layout, self.joined, self.strided)

    def mask(self) -> AttentionMask:
        """Return the mask; reads and checks the values of cu_seqlens.

        Raises:
            ValueError: cu_seqlens does not start at 0, does not end at the sequence length, or decreases.
        """
        bounds = read_bounds("cu_seqlens", self.cu_seqlens, self.seq_len)
        bounds_kv = read_bounds("cu_seqlens_kv", self.cu_seqlens_kv, self.seq_len_kv)
        if bounds and not bounds_kv:
            if self.seq_len_kv != self.seq_len:
                raise ValueError(
                    f"cu_seqlens covers the {self.seq_len} queries, but there are {self.seq_len_kv} keys. Pass "
                    "cu_seqlens_kv, the document bounds of the keys."
                )
            bounds_kv = bounds
        if len(bounds) != len(bounds_kv):
            raise ValueError(
                f"cu_seqlens has {max(0, len(bounds) - 1)} documents, but cu_seqlens_kv has {len(bounds_kv) - 1}. The "
                "numbers of documents must be equal: a query sees the keys of its own document."
            )
        left, right = self.window
        return AttentionMask(self.seq_len, self.seq_len_kv, self.causal, (left, right), bounds, bounds_kv)

    def score_parameters(self, dtype: torch.dtype) -> ScoreParameters:
        """Return the score function of the call, for q, k and v of dtype `dtype`."""
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.to(accumulate_dtype(dtype))
        dropout = None if self.seed is None else Dropout(self.dropout_p, int(self.seed.item()), self.first_head)
        return ScoreParameters(self.scale, self.softcap, slopes, dropout, self.sinks)


def read_bounds(name: str, cu_seqlens: Tensor | None, seq_len: int) -> tuple[int, ...]:
    """Return the values of `cu_seqlens`, a CPU tensor; () for None.

    >>> read_bounds("cu_seqlens", torch.tensor([0, 3, 3, 8]), 8)
    (0, 3, 3, 8)

    Raises:
        ValueError: the values are not (0, ..., seq_len) in ascending order.
    """
    if cu_seqlens is None:
        return ()
    bounds = tuple(cu_seqlens.tolist())
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or sorted(bounds) != list(bounds):
        shown_bounds = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
        raise ValueError(
            f"{name} is ({shown_bounds}); it must begin with 0, must not decrease, and must end with {seq_len}, the "
            "number of tokens on all ranks. If there is padding after the last document, add it as one more document."
        )
    return bounds
