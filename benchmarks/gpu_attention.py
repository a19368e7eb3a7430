"""Attention on a GPU: Triton kernels compared with torch's providers, and rings of ranks compared with one launch.

`attention`: forward, and backward, of one rank, as `ring_attention` runs them.

`attention-ring`: all steps of all W ranks of a causal zigzag ring, one rank after the other, against the whole.

`attention-ranks`: W concurrent ranks, each on its share of the SMs, with all steps of a ring in one launch. Compared
with one launch per step, which reads other ranks' keys in place without communication, and with one launch of the whole
on all SMs. Forward, causal, zigzag.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_tp.attention.kernels.triton import TRITON_KERNEL, to_kernel_terms
from fused_tp.attention.layout import TokenLayout
from fused_tp.attention.ring import LocalRing, RingBackward, RingCall, RingForward, RingSaved, fp32_accumulator
from fused_tp.attention.ring_fused import kv_chunks, make_keys_layout
from fused_tp.attention.ring_plan import ring_plan
from fused_tp.attention.spec import AttentionMask, Scores

from .case import OURS, SPEEDUP, BenchCase, Contestant, Makers, Rival, Unavailable
from .gpu_ranks import KernelRanks, normal
from .gpu_timing import GpuContext, assert_near, each, on

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch's FlashAttention": SDPBackend.FLASH_ATTENTION}
WHOLE = "the whole at once"
DTYPE = torch.bfloat16
WIDTH = 2048  # heads * head_dim
TOKENS = 32768  # over all batch rows
LENGTHS = (4096, 8192, 16384, 32768)
FORWARD_BAR, FORWARD_AIM, BACKWARD_BAR, BACKWARD_AIM = 0.70, 0.90, 0.65, 0.85
RING_BAR = 0.92
WHOLE_BAR = 0.85
STEPS = "a launch for each step"
# SMs of a rank reserved for the kernels between its copies, one for each of two streams: those of the first rank start
# on an empty GPU and may occupy any SM, and no program of a later rank fits beside one.
RELAYS = 2
CHUNK = 2048  # queries per block of the fp64 reference


def cases(quick: bool) -> Iterator[BenchCase]:
    few = ((128,), (True,), LENGTHS[:1]) if quick else ((128, 64), (True, False), LENGTHS)
    for head_dim, causal, seq, backward in itertools.product(*few, (False, True)):
        judged = (BACKWARD_BAR, BACKWARD_AIM) if backward else (FORWARD_BAR, FORWARD_AIM)
        yield BenchCase(
            f"attention/{_way(backward)}/D={head_dim}/{'causal' if causal else 'full'}/S={seq}",
            alone,
            {"seq": seq, "head_dim": head_dim, "causal": causal, "backward": backward},
            {backend: Rival(SPEEDUP, *judged) for backend in BACKENDS},
            seconds=1.75,
            flops=_flops(max(TOKENS, seq), seq, causal, backward),
        )
    for seq, backward in itertools.product((16384,) if quick else (16384, 32768), (False, True)):
        yield BenchCase(
            f"attention-ring/{_way(backward)}/W=8/S={seq}",
            ring,
            {"seq": seq, "head_dim": 128, "ranks": 8, "backward": backward},
            {WHOLE: Rival(SPEEDUP, RING_BAR)},
            seconds=3.0,
            flops=_flops(seq, seq, True, backward),
        )
    for world_size, seq in itertools.product((2,) if quick else (2, 4), (16384,) if quick else (16384, 32768)):
        yield BenchCase(
            f"attention-ranks/forward/W={world_size}/S={seq}",
            rank_contestants,
            {"seq": seq, "head_dim": 128, "world_size": world_size},
            {STEPS: Rival(SPEEDUP, 1.0), WHOLE: Rival(SPEEDUP, WHOLE_BAR)},
            seconds=3.0,
            flops=_flops(seq, seq, True, False),
        )


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


def _flops(rows: int, seq: int, causal: bool, backward: bool) -> float:
    """FLOPs of the matmuls: two in the forward, five in the backward; half of that with a causal mask."""
    return (5 if backward else 2) * 2.0 * rows * seq * (0.5 if causal else 1.0) * WIDTH


class Inputs:
    """q, k, v and the gradient of the output: [B, S, H, D] in bf16, drawn on the device."""

    def __init__(self, context: GpuContext, seq: int, head_dim: int, batch: int) -> None:
        shape = (batch, seq, WIDTH // head_dim, head_dim)
        self.q, self.k, self.v, self.grad = (
            normal(*shape, dtype=DTYPE, device=context.device, seed=seed) for seed in range(4)
        )

    def check(self, got: Sequence[Tensor], causal: bool) -> None:
        """Compare out, or dq, dk and dv, with fp64 in the last head of the last batch row."""
        q, k, v, grad = (x[-1, :, -1].double() for x in (self.q, self.k, self.v, self.grad))
        expected = reference(q, k, v, grad, causal)
        wanted = expected[:1] if len(got) == 1 else expected[1:]
        for name, one, other in zip(("out",) if len(got) == 1 else ("dq", "dk", "dv"), got, wanted, strict=True):
            # dq and dk also inherit the rounding of P, dP and out, which partly cancel.
            assert_near(one[-1, :, -1], other, name)


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """[out, dq, dk, dv] of one head [S, D] in fp64, CHUNK queries at a time."""
    scale, out, dq = q.shape[1] ** -0.5, torch.empty_like(v), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(q), CHUNK):
        rows = slice(start, start + CHUNK)
        scores = q[rows] @ k.t() * scale
        if causal:
            places = torch.arange(len(k), device=k.device)
            scores.masked_fill_(places > places[rows, None], -torch.inf)
        p = torch.softmax(scores, -1)
        out[rows] = p @ v
        dv += p.t() @ grad[rows]
        dp = grad[rows] @ v.t()
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[rows] = ds @ k
        dk += ds.t() @ q[rows]
    return [out, dq, dk, dv]


def alone(context: GpuContext, seq: int, head_dim: int, causal: bool, backward: bool) -> Makers:
    inputs = Inputs(context, seq, head_dim, max(1, TOKENS // seq))
    made = {name: partial(_whole_by_torch, inputs, causal, backward, backend) for name, backend in BACKENDS.items()}
    made = {OURS: partial(_whole_by_ours, inputs, causal, backward), **made}
    return {name: partial(_contestant, context, inputs, causal, make) for name, make in made.items()}


def ring(context: GpuContext, seq: int, head_dim: int, ranks: int, backward: bool) -> Makers:
    """Contestants of a ring, which computes the steps of W ranks one rank after the other, without communication."""
    inputs = Inputs(context, seq, head_dim, 1)
    return {
        OURS: lambda: _contestant(context, inputs, True, lambda: _ring_by_ours(inputs, ranks, backward)),
        WHOLE: lambda: _contestant(context, inputs, True, lambda: _whole_by_ours(inputs, True, backward)),
    }


def _contestant(
    context: GpuContext, inputs: Inputs, causal: bool, make: Callable[[], Callable[[], Sequence[Tensor]]]
) -> Contestant:
    """Contestant that runs the function prepared by `make`, which returns [out] or [dq, dk, dv]."""
    (stream,) = context.streams(1)
    context.synchronize()
    with on(stream):
        compute = make()
        compute()

    def run() -> None:
        with on(stream):
            compute()

    def check() -> None:
        with on(stream):
            got = compute()
            inputs.check(got, causal)

    return Contestant(run, check)


def _whole_by_torch(
    inputs: Inputs, causal: bool, backward: bool, backend: SDPBackend
) -> Callable[[], Sequence[Tensor]]:
    leaves = [x.transpose(1, 2).detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v)]
    grad = inputs.grad.transpose(1, 2)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)

    try:
        out = forward()
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0]) from error
    if not backward:
        return lambda: [forward().transpose(1, 2)]
    return lambda: [g.transpose(1, 2) for g in torch.autograd.grad(out, leaves, grad, retain_graph=True)]


def _whole_by_ours(inputs: Inputs, causal: bool, backward: bool) -> Callable[[], Sequence[Tensor]]:
    call, local = _call(inputs, 1, 0, causal), LocalRing()

    def forward() -> tuple[Tensor, Tensor]:
        return local.forward(call, inputs.q, inputs.k, inputs.v)

    if not backward:
        return lambda: [forward()[0]]
    saved = RingSaved(inputs.q, inputs.k, inputs.v, *forward(), inputs.grad, None)

    def gradients() -> Sequence[Tensor]:
        found = local.backward(call, saved)
        return [found.dq, found.dk, found.dv]

    return gradients


def _ring_by_ours(inputs: Inputs, ranks: int, backward: bool) -> Callable[[], Sequence[Tensor]]:
    calls, where, (q, k, v, grad) = _sharded(inputs, ranks)

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [_steps(call, q[rank], k, v) for rank, call in enumerate(calls)]

    def whole(parts: Sequence[Tensor]) -> Tensor:
        return _joined(inputs.q, where, parts)

    if not backward:
        return lambda: [whole([out for out, _ in forward()])]
    outs = forward()

    def gradients() -> Sequence[Tensor]:
        dk, dv = [fp32_accumulator(x) for x in k], [fp32_accumulator(x) for x in v]
        dq = []
        for rank, call in enumerate(calls):
            state = RingBackward(call, RingSaved(q[rank], k[rank], v[rank], *outs[rank], grad[rank], None))
            for t in range(ranks):
                source = call.plan.source_rank(rank, t)
                state.attend(t, k[source], v[source], dk[source], dv[source])
            dq.append(state.result([dk[rank], dv[rank]]).dq)
        return [whole(dq), *(whole([x.to(DTYPE) for x in parts]) for parts in (dk, dv))]

    return gradients


def _steps(call: RingCall, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run all steps of one rank, which reads other ranks' keys in place."""
    state = RingForward(call, q, v[call.rank])
    for t in range(len(k)):
        source = call.plan.source_rank(call.rank, t)
        state.attend(t, k[source], v[source])
    return state.result()


