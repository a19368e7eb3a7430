"""Plain torch.distributed: works on every group. Every movement is asynchronous, every wait has a deadline.

Where the backend is NCCL, sums are NCCL's. gloo's own sums round to the tensor's dtype at every hop, in an order that
depends on the position in the ring, so with gloo (and any other backend) the terms are exchanged instead and summed
here: in rank order, in float32 or float64.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime import settings, tracing
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError
from fused_tp.runtime.group import Group, GroupSlot, on_destroy
from fused_tp.transport.base import (
    After,
    Done,
    Pending,
    all_gather_single,
    reduce_scatter_single,
    sum_in_rank_order,
    when,
)
from fused_tp.transport.failure import LOOK_SECONDS, Call, GroupCalls
from fused_tp.transport.gloo import (
    AT_ONCE,
    Messages,
    close_connections,
    closed_peers,
    from_host,
    host_room,
    on_host,
    outlive,
)

# Up to this many bytes per rank an all-reduce sends every term to everyone (one step); above, it is a reduce-scatter
# and an all-gather (two steps, 2/W of the bytes).
ONE_SHOT_BYTES = 64 * 1024

_SIGNATURE_BYTES = 512
_GONE_SECONDS = 1.0  # what came before a connection was closed has been dealt with then
_SPENT_SECONDS = 5.0  # and what others had to give each other, where all of them had come
_TIMED_OUT = ("timed out", "timeout")
_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "remote peer", "aborted")


class TorchDist(GroupCalls):
    """One group's movements over torch.distributed.

    After an error between ranks the group is unusable: on gloo its connections are closed, so that no peer waits on.
    A timeout names the ranks that had not arrived. One that had, but computed on until after the others' deadlines,
    could not say so and is named with them. NCCL's errors come from its watchdog, which does not tell.

    Tensors that move are contiguous and are cut along dim 0. Shards follow `torch.chunk`, so all but the last non-empty
    one have equal length; that is why a gather of padded shards leaves the real rows next to each other.
    """

    def __init__(self, group: Group, device_type: str, backend: str | None = None) -> None:
        own = f"{backend.lower()}/" if backend is not None else ""
        super().__init__(group, backend or backend_of(group, device_type), f"fused_tp/{own}{device_type}")
        self.reduces_in_place = self.backend == "nccl"
        self._collectives: list[Any] = []  # under way on gloo
        self._met = self.backend != "nccl"
        self._by_host = self.backend == "gloo" and device_type != "cpu"

    # -- starting and waiting -----------------------------------------------------------------------------------------

    def _start(self, op: str, launch: Callable[[], Any]) -> Pending[None]:
        call = self.begin(op)
        try:
            work = launch()
        except RuntimeError as error:
            raise self._failure(call, error) from error
        if self.backend == "gloo" and not isinstance(work, Messages):
            self._collectives = [earlier for earlier in self._collectives if not earlier.is_completed()]
            self._collectives.append(work)
        return After(lambda: self._wait(call, work))

    def _wait(self, call: Call, work: Any) -> None:
        if self.broken is not None:  # and this movement has ended with the one that failed
            raise self.unusable()
        deadline = time.perf_counter() + settings.timeout_seconds()
        try:
            with tracing.waiting(call.op):
                for one in work if isinstance(work, list) else [work]:
                    # NCCL's wait only orders streams; its watchdog keeps the deadline. With a timeout it would block.
                    if self.backend == "nccl":
                        one.wait()
                    else:
                        self._wait_in_slices(call, one, deadline)
        except FusedTPError:
            raise
        except RuntimeError as error:
            raise self._failure(call, error) from error
        else:
            if work in self._collectives:
                self._collectives.remove(work)

    def _wait_in_slices(self, call: Call, work: Any, deadline: float) -> None:
        """Waits until `deadline`, and looks now and then whether a peer has given up, or has left."""
        posted = False
        gone_since: dict[int, float] = {}
        while not _ended(work, min(LOOK_SECONDS, deadline - time.perf_counter())):
            now = time.perf_counter()
            if now >= deadline:
                raise self.abort_timed_out(call)
            if not posted:
                self.post_status(call)
                posted = True
            if self.board.has_failure():
                raise self.abort_following_peer(call)
            gone_since = {rank: gone_since.get(rank, now) for rank in self.closed_peers()}
            if self._cannot_end(call, work, {rank: now - since for rank, since in gone_since.items()}):
                raise self.abort_peer_lost(call)

    def _cannot_end(self, call: Call, work: Any, gone: dict[int, float]) -> bool:
        """Whether `work` waits for a peer that has left; `gone`: seconds since its connection was closed, by rank.

        gloo itself does not notice where it was closed in the middle of a message (`transport.gloo`). A peer may also
        have left because its part of a collective was done, while others take their time; so of a collective it is said
        only where all the others have reached it too, and have had time to exchange what they had.
        """
        if isinstance(work, Messages):
            return gone.get(-1 if work.peer is None else work.peer, 0.0) > _GONE_SECONDS
        if min(gone.values(), default=0.0) <= _GONE_SECONDS:  # none, or one whose last part may just have arrived
            return False
        others = set(range(self.world_size)) - gone.keys() - {self.rank}
        if others and max(gone.values()) <= _SPENT_SECONDS:
            return False
        statuses = self.board.read()
        return all(rank in statuses and statuses[rank].call >= call.number for rank in others)

    # -- failing ------------------------------------------------------------------------------------------------------

    def _failure(self, call: Call, error: RuntimeError) -> FusedTPError:
        """What to raise for an error of torch.distributed. From here on the group is unusable, and its peers know."""
        if self.broken is not None:
            return self.unusable()
        reason = str(error).splitlines()[0]
        lost, late = (any(word in reason.lower() for word in words) for words in (_LOST, _TIMED_OUT))
        kind: type[FusedTPError] = PeerLostError if lost else CollectiveTimeoutError if late else FusedTPError
        what = " failed: {reason}"
        if self.backend != "nccl" and lost:
            return self.abort_peer_lost(call, reason)
        if self.backend != "nccl" and late:
            return self.abort_timed_out(call, reason)
        if lost:
            what = " lost a peer: {reason}"
        elif late:  # its watchdog raises on the host long after the ranks have enqueued other calls: theirs say nothing
            what = (
                f" waited {self.how_long(call)} and some peer had not arrived; NCCL does not tell which, torch's "
                "flight recorder does (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1). NCCL says: "
                "{reason}"
            )
        return self.abort(call, self.error(kind, call, what, reason=reason))

    def _depart(self) -> None:
        if self.backend == "gloo":
            close_connections(self.process_group)
            outlive(self.process_group, self._collectives)
            self._collectives.clear()

    def closed_peers(self) -> list[int]:
        return closed_peers(self.process_group) if self.backend == "gloo" else []

    def check(self, op: str, dims: Sequence[float], dtype: torch.dtype, device: torch.device) -> None:
        """With FUSED_TP_CHECK=1, compare what all ranks are about to do.

        Raises:
            RankMismatchError: on every rank, naming both sides, when they differ.
        """
        if not settings.check_ranks():
            return
        text = f"{op}(dims={list(dims)}, dtype={dtype})".encode()
        # The checksum is of all of it; only what fits is shown.
        signature = zlib.crc32(text).to_bytes(4, "little") + text
        mine = torch.zeros(_SIGNATURE_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(signature)] = torch.frombuffer(bytearray(signature[:_SIGNATURE_BYTES]), dtype=torch.uint8)
        everyone = self.all_gather("check", mine.to(device)).wait().view(self.world_size, -1).cpu()
        for rank, theirs in enumerate(everyone):
            if not torch.equal(theirs, everyone[0]):
                first, other = (_shown(t) for t in (everyone[0], theirs))
                raise RankMismatchError(
                    f"Ranks of group {self.group.name!r} disagree: rank 0 calls {first}, rank {rank} calls {other}. "
                    "All ranks of a group must call the same ops in the same order with the same shapes and dtypes."
                )

    # -- movements ----------------------------------------------------------------------------------------------------

    def all_gather(self, op: str, x: Tensor) -> Pending[Tensor]:
        """Everyone's `x` [n, ...], all of one shape, one after the other: [W * n, ...]."""
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        if out.numel() == 0:
            return Done(out)
        moving = self._start(op, lambda: all_gather_single(out, x, group=self.process_group, async_op=True))
        return when(moving, out)

    def all_to_all(self, op: str, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Pending[Tensor]:
        """Rows [sum(send_sizes), ...] go to the ranks in turn; returns the rows received, by source rank."""
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        moving = self._start(
            op,
            lambda: dist.all_to_all_single(
                out, x, list(recv_sizes), list(send_sizes), group=self.process_group, async_op=True
            ),
        )
        return when(moving, out)

    def shift(self, op: str, x: Tensor, out: Tensor, step: int) -> Pending[Tensor]:
        """Send `x` to rank r + step and receive `out` from rank r - step. An empty `x` or `out` does not travel.

        gloo has no messages of a GPU's memory, so these go by way of the host: the host waits until the current stream
        has made `x`, and `out` is written in the stream that is current in `wait`.
        """
        self._meet(op, x)
        group = self.process_group
        to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
        room = host_room(out) if self._by_host else out

        def launch() -> Any:
            ops, peers = [], []
            if out.numel():
                ops.append(dist.P2POp(dist.irecv, room, group=group, group_peer=source))
                peers.append(source)
            if x.numel():
                sent = on_host(x) if self._by_host else x
                ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to))
                peers.append(to)
            works = dist.batch_isend_irecv(ops) if ops else []
            if self.backend != "gloo":  # of NCCL one work for all of them, or none
                return works
            # The waiting rank raises at the deadline, before gloo does.
            return Messages(list(zip(peers, works, strict=True)), settings.timeout_seconds() + LOOK_SECONDS)

        moving = self._start(op, launch)
        if not self._by_host:
            return when(moving, out)

        def finish() -> Tensor:
            moving.wait()
            from_host(room, out)
            return out

        return After(finish)

    def _meet(self, op: str, like: Tensor) -> None:
        """Once, for all ranks to make the group's communicator together.

        torch does that at the first call, and where that is a batch of sends and receives, all ranks must have some
        (see batch_isend_irecv). In a shift some may have none: of a window most ranks see nothing of most others.
        """
        if not self._met:
            self._met = True
            word = like.new_zeros(1)
            self._start(op, lambda: dist.all_reduce(word, group=self.process_group, async_op=True)).wait()

    def reduce_scatter(self, op: str, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> Pending[Tensor]:
        """This rank's rows of the sum over ranks of `x` [sum(sizes), ...], plus `bias`."""
        own = sizes[self.rank]
        if self.backend == "nccl" and len(set(sizes)) == 1:
            out = x.new_empty((own, *x.shape[1:]))
            moving = self._start(op, lambda: reduce_scatter_single(out, x, group=self.process_group, async_op=True))
            return _plus(bias, when(moving, out))
        terms = self.all_to_all(op, x, sizes, [own] * self.world_size)
        return After(lambda: sum_in_rank_order(terms.wait().view(self.world_size, own, *x.shape[1:]), bias))

    def all_reduce(self, op: str, x: Tensor, bias: Tensor | None = None) -> Pending[Tensor]:
        """The sum over ranks of `x` [..., n] (may be overwritten), plus `bias` [n]; the same bits on every rank."""
        first = self.all_reduce_steps(op, x, bias)
        return After(lambda: first.wait().wait())

    def all_reduce_steps(self, op: str, x: Tensor, bias: Tensor | None = None) -> Pending[Pending[Tensor]]:
        """`all_reduce` in the two steps it may take, so that a caller can have the next sum's first step under way."""
        if self.backend == "nccl":
            moving = self._start(op, lambda: dist.all_reduce(x, group=self.process_group, async_op=True))
            total = _plus(bias, when(moving, x))
            return After(lambda: Done(total.wait()))
        if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            terms = self.all_gather(op, x.unsqueeze(0))
            return After(lambda: Done(sum_in_rank_order(terms.wait(), bias)))
        return self._two_shot(op, x, bias)

    def _two_shot(self, op: str, x: Tensor, bias: Tensor | None) -> Pending[Pending[Tensor]]:
        # Cut by elements, not by rows: a sum of few long rows is shared out as evenly as one of many short rows.
        count = x.numel()
        chunk = -(-count // self.world_size)
        flat = x.view(-1)
        if chunk * self.world_size != count:
            flat = torch.nn.functional.pad(flat, (0, chunk * self.world_size - count))
        if bias is not None:
            # The bias of this rank's elements, so that sum and bias are rounded together.
            offset = self.rank * chunk % bias.numel()
            bias = bias.repeat(-(-(offset + chunk) // bias.numel()))[offset : offset + chunk]
        mine = self.reduce_scatter(op, flat, [chunk] * self.world_size, bias)

        def second() -> Pending[Tensor]:
            total = self.all_gather(op, mine.wait())
            return After(lambda: total.wait()[:count].view_as(x))

        return After(second)


def _plus(bias: Tensor | None, moving: Pending[Tensor]) -> Pending[Tensor]:
    return moving if bias is None else After(lambda: moving.wait().add_(bias))


def _shown(signature: Tensor) -> str:
    return bytes(signature.tolist())[4:].rstrip(b"\0").decode("utf-8", "replace")


def _ended(work: Any, seconds: float) -> bool:
    """Whether `work` has ended; waits no longer than `seconds`."""
    if isinstance(work, Messages):
        return work.wait_for(seconds)
    try:
        work.wait(max(timedelta(seconds=seconds), AT_ONCE))
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _TIMED_OUT):
            raise
        if not work.is_completed():
            return False
        work.wait(AT_ONCE)  # it ended just after, or by a timeout of the process group's own: this says which
    return True


_BACKENDS: GroupSlot[dict[str, str]] = GroupSlot(lambda group: {})  # by type of device
_TRANSPORTS: GroupSlot[dict[str, TorchDist]] = GroupSlot(lambda group: {})  # by type of device


def backend_of(group: Group, device_type: str) -> str:
    """Name of the backend that moves `group`'s tensors on `device_type`.

    Raises:
        ValueError: the group has none.
    """
    if (known := _BACKENDS[group].get(device_type)) is not None:
        return known
    config = dist.get_backend_config(group.process_group)
    backends = dict(pair.split(":") for pair in config.split(",")) if ":" in config else {device_type: config}
    if device_type not in backends:
        raise ValueError(
            f"The tensors are on {device_type}, but group {group.name!r} has backends for {sorted(backends)} only; "
            f"make the group with a backend for {device_type}."
        )
    backend = _BACKENDS[group][device_type] = backends[device_type]
    return backend


def torch_dist(group: Group, device_type: str) -> TorchDist:
    """The transport of `group` for tensors on `device_type`, made once."""
    made = _TRANSPORTS[group]
    if device_type not in made:
        made[device_type] = TorchDist(group, device_type)
    return made[device_type]


@on_destroy
def _leave(group: Group) -> None:
    """Closes its connections, as torch does once nobody holds the process group: peers may wait for this rank."""
    for made in _TRANSPORTS.get(group, {}).values():
        if made.broken is None:
            made.broken = made.error(FusedTPError, made.last_call("a call"), ": its process group was destroyed.")
            made._depart()


def known_torch_dist(group: Group, device_type: str) -> TorchDist | None:
    """What `torch_dist` has made, if it has."""
    return _TRANSPORTS[group].get(device_type)
