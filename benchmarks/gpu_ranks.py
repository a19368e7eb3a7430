"""Ranks as threads on one GPU, for benchmarks and tests: workspaces with loaded kernels, and their flags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fused_tp.backends.schedule import DimShards, GatherMatmul

from .gpu_timing import GpuContext, run_on_streams
from .local_ranks import LocalRank, assumed_gpu, run_local

# Exceeds the number of any call, so a flag with this value is permanently set.
PERMANENT_FLAG = 1 << 62


def prepare_workspace(
    rank: LocalRank,
    nbytes: int,
    warm_up: Callable[[Any], object],
    *,
    timeout_seconds: float = 20.0,
    workspace_class: Any = None,
) -> Any:
    """Make a workspace of `nbytes` on every rank; load and allocate everything that `warm_up(workspace)` needs.

    Loading a kernel and allocating device memory may wait for running kernels, which may wait for later launches. So
    the ranks warm up one after the other, in a workspace whose waits return at once: its results are wrong and are
    dropped. The returned workspace is a new one.

    Args:
        workspace_class: class of the workspace; None for `triton_kernels.comm.signals.Workspace`.
    """
    from fused_tp.triton_kernels.comm.signals import Workspace

    workspace_class = workspace_class or Workspace
    buffer, handle = rank.allocate(nbytes)
    workspace = workspace_class(buffer, handle, timeout_seconds=timeout_seconds, rescue_stream=rank.rescue_stream)
    with rank.in_turn():
        workspace.stop_waiting()
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)  # stop_waiting uses another stream
        warm_up(workspace)
    del workspace  # the next one takes its memory and its streams
    return workspace_class(buffer, handle, timeout_seconds=timeout_seconds, rescue_stream=rank.rescue_stream)


class CopiedGather:
    """all_gather_matmul of one rank, with shards that arrive by copy engines while the matmul runs."""

    def __init__(self, rank: LocalRank) -> None:
        from fused_tp.backends.copy_engine.copy_engine import CopyEngine
        from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule

        self.rank = rank
        self.engine: Any = _RecordingEngine(rank) if assumed_gpu() else CopyEngine(rank)
        self.schedule = FusedKernelSchedule(rank, None)

    def __call__(
        self,
        x_shard: Tensor,
        weights: Sequence[Tensor],
        *,
        rows: int,
        launch: Any,
        biases: Sequence[Tensor | None] | None = None,
        return_gathered: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather the ranks' shards to `rows` rows and multiply; return (results by weight, gathered x or None)."""
        biases = [None] * len(weights) if biases is None else biases
        problem = GatherMatmul(x_shard, weights, biases, 0, rows, return_gathered)
        shards = DimShards.from_shape((rows, x_shard.shape[1]), 0, self.rank.world_size)
        return self.schedule.gather_matmul_copied(problem, shards, self.engine, launch)

    def expired_wait(self) -> str | None:
        """Return the error message if a call has failed, else None."""
        failure = self.engine._failure()
        return None if failure is None else str(failure)


def prepare_copied_gather(rank: LocalRank, calls: Sequence[Callable[[CopiedGather], object]]) -> CopiedGather:
    """Make a `CopiedGather` on every rank: load all kernels of `calls`, and allocate the memory of the first call.

    The first call must be the same on all ranks, and the largest. `prepare_workspace` states why this is needed.
    """
    copied_gather = CopiedGather(rank)
    engine, copied_gather.engine = copied_gather.engine, cast("Any", _WarmUpEngine())
    with rank.in_turn():
        for call in calls:
            with contextlib.suppress(_LoadedError):
                call(copied_gather)
    copied_gather.engine = engine
    calls[0](copied_gather)
    rank.barrier()
    return copied_gather


class _LoadedError(Exception):
    """Ends a call that is made only to load its kernels, where it would start to gather."""


class _WarmUpEngine:
    """Fake of a copy engine and of its calls during warm-up: ends a call where it would gather."""

    def begin_call(self, op: str, gather_bytes: int) -> contextlib.AbstractContextManager[_WarmUpEngine]:
        return contextlib.nullcontext(self)

    def offer(self, *_: object) -> None:
        raise _LoadedError


