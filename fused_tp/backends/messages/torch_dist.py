"""Transport over torch.distributed, for every group. Transfers are asynchronous, and every wait has a deadline.

On NCCL, sums are computed by NCCL. gloo's sums round to the tensor's dtype at every hop, in an order that depends on
the rank. So on gloo, and on every other backend, this module exchanges the terms and sums them in rank order, in
float32 or float64.
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

from fused_tp.core import settings, tracing
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError
from fused_tp.core.failure import PEER_POLL_SECONDS, GroupCalls, StartedCall
from fused_tp.core.gloo import (
    IMMEDIATE_TIMEOUT,
    PendingMessages,
    close_connections,
    closed_peers,
    copy_from_host,
    copy_to_host,
    host_buffer,
    keep_alive_if_pending,
)
from fused_tp.core.group import Group, GroupSlot, on_destroy
from fused_tp.core.pending import (
    Pending,
    PendingCall,
    PendingValue,
    all_gather_single,
    pending_output,
    reduce_scatter_single,
    sum_in_rank_order,
)

# Up to this many bytes per rank an all-reduce sends every term to all ranks, in one step. A larger one is a
# reduce-scatter and an all-gather: two steps with 2/W of the bytes.
ONE_SHOT_BYTES = 64 * 1024

_SIGNATURE_BYTES = 512
# Time after which gloo has processed all data that arrived before a connection was closed.
_CLOSED_DRAIN_SECONDS = 1.0
# Time in which the remaining ranks exchange their data once all of them have arrived.
_PEERS_DONE_SECONDS = 5.0
_TIMEOUT_PHRASES = ("timed out", "timeout")
_PEER_LOST_PHRASES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote peer",
    "aborted",
)


class TorchDist(GroupCalls):
    """Transfers of one group over torch.distributed.

    After an error between ranks the group is unusable; on gloo its connections are closed, which aborts the waits of
    peers. A timeout error names the ranks that had not arrived. It also names ranks that had started the call but were
    still computing at the deadline, because these have not published a status. NCCL's errors name no rank.

    Tensors are contiguous and sharded along dim 0. Shards follow `torch.chunk`: all shards except the last non-empty
    one have equal length, so the rows of gathered padded shards are contiguous.
    """

    def __init__(self, group: Group, device_type: str, backend: str | None = None) -> None:
        store_folder = f"{backend.lower()}/" if backend is not None else ""
        super().__init__(
            group, backend or backend_for_device(group, device_type), f"fused_tp/{store_folder}{device_type}"
        )
        self.reduces_in_place = self.backend == "nccl"
        self._in_flight_collectives: list[Any] = []  # works of collectives on gloo
        self._has_communicator = self.backend != "nccl"
        self._stages_on_host = self.backend == "gloo" and device_type != "cpu"

    # -- starting and waiting -----------------------------------------------------------------------------------------

    def _start_transfer(self, op: str, launch: Callable[[], Any]) -> Pending[None]:
        call = self.begin(op)
        try:
            work = launch()
        except RuntimeError as error:
            raise self._abort_on_error(call, error) from error
        if self.backend == "gloo" and not isinstance(work, PendingMessages):
            self._in_flight_collectives = [
                collective for collective in self._in_flight_collectives if not collective.is_completed()
            ]
            self._in_flight_collectives.append(work)
        return PendingCall(lambda: self._wait_for_work(call, work))

    def _wait_for_work(self, call: StartedCall, work: Any) -> None:
        if self.fatal_error is not None:  # the failure of another transfer has aborted this one
            raise self.unusable_error()
        deadline = time.perf_counter() + settings.timeout_seconds()
        try:
            with tracing.wait_span(call.op):
                for single_work in work if isinstance(work, list) else [work]:
                    # NCCL's wait only orders streams, but with a timeout it would block the host. Its watchdog enforces
                    # the deadline.
                    if self.backend == "nccl":
                        single_work.wait()
                    else:
                        self._wait_in_slices(call, single_work, deadline)
        except FusedTPError:
            raise
        except RuntimeError as error:
            raise self._abort_on_error(call, error) from error
        else:
            if work in self._in_flight_collectives:
                self._in_flight_collectives.remove(work)

    def _wait_in_slices(self, call: StartedCall, work: Any, deadline: float) -> None:
        """Wait until `deadline`, and poll for peers that have failed or left."""
        has_posted = False
        closed_since: dict[int, float] = {}
        while not _wait_up_to(work, min(PEER_POLL_SECONDS, deadline - time.perf_counter())):
            now = time.perf_counter()
            if now >= deadline:
                raise self.abort_timed_out(call)
            if not has_posted:
                self.post_status(call)
                has_posted = True
            if self.board.has_failure():
                raise self.abort_following_peer(call)
            closed_since = {rank: closed_since.get(rank, now) for rank in self.closed_peers()}
            if self._waits_for_lost_peer(call, work, {rank: now - since for rank, since in closed_since.items()}):
                raise self.abort_peer_lost(call)

    def _waits_for_lost_peer(self, call: StartedCall, work: Any, closed_seconds: dict[int, float]) -> bool:
        """True if `work` waits for a peer that has left. `closed_seconds`: time since each closed connection, by rank.

        gloo does not detect a connection that was closed in the middle of a message (`core.gloo`). But a peer may have
        left after it finished its part of a collective, in which other ranks still work. So for a collective this is
        true only if all remaining ranks have started it, and have had time to exchange their data.
        """
        if isinstance(work, PendingMessages):
            return (
                closed_seconds.get(-1 if work.awaited_peer is None else work.awaited_peer, 0.0) > _CLOSED_DRAIN_SECONDS
            )
        # no peer has left, or data sent before it left may still arrive
        if min(closed_seconds.values(), default=0.0) <= _CLOSED_DRAIN_SECONDS:
            return False
        remaining_ranks = set(range(self.world_size)) - closed_seconds.keys() - {self.rank}
        if remaining_ranks and max(closed_seconds.values()) <= _PEERS_DONE_SECONDS:
            return False
        statuses = self.board.read()
        return all(rank in statuses and statuses[rank].call >= call.call_number for rank in remaining_ranks)

    # -- failing ------------------------------------------------------------------------------------------------------

    def _abort_on_error(self, call: StartedCall, error: RuntimeError) -> FusedTPError:
        """Abort because of `error` of torch.distributed, and return the error to raise."""
        if self.fatal_error is not None:
            return self.unusable_error()
        reason = str(error).splitlines()[0]
        is_peer_lost, is_timeout = (
            any(phrase in reason.lower() for phrase in phrases) for phrases in (_PEER_LOST_PHRASES, _TIMEOUT_PHRASES)
        )
        error_class: type[FusedTPError] = (
            PeerLostError if is_peer_lost else CollectiveTimeoutError if is_timeout else FusedTPError
        )
        message_end = " failed: {reason}"
        if self.backend != "nccl" and is_peer_lost:
            return self.abort_peer_lost(call, reason)
        if self.backend != "nccl" and is_timeout:
            return self.abort_timed_out(call, reason)
        if is_peer_lost:
            message_end = " lost a peer: {reason}"
        elif is_timeout:  # NCCL reports a timeout after ranks have enqueued later calls, so statuses do not help
            message_end = (
                f" waited {self.describe_wait(call)} and some peer had not arrived; NCCL does not report which. Use "
                "torch's flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1). Error: "
                "{reason}"
            )
        return self.abort(call, self.error(error_class, call, message_end, reason=reason))

    def _depart(self) -> None:
        if self.backend == "gloo":
            close_connections(self.process_group)
            keep_alive_if_pending(self.process_group, self._in_flight_collectives)
            self._in_flight_collectives.clear()

    def closed_peers(self) -> list[int]:
        return closed_peers(self.process_group) if self.backend == "gloo" else []

    def check(self, op: str, dims: Sequence[float], dtype: torch.dtype, device: torch.device) -> None:
        """Compare the next call between ranks if FUSED_TP_CHECK=1.

        Raises:
            RankMismatchError: the calls differ. All ranks raise it; the message shows both calls.
        """
        if not settings.check_ranks():
            return
        text = f"{op}(dims={list(dims)}, dtype={dtype})".encode()
        # The checksum covers the full text, of which only the part that fits is sent.
        signature = zlib.crc32(text).to_bytes(4, "little") + text
        own_signature = torch.zeros(_SIGNATURE_BYTES, dtype=torch.uint8, device="cpu")
        own_signature[: len(signature)] = torch.frombuffer(bytearray(signature[:_SIGNATURE_BYTES]), dtype=torch.uint8)
        signatures = self.all_gather("check", own_signature.to(device)).wait().view(self.world_size, -1).cpu()
        for rank, rank_signature in enumerate(signatures):
            if not torch.equal(rank_signature, signatures[0]):
                first_call, other_call = (_decode_signature(t) for t in (signatures[0], rank_signature))
                raise RankMismatchError(
                    f"Ranks of group {self.group.name!r} disagree: rank 0 calls {first_call}, rank {rank} calls "
                    f"{other_call}. All ranks of a group must call the same ops in the same order with the same shapes "
                    "and dtypes."
                )

    # -- transfers ----------------------------------------------------------------------------------------------------

    def all_gather(self, op: str, x: Tensor) -> Pending[Tensor]:
        """Gather all ranks' `x` [n, ...], of equal shape, in rank order: [W * n, ...]."""
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        if out.numel() == 0:
            return PendingValue(out)
        pending = self._start_transfer(op, lambda: all_gather_single(out, x, group=self.process_group, async_op=True))
        return pending_output(pending, out)

    def all_to_all(self, op: str, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Pending[Tensor]:
        """Send the first send_sizes[0] rows to rank 0, the next send_sizes[1] to rank 1, and so on.

        Returns:
            The rows received, [sum(recv_sizes), ...], ordered by source rank.
        """
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        pending = self._start_transfer(
            op,
            lambda: dist.all_to_all_single(
                out, x, list(recv_sizes), list(send_sizes), group=self.process_group, async_op=True
            ),
        )
        return pending_output(pending, out)

    def shift(self, op: str, x: Tensor, out: Tensor, step: int) -> Pending[Tensor]:
        """Send `x` to rank r + step and receive `out` from rank r - step. An empty `x` or `out` is not sent.

        gloo does not support sends and receives in GPU memory, so GPU tensors are copied through host memory: the host
        waits until the current stream has computed `x`, and `wait` writes `out` on the stream that is then current.
        """
        self._create_communicator(op, x)
        group = self.process_group
        destination, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
        receive_buffer = host_buffer(out) if self._stages_on_host else out

        def launch() -> Any:
            ops, peers = [], []
            if out.numel():
                ops.append(dist.P2POp(dist.irecv, receive_buffer, group=group, group_peer=source))
                peers.append(source)
            if x.numel():
                send_buffer = copy_to_host(x) if self._stages_on_host else x
                ops.append(dist.P2POp(dist.isend, send_buffer, group=group, group_peer=destination))
                peers.append(destination)
            works = dist.batch_isend_irecv(ops) if ops else []
            if self.backend != "gloo":  # NCCL returns one work for the whole batch, or none
                return works
            # `_wait_in_slices` raises at the deadline; gloo's own timeout must expire later.
            return PendingMessages(list(zip(peers, works, strict=True)), settings.timeout_seconds() + PEER_POLL_SECONDS)

        pending = self._start_transfer(op, launch)
        if not self._stages_on_host:
            return pending_output(pending, out)

        def finish() -> Tensor:
            pending.wait()
            copy_from_host(receive_buffer, out)
            return out

        return PendingCall(finish)

    def _create_communicator(self, op: str, template: Tensor) -> None:
        """Create the group's communicator at the first shift, by a collective call of all ranks.

        torch creates it at the first call. If that call is a batch of sends and receives, all ranks must take part (see
        batch_isend_irecv). But in a shift some ranks may have nothing to send, for example with a sliding window.
        """
        if not self._has_communicator:
            self._has_communicator = True
            dummy = template.new_zeros(1)
            self._start_transfer(op, lambda: dist.all_reduce(dummy, group=self.process_group, async_op=True)).wait()

    def reduce_scatter(self, op: str, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> Pending[Tensor]:
        """Return this rank's rows of the sum of `x` [sum(sizes), ...] over ranks, plus `bias`."""
        num_own_rows = sizes[self.rank]
        if self.backend == "nccl" and len(set(sizes)) == 1:
            out = x.new_empty((num_own_rows, *x.shape[1:]))
            pending = self._start_transfer(
                op, lambda: reduce_scatter_single(out, x, group=self.process_group, async_op=True)
            )
            return _add_bias(bias, pending_output(pending, out))
        terms = self.all_to_all(op, x, sizes, [num_own_rows] * self.world_size)
        return PendingCall(
            lambda: sum_in_rank_order(terms.wait().view(self.world_size, num_own_rows, *x.shape[1:]), bias)
        )

    def all_reduce(self, op: str, x: Tensor, bias: Tensor | None = None) -> Pending[Tensor]:
        """Return the sum over ranks of `x` [..., n] (may be overwritten), plus `bias` [n]; same bits on all ranks."""
        first_step = self.all_reduce_steps(op, x, bias)
        return PendingCall(lambda: first_step.wait().wait())

    def all_reduce_steps(self, op: str, x: Tensor, bias: Tensor | None = None) -> Pending[Pending[Tensor]]:
        """Start `all_reduce` in up to two steps, so that a caller can interleave the steps of several sums."""
        if self.backend == "nccl":
            pending = self._start_transfer(op, lambda: dist.all_reduce(x, group=self.process_group, async_op=True))
            pending_total = _add_bias(bias, pending_output(pending, x))
            return PendingCall(lambda: PendingValue(pending_total.wait()))
        if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            terms = self.all_gather(op, x.unsqueeze(0))
            return PendingCall(lambda: PendingValue(sum_in_rank_order(terms.wait(), bias)))
        return self._two_shot(op, x, bias)

    def _two_shot(self, op: str, x: Tensor, bias: Tensor | None) -> Pending[Pending[Tensor]]:
        # Split by elements, not by rows, so that a tensor with few long rows is distributed evenly too.
        num_elements = x.numel()
        chunk_size = -(-num_elements // self.world_size)
        flat = x.view(-1)
        if chunk_size * self.world_size != num_elements:
            flat = torch.nn.functional.pad(flat, (0, chunk_size * self.world_size - num_elements))
        if bias is not None:
            # Add the bias of this rank's elements before rounding, so that the result is rounded only once.
            offset = self.rank * chunk_size % bias.numel()
            bias = bias.repeat(-(-(offset + chunk_size) // bias.numel()))[offset : offset + chunk_size]
        own_sum = self.reduce_scatter(op, flat, [chunk_size] * self.world_size, bias)

        def start_all_gather() -> Pending[Tensor]:
            pending_total = self.all_gather(op, own_sum.wait())
            return PendingCall(lambda: pending_total.wait()[:num_elements].view_as(x))

        return PendingCall(start_all_gather)


def _add_bias(bias: Tensor | None, pending: Pending[Tensor]) -> Pending[Tensor]:
    return pending if bias is None else PendingCall(lambda: pending.wait().add_(bias))


def _decode_signature(signature: Tensor) -> str:
    return bytes(signature.tolist())[4:].rstrip(b"\0").decode("utf-8", "replace")


def _wait_up_to(work: Any, seconds: float) -> bool:
    """Wait up to `seconds`; return True if `work` has finished."""
    if isinstance(work, PendingMessages):
        return work.wait_for(seconds)
    try:
        work.wait(max(timedelta(seconds=seconds), IMMEDIATE_TIMEOUT))
    except RuntimeError as error:
        if not any(phrase in str(error).lower() for phrase in _TIMEOUT_PHRASES):
            raise
        if not work.is_completed():
            return False
        # the work finished since the first wait, or the process group's own timeout expired (raises)
        work.wait(IMMEDIATE_TIMEOUT)
    return True


_BACKEND_NAMES: GroupSlot[dict[str, str]] = GroupSlot(lambda group: {})  # by device type
_TRANSPORTS: GroupSlot[dict[str, TorchDist]] = GroupSlot(lambda group: {})  # by device type


def backend_for_device(group: Group, device_type: str) -> str:
    """Return the name of the backend of `group` for tensors on `device_type`.

    Raises:
        ValueError: the group has no backend for them.
    """
    if (cached_backend := _BACKEND_NAMES[group].get(device_type)) is not None:
        return cached_backend
    config = dist.get_backend_config(group.process_group)
    backends = dict(pair.split(":") for pair in config.split(",")) if ":" in config else {device_type: config}
    if device_type not in backends:
        raise ValueError(
            f"The tensors are on {device_type}, but group {group.name!r} has backends for {sorted(backends)} only; "
            f"create the group with a backend for {device_type}."
        )
    backend = _BACKEND_NAMES[group][device_type] = backends[device_type]
    return backend


def torch_dist(group: Group, device_type: str) -> TorchDist:
    """Return the transport of `group` for tensors on `device_type`; the first call creates it."""
    transports = _TRANSPORTS[group]
    if device_type not in transports:
        transports[device_type] = TorchDist(group, device_type)
    return transports[device_type]


@on_destroy
def _close_transports(group: Group) -> None:
    """Close the group's connections, because peers may wait for this rank. torch does so when the group is freed."""
    for transport in _TRANSPORTS.get(group, {}).values():
        if transport.fatal_error is None:
            transport.fatal_error = transport.error(
                FusedTPError, transport.call_for_error("a call"), ": its process group was destroyed."
            )
            transport._depart()


def existing_torch_dist(group: Group, device_type: str) -> TorchDist | None:
    """Return the transport that `torch_dist` has created, or None."""
    return _TRANSPORTS[group].get(device_type)
