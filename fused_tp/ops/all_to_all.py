"""The two all-to-all ops of Ulysses attention; each is the backward of the other.

Internal: `ulysses_attention` checks the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.all_to_all import Swap, TensorShare, all_to_all_for, row_ranges_in_sequence
from fused_tp.attention.layout import local_length, tokens_by_rank
from fused_tp.attention.spec import AttentionArguments
from fused_tp.backends.registry import ALL_TO_ALL
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import Group, group_by_name
from fused_tp.core.pending import accumulate_dtype, checksum
from fused_tp.core.tracing import span
from fused_tp.ops.attention_arguments import annotate_mismatch, checked_arguments, describe_call
from fused_tp.ops.op import OPS, AnyGroup, Op, SavedForBackward, ScheduleKey

ULYSSES_OP = "ulysses_attention"


@dataclass(frozen=True)
class HeadShares:
    """Assignment of heads to ranks. Each rank gets equally many query heads, and the key heads that they read."""

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    @property
    def heads_per_rank(self) -> int:
        """Number of query heads per rank."""
        return self.num_heads // self.num_ranks

    @property
    def has_repeated_heads(self) -> bool:
        """True if key heads are sent to more than one rank."""
        return self.num_kv_heads % self.num_ranks != 0

    def heads_of_rank(self, role: str, rank: int) -> range:
        """Return the query heads (`role` "q") or key heads ("k") of `rank`."""
        first, stop = rank * self.heads_per_rank, (rank + 1) * self.heads_per_rank
        if role == "q":
            return range(first, stop)
        heads_per_kv_head = self.num_heads // self.num_kv_heads
        return range(first // heads_per_kv_head, (stop - 1) // heads_per_kv_head + 1)

    def head_sharded_dtype(self, role: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of queries (`role` "q") or keys ("k") of dtype `dtype` after they are sharded by heads.

        Key heads that are sent to several ranks are fp32, so that their gradients are summed in fp32.
        """
        return accumulate_dtype(dtype) if role == "k" and self.has_repeated_heads else dtype


def check_head_count(num_heads: int, num_ranks: int) -> None:
    """Raise ValueError unless the number of query heads is a multiple of the number of ranks."""
    if num_heads % num_ranks:
        divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"q has {num_heads} heads, which must be a multiple of the {num_ranks} ranks. Use {divisors} ranks, "
            "ring_attention (any number of ranks), or context_parallel_attention (heads sharded over one mesh dim, a "
            "ring over the other)."
        )


def elements_per_token(q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int]) -> int:
    """Number of elements of one token over all heads of q, k and v."""
    return q_shape[2] * q_shape[3] + k_shape[2] * (k_shape[3] + v_shape[3])


class HeadsExchange(NamedTuple):
    """Parameters of one exchange of tokens for heads.

    Attributes:
        kinds: one letter per tensor: "q" if it has the tokens and heads of queries, "k" for keys.
        heads, kv_heads: total number of heads of each kind.
        columns: elements per token of q, k and v together. Dispatch uses it for all exchanges of a call, so that they
            select the same schedule.
        has_slopes, has_sinks, return_lse: True if the call passes alibi_slopes, sinks, or return_lse=True; compared
            between ranks.
        parts, first_part, stride: the layout has `parts` shards; rank i holds shard first_part + i * stride.
    """

    kinds: str
    heads: int
    kv_heads: int
    columns: int
    has_slopes: bool
    has_sinks: bool
    return_lse: bool
    parts: int
    first_part: int
    stride: int


class _Args(NamedTuple):
    xs: list[Tensor]
    exchange: HeadsExchange
    attention: AttentionArguments
    group: AnyGroup

    @property
    def resolved_group(self) -> Group:
        return group_by_name(self.group)

    @property
    def head_shares(self) -> HeadShares:
        return HeadShares(self.exchange.heads, self.exchange.kv_heads, self.resolved_group.size)

    def layout_shard_index(self, rank: int) -> int:
        return self.exchange.first_part + rank * self.exchange.stride

    def num_rows(self, role: str, rank: int) -> int:
        """Number of queries (`role` "q") or keys ("k") that `rank` holds."""
        length = self.attention.seq_len if role == "q" else self.attention.seq_len_kv
        return local_length(length, self.exchange.parts, self.layout_shard_index(rank), self.attention.layout)

    def result_dtypes(self, is_to_heads: bool) -> list[torch.dtype]:
        """Dtypes of the results; see `HeadShares.head_sharded_dtype`."""
        roles_and_tensors = zip(self.exchange.kinds, self.xs, strict=True)
        if is_to_heads:
            return [self.head_shares.head_sharded_dtype(role, x.dtype) for role, x in roles_and_tensors]
        return [x.dtype if role == "q" else self.xs[0].dtype for role, x in roles_and_tensors]

    def swap_and_description(self, is_to_heads: bool) -> tuple[Swap, str]:
        """Return the swap of all tensors, and a description of the call, whose checksum is compared between ranks.

        Raises:
            ValueError: cu_seqlens is invalid.
        """
        exchange, mask, batch = self.exchange, self.attention.mask(), self.xs[0].shape[0]
        description = describe_call(
            self.attention,
            mask,
            alibi_slopes=exchange.has_slopes,
            sinks=exchange.has_sinks,
            return_lse=exchange.return_lse,
        )
        shares_by_role = {
            "q": self._tensor_share("q", mask.seq_len, mask.cu_seqlens),
            "k": self._tensor_share("k", mask.seq_len_kv, mask.cu_seqlens_kv or mask.cu_seqlens),
        }
        dims = (
            batch,
            mask.seq_len,
            exchange.heads,
            exchange.kv_heads,
            exchange.columns,
            len(self.xs),
            checksum(description),
        )
        shares = tuple(shares_by_role[role] for role in exchange.kinds)
        return Swap(
            ULYSSES_OP, dims, self.resolved_group.rank, shares, tuple(self.result_dtypes(is_to_heads))
        ), description

    def _tensor_share(self, role: str, length: int, bounds: tuple[int, ...]) -> TensorShare:
        tokens = tokens_by_rank(length, self.exchange.parts, self.attention.layout, bounds)
        ranks = range(self.resolved_group.size)
        num_heads = self.exchange.heads if role == "q" else self.exchange.kv_heads
        heads = tuple(self.head_shares.heads_of_rank(role, rank) for rank in ranks)
        return TensorShare(
            row_ranges_in_sequence(tuple(tokens[self.layout_shard_index(rank)] for rank in ranks)), heads, num_heads
        )


