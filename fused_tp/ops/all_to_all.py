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
from fused_tp.ops.attention_arguments import annotate_mismatch, checked_arguments, describe
from fused_tp.ops.op import OPS, AnyGroup, Op, Saved, ScheduleKey

OP = "ulysses_attention"


@dataclass(frozen=True)
class HeadShares:
    """Assignment of heads to ranks. Each rank gets equally many query heads, and the key heads that they read."""

    heads: int
    kv_heads: int
    ranks: int

    @property
    def own(self) -> int:
        """Number of query heads per rank."""
        return self.heads // self.ranks

    @property
    def repeated(self) -> bool:
        """True if key heads are sent to more than one rank."""
        return self.kv_heads % self.ranks != 0

    def of(self, kind: str, rank: int) -> range:
        """The query heads (`kind` "q") or key heads ("k") of `rank`."""
        first, stop = rank * self.own, (rank + 1) * self.own
        if kind == "q":
            return range(first, stop)
        per_kv_head = self.heads // self.kv_heads
        return range(first // per_kv_head, (stop - 1) // per_kv_head + 1)

    def dtype(self, kind: str, dtype: torch.dtype) -> torch.dtype:
        """Dtype of a tensor of `kind` and `dtype` once it is sharded by heads.

        Key heads that are sent to several ranks are fp32, so that their gradients are summed in fp32.
        """
        return accumulate_dtype(dtype) if kind == "k" and self.repeated else dtype


def check_shared(heads: int, ranks: int) -> None:
    """Raise ValueError unless the number of query heads is a multiple of the number of ranks."""
    if heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"q has {heads} heads, which must be a multiple of the {ranks} ranks. Use {fitting} ranks, ring_attention "
            "(any number of ranks), or context_parallel_attention (heads sharded over one mesh dim, a ring over the "
            "other)."
        )


