"""All-to-all on shared memory: every rank writes once what others want, and they read it straight to its place.

Results lie in memory of the pool, whose pages are there already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fused_tp.attention.all_to_all import Exchange, HeadsResult, Places, SequenceResult, by_index, pieces
from fused_tp.transport.shm import ShmTransport, Workspace

_ALIGNMENT = 64  # a cache line
_READABLE = 1


class OneSidedAllToAll:
    """Serves the CPU tensors of ranks on one host."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        rank, result = exchange.rank, HeadsResult(exchange, xs, self._transport.empty)

        def shapes(of: int) -> list[tuple[int, ...]]:
            return [(x.shape[0], s.rows[of], s.all_heads, x.shape[3]) for x, s in zip(xs, exchange.shares, strict=True)]

        with self._begin(f"{exchange.op} to heads", exchange, xs, shapes(rank)) as workspace:
            for mine, x, share in zip(_views(workspace, rank, xs, shapes(rank)), xs, exchange.shares, strict=True):
                own = share.only(rank)
                mine[:, :, : own.start].copy_(x[:, :, : own.start])
                mine[:, :, own.stop :].copy_(x[:, :, own.stop :])
            workspace.signal(_READABLE)
            for source in (rank, *exchange.peers):
                if source != rank:
                    workspace.wait(source, _READABLE)
                theirs = xs if source == rank else _views(workspace, source, xs, shapes(source))
                for index, (x, share) in enumerate(zip(theirs, exchange.shares, strict=True)):
                    heads = share.heads[rank]
                    result.put(index, source, x[:, :, heads.start : heads.stop])
        return result.outs

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        rank, result = exchange.rank, SequenceResult(exchange, xs, self._transport.empty)

        def shapes(of: int) -> list[tuple[int, ...]]:
            return [
                (x.shape[0], s.length, len(s.heads[of]), x.shape[3]) for x, s in zip(xs, exchange.shares, strict=True)
            ]

        with self._begin(f"{exchange.op} to sequence", exchange, xs, shapes(rank)) as workspace:
            for mine, x, share in zip(_views(workspace, rank, xs, shapes(rank)), xs, exchange.shares, strict=True):
                _write_all_but(mine, x, share.places, rank)
            workspace.signal(_READABLE)
            for source in result.order:
                if source != rank:
                    workspace.wait(source, _READABLE)
                theirs = xs if source == rank else _views(workspace, source, xs, shapes(source))
                for index, x in enumerate(theirs):
                    result.add(index, source, x)
        return result.outs

    def _begin(self, op: str, exchange: Exchange, xs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Workspace:
        return self._transport.begin(op, exchange.dims, xs[0].dtype, _offsets(xs, shapes)[-1])


def _write_all_but(mine: Tensor, x: Tensor, places: Sequence[Places], rank: int) -> None:
    """What this rank takes of its own it need not write, but many small copies cost more than one large one."""
    others = [there for peer, own in enumerate(places) if peer != rank for _, there in pieces(own)]
    if by_index(len(others)):
        mine.copy_(x)
        return
    for there in others:
        mine[:, there].copy_(x[:, there])


def _offsets(xs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each begins, and the end."""
    offsets = [0]
    for x, shape in zip(xs, shapes, strict=True):
        offsets.append(offsets[-1] + -(-math.prod(shape) * x.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _views(workspace: Workspace, rank: int, xs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    offsets = _offsets(xs, shapes)
    return [
        workspace.buffer(rank, shape, x.dtype, offset)
        for x, shape, offset in zip(xs, shapes, offsets[:-1], strict=True)
    ]
