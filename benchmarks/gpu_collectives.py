"""Device kernels of csrc/cuda on ranks that share one GPU: bandwidth, latency in CUDA graphs, norms fused with sums.

`exchange`: all-reduce, reduce-scatter, all-gather and all-to-all against copies of as many bytes within the GPU. The
bytes of an algorithm are the least that all ranks together must read and write: on one GPU every peer's memory is
local, so a byte sent is one read and one write. Copies run concurrently on the ranks' streams, as the kernels do. Sets
of inputs alternate, so that L2 does not hold them; the slots that ranks send through recur in every other call.

`latency`: 20 calls in a CUDA graph. Each rank has its own graph and stream, like ranks on separate GPUs: branches of
one graph need not run concurrently, and ranks that wait for each other could deadlock.

`norm`: all-reduce, residual and RMS norm in one launch against three.

`overhead`: host time of an op in microseconds per call, compared with a torch op that launches one kernel and with a
CUDA graph. Calls follow each other without waiting for the GPU, as in a program bound by the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_tp
from fused_tp.backends.cuda.native_kernels import native_kernels_available

from .case import FUSED_TP, MICROSECONDS, SPEEDUP, TIME_RATIO, BenchCase, Contestant, Makers, Rival, Unavailable
from .gpu_ranks import RankDriver, random_normal
from .gpu_timing import GpuContext, assert_near, cycling_contestant, run_on_streams
from .local_ranks import LocalRank, run_local

KB, MB = 1 << 10, 1 << 20
DTYPE = torch.bfloat16
COPY = "device copy"
SEPARATE_STEPS = "steps apart"
HOW_TO_BUILD = "`python setup.py build_ext --inplace` in a checkout builds them"

EXCHANGES = ("one-shot", "two-shot", "reduce-scatter", "all-gather", "all-to-all")
SMALL_BYTES, LARGE_BYTES = (1 * KB, 8 * KB, 64 * KB, 512 * KB, 4 * MB), (64 * MB, 256 * MB)
LATENCY_BYTES = (1 * KB, 8 * KB, 64 * KB)
MAX_ONE_SHOT_BYTES = 4 * MB  # one-shot is not useful beyond: its bytes grow with the number of ranks
LATENCY_CALLS = 20
LATENCY_BAR = 12.0  # microseconds for 8 KB over 2 ranks
EPS = 1e-6
COLUMNS = 8192
# One bar for all. It may be missed at 4096 rows: both sides are bound by memory traffic, of which fusing saves under a
# third.
NORM_ROWS = (16, 128, 1024, 4096)
NORM_BAR = 0.6
ONE_SHOT_NORM_BYTES = 512 * KB


def traffic_bytes(op: str, nbytes: int, world_size: int) -> int:
    """Least bytes read and written by all ranks, for `nbytes` summed, gathered or exchanged by each rank.

    Per rank, with a share of nbytes / W bytes (own data is read once; data sent to itself is not counted):
        one-shot: reads its data and W - 1 slots; writes W - 1 slots of its peers and the result.
        two-shot: reads its data, W - 1 shares to add and W - 1 sums; writes W - 1 shares, the sum of its own share to
            all ranks, and W - 1 sums.
        reduce-scatter: reads its data and W - 1 shares to add; writes W - 1 shares and its sum.
        all-gather: reads its share and W - 1 slots; writes its share to all ranks, and W - 1 shares out of slots.
        all-to-all: reads its data and W - 1 slots; writes all its shares, and W - 1 out of slots.
    """
    peers, share = world_size - 1, nbytes // world_size
    reads, writes = {
        "one-shot": (nbytes + peers * nbytes, peers * nbytes + nbytes),
        "two-shot": (nbytes + 2 * peers * share, peers * share + world_size * share + peers * share),
        "reduce-scatter": (nbytes + peers * share, peers * share + share),
        "all-gather": (share + peers * share, world_size * share + peers * share),
        "all-to-all": (nbytes + peers * share, world_size * share + peers * share),
    }[op]
    return world_size * (reads + writes)


def exchange_cases(world_size: int, sizes: Sequence[int]) -> Iterator[BenchCase]:
    for nbytes, op in itertools.product(sizes, EXCHANGES):
        if op == "one-shot" and nbytes > MAX_ONE_SHOT_BYTES:
            continue
        parameters = {"op": op, "nbytes": nbytes, "world_size": world_size}
        rivals = {COPY: Rival(SPEEDUP, 0.8 if nbytes in LARGE_BYTES else None)}
        seconds = 2.5 if nbytes in LARGE_BYTES else 1.0
        name = f"exchange/{op}/W={world_size}/{format_size(nbytes)}"
        moved_bytes = traffic_bytes(op, nbytes, world_size)
        yield BenchCase(name, exchange_contestants, parameters, rivals, seconds, nbytes=moved_bytes)


def cases(
    world_size: int,
    sizes: Sequence[int] = (*SMALL_BYTES, *LARGE_BYTES),
    rows: Sequence[int] = NORM_ROWS,
    latencies: Sequence[int] = LATENCY_BYTES,
) -> Iterator[BenchCase]:
    for nbytes in latencies:
        has_bar = nbytes == 8 * KB and world_size == 2
        parameters = {"op": "one-shot", "nbytes": nbytes, "world_size": world_size}
        rivals = {COPY: Rival(MICROSECONDS, LATENCY_BAR if has_bar else None)}
        yield BenchCase(
            f"latency/one-shot/W={world_size}/{format_size(nbytes)}", latency_contestants, parameters, rivals, 1.5
        )
    yield from exchange_cases(world_size, sizes)
    for m in rows:
        parameters = {"rows": m, "columns": COLUMNS, "world_size": world_size}
        name, rivals = f"norm/bf16/W={world_size}/{m}x{COLUMNS}", {SEPARATE_STEPS: Rival(TIME_RATIO, NORM_BAR)}
        yield BenchCase(name, norm_contestants, parameters, rivals, 1.5)


def format_size(nbytes: int) -> str:
    """Format a size, e.g. "64KB"."""
    return f"{nbytes // MB}MB" if nbytes >= MB else f"{nbytes // KB}KB"


# One call of a rank: (its collectives, the rank, index of a set of inputs) -> result.
RankCall = Callable[[Any, int, int], Any]


class FakeCollectives:
    """Fake of a rank's `DeviceCollectives`: results have the right shapes and undefined values."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def all_reduce(self, x: Tensor, algorithm: str, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(x) if out is None else out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x) // self._world_size)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x) * self._world_size)

    def sequence_to_heads(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def all_reduce_rms_norm(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)


class DeviceRanks(RankDriver):
    """Ranks on one GPU that call `DeviceCollectives`.

    Args:
        call: one call of a rank. Loading a kernel and allocating device memory may wait for running kernels, which may
            wait for other ranks. So each rank in turn first warms up: it makes the call with fake collectives. Then all
            ranks make the complete call twice.
    """

    def __init__(self, context: GpuContext, world_size: int, call: RankCall) -> None:
        availability = native_kernels_available(context.arch)
        if not availability:
            raise Unavailable(f"it needs the library of device kernels, and {availability.reason} ({HOW_TO_BUILD})")
        super().__init__(context, world_size, lambda rank, set_index: call(self.collectives[rank], rank, set_index))
        fake_collectives = FakeCollectives(world_size)

        def warm_up(rank: int) -> None:
            # Two results at once, as results of later calls overlap.
            results = [call(fake_collectives, rank, 0) for _ in range(2)]
            del results

        def prepare(rank: LocalRank) -> Any:
            from fused_tp.backends.cuda.device_collectives import DeviceCollectives

            collectives = DeviceCollectives(rank)
            with rank.in_turn():
                warm_up(rank.rank)
            for _ in range(2):
                call(collectives, rank.rank, 0)
                rank.synchronize()
            return collectives

        context.synchronize()
        self.collectives = run_local(world_size, prepare, device=context.device, timeout=60)
        run_on_streams(self.streams, warm_up)
        context.synchronize()

    def run_checked_set(self) -> list[Any]:
        """Make one call of every rank, and return the results; raise if a call failed or did not end in time."""
        results = self.run_set()
        self.raise_if_failed()
        return results

    def raise_if_failed(self) -> None:
        self.context.synchronize()
        for collectives in self.collectives:
            collectives.raise_if_failed()


def capture_graphs(
    streams: Sequence[torch.cuda.Stream], call: Callable[[int, int], Any], num_calls: int
) -> Callable[[], object]:
    """Capture call(rank, set_index) for each of `num_calls` sets in a graph per rank; return the replay function."""
    graphs = []
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for set_index in range(num_calls):
                call(rank, set_index)
        graphs.append(graph)
    return lambda: run_on_streams(streams, lambda rank: graphs[rank].replay())


@dataclass
class CollectiveInputs:
    """Inputs and results of one op over W ranks, in so many sets that L2 no longer holds one when its turn comes."""

    context: GpuContext
    op: str
    nbytes: int
    world_size: int

    def __post_init__(self) -> None:
        sets = range(self.context.input_set_count(2 * self.nbytes * self.world_size))
        self.inputs = [
            [self._make_input(100 * set_index + rank) for rank in range(self.world_size)] for set_index in sets
        ]
        self.outs = [[torch.empty_like(x) for x in inputs] for inputs in self.inputs] if self.is_all_reduce else []

    @property
    def is_all_reduce(self) -> bool:
        return self.op in ("one-shot", "two-shot")

    @cached_property
    def element_count(self) -> int:
        return self.nbytes // DTYPE.itemsize

    def _make_input(self, seed: int) -> Tensor:
        if self.op == "all-to-all":  # Ulysses: [batch, sequence / W, heads, head_dim]
            head_dim = 128
            heads = self.world_size * min(8, max(1, self.element_count // (head_dim * self.world_size)))
            shape: tuple[int, ...] = (1, self.element_count // (heads * head_dim), heads, head_dim)
        else:
            shape = (self.element_count // self.world_size if self.op == "all-gather" else self.element_count,)
        return random_normal(*shape, dtype=DTYPE, device=self.context.device, seed=seed)

    def call(self, collectives: Any, rank: int, set_index: int) -> Tensor:
        set_index %= len(self.inputs)
        x = self.inputs[set_index][rank]
        if self.is_all_reduce:
            out: Tensor = collectives.all_reduce(x, self.op.replace("-", "_"), out=self.outs[set_index][rank])
            return out
        methods = {"reduce-scatter": "reduce_scatter", "all-gather": "all_gather", "all-to-all": "sequence_to_heads"}
        result: Tensor = getattr(collectives, methods[self.op])(x)
        return result

    def check(self, results: Sequence[Tensor]) -> None:
        """Check the results of the first set: sums against fp64, all-reduces also for equal bits, copies exactly."""
        terms = self.inputs[0]
        if self.op == "all-gather":
            expected = [torch.cat(terms)] * self.world_size
        elif self.op == "all-to-all":
            expected = list(torch.cat(terms, 1).chunk(self.world_size, 2))
        else:
            for rank, result in enumerate(results):
                rows = slice(None) if self.is_all_reduce else self._rows(rank)
                total = torch.zeros((), dtype=torch.float64, device=result.device)
                for term in terms:
                    total = total + term[rows].double()
                assert_near(result, total, f"the result of rank {rank}")
            if self.is_all_reduce:
                assert all(torch.equal(results[0], result) for result in results), "ranks hold different bits"
            return
        for rank, (result, expected_tensor) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(result, expected_tensor), f"rank {rank} received wrong data"

    def _rows(self, rank: int) -> slice:
        share = self.element_count // self.world_size
        return slice(rank * share, (rank + 1) * share)


def exchange_contestants(context: GpuContext, op: str, nbytes: int, world_size: int) -> Makers:
    exchange = CollectiveInputs(context, op, nbytes, world_size)
    ranks = DeviceRanks(context, world_size, exchange.call)

    def copy_contestant() -> Contestant:
        return device_copies(context, traffic_bytes(op, nbytes, world_size), world_size)

    return {
        FUSED_TP: lambda: cycling_contestant(ranks.run_set, lambda: exchange.check(ranks.run_checked_set())),
        COPY: copy_contestant,
    }


def latency_contestants(context: GpuContext, op: str, nbytes: int, world_size: int) -> Makers:
    exchange = CollectiveInputs(context, op, nbytes, world_size)
    ranks = DeviceRanks(context, world_size, exchange.call)

    def fused_tp_contestant() -> Contestant:
        replay = capture_graphs(ranks.streams, ranks.call_rank, LATENCY_CALLS)

        def check() -> None:
            for out in exchange.outs[0]:
                out.fill_(torch.nan)
            context.synchronize()  # the fill ran in another stream
            replay()
            ranks.raise_if_failed()
            exchange.check(exchange.outs[0])

        return Contestant(replay, check, "in a graph", repeats=LATENCY_CALLS)

    def copy_contestant() -> Contestant:
        sources = exchange.inputs[0]
        targets = [torch.empty_like(x) for x in sources]
        replay = capture_graphs(ranks.streams, lambda rank, _: targets[rank].copy_(sources[rank]), LATENCY_CALLS)
        return Contestant(replay, None, "of the data of each rank, in a graph", repeats=LATENCY_CALLS)

    return {FUSED_TP: fused_tp_contestant, COPY: copy_contestant}


def device_copies(context: GpuContext, nbytes: int, world_size: int) -> Contestant:
    """Concurrent copies that read and write `nbytes` in total, one in each rank's stream."""
    bytes_per_rank = max(1, nbytes // 2 // world_size)
    streams = context.streams(world_size)
    sets = range(context.input_set_count(nbytes))
    sources = [
        [torch.zeros(bytes_per_rank, dtype=torch.uint8, device=context.device).random_() for _ in streams] for _ in sets
    ]
    targets = [[torch.empty_like(source) for source in source_set] for source_set in sources]

    def run_set(set_index: int) -> None:
        set_index %= len(sources)
        run_on_streams(streams, lambda rank: targets[set_index][rank].copy_(sources[set_index][rank]))

    return cycling_contestant(run_set, None)


# -- all-reduce, residual, RMS norm ------------------------------------------------------------------------------------


class NormInputs:
    """Inputs of the fused norm and of its separate steps."""

    def __init__(self, context: GpuContext, rows: int, columns: int, world_size: int) -> None:
        def random(*shape: int, seed: int) -> Tensor:
            return random_normal(*shape, dtype=DTYPE, device=context.device, seed=seed)

        nbytes = rows * columns * DTYPE.itemsize
        self.algorithm = "one_shot" if nbytes <= ONE_SHOT_NORM_BYTES else "two_shot"
        sets = range(context.input_set_count(4 * nbytes * world_size))
        self.partials = [
            [random(rows, columns, seed=100 * set_index + r) for r in range(world_size)] for set_index in sets
        ]
        self.residuals = [random(rows, columns, seed=7000 + set_index) for set_index in sets]
        self.weight = random(columns, seed=9)

    def run_fused(self, collectives: Any, rank: int, set_index: int) -> tuple[Tensor, Tensor]:
        set_index %= len(self.partials)
        result: tuple[Tensor, Tensor] = collectives.all_reduce_rms_norm(
            self.partials[set_index][rank], self.residuals[set_index], self.weight, EPS, self.algorithm
        )
        return result

    def run_separate_steps(self, collectives: Any, rank: int, set_index: int) -> tuple[Tensor, Tensor]:
        set_index %= len(self.partials)
        total = collectives.all_reduce(self.partials[set_index][rank], self.algorithm)
        new_residual = total.add_(self.residuals[set_index])
        normed = F.rms_norm(new_residual, self.weight.shape, self.weight, EPS)
        return normed, new_residual

    def check(self, results: Sequence[tuple[Tensor, Tensor]]) -> None:
        total = self.residuals[0].double()
        for partial in self.partials[0]:
            total = total + partial.double()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * self.weight.double()
        for rank, (normed, new_residual) in enumerate(results):
            assert_near(new_residual, total, f"the residual of rank {rank}")
            assert_near(normed, expected, f"the norm of rank {rank}")


def norm_contestants(context: GpuContext, rows: int, columns: int, world_size: int) -> Makers:
    norm = NormInputs(context, rows, columns, world_size)

    def contestant(call: RankCall, note: str) -> Contestant:
        ranks = DeviceRanks(context, world_size, call)
        return cycling_contestant(ranks.run_set, lambda: norm.check(ranks.run_checked_set()), note)

    return {
        FUSED_TP: lambda: contestant(norm.run_fused, norm.algorithm),
        SEPARATE_STEPS: lambda: contestant(norm.run_separate_steps, "all-reduce, add, norm"),
    }


# -- host time of a call -----------------------------------------------------------------------------------------------

OVERHEAD_CALLS = 100  # calls of each rank in a row; a stream queues up to a thousand launches
TORCH_LINEAR = "torch's linear"
TORCH_ADD = "torch.add"
CUDA_GRAPH = "in a graph"


def overhead_cases() -> Iterator[BenchCase]:
    rivals = {TORCH_LINEAR: Rival(TIME_RATIO)}
    yield BenchCase("overhead/matmul_all_reduce/W=1", op_contestants, {"rows": 16, "columns": 256}, rivals, 1.0)
    rivals = {TORCH_ADD: Rival(TIME_RATIO), CUDA_GRAPH: Rival(MICROSECONDS)}
    parameters = {"nbytes": 8 * KB, "world_size": 2}
    yield BenchCase(f"overhead/one-shot/W=2/{format_size(8 * KB)}", collective_contestants, parameters, rivals, 1.5)


def op_contestants(context: GpuContext, rows: int, columns: int) -> Makers:
    """Contestants that call a public op on a group of one rank, whose only overhead is host time."""
    x, w = (random_normal(rows, columns, dtype=DTYPE, device=context.device, seed=seed) for seed in (1, 2))
    (stream,) = context.streams(1)
    context.synchronize()  # x and w were made in another stream

    def contestant(call: Callable[[], Tensor]) -> Contestant:
        def check() -> None:
            with torch.cuda.stream(stream):
                result = call()
            context.synchronize()
            assert_near(result, x.double() @ w.double().t())

        return Contestant(
            lambda: repeat_calls([stream], lambda rank: call()), check, "", repeats=OVERHEAD_CALLS, times_host=True
        )

    return {
        FUSED_TP: lambda: contestant(lambda: fused_tp.matmul_all_reduce(x, w, group=None)),
        TORCH_LINEAR: lambda: contestant(lambda: F.linear(x, w)),
    }


def collective_contestants(context: GpuContext, nbytes: int, world_size: int) -> Makers:
    """Contestants that call `DeviceCollectives`. One host thread makes the calls of all ranks; the time is per call."""
    exchange = CollectiveInputs(context, "one-shot", nbytes, world_size)
    ranks = DeviceRanks(context, world_size, exchange.call)
    (inputs, *_), (outs, *_) = exchange.inputs, exchange.outs
    timing: dict[str, Any] = {"repeats": OVERHEAD_CALLS * world_size, "times_host": True}

    def repeat(call: Callable[[int], Any]) -> Callable[[], None]:
        return lambda: repeat_calls(ranks.streams, call)

    def check() -> None:
        exchange.check(ranks.run_checked_set())

    return {
        FUSED_TP: lambda: Contestant(repeat(lambda rank: ranks.call_rank(rank, 0)), check, **timing),
        TORCH_ADD: lambda: Contestant(repeat(lambda rank: torch.add(inputs[rank], 1.0, out=outs[rank])), **timing),
        CUDA_GRAPH: lambda: Contestant(
            capture_graphs(ranks.streams, ranks.call_rank, OVERHEAD_CALLS),
            None,
            f"{OVERHEAD_CALLS} calls in the graph of each rank",
            **timing,
        ),
    }


def repeat_calls(streams: list[torch.cuda.Stream], call: Callable[[int], Any]) -> None:
    """Make OVERHEAD_CALLS calls per rank, one rank after the other: changing the stream takes as long as a call."""

    def call_repeatedly(rank: int) -> None:
        for _ in range(OVERHEAD_CALLS):
            call(rank)

    run_on_streams(streams, call_repeatedly)
