"""Run several ranks as threads of one process on one device, with the interface of
`fused_tp.backends.symmetric_memory.symm_mem`.

    def fn(rank: LocalRank, ...): ...
    results = run_local(4, fn, ..., device="cuda")

It lets kernels that communicate run concurrently, be timed and pass through a sanitizer on a single GPU: each rank has
its own stream, and its peers' buffers are plain tensors of the same device.

Kernels that wait for each other must all be resident at once: give each rank its share of the SMs. Two operations of
the host can block until a running kernel ends, and that kernel may be waiting, in the worst case until its deadline,
for work not yet launched: loading a kernel for the first time, and allocating device memory. Use `LocalRank.in_turn` to
do both beforehand, one rank after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory, byte_range
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError
from fused_tp.core.settings import timeout_seconds

T = TypeVar("T")

_RANK_RETURNED = object()  # value that a rank exchanges when its function has returned

# Interpreted programs run one after the other; several of them execute all paths of a kernel.
CPU_PROGRAMS = 4
# Longest turn of a rank in `in_turn`, whatever its deadline for peers: it may compile the kernels that it launches.
TURN_SECONDS = 300.0


class LocalGroup:
    """State that the ranks of one process share: a barrier, the exchanged values, and the failures."""

    def __init__(self, world_size: int, device: torch.device | str = "cpu") -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; a group has at least 1 rank.")
        self.world_size = world_size
        self.device = _resolve_device(device)
        self.meeting_barrier = threading.Barrier(world_size)
        self.values: list[Any] = [None] * world_size
        self.meeting_counts = [0] * world_size  # number of meetings that each rank has arrived at
        self.failures: dict[int, BaseException] = {}  # in order of occurrence

    def rank(self, rank: int) -> LocalRank:
        """Return the view of one rank, for use by its thread only."""
        return LocalRank(self, _checked_rank(rank, self.world_size))

    def meet(self, rank: int, value: Any, description: str, seconds: float | None) -> list[Any]:
        """Wait for all ranks and return their values; `seconds` None: wait until the end of the run. A rank whose wait
        times out ends all meetings."""
        start = time.monotonic()
        self.meeting_counts[rank] += 1
        self.values[rank] = value
        description = f"{description} (meeting {self.meeting_counts[rank]}): rank {rank}"
        try:
            self.meeting_barrier.wait(seconds)
            values = list(self.values)
            self.meeting_barrier.wait(seconds)  # no rank writes its next value before all have read these
        except threading.BrokenBarrierError:
            absent_ranks = [r for r, count in enumerate(self.meeting_counts) if count < self.meeting_counts[rank]]
            if self.failures:
                failed_rank, error = next(iter(self.failures.items()))
                reason = f"rank {failed_rank} failed with {type(error).__name__}: {error}"
            elif absent_ranks and seconds is not None:
                wait_text = (
                    f"{description} waited {time.monotonic() - start:.2g} seconds for {_format_ranks(absent_ranks)}."
                )
                raise CollectiveTimeoutError(f"{wait_text} FUSED_TP_TIMEOUT sets the longest wait.") from None
            else:
                reason = "the run has ended."
            raise PeerLostError(f"{description} cannot continue, because {reason}") from None
        returned_ranks = [r for r, other_value in enumerate(values) if other_value is _RANK_RETURNED]
        if returned_ranks and value is not _RANK_RETURNED:
            raise PeerLostError(f"{description} waited for {_format_ranks(returned_ranks)}, which returned without it.")
        return values


class LocalRank(KernelMemory):
    """One rank of a `LocalGroup`, for use by its thread. Its methods are collective calls.

    Attributes:
        arch: compute capability of the GPU, such as 90 for sm_90; 0 on CPU.
        sms: this rank's share of the multiprocessors; on CPU the number of programs of a kernel to interpret.
        pids: empty; peers are threads of this process, which cannot die alone.
        serialized_by: the rank itself; ranks of one device must not wait for each other's turn.
    """

    shares_gpu = True

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self.serialized_by = self
        self.rank = rank
        self.world_size = group.world_size
        self.device = group.device
        self.pids: Mapping[int, int] = {}
        self.arch, self.sms = 0, CPU_PROGRAMS
        if self.device.type == "cpu" and (gpu := assumed_gpu()):
            self.arch, self.sms = gpu.arch, max(1, gpu.sms // self.world_size)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.arch = 10 * properties.major + properties.minor
            self.sms = max(1, properties.multi_processor_count // self.world_size)

    def allocate(self, nbytes: int) -> tuple[Tensor, LocalSymmetricMemory]:
        """Allocate a uint8 tensor [nbytes] that every rank can access; return it and a handle to those of all ranks.

        Raises:
            RankMismatchError: the ranks request different sizes.
        """
        rank_buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffers = self.exchange(rank_buffer, "allocate")
        for peer, buffer in enumerate(buffers):
            if buffer.nbytes != nbytes:
                raise RankMismatchError(
                    f"allocate: rank {self.rank} requested {nbytes} bytes, rank {peer} requested {buffer.nbytes}. All "
                    "ranks must request the same size."
                )
        return rank_buffer, LocalSymmetricMemory(self, buffers)

    def exchange(self, value: T, description: str = "exchange", seconds: float = 0.0) -> list[T]:
        """Return the values of all ranks, by rank. Waits for `seconds`; 0: for FUSED_TP_TIMEOUT."""
        return self._group.meet(self.rank, value, description, seconds or timeout_seconds())

    def synchronize(self) -> None:
        """Return once all work in this rank's stream has run."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def barrier(self, seconds: float = 0.0) -> None:
        """Return once all ranks have arrived and the work in their streams has run."""
        self.synchronize()
        self.exchange(None, "barrier", seconds)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on one rank after the other, each after the device has finished the previous one.

        Example: the first launch of a kernel, which loads it, and the first allocation of its results.
            with rank.in_turn():
                launch_without_waiting_for_others()
        """
        for turn in range(self.world_size):
            if turn == self.rank:
                yield
                self.synchronize()
            self.exchange(None, f"turn of rank {turn}", max(TURN_SECONDS, timeout_seconds()))


class LocalSymmetricMemory:
    """Memory of equal size on every rank of this process."""

    multicast_ptr = 0  # one device has no multicast

    def __init__(self, owner: LocalRank, buffers: Sequence[Tensor]) -> None:
        self._owner = owner
        self._buffers = list(buffers)
        self.rank = owner.rank
        self.world_size = owner.world_size
        self.device = owner.device
        self.buffer_size = self._buffers[self.rank].nbytes
        self.buffer_ptrs = [buffer.data_ptr() for buffer in buffers]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        """Return a view of `rank`'s buffer, starting at `storage_offset` elements."""
        memory = self._buffers[_checked_rank(rank, self.world_size)]
        begin, end = byte_range(sizes, dtype, storage_offset, memory.nbytes)
        return memory[begin:end].view(dtype).view(tuple(sizes))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return once all ranks have arrived and the work in their streams has run; `channel` is ignored."""
        self._owner.barrier(timeout_ms / 1000)


def run_local(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
) -> list[T]:
    """Call `fn(rank, *args)` on `world_size` ranks, which are threads, and return the results; `rank` is a `LocalRank`.

    On CUDA every thread has its own stream, which waits for the caller's, and whose work has run when this returns. A
    rank that fails releases the others.

    Args:
        timeout: seconds for the whole call; None for `FUSED_TP_TIMEOUT`, which bounds each single wait anyway.

    Raises:
        CollectiveTimeoutError: some ranks, which the message names, have not finished in time. Their threads may still
            run.
        Exception: the exception of the first rank that failed; its cause shows the tracebacks of all failed ranks.
    """
    group = LocalGroup(world_size, device)
    results: dict[int, T] = {}
    seconds = timeout_seconds() if timeout is None else timeout

    def run(rank: int, stream: torch.cuda.Stream | None) -> None:
        try:
            if stream is None:
                results[rank] = fn(group.rank(rank), *args)
            else:
                with torch.cuda.device(group.device), torch.cuda.stream(stream):
                    result = fn(group.rank(rank), *args)
                    stream.synchronize()
                    results[rank] = result
            with contextlib.suppress(PeerLostError):  # the run has failed or is over, and this rank has its result
                group.meet(rank, _RANK_RETURNED, "the end", None)
        except BaseException as error:
            group.failures[rank] = error
            group.meeting_barrier.abort()

    streams = _create_streams(group, run)  # reserved while `run` lives, that is, until its last thread has ended
    # Daemons, so that a thread that never returns does not keep the process from exiting.
    threads = [
        threading.Thread(target=run, args=(rank, streams[rank]), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + seconds
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        unfinished_ranks, failures = set(range(world_size)) - {*results} - {*group.failures}, dict(group.failures)
        group.meeting_barrier.abort()
    if failures:
        first_error = next(iter(failures.values()))
        tracebacks = "\n".join(
            f"Rank {rank}:\n{''.join(traceback.format_exception(type(error), error, error.__traceback__))}"
            for rank, error in failures.items()
        )
        raise first_error from FusedTPError(f"{len(failures)} of {world_size} local ranks failed.\n{tracebacks}")
    if unfinished_ranks:
        raise CollectiveTimeoutError(
            f"run_local: {_format_ranks(unfinished_ranks)} of {world_size} had not finished in {seconds:g} seconds."
        )
    return [results[rank] for rank in range(world_size)]


def _resolve_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device is {device}; local ranks run on cpu or cuda.")
    if not torch.cuda.is_initialized():
        # Streams that share a hardware queue run one after the other, so a rank could wait for a rank behind it in the
        # queue. There are 8 queues unless more are requested before CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not torch.cuda.is_available():
        raise ValueError("device is cuda, and this machine has no NVIDIA GPU that torch can use.")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def assumed_gpu() -> Any:
    """GPU that CPU tensors emulate while kernels are compiled without a GPU; else None."""
    device = sys.modules.get("fused_tp.triton_kernels.device")
    return None if device is None else device.assumed_gpu()


def _create_streams(group: LocalGroup, owner: object) -> list[torch.cuda.Stream | None]:
    """Create a stream for each rank, which has no other user while `owner` lives."""
    if group.device.type == "cpu":
        return [None] * group.world_size
    from fused_tp.triton_kernels.comm.streams import own_streams

    # Rejected: torch's pools, which return a stream repeatedly, to another rank, its workspace or the caller. The side
    # streams of workspaces are created by the same function: the driver assigns streams to the GPU's queues in order of
    # creation, and work behind another rank's waiting kernel in one queue never runs.
    streams: list[torch.cuda.Stream | None] = [*own_streams(owner, group.device, group.world_size)]
    for stream in streams:
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(group.device))
    return streams


def _checked_rank(rank: int, world_size: int) -> int:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; the group has ranks 0 to {world_size - 1}.")
    return rank


def _format_ranks(ranks: Iterable[int]) -> str:
    sorted_ranks = sorted(ranks)
    return f"rank{'s' * (len(sorted_ranks) > 1)} {', '.join(map(str, sorted_ranks))}"
