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

The deviation of a rank's work from the mean is not bounded. Tests measure at most 1% for Zipf and uniform lengths. If a
single token costs as much as a rank's share, the deviation is necessarily large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# Allowed deviation of a rank's work from its share, as a fraction of the share, summed over all halvings: with a causal
# mask and without a mask. Cutting more documents could reduce the deviation, but uncut documents need no communication.
_CAUSAL_TOLERANCE, _FULL_TOLERANCE = 0.01, 0.1
_MAX_CUT_CANDIDATES = 8  # number of documents tried for a cut
# Neighboring documents are bundled into one piece up to this fraction of a rank's tokens and of its work.
_BUNDLE_FRACTION = 1 / 32


class Piece(NamedTuple):
    """Tokens [start, hole_start) and [hole_stop, stop) of one document, or [start, stop) of neighboring documents.

    Without a hole, hole_start = hole_stop = stop.
    """

    work: int
    num_tokens: int
    full_work: int  # work without a causal mask
    start: int
    hole_start: int
    hole_stop: int
    stop: int
    document: int  # index of the document; -1: several documents

    @property
    def ranges(self) -> tuple[range, range]:
        return range(self.start, self.hole_start), range(self.hole_stop, self.stop)


class PieceCut(NamedTuple):
    """Split of a piece of the donor side, which moves a part of it to the recipient side.

    One side gets `outside_tokens` tokens from the two ends of the piece, `head_tokens` of them from its start. The
    other side gets the inside. `work_error` is the absolute deviation of the recipient's work from its target. Of a
    piece with a hole, `piece` may be one of the two runs. The other run is then moved to the recipient (`moved_run`) or
    left with the donor (`kept_run`).
    """

    work_error: float
    piece: Piece
    outside_tokens: int
    head_tokens: int
    recipient_gets_outside: bool
    moved_run: Piece | None = None
    kept_run: Piece | None = None

    @property
    def is_one_sided(self) -> bool:
        """True if the outside is at one end of the piece only, so that neither side gets an extra run of tokens."""
        return self.head_tokens in (0, self.outside_tokens)