def _joined(like: Tensor, where: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Join the ranks' shards to one sequence."""
    result = torch.empty_like(like)
    for tokens, part in zip(where, parts, strict=True):
        result[:, tokens] = part
    return result


def _sharded(inputs: Inputs, ranks: int) -> tuple[list[RingCall], list[Tensor], list[list[Tensor]]]:
    """(calls of the ranks, tokens of each, their shards of q, k, v and the gradient)."""
    calls = [_call(inputs, ranks, rank, True) for rank in range(ranks)]
    where = [torch.from_numpy(tokens.indices).to(inputs.q.device) for tokens in calls[0].plan.queries]
    return calls, where, [[x[:, tokens] for tokens in where] for x in (inputs.q, inputs.k, inputs.v, inputs.grad)]


def _call(inputs: Inputs, ranks: int, rank: int, causal: bool) -> RingCall:
    seq, head_dim = inputs.q.shape[1], inputs.q.shape[3]
    plan = ring_plan(AttentionMask(seq, seq, causal=causal), ranks, TokenLayout("zigzag"))
    return RingCall(plan.rank_plan(rank), TRITON_KERNEL, Scores(head_dim**-0.5))


class RingRanks:
    """Ranks of one sequence, with their shards."""

    def __init__(self, context: GpuContext, inputs: Inputs, world_size: int) -> None:
        from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace

        self.inputs = inputs
        self.programs = max(1, context.sms // world_size - RELAYS)
        self.calls, self.where, (self.q, self.k, self.v, _) = _sharded(inputs, world_size)
        self.layouts = [
            make_keys_layout(call.plan, call.rank, self.k[call.rank], self.v[call.rank]) for call in self.calls
        ]
        sums = torch.empty(self.q[0].shape[:3], dtype=torch.float32, device=context.device)
        self.ranks = KernelRanks(
            context,
            world_size,
            lambda rank: self.layouts[rank].nbytes(world_size),
            self._one_launch,
            lambda rank: [torch.empty_like(like) for like in (self.q[rank], sums) for _ in range(2)],
            RingWorkspace,
        )

    def _one_launch(self, rank: int, number: int, workspace: Any) -> Tensor:
        from fused_tp.triton_kernels.attention.ring_forward import ring_forward

        plan, scores = self.calls[rank].plan, self.calls[rank].scores
        shards = self.q[rank], self.k[rank], self.v[rank]
        chunks, layout = kv_chunks(plan, rank), self.layouts[rank]
        out: Tensor = ring_forward(
            *shards, chunks, to_kernel_terms(scores), layout, workspace=workspace, programs=self.programs
        )[0]
        return out

    def steps(self, rank: int) -> Tensor:
        return _steps(self.calls[rank], self.q[rank], self.k, self.v)[0]

    def check(self, parts: Sequence[Tensor]) -> None:
        self.ranks.assert_in_time()
        self.inputs.check([_joined(self.inputs.q, self.where, parts)], causal=True)


def rank_contestants(context: GpuContext, seq: int, head_dim: int, world_size: int) -> Makers:
    inputs = Inputs(context, seq, head_dim, 1)
    ring = RingRanks(context, inputs, world_size)

    def on_ranks(run: Callable[[], list[Tensor]], note: str) -> Contestant:
        return Contestant(run, lambda: ring.check(run()), note)

    return {
        OURS: lambda: on_ranks(ring.ranks.run_set, f"{ring.programs} programs on each rank"),
        STEPS: lambda: on_ranks(lambda: each(ring.ranks.streams, ring.steps), ""),
        WHOLE: lambda: _contestant(context, inputs, True, lambda: _whole_by_ours(inputs, True, False)),
    }
