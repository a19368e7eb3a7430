"""Attention on a GPU: Triton kernels compared with torch's providers, and rings of ranks compared with one launch.

`attention`: forward, and backward, of one rank, as `ring_attention` runs them.

`attention-ring`: all steps of all W ranks of a causal zigzag ring, one rank after the other, against the whole.

`attention-ranks`: W concurrent ranks, each on its share of the SMs, with all steps of a ring in one launch. Compared
with one launch per step, which reads other ranks' keys in place without communication, and with one launch of the whole
on all SMs. Forward, causal, zigzag.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_tp.attention.kernels.triton import TRITON_KERNEL, to_kernel_terms
from fused_tp.attention.layout import TokenLayout, TokenRanges
from fused_tp.attention.ring import LocalRing, RingBackward, RingCall, RingForward, RingSaved, fp32_accumulator
from fused_tp.attention.ring_fused import kv_chunks, make_keys_layout
from fused_tp.attention.ring_plan import make_step, ring_plan
from fused_tp.attention.spec import AttentionMask, ScoreParameters
from fused_tp.triton_kernels.attention.backward import flash_backward
from fused_tp.triton_kernels.attention.configs import AttentionConfig
from fused_tp.triton_kernels.attention.forward import flash_attention
from fused_tp.triton_kernels.attention.launch import ScoreTerms

from .case import FUSED_TP, SPEEDUP, BenchCase, Contestant, Makers, Rival, Unavailable
from .gpu_ranks import KernelRanks, random_normal
from .gpu_timing import GpuContext, assert_near, run_on_streams, use_stream

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch's FlashAttention": SDPBackend.FLASH_ATTENTION}
ONE_LAUNCH = "the whole at once"
DTYPE = torch.bfloat16
WIDTH = 2048  # heads * head_dim
TOKENS = 32768  # over all batch rows
SEQ_LENGTHS = (4096, 8192, 16384, 32768)
FORWARD_BAR, FORWARD_AIM, BACKWARD_BAR, BACKWARD_AIM = 0.70, 0.90, 0.65, 0.85
RING_BAR = 0.92
ONE_LAUNCH_BAR = 0.85
LAUNCH_PER_STEP = "a launch for each step"
# SMs that each rank leaves free for the small kernels that run between its copies, one for each of its two streams. The
# small kernels of the first rank may start on any SM of the idle GPU, and no program of a later rank fits beside one.
SPARE_SMS = 2
# (rows, block, warps, stages) of `attention/configs.py`, timed beside the default ones at (head dim, causal, length):
OTHER_CONFIGS_AT = 128, True, SEQ_LENGTHS[0]
OTHER_CONFIGS = {
    "forward": ((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)),
    "queries": ((128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3)),
    "keys": ((128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
}
REFERENCE_QUERIES = 2048  # queries per block of the fp64 reference


def cases(is_quick: bool) -> Iterator[BenchCase]:
    parameters = ((128,), (True,), SEQ_LENGTHS[:1]) if is_quick else ((128, 64), (True, False), SEQ_LENGTHS)
    for head_dim, is_causal, seq, is_backward in itertools.product(*parameters, (False, True)):
        required_and_target = (BACKWARD_BAR, BACKWARD_AIM) if is_backward else (FORWARD_BAR, FORWARD_AIM)
        yield BenchCase(
            f"attention/{_pass_name(is_backward)}/D={head_dim}/{'causal' if is_causal else 'full'}/S={seq}",
            one_rank_contestants,
            {"seq": seq, "head_dim": head_dim, "is_causal": is_causal, "is_backward": is_backward},
            {backend: Rival(SPEEDUP, *required_and_target) for backend in BACKENDS},
            seconds=5.0 if (head_dim, is_causal, seq) == OTHER_CONFIGS_AT else 1.75,
            flops=_flops(max(TOKENS, seq), seq, is_causal, is_backward),
        )
    for seq, is_backward in itertools.product((16384,) if is_quick else (16384, 32768), (False, True)):
        yield BenchCase(
            f"attention-ring/{_pass_name(is_backward)}/W=8/S={seq}",
            ring_contestants,
            {"seq": seq, "head_dim": 128, "num_ranks": 8, "is_backward": is_backward},
            {ONE_LAUNCH: Rival(SPEEDUP, RING_BAR)},
            seconds=3.0,
            flops=_flops(seq, seq, True, is_backward),
        )
    for world_size, seq in itertools.product((2,) if is_quick else (2, 4), (16384,) if is_quick else (16384, 32768)):
        yield BenchCase(
            f"attention-ranks/forward/W={world_size}/S={seq}",
            rank_contestants,
            {"seq": seq, "head_dim": 128, "world_size": world_size},
            {LAUNCH_PER_STEP: Rival(SPEEDUP, 1.0), ONE_LAUNCH: Rival(SPEEDUP, ONE_LAUNCH_BAR)},
            seconds=3.0,
            flops=_flops(seq, seq, True, False),
        )


def _pass_name(is_backward: bool) -> str:
    return "backward" if is_backward else "forward"


def _flops(rows: int, seq: int, is_causal: bool, is_backward: bool) -> float:
    """FLOPs of the matmuls: two in the forward, five in the backward; half of that with a causal mask."""
    return (5 if is_backward else 2) * 2.0 * rows * seq * (0.5 if is_causal else 1.0) * WIDTH


class AttentionInputs:
    """q, k, v and the gradient of the output: [B, S, H, D] in bf16, drawn on the device."""

    def __init__(self, context: GpuContext, seq: int, head_dim: int, batch: int) -> None:
        shape = (batch, seq, WIDTH // head_dim, head_dim)
        self.q, self.k, self.v, self.grad = (
            random_normal(*shape, dtype=DTYPE, device=context.device, seed=seed) for seed in range(4)
        )

    def check(self, results: Sequence[Tensor], is_causal: bool) -> None:
        """Compare out, or dq, dk and dv, with fp64 in the last head of the last batch row."""
        q, k, v, grad = (x[-1, :, -1].double() for x in (self.q, self.k, self.v, self.grad))
        references = compute_reference(q, k, v, grad, is_causal)
        checked = references[:1] if len(results) == 1 else references[1:]
        for name, result, reference64 in zip(
            ("out",) if len(results) == 1 else ("dq", "dk", "dv"), results, checked, strict=True
        ):
            # dq and dk also inherit the rounding of P, dP and out, which partly cancel.
            assert_near(result[-1, :, -1].to(DTYPE), reference64, name)


def compute_reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, is_causal: bool) -> list[Tensor]:
    """Compute [out, dq, dk, dv] of one head [S, D] in fp64, REFERENCE_QUERIES queries at a time."""
    scale, out, dq = q.shape[1] ** -0.5, torch.empty_like(v), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(q), REFERENCE_QUERIES):
        rows = slice(start, start + REFERENCE_QUERIES)
        scores = q[rows] @ k.t() * scale
        if is_causal:
            positions = torch.arange(len(k), device=k.device)
            scores.masked_fill_(positions > positions[rows, None], -torch.inf)
        p = torch.softmax(scores, -1)
        out[rows] = p @ v
        dv += p.t() @ grad[rows]
        dp = grad[rows] @ v.t()
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[rows] = ds @ k
        dk += ds.t() @ q[rows]
    return [out, dq, dk, dv]


def one_rank_contestants(context: GpuContext, seq: int, head_dim: int, is_causal: bool, is_backward: bool) -> Makers:
    inputs = AttentionInputs(context, seq, head_dim, max(1, TOKENS // seq))
    passes = {
        name: partial(_make_torch_pass, inputs, is_causal, is_backward, backend) for name, backend in BACKENDS.items()
    }
    passes = {FUSED_TP: partial(_make_fused_tp_pass, inputs, is_causal, is_backward), **passes}
    if (head_dim, is_causal, seq) == OTHER_CONFIGS_AT and context.properties.major == 9:
        if is_backward:
            passes["its kernels alone"] = partial(_make_kernel_pass, inputs, is_causal, is_backward, {})
        for kernel in ("queries", "keys") if is_backward else ("forward",):
            for config in (AttentionConfig(*sizes, tma=True) for sizes in OTHER_CONFIGS[kernel]):
                passes[f"{kernel} {config}"] = partial(
                    _make_kernel_pass, inputs, is_causal, is_backward, {kernel: config}
                )
    return {name: partial(_contestant, context, inputs, is_causal, prepare) for name, prepare in passes.items()}


def ring_contestants(context: GpuContext, seq: int, head_dim: int, num_ranks: int, is_backward: bool) -> Makers:
    """Contestants of a ring, which computes the steps of W ranks one rank after the other, without communication."""
    inputs = AttentionInputs(context, seq, head_dim, 1)
    return {
        FUSED_TP: lambda: _contestant(context, inputs, True, lambda: _make_ring_pass(inputs, num_ranks, is_backward)),
        ONE_LAUNCH: lambda: _contestant(context, inputs, True, lambda: _make_fused_tp_pass(inputs, True, is_backward)),
    }


def _contestant(
    context: GpuContext, inputs: AttentionInputs, is_causal: bool, prepare: Callable[[], Callable[[], Sequence[Tensor]]]
) -> Contestant:
    """Return a contestant that runs the function that `prepare` returns, whose result is [out] or [dq, dk, dv]."""
    (stream,) = context.streams(1)
    context.synchronize()
    with use_stream(stream):
        compute = prepare()
        compute()

    def run() -> None:
        with use_stream(stream):
            compute()

    def check() -> None:
        with use_stream(stream):
            results = compute()
            inputs.check(results, is_causal)

    return Contestant(run, check)


def _make_torch_pass(
    inputs: AttentionInputs, is_causal: bool, is_backward: bool, backend: SDPBackend
) -> Callable[[], Sequence[Tensor]]:
    leaves = [x.transpose(1, 2).detach().requires_grad_(is_backward) for x in (inputs.q, inputs.k, inputs.v)]
    grad = inputs.grad.transpose(1, 2)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=is_causal)

    try:
        out = forward()
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0]) from error
    if not is_backward:
        return lambda: [forward().transpose(1, 2)]
    return lambda: [g.transpose(1, 2) for g in torch.autograd.grad(out, leaves, grad, retain_graph=True)]


def _make_fused_tp_pass(inputs: AttentionInputs, is_causal: bool, is_backward: bool) -> Callable[[], Sequence[Tensor]]:
    call, local_ring = _make_ring_call(inputs, 1, 0, is_causal), LocalRing()

    def forward() -> tuple[Tensor, Tensor]:
        return local_ring.forward(call, inputs.q, inputs.k, inputs.v)

    if not is_backward:
        return lambda: [forward()[0]]
    saved = RingSaved(inputs.q, inputs.k, inputs.v, *forward(), inputs.grad, None)

    def compute_gradients() -> Sequence[Tensor]:
        grads = local_ring.backward(call, saved)
        return [grads.dq, grads.dk, grads.dv]

    return compute_gradients


def _make_kernel_pass(
    inputs: AttentionInputs, is_causal: bool, is_backward: bool, configs: Mapping[str, AttentionConfig]
) -> Callable[[], Sequence[Tensor]]:
    """Return the forward kernel, or the kernels of the backward without its row sums, with some other configs."""
    q, k, v, grad = inputs.q, inputs.k, inputs.v, inputs.grad
    seq = q.shape[1]
    all_tokens = TokenRanges((range(seq),))
    step = make_step(AttentionMask(seq, seq, causal=is_causal), all_tokens, all_tokens)
    terms = ScoreTerms(q.shape[3] ** -0.5)
    if not is_backward:
        return lambda: [flash_attention(q, k, v, step, terms, config=configs["forward"])[0]]
    out, lse = flash_attention(q, k, v, step, terms)
    sums = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    grads = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]

    def compute_gradients() -> Sequence[Tensor]:
        for gradient in grads:
            gradient.zero_()
        flash_backward(
            grad, q, k, v, lse, sums, *grads, step, terms,
            queries_config=configs.get("queries"), keys_config=configs.get("keys"),
        )  # fmt: skip
        return grads

    return compute_gradients


def _make_ring_pass(inputs: AttentionInputs, num_ranks: int, is_backward: bool) -> Callable[[], Sequence[Tensor]]:
    calls, token_indices, (q, k, v, grad) = _shard_inputs(inputs, num_ranks)

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [_run_steps(call, q[rank], k, v) for rank, call in enumerate(calls)]

    def join(shards: Sequence[Tensor]) -> Tensor:
        return _join_shards(inputs.q, token_indices, shards)

    if not is_backward:
        return lambda: [join([out for out, _ in forward()])]
    outs = forward()

    def compute_gradients() -> Sequence[Tensor]:
        dk, dv = [fp32_accumulator(x) for x in k], [fp32_accumulator(x) for x in v]
        dq = []
        for rank, call in enumerate(calls):
            state = RingBackward(call, RingSaved(q[rank], k[rank], v[rank], *outs[rank], grad[rank], None))
            for t in range(num_ranks):
                source = call.plan.source_rank(rank, t)
                state.attend(t, k[source], v[source], dk[source], dv[source])
            dq.append(state.finalize([dk[rank], dv[rank]]).dq)
        return [join(dq), *(join([x.to(DTYPE) for x in shards]) for shards in (dk, dv))]

    return compute_gradients


def _run_steps(call: RingCall, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run all steps of one rank, which reads other ranks' keys in place."""
    ring_state = RingForward(call, q, v[call.rank])
    for t in range(len(k)):
        source = call.plan.source_rank(call.rank, t)
        ring_state.attend(t, k[source], v[source])
    return ring_state.finalize()


