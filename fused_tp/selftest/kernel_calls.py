"""Calls of every family of GPU kernels, with fp64 references; ranks are threads on one GPU.

| op | kernel | launched by |
|---|---|---|
| one_shot, two_shot, one_shot_norm, two_shot_norm | matmul + all-reduce (+ residual + RMSNorm) | gemm_all_reduce |
| reduce_scatter | matmul + reduce-scatter | gemm_reduce_scatter |
| products | sum of three matmuls (like dX of q, k and v) + reduce-scatter | gemm_reduce_scatter |
| direct | all-gather + matmul; the kernel reads peers' shards | all_gather_gemm |
| copied | all-gather + matmul; copy engines gather the shards | FusedKernelSchedule |
| ring, ring_in_groups | ring attention | ring_forward |
| attention | attention of one rank, forward and backward | flash_attention, flash_backward |
| cross_entropy | log-sum-exp of rows of logits, and their gradients | fill_statistics, fill_gradients |
| collectives | csrc/cuda: all-reduce (+ residual + RMSNorm), all-gather; equal results on ranks | DeviceCollectives |
| exchanges | csrc/cuda: reduce-scatter, all-to-all; results differ between ranks | DeviceCollectives |

A call launches its kernels in a workspace, and can compute its reference. Without a GPU, inside
`kernel_cache.record_launches`, the same calls record the kernels that need to be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.kernels.triton import to_kernel_terms
from fused_tp.attention.layout import TokenLayout, TokenRanges
from fused_tp.attention.ring_fused import kv_chunks, make_keys_layout
from fused_tp.attention.ring_plan import make_step, ring_plan
from fused_tp.attention.spec import AttentionMask, ScoreParameters
from fused_tp.backends.cuda.device_collectives import DeviceCollectives
from fused_tp.benchmarks.gpu_ranks import prepare_copied_gather, prepare_workspace, random_normal
from fused_tp.benchmarks.local_ranks import LocalGroup, LocalRank
from fused_tp.core.partition import shard_range
from fused_tp.triton_kernels import cross_entropy
from fused_tp.triton_kernels.attention.backward import flash_backward
from fused_tp.triton_kernels.attention.forward import flash_attention
from fused_tp.triton_kernels.attention.launch import ScoreTerms
from fused_tp.triton_kernels.attention.ring_forward import ring_forward
from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace
from fused_tp.triton_kernels.comm.gather import GatherWorkspace
from fused_tp.triton_kernels.comm.signals import Workspace
from fused_tp.triton_kernels.device import arch_of
from fused_tp.triton_kernels.gemm import all_gather_gemm, gemm_sum
from fused_tp.triton_kernels.gemm.tiles import Launch, launch_for

EPS = 1e-5
SUM_OPS = ("one_shot", "two_shot", "one_shot_norm", "two_shot_norm", "reduce_scatter", "products")
COPY_OPS = ("copied",)
DIRECT_GATHER_OPS = ("direct",)
RING_OPS = ("ring", "ring_in_groups")
ATTENTION_OPS = ("attention",)
LOSS_OPS = ("cross_entropy",)
NATIVE_OPS = ("collectives", "exchanges")
# Odd sizes, fewer rows than ranks, fewer tiles than ranks, rows that TMA cannot load, several tiles per program.
SHAPES = [(300, 520, 200), (1, 256, 512), (3, 72, 64), (129, 392, 1000), (257, 131, 77), (1024, 1536, 512)]
FEW_SHAPES = [(1024, 1536, 512), (257, 131, 77), (3, 72, 64)]  # few, because each shape and dtype compiles kernels
Shape = tuple[int, int, int]


@dataclass
class RankCall:
    """One call of an op on one rank.

    Attributes:
        launch: launch(workspace) -> results of this rank.
        reference: computes the results in fp64.
        workspace_nbytes: bytes of workspace that the call needs.
        term_count: number of terms in the sum of each result element.
        is_replicated: True if results must be bitwise equal on all ranks.
        has_lse: True if the second result is a log-sum-exp.
        magnitudes: computes the magnitude of the summed terms for each element of each result, or None for a result
            whose elements have similar magnitudes.
    """

    launch: Callable[[Any], list[Tensor]]
    reference: Callable[[], list[Tensor]]
    workspace_nbytes: int
    term_count: int
    is_replicated: bool = False
    has_lse: bool = False
    magnitudes: Callable[[], list[Tensor | None]] | None = None


def make_call(
    rank: Any, op: str, shape: Shape, dtype: torch.dtype, seed: int, launch: Launch | None = None
) -> RankCall:
    """Create a call of `op` on `rank`; replicated tensors are equal on all ranks.

    Args:
        shape: (m, n, k) of matmuls; for attention m is the number of tokens.
        launch: launch parameters of a matmul; None: select them by size.
    """
    if op in ATTENTION_OPS:
        return attention_call(rank, (shape[0], 8, 128), dtype, seed)
    if op in LOSS_OPS:
        return loss_call(rank, shape, dtype, seed)
    if op in NATIVE_OPS:
        return native_call(rank, op, shape, dtype, seed)
    if op in RING_OPS:
        return ring_call(rank, op, (shape[0], 8, 64), dtype, seed)
    return (gather_call if op in COPY_OPS + DIRECT_GATHER_OPS else sum_call)(rank, op, shape, dtype, seed, launch)


def sum_call(
    rank: Any, op: str, shape: Shape, dtype: torch.dtype, seed: int, launch: Launch | None = None, uneven: int = 0
) -> RankCall:
    """Create a matmul whose result is summed over ranks; on odd ranks, K is larger by `uneven`."""
    m, n, k = shape
    world, device = rank.world_size, rank.device
    inner_sizes = (k, k // 2, k // 3 + 1) if op == "products" else (k,)

    def make_pair(r: int, i: int, width: int) -> tuple[Tensor, Tensor]:
        size, pair_seed = width + r % 2 * uneven, 1000 * seed + 100 * i + r
        x, w = (
            random_normal(num_rows, size, dtype=dtype, device=device, seed=pair_seed + offset)
            for offset, num_rows in ((0, m), (50, n))
        )
        return x, w

    rank_pairs = [make_pair(rank.rank, i, width) for i, width in enumerate(inner_sizes)]
    bias = random_normal(n, dtype=dtype, device=device, seed=seed + 7)
    residual = random_normal(m, n, dtype=dtype, device=device, seed=seed + 8, scale=10.0)
    norm_weight = random_normal(n, dtype=dtype, device=device, seed=seed + 9)
    launch = launch or launch_for(dtype, m, n, world, arch=arch_of(rank.device), sms=rank.sms)
    keywords: dict[str, Any] = {"launch": launch, "bias": bias}

    def sum_pairs() -> Tensor:
        pairs = (make_pair(r, i, width) for r in range(world) for i, width in enumerate(inner_sizes))
        return sum((matmul64(x, w) for x, w in pairs), start=bias.double())

    if op in ("reduce_scatter", "products"):
        return RankCall(
            lambda workspace: [gemm_sum.gemm_reduce_scatter(rank_pairs, workspace=workspace, **keywords)],
            lambda: [sum_pairs()[slice(*shard_range(m, world, rank.rank))]],
            gemm_sum.reduce_scatter_bytes(m, n, dtype, world, launch),
            world * sum(inner_sizes),
        )
    keywords["two_shot"] = op.startswith("two_shot")
    has_norm = op.endswith("norm")
    if has_norm:
        keywords |= {"residual": residual, "norm_weight": norm_weight, "eps": EPS}

    def reference() -> list[Tensor]:
        if not has_norm:
            return [sum_pairs()]
        summed = sum_pairs() + residual.double()
        return [summed, rms_norm64(summed, norm_weight, EPS)]

    def run(workspace: Any) -> list[Tensor]:
        results = gemm_sum.gemm_all_reduce(rank_pairs, workspace=workspace, **keywords)
        return [result for result in results if result is not None]

    nbytes = gemm_sum.all_reduce_bytes(m, n, dtype, world, launch, two_shot=keywords["two_shot"])

    def magnitudes() -> list[Tensor | None]:
        # The error of a normalized element scales with its weight, not with the other elements.
        return [None, norm_weight.double().abs().expand(m, n)] if has_norm else [None]

    return RankCall(run, reference, nbytes, world * k, is_replicated=True, magnitudes=magnitudes)


def gather_call(
    rank: Any, op: str, shape: Shape, dtype: torch.dtype, seed: int, launch: Launch | None = None
) -> RankCall:
    """Create two matmuls of gathered rows; "copied" also returns the gathered rows."""
    m, n, k = shape
    world, device, returns_gathered = rank.world_size, rank.device, op == "copied"
    x = random_normal(m, k, dtype=dtype, device=device, seed=100 * seed)
    ws = [random_normal(n + 8 * i, k, dtype=dtype, device=device, seed=100 * seed + 10 * i + rank.rank) for i in (1, 2)]
    biases = [random_normal(n + 8, dtype=dtype, device=device, seed=seed + 7), None]
    shard = x[slice(*shard_range(m, world, rank.rank))]
    # Copies between ranks on one GPU may run as kernels; sm_margin leaves SMs free for them.
    launch = launch or launch_for(dtype, m, n, world, arch=arch_of(rank.device), sms=rank.sms, sm_margin=2)
    keywords: dict[str, Any] = {"launch": launch, "rows": m, "biases": biases, "return_gathered": returns_gathered}

    def gather(workspace: Any) -> list[Tensor]:
        if op == "copied":
            outs, gathered = workspace(shard, ws, **keywords)
        else:
            outs, gathered = all_gather_gemm.all_gather_gemm(shard, ws, workspace=workspace, **keywords)
        return [*outs, *([] if gathered is None else [gathered])]

    def reference() -> list[Tensor]:
        return [matmul64(x, w, bias) for w, bias in zip(ws, biases, strict=True)] + [x.double()] * returns_gathered

    return RankCall(gather, reference, all_gather_gemm.workspace_bytes(-(-m // world), k, dtype, world), k)


def ring_call(rank: Any, op: str, shape: Shape, dtype: torch.dtype, seed: int) -> RankCall:
    """Create a ring attention call on the shard of `rank`; `shape`: tokens, heads, head_dim of the full sequence."""
    seq, heads, head_dim = shape
    mask_options: dict[str, Any] = (
        {"causal": True},
        {"causal": True, "window": (seq // (4 * rank.world_size), 0), "layout": "contiguous"},  # neighbours' keys only
        {},
        {"causal": True, "cu_seqlens": (0, seq // 3, seq // 3, seq), "layout": "contiguous"},
        {"causal": True, "window": (0, 0)},  # no peer's keys
    )[seed % 5]
    layout = mask_options.pop("layout", "zigzag")
    mask = AttentionMask(seq, seq, **mask_options)
    plan = ring_plan(mask, rank.world_size, TokenLayout(layout))
    q, k, v = (
        random_normal(2, seq, n, head_dim, dtype=dtype, device=rank.device, seed=10 * seed + i)
        for i, n in enumerate((heads, 2, 2))
    )
    query_indices = torch.from_numpy(plan.queries[rank.rank].indices).to(rank.device)
    rank_qkv = [x[:, query_indices] for x in (q, k, v)]
    keys_layout = make_keys_layout(plan, rank.rank, *rank_qkv[1:])
    if op == "ring_in_groups":
        keys_layout = replace(keys_layout, num_groups=keys_layout.num_pairs)
    # Leave 2 SMs free: the two relay kernels of a rank start while SMs are free, and may occupy one each.
    programs = max(1, rank.sms - 2)

    def attend(workspace: Any) -> list[Tensor]:
        chunks, score_terms = kv_chunks(plan, rank.rank), ScoreTerms(head_dim**-0.5)
        return [*ring_forward(*rank_qkv, chunks, score_terms, keys_layout, workspace=workspace, programs=programs)]

    def reference() -> list[Tensor]:
        out, lse = attention64(q, k, v, mask)
        return [out[:, query_indices], lse[:, :, query_indices]]

    def magnitudes() -> list[Tensor | None]:
        out, lse = attention_magnitudes(q, k, v, mask)
        assert out is not None
        return [out[:, query_indices], lse]

    return RankCall(attend, reference, keys_layout.nbytes(rank.world_size), seq, has_lse=True, magnitudes=magnitudes)


def attention_call(rank: Any, shape: Shape, dtype: torch.dtype, seed: int) -> RankCall:
    """Create an attention call without communication that returns (out, lse, dq, dk, dv).

    `shape`: tokens, heads, head_dim.
    """
    seq, heads, head_dim = shape
    mask = AttentionMask(seq, seq, causal=seed % 2 == 0)
    q, k, v, grad = (
        random_normal(2, seq, n, head_dim, dtype=dtype, device=rank.device, seed=10 * seed + i)
        for i, n in enumerate((heads, 2, 2, heads))
    )
    all_tokens = TokenRanges((range(seq),))
    step, score_terms = make_step(mask, all_tokens, all_tokens), to_kernel_terms(ScoreParameters(head_dim**-0.5))

    def attend(workspace: Any) -> list[Tensor]:
        out, lse = flash_attention(q, k, v, step, score_terms)
        delta = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        gradients = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        flash_backward(grad, q, k, v, lse, delta, *gradients, step, score_terms)
        return [out, lse, *(gradient.to(dtype) for gradient in gradients)]

    def reference() -> list[Tensor]:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = attention64(leaves[0], leaves[1], leaves[2], mask)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.double())]

    return RankCall(
        attend, reference, 0, seq, has_lse=True, magnitudes=lambda: attention_magnitudes(q, k, v, mask, grad)
    )


def loss_call(rank: Any, shape: Shape, dtype: torch.dtype, seed: int) -> RankCall:
    """Create a cross entropy call without communication that returns (dx, lse) for x [m, 16 n + 1]."""
    m, n, _ = shape
    size, softcap, scale = 16 * n + 1, (None, 20.0)[seed % 2], 1.5
    x = random_normal(m, size, dtype=dtype, device=rank.device, seed=10 * seed, scale=4.0)
    targets = torch.arange(m, device=rank.device) * 7919 % size
    d_losses = random_normal(m, dtype=torch.float32, device=rank.device, seed=seed + 1)

    def differentiate(workspace: Any) -> list[Tensor]:
        stats, dx = x.new_empty(m, 4, dtype=torch.float32), torch.empty_like(x)
        terms = {"scale": scale, "softcap": softcap}
        cross_entropy.fill_statistics(stats, x, targets, (0, size), needs_logit_sum=True, **terms)
        lse = stats[:, 0] + stats[:, 1].log()
        no_smoothing = torch.zeros_like(d_losses)
        cross_entropy.fill_gradients(dx, x, targets, (0, size), lse, d_losses, no_smoothing, -d_losses, **terms)
        return [dx, lse]

    def reference() -> list[Tensor]:
        leaf = x.double().requires_grad_()
        logits = leaf * scale if softcap is None else (leaf * (scale / softcap)).tanh() * softcap
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        return [*torch.autograd.grad(losses, leaf, d_losses.double()), logits.detach().logsumexp(-1)]

    return RankCall(differentiate, reference, 0, size, has_lse=True)


def native_call(rank: Any, op: str, shape: Shape, dtype: torch.dtype, seed: int) -> RankCall:
    """Create calls of the collectives in csrc/cuda, on terms [m, n] and on m tokens with 2 W heads."""
    m, n, _ = shape
    world, device = rank.world_size, rank.device
    terms = [random_normal(m, n, dtype=dtype, device=device, seed=100 * seed + r) for r in range(world)]
    tokens = [
        random_normal(1, m, 2 * world, 24, dtype=dtype, device=device, seed=100 * seed + 50 + r) for r in range(world)
    ]
    bias, weight = (random_normal(n, dtype=dtype, device=device, seed=seed + i) for i in (7, 9))
    residual = random_normal(m, n, dtype=dtype, device=device, seed=seed + 8, scale=10.0)
    own_term, own_tokens = terms[rank.rank], tokens[rank.rank]
    own_heads = slice(2 * rank.rank, 2 * rank.rank + 2)
    heads = torch.cat(tokens, 1)[:, :, own_heads].contiguous()

    def collect(collectives: DeviceCollectives) -> list[Tensor]:
        results = [collectives.all_gather(own_term)]
        for algorithm in ("one_shot", "two_shot"):
            results += [
                collectives.all_reduce(own_term, algorithm, bias),
                *collectives.all_reduce_rms_norm(own_term, residual, weight, EPS, algorithm),
            ]
        return results

    def exchange(collectives: DeviceCollectives) -> list[Tensor]:
        return [
            collectives.reduce_scatter(own_term, None, bias),
            collectives.sequence_to_heads(own_tokens),
            collectives.heads_to_sequence(heads),
        ]

    def reference() -> list[Tensor]:
        total = sum((term.double() for term in terms), start=bias.double())
        if op == "exchanges":
            return [total[slice(*shard_range(m, world, rank.rank))], heads.double(), own_tokens.double()]
        summed = total - bias.double() + residual.double()
        return [torch.cat(terms).double(), *[total, rms_norm64(summed, weight, EPS), summed] * 2]

    is_replicated = op == "collectives"
    return RankCall(
        collect if is_replicated else exchange, reference, own_term.nbytes, world, is_replicated=is_replicated
    )


# -- references --------------------------------------------------------------------------------------------------------


def matmul64(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T + bias [N] in fp64."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def rms_norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm over the last dim in fp64."""
    return torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)


