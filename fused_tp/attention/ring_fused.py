"""Ring attention in one Triton launch over memory that all ranks reach: see `triton_kernels.attention.ring_forward`.

Each rank lays its K/V out where others can read them; the copy engine pulls those that a rank looks at chunk by chunk,
while the launch computes with what is there. It serves GPUs that write into each other's memory, ranks that are threads
on one GPU, and, interpreted, processes of one host. The backward runs step by step, by messages.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_tp.attention.chunks import chunks_of, most_rows
from fused_tp.attention.kernels.triton import TRITON, terms_of
from fused_tp.attention.plan import RingPlan
from fused_tp.attention.ring import Gradients, RingCall, Saved
from fused_tp.attention.ring_messages import SendRecvRing
from fused_tp.runtime import settings
from fused_tp.runtime.tracing import span
from fused_tp.schedules.fused_kernel import FusedKernel

_RELAYS = 1  # multiprocessors for the kernels between the copies


class FusedRing:
    """Serves what the Triton provider serves, over the memory of a `FusedKernel` schedule."""

    name = "fused_kernel"

    def __init__(self, kernels: FusedKernel) -> None:
        self._kernels = kernels

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        from fused_tp.triton_kernels.attention.ring_forward import ring_forward

        kernels, chunks = self._kernels, chunks_of(call.plan, call.rank)
        kernels.check("ring_attention", dims, q)
        layout = keys_layout(call.plan, call.rank, k, v)
        with (
            span("ring_attention launch"),
            kernels.abort_scope("ring_attention"),  # peers count on this call from its first launch on
            kernels.workspaces.use("ring", layout.nbytes(kernels.world_size), "ring_attention") as workspace,
        ):
            result: tuple[Tensor, Tensor] = ring_forward(
                q,
                k,
                v,
                chunks,
                terms_of(call.scores),
                layout,
                workspace=workspace,
                programs=self._programs(),
                sinks=call.sinks,
                precision=TRITON.precision,
            )
        return result

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients:
        return SendRecvRing(self._kernels.messages).backward(call, saved, dims)

    def _programs(self) -> int:
        memory = self._kernels.memory
        if not memory.arch:  # interpreted
            return memory.sms
        return max(1, memory.sms - max(settings.sm_margin(), _RELAYS))


def keys_layout(plan: RingPlan, rank: int, k: Tensor, v: Tensor) -> Any:
    """Where the keys of a call lie in the memory of all ranks: a `triton_kernels.attention.ring_keys.KeysLayout`."""
    from fused_tp.triton_kernels.attention import ring_keys as module

    rows = tuple(tokens.length for tokens in plan.keys)
    pairs = k.shape[0] * k.shape[2]
    shard_bytes = max(rows) * pairs * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    return module.KeysLayout(
        rank=rank,
        rows=rows,
        chunks=tuple(module.Chunk(source, rows.start, len(rows)) for _, source, rows in chunks_of(plan, rank).others),
        most=most_rows(plan),
        pairs=pairs,
        groups=module.groups_of(pairs, shard_bytes),
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        dtype=k.dtype,
    )
