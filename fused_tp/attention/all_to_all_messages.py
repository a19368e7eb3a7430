"""All-to-all by messages: what goes to a rank, of all tensors, is one message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_tp.attention.all_to_all import Exchange, HeadsResult, SequenceResult, Share, take
from fused_tp.transport.torch_dist import TorchDist

_ALIGNMENT = 16  # of each tensor in a message, in bytes


class MessagesAllToAll:
    """Works on every torch.distributed group."""

    def __init__(self, name: str, transport: TorchDist) -> None:
        self.name = name
        self._transport = transport

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        op, rank = f"{exchange.op} to heads", exchange.rank
        going = _Packets(exchange, xs, lambda share, peer: (share.rows[rank], len(share.heads[peer])))
        coming = _Packets(exchange, xs, lambda share, peer: (share.rows[peer], len(share.heads[rank])))
        self.check(op, exchange, xs)
        with self._transport.abort_scope(op):
            flat = going.room(xs[0].device)
            for peer in exchange.peers:
                for part, x, share in zip(going.parts(flat, peer), xs, exchange.shares, strict=True):
                    part.copy_(_of_heads(x, share.heads[peer]))
            moving = self._transport.all_to_all(op, flat, going.sizes, coming.sizes)
            result = HeadsResult(exchange, xs)
            for index, (x, share) in enumerate(zip(xs, exchange.shares, strict=True)):
                result.put(index, rank, _of_heads(x, share.heads[rank]))
            received = moving.wait()
            for peer in exchange.peers:
                for index, part in enumerate(coming.parts(received, peer)):
                    result.put(index, peer, part)
        return result.outs

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        op, rank = f"{exchange.op} to sequence", exchange.rank
        going = _Packets(exchange, xs, lambda share, peer: (share.rows[peer], len(share.heads[rank])))
        coming = _Packets(exchange, xs, lambda share, peer: (share.rows[rank], len(share.heads[peer])))
        self.check(op, exchange, xs)
        with self._transport.abort_scope(op):
            flat = going.room(xs[0].device)
            for peer in exchange.peers:
                for part, x, share in zip(going.parts(flat, peer), xs, exchange.shares, strict=True):
                    take(x, share.places[peer], part)
            moving = self._transport.all_to_all(op, flat, going.sizes, coming.sizes)
            result = SequenceResult(exchange, xs)
            received = moving.wait()
            for source in result.order:
                for index, x in enumerate(xs if source == rank else coming.parts(received, source)):
                    if source == rank:
                        result.add(index, source, x)
                    else:
                        result.add_rows(index, source, x)
        return result.outs

    def check(self, op: str, exchange: Exchange, xs: Sequence[Tensor]) -> None:
        self._transport.check(op, exchange.dims, xs[0].dtype, xs[0].device)


class _Packets:
    """One packet for each peer, with a part of every tensor in it.

    Args:
        rows_and_heads: of a tensor's part in the packet of a rank.

    Attributes:
        sizes: in bytes, of each rank's packet; a rank's own is empty.
    """

    def __init__(
        self, exchange: Exchange, xs: Sequence[Tensor], rows_and_heads: Callable[[Share, int], tuple[int, int]]
    ) -> None:
        self._dtypes = [x.dtype for x in xs]
        self._shapes = [
            [(x.shape[0], *rows_and_heads(s, peer), x.shape[3]) for x, s in zip(xs, exchange.shares, strict=True)]
            for peer in range(exchange.ranks)
        ]
        self.sizes = [
            0 if peer == exchange.rank else sum(map(_bytes, shapes, self._dtypes))
            for peer, shapes in enumerate(self._shapes)
        ]
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def room(self, device: torch.device) -> Tensor:
        return torch.empty(self._starts[-1], dtype=torch.uint8, device=device)

    def parts(self, flat: Tensor, peer: int) -> list[Tensor]:
        """The tensors in the packet of `peer`, one of those in `flat`."""
        found, at = [], self._starts[peer]
        for shape, dtype in zip(self._shapes[peer], self._dtypes, strict=True):
            found.append(flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            at += _bytes(shape, dtype)
        return found


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _of_heads(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]
