"""Transport over a group's own NCCL communicator, with the chunked exchanges of `nccl_pipeline`.

All work is enqueued on the communicator's stream, with an event after each exchange, and no call waits for data. (The
host does wait for NCCL's launches, which run on a thread of NCCL. In the first exchange with a peer it waits for the
connection, which the peer must join.) Therefore a later call raises the errors of GPU streams, and data that did
not arrive is NaN. A watchdog (csrc/nccl) enforces the deadline of every exchange. A thread of this module polls for
peers of this host that have exited, and polls the group's store for peers on any host that have failed. A rank that
fails aborts the communicator, so that no stream keeps waiting.

NCCL's own sums are not used, because they round to the tensor's dtype at every hop. Terms are exchanged, and added in
rank order.

Tests replace NCCL and the CUDA driver by test doubles that move host memory (`NCCL_LIBRARIES`). CPU tensors then run
through this code unchanged. An operation that would wait in a stream blocks the host instead, and raises errors
immediately.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.messages.torch_dist import TorchDist, existing_torch_dist
from fused_tp.backends.nccl.chunk_plan import ChunkPlan, RowRange, gather_plan
from fused_tp.backends.symmetric_memory.symm_mem import make_once_on_device
from fused_tp.core import settings, tracing
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.failure import PEER_POLL_SECONDS, StartedCall
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.peer_watch import PeerWatch, process_identity, watchable_pids
from fused_tp.core.pending import Pending, PendingValue, current_stream, pending_output
from fused_tp.core.store import exchange, first_unavailability

_LOG = logging.getLogger("fused_tp")
_ARRIVAL_SECONDS = 0.3  # after a peer has exited, its data may still arrive for this long
_IDLE_SECONDS = 2.0  # the same if no transfer is in flight: a replayed CUDA graph may wait for the peer


Transfers = Sequence[tuple[int, int, int]]  # (peer, address, bytes) of each transfer


@dataclass
class ExchangeQueue:
    """Sequence of `num_exchanges` exchanges on a communicator's stream, with an event after each.

    No method makes the host wait, so exchanges can be captured in a CUDA graph. The watch thread reads this object.
    The caller must keep the sent and received tensors alive until it has waited for every exchange, or until the
    communicator's stream has finished them.
    """

    communicator: Any
    num_exchanges: int
    call: StartedCall  # the call of the last exchange enqueued
    tickets: list[Any] = field(default_factory=list)  # one per enqueued exchange; None: no data has been exchanged yet
    includes_own_rows: bool = False
    is_abandoned: bool = False
    waiting_index: int = -1  # index of the exchange that was last observed waiting for peers
    waiting_since: float = 0.0  # time.perf_counter of that observation

    def add(self, sends: Transfers, receives: Transfers, after_stream: int | None) -> None:
        """Enqueue one more exchange; it starts after the work enqueued on stream `after_stream`, if given."""
        if sends or receives:
            self.tickets.append(self.communicator.exchange(sends, receives, after_stream))
        else:
            # an empty exchange is complete when the earlier ones are
            self.tickets.append(self.tickets[-1] if self.tickets else None)

    def wait(self, exchange_index: int, stream: int) -> None:
        """Make `stream` wait for exchange `exchange_index` and all before it; raise if the communicator has failed."""
        ticket = self.tickets[exchange_index]
        if ticket is None:
            self.communicator.check()
        else:
            self.communicator.wait(ticket, stream)

    def has_ended(self) -> bool:
        """True if all exchanges have been enqueued and have finished. Captured exchanges count as finished."""
        if len(self.tickets) < self.num_exchanges:
            return False
        return not self.tickets or self.tickets[-1] is None or self.communicator.has_ended(self.tickets[-1])

    def first_waiting_index(self) -> int:
        """Return the index of the first unfinished exchange if this rank has begun it, so that it waits; else -1."""
        for i, ticket in enumerate(self.tickets):
            if ticket is not None and not self.communicator.has_ended(ticket):
                return i if self.communicator.has_begun(ticket) else -1
        return -1

    def is_captured(self) -> bool:
        """True if some exchange is part of a CUDA graph."""
        return any(ticket is not None and ticket.captured for ticket in self.tickets)


# Called with (queue, stream): enqueues exchanges, which start after the work in the stream.
EnqueueExchanges = Callable[[ExchangeQueue, int], None]


def _row_transfers(address: int, row_ranges: Sequence[RowRange], row_bytes: int) -> Transfers:
    return [
        (peer, address + start * row_bytes, num_rows * row_bytes) for peer, start, num_rows in row_ranges if row_bytes
    ]


class PendingExchanges(Pending[None]):
    """The exchanges of one transfer, and the tensors that they read and write.

    This object keeps the tensors alive until the last exchange has been waited for. The stream on which it was created
    waits too, so that the allocator may reuse their memory on that stream; any other stream that waits is recorded with
    the allocator. Rejected: recording the communicator's stream, because tensors may outlive the communicator.
    """

    def __init__(
        self, transport: NcclDist, queue: ExchangeQueue, launch: EnqueueExchanges, tensors: Sequence[Tensor]
    ) -> None:
        self._transport = transport
        self._queue = queue
        self._launch = launch
        self._tensors = tensors
        self._stream = transport.stream()

    @property
    def includes_own_rows(self) -> bool:
        """True if this gather also copies this rank's rows into the gathered tensor."""
        return self._queue.includes_own_rows

    def send(self) -> None:
        """Enqueue the next exchange of a scatter; it starts after the work enqueued on the current stream so far."""
        # Counted as a separate call, so that its status shows whether a rank is stuck between two sends.
        queue, transport = self._queue, self._transport
        if queue.tickets:
            queue.call = transport.begin(queue.call.op)
        transport.attempt(queue.call, lambda: self._launch(queue, transport.stream()))

    def wait(self, exchange_index: int | None = None) -> None:
        """Make the current stream wait for exchange `exchange_index`, by default for all exchanges."""
        last_index = len(self._queue.tickets) - 1
        index = last_index if exchange_index is None else exchange_index
        stream = self._transport.stream()
        if index >= 0:
            self._transport.wait(self._queue, index, stream)
        if index == last_index:
            if stream != self._stream and index >= 0:
                self._transport.wait(self._queue, index, self._stream)
                for tensor in self._tensors:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._tensors = ()

    def __del__(self) -> None:
        if not self._tensors:
            return
        self._queue.is_abandoned = True
        with suppress(Exception):
            self._transport.abandon(self._queue, self._stream)