def _join_shards(template: Tensor, token_indices: Sequence[Tensor], shards: Sequence[Tensor]) -> Tensor:
    """Join the ranks' shards to one sequence."""
    result = torch.empty_like(template)
    for tokens, shard in zip(token_indices, shards, strict=True):
        result[:, tokens] = shard
    return result


def _shard_inputs(inputs: AttentionInputs, num_ranks: int) -> tuple[list[RingCall], list[Tensor], list[list[Tensor]]]:
    """Return (calls of the ranks, tokens of each, their shards of q, k, v and the gradient)."""
    calls = [_make_ring_call(inputs, num_ranks, rank, True) for rank in range(num_ranks)]
    token_indices = [torch.from_numpy(tokens.indices).to(inputs.q.device) for tokens in calls[0].plan.queries]
    return (
        calls,
        token_indices,
        [[x[:, tokens] for tokens in token_indices] for x in (inputs.q, inputs.k, inputs.v, inputs.grad)],
    )


def _make_ring_call(inputs: AttentionInputs, num_ranks: int, rank: int, is_causal: bool) -> RingCall:
    seq, head_dim = inputs.q.shape[1], inputs.q.shape[3]
    plan = ring_plan(AttentionMask(seq, seq, causal=is_causal), num_ranks, TokenLayout("zigzag"))
    return RingCall(plan.rank_plan(rank), TRITON_KERNEL, ScoreParameters(head_dim**-0.5))


