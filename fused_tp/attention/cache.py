"""A rank's rows of a key or value cache, dense or paged, and the exchange that sends new tokens to their owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.layout import BlockCyclicLayout, Ints, Tokens
from fused_tp.backends.registry import ALL_TO_ALL, select_schedule
from fused_tp.core import settings
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.group import Group
from fused_tp.core.pending import check_equal_checksums, checksum


class CacheRows(Protocol):
    """Rows of the cached keys or values of a batch that this rank holds."""

    def parts(self, seqs: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, tensor [seqs, rows, heads, dim]) for the rows [start, stop) of the sequences `seqs`.

        Each tensor has at most `most` rows, or one page if pages are larger: a page is not split.
        """
        ...


class DenseRows:
    """Rows stored as [batch, capacity, heads, dim]; `parts` yields views."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache

    def parts(self, seqs: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        for at in range(start, stop, most):
            yield at, self._cache[seqs, at : min(at + most, stop)]


class PagedRows:
    """Rows stored as [pages, page_size, heads, dim]: row i of a sequence is row i % page_size of page
    `pages_of[seq][i // page_size]`.

    `parts` reads one sequence at a time. It yields a view if the pages are contiguous, else a copy.
    """

    def __init__(self, cache: Tensor, pages_of: Sequence[Sequence[int]]) -> None:
        self._cache, self._pages_of = cache, pages_of

    def parts(self, seqs: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        size, pages_of = self._cache.shape[1], self._pages_of[seqs.start]
        at = start
        while at < stop:
            first = at // size
            end = min(stop, (first + max(1, most // size)) * size)
            pages = pages_of[first : -(-end // size)]
            if all(page == pages[0] + i for i, page in enumerate(pages)):
                found = self._cache[pages[0] : pages[0] + len(pages)]
            else:
                found = self._cache[torch.tensor(pages, dtype=torch.int64, device=self._cache.device)]
            yield at, found.flatten(0, 1)[at - first * size : end - first * size].unsqueeze(0)
            at = end


def scatter_new_tokens(
    group: Group, block: int, tokens: tuple[Tokens, ...], first: int, rows: Tensor, keywords: str
) -> tuple[Ints, Tensor]:
    """Send `rows` [n, ...] of this rank's new tokens to the ranks that own them, in one all-to-all.

    `tokens` are the new tokens of each rank, counted from `first`, the number of tokens already in the cache.
    `keywords` is a text of the arguments that determine `tokens`, for the check that they are equal on all ranks.
    Returns the cache indices of the tokens that arrived, in any order, and their rows.

    Raises:
        RankMismatchError: ranks differ in `keywords`, `first` or `block`. Always checked on CPU; checked on other
            devices only with FUSED_TP_CHECK=1.
    """
    layout = BlockCyclicLayout(group.size, group.rank, block)
    held = [first + one.indices for one in tokens]
    owners = [layout.owners(indices) for indices in held]
    order = np.argsort(owners[group.rank], kind="stable")
    send = np.bincount(owners[group.rank], minlength=group.size).tolist()
    receive = [int((theirs == group.rank).sum()) for theirs in owners]
    arriving = np.concatenate([indices[theirs == group.rank] for indices, theirs in zip(held, owners, strict=True)])
    leaving = rows[torch.from_numpy(order).to(rows.device)]
    # Code that may raise on one rank only must run before this first exchange: after it, the peers of a rank that has
    # raised would wait for that rank in the second exchange.
    _check_same_keywords(group, f"{keywords}, {first} cached tokens and block={block}", rows)
    return arriving, _exchange(group, leaving, send, receive, sum(map(len, held)))


def _check_same_keywords(group: Group, keywords: str, rows: Tensor) -> None:
    """Raise unless `keywords` is the same on all ranks. If it is not, ranks would assign rows to the wrong tokens."""
    if group.size == 1 or not (rows.device.type == "cpu" or settings.check_ranks()):
        return
    mine = torch.full((1, 1), checksum(keywords), dtype=torch.float32, device=rows.device)
    schedule = select_schedule(ScheduleKey("all_gather", mine.dtype, mine.device, group.size, None, 1), group)
    checksums = schedule.all_gather(mine, gather_dim=0, gather_size=None).wait().flatten().tolist()
    did = "append to the same cache with different keywords"
    check_equal_checksums(checksums, did, f"; rank {group.rank} passed {keywords}. Pass the same on all ranks.")


def _exchange(group: Group, x: Tensor, send: list[int], receive: list[int], total: int) -> Tensor:
    """All-to-all of `x`, rows sorted by destination rank. Return the rows received, sorted by source rank.

    `send` and `receive` are row counts per rank, and `total` is the number of rows over all ranks.
    """
    key = ScheduleKey(ALL_TO_ALL, x.dtype, x.device, total, None, prod(x.shape[1:]))
    return select_schedule(key, group).all_to_all(x, send, receive)
