"""Attention over context parallel ranks whose keys and values are expanded from latents (multi-head latent attention).

A latent is far smaller than the keys and values of all heads that a layer expands from it (DeepSeek-V2,
arXiv:2405.04434). So the ranks exchange latents, and each rank expands those that its queries see. Neither the gathered
latents nor the expanded keys are saved for backward, which gathers and expands them again.

=======  ==============================================================================
forward  all-gather of the latents [B, S, kv_lora_rank + rotary dim]; expand; attend
dgrad    all-gather again; expand; backward of attention and expansion; reduce-scatter of the latents' gradients
wgrad    of the expansion: sum over this rank's queries and all keys, summed over ranks like any parameter
=======  ==============================================================================

`LatentRing` attends to all keys of one rank at a time. `SelectedKeys` attends to the keys that an indexer has selected
for each query (DeepSeek-V3.2's sparse attention). It masks all other keys, and does not fetch the selected ones only:
the queries of a rank together select nearly all keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fused_tp.attention.layout import Int64s, TokenLayout, TokenRanges, tokens_by_rank
from fused_tp.attention.ring import RingBackward, RingCall, RingForward, RingSaved, fp32_accumulator
from fused_tp.attention.ring_plan import ring_plan
from fused_tp.attention.spec import UNLIMITED, AttentionArguments, AttentionMask
from fused_tp.core.pending import accumulate_dtype
from fused_tp.ops.arguments import autocast_dtype
from fused_tp.ops.attention_arguments import build_arguments, checked_arguments
from fused_tp.ops.collectives import reduce_scatter
from fused_tp.ops.ring_attention import RING_OP, call_on_gathered_keys
from fused_tp.parallelizing.forward_shard import CpContext, count_attention_call

# Scores computed at a time: in the blocks of queries, a mask or the scores of all heads have about this many elements.
MAX_BLOCK_SCORES = 1 << 26

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Latents(NamedTuple):
    """Keys and values of this rank's tokens before and after their expansion.

    Attributes:
        latent, rotary: [batch, 1, seq, kv_lora_rank] and [batch, 1, seq, rotary dim].
        expand: function from (latent, rotary) to (key, value) [batch, heads, seq, head_dim].
        layer: the module with the parameters of `expand`.
        key, value: the result of `expand`.
    """

    latent: Tensor
    rotary: Tensor
    expand: Expand
    layer: nn.Module
    key: Tensor
    value: Tensor


def attend_to_latents(
    cp: CpContext, query: Tensor, latents: Latents, *, are_heads_sharded: bool, **keywords: Any
) -> Tensor | None:
    """Attend from this rank's `query` to the tokens of all ranks, all [batch, heads, seq, head_dim], like `cp.attend`.

    Returns None if a ring of the expanded keys sends fewer bytes.
    """
    if not _are_latents_smaller(cp, latents, keywords["causal"], keywords["window"]):
        return None
    query, arguments = _checked(cp, query, latents, are_heads_sharded, keywords)
    return _attend(LatentRing(cp, latents, arguments), query, latents)


def attend_to_selected(
    cp: CpContext, query: Tensor, latents: Latents, indices: Tensor, *, are_heads_sharded: bool, **keywords: Any
) -> Tensor:
    """Attend like `attend_to_latents`, to the visible keys among `indices` [batch, seq, selected keys] only."""
    if keywords["softcap"] or keywords["alibi_slopes"] is not None or keywords["dropout_p"]:
        raise ValueError(
            "Attention to selected tokens over context parallel ranks supports no softcap, ALiBi slopes or dropout. "
            "Set the model's attention_dropout to 0.0, or omit cp_dim."
        )
    query, arguments = _checked(cp, query, latents, are_heads_sharded, keywords)
    return _attend(SelectedKeys(cp, latents, arguments), query, latents, indices)


def _are_latents_smaller(cp: CpContext, latents: Latents, causal: bool, window: tuple[int, int] | None) -> bool:
    """True if exchanging latents sends fewer elements than a ring of expanded keys; equal on all ranks.

    A ring sends only the keys that other ranks see, which windows and packed documents reduce. Latents go to all ranks.
    """
    key_width = latents.key.shape[1] * (latents.key.shape[3] + latents.value.shape[3])
    latent_width, world_size = latents.latent.shape[3] + latents.rotary.shape[3], cp.mesh.size()
    mask = AttentionMask(cp.seq_len, cp.seq_len, causal, window or (UNLIMITED, UNLIMITED), cp.documents)
    plan = ring_plan(mask, world_size, TokenLayout(cp.layout))
    pairs = ((reader, source) for reader in range(world_size) for source in range(world_size) if reader != source)
    num_sent_keys = sum(plan.needed_rows(reader, source).length for reader, source in pairs)
    return latent_width * cp.seq_len * (world_size - 1) < key_width * num_sent_keys


def _checked(
    cp: CpContext, query: Tensor, latents: Latents, are_heads_sharded: bool, keywords: dict[str, Any]
) -> tuple[Tensor, AttentionArguments]:
    """Return the query in autocast's dtype, and all arguments after it."""
    dtype = autocast_dtype(query)
    query = query if dtype is None else query.to(dtype)
    keywords = {**keywords, "layout": cp.layout, "cu_seqlens": cp.cu_seqlens, "seq_len": cp.seq_len}
    first_head = cp.tp_rank * query.shape[1] if are_heads_sharded else 0
    q, k, v = (x.to(query.dtype).transpose(1, 2) for x in (query, latents.key, latents.value))
    arguments = build_arguments(RING_OP, keywords, first_head=first_head)
    return query, checked_arguments(arguments, q, k, v, cp.mesh.size(), cp.mesh.get_local_rank())