def attention64(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Return (out [B, S, H, D], lse [B, H, S]) in fp64 for q [B, S, H, D], k and v [B, S, Hkv, D].

    All scores [B, H, S, S] are held in memory.
    """
    scores, _, _, v64 = _scores64(q, k, v, mask)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return (weights @ v64).transpose(1, 2), lse


def attention_magnitudes(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, grad: Tensor | None = None
) -> list[Tensor | None]:
    """Return the magnitudes of the summed terms of out, and with `grad` (gradient of out) also of dq, dk and dv.

    The second entry, for the log-sum-exp, is None. The magnitude of an element is the root of the sum of the squares of
    its terms. In a row with few keys, large terms cancel in dq: rounding errors scale with the terms, not with dq.
    """
    scores, q64, k64, v64 = _scores64(q, k, v, mask)
    weights = torch.softmax(scores, -1).nan_to_num()  # NaN in rows without keys

    def sum_groups(squares: Tensor, num_heads: int) -> Tensor:
        return squares.unflatten(1, (num_heads, -1)).sum(2).sqrt().transpose(1, 2)

    heads, kv_heads = q.shape[2], k.shape[2]
    magnitudes: list[Tensor | None] = [sum_groups(weights.square() @ v64.square(), heads), None]
    if grad is not None:
        grad64 = grad.double().transpose(1, 2)
        terms = grad64 * (weights @ v64)  # terms of the row sum that is subtracted from dP
        subtracted_squares = terms.sum(-1, keepdim=True).square() + terms.square().sum(-1, keepdim=True)
        score_squares = weights.square() * ((grad64 @ v64.mT).square() + subtracted_squares) / q.shape[-1]
        magnitudes += [
            sum_groups(score_squares @ k64.square(), heads),
            sum_groups(score_squares.mT @ q64.square(), kv_heads),
            sum_groups(weights.square().mT @ grad64.square(), kv_heads),
        ]
    return magnitudes


def _scores64(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (scores [B, H, S, S], q, k, v [B, H, S, D]) in fp64."""
    all_tokens = TokenRanges((range(mask.seq_len),))
    step = make_step(mask, all_tokens, all_tokens)
    key_positions = torch.arange(mask.seq_len, device=q.device)
    starts, stops = (torch.from_numpy(x).to(q.device)[:, None] for x in (step.starts, step.stops))
    is_visible = (key_positions >= starts) & (key_positions < stops)
    heads_per_kv_head = q.shape[2] // k.shape[2]
    q64, k64, v64 = (
        x.double().transpose(1, 2) for x in (q, *(x.repeat_interleave(heads_per_kv_head, 2) for x in (k, v)))
    )
    scores = (q64 @ k64.mT / math.sqrt(q.shape[-1])).masked_fill(~is_visible, float("-inf"))
    return scores, q64, k64, v64


def error_of(call: RankCall, results: Sequence[Tensor], reference: Sequence[Tensor] | None = None) -> str:
    """Describe results that differ from fp64 by more than rounding explains; "" if there are none.

    `reference`: results of `call.reference`, if already computed.

    An element may differ by three roundings (terms, result, norm) of its magnitude plus `size`, and by the error of
    fp32 sums of `call.term_count` terms. A log-sum-exp may differ by 1e-3 of 1 plus its magnitude. `size` is the rms of
    the result, unless `call.magnitudes` overrides it.
    """
    magnitudes = call.magnitudes() if call.magnitudes else [None] * len(results)
    for result_index, (result, expected) in enumerate(zip(results, reference or call.reference(), strict=True)):
        if result.shape != expected.shape:
            return f"result {result_index} has shape {tuple(result.shape)}, not {tuple(expected.shape)}"
        if not expected.numel():
            continue
        is_finite = expected.isfinite()
        if not bool(((result == expected) | is_finite).all()):
            return f"result {result_index} differs where fp64 is infinite"
        if result_index == 1 and call.has_lse:
            allowed_error = 1e-3 * (1 + expected.abs())
        else:
            magnitude = magnitudes[result_index]
            size = torch.where(is_finite, expected, 0).square().mean().sqrt() if magnitude is None else magnitude
            sum_error = 8 * torch.finfo(torch.float32).eps * call.term_count**0.5 * size
            allowed_error = 3 * torch.finfo(result.dtype).eps * (expected.abs() + size) + sum_error
        error = torch.where(is_finite, (result.double() - expected).abs(), 0)
        if bool((is_wrong := ~(error <= allowed_error) & is_finite).any()):
            worst_ratio = float((error / allowed_error)[is_wrong].max())
            wrong_elements = f"{int(is_wrong.sum())} of {is_wrong.numel()} elements of result {result_index}"
            return f"{wrong_elements} differ from fp64 by up to {worst_ratio:.3g} times the allowed error"
    return ""


# -- workspaces --------------------------------------------------------------------------------------------------------


def workspace_class_of(op: str) -> Any:
    """Return the class of workspace that `op` uses."""
    return GatherWorkspace if op in DIRECT_GATHER_OPS else RingWorkspace if op in RING_OPS else Workspace


def make_workspace(rank: LocalRank, op: str, calls: Sequence[RankCall], timeout_seconds: float = 20.0) -> Any:
    """Create a workspace for `calls` on every rank, load all kernels, and allocate memory for all results."""
    if rank.device.type == "cuda":
        torch.cuda._sleep(1)  # loads the sleep kernel: loading it later would wait for kernels that wait for this rank
    if op in ATTENTION_OPS + LOSS_OPS:
        return None

    def warm_up(workspace: Any) -> None:
        # Hold all results at once, so that torch's pool has memory for all of them afterwards.
        results = [call.launch(workspace) for call in calls]
        rank.synchronize()
        del results

    if op in NATIVE_OPS:
        return _make_collectives(rank, calls)
    if op in COPY_OPS:
        return prepare_copied_gather(
            rank, [call.launch for call in sorted(calls, key=lambda call: -call.workspace_nbytes)]
        )
    nbytes = max(max(rank.exchange(call.workspace_nbytes)) for call in calls)
    return prepare_workspace(
        rank, nbytes, warm_up, timeout_seconds=timeout_seconds, workspace_class=workspace_class_of(op)
    )


class _CheckedCollectives(DeviceCollectives):
    """Collectives of csrc/cuda with the method `expired_wait` of kernel workspaces."""

    def expired_wait(self) -> str | None:
        """Return the error message if a call has failed, else None."""
        failure = self._failure()
        return None if failure is None else str(failure)


def _make_collectives(rank: LocalRank, calls: Sequence[RankCall]) -> _CheckedCollectives:
    with rank.in_turn():
        one_rank_collectives = _CheckedCollectives(LocalGroup(1, rank.device).rank(0))
        results = [result for call in calls for result in call.launch(one_rank_collectives)]
        # An all-gather's result is world_size times as large as the one-rank result. Reserve that memory in torch's
        # caching allocator now, so that no call allocates while kernels wait for each other.
        reserved_results = [result.new_empty(rank.world_size, *result.shape) for result in results]
        rank.synchronize()
        del reserved_results, results
    collectives = _CheckedCollectives(rank)
    max(calls, key=lambda call: call.workspace_nbytes).launch(
        collectives
    )  # makes the workspace large enough for all calls
    rank.barrier()
    return collectives
