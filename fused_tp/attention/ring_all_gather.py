"""Ring attention in collectives: gather all K/V, compute; reduce-scatter dK/dV. For sequences so short that latency,
not bytes, is what W - 1 messages cost.

Long ones go by groups of key heads, so that not all heads of all ranks' keys are held at a time; those of the next
group travel while one is computed with (Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.attention.ring import (
    OP,
    Backward,
    Forward,
    Gradients,
    Ring,
    RingCall,
    RingSaved,
    fp32_accumulator,
)
from fused_tp.transport.base import After, Pending, accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist

_BYTES_AT_A_TIME = 64 << 20


class AllGatherRing(Ring):
    """Works on every torch.distributed group; holds the K/V of all ranks, of two groups of heads."""

    name = "plain"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._transport.check(OP, call.dims, q.dtype, q.device)
        groups, results = _head_groups(call, q, k, v), []
        with self._transport.abort_scope(OP):
            for heads, kv_heads, everyone in self._gathered(call, groups, k, v):
                state = Forward(call.of_heads(heads), q[:, :, heads], v[:, :, kv_heads])
                for t in range(call.plan.world_size):
                    state.attend(t, *_keys_of(call, everyone, t, k))
                results.append(state.result())
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def backward(self, call: RingCall, saved: RingSaved) -> Gradients:
        k, v = saved.k, saved.v
        self._transport.check(f"{OP}_backward", call.dims, k.dtype, k.device)
        groups = _head_groups(call, saved.q, k, v)
        with self._transport.abort_scope(f"{OP}_backward"):
            parts = [
                self._gradients(call.of_heads(heads), saved.of_heads(heads, kv_heads), everyone)
                for heads, kv_heads, everyone in self._gathered(call, groups, k, v)
            ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _gathered(
        self, call: RingCall, groups: list[tuple[slice, slice]], k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """(query heads, key heads, their K/V of all ranks) group by group; the next one is under way meanwhile."""
        arriving = self._gather(call, k, v, groups[0][1])
        for index, (heads, kv_heads) in enumerate(groups):
            everyone = arriving.wait()
            if index + 1 < len(groups):
                arriving = self._gather(call, k, v, groups[index + 1][1])
            yield heads, kv_heads, everyone

    def _gradients(self, call: RingCall, saved: RingSaved, everyone: Tensor) -> Gradients:
        """Of one group of heads."""
        state, k = Backward(call, saved), saved.k
        sums = fp32_accumulator(everyone)
        for t in range(call.plan.world_size):
            state.attend(t, *_keys_of(call, everyone, t, k), *_keys_of(call, sums, t, k))
        # Own terms too go through the sum over ranks: it adds all of them in the order of the ranks.
        rows = everyone.shape[1]
        own = self._transport.reduce_scatter(
            "ring_attention dK/dV", sums.flatten(0, 1), [rows] * call.plan.world_size
        ).wait()
        return state.result([x[:, : k.shape[1]] for x in _split(own, k)])

    def _gather(self, call: RingCall, k: Tensor, v: Tensor, kv_heads: slice) -> Pending[Tensor]:
        """K and V of every rank, side by side: [W, rows of the longest, B, heads, D + Dv]."""
        rows = max(tokens.length for tokens in call.plan.keys)
        mine = torch.cat([k[:, :, kv_heads], v[:, :, kv_heads]], dim=-1).transpose(0, 1)
        mine = pad(mine, (0, 0, 0, 0, 0, 0, 0, rows - mine.shape[0])).contiguous()
        gathered = self._transport.all_gather("ring_attention K/V", mine)
        return After(lambda: gathered.wait().unflatten(0, (call.plan.world_size, rows)))


def _head_groups(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """(query heads, key heads) of each group; all ranks find the same."""
    kv_heads, per_kv_head = k.shape[2], q.shape[2] // k.shape[2]
    row = k.shape[0] * (k.shape[3] + v.shape[3]) * accumulate_dtype(k.dtype).itemsize
    most = max(1, _BYTES_AT_A_TIME // max(1, call.plan.mask.seq_len_kv * row))
    count = -(-kv_heads // most)
    bounds = [kv_heads * index // count for index in range(count + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [(slice(s.start * per_kv_head, s.stop * per_kv_head), s) for s in spans]


def _keys_of(call: RingCall, everyone: Tensor, t: int, k: Tensor) -> tuple[Tensor, Tensor]:
    return _split(everyone[call.plan.source(call.rank, t)], k)


def _split(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, B, heads, D + Dv] as K and V [B, rows, heads, D or Dv]."""
    both = both.transpose(0, 1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _joined(parts: list[Gradients]) -> Gradients:
    dq, dk, dv, d_slopes, d_sinks = zip(*parts, strict=True)
    of_heads = (torch.cat(found, 2) for found in (dq, dk, dv))
    return Gradients(*of_heads, *(None if found[0] is None else torch.cat(found) for found in (d_slopes, d_sinks)))
