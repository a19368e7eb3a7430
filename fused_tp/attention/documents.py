"""Packed documents, what their tokens cost, and how one is cut in two with given tokens and work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# Small neighbours stay together up to this part of a rank's tokens, and of its work.
_BUNDLE = 1 / 32


class Piece(NamedTuple):
    """Tokens [start, hole_start) and [hole_stop, stop) of one document, or [start, stop) of neighbours.

    Where there is no hole, it is empty and stands at the end.
    """

    work: int
    tokens: int
    full: int  # work without a causal mask
    start: int
    hole_start: int
    hole_stop: int
    stop: int
    document: int  # -1: several

    @property
    def ranges(self) -> tuple[range, range]:
        return range(self.start, self.hole_start), range(self.hole_stop, self.stop)


class Cut(NamedTuple):
    """How one side gets a part of a piece: its outside, of which `head` tokens lie before the hole, or its inside.

    Or so with one run of a piece that has a hole, while the other run goes along or stays.
    """

    error: float
    piece: Piece
    outside: int
    head: int
    gets_outside: bool
    goes: Piece | None = None
    stays: Piece | None = None

    @property
    def even(self) -> bool:
        """Whether neither side gets a run more than it must."""
        return self.head in (0, self.outside)


class Documents:
    """What tokens cost."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        ends = np.asarray(bounds, dtype=np.int64)
        lengths = ends[1:] - ends[:-1]
        self.lengths = lengths.tolist()
        self.causal = [0, *np.cumsum(lengths * (lengths + 1) // 2).tolist()]
        self.full = [0, *np.cumsum(lengths * lengths).tolist()]

    def before(self, token: int) -> tuple[int, int]:
        """Work of all tokens before this one, with causal mask and without."""
        document = min(bisect_right(self.bounds, token), len(self.lengths)) - 1
        offset = token - self.bounds[document]
        return self.causal[document] + triangle(offset), self.full[document] + offset * self.lengths[document]

    def work(self, ranges: tuple[range, ...]) -> int:
        """With causal mask."""
        return sum(self.before(r.stop)[0] - self.before(r.start)[0] for r in ranges)

    def pieces(self, world_size: int) -> list[Piece]:
        """All documents that are not empty; small neighbours are one piece."""
        most_tokens = self.bounds[-1] / world_size * _BUNDLE
        most_work = self.causal[-1] / world_size * _BUNDLE
        pieces = []
        first, count = 0, len(self.bounds) - 1
        while first < count:
            start, causal, full = self.bounds[first], self.causal[first], self.full[first]
            most = min(bisect_right(self.bounds, start + most_tokens), bisect_right(self.causal, causal + most_work))
            last = max(most - 1, first + 1)
            stop = self.bounds[last]
            if stop > start:
                document = first if last == first + 1 else -1
                work = self.causal[last] - causal
                pieces.append(Piece(work, stop - start, self.full[last] - full, start, stop, stop, stop, document))
            first = last
        return pieces

    def piece(self, start: int, hole_start: int, hole_stop: int, stop: int, document: int) -> Piece:
        """The piece of these tokens; one with a single run ends where its hole begins."""
        if hole_start == hole_stop:
            hole_start = hole_stop = stop
        elif hole_start == start:
            start, hole_start, hole_stop = hole_stop, stop, stop
        elif hole_stop == stop:
            hole_stop = stop = hole_start
        work = full = 0
        for run in (range(start, hole_start), range(hole_stop, stop)):
            if run:
                (causal, whole), (causal_before, whole_before) = self.before(run.stop), self.before(run.start)
                work, full = work + causal - causal_before, full + whole - whole_before
        tokens = hole_start - start + stop - hole_stop
        return Piece(work, tokens, full, start, hole_start, hole_stop, stop, document)

    def cut(self, piece: Piece, tokens: int, work: float, allowed: float) -> Cut:
        """How to give one side this many tokens of a piece and nearly this work; if that is off by `allowed` at most,
        with few runs."""
        best = self._outside_or_inside(piece, tokens, work, allowed)
        if best.error > allowed and piece.hole_stop < piece.stop:
            runs = [self.piece(r.start, r.stop, r.stop, r.stop, piece.document) for r in piece.ranges]
            for run, other in (runs, runs[::-1]):
                if tokens <= run.tokens:
                    cut = self._outside_or_inside(run, tokens, work, allowed)._replace(stays=other)
                    best = min(best, cut, key=lambda cut: cut.error)
                if tokens >= other.tokens:
                    cut = self._outside_or_inside(run, tokens - other.tokens, work - other.work, allowed)
                    best = min(best, cut._replace(goes=other), key=lambda cut: cut.error)
        return best

    def _outside_or_inside(self, piece: Piece, tokens: int, work: float, allowed: float) -> Cut:
        cuts = [
            *self._cuts(piece, tokens, work, True),
            *self._cuts(piece, piece.tokens - tokens, piece.work - work, False),
        ]
        return min(cuts, key=lambda cut: (max(cut.error, allowed), not cut.even, cut.error))

    def _cuts(self, piece: Piece, outside: int, work: float, gets_outside: bool) -> list[Cut]:
        if piece.document < 0:
            all_head = self.before(piece.start + outside)[0] - self.before(piece.start)[0]
            return [Cut(abs(all_head - work), piece, outside, outside, gets_outside)]
        whole = piece.hole_stop == piece.stop
        left = piece.tokens if whole else piece.hole_start - piece.start
        right = piece.tokens if whole else piece.stop - piece.hole_stop
        least, most = max(0, outside - right), min(outside, left)
        # A token more of the head and one less of the tail: all such steps cost the same, the length of the inside.
        all_tail = outside * (piece.stop - self.bounds[piece.document]) - triangle(outside - 1)
        inside = piece.stop - piece.start - outside
        best = min(max(round((all_tail - work) / inside), least), most) if inside else most
        return [
            Cut(abs(all_tail - head * inside - work), piece, outside, head, gets_outside)
            for head in dict.fromkeys((least, most, best))
        ]

    def apart(self, cut: Cut) -> tuple[list[Piece], list[Piece]]:
        """What the one side gets, and what is left."""
        piece = cut.piece
        start, stop = piece.start + cut.head, piece.stop - (cut.outside - cut.head)
        outside = self.piece(piece.start, start, stop, piece.stop, piece.document)
        if piece.hole_stop == piece.stop:
            inside = self.piece(start, stop, stop, stop, piece.document)
        else:
            inside = self.piece(start, piece.hole_start, piece.hole_stop, stop, piece.document)
        gets, left = (outside, inside) if cut.gets_outside else (inside, outside)
        return [gets, *([cut.goes] if cut.goes else [])], [left, *([cut.stays] if cut.stays else [])]


def merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """Ascending, without empty ones, and with those that meet or overlap as one."""
    runs: list[range] = []
    for r in sorted((r for r in ranges if r), key=lambda r: r.start):
        if runs and runs[-1].stop >= r.start:
            last = runs.pop()
            r = range(last.start, max(last.stop, r.stop))
        runs.append(r)
    return tuple(runs)


def triangle(n: int) -> int:
    return n * (n + 1) // 2
