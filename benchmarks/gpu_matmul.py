"""Matmuls on one GPU: the kernel alone, fused with all flags set, and fused on ranks that share its SMs.

`alone`: the matmul of the fused kernels by itself against cuBLAS, in the config that a launch picks and in each.

`flags`: one rank uses the whole GPU and its peers' flags are permanently set, so it never waits. Its extra time over
cuBLAS is the cost of being fusable. With W = 1 tiles pass through the rank's own workspace; with W = 2 half of them are
sent to a peer's, or x is read from there.

`ranks`: W concurrent ranks, each on its share of the SMs, against the same matmuls on the same SMs without
communication, and against these followed by sums and copies of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .case import FUSED_TP, SPEEDUP, TIME_RATIO, BenchCase, Contestant, Makers, Rival
from .gpu_ranks import CopiedGather, KernelRanks, join_streams, random_normal, set_all_flags
from .gpu_timing import GpuContext, assert_near, checked_rows, cycling_contestant, run_on_streams

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CUBLAS = "torch.mm"
# (M, N, K): cubes, and up and down projection of Llama 3 8B's MLP for 4096 tokens.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (4096, 14336, 4096), (4096, 4096, 14336))
# Fractions of cuBLAS's speed, for the two sizes with a bar.
CUBLAS_BAR, CUBLAS_AIM = 0.90, 0.97
SIZES_WITH_BAR = {("bf16", 4096), ("bf16", 8192)}

GATHER_OPS = ("gather", "gather-direct")
# Down and up projection of Llama 3 8B's MLP: sums shard K, gathers shard N.
HIDDEN, INNER = 4096, 14336
MATMUL_ONLY = "its matmul alone"
SEPARATE_STEPS = "matmul, then movement"
EPS = 1e-6
# SMs that a gather leaves free for the kernels between its copies.
GATHER_MARGIN = 2

Multiply = Callable[[Tensor, Tensor, Tensor], object]  # called with x, w and out
RunSet = Callable[[int], Any]


def matmul_only_cases(dtypes: Sequence[str], is_quick: bool) -> Iterator[BenchCase]:
    for dtype in dtypes:
        for m, n, k in SHAPES[:2] if is_quick else SHAPES:
            has_bar = (dtype, m) in SIZES_WITH_BAR and m == n == k
            rivals = {CUBLAS: Rival(SPEEDUP, CUBLAS_BAR, CUBLAS_AIM) if has_bar else Rival(SPEEDUP)}
            parameters = {"dtype": dtype, "m": m, "n": n, "k": k}
            yield BenchCase(
                f"alone/{dtype}/{m}x{n}x{k}", matmul_only_contestants, parameters, rivals, 6.0, flops=2.0 * m * n * k
            )


def matmul_only_contestants(context: GpuContext, dtype: str, m: int, n: int, k: int) -> Makers:
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm.tiles import fused_configs

    draw = partial(random_normal, dtype=DTYPES[dtype], device=context.device)
    sets = [
        (draw(m, k, seed=2 * i), draw(n, k, seed=2 * i + 1))
        for i in range(context.input_set_count((m + n) * k * DTYPES[dtype].itemsize))
    ]
    streams = context.streams(1)

    def contestant(multiply: Multiply, note: str = "") -> Contestant:
        out = torch.empty(m, n, dtype=DTYPES[dtype], device=context.device)

        def run_input_set(set_index: int) -> None:
            run_on_streams(streams, lambda _: multiply(*sets[set_index % len(sets)], out))

        def check() -> None:
            run_on_streams(streams, lambda _: out.fill_(torch.nan))
            run_input_set(0)
            context.synchronize()
            rows, (x, w) = checked_rows(m), sets[0]
            assert_near(out[rows], x[rows].double() @ w.double().t())

        return cycling_contestant(run_once(context, run_input_set), check, note)

    def fused_tp_contestant(config: Any = None) -> Contestant:
        return contestant(*make_fused_matmul(context, DTYPES[dtype], m, n, context.sms, config))

    return {
        FUSED_TP: fused_tp_contestant,
        CUBLAS: lambda: contestant(lambda x, w, out: torch.mm(x, w.t(), out=out)),
        **{
            f"config {config.tma_config or config.pointer_config}": partial(fused_tp_contestant, config)
            for config in fused_configs(arch_of(context.device), dtype)
        },
    }


def make_fused_matmul(
    context: GpuContext, dtype: torch.dtype, m: int, n: int, sms: int, config: Any = None
) -> tuple[Multiply, str]:
    """Return (function that computes out [m, n] = x @ w^T by the fused kernel, description of its tiles).

    It is the matmul of a gather of one rank, which waits for nothing. `config`: one of `fused_configs`; None: the
    config that `launch_for` chooses.
    """
    from fused_tp.triton_kernels.comm.gather import Shards, run_kernel
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm.all_gather_gemm import Peers, matmul_launch, no_arrivals
    from fused_tp.triton_kernels.gemm.tiles import Launch, launch_for

    single_rank = Peers(0, 1, {"arrivals": no_arrivals(1, 10**10, context.device), "rank": 0})
    if config is None:
        launch = launch_for(dtype, m, n, 1, arch=arch_of(context.device), sms=sms)
    else:
        launch = Launch(
            config.pointer_config.programs_per_sm * sms, config.pointer_config, tma_config=config.tma_config
        )

    def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
        run_kernel(matmul_launch(x, [(w, out, None)], x, Shards(m, m, x.shape[1]), single_rank, launch, False))

    return multiply, str(launch.tma_config or launch.config)


@dataclass(frozen=True)
class MatmulProblem:
    """One fused matmul over W ranks: out [m, n] summed over the ranks, each with its own k, or x [m, k] gathered."""

    op: str
    dtype: str
    m: int
    n: int
    k: int
    world_size: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def is_gather(self) -> bool:
        return self.op in GATHER_OPS

    @property
    def is_two_shot(self) -> bool:
        return self.op.startswith("two-shot")

    @property
    def has_norm(self) -> bool:
        return self.op.endswith("+norm")

    @property
    def sm_margin(self) -> int:
        return GATHER_MARGIN if self.is_gather and self.world_size > 1 else 0

    def rows(self, rank: int) -> slice:
        """Rows of x, or of the sum, that belong to `rank`."""
        rows_per_rank = -(-self.m // self.world_size)
        return slice(rank * rows_per_rank, min((rank + 1) * rows_per_rank, self.m))


def flag_cases(is_quick: bool) -> Iterator[BenchCase]:
    m = 4096
    for op in ("two-shot", "reduce-scatter", "gather", *(() if is_quick else ("gather-direct", "one-shot"))):
        # With peers a gather would wait for copies, which do not happen with a single running rank.
        for world_size in (1,) if op == "gather" else (1, 2):
            n, k = (INNER // 2, HIDDEN) if op in GATHER_OPS else (HIDDEN, INNER // 2)
            required_and_target: tuple[float | None, float | None] = (None, None) if op == "one-shot" else (0.88, 0.95)
            rivals = {CUBLAS: Rival(SPEEDUP, *required_and_target), MATMUL_ONLY: Rival(TIME_RATIO)}
            # "num_peers", not "world_size": all streams of a case's world_size are timed, but only one rank runs here.
            parameters = {"op": op, "dtype": "bf16", "m": m, "n": n, "k": k, "num_peers": world_size - 1}
            name = f"flags/bf16/{op}/W={world_size}/{m}x{n}x{k}"
            yield BenchCase(name, flag_contestants, parameters, rivals, 5.0, 2.0 * m * n * k)


def rank_cases(world_size: int, is_quick: bool) -> Iterator[BenchCase]:
    problems = [(op, "bf16", m) for m in (2048, 8192) for op in ("two-shot", "reduce-scatter", "gather")]
    if not is_quick:
        problems += [("gather-direct", "bf16", 2048), ("two-shot+norm", "bf16", 8192), ("two-shot", "fp16", 8192)]
        problems += [("one-shot", "bf16", 64), ("gather-direct", "bf16", 64)]
    for op, dtype, m in problems:
        n, k = (INNER // world_size, HIDDEN) if op in GATHER_OPS else (HIDDEN, INNER // world_size)
        is_large = m >= 2048 and op != "two-shot+norm"
        rivals = {
            MATMUL_ONLY: Rival(TIME_RATIO, 1.10, 1.03) if is_large else Rival(TIME_RATIO),
            SEPARATE_STEPS: Rival(SPEEDUP, 1.0) if m >= 2048 else Rival(SPEEDUP),
        }
        parameters = {"op": op, "dtype": dtype, "m": m, "n": n, "k": k, "world_size": world_size}
        flops = 2.0 * m * n * k * world_size
        yield BenchCase(
            f"ranks/{dtype}/{op}/W={world_size}/{m}x{n}x{k}", rank_contestants, parameters, rivals, 6.0, flops
        )


class FusedRanks:
    """Ranks of a problem, with their inputs."""

    def __init__(self, context: GpuContext, problem: MatmulProblem, sms: int) -> None:
        from fused_tp.triton_kernels.comm.gather import GatherWorkspace
        from fused_tp.triton_kernels.device import arch_of
        from fused_tp.triton_kernels.gemm.tiles import launch_for

        p = self.problem = problem
        self.context = context
        arch = arch_of(context.device)
        self.launch = launch_for(p.torch_dtype, p.m, p.n, p.world_size, arch=arch, sms=sms, sm_margin=p.sm_margin)
        elements = p.world_size * p.n * p.k + p.m * p.k * (1 if p.is_gather else p.world_size)
        self.sets = [
            self._make_inputs(100 * seed) for seed in range(context.input_set_count(elements * p.torch_dtype.itemsize))
        ]
        self.residual = self.random(p.m, p.n, seed=998)
        self.norm_weight = self.random(p.n, seed=999)
        workspace_class = {"gather": CopiedGather, "gather-direct": GatherWorkspace}.get(p.op)
        results = [self.empty(p.m, p.n), self.empty(p.m, p.k)]
        self.ranks = KernelRanks(
            context,
            p.world_size,
            lambda rank: self._workspace_nbytes(),
            self._call,
            lambda rank: [torch.empty_like(template) for template in (*results, results[0]) for _ in range(2)],
            workspace_class,
        )

    @property
    def note(self) -> str:
        return f"{self.launch.programs} programs of {self.launch.tma_config or self.launch.config} on each rank"

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.problem.torch_dtype, device=self.context.device)

    def random(self, *shape: int, seed: int) -> Tensor:
        return random_normal(*shape, dtype=self.problem.torch_dtype, device=self.context.device, seed=seed)

    def _make_inputs(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Make (x, w) of each rank. For a gather, x is the gathered x, and the shard of a rank is x[rows(rank)]."""
        p = self.problem
        xs = [self.random(p.m, p.k, seed=seed + rank) for rank in range(1 if p.is_gather else p.world_size)]
        return [(xs[rank % len(xs)], self.random(p.n, p.k, seed=seed + 50 + rank)) for rank in range(p.world_size)]

    def inputs(self, rank: int, set_index: int) -> tuple[Tensor, Tensor]:
        return self.sets[set_index % len(self.sets)][rank]

    def _workspace_nbytes(self) -> int:
        from fused_tp.triton_kernels.gemm import all_gather_gemm, gemm_sum

        p = self.problem
        if p.is_gather:
            return int(all_gather_gemm.workspace_bytes(-(-p.m // p.world_size), p.k, p.torch_dtype, p.world_size))
        sizes = p.m, p.n, p.torch_dtype, p.world_size, self.launch
        if p.op == "reduce-scatter":
            return int(gemm_sum.reduce_scatter_bytes(*sizes))
        return int(gemm_sum.all_reduce_bytes(*sizes, two_shot=p.is_two_shot))

    def _call(self, rank: int, set_index: int, workspace: Any) -> Tensor:
        from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm
        from fused_tp.triton_kernels.gemm.gemm_sum import gemm_all_reduce, gemm_reduce_scatter

        p, options = self.problem, {"workspace": workspace, "launch": self.launch}
        x, w = self.inputs(rank, set_index)
        if p.is_gather:
            all_gather_matmul = workspace if p.op == "gather" else partial(all_gather_gemm, workspace=workspace)
            (out,), _ = all_gather_matmul(x[p.rows(rank)], [w], rows=p.m, launch=self.launch)
            return out
        if p.op == "reduce-scatter":
            return gemm_reduce_scatter([(x, w)], **options)
        norm_options = {"residual": self.residual, "norm_weight": self.norm_weight, "eps": EPS} if p.has_norm else {}
        out, normed = gemm_all_reduce([(x, w)], two_shot=p.is_two_shot, **options, **norm_options)
        return out if normed is None else normed

    def expected_result(self, rank: int) -> tuple[slice, Tensor]:
        """Compute (checked rows of the rank's result, their values in fp64) for the first set of inputs."""
        p = self.problem
        rank_rows = p.rows(rank) if p.op == "reduce-scatter" else slice(0, p.m)
        rows = checked_rows(rank_rows.stop - rank_rows.start)
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for x, w in [self.sets[0][rank]] if p.is_gather else self.sets[0]:
            total = total + x[rank_rows][rows].double() @ w.double().t()
        if p.has_norm:
            total = total + self.residual[rank_rows][rows].double()
            total = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * self.norm_weight.double()
        return rows, total

    def check(self, results: Sequence[Tensor]) -> None:
        self.ranks.assert_in_time()
        for rank, result in enumerate(results):
            rows, expected = self.expected_result(rank)
            assert_near(result[rows], expected, f"the result of rank {rank}")
        if not self.problem.is_gather and self.problem.op != "reduce-scatter":
            assert all(torch.equal(results[0], result) for result in results), "ranks hold different bits"

    def make_matmul(self, sms: int) -> Multiply:
        """Return the matmul of one rank on `sms` SMs, without communication."""
        return make_fused_matmul(self.context, self.problem.torch_dtype, self.problem.m, self.problem.n, sms)[0]

    def matmul_contestant(self, num_ranks: int, sms: int, note: str = "") -> Contestant:
        outs, multiply = [self.empty(self.problem.m, self.problem.n) for _ in range(num_ranks)], self.make_matmul(sms)

        def run_input_set(set_index: int) -> None:
            run_on_streams(
                self.ranks.streams[:num_ranks], lambda rank: multiply(*self.inputs(rank, set_index), outs[rank])
            )

        return cycling_contestant(run_once(self.context, run_input_set), None, note)


def rank_contestants(context: GpuContext, op: str, dtype: str, m: int, n: int, k: int, world_size: int) -> Makers:
    problem = MatmulProblem(op, dtype, m, n, k, world_size)
    sms = context.sms // world_size
    fused = FusedRanks(context, problem, sms)
    matmul_sms = sms - problem.sm_margin

    def fused_tp_contestant() -> Contestant:
        return cycling_contestant(fused.ranks.run_set, lambda: fused.check(fused.ranks.run_set()), fused.note)

    def separate_steps_contestant() -> Contestant:
        run_input_set = run_once(
            context, (make_gather_steps if problem.is_gather else make_sum_steps)(fused, matmul_sms)
        )
        return cycling_contestant(run_input_set, lambda: fused.check(run_input_set(0)))

    return {
        FUSED_TP: fused_tp_contestant,
        MATMUL_ONLY: lambda: fused.matmul_contestant(world_size, matmul_sms, f"on {matmul_sms} SMs for each rank"),
        SEPARATE_STEPS: separate_steps_contestant,
    }


def flag_contestants(context: GpuContext, op: str, dtype: str, m: int, n: int, k: int, num_peers: int) -> Makers:
    fused = FusedRanks(context, MatmulProblem(op, dtype, m, n, k, 1 + num_peers), context.sms)
    if num_peers:
        for workspace in fused.ranks.workspaces:
            set_all_flags(workspace)
        context.synchronize()
    streams = context.streams(1)
    out = fused.empty(m, n)

    def run_input_set(set_index: int) -> list[Tensor]:
        return run_on_streams(streams, lambda rank: fused.ranks.call_rank(rank, set_index))

    def check() -> None:
        results = run_input_set(0)
        if num_peers:  # the peers' terms are missing; the cases with ranks check these results
            fused.ranks.assert_in_time()
        else:
            fused.check(results)

    def multiply_by_torch(rank: int, set_index: int) -> None:
        x, w = fused.inputs(rank, set_index)
        torch.mm(x, w.t(), out=out)

    return {
        FUSED_TP: lambda: cycling_contestant(run_input_set, check, fused.note),
        CUBLAS: lambda: cycling_contestant(
            lambda set_index: run_on_streams(streams, lambda rank: multiply_by_torch(rank, set_index)), None
        ),
        MATMUL_ONLY: lambda: fused.matmul_contestant(1, context.sms),
    }


def run_once(context: GpuContext, run_input_set: RunSet) -> RunSet:
    """Call `run_input_set` once, which compiles, and return it; nothing else may run meanwhile."""
    context.synchronize()
    run_input_set(0)
    context.synchronize()
    return run_input_set


def make_sum_steps(fused: FusedRanks, sms: int) -> RunSet:
    """Return a function that sums in separate steps.

    Each rank writes its partial result, then sums its rows, then copies the other rows from their owners. One-shot:
    each rank sums all rows.
    """
    p, streams = fused.problem, fused.ranks.streams
    partials = fused.empty(p.world_size, p.m, p.n)
    outs, multiply = [fused.empty(p.m, p.n) for _ in streams], fused.make_matmul(sms)

    def copy_from_owners(rank: int) -> None:
        for step in range(1, p.world_size):
            owner = (rank + step) % p.world_size
            outs[rank][p.rows(owner)].copy_(outs[owner][p.rows(owner)])

    def add_norm(rank: int) -> Tensor:
        outs[rank].add_(fused.residual)
        return torch.nn.functional.rms_norm(outs[rank], (p.n,), fused.norm_weight, EPS)

    def run_input_set(set_index: int) -> list[Tensor]:
        run_on_streams(streams, lambda rank: multiply(*fused.inputs(rank, set_index), partials[rank]))
        join_streams(streams)
        sums_all_rows = p.op == "one-shot"
        run_on_streams(
            streams, lambda rank: sum_rows(partials, outs[rank], slice(0, p.m) if sums_all_rows else p.rows(rank), sms)
        )
        join_streams(streams)
        if p.op == "reduce-scatter":
            return [outs[rank][p.rows(rank)] for rank in range(p.world_size)]
        if not sums_all_rows:
            run_on_streams(streams, copy_from_owners)
            join_streams(streams)
        return run_on_streams(streams, add_norm) if p.has_norm else outs

    return run_input_set


def sum_rows(terms: Tensor, out: Tensor, rows: slice, sms: int) -> None:
    """Compute out[rows] = terms[:, rows] summed over W, for contiguous terms [W, M, N], on `sms` SMs."""
    from .gpu_sum import sum_kernel

    shard, target = terms[:, rows], out[rows]
    # 8 programs of 4 warps, with 16 bytes of each term in flight per thread, saturate the memory pipes of an SM.
    constants = {"WORLD": terms.shape[0], "BLOCK": 1024, "num_warps": 4}
    sum_kernel[(8 * sms,)](shard, target, target.numel(), terms.stride(0), **constants)


def make_gather_steps(fused: FusedRanks, sms: int) -> RunSet:
    """Return a function that copies all shards on each rank, then multiplies."""
    p, streams = fused.problem, fused.ranks.streams
    gathered = [fused.empty(p.m, p.k) for _ in streams]
    outs, multiply = [fused.empty(p.m, p.n) for _ in streams], fused.make_matmul(sms)

    def gather(rank: int, set_index: int) -> None:
        x, _ = fused.inputs(rank, set_index)
        for step in range(p.world_size):
            rows = p.rows((rank + step) % p.world_size)
            gathered[rank][rows].copy_(x[rows])

    def run_input_set(set_index: int) -> list[Tensor]:
        run_on_streams(streams, lambda rank: gather(rank, set_index))
        join_streams(streams)
        run_on_streams(streams, lambda rank: multiply(gathered[rank], fused.inputs(rank, set_index)[1], outs[rank]))
        join_streams(streams)
        return outs

    return run_input_set