def moved_columns(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Number of elements of one token over all heads of q, k and v, given their shapes."""
    return q[2] * q[3] + k[2] * (k[3] + v[3])


class HeadsExchange(NamedTuple):
    """Parameters of one exchange of tokens for heads.

    Attributes:
        kinds: one letter per tensor: "q" if it has the tokens and heads of queries, "k" for keys.
        heads, kv_heads: total number of heads of each kind.
        columns: elements per token of q, k and v together. Dispatch uses it for all exchanges of a call, so that they
            select the same schedule.
        has_slopes, has_sinks, return_lse: True if the call has these arguments; compared between ranks.
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
    moved: HeadsExchange
    attention: AttentionArguments
    group: AnyGroup

    @property
    def ranks(self) -> Group:
        return group_by_name(self.group)

    @property
    def shared(self) -> HeadShares:
        return HeadShares(self.moved.heads, self.moved.kv_heads, self.ranks.size)

    def part(self, rank: int) -> int:
        return self.moved.first_part + rank * self.moved.stride

    def rows(self, kind: str, rank: int) -> int:
        """Number of queries (`kind` "q") or keys ("k") that `rank` holds."""
        length = self.attention.seq_len if kind == "q" else self.attention.seq_len_kv
        return local_length(length, self.moved.parts, self.part(rank), self.attention.layout)

    def dtypes(self, to_heads: bool) -> list[torch.dtype]:
        """Dtypes of the results; see `HeadShares.dtype`."""
        both = zip(self.moved.kinds, self.xs, strict=True)
        if to_heads:
            return [self.shared.dtype(kind, x.dtype) for kind, x in both]
        return [x.dtype if kind == "q" else self.xs[0].dtype for kind, x in both]

    def exchange(self, to_heads: bool) -> tuple[Swap, str]:
        """Return the exchange, and a description of the call, whose checksum is compared between ranks.

        Raises:
            ValueError: cu_seqlens is invalid.
        """
        moved, mask, batch = self.moved, self.attention.mask(), self.xs[0].shape[0]
        words = describe(
            self.attention, mask, alibi_slopes=moved.has_slopes, sinks=moved.has_sinks, return_lse=moved.return_lse
        )
        of_kind = {
            "q": self._share("q", mask.seq_len, mask.cu_seqlens),
            "k": self._share("k", mask.seq_len_kv, mask.cu_seqlens_kv or mask.cu_seqlens),
        }
        dims = (batch, mask.seq_len, moved.heads, moved.kv_heads, moved.columns, len(self.xs), checksum(words))
        found = tuple(of_kind[kind] for kind in moved.kinds)
        return Swap(OP, dims, self.ranks.rank, found, tuple(self.dtypes(to_heads))), words

    def _share(self, kind: str, length: int, bounds: tuple[int, ...]) -> TensorShare:
        tokens = tokens_by_rank(length, self.moved.parts, self.attention.layout, bounds)
        ranks = range(self.ranks.size)
        every = self.moved.heads if kind == "q" else self.moved.kv_heads
        heads = tuple(self.shared.of(kind, rank) for rank in ranks)
        return TensorShare(row_ranges_in_sequence(tuple(tokens[self.part(rank)] for rank in ranks)), heads, every)


def _key(a: _Args) -> ScheduleKey:
    """Key for dispatch, by the size of the first exchange of a call, which sends q, k and v."""
    tokens = a.attention.seq_len * a.xs[0].shape[0]
    return ScheduleKey(ALL_TO_ALL, a.xs[0].dtype, a.xs[0].device, tokens, None, a.moved.columns)


def _move(to_heads: bool, schedule: Schedule, a: _Args) -> list[Tensor]:
    exchange, words = a.exchange(to_heads)
    by = all_to_all_for(schedule)
    way = "heads" if to_heads else "sequence"
    with span(f"all_to_all to {way} ({by.name})"), annotate_mismatch(OP, exchange.rank, words):
        return by.run(to_heads, exchange, a.xs)


def _to_heads_fake(a: _Args) -> list[Tensor]:
    group, found = a.ranks, []
    for kind, x, dtype in zip(a.moved.kinds, a.xs, a.dtypes(to_heads=True), strict=True):
        length = sum(a.rows(kind, rank) for rank in range(group.size))
        shape = (x.shape[0], length, len(a.shared.of(kind, group.rank)), x.shape[3])
        found.append(x.new_empty(shape, dtype=dtype))
    return found


def _to_sequence_fake(a: _Args) -> list[Tensor]:
    found = []
    for kind, x, dtype in zip(a.moved.kinds, a.xs, a.dtypes(to_heads=False), strict=True):
        heads = a.moved.heads if kind == "q" else a.moved.kv_heads
        found.append(x.new_empty((x.shape[0], a.rows(kind, a.ranks.rank), heads, x.shape[3]), dtype=dtype))
    return found


# Gradients of all results are sent, with zeros for unused results: different ranks may use different results, but their
# message sizes must agree.
def _backward(way_back: str, s: Saved[_Args], grads: list[Tensor]) -> dict[str, Any]:
    return {"xs": OPS[way_back](grads, *s.args.moved, *s.args.attention, s.args.group)}


def _example(size: int, q: Tensor, k: Tensor, v: Tensor) -> _Args:
    arguments = checked_arguments(AttentionArguments(), q, k, v, size, 0)
    check_shared(q.shape[2], size)
    columns = moved_columns(q.shape, k.shape, v.shape)
    moved = HeadsExchange("qkk", q.shape[2], k.shape[2], columns, False, False, False, size, 0, 1)
    return _Args([q, k, v], moved, arguments, None)


# Converts each tensor from [B, this rank's tokens, all heads, D] to [B, all tokens of the group, this rank's heads, D].
SEQUENCE_TO_HEADS: Op[_Args] = Op(
    "sequence_to_heads",
    _Args,
    "Tensor[]",
    partial(_move, True),
    _to_heads_fake,
    key=_key,
    backward_key=_key,
    example=_example,
    saves=("cu_seqlens", "cu_seqlens_kv"),
    backward=partial(_backward, "heads_to_sequence"),
)

# The inverse of SEQUENCE_TO_HEADS.
HEADS_TO_SEQUENCE: Op[_Args] = Op(
    "heads_to_sequence",
    _Args,
    "Tensor[]",
    partial(_move, False),
    _to_sequence_fake,
    key=_key,
    saves=("cu_seqlens", "cu_seqlens_kv"),
    backward=partial(_backward, "sequence_to_heads"),
)