def _attend(attention: LatentAttention, query: Tensor, latents: Latents, indices: Tensor | None = None) -> Tensor:
    count_attention_call()
    packed = torch.cat([latents.latent.squeeze(1), latents.rotary.squeeze(1)], -1)
    sinks, q = attention.arguments.sinks, query.transpose(1, 2).contiguous()
    out: Tensor = _AttendToLatents.apply(attention, q, packed, indices, sinks, *attention.parameters())
    return out.transpose(1, 2)


class Gradients(NamedTuple):
    """Gradients of this rank's queries, of the latents of all ranks, of the sinks, and of the parameters."""

    query: Tensor
    latents: Tensor
    sinks: Tensor | None
    parameters: list[Tensor | None]


class LatentAttention(ABC):
    """Attention of this rank's queries to the latents of all ranks, [batch, seq, width] in the order of the sequence.

    Queries and outputs are [batch, seq, heads, head_dim].

    Args:
        latents: of this rank's tokens; only the functions and parameters are kept.
        arguments: as `checked_arguments` returns them.
    """

    def __init__(self, cp: CpContext, latents: Latents, arguments: AttentionArguments) -> None:
        self.cp, self.arguments, self.mask = cp, arguments, arguments.mask()
        self._layer, self._expand, self._width = latents.layer, latents.expand, latents.latent.shape[3]
        self.draws_random = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in latents.layer.modules())

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the expansion that require gradients."""
        return [parameter for parameter in self._layer.parameters() if parameter.requires_grad]

    @abstractmethod
    def forward(self, q: Tensor, latents: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out, lse [batch, heads, seq]); an empty lse if `backward` does not need it."""

    @abstractmethod
    def backward(
        self, q: Tensor, latents: Tensor, indices: Tensor | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> Gradients:
        """Return the gradients."""

    def expand_keys(self, latents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Expand `latents` [batch, seq, width] to keys and values [batch, seq, heads, head_dim]."""
        latent, rotary = latents.unsqueeze(1).tensor_split([self._width], dim=-1)
        key, value = self._expand(latent, rotary)
        return key.to(dtype).transpose(1, 2), value.to(dtype).transpose(1, 2)

    @contextmanager
    def differentiable_copies(self) -> Iterator[list[Tensor]]:
        """Replace the parameters of the expansion by copies, and return those that require gradients.

        Hooks on the parameters, which may sum gradients over ranks, would also run for the gradients of an expansion.
        """
        copies: list[Tensor] = []
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        copy_of: dict[int, Tensor] = {}
        for module in self._layer.modules():
            owned: dict[str, Any] = module._parameters
            for name, parameter in owned.items():
                if parameter is not None and parameter.requires_grad:
                    if id(parameter) not in copy_of:
                        copy_of[id(parameter)] = parameter.detach().requires_grad_()
                        copies.append(copy_of[id(parameter)])
                    replaced.append((owned, name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = copy_of[id(parameter)]
        try:
            yield copies
        finally:
            for parameters, name, parameter in replaced:
                parameters[name] = parameter

    def tokens_by_rank(self) -> tuple[TokenRanges, ...]:
        return tokens_by_rank(self.cp.seq_len, self.cp.mesh.size(), self.cp.layout, self.mask.cu_seqlens)


class LatentRing(LatentAttention):
    """Attention to all visible keys. Expands the latents of one rank at a time, as a ring would receive its keys."""

    def forward(self, q: Tensor, latents: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        state: RingForward | None = None
        call: RingCall | None = None
        for t, rows in self._sources(latents.device):
            if call is not None and call.rank_plan.steps[t].is_empty:
                continue
            k, v = self.expand_keys(latents.index_select(1, rows), q.dtype)
            if call is None:  # step 0: this rank's own keys
                call = call_on_gathered_keys(q, k, v, self.arguments, self.cp.mesh, is_backward=False)
                state = RingForward(call, q, v)
            assert state is not None
            state.attend(t, *_with_dense_rows(k, v))
        assert state is not None
        return state.finalize()

    def backward(
        self, q: Tensor, latents: Tensor, indices: Tensor | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> Gradients:
        state: RingBackward | None = None
        call: RingCall | None = None
        grad_latents = torch.zeros_like(latents)
        with self.differentiable_copies() as parameters:
            sums = _Sums(parameters)
            for t, rows in self._sources(latents.device):
                if call is not None and call.rank_plan.steps[t].is_empty:
                    continue
                with torch.enable_grad():
                    source = latents.index_select(1, rows).requires_grad_()
                    k, v = self.expand_keys(source, q.dtype)
                keys, values = _with_dense_rows(k.detach(), v.detach())
                if call is None:
                    call = call_on_gathered_keys(q, keys, values, self.arguments, self.cp.mesh, is_backward=True)
                    state = RingBackward(call, RingSaved(q, keys, values, out, lse, grad_out, None))
                assert state is not None
                dk, dv = fp32_accumulator(keys), fp32_accumulator(values)
                state.attend(t, keys, values, dk, dv)
                grads = torch.autograd.grad(
                    (k, v), (source, *parameters), (dk.to(k.dtype), dv.to(v.dtype)), allow_unused=True
                )
                grad_latents.index_copy_(1, rows, grads[0])
                sums.add(grads[1:])
        assert state is not None
        empty = q.new_empty(0)
        gradients = state.finalize([empty, empty])
        return Gradients(gradients.dq, grad_latents, gradients.d_sinks, sums.finalize())

    def _sources(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield each step t, and the tokens of the rank whose keys it reads."""
        tokens, rank = self.tokens_by_rank(), self.cp.mesh.get_local_rank()
        for t in range(len(tokens)):
            yield t, _to_tensor(tokens[(rank - t) % len(tokens)], device)


class SelectedKeys(LatentAttention):
    """Attention to selected keys: scores of a block of queries, with a mask, over the keys that the block can see.

    `indices` [batch, seq, selected keys] are the positions of the keys that each query selects. A query that sees fewer
    keys also selects keys that it does not see, so the mask is applied, too.
    """

    def forward(self, q: Tensor, latents: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = self.expand_keys(latents, q.dtype)
        assert indices is not None
        outs = []
        for rows, keys in self._blocks(q):
            mask = self._block_mask(rows, keys, indices)
            outs.append(self._attend_block(mask, q[:, rows], k[:, keys], v[:, keys], self.arguments.sinks))
        return torch.cat(outs, 1), q.new_empty(0)

    def backward(
        self, q: Tensor, latents: Tensor, indices: Tensor | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> Gradients:
        assert indices is not None
        with self.differentiable_copies() as parameters, torch.enable_grad():
            source = latents.detach().requires_grad_()
            k, v = self.expand_keys(source, q.dtype)
        dq, dk, dv = torch.zeros_like(q), fp32_accumulator(k), fp32_accumulator(v)
        sinks = self.arguments.sinks
        d_sinks = None if sinks is None else fp32_accumulator(sinks)
        for rows, keys in self._blocks(q):
            leaves = [x.detach().requires_grad_() for x in (q[:, rows], k[:, keys], v[:, keys])]
            if sinks is not None:
                leaves.append(sinks.detach().requires_grad_())
            with torch.enable_grad():
                block_out = self._attend_block(self._block_mask(rows, keys, indices), *leaves)
            dq[:, rows], block_dk, block_dv, *block_d_sinks = torch.autograd.grad(block_out, leaves, grad_out[:, rows])
            dk[:, keys] += block_dk
            dv[:, keys] += block_dv
            if d_sinks is not None:
                d_sinks += block_d_sinks[0]
        grads = torch.autograd.grad((k, v), (source, *parameters), (dk.to(k.dtype), dv.to(v.dtype)), allow_unused=True)
        assert grads[0] is not None
        d_sinks = None if sinks is None or d_sinks is None else d_sinks.to(sinks.dtype)
        return Gradients(dq, grads[0], d_sinks, list(grads[1:]))

    def _blocks(self, q: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of this rank's queries, and the keys that each can see."""
        _, starts, stops = self._visible_intervals
        num_rows = max(1, MAX_BLOCK_SCORES // (q.shape[0] * q.shape[2] * max(1, self.cp.seq_len)))
        for start in range(0, q.shape[1], num_rows):
            rows = slice(start, start + num_rows)
            yield rows, slice(int(starts[rows].min()), int(stops[rows].max()))

    @cached_property
    def _visible_intervals(self) -> tuple[Int64s, Int64s, Int64s]:
        return self.mask.visible_intervals(self.tokens_by_rank()[self.cp.mesh.get_local_rank()].indices)

    def _block_mask(self, rows: slice, keys: slice, indices: Tensor) -> Tensor:
        """Return True for the keys in `keys` that the queries `rows` see and select, [batch, 1, rows, keys]."""
        block = indices[:, rows].long()
        is_selected = block.new_zeros((*block.shape[:2], self.cp.seq_len), dtype=torch.bool).scatter_(-1, block, True)
        return (visible_keys(self._visible_intervals, rows, keys, block.device) & is_selected[..., keys]).unsqueeze(1)

    def _attend_block(self, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if sinks is not None:  # one more key, whose score is the sink and whose value is 0
            mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype).expand(-1, q.shape[1], -1, -1)
            mask = torch.cat([mask, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*mask.shape[:3], 1)], -1)
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=self.arguments.scale).transpose(1, 2)


def visible_keys(intervals: tuple[Int64s, Int64s, Int64s], rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Return True for the keys in `keys` that the queries `rows` see, bool [1, rows, keys].

    Args:
        intervals: result of `AttentionMask.visible_intervals` for this rank's queries.
    """
    starts, stops = (torch.from_numpy(ends[rows]).to(device).unsqueeze(1) for ends in intervals[1:])
    positions = torch.arange(keys.start, keys.stop, device=device)
    return ((positions >= starts) & (positions < stops)).unsqueeze(0)


class _Sums:
    """Sums of the gradients of `parameters` over several expansions; only `finalize` rounds."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is not None:
                term, total = grad.to(accumulate_dtype(grad.dtype)), self._sums[i]
                self._sums[i] = term if total is None else total + term

    def finalize(self) -> list[Tensor | None]:
        pairs = zip(self._sums, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


class _AttendToLatents(torch.autograd.Function):
    """Gathers latents, attends, and saves neither them nor the keys. Parameters are arguments so that autograd sees
    that the result depends on them."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: LatentAttention,
        q: Tensor,
        packed: Tensor,
        indices: Tensor | None,
        sinks: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.attention, ctx.autocast = attention, _autocast_state(q)
        ctx.random_state = _random_state(q.device) if attention.draws_random else None
        out, lse = attention.forward(q, attention.cp.unshard(packed, 1), indices)
        ctx.save_for_backward(q, packed, indices, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        attention: LatentAttention = ctx.attention
        q, packed, indices, out, lse = ctx.saved_tensors
        with torch.autocast(**ctx.autocast), _random_state_of_forward(ctx.random_state, q.device):
            latents = attention.cp.unshard(packed, 1)
            grads = attention.backward(q, latents, indices, out, lse, grad_out.contiguous())
        return None, grads.query, _reduce_to_owners(attention, grads.latents), None, grads.sinks, *grads.parameters


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the generators of the CPU and of `device`, if it is a GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _random_state_of_forward(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    if state is None:
        yield
        return
    cpu_state, device_state = state
    with torch.random.fork_rng([device] if device_state is not None else []):
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
        yield


def _autocast_state(q: Tensor) -> dict[str, Any]:
    device_type = q.device.type
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": False,  # each expansion has a graph of its own
    }


def _reduce_to_owners(attention: LatentAttention, gradient: Tensor) -> Tensor:
    """Sum the `gradient` [batch, seq, width] of all latents over ranks; return that of this rank's latents."""
    cp, tokens = attention.cp, attention.tokens_by_rank()
    length = max(t.length for t in tokens)
    shares = [
        functional.pad(gradient.index_select(1, _to_tensor(t, gradient.device)), (0, 0, 0, length - t.length))
        for t in tokens
    ]
    own_share = reduce_scatter(torch.stack(shares), 0, group=cp.mesh)[0]
    return own_share[:, : tokens[cp.mesh.get_local_rank()].length]


def _to_tensor(tokens: TokenRanges, device: torch.device) -> Tensor:
    return torch.from_numpy(tokens.indices).to(device)


def _with_dense_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `k` and `v` with a contiguous last dim, which kernels require."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    return k, v
