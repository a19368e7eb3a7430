"""Sharing packed documents out: equally many tokens and nearly equal attention work for every rank.

With a causal mask the token at offset o of its document costs o + 1, without one the document's length. The ranks are
halved again and again, and the documents with them; each half gets its number of tokens exactly and its share of the
work as nearly as may be:

1. Whole documents, dearest first, each go to the side that brings the sums of tokens and of work closer to the
   shares (largest first: Graham, "Bounds on multiprocessing timing anomalies", 1969; here in two dimensions).
2. What is then missing is settled by one whole document, by a swap of two, or by cutting one: one side gets its
   outside, h tokens of the head and g of the tail, the other its inside. The tokens say h + g, and the work is linear
   in h: so both come out.

A document that is too dear for a side is cut from the start. So one sequence becomes the 2W pieces of zigzag, and a
long document a nest of shells for as many ranks as it needs, which are neighbours. All others stay whole, which moves
nothing. Small neighbours are dealt out together. (MagiAttention, 2025, deals out chunks of one size by their work:
there no document stays whole that is longer than a chunk.)

Guaranteed: the sizes of torch.tensor_split, where the first total % W ranks have one token more; the same result for
the same arguments; and no more work for any rank than zigzag over the whole packed stream gives its busiest one. How
near to the mean the work comes is measured and held by tests, not proven: within 1% for Zipf and uniform lengths.
Where tokens are so few that a single one costs a share, it cannot be near.
"""

from __future__ import annotations

from fused_tp.attention.documents import Cut, Documents, Piece, merged

# How far a rank may be off its share of the work, with causal mask and without, in parts of the share: all halvings
# together. Cutting more documents could bring it nearer, but what is whole moves nothing.
_CAUSAL, _FULL = 0.01, 0.1
_CANDIDATES = 8  # documents that are tried for a cut


def balanced_ranges(cu_seqlens: tuple[int, ...], world_size: int) -> list[tuple[range, ...]]:
    """The tokens of every rank, as ascending ranges of the packed sequence.

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
    zigzag = _zigzag(sizes)
    return min(balanced, zigzag, key=lambda ranges: max(map(documents.work, ranges)))


class _Side:
    """What one half has, and what it should have."""

    def __init__(self, tokens: int, work: float, full: float) -> None:
        self.pieces: list[Piece] = []
        self.tokens, self.work, self.full = tokens, work, full  # still wanted

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
    """One way to share pieces out to two sides."""

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

    def deal(self, pieces: list[Piece], later: Piece | None) -> None:
        """Whole pieces, each to the side where it brings the sums nearer to the shares.

        Where one piece is kept to be cut `later`, tokens count beyond what comes with their work in that piece: it is
        cut evenly then.
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
            best: Cut | None = None
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
        """Whether moving one whole piece, perhaps for another one, settled it."""
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
    """The pieces of `few` ranks, which get this many tokens, and of `many` others."""
    pieces = sorted(pieces, reverse=True)
    if not pieces:
        return [], []
    # What is too dear for the smaller side is going to be cut anyway; single tokens cannot be.
    cut = int(pieces[0].work * (few + many) > few * sum(piece.work for piece in pieces))
    most = sum(piece.tokens > 1 for piece in pieces)
    best = _Halving(documents, pieces, few, many, tokens, levels)
    least = best.run(cut)
    # For work without a mask alone no more than two are cut.
    while least > 1 and cut < most and (cut < 2 or abs(best.here.work) > best.work_allowed):
        cut = min(max(1, 2 * cut), most)
        halving = _Halving(documents, pieces, few, many, tokens, levels)
        error = halving.run(cut)
        if error <= 1 or error < least / 2:
            best, least = halving, error
    return best.here.pieces, best.there.pieces


def _zigzag(sizes: list[int]) -> list[tuple[range, ...]]:
    """Zigzag over the whole, by ranks as many tokens as `sizes` say."""
    chunks = 2 * len(sizes)
    total = sum(sizes)
    bounds = [index * (total // chunks) + min(index, total % chunks) for index in range(chunks + 1)]
    held = [
        merged([range(bounds[i], bounds[i + 1]), range(bounds[chunks - 1 - i], bounds[chunks - i])])
        for i in range(len(sizes))
    ]
    return sorted(held, key=lambda ranges: -sum(map(len, ranges)))
