"""All-to-all by one device kernel: parts are pulled out of their places at the peers, and put into theirs here.

The kernel moves equal parts and puts the ranks' rows one behind the other. Where the layout has another order, one pass
sorts them; what is not even goes by messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fused_tp.attention.all_to_all import Exchange, HeadsResult, Share, take
from fused_tp.attention.all_to_all_messages import MessagesAllToAll
from fused_tp.schedules.device import DeviceSchedule


class DeviceAllToAll:
    """Serves GPUs that reach each other's memory."""

    def __init__(self, schedule: DeviceSchedule, messages: MessagesAllToAll) -> None:
        self.name = schedule.name
        self._abort_scope = schedule.abort_scope
        self._device = schedule.device
        self._messages = messages

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        with self._abort_scope(exchange.op):
            return self._to_heads(exchange, xs)

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        with self._abort_scope(exchange.op):
            return self._to_sequence(exchange, xs)

    def _to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        even, uneven = _sorted(exchange)
        found: dict[int, Tensor] = {}
        if uneven:
            rest = self._messages.to_heads(exchange.of(uneven), [xs[i] for i in uneven])
            found.update(zip(uneven, rest, strict=True))
        else:
            self._messages.check(f"{exchange.op} to heads", exchange, xs)
        for i in even:
            found[i] = self._device.sequence_to_heads(xs[i])
            if not _in_order(share := exchange.shares[i]):
                one = HeadsResult(exchange.of([i]), [xs[i]])
                for source, part in enumerate(found[i].split(list(share.rows), 1)):
                    one.put(0, source, part)
                (found[i],) = one.outs
        return [found[i] for i in range(len(xs))]

    def _to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        even, uneven = _sorted(exchange)
        found: dict[int, Tensor] = {}
        if uneven:
            rest = self._messages.to_sequence(exchange.of(uneven), [xs[i] for i in uneven])
            found.update(zip(uneven, rest, strict=True))
        else:
            self._messages.check(f"{exchange.op} to sequence", exchange, xs)
        for i in even:
            x, share = xs[i], exchange.shares[i]
            if not _in_order(share):
                x = x.new_empty(x.shape)
                for places, part in zip(share.places, x.split(list(share.rows), 1), strict=True):
                    take(xs[i], places, part)
            found[i] = self._device.heads_to_sequence(x).to(exchange.dtypes[i])
        return [found[i] for i in range(len(xs))]


def _sorted(exchange: Exchange) -> tuple[list[int], list[int]]:
    """Which tensors the kernel moves, and which it does not."""
    even = [i for i, share in enumerate(exchange.shares) if share.even]
    return even, [i for i in range(len(exchange.shares)) if i not in even]


def _in_order(share: Share) -> bool:
    """Whether the ranks' rows lie one behind the other."""
    ends = [0, *(places[-1].stop if len(places) == 1 else -1 for places in share.places)]
    return all(len(places) == 1 and places[0].start == end for places, end in zip(share.places, ends, strict=False))
