"""Sharing packed documents out: equally many tokens and nearly equal attention work for every rank.

With a causal mask the token at offset o of its document costs o + 1, without one the document's length. Ranks are halved
again and again, and the documents with them: each half gets its number of tokens exactly and its share of the work as
nearly as may be. In a halving

    whole documents, dearest first, go to the side that keeps the sums of tokens and of work closest to their shares
        (largest first: Graham, "Bounds on multiprocessing timing anomalies", 1969; here in two dimensions), and
    what is left is settled by a swap of two documents or by cutting one: one side gets the outside of it, h tokens of its
        head and g of its tail, the other the inside. Tokens say h + g, and the work is linear in h, so both come out.

A document that no side can take is cut from the start, so that one sequence becomes the 2W pieces of zigzag, and a
document that all ranks share is cut like zigzag too, wherever its middle lies. All others stay whole, which moves
nothing. Neighbours that are small are dealt out together. (Related: MagiAttention, 2025, deals out chunks of one fixed
size by work; chunks cut every document and are as many as they are small.)

Guaranteed: the sizes of torch.tensor_split, the first total % W ranks have one token more; the same result for the same
arguments; and no rank with more work than zigzag over the whole packed stream gives its dearest rank. That the work is
within some percent of the mean is measured, not proven (tests hold it); it cannot be where a single token costs more
than a share, or where tokens are few.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

# How far a rank may be off its share of the work by one halving, with causal mask and without, in parts of the share.
_CAUSAL, _FULL = 0.001, 0.01
# Small neighbours stay together up to these parts of a rank's tokens and work.
_BUNDLE_TOKENS, _BUNDLE_WORK = 1 / 32, 1 / 64
_CANDIDATES = 8


def balanced_ranges(cu_seqlens: tuple[int, ...], world_size: int) -> list[tuple[range, ...]]:
    """The tokens of every rank, as ascending ranges of the packed sequence.

    >>> balanced_ranges((0, 4, 8, 12), 2)
    [(range(0, 5), range(7, 8)), (range(5, 7), range(8, 12))]
    """
    documents = _Documents(cu_seqlens)
    size, longer = divmod(cu_seqlens[-1], world_size)
    sizes = [size + (rank < longer) for rank in range(world_size)]
    held: list[list[_Piece]] = [[] for _ in sizes]
    waiting = [(documents.pieces(world_size), 0, world_size)]
    while waiting:
        pieces, first, ranks = waiting.pop()
        if ranks == 1:
            held[first] = pieces
            continue
        few = ranks // 2
        here, there = _halve(documents, pieces, few, ranks - few, sum(sizes[first : first + few]))
        waiting += [(here, first, few), (there, first + few, ranks - few)]
    balanced = [_merged([r for piece in pieces for r in piece.ranges]) for pieces in held]
    zigzag = _zigzag(sizes)
    return min(balanced, zigzag, key=lambda ranges: max(map(documents.work, ranges)))


class _Piece(NamedTuple):
    """Tokens [start, hole_start) and [hole_stop, stop) of one document, or, without a hole, of neighbours."""

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


class _Cut(NamedTuple):
    """How one side gets a part of a piece: the outside of it, of which `head` tokens lie before the hole, or the inside.
    Or so with one run of the piece, while the other run goes along or stays."""

    error: float
    piece: _Piece
    outside: int
    head: int
    gets_outside: bool
    goes: _Piece | None = None
    stays: _Piece | None = None

    @property
    def even(self) -> bool:
        """Whether neither side gets a run more than it must."""
        return self.head in (0, self.outside)


class _Documents:
    """What tokens cost."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        lengths = np.diff(np.asarray(bounds, dtype=np.int64))
        self.lengths = lengths.tolist()
        self.causal = [0, *np.cumsum(lengths * (lengths + 1) // 2).tolist()]
        self.full = [0, *np.cumsum(lengths * lengths).tolist()]

    def before(self, token: int) -> tuple[int, int]:
        """Work of all tokens before this one, with causal mask and without."""
        document = min(bisect_right(self.bounds, token), len(self.lengths)) - 1
        offset = token - self.bounds[document]
        return self.causal[document] + _triangle(offset), self.full[document] + offset * self.lengths[document]

    def work(self, ranges: tuple[range, ...]) -> int:
        """With causal mask."""
        return sum(self.before(r.stop)[0] - self.before(r.start)[0] for r in ranges)

    def pieces(self, world_size: int) -> list[_Piece]:
        """All documents that are not empty; small neighbours are one piece."""
        most_tokens = self.bounds[-1] / world_size * _BUNDLE_TOKENS
        most_work = self.causal[-1] / world_size * _BUNDLE_WORK
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
                pieces.append(_Piece(work, stop - start, self.full[last] - full, start, stop, stop, stop, document))
            first = last
        return pieces

    def piece(self, start: int, hole_start: int, hole_stop: int, stop: int, document: int) -> _Piece:
        if hole_start == start:
            start = hole_start = hole_stop
        if hole_stop == stop or hole_start == hole_stop:
            stop = stop if hole_start == hole_stop else hole_start
            hole_start = hole_stop = stop
        (a, a_full), (b, b_full) = self.before(start), self.before(hole_start)
        (c, c_full), (d, d_full) = (self.before(hole_stop), self.before(stop)) if hole_stop < stop else ((0, 0), (0, 0))
        tokens = hole_start - start + stop - hole_stop
        work, full = b - a + d - c, b_full - a_full + d_full - c_full
        return _Piece(work, tokens, full, start, hole_start, hole_stop, stop, document)

    def cut(self, piece: _Piece, tokens: int, work: float, allowed: float) -> _Cut:
        """How to give one side this many tokens of a piece and nearly this work; within `allowed` fewer runs are better."""
        best = self._outside_or_inside(piece, tokens, work, allowed)
        if best.error > allowed and piece.hole_stop < piece.stop:
            runs = [
                self.piece(piece.start, piece.hole_start, piece.hole_start, piece.hole_start, piece.document),
                self.piece(piece.hole_stop, piece.stop, piece.stop, piece.stop, piece.document),
            ]
            for run, other in (runs, runs[::-1]):
                if tokens <= run.tokens:
                    cut = self._outside_or_inside(run, tokens, work, allowed)._replace(stays=other)
                    best = min(best, cut, key=lambda cut: cut.error)
                if tokens >= other.tokens:
                    cut = self._outside_or_inside(run, tokens - other.tokens, work - other.work, allowed)
                    best = min(best, cut._replace(goes=other), key=lambda cut: cut.error)
        return best

    def _outside_or_inside(self, piece: _Piece, tokens: int, work: float, allowed: float) -> _Cut:
        cuts = [
            *self._cuts(piece, tokens, work, True),
            *self._cuts(piece, piece.tokens - tokens, piece.work - work, False),
        ]
        return min(cuts, key=lambda cut: (max(cut.error, allowed), not cut.even, cut.error))

    def _cuts(self, piece: _Piece, outside: int, work: float, gets_outside: bool) -> list[_Cut]:
        if piece.document < 0:
            all_head = self.before(piece.start + outside)[0] - self.before(piece.start)[0]
            return [_Cut(abs(all_head - work), piece, outside, outside, gets_outside)]
        whole = piece.hole_stop == piece.stop
        left = piece.tokens if whole else piece.hole_start - piece.start
        right = piece.tokens if whole else piece.stop - piece.hole_stop
        least, most = max(0, outside - right), min(outside, left)
        # A token more of the head and one less of the tail: all such steps cost the same, the length of the inside.
        all_tail = outside * (piece.stop - self.bounds[piece.document]) - _triangle(outside - 1)
        inside = piece.stop - piece.start - outside
        best = min(max(round((all_tail - work) / inside), least), most) if inside else most
        return [
            _Cut(abs(all_tail - head * inside - work), piece, outside, head, gets_outside)
            for head in {least, most, best}
        ]

    def apart(self, cut: _Cut) -> tuple[list[_Piece], list[_Piece]]:
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


class _Side:
    """What one half has, and what it should have."""

    def __init__(self, tokens: int, work: float, full: float) -> None:
        self.pieces: list[_Piece] = []
        self.tokens, self.work, self.full = tokens, work, full  # still wanted

    def add(self, *pieces: _Piece) -> None:
        for piece in pieces:
            if piece.tokens:
                self.pieces.append(piece)
                self.tokens -= piece.tokens
                self.work -= piece.work
                self.full -= piece.full

    def remove(self, piece: _Piece) -> None:
        self.pieces.remove(piece)
        self.tokens += piece.tokens
        self.work += piece.work
        self.full += piece.full


class _Halving:
    """One way to share pieces out to two sides."""

    def __init__(self, documents: _Documents, pieces: list[_Piece], few: int, many: int, tokens: int) -> None:
        self.documents, self.pieces = documents, pieces
        self.part = part = few / (few + many)
        self.all_tokens = sum(piece.tokens for piece in pieces)
        self.all_work = sum(piece.work for piece in pieces)
        all_full = sum(piece.full for piece in pieces)
        self.here = _Side(tokens, part * self.all_work, part * all_full)
        self.there = _Side(self.all_tokens - tokens, (1 - part) * self.all_work, (1 - part) * all_full)
        self.work_allowed = part * self.all_work * _CAUSAL or 1.0
        self.full_allowed = part * all_full * _FULL or 1.0

    def error(self, work: float, full: float) -> float:
        """1.0 is what is allowed."""
        return max(abs(work) / self.work_allowed, abs(full) / self.full_allowed)

    def run(self, cut: int) -> float:
        """Share out, with the `cut` dearest pieces cut whatever happens; how far off the work is then."""
        for piece in self.pieces[1:cut]:
            tokens = round(self.part * piece.tokens)
            mine, others = self.documents.apart(self.documents.cut(piece, tokens, self.part * piece.work, 0.0))
            self.here.add(*mine)
            self.there.add(*others)
        self.deal(self.pieces[cut:], self.pieces[0] if cut else None)
        if cut:
            self.there.add(self.pieces[0])
        self.settle(self.pieces[0] if cut else None)
        return self.error(self.here.work, self.here.full)

    def deal(self, pieces: list[_Piece], later: _Piece | None) -> None:
        """Whole pieces, to the side that brings the sums nearer to the shares. Of tokens it counts those beyond what is
        usual for their work in the piece that will be cut to settle it: then this is cut evenly."""
        part = self.part
        per_work, per_token = 1 / self.all_work, 1 / self.all_tokens
        usual = later.tokens / later.work * per_token if later else 0.0
        lean = (1 - 2 * part) / 2
        work = tokens = 0.0
        for piece in pieces:
            w, t = piece.work * per_work, piece.tokens * per_token - piece.work * usual
            if work * w + tokens * t + lean * (w * w + t * t) <= 0:
                self.here.add(piece)
                work += (1 - part) * w
                tokens += (1 - part) * t
            else:
                self.there.add(piece)
                work -= part * w
                tokens -= part * t

    def settle(self, first: _Piece | None) -> None:
        """Give both sides their tokens exactly, and their work as nearly as can be."""
        while self.here.tokens:
            giver, taker = (self.there, self.here) if self.here.tokens > 0 else (self.here, self.there)
            if first is None and self.swap(giver, taker):
                return
            tokens = taker.tokens
            able = [piece for piece in giver.pieces if piece.tokens >= tokens]
            if not able:
                largest = max(giver.pieces, key=lambda piece: piece.tokens)
                giver.remove(largest)
                taker.add(largest)
                continue
            step = max(1, len(able) // _CANDIDATES)
            candidates = able[::step]
            if first in able:
                candidates.insert(0, first)
            best, least = None, float("inf")
            for piece in candidates:
                cut = self.documents.cut(piece, tokens, taker.work, self.work_allowed)
                error = self.error(cut.error, taker.full - tokens * piece.full / piece.tokens)
                if error < least:
                    best, cut_piece, least = cut, piece, error
                if least <= 1:
                    break
            giver.remove(cut_piece)
            mine, others = self.documents.apart(best)
            taker.add(*mine)
            giver.add(*others)

    def swap(self, giver: _Side, taker: _Side) -> bool:
        """Whether moving one whole piece, perhaps for another one, settled it."""
        wanted = taker.tokens
        by_tokens = {piece.tokens: piece for piece in taker.pieces}
        best, least = None, 1.0
        for piece in giver.pieces:
            back = by_tokens.get(piece.tokens - wanted)
            if back is not None:
                error = self.error(taker.work - piece.work + back.work, taker.full - piece.full + back.full)
            elif piece.tokens == wanted:
                error = self.error(taker.work - piece.work, taker.full - piece.full)
            else:
                continue
            if error <= least:
                best, least = (piece, back), error
        if best is None:
            return False
        piece, back = best
        giver.remove(piece)
        taker.add(piece)
        if back is not None:
            taker.remove(back)
            giver.add(back)
        return True


def _halve(
    documents: _Documents, pieces: list[_Piece], few: int, many: int, tokens: int
) -> tuple[list[_Piece], list[_Piece]]:
    """The pieces of `few` ranks, which get this many tokens, and of `many` others."""
    pieces = sorted(pieces, reverse=True)
    if not pieces:
        return [], []
    best, least = None, float("inf")
    # A piece that is too dear for the smaller side is going to be cut.
    cut = int(pieces[0].work * (few + many) > few * sum(piece.work for piece in pieces))
    while True:
        halving = _Halving(documents, pieces, few, many, tokens)
        error = halving.run(cut)
        if error < least:
            best, least = halving, error
        if least <= 1 or cut >= len(pieces):
            break
        cut = min(max(1, 2 * cut), len(pieces))
    assert best is not None
    return best.here.pieces, best.there.pieces


def _zigzag(sizes: list[int]) -> list[tuple[range, ...]]:
    """Zigzag over the whole, by ranks as many tokens as `sizes` say."""
    chunks = 2 * len(sizes)
    total = sum(sizes)
    bounds = [index * (total // chunks) + min(index, total % chunks) for index in range(chunks + 1)]
    held = [
        _merged([range(bounds[i], bounds[i + 1]), range(bounds[chunks - 1 - i], bounds[chunks - i])])
        for i in range(len(sizes))
    ]
    return sorted(held, key=lambda ranges: -sum(map(len, ranges)))


def _merged(ranges: list[range]) -> tuple[range, ...]:
    """Ascending, without empty ones, and with neighbours as one."""
    merged: list[range] = []
    for r in sorted((r for r in ranges if r), key=lambda r: r.start):
        if merged and merged[-1].stop == r.start:
            r = range(merged.pop().start, r.stop)
        merged.append(r)
    return tuple(merged)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