class _RecordingEngine:
    """Fake of a copy engine and of its calls while kernels are recorded: offered shards are ignored."""

    def __init__(self, rank: LocalRank) -> None:
        self.rank = rank

    def begin_call(self, op: str, gather_bytes: int) -> contextlib.AbstractContextManager[_RecordingEngine]:
        return contextlib.nullcontext(self)

    def offer(self, *_: object) -> Any:
        from fused_tp.triton_kernels.gemm.all_gather_gemm import no_arrivals

        arrivals = no_arrivals(self.rank.world_size, 1, self.rank.device)
        return SimpleNamespace(
            arrival_flags=arrivals.arrived, order_scratch=arrivals.order, expired_flag=arrivals.expired
        )

    def finish(self, *_: object) -> None: ...


class RankDriver:
    """Ranks made by threads and driven from a single thread.

    `call_rank(rank, set_index)` is the call of one rank on one set of inputs.
    """

    def __init__(self, context: GpuContext, world_size: int, call_rank: Callable[[int, int], Any]) -> None:
        self.context, self.call_rank = context, call_rank
        self.streams = context.streams(world_size)

    def run_set(self, set_index: int = 0) -> list[Any]:
        """Make one call of every rank, in its stream."""
        return run_on_streams(self.streams, lambda rank: self.call_rank(rank, set_index))


class KernelRanks(RankDriver):
    """Ranks of a fused kernel.

    Args:
        workspace_nbytes: returns the bytes of the workspace of a rank.
        call: one call of a rank, `call(rank, set_index, its workspace)`.
        make_results: makes tensors like the results of two calls of a rank, as later calls overlap. Their memory stays
            in the pool of the rank's stream, because asking the driver for memory may wait for a kernel.
    """

    def __init__(
        self,
        context: GpuContext,
        world_size: int,
        workspace_nbytes: Callable[[int], int],
        call: Callable[[int, int, Any], Tensor],
        make_results: Callable[[int], object],
        workspace_class: Any = None,
    ) -> None:
        super().__init__(context, world_size, lambda rank, set_index: call(rank, set_index, self.workspaces[rank]))

        def make_kernel_workspace(rank: LocalRank) -> Any:
            def warm_up(workspace: Any) -> None:
                for _ in range(2):
                    call(rank.rank, 0, workspace)

            return prepare_workspace(
                rank, workspace_nbytes(rank.rank), warm_up, timeout_seconds=10.0, workspace_class=workspace_class
            )

        def make_copied_gather(rank: LocalRank) -> Any:
            return prepare_copied_gather(rank, [lambda copied_gather: call(rank.rank, 0, copied_gather)])

        make_workspace = make_copied_gather if workspace_class is CopiedGather else make_kernel_workspace
        context.synchronize()
        self.workspaces = run_local(world_size, make_workspace, device=context.device, timeout=300)
        run_on_streams(self.streams, make_results)

    def assert_in_time(self) -> None:
        """Synchronize; raise AssertionError if a wait has expired."""
        self.context.synchronize()
        for workspace in self.workspaces:
            expired_wait = workspace.expired_wait()
            assert expired_wait is None, str(expired_wait)


def set_all_flags(workspace: Any) -> None:
    """Set every flag of the workspace, so that its rank can run alone: every wait is already satisfied.

    Flags stay set for calls of one kind and size. Other calls number their flags differently and would read flags that
    this rank has set itself as a peer's: call this again before them.
    """
    from fused_tp.triton_kernels.comm.gather import PULLED, READY, GatherWorkspace
    from fused_tp.triton_kernels.comm.signals import flag_bytes

    buffer_bytes = workspace.buffer.view(torch.uint8)
    if isinstance(workspace, GatherWorkspace):  # begun, ready and pulled are set by peers; the others by this rank
        num_flag_runs = 1 + max(READY.value, PULLED.value)
        buffer_bytes[: num_flag_runs * 8 * workspace.world_size].view(torch.int64).fill_(PERMANENT_FLAG)
        return
    num_flag_bytes = flag_bytes(workspace.half_bytes)
    for half_index in range(2):
        begin = half_index * workspace.half_bytes
        buffer_bytes[begin : begin + num_flag_bytes].view(torch.int64).fill_(PERMANENT_FLAG)


def join_streams(streams: Sequence[torch.cuda.Stream]) -> None:
    """Make each stream wait for the work already enqueued in all streams."""
    streams = [stream for stream in streams if stream is not None]  # None while kernels are recorded
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


def random_normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers, drawn on the device; uninitialized while kernels are recorded, as nothing reads them."""
    if assumed_gpu():
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)
