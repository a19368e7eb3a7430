"""Ranks as threads on one GPU, for benchmarks and tests: workspaces with loaded kernels, and their flags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fused_tp.backends.schedule import DimShards, GatherMatmul

from .gpu_timing import GpuContext, each
from .local_ranks import LocalRank, assumed_gpu, run_local

# Above the number of any call, so a flag with this value is permanently set.
PERMANENT_FLAG = 1 << 62


def prepare_workspace(
    rank: LocalRank,
    nbytes: int,
    rehearse: Callable[[Any], object],
    *,
    timeout_seconds: float = 20.0,
    workspace_class: Any = None,
) -> Any:
    """Make a workspace of `nbytes` on every rank; load and allocate everything that `rehearse(workspace)` needs.

    Loading a kernel and allocating device memory may wait for running kernels, which may wait for later launches. So
    the ranks rehearse one after the other, in a workspace whose waits return at once: the results are wrong and
    dropped, and the workspace is made anew.

    Args:
        kind: the class of workspace; None for `triton_kernels.comm.signals.Workspace`.
    """
    from fused_tp.triton_kernels.comm.signals import Workspace

    workspace_class = workspace_class or Workspace
    buffer, handle = rank.allocate(nbytes)
    workspace = workspace_class(buffer, handle, timeout_seconds=timeout_seconds, rescue=rank.rescue)
    with rank.in_turn():
        workspace.stop_waiting()
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)  # stop_waiting uses another stream
        rehearse(workspace)
    del workspace  # the next one takes its memory and its streams
    return workspace_class(buffer, handle, timeout_seconds=timeout_seconds, rescue=rank.rescue)


class CopiedGather:
    """all_gather_matmul of one rank, with shards that arrive by copy engines while the matmul runs."""

    def __init__(self, rank: LocalRank) -> None:
        from fused_tp.backends.copy_engine.copy_engine import CopyEngine
        from fused_tp.backends.triton.fused_kernel import FusedKernel

        self.rank = rank
        self.engine: Any = _RecordingEngine(rank) if assumed_gpu() else CopyEngine(rank)
        self.schedule = FusedKernel(rank, None)

    def __call__(
        self,
        x_shard: Tensor,
        weights: Sequence[Tensor],
        *,
        rows: int,
        launch: Any,
        biases: Sequence[Tensor | None] | None = None,
        gathered: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather the ranks' shards to `rows` rows and multiply; return (results by weight, gathered x or None)."""
        biases = [None] * len(weights) if biases is None else biases
        problem = GatherMatmul(x_shard, weights, biases, 0, rows, gathered)
        shards = DimShards.from_shape((rows, x_shard.shape[1]), 0, self.rank.world_size)
        return self.schedule.gather_matmul_copied(problem, shards, self.engine, launch)

    def expired(self) -> str | None:
        """Error message if a call has failed, else None."""
        failure = self.engine._failure()
        return None if failure is None else str(failure)


def prepare_copied(rank: LocalRank, calls: Sequence[Callable[[CopiedGather], object]]) -> CopiedGather:
    """Make a `CopiedGather` on every rank, with everything loaded that `calls` need and memory for the first; see
    `prepare_workspace`.

    The first call must be the same on all ranks, and the largest.
    """
    copied = CopiedGather(rank)
    engine, copied.engine = copied.engine, cast("Any", _RehearsalEngine())
    with rank.in_turn():
        for call in calls:
            with contextlib.suppress(_LoadedError):
                call(copied)
    copied.engine = engine
    calls[0](copied)
    rank.barrier()
    return copied


class _LoadedError(Exception):
    """Ends a call that is made only to load its kernels, where it would start to gather."""


class _RehearsalEngine:
    """Fake of a copy engine and of its calls: ends a call where it would gather."""

    def call(self, op: str, gather_bytes: int) -> contextlib.AbstractContextManager[_RehearsalEngine]:
        return contextlib.nullcontext(self)

    def offer(self, *_: object) -> None:
        raise _LoadedError


