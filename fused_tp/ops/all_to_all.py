"""All-to-alls around attention by heads, each the backward of the other. Internal: `ulysses_attention` checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.all_to_all import Swap, TensorShare, all_to_all_by, places_of
from fused_tp.attention.layout import all_tokens, local_length
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
    """Assignment of heads to `ranks` ranks: query heads equally; each rank gets the key heads that these read."""

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
        """Heads of `rank`, of kind "q" or "k"."""
        first, stop = rank * self.own, (rank + 1) * self.own
        if kind == "q":
            return range(first, stop)
        per_kv_head = self.heads // self.kv_heads
        return range(first // per_kv_head, (stop - 1) // per_kv_head + 1)

    def dtype(self, kind: str, dtype: torch.dtype) -> torch.dtype:
        """Dtype of a tensor sharded by heads: fp32 for key heads sent to several ranks, so that gradients are, too."""
        return accumulate_dtype(dtype) if kind == "k" and self.repeated else dtype


def check_shared(heads: int, ranks: int) -> None:
    """Raise ValueError unless `ranks` ranks can share the heads of q equally."""
    if heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"q has {heads} heads, which {ranks} ranks cannot share equally; {fitting} ranks could. ring_attention "
            "takes any number of ranks, and context_parallel_attention as many for the heads as fit."
        )


def moved_columns(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Number of elements of one token over all heads of q, k and v, given their shapes."""
    return q[2] * q[3] + k[2] * (k[3] + v[3])


class HeadsExchange(NamedTuple):
    """Parameters of one exchange of tokens for heads.

    Attributes:
        kinds: "q" or "k" for each tensor: its tokens and heads are those of queries or of keys.
        columns: elements of q, k and v per token, so that all exchanges of one call select the same schedule.
        has_slopes, has_sinks, return_lse: True if the call has these arguments.
        parts, first_part, stride: rank i of the group holds part first_part + i * stride of `parts` of the layout.
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
        """Number of tokens that `rank` holds."""
        length = self.attention.seq_len if kind == "q" else self.attention.seq_len_kv
        return local_length(length, self.moved.parts, self.part(rank), self.attention.layout)

    def dtypes(self, to_heads: bool) -> list[torch.dtype]:
        """Dtypes of the results; only tensors by heads are in fp32, for key heads sent to several ranks."""
        both = zip(self.moved.kinds, self.xs, strict=True)
        if to_heads:
            return [self.shared.dtype(kind, x.dtype) for kind, x in both]
        return [x.dtype if kind == "q" else self.xs[0].dtype for kind, x in both]

    def exchange(self, to_heads: bool) -> tuple[Swap, str]:
        """Return the exchange and the description that its checksum covers.

        Raises:
            ValueError: cu_seqlens are not the bounds of the sequence.
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
        tokens = all_tokens(length, self.moved.parts, self.attention.layout, bounds)
        ranks = range(self.ranks.size)
        every = self.moved.heads if kind == "q" else self.moved.kv_heads
        heads = tuple(self.shared.of(kind, rank) for rank in ranks)
        return TensorShare(places_of(tuple(tokens[self.part(rank)] for rank in ranks)), heads, every)


def _key(a: _Args) -> ScheduleKey:
    """Key for dispatch by the size of the first exchange of a call: q, k and v."""
    tokens = a.attention.seq_len * a.xs[0].shape[0]
    return ScheduleKey(ALL_TO_ALL, a.xs[0].dtype, a.xs[0].device, tokens, None, a.moved.columns)


def _move(to_heads: bool, schedule: Schedule, a: _Args) -> list[Tensor]:
    exchange, words = a.exchange(to_heads)
    by = all_to_all_by(schedule)
    way = "heads" if to_heads else "sequence"
    with span(f"all_to_all to {way} ({by.name})"), annotate_mismatch(OP, exchange.rank, words):
        return by.move(to_heads, exchange, a.xs)


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


# Gradients of all results are sent, zeros for unused ones: unused results may differ between ranks, messages must not.
def _backward(way_back: str, s: Saved[_Args], grads: list[Tensor]) -> dict[str, Any]:
    return {"xs": OPS[way_back](grads, *s.args.moved, *s.args.attention, s.args.group)}


def _example(size: int, q: Tensor, k: Tensor, v: Tensor) -> _Args:
    arguments = checked_arguments(AttentionArguments(), q, k, v, size, 0)
    check_shared(q.shape[2], size)
    columns = moved_columns(q.shape, k.shape, v.shape)
    moved = HeadsExchange("qkk", q.shape[2], k.shape[2], columns, False, False, False, size, 0, 1)
    return _Args([q, k, v], moved, arguments, None)


# [B, this rank's tokens, all heads, D] -> [B, the group's tokens, this rank's heads, D] of each tensor.
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
