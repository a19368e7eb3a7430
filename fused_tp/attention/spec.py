"""Who sees whom, in numbers of the whole sequence: causal, sliding window, packed documents, lengths that differ.

Every mask served here lets a query see one interval of keys, [start, stop), and both ends never go back from one query
to the next. So a mask is two ascending vectors, on any part of the queries and any part of the keys; no mask of S x S
is ever made, and what is empty or full is found by comparing ends.

A query stands at a *place* on the axis of the keys: the last query of a document at its last key, as in flash
attention. Where queries and keys have the same lengths, a query's place is its own index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNLIMITED = -1


@dataclass(frozen=True)
class AttentionMask:
    """The mask of one call, the same on all ranks.

    Attributes:
        seq_len, seq_len_kv: tokens of the whole sequence of queries, and of keys.
        causal: a query sees the keys up to its place.
        window: how many keys before and after its place a query sees besides that at its place; -1: no limit.
        cu_seqlens, cu_seqlens_kv: where documents begin, and where the last one ends: (0, ..., seq_len); a query sees
            keys of its own document only. Empty: one document; of the keys: the same documents as those of the queries.

    >>> mask = AttentionMask(4, 4, causal=True, window=(1, 0))
    >>> [list(map(int, ends)) for ends in mask.seen(np.arange(4))[1:]]
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

    def seen(self, queries: Ints) -> tuple[Ints, Ints, Ints]:
        """(place, start, stop) of each of these queries (ascending indices): it sees the keys [start, stop)."""
        begins, ends, shift = self._documents
        if self._has_documents:
            document = np.searchsorted(self._query_begins, queries, side="right") - 1
            places, starts, stops = queries + shift[document], begins[document], ends[document]
        else:
            places = queries + shift[0]
            starts, stops = np.full_like(places, begins[0]), np.full_like(places, ends[0])
        left, right = self.limits
        if left >= 0:
            starts = np.maximum(starts, places - left)
        if right >= 0:
            stops = np.minimum(stops, places + right + 1)
        return places, starts, np.maximum(starts, stops)

    @property
    def limits(self) -> tuple[int, int]:
        """`window`, with `causal` in it."""
        left, right = self.window
        return left, (0 if self.causal else right)

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.limits == (UNLIMITED, UNLIMITED) and not self._has_documents

    @property
    def is_one_piece(self) -> bool:
        """Whether it is a rectangle or a lower triangle: what any flash attention has."""
        unlimited = self.window == (UNLIMITED, UNLIMITED)
        return unlimited and not self._has_documents and (not self.causal or self.seq_len == self.seq_len_kv)

    @property
    def _has_documents(self) -> bool:
        return len(self.cu_seqlens) > 2

    @cached_property
    def _query_begins(self) -> Ints:
        return np.asarray((self.cu_seqlens or (0, self.seq_len))[:-1], dtype=np.int64)

    @cached_property
    def _documents(self) -> tuple[Ints, Ints, Ints]:
        """Of every document: its first key, the one behind its last, and what leads from a query to its place."""
        queries = np.asarray(self.cu_seqlens or (0, self.seq_len), dtype=np.int64)
        keys = np.asarray(self.cu_seqlens_kv or (0, self.seq_len_kv), dtype=np.int64)
        return keys[:-1], keys[1:], keys[1:] - queries[1:]


def check_cu_seqlens(name: str, cu_seqlens: Sequence[int], seq_len: int) -> None:
    """Raise ValueError unless these are the bounds of documents that make up `seq_len` tokens."""
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or bool((np.diff(bounds) < 0).any()):
        shown = ", ".join(map(str, cu_seqlens[:8])) + (", ..." if len(cu_seqlens) > 8 else "")
        raise ValueError(
            f"{name} is ({shown}); it must begin with 0, never go back, and end with the {seq_len} tokens of the whole "
            "sequence, those of all ranks. Padding behind the last document is one more document."
        )