class _RecordingEngine:
    """Fake of a copy engine and of its calls while kernels are recorded: offered shards are ignored."""

    def __init__(self, rank: LocalRank) -> None:
        self.rank = rank

    def call(self, op: str, gather_bytes: int) -> contextlib.AbstractContextManager[_RecordingEngine]:
        return contextlib.nullcontext(self)

    def offer(self, *_: object) -> Any:
        from fused_tp.triton_kernels.gemm.all_gather_gemm import no_arrivals

        arrivals = no_arrivals(self.rank.world_size, 1, self.rank.device)
        return SimpleNamespace(
            arrival_flags=arrivals.arrived, order_scratch=arrivals.order, expired_address=arrivals.expired
        )

    def finish(self, *_: object) -> None: ...


class RankDriver:
    """Ranks made by threads and driven from a single thread.

    `call_rank(rank, number)` is the call of one rank on the set of inputs `number`.
    """

    def __init__(self, context: GpuContext, world_size: int, call_rank: Callable[[int, int], Any]) -> None:
        self.context, self.call_rank = context, call_rank
        self.streams = context.streams(world_size)

    def run_set(self, number: int = 0) -> list[Any]:
        """Make one call of every rank, in its stream."""
        return each(self.streams, lambda rank: self.call_rank(rank, number))


class KernelRanks(RankDriver):
    """Ranks of a fused kernel.

    Args:
        call: one call of a rank, `call(rank, number of a set of inputs, its workspace)`.
        results: makes tensors like those of a rank's call, twice at once, as later calls overlap. Their memory stays in
            the pool of the rank's stream, because asking the driver for memory may wait for a kernel.
    """

    def __init__(
        self,
        context: GpuContext,
        world_size: int,
        nbytes: Callable[[int], int],
        call: Callable[[int, int, Any], Tensor],
        results: Callable[[int], object],
        workspace_class: Any = None,
    ) -> None:
        super().__init__(context, world_size, lambda rank, number: call(rank, number, self.workspaces[rank]))

        def make(rank: LocalRank) -> Any:
            def rehearse(workspace: Any) -> None:
                for _ in range(2):
                    call(rank.rank, 0, workspace)

            return prepare_workspace(
                rank, nbytes(rank.rank), rehearse, timeout_seconds=10.0, workspace_class=workspace_class
            )

        def make_copied(rank: LocalRank) -> Any:
            return prepare_copied(rank, [lambda copied: call(rank.rank, 0, copied)])

        make_workspace = make_copied if workspace_class is CopiedGather else make
        context.synchronize()
        self.workspaces = run_local(world_size, make_workspace, device=context.device, timeout=300)
        each(self.streams, results)

    def assert_in_time(self) -> None:
        """Synchronize; raise AssertionError if a wait has expired."""
        self.context.synchronize()
        for workspace in self.workspaces:
            expired = workspace.expired()
            assert expired is None, str(expired)


def set_all_flags(workspace: Any) -> None:
    """Set every flag of the workspace, so that its rank can run alone: every wait is already satisfied.

    Flags stay set for calls of one kind and size. Other calls number their flags differently and would read flags that
    this rank has set itself as a peer's: call this again before them.
    """
    from fused_tp.triton_kernels.comm.gather import PULLED, READY, GatherWorkspace
    from fused_tp.triton_kernels.comm.signals import flag_bytes

    words = workspace.buffer.view(torch.uint8)
    if isinstance(workspace, GatherWorkspace):  # begun, ready and pulled are set by peers; the others by this rank
        runs = 1 + max(READY.value, PULLED.value)
        words[: runs * 8 * workspace.world_size].view(torch.int64).fill_(PERMANENT_FLAG)
        return
    count = flag_bytes(workspace.half_bytes)
    for half in range(2):
        begin = half * workspace.half_bytes
        words[begin : begin + count].view(torch.int64).fill_(PERMANENT_FLAG)


def join_streams(streams: Sequence[torch.cuda.Stream]) -> None:
    """Make each stream wait until all have arrived here."""
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