class NcclDist(TorchDist):
    """Transfers of one group over its own NCCL communicator; created by `nccl_dist`, on all ranks together.

    Args:
        communicator: the `fused_tp._core.Communicator` of the group.
        pids: pids, by rank, of the peers' processes that this process can watch.
    """

    arrival_verb = "enqueued it"  # not "arrived": the GPU of that rank may not have reached the call yet

    def __init__(self, group: Group, device: torch.device, communicator: Any, pids: Mapping[int, int]) -> None:
        # passed explicitly: the group may have no backend for this device
        super().__init__(group, device.type, backend="NCCL")
        self.device = device
        self.communicator = communicator
        _, self._driver = load_libraries(device)
        self._pid = os.getpid()
        self._failure_lock = threading.RLock()
        self._pending_error: FusedTPError | None = None  # error detected by the watch thread; the next call raises it
        self._in_flight: deque[ExchangeQueue] = deque()
        self._has_captured = False  # True once an exchange was captured: graphs may be replayed without a call
        self._published_call = 0  # number of the last call for which a status was published
        self._exited_ranks: list[int] = []  # ranks whose processes have exited
        self._last_exit_time = 0.0
        self._watch = PeerWatch(self, pids, NcclDist._on_peer_lost, NcclDist._poll)

    # -- movements ----------------------------------------------------------------------------------------------------

    def gather(self, op: str, own_rows: Tensor, gathered: Tensor, plan: ChunkPlan) -> PendingExchanges:
        """Start gathering the ranks' rows `own_rows` [plan.counts[rank], n] into `gathered` [sum(plan.counts), n]."""
        row_bytes = own_rows.shape[1] * own_rows.element_size()
        source_address, destination_address = own_rows.data_ptr(), gathered.data_ptr()

        def launch(queue: ExchangeQueue, stream: int) -> None:
            if len(plan.exchanges) == 1 and len(set(plan.counts)) == 1 and plan.counts[0] * row_bytes > 0:
                queue.tickets.append(
                    self.communicator.all_gather(
                        source_address, destination_address, plan.counts[0] * row_bytes, stream
                    )
                )
                queue.includes_own_rows = True
                return
            for sends, receives in plan.exchanges:
                # Only the first non-empty exchange waits for `stream`; the later ones run after it.
                after_stream = stream if not queue.tickets or queue.tickets[-1] is None else None
                queue.add(
                    _row_transfers(source_address, sends, row_bytes),
                    _row_transfers(destination_address, receives, row_bytes),
                    after_stream,
                )

        return self._start_exchanges(op, len(plan.exchanges), launch, (own_rows, gathered))

    def scatter(self, op: str, partial: Tensor, terms: Tensor, plan: ChunkPlan) -> PendingExchanges:
        """Start receiving the peers' terms of this rank's rows in `terms` [W, plan.counts[rank], n].

        `partial` [sum(plan.counts), n] holds this rank's terms of all ranks' rows; its own rows may be omitted.
        For each exchange in turn, the caller computes the rows it sends (`plan.row_ranges`) and then calls `send`.
        """
        row_bytes, own_count = terms.shape[2] * terms.element_size(), plan.counts[self.rank]
        num_omitted_rows = own_count if partial.shape[0] != sum(plan.counts) else 0
        source_address, destination_address = partial.data_ptr(), terms.data_ptr()

        def launch(queue: ExchangeQueue, stream: int) -> None:
            exchange = plan.exchanges[len(queue.tickets)]
            sends = [
                row_range._replace(start=row_range.start - num_omitted_rows * (row_range.peer > self.rank))
                for row_range in exchange.sends
            ]
            receives = [
                row_range._replace(start=row_range.start + own_count * row_range.peer)
                for row_range in exchange.receives
            ]
            queue.add(
                _row_transfers(source_address, sends, row_bytes),
                _row_transfers(destination_address, receives, row_bytes),
                stream,
            )

        return self._start_exchanges(op, len(plan.exchanges), launch, (partial, terms), enqueue_now=False)

    def all_gather(self, op: str, x: Tensor) -> Pending[Tensor]:
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        if out.numel() == 0:
            return PendingValue(out)
        plan = gather_plan((1,) * self.world_size, self.rank, 1)
        pending_gather = self.gather(op, x.view(1, -1), out.view(self.world_size, -1), plan)
        if not pending_gather.includes_own_rows:  # a group of one
            out[self.rank * x.shape[0] : (self.rank + 1) * x.shape[0]].copy_(x)
        return pending_output(pending_gather, out)

    def all_to_all(self, op: str, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Pending[Tensor]:
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        send_blocks, receive_blocks = x.split(list(send_sizes)), out.split(list(recv_sizes))
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        pending = self._exchange(
            op, [(r, send_blocks[r]) for r in peers], [(r, receive_blocks[r]) for r in peers], (x, out)
        )
        receive_blocks[self.rank].copy_(send_blocks[self.rank])
        return pending_output(pending, out)

    def shift(self, op: str, x: Tensor, out: Tensor, step: int) -> Pending[Tensor]:
        destination, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
        return pending_output(self._exchange(op, [(destination, x)], [(source, out)], (x, out)), out)

    def _exchange(
        self,
        op: str,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        tensors: Sequence[Tensor],
    ) -> PendingExchanges:
        send_transfers, receive_transfers = (
            [(rank, t.data_ptr(), t.nbytes) for rank, t in peer_tensors if t.nbytes]
            for peer_tensors in (sends, receives)
        )
        return self._start_exchanges(
            op, 1, lambda queue, stream: queue.add(send_transfers, receive_transfers, stream), tensors
        )

    # -- starting and waiting -----------------------------------------------------------------------------------------

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return current_stream(self.device)

    def _start_exchanges(
        self,
        op: str,
        num_exchanges: int,
        launch: EnqueueExchanges,
        tensors: Sequence[Tensor],
        *,
        enqueue_now: bool = True,
    ) -> PendingExchanges:
        """Start a transfer. `launch` enqueues all exchanges; without `enqueue_now`, one per `send`."""
        queue = ExchangeQueue(self.communicator, num_exchanges, self.begin(op))
        try:
            with self.abort_scope(op):
                if enqueue_now:
                    self.attempt(queue.call, lambda: launch(queue, self.stream()))
        except BaseException:
            self.abandon(None, self.stream())
            raise
        if queue.is_captured() or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._has_captured = True
        else:
            self._in_flight.append(queue)
        return PendingExchanges(self, queue, launch, tensors)

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield  # nothing runs while a graph is being captured
            return
        with super().abort_scope(op):
            yield

    def _count_started(self) -> int:
        return int(self.communicator.calls) if os.getpid() == self._pid else 0

    def begin(self, op: str) -> StartedCall:
        """Count a new call of `op` and return it. Each exchange of a scatter counts as a call."""
        if os.getpid() != self._pid:
            raise FusedTPError(
                f"This process is a fork of rank {self.rank} of group {self.group.name!r}; a forked process cannot "
                "use the group's communicator. Create new groups in it."
            )
        if self.fatal_error is not None:
            raise self._abort_on_error(
                StartedCall(op, self.calls + 1, time.perf_counter()), RuntimeError(str(self.fatal_error))
            )
        self.communicator.timeout_seconds = settings.timeout_seconds()
        return self._count_call(op)

    def attempt(self, call: StartedCall, work: Callable[[], Any]) -> Any:
        """Return `work()`, and raise its errors as errors of this group."""
        try:
            return work()
        except RuntimeError as error:
            raise self._abort_on_error(call, error) from error

    def wait(self, queue: ExchangeQueue, index: int, stream: int) -> None:
        """Make `stream` wait for exchange `index` of `queue`."""
        with tracing.wait_span(queue.call.op):
            self.attempt(queue.call, lambda: queue.wait(index, stream))

    def abandon(self, queue: ExchangeQueue | None, stream: int) -> None:
        """Make the memory of an abandoned transfer safe to reuse on `stream`. Errors abandon transfers."""
        if os.getpid() != self._pid:
            return
        if queue is not None and self.device.type == "cuda":
            with suppress(FusedTPError):
                if queue.tickets:
                    queue.wait(-1, stream)
                return
        # Reached on the CPU, or if the communicator has failed, which ends the work in its stream. Errors of a broken
        # device are suppressed, because the exception that is being raised is more important.
        with suppress(RuntimeError):
            self._driver.synchronize(self.communicator.device, self.communicator.stream, settings.timeout_seconds())

    # -- failing ------------------------------------------------------------------------------------------------------

    def _abort_on_error(self, call: StartedCall, error: RuntimeError) -> FusedTPError:
        """Abort because of `error` of the communicator, unless done before; return the error to raise."""
        with self._failure_lock:
            if self.fatal_error is None:
                self._pending_error = self._abort_group(call, error)
            failure, self._pending_error = self._pending_error, None
        return failure if failure is not None else self.unusable_error()

    def _abort_group(self, call: StartedCall, error: RuntimeError) -> FusedTPError:
        reason = str(error).splitlines()[0]
        try:
            if isinstance(error, CollectiveTimeoutError):
                # A rank that was stopped finds that its own deadline has passed and the others have left.
                is_late = time.perf_counter() - call.start_time > 1.5 * settings.timeout_seconds()
                if is_late and self.board.has_failure():
                    return self.abort_following_peer(call)
                return self.abort_timed_out(call, reason)
            if isinstance(error, PeerLostError) and not self._exited_ranks:
                return self.abort_peer_lost(call, reason)
            if isinstance(error, PeerLostError):
                message_end, missing = " lost {missing}: its process has exited.", dict.fromkeys(self._exited_ranks, "")
                return self.abort(call, self.error(PeerLostError, call, message_end, missing=missing))
            if self.board.has_failure():
                return self.abort_following_peer(call)
            return self.abort(call, self.error(FusedTPError, call, " failed: {reason}", reason=reason))
        finally:
            self._abort_transports(reason)

    def _abort_transports(self, reason: str) -> None:
        """Abort the communicator, and make the group's torch.distributed transport for this device unusable too."""
        self.communicator.abort(str(self.fatal_error or reason))
        torch_transport = existing_torch_dist(self.group, self.device.type)
        if torch_transport is not None and torch_transport.fatal_error is None:
            torch_transport.fatal_error = self.fatal_error

    def abort_because(self, reason: str) -> None:
        if self.fatal_error is None:
            self._abort_on_error(self.call_for_error("a call"), RuntimeError(reason))

    def abort_midway(self, call: StartedCall, error: BaseException) -> None:
        with self._failure_lock:
            if self.fatal_error is not None:
                return
            try:
                super().abort_midway(call, error)
            finally:
                self._abort_transports(f"{call.op} raised {type(error).__name__}")

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _on_peer_lost(self, rank: int) -> None:
        self._exited_ranks.append(rank)
        self._last_exit_time = time.perf_counter()

    def _poll(self) -> None:
        if not self._failure_lock.acquire(blocking=False):  # a call is already handling a failure
            return
        try:
            if self.fatal_error is None:
                self._poll_for_failures()
        finally:
            self._failure_lock.release()

    def _poll_for_failures(self) -> None:
        if self.communicator.failure:
            # Report it here, because a rank that only replays graphs makes no call. But the exit of a peer is not an
            # error if no exchange waits for the peer.
            if self._in_flight or self._has_captured or not self._exited_ranks:
                self._report_failure()
            return
        with suppress(RuntimeError):  # the communicator's own watchdog reports a broken device
            while self._in_flight and (self._in_flight[0].is_abandoned or self._in_flight[0].has_ended()):
                self._in_flight.popleft()
        call = self._in_flight[0].call if self._in_flight else None
        if self._exited_ranks and self._waits_for_exited_peer():
            self.communicator.lose(self._exited_ranks[0], "its process has exited")
            if call is not None or self._has_captured:
                self._report_failure()
            return
        if call is None or time.perf_counter() - call.start_time < PEER_POLL_SECONDS:
            return
        if self._published_call < call.call_number:
            self._published_call = call.call_number
            self.post_status(call)
        if self.board.has_failure():
            self.communicator.abort("a peer has aborted the group")  # aborts waits in the stream; later calls raise

    def _waits_for_exited_peer(self) -> bool:
        """True if in-flight exchanges (or replayed CUDA graphs, if there are none) wait for a peer that has exited.

        A delay is needed: at the end of a program ranks exit one after the other, and data that they have sent still
        arrives. The delay starts when this rank's own computation has reached the exchange.
        """
        now = time.perf_counter()
        if not self._in_flight:
            return now - self._last_exit_time > _IDLE_SECONDS
        oldest_queue, waiting_index = self._in_flight[0], -1
        with suppress(RuntimeError):  # the communicator's own watchdog reports a broken device
            waiting_index = oldest_queue.first_waiting_index()
        if waiting_index < 0 or waiting_index != oldest_queue.waiting_index:
            oldest_queue.waiting_index, oldest_queue.waiting_since = waiting_index, now
        return waiting_index >= 0 and now - max(self._last_exit_time, oldest_queue.waiting_since) > _ARRIVAL_SECONDS

    def _report_failure(self) -> None:
        """Abort and log the error now. The next call will raise it, but may never happen, while peers wait."""
        if self._in_flight:
            call = self._in_flight[0].call
        else:
            call = self.call_for_error(self._ops[-1] if self._ops else "a CUDA graph")
        with self._failure_lock:
            if self.fatal_error is not None:
                return
            try:
                self.communicator.check()
            except RuntimeError as error:
                self._pending_error = self._abort_group(call, error)
        if self.device.type == "cuda":
            _LOG.error(
                "%s Data in flight became NaN. Results of work enqueued after it, and of CUDA graphs replayed from now "
                "on, are undefined.",
                self.fatal_error,
            )


# -- creation ---------------------------------------------------------------------------------------------------------


# By device type and index.
_NCCL_TRANSPORTS: GroupSlot[dict[tuple[str, int], NcclDist | Availability]] = GroupSlot(lambda group: {})


def nccl_dist(group: Group, device: torch.device) -> NcclDist | Availability:
    """Return the group's communicator for `device`, or the reason why there is none. The first call is collective.

    Raises the errors of `make_once_on_device`.
    """
    return make_once_on_device(_NCCL_TRANSPORTS, group, device, "NCCL communicator", _create_transport)


def _create_transport(group: Group, device: torch.device) -> NcclDist | Availability:
    own_info = own_rank_info(group, device)
    rank_infos = [NcclRankInfo(**fields) for fields in exchange(group, "nccl", asdict(own_info))]
    if not (availability := check_rank_infos(rank_infos)):
        return availability
    library, driver = load_libraries(device)
    communicator = import_module("fused_tp._core").Communicator(
        library,
        driver,
        device.index or 0,
        bytes.fromhex(rank_infos[0].id),
        group.rank,
        group.size,
        timeout_seconds=settings.timeout_seconds(),
    )
    pids = watchable_pids([rank_info.process for rank_info in rank_infos])
    return NcclDist(group, device, communicator, pids)


# -- availability, from information that the ranks exchange -----------------------------------------------------------


# File names of NCCL (empty: the library that torch has loaded) and of the driver, by device type.
NCCL_LIBRARIES = {"cuda": ("", "libcuda.so.1")}


def load_libraries(device: torch.device) -> tuple[Any, Any]:
    """Load `_core.NcclLibrary` and `_core.Driver`. Raises RuntimeError if one of them is unavailable."""
    core = import_module("fused_tp._core")
    nccl_name, driver_name = NCCL_LIBRARIES[device.type]
    return core.NcclLibrary(nccl_name), core.Driver(driver_name)


@dataclass(frozen=True)
class NcclRankInfo:
    """Information about one rank, sent to all ranks to decide whether a communicator can be created."""

    process: Sequence[str | int]  # from `process_identity`
    gpu: str = ""
    version: int = 0
    id: str = ""  # rank 0's unique id, in hex
    problem: str = ""


def own_rank_info(group: Group, device: torch.device) -> NcclRankInfo:
    """Return the information about this rank."""
    if find_spec("fused_tp._core") is None:
        return NcclRankInfo(process_identity(), problem="this installation has no native core")
    if device.type not in NCCL_LIBRARIES:
        return NcclRankInfo(process_identity(), problem=f"NCCL supports NVIDIA GPUs only, not {device.type}")
    try:
        library, _ = load_libraries(device)
        unique_id = library.make_id().hex() if group.rank == 0 else ""
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    except RuntimeError as error:
        return NcclRankInfo(process_identity(), problem=str(error).splitlines()[0].rstrip("."))
    if os.environ.get("NCCL_COMM_BLOCKING", "").strip() not in ("", "0", "-1"):
        # The variable overrides the communicator's configuration, and a blocking call of NCCL has no deadline.
        return NcclRankInfo(
            process_identity(), problem="NCCL_COMM_BLOCKING is set: unset it, so that no call of NCCL blocks"
        )
    # NCCL 2.30 and later allow several ranks on one GPU if the variable is set.
    may_share_gpu = library.version >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return NcclRankInfo(process_identity(), "" if may_share_gpu else gpu, library.version, unique_id)


def check_rank_infos(rank_infos: Sequence[NcclRankInfo]) -> Availability:
    """Return whether the ranks can create a communicator."""
    if not (availability := first_unavailability(rank_info.problem for rank_info in rank_infos)):
        return availability
    versions = sorted({rank_info.version for rank_info in rank_infos})
    if len({version // 100 for version in versions}) > 1:
        return unavailable(
            f"the group's ranks have loaded different versions of NCCL: {', '.join(map(_format_version, versions))}"
        )
    gpus = [rank_info.gpu for rank_info in rank_infos if rank_info.gpu]
    if len(set(gpus)) < len(gpus):
        return unavailable(
            "several ranks of the group share a GPU (NCCL 2.30 and later support this with "
            "NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    return AVAILABLE


def _format_version(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
