"""Distribution of packed documents over ranks: equal token counts and nearly equal attention work.

With a causal mask the token at offset o of its document costs o + 1; without a mask it costs the document's length. The
ranks, and the documents with them, are halved recursively. Each half gets its exact number of tokens and approximately
its share of the work:

1. Unsplit documents are assigned, most expensive first. Each is assigned to the side where it brings the sums of tokens
   and of work closer to the shares (largest first: Graham, "Bounds on multiprocessing timing anomalies", 1969; here in
   two dimensions).
2. The remaining difference is removed by moving one document, swapping two, or cutting one. A cut assigns the outside
   of the document (h tokens of its head and g of its tail) to one side and the inside to the other. The sum h + g sets
   the number of tokens. For a fixed sum the work is linear in h, so a cut can meet both targets.

A document that is too expensive for a side is cut first. A single sequence thus becomes the 2W chunks of zigzag, and a
long document becomes nested shells on as many neighboring ranks as it needs. All other documents stay on one rank, and
need no communication. Small neighboring documents are distributed together. (MagiAttention, 2025, distributes chunks
of one size by their work: there documents longer than a chunk are always split.)

Guaranteed:
- the token counts of torch.tensor_split, where the first total % W ranks have one more token;
- the same result for the same arguments;
- the busiest rank has no more work than the busiest rank of zigzag over the packed stream.

Not guaranteed is how close each rank's work is to the mean: tests measure deviations within 1% for Zipf and uniform
lengths. If a single token costs as much as a rank's share, the deviation is necessarily large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# Allowed deviation of a rank's work from its share, as a fraction of the share, summed over all halvings: with a causal
# mask and without a mask. Cutting more documents could reduce the deviation, but uncut documents need no communication.
_CAUSAL, _FULL = 0.01, 0.1
_CANDIDATES = 8  # number of documents tried for a cut
# Neighboring documents are bundled into one piece up to this fraction of a rank's tokens and of its work.
_BUNDLE = 1 / 32


class Piece(NamedTuple):
    """Tokens [start, hole_start) and [hole_stop, stop) of one document, or [start, stop) of neighboring documents.

    Without a hole, hole_start = hole_stop = stop.
    """

    work: int
    tokens: int
    full: int  # work without a causal mask
    start: int
    hole_start: int
    hole_stop: int
    stop: int
    document: int  # index of the document; -1: several documents

    @property
    def ranges(self) -> tuple[range, range]:
        return range(self.start, self.hole_start), range(self.hole_stop, self.stop)


class PieceCut(NamedTuple):
    """Split of a piece between two sides, the taker and the giver.

    One side gets `outside` tokens from the two ends of the piece, `head` of them from its start. The other side gets
    the inside. `gets_outside` is True if the taker gets the outside. If the piece has a hole, the split may be of one
    of its two runs. The other run is then moved to the taker (`goes`) or left with the giver (`stays`).
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
        """True if the outside is at one end of the piece only, so that neither side gets an extra run of tokens."""
        return self.head in (0, self.outside)


