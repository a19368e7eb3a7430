"""A rank's rows of a cache, dense or in pages, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor


class CacheRows(Protocol):
    """Keys or values of a batch."""

    def parts(self, texts: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        """The rows [start, stop) of these texts, at most `most` at a time: (first row, [texts, rows, heads, dim])."""
        ...


class DenseRows:
    """In [batch, capacity, heads, dim]; what is read is a view."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache

    def parts(self, texts: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        for at in range(start, stop, most):
            yield at, self._cache[texts, at : min(at + most, stop)]


class PagedRows:
    """In [pages, page_size, heads, dim]: row i of a text is row i % page_size of page `pages_of[text][i // page_size]`.

    One text at a time. What is read is a view where its pages lie one behind the other, else a copy.
    """

    def __init__(self, cache: Tensor, pages_of: Sequence[Sequence[int]]) -> None:
        self._cache, self._pages_of = cache, pages_of

    def parts(self, texts: slice, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        size, pages_of = self._cache.shape[1], self._pages_of[texts.start]
        at = start
        while at < stop:
            first = at // size
            end = min(stop, (first + max(1, most // size)) * size)
            pages = pages_of[first : -(-end // size)]
            if all(page == pages[0] + i for i, page in enumerate(pages)):
                found = self._cache[pages[0] : pages[0] + len(pages)]
            else:
                found = self._cache[torch.tensor(pages, device=self._cache.device)]
            yield at, found.flatten(0, 1)[at - first * size : end - first * size].unsqueeze(0)
            at = end