class RingRanks:
    """Ranks of one sequence, with their shards."""

    def __init__(self, context: GpuContext, inputs: AttentionInputs, world_size: int) -> None:
        from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace

        self.inputs = inputs
        self.programs = max(1, context.sms // world_size - SPARE_SMS)
        self.calls, self.token_indices, (self.q, self.k, self.v, _) = _shard_inputs(inputs, world_size)
        self.layouts = [
            make_keys_layout(call.plan, call.rank, self.k[call.rank], self.v[call.rank]) for call in self.calls
        ]
        sums = torch.empty(self.q[0].shape[:3], dtype=torch.float32, device=context.device)
        self.ranks = KernelRanks(
            context,
            world_size,
            lambda rank: self.layouts[rank].nbytes(world_size),
            self._launch,
            lambda rank: [torch.empty_like(template) for template in (self.q[rank], sums) for _ in range(2)],
            RingWorkspace,
        )

    def _launch(self, rank: int, set_index: int, workspace: Any) -> Tensor:
        from fused_tp.triton_kernels.attention.ring_forward import ring_forward

        plan, scores = self.calls[rank].plan, self.calls[rank].score_parameters
        shards = self.q[rank], self.k[rank], self.v[rank]
        chunks, layout = kv_chunks(plan, rank), self.layouts[rank]
        out: Tensor = ring_forward(
            *shards, chunks, to_kernel_terms(scores), layout, workspace=workspace, programs=self.programs
        )[0]
        return out

    def run_steps(self, rank: int) -> Tensor:
        return _run_steps(self.calls[rank], self.q[rank], self.k, self.v)[0]

    def check(self, shards: Sequence[Tensor]) -> None:
        self.ranks.assert_in_time()
        self.inputs.check([_join_shards(self.inputs.q, self.token_indices, shards)], is_causal=True)


def rank_contestants(context: GpuContext, seq: int, head_dim: int, world_size: int) -> Makers:
    inputs = AttentionInputs(context, seq, head_dim, 1)
    ring = RingRanks(context, inputs, world_size)

    def ring_contestant(run: Callable[[], list[Tensor]], note: str) -> Contestant:
        return Contestant(run, lambda: ring.check(run()), note)

    return {
        FUSED_TP: lambda: ring_contestant(ring.ranks.run_set, f"{ring.programs} programs on each rank"),
        LAUNCH_PER_STEP: lambda: ring_contestant(lambda: run_on_streams(ring.ranks.streams, ring.run_steps), ""),
        ONE_LAUNCH: lambda: _contestant(context, inputs, True, lambda: _make_fused_tp_pass(inputs, True, False)),
    }