class Documents:
    """Attention cost per token of packed documents."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        ends = np.asarray(bounds, dtype=np.int64)
        lengths = ends[1:] - ends[:-1]
        self.lengths = lengths.tolist()
        self.causal = [0, *np.cumsum(lengths * (lengths + 1) // 2).tolist()]
        self.full = [0, *np.cumsum(lengths * lengths).tolist()]

    def before(self, token: int) -> tuple[int, int]:
        """Work of all tokens before index `token`: (with a causal mask, without a mask)."""
        document = min(bisect_right(self.bounds, token), len(self.lengths)) - 1
        offset = token - self.bounds[document]
        return self.causal[document] + triangle(offset), self.full[document] + offset * self.lengths[document]

    def work(self, ranges: tuple[range, ...]) -> int:
        """Work of the tokens in `ranges` with a causal mask."""
        return sum(self.before(r.stop)[0] - self.before(r.start)[0] for r in ranges)

    def pieces(self, world_size: int) -> list[Piece]:
        """Return the pieces of all non-empty documents. Small neighboring documents form one piece."""
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
        """Build the piece of tokens [start, hole_start) and [hole_stop, stop); an empty hole is moved to the end."""
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

    def cut(self, piece: Piece, tokens: int, work: float, allowed: float) -> PieceCut:
        """Find the cut that moves exactly `tokens` tokens and approximately `work` from `piece` to the taker.

        Among cuts whose work deviates by at most `allowed`, prefer those that create few runs of tokens.
        """
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

    def _outside_or_inside(self, piece: Piece, tokens: int, work: float, allowed: float) -> PieceCut:
        cuts = [
            *self._cuts(piece, tokens, work, True),
            *self._cuts(piece, piece.tokens - tokens, piece.work - work, False),
        ]
        return min(cuts, key=lambda cut: (max(cut.error, allowed), not cut.even, cut.error))

    def _cuts(self, piece: Piece, outside: int, work: float, gets_outside: bool) -> list[PieceCut]:
        if piece.document < 0:
            all_head = self.before(piece.start + outside)[0] - self.before(piece.start)[0]
            return [PieceCut(abs(all_head - work), piece, outside, outside, gets_outside)]
        whole = piece.hole_stop == piece.stop
        left = piece.tokens if whole else piece.hole_start - piece.start
        right = piece.tokens if whole else piece.stop - piece.hole_stop
        least, most = max(0, outside - right), min(outside, left)
        # Replacing a token of the tail by one of the head lowers the work of the outside by the length of the inside.
        all_tail = outside * (piece.stop - self.bounds[piece.document]) - triangle(outside - 1)
        inside = piece.stop - piece.start - outside
        best = min(max(round((all_tail - work) / inside), least), most) if inside else most
        return [
            PieceCut(abs(all_tail - head * inside - work), piece, outside, head, gets_outside)
            for head in dict.fromkeys((least, most, best))
        ]

    def apart(self, cut: PieceCut) -> tuple[list[Piece], list[Piece]]:
        """Apply `cut`: return the pieces of the taker and the pieces of the giver."""
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
    """Sort ranges, drop empty ones and join those that touch or overlap."""
    runs: list[range] = []
    for r in sorted((r for r in ranges if r), key=lambda r: r.start):
        if runs and runs[-1].stop >= r.start:
            last = runs.pop()
            r = range(last.start, max(last.stop, r.stop))
        runs.append(r)
    return tuple(runs)


def chunk_range(seq_len: int, chunks: int, index: int) -> range:
    """Tokens of chunk `index`, sized like torch.tensor_split: the first seq_len % chunks chunks have one more token."""
    size, longer = seq_len // chunks, seq_len % chunks  # not divmod: torch.compile does not trace it
    start = index * size + min(index, longer)
    return range(start, start + size + (1 if index < longer else 0))


def zigzag_ranges(seq_len: int, world_size: int) -> list[tuple[range, ...]]:
    """Tokens of each rank r in zigzag order: chunks r and 2 W - 1 - r of the 2 W chunks of the sequence."""
    chunks = [chunk_range(seq_len, 2 * world_size, index) for index in range(2 * world_size)]
    return [merged((chunks[rank], chunks[-1 - rank])) for rank in range(world_size)]


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def balanced_ranges(cu_seqlens: tuple[int, ...], world_size: int) -> list[tuple[range, ...]]:
    """Return the tokens of every rank, as ascending ranges of the packed sequence.

    >>> balanced_ranges((0, 4, 8, 12), 2)
    [(range(0, 4), range(9, 11)), (range(4, 9), range(11, 12))]
    """
    documents = Documents(cu_seqlens)
    size, longer = divmod(cu_seqlens[-1], world_size)
    sizes = [size + (rank < longer) for rank in range(world_size)]
    held: list[list[Piece]] = [[] for _ in sizes]
    levels = (world_size - 1).bit_length()
    waiting = [(documents.pieces(world_size), 0, world_size)]
    while waiting:
        pieces, first, ranks = waiting.pop()
        if ranks == 1:
            held[first] = pieces
            continue
        few = ranks // 2
        here, there = _halve(documents, pieces, few, ranks - few, sum(sizes[first : first + few]), levels)
        waiting += [(here, first, few), (there, first + few, ranks - few)]
    balanced = [merged([r for piece in pieces for r in piece.ranges]) for pieces in held]
    zigzag = sorted(zigzag_ranges(cu_seqlens[-1], world_size), key=lambda ranges: -sum(map(len, ranges)))
    return min(balanced, zigzag, key=lambda ranges: max(map(documents.work, ranges)))


class _Side:
    """Pieces of one half of the ranks, and the tokens and work that this half still needs."""

    def __init__(self, tokens: int, work: float, full: float) -> None:
        self.pieces: list[Piece] = []
        # Still needed: `add` subtracts from these, and a negative value is an excess.
        self.tokens, self.work, self.full = tokens, work, full

    def add(self, *pieces: Piece) -> None:
        for piece in pieces:
            if piece.tokens:
                self.pieces.append(piece)
                self.tokens -= piece.tokens
                self.work -= piece.work
                self.full -= piece.full

    def remove(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        self.tokens += piece.tokens
        self.work += piece.work
        self.full += piece.full


class _Halving:
    """One trial distribution of `pieces` to two sides: `few` ranks with `tokens` tokens, and `many` ranks."""

    def __init__(
        self, documents: Documents, pieces: list[Piece], few: int, many: int, tokens: int, levels: int
    ) -> None:
        self.documents, self.pieces = documents, pieces
        self.part = part = few / (few + many)
        self.all_tokens = sum(piece.tokens for piece in pieces)
        self.all_work = sum(piece.work for piece in pieces)
        all_full = sum(piece.full for piece in pieces)
        self.here = _Side(tokens, part * self.all_work, part * all_full)
        self.there = _Side(self.all_tokens - tokens, (1 - part) * self.all_work, (1 - part) * all_full)
        self.work_allowed = part * self.all_work * _CAUSAL / levels or 1.0
        self.full_allowed = part * all_full * _FULL / levels or 1.0

    def error(self, work: float, full: float) -> float:
        """Return the larger relative deviation of `work` and `full` from the shares; 1.0 is the allowed maximum."""
        return max(abs(work) / self.work_allowed, abs(full) / self.full_allowed)

    def run(self, cut: int) -> float:
        """Distribute the pieces, cutting the `cut` most expensive ones. Return the deviation of the work."""
        for piece in self.pieces[1:cut]:
            tokens = round(self.part * piece.tokens)
            mine, others = self.documents.apart(self.documents.cut(piece, tokens, self.part * piece.work, 0.0))
            self.here.add(*mine)
            self.there.add(*others)
        self.assign(self.pieces[cut:], self.pieces[0] if cut else None)
        if cut:
            self.there.add(self.pieces[0])
        self.settle(self.pieces[0] if cut else None)
        return self.error(self.here.work, self.here.full)

    def assign(self, pieces: list[Piece], later: Piece | None) -> None:
        """Assign each of `pieces`, uncut, to the side where it brings the sums closer to the shares.

        If the piece `later` is to be cut afterwards, a piece counts only the tokens that exceed those of `later` per
        unit of work, so that `later` can be cut evenly.
        """
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

    def settle(self, first: Piece | None) -> None:
        """Move, swap or cut pieces until both sides have their exact token counts and nearly their work."""
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
            best: PieceCut | None = None
            from_piece, least = able[0], float("inf")
            for piece in candidates:
                cut = self.documents.cut(piece, tokens, taker.work, self.work_allowed)
                error = self.error(cut.error, taker.full - tokens * piece.full / piece.tokens)
                if error < least:
                    best, from_piece, least = cut, piece, error
                if least <= 1:
                    break
            assert best is not None
            giver.remove(from_piece)
            mine, others = self.documents.apart(best)
            taker.add(*mine)
            giver.add(*others)

    def swap(self, giver: _Side, taker: _Side) -> bool:
        """Move one uncut piece to `taker`, or swap two.

        Return True if one move or swap meets both token counts within the allowed error; else change nothing.
        """
        wanted = taker.tokens
        by_tokens = {piece.tokens: piece for piece in taker.pieces}
        best: tuple[Piece, Piece | None] | None = None
        least = 1.0
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
    documents: Documents, pieces: list[Piece], few: int, many: int, tokens: int, levels: int
) -> tuple[list[Piece], list[Piece]]:
    """Split `pieces` between two sets of ranks: the first, of `few` ranks, gets `tokens` tokens; the second has `many`
    ranks."""
    pieces = sorted(pieces, reverse=True)
    if not pieces:
        return [], []
    # A piece that exceeds the smaller side's share of the work must be cut. A piece of one token cannot be cut.
    cut = int(pieces[0].work * (few + many) > few * sum(piece.work for piece in pieces))
    most = sum(piece.tokens > 1 for piece in pieces)
    best = _Halving(documents, pieces, few, many, tokens, levels)
    least = best.run(cut)
    # If only the work without a mask deviates, cut at most two pieces.
    while least > 1 and cut < most and (cut < 2 or abs(best.here.work) > best.work_allowed):
        cut = min(max(1, 2 * cut), most)
        halving = _Halving(documents, pieces, few, many, tokens, levels)
        error = halving.run(cut)
        if error <= 1 or error < least / 2:
            best, least = halving, error
    return best.here.pieces, best.there.pieces