def _key(a: _Args) -> ScheduleKey:
    """Key for dispatch, by the size of the first exchange of a call, which sends q, k and v."""
    num_tokens = a.attention.seq_len * a.xs[0].shape[0]
    return ScheduleKey(ALL_TO_ALL, a.xs[0].dtype, a.xs[0].device, num_tokens, None, a.exchange.columns)


def _run_swap(is_to_heads: bool, schedule: Schedule, a: _Args) -> list[Tensor]:
    swap, description = a.swap_and_description(is_to_heads)
    transport = all_to_all_for(schedule)
    direction = "heads" if is_to_heads else "sequence"
    with span(f"all_to_all to {direction} ({transport.name})"), annotate_mismatch(ULYSSES_OP, swap.rank, description):
        return transport.run(is_to_heads, swap, a.xs)


def _to_heads_fake(a: _Args) -> list[Tensor]:
    group, results = a.resolved_group, []
    for role, x, dtype in zip(a.exchange.kinds, a.xs, a.result_dtypes(is_to_heads=True), strict=True):
        length = sum(a.num_rows(role, rank) for rank in range(group.size))
        shape = (x.shape[0], length, len(a.head_shares.heads_of_rank(role, group.rank)), x.shape[3])
        results.append(x.new_empty(shape, dtype=dtype))
    return results


def _to_sequence_fake(a: _Args) -> list[Tensor]:
    results = []
    for role, x, dtype in zip(a.exchange.kinds, a.xs, a.result_dtypes(is_to_heads=False), strict=True):
        num_heads = a.exchange.heads if role == "q" else a.exchange.kv_heads
        results.append(
            x.new_empty((x.shape[0], a.num_rows(role, a.resolved_group.rank), num_heads, x.shape[3]), dtype=dtype)
        )
    return results


# Gradients of all results are sent, with zeros for unused results: different ranks may use different results, but their
# message sizes must agree.
def _backward(reverse_op: str, s: SavedForBackward[_Args], grads: list[Tensor]) -> dict[str, Any]:
    return {"xs": OPS[reverse_op](grads, *s.args.exchange, *s.args.attention, s.args.group)}


def _example(size: int, q: Tensor, k: Tensor, v: Tensor) -> _Args:
    arguments = checked_arguments(AttentionArguments(), q, k, v, size, 0)
    check_head_count(q.shape[2], size)
    token_elements = elements_per_token(q.shape, k.shape, v.shape)
    exchange = HeadsExchange("qkk", q.shape[2], k.shape[2], token_elements, False, False, False, size, 0, 1)
    return _Args([q, k, v], exchange, arguments, None)


# Converts each tensor from [B, this rank's tokens, all heads, D] to [B, all tokens of the group, this rank's heads, D].
SEQUENCE_TO_HEADS: Op[_Args] = Op(
    "sequence_to_heads",
    _Args,
    "Tensor[]",
    partial(_run_swap, True),
    _to_heads_fake,
    key=_key,
    backward_key=_key,
    make_example_args=_example,
    saves=("cu_seqlens", "cu_seqlens_kv"),
    backward=partial(_backward, "heads_to_sequence"),
)

# The inverse of SEQUENCE_TO_HEADS.
HEADS_TO_SEQUENCE: Op[_Args] = Op(
    "heads_to_sequence",
    _Args,
    "Tensor[]",
    partial(_run_swap, False),
    _to_sequence_fake,
    key=_key,
    saves=("cu_seqlens", "cu_seqlens_kv"),
    backward=partial(_backward, "sequence_to_heads"),
)
