"""Ring attention whose steps are one launch, W ranks at once on one GPU, each on its share of the SMs.

Against the same attention in a launch for each step, which read other ranks' keys where they lie, so that nothing
moves; and against one launch of the whole on all SMs. Forward, causal, zigzag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.chunks import chunks_of
from fused_tp.attention.kernels.triton import TRITON, terms_of
from fused_tp.attention.plan import ring_plan
from fused_tp.attention.ring import Forward, RingCall
from fused_tp.attention.ring_fused import keys_layout
from fused_tp.attention.ring_local import LocalRing
from fused_tp.attention.scores import Scores
from fused_tp.attention.spec import AttentionMask
from fused_tp.transport.local import LocalRank, run_local

from .case import OURS, Case, Contestant, Rival
from .gpu_attention import WHOLE, Inputs
from .gpu_ranks import RankMemory, each, prepare
from .gpu_timing import GpuContext
from .ratios import SPEEDUP

STEPS = "a launch for each step"
# Multiprocessors of a rank for the kernels between its copies: one for each of two streams, since those of a rank that
# comes first find all of the GPU free, and a program of a later rank finds no room beside one.
RELAYS = 2
WHOLE_BAR = 0.85


def cases(quick: bool) -> Iterator[Case]:
    for world_size in (2,) if quick else (2, 4):
        for seq in (16384,) if quick else (16384, 32768):
            yield Case(
                f"attention-ranks/forward/W={world_size}/S={seq}",
                contestants,
                {"seq": seq, "head_dim": 128, "world_size": world_size},
                {STEPS: Rival(SPEEDUP, 1.0), WHOLE: Rival(SPEEDUP, WHOLE_BAR)},
                seconds=3.0,
            )


class Ring:
    """The ranks of one sequence: their parts of it and, made by threads, their workspaces."""

    def __init__(self, context: GpuContext, inputs: Inputs, world_size: int) -> None:
        self.inputs, self.world_size = inputs, world_size
        self.programs = max(1, context.sms // world_size - RELAYS)
        seq = inputs.q.shape[1]
        self.plan = ring_plan(AttentionMask(seq, seq, causal=True), world_size, "zigzag")
        self.scores = Scores(inputs.q.shape[3] ** -0.5)
        self.where = [torch.from_numpy(tokens.indices).to(context.device) for tokens in self.plan.queries]
        self.q, self.k, self.v = ([x[:, tokens] for tokens in self.where] for x in (inputs.q, inputs.k, inputs.v))
        self.layouts = [keys_layout(self.plan, rank, self.k[rank], self.v[rank]) for rank in range(world_size)]
        self.memories: list[RankMemory] = run_local(world_size, self._prepare, device=context.device, timeout=300)
        self.streams = context.streams(world_size)
        each(self.streams, self._results)

    def _results(self, rank: int) -> None:
        """Leaves memory for results in the pool of this stream: to ask the driver for some may wait for a kernel."""
        q = self.q[rank]
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        kept = [torch.empty_like(x) for x in (q, lse) for _ in range(2)]
        del kept

    def _prepare(self, rank: LocalRank) -> RankMemory:
        from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace

        return prepare(
            rank,
            self.layouts[rank.rank].nbytes(self.world_size),
            lambda workspace: self.one_launch(rank.rank, workspace),
            timeout_seconds=10.0,
            kind=RingWorkspace,
        )

    def one_launch(self, rank: int, workspace: Any = None) -> Tensor:
        from fused_tp.triton_kernels.attention.ring_forward import ring_forward

        out: Tensor = ring_forward(
            self.q[rank],
            self.k[rank],
            self.v[rank],
            chunks_of(self.plan, rank),
            terms_of(self.scores),
            self.layouts[rank],
            workspace=workspace or self.memories[rank].workspace,
            programs=self.programs,
        )[0]
        return out

    def steps(self, rank: int) -> Tensor:
        state = Forward(RingCall(self.plan, rank, TRITON, self.scores, None), self.q[rank], self.v[rank])
        for t in range(self.world_size):
            source = self.plan.source(rank, t)
            state.attend(t, self.k[source], self.v[source])
        return state.result()[0]

    def check(self, parts: Sequence[Tensor]) -> None:
        for memory in self.memories:
            expired = memory.workspace.expired()
            assert expired is None, str(expired)
        out = torch.empty_like(self.inputs.q)
        for tokens, part in zip(self.where, parts, strict=True):
            out[:, tokens] = part
        self.inputs.check([out], causal=True)


def contestants(context: GpuContext, seq: int, head_dim: int, world_size: int) -> dict[str, Callable[[], Contestant]]:
    inputs = Inputs(context, seq, head_dim, 1)
    ring = Ring(context, inputs, world_size)

    def on_ranks(compute: Callable[[int], Tensor], note: str) -> Contestant:
        def run() -> list[Tensor]:
            return each(ring.streams, compute)

        def check() -> None:
            parts = run()
            torch.cuda.synchronize(context.device)
            ring.check(parts)

        return Contestant(run, check, note)

    def whole() -> Contestant:
        plan = ring_plan(AttentionMask(seq, seq, causal=True), 1, "zigzag")
        call, local = RingCall(plan, 0, TRITON, ring.scores, None), LocalRing()

        def run() -> list[Tensor]:
            return each(ring.streams[:1], lambda rank: local.forward(call, inputs.q, inputs.k, inputs.v, ())[0])

        def check() -> None:
            (out,) = run()
            torch.cuda.synchronize(context.device)
            inputs.check([out], causal=True)

        return Contestant(run, check)

    return {
        OURS: lambda: on_ranks(ring.one_launch, f"{ring.programs} programs on each rank"),
        STEPS: lambda: on_ranks(ring.steps, ""),
        WHOLE: whole,
    }