class Documents:
    """Attention cost per token of packed documents."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        ends = np.asarray(bounds, dtype=np.int64)
        lengths = ends[1:] - ends[:-1]
        self.lengths = lengths.tolist()
        self.causal_work_before = [0, *np.cumsum(lengths * (lengths + 1) // 2).tolist()]
        self.full_work_before = [0, *np.cumsum(lengths * lengths).tolist()]

    def work_before(self, token: int) -> tuple[int, int]:
        """Return the work of all tokens before index `token`: (with a causal mask, without a mask)."""
        document = min(bisect_right(self.bounds, token), len(self.lengths)) - 1
        offset = token - self.bounds[document]
        return self.causal_work_before[document] + triangle_number(offset), self.full_work_before[
            document
        ] + offset * self.lengths[document]

    def work(self, ranges: tuple[range, ...]) -> int:
        """Return the work of the tokens in `ranges` with a causal mask."""
        return sum(self.work_before(r.stop)[0] - self.work_before(r.start)[0] for r in ranges)

    def pieces(self, world_size: int) -> list[Piece]:
        """Return the pieces of all non-empty documents. Small neighboring documents form one piece."""
        max_tokens = self.bounds[-1] / world_size * _BUNDLE_FRACTION
        max_work = self.causal_work_before[-1] / world_size * _BUNDLE_FRACTION
        pieces = []
        first_document, num_documents = 0, len(self.bounds) - 1
        while first_document < num_documents:
            start, causal_before, full_before = (
                self.bounds[first_document],
                self.causal_work_before[first_document],
                self.full_work_before[first_document],
            )
            last_candidate = min(
                bisect_right(self.bounds, start + max_tokens),
                bisect_right(self.causal_work_before, causal_before + max_work),
            )
            end_document = max(last_candidate - 1, first_document + 1)
            stop = self.bounds[end_document]
            if stop > start:
                document = first_document if end_document == first_document + 1 else -1
                work = self.causal_work_before[end_document] - causal_before
                pieces.append(
                    Piece(
                        work,
                        stop - start,
                        self.full_work_before[end_document] - full_before,
                        start,
                        stop,
                        stop,
                        stop,
                        document,
                    )
                )
            first_document = end_document
        return pieces

    def make_piece(self, start: int, hole_start: int, hole_stop: int, stop: int, document: int) -> Piece:
        """Build the piece of tokens [start, hole_start) and [hole_stop, stop); an empty hole is moved to the end."""
        if hole_start == hole_stop:
            hole_start = hole_stop = stop
        elif hole_start == start:
            start, hole_start, hole_stop = hole_stop, stop, stop
        elif hole_stop == stop:
            hole_stop = stop = hole_start
        work = full_work = 0
        for run in (range(start, hole_start), range(hole_stop, stop)):
            if run:
                (causal, full), (causal_before, full_before) = self.work_before(run.stop), self.work_before(run.start)
                work, full_work = work + causal - causal_before, full_work + full - full_before
        num_tokens = hole_start - start + stop - hole_stop
        return Piece(work, num_tokens, full_work, start, hole_start, hole_stop, stop, document)

    def best_cut(self, piece: Piece, num_tokens: int, work: float, allowed_error: float) -> PieceCut:
        """Find the cut that moves exactly `num_tokens` tokens and approximately `work` from `piece` to the recipient.

        Among cuts whose work deviates by at most `allowed_error`, prefer those that create few runs of tokens.
        """
        best = self._best_cut_of_ends_or_middle(piece, num_tokens, work, allowed_error)
        if best.work_error > allowed_error and piece.hole_stop < piece.stop:
            runs = [self.make_piece(r.start, r.stop, r.stop, r.stop, piece.document) for r in piece.ranges]
            for run, other_run in (runs, runs[::-1]):
                if num_tokens <= run.num_tokens:
                    cut = self._best_cut_of_ends_or_middle(run, num_tokens, work, allowed_error)._replace(
                        kept_run=other_run
                    )
                    best = min(best, cut, key=lambda cut: cut.work_error)
                if num_tokens >= other_run.num_tokens:
                    cut = self._best_cut_of_ends_or_middle(
                        run, num_tokens - other_run.num_tokens, work - other_run.work, allowed_error
                    )
                    best = min(best, cut._replace(moved_run=other_run), key=lambda cut: cut.work_error)
        return best

    def _best_cut_of_ends_or_middle(self, piece: Piece, num_tokens: int, work: float, allowed_error: float) -> PieceCut:
        cuts = [
            *self._candidate_cuts(piece, num_tokens, work, True),
            *self._candidate_cuts(piece, piece.num_tokens - num_tokens, piece.work - work, False),
        ]
        return min(cuts, key=lambda cut: (max(cut.work_error, allowed_error), not cut.is_one_sided, cut.work_error))

    def _candidate_cuts(
        self, piece: Piece, outside_tokens: int, work: float, recipient_gets_outside: bool
    ) -> list[PieceCut]:
        if piece.document < 0:
            all_head_work = self.work_before(piece.start + outside_tokens)[0] - self.work_before(piece.start)[0]
            return [PieceCut(abs(all_head_work - work), piece, outside_tokens, outside_tokens, recipient_gets_outside)]
        has_no_hole = piece.hole_stop == piece.stop
        left_tokens = piece.num_tokens if has_no_hole else piece.hole_start - piece.start
        right_tokens = piece.num_tokens if has_no_hole else piece.stop - piece.hole_stop
        min_head_tokens, max_head_tokens = max(0, outside_tokens - right_tokens), min(outside_tokens, left_tokens)
        # Replacing a token of the tail by one of the head lowers the work of the outside by the length of the inside.
        all_tail_work = outside_tokens * (piece.stop - self.bounds[piece.document]) - triangle_number(
            outside_tokens - 1
        )
        inside_tokens = piece.stop - piece.start - outside_tokens
        best_head_tokens = (
            min(max(round((all_tail_work - work) / inside_tokens), min_head_tokens), max_head_tokens)
            if inside_tokens
            else max_head_tokens
        )
        return [
            PieceCut(
                abs(all_tail_work - head_tokens * inside_tokens - work),
                piece,
                outside_tokens,
                head_tokens,
                recipient_gets_outside,
            )
            for head_tokens in dict.fromkeys((min_head_tokens, max_head_tokens, best_head_tokens))
        ]

    def apply_cut(self, cut: PieceCut) -> tuple[list[Piece], list[Piece]]:
        """Apply `cut`: return the pieces of the recipient and the pieces of the donor."""
        piece = cut.piece
        start, stop = piece.start + cut.head_tokens, piece.stop - (cut.outside_tokens - cut.head_tokens)
        outside_piece = self.make_piece(piece.start, start, stop, piece.stop, piece.document)
        if piece.hole_stop == piece.stop:
            inside_piece = self.make_piece(start, stop, stop, stop, piece.document)
        else:
            inside_piece = self.make_piece(start, piece.hole_start, piece.hole_stop, stop, piece.document)
        recipient_piece, donor_piece = (
            (outside_piece, inside_piece) if cut.recipient_gets_outside else (inside_piece, outside_piece)
        )
        return [recipient_piece, *([cut.moved_run] if cut.moved_run else [])], [
            donor_piece,
            *([cut.kept_run] if cut.kept_run else []),
        ]


def merge_ranges(ranges: Iterable[range]) -> tuple[range, ...]:
    """Sort ranges, drop empty ones and join those that touch or overlap."""
    runs: list[range] = []
    for r in sorted((r for r in ranges if r), key=lambda r: r.start):
        if runs and runs[-1].stop >= r.start:
            previous = runs.pop()
            r = range(previous.start, max(previous.stop, r.stop))
        runs.append(r)
    return tuple(runs)


def chunk_range(seq_len: int, chunks: int, index: int) -> range:
    """Return the tokens of a chunk, sized like torch.tensor_split: the first seq_len % chunks have one more token."""
    size, num_longer = seq_len // chunks, seq_len % chunks  # not divmod: torch.compile does not trace it
    start = index * size + min(index, num_longer)
    return range(start, start + size + (1 if index < num_longer else 0))


def zigzag_ranges(seq_len: int, world_size: int) -> list[tuple[range, ...]]:
    """Return the tokens of each rank r in zigzag order: chunks r and 2 W - 1 - r of the 2 W chunks."""
    chunks = [chunk_range(seq_len, 2 * world_size, index) for index in range(2 * world_size)]
    return [merge_ranges((chunks[rank], chunks[-1 - rank])) for rank in range(world_size)]


def triangle_number(n: int) -> int:
    return n * (n + 1) // 2


def balanced_ranges(cu_seqlens: tuple[int, ...], world_size: int) -> list[tuple[range, ...]]:
    """Return the tokens of every rank, as ascending ranges of the packed sequence.

    >>> balanced_ranges((0, 4, 8, 12), 2)
    [(range(0, 4), range(9, 11)), (range(4, 9), range(11, 12))]
    """
    documents = Documents(cu_seqlens)
    size, num_longer = divmod(cu_seqlens[-1], world_size)
    sizes = [size + (rank < num_longer) for rank in range(world_size)]
    pieces_by_rank: list[list[Piece]] = [[] for _ in sizes]
    num_levels = (world_size - 1).bit_length()
    pending_halves = [(documents.pieces(world_size), 0, world_size)]
    while pending_halves:
        pieces, first_rank, num_ranks = pending_halves.pop()
        if num_ranks == 1:
            pieces_by_rank[first_rank] = pieces
            continue
        num_first = num_ranks // 2
        first_pieces, second_pieces = _halve_pieces(
            documents,
            pieces,
            num_first,
            num_ranks - num_first,
            sum(sizes[first_rank : first_rank + num_first]),
            num_levels,
        )
        pending_halves += [
            (first_pieces, first_rank, num_first),
            (second_pieces, first_rank + num_first, num_ranks - num_first),
        ]
    balanced_by_rank = [merge_ranges([r for piece in pieces for r in piece.ranges]) for pieces in pieces_by_rank]
    zigzag_by_rank = sorted(zigzag_ranges(cu_seqlens[-1], world_size), key=lambda ranges: -sum(map(len, ranges)))
    return min(balanced_by_rank, zigzag_by_rank, key=lambda ranges: max(map(documents.work, ranges)))


class _Side:
    """Pieces of one half of the ranks, and the tokens and work that this half still needs."""

    def __init__(self, num_tokens: int, work: float, full_work: float) -> None:
        self.pieces: list[Piece] = []
        # Still needed: `add` subtracts from these, and a negative value is an excess.
        self.num_tokens, self.work, self.full_work = num_tokens, work, full_work

    def add(self, *pieces: Piece) -> None:
        for piece in pieces:
            if piece.num_tokens:
                self.pieces.append(piece)
                self.num_tokens -= piece.num_tokens
                self.work -= piece.work
                self.full_work -= piece.full_work

    def remove(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        self.num_tokens += piece.num_tokens
        self.work += piece.work
        self.full_work += piece.full_work


class _Halving:
    """One trial distribution of `pieces` to two sides: `num_first` ranks with `first_tokens` tokens, and the others."""

    def __init__(
        self,
        documents: Documents,
        pieces: list[Piece],
        num_first: int,
        num_second: int,
        first_tokens: int,
        num_levels: int,
    ) -> None:
        self.documents, self.pieces = documents, pieces
        self.first_share = first_share = num_first / (num_first + num_second)
        self.all_tokens = sum(piece.num_tokens for piece in pieces)
        self.all_work = sum(piece.work for piece in pieces)
        all_full_work = sum(piece.full_work for piece in pieces)
        self.first_side = _Side(first_tokens, first_share * self.all_work, first_share * all_full_work)
        self.second_side = _Side(
            self.all_tokens - first_tokens, (1 - first_share) * self.all_work, (1 - first_share) * all_full_work
        )
        self.work_tolerance = first_share * self.all_work * _CAUSAL_TOLERANCE / num_levels or 1.0
        self.full_work_tolerance = first_share * all_full_work * _FULL_TOLERANCE / num_levels or 1.0

    def relative_error(self, work: float, full_work: float) -> float:
        """Return the larger ratio of a deviation, `work` or `full_work`, to its tolerance."""
        return max(abs(work) / self.work_tolerance, abs(full_work) / self.full_work_tolerance)

    def distribute(self, num_cut: int) -> float:
        """Distribute the pieces, cutting the `num_cut` most expensive ones. Return the `relative_error` of the work."""
        for piece in self.pieces[1:num_cut]:
            num_tokens = round(self.first_share * piece.num_tokens)
            first_pieces, second_pieces = self.documents.apply_cut(
                self.documents.best_cut(piece, num_tokens, self.first_share * piece.work, 0.0)
            )
            self.first_side.add(*first_pieces)
            self.second_side.add(*second_pieces)
        self.assign_uncut(self.pieces[num_cut:], self.pieces[0] if num_cut else None)
        if num_cut:
            self.second_side.add(self.pieces[0])
        self.balance_tokens(self.pieces[0] if num_cut else None)
        return self.relative_error(self.first_side.work, self.first_side.full_work)

    def assign_uncut(self, pieces: list[Piece], later_cut_piece: Piece | None) -> None:
        """Assign each of `pieces`, uncut, to the side where it brings the sums closer to the shares.

        If `later_cut_piece` is to be cut afterwards, only those tokens of a piece count that exceed its work times the
        tokens per work of `later_cut_piece`, so that `later_cut_piece` can be cut evenly.
        """
        first_share = self.first_share
        work_scale, token_scale = 1 / self.all_work, 1 / self.all_tokens
        tokens_per_work = later_cut_piece.num_tokens / later_cut_piece.work * token_scale if later_cut_piece else 0.0
        share_bias = (1 - 2 * first_share) / 2
        work_excess = token_excess = 0.0
        for piece in pieces:
            w, t = piece.work * work_scale, piece.num_tokens * token_scale - piece.work * tokens_per_work
            if work_excess * w + token_excess * t + share_bias * (w * w + t * t) <= 0:
                self.first_side.add(piece)
                work_excess += (1 - first_share) * w
                token_excess += (1 - first_share) * t
            else:
                self.second_side.add(piece)
                work_excess -= first_share * w
                token_excess -= first_share * t

    def balance_tokens(self, preferred_piece: Piece | None) -> None:
        """Move, swap or cut pieces until both sides have exactly their tokens and nearly their shares of the work."""
        while self.first_side.num_tokens:
            donor, recipient = (
                (self.second_side, self.first_side)
                if self.first_side.num_tokens > 0
                else (self.first_side, self.second_side)
            )
            if preferred_piece is None and self.move_or_swap(donor, recipient):
                return
            num_tokens = recipient.num_tokens
            large_pieces = [piece for piece in donor.pieces if piece.num_tokens >= num_tokens]
            if not large_pieces:
                largest_piece = max(donor.pieces, key=lambda piece: piece.num_tokens)
                donor.remove(largest_piece)
                recipient.add(largest_piece)
                continue
            step = max(1, len(large_pieces) // _MAX_CUT_CANDIDATES)
            candidates = large_pieces[::step]
            if preferred_piece in large_pieces:
                candidates.insert(0, preferred_piece)
            best_cut: PieceCut | None = None
            cut_piece, smallest_error = large_pieces[0], float("inf")
            for piece in candidates:
                cut = self.documents.best_cut(piece, num_tokens, recipient.work, self.work_tolerance)
                error = self.relative_error(
                    cut.work_error, recipient.full_work - num_tokens * piece.full_work / piece.num_tokens
                )
                if error < smallest_error:
                    best_cut, cut_piece, smallest_error = cut, piece, error
                if smallest_error <= 1:
                    break
            assert best_cut is not None
            donor.remove(cut_piece)
            recipient_pieces, donor_pieces = self.documents.apply_cut(best_cut)
            recipient.add(*recipient_pieces)
            donor.add(*donor_pieces)

    def move_or_swap(self, donor: _Side, recipient: _Side) -> bool:
        """Move one uncut piece to `recipient`, or swap two.

        Return True if one move or swap meets both token counts within the allowed error; else change nothing.
        """
        missing_tokens = recipient.num_tokens
        piece_by_tokens = {piece.num_tokens: piece for piece in recipient.pieces}
        best_move: tuple[Piece, Piece | None] | None = None
        smallest_error = 1.0
        for piece in donor.pieces:
            returned_piece = piece_by_tokens.get(piece.num_tokens - missing_tokens)
            if returned_piece is not None:
                error = self.relative_error(
                    recipient.work - piece.work + returned_piece.work,
                    recipient.full_work - piece.full_work + returned_piece.full_work,
                )
            elif piece.num_tokens == missing_tokens:
                error = self.relative_error(recipient.work - piece.work, recipient.full_work - piece.full_work)
            else:
                continue
            if error <= smallest_error:
                best_move, smallest_error = (piece, returned_piece), error
        if best_move is None:
            return False
        piece, returned_piece = best_move
        donor.remove(piece)
        recipient.add(piece)
        if returned_piece is not None:
            recipient.remove(returned_piece)
            donor.add(returned_piece)
        return True


def _halve_pieces(
    documents: Documents, pieces: list[Piece], num_first: int, num_second: int, first_tokens: int, num_levels: int
) -> tuple[list[Piece], list[Piece]]:
    """Split `pieces` between two sets of ranks, of `num_first` and `num_second` ranks.

    The first set gets exactly `first_tokens` tokens.
    """
    pieces = sorted(pieces, reverse=True)
    if not pieces:
        return [], []
    # A piece that exceeds the smaller side's share of the work must be cut. A piece of one token cannot be cut.
    num_cut = int(pieces[0].work * (num_first + num_second) > num_first * sum(piece.work for piece in pieces))
    max_cuts = sum(piece.num_tokens > 1 for piece in pieces)
    best_halving = _Halving(documents, pieces, num_first, num_second, first_tokens, num_levels)
    smallest_error = best_halving.distribute(num_cut)
    # If only the work without a mask deviates, cut at most two pieces.
    while (
        smallest_error > 1
        and num_cut < max_cuts
        and (num_cut < 2 or abs(best_halving.first_side.work) > best_halving.work_tolerance)
    ):
        num_cut = min(max(1, 2 * num_cut), max_cuts)
        halving = _Halving(documents, pieces, num_first, num_second, first_tokens, num_levels)
        error = halving.distribute(num_cut)
        if error <= 1 or error < smallest_error / 2:
            best_halving, smallest_error = halving, error
    return best_halving.first_side.pieces, best_halving.second_side.pieces
