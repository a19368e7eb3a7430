"""A rank's rows of a key or value cache, dense or paged, and the exchange that sends new tokens to their owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.layout import BlockCyclicLayout, Int64s, TokenRanges
from fused_tp.backends.registry import ALL_TO_ALL, select_schedule
from fused_tp.core import settings
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.group import Group
from fused_tp.core.pending import check_equal_checksums, checksum


class CacheRows(Protocol):
    """Rows of the cached keys or values of a batch that this rank holds."""

    def read_blocks(self, seqs: slice, start: int, stop: int, max_rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, tensor [seqs, rows, heads, dim]) for the rows [start, stop) of the sequences `seqs`.

        Each tensor has at most `max_rows` rows, or one page if pages are larger: a page is not split.
        """
        ...


class DenseRows:
    """Rows stored as [batch, capacity, heads, dim]; `read_blocks` yields views."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache

    def read_blocks(self, seqs: slice, start: int, stop: int, max_rows: int) -> Iterator[tuple[int, Tensor]]:
        for row in range(start, stop, max_rows):
            yield row, self._cache[seqs, row : min(row + max_rows, stop)]


class PagedRows:
    """Rows stored as [pages, page_size, heads, dim].

    Row i of a sequence is row i % page_size of page `page_table[seq][i // page_size]`.

    `read_blocks` reads one sequence at a time. It yields a view if the pages are contiguous, else a copy.
    """

    def __init__(self, cache: Tensor, page_table: Sequence[Sequence[int]]) -> None:
        self._cache, self._page_table = cache, page_table

    def read_blocks(self, seqs: slice, start: int, stop: int, max_rows: int) -> Iterator[tuple[int, Tensor]]:
        page_size, sequence_pages = self._cache.shape[1], self._page_table[seqs.start]
        row = start
        while row < stop:
            first_page = row // page_size
            end = min(stop, (first_page + max(1, max_rows // page_size)) * page_size)
            pages = sequence_pages[first_page : -(-end // page_size)]
            if all(page == pages[0] + i for i, page in enumerate(pages)):
                block = self._cache[pages[0] : pages[0] + len(pages)]
            else:
                block = self._cache[torch.tensor(pages, dtype=torch.int64, device=self._cache.device)]
            yield row, block.flatten(0, 1)[row - first_page * page_size : end - first_page * page_size].unsqueeze(0)
            row = end


def scatter_new_tokens(
    group: Group, block_size: int, tokens: tuple[TokenRanges, ...], num_cached: int, rows: Tensor, keywords_text: str
) -> tuple[Int64s, Tensor]:
    """Send `rows` [n, ...] of this rank's new tokens to the ranks that store them, in one all-to-all.

    `tokens` are the new tokens of each rank, counted from `num_cached`, the number of tokens already in the cache.
    `keywords_text` names the arguments that determine `tokens`, for the check that they are equal on all ranks.
    Returns the cache indices of the tokens that arrived, in any order, and their rows.

    Raises:
        RankMismatchError: ranks differ in `keywords_text`, `num_cached` or `block_size`. Always checked on CPU; on
            other devices only with FUSED_TP_CHECK=1.
    """
    layout = BlockCyclicLayout(group.size, group.rank, block_size)
    token_indices = [num_cached + rank_tokens.indices for rank_tokens in tokens]
    owners = [layout.owners(indices) for indices in token_indices]
    order = np.argsort(owners[group.rank], kind="stable")
    send_counts = np.bincount(owners[group.rank], minlength=group.size).tolist()
    receive_counts = [int((rank_owners == group.rank).sum()) for rank_owners in owners]
    received_indices = np.concatenate(
        [indices[rank_owners == group.rank] for indices, rank_owners in zip(token_indices, owners, strict=True)]
    )
    sorted_rows = rows[torch.from_numpy(order).to(rows.device)]
    # Code that may raise on one rank only must run before this first exchange: after it, the peers of a rank that has
    # raised would wait for that rank in the second exchange.
    _check_same_keywords(group, f"{keywords_text}, {num_cached} cached tokens and block={block_size}", rows)
    return received_indices, _all_to_all_rows(
        group, sorted_rows, send_counts, receive_counts, sum(map(len, token_indices))
    )


def _check_same_keywords(group: Group, keywords_text: str, rows: Tensor) -> None:
    """Raise RankMismatchError if `keywords_text` differs between ranks, which would store rows for wrong tokens."""
    if group.size == 1 or not (rows.device.type == "cpu" or settings.check_ranks()):
        return
    own_checksum = torch.full((1, 1), checksum(keywords_text), dtype=torch.float32, device=rows.device)
    schedule = select_schedule(
        ScheduleKey("all_gather", own_checksum.dtype, own_checksum.device, group.size, None, 1), group
    )
    checksums = schedule.all_gather(own_checksum, gather_dim=0, gather_size=None).wait().flatten().tolist()
    difference = "append to the same cache with different keywords"
    check_equal_checksums(
        checksums, difference, f"; rank {group.rank} passed {keywords_text}. Pass the same on all ranks."
    )


def _all_to_all_rows(
    group: Group, x: Tensor, send_counts: list[int], receive_counts: list[int], total_rows: int
) -> Tensor:
    """Send the rows of `x`, sorted by destination rank. Return the rows received, sorted by source rank.

    `send_counts` and `receive_counts` are row counts per rank, and `total_rows` is the number of rows over all ranks.
    """
    key = ScheduleKey(ALL_TO_ALL, x.dtype, x.device, total_rows, None, prod(x.shape[1:]))
    return select_schedule(key, group).all_to_all(x, send_counts, receive_counts)
