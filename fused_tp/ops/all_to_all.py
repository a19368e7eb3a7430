"""The all-to-alls around attention by heads, each the backward of the other. Internal: `ulysses_attention` checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.all_to_all import AllToAll, Exchange, Share, all_to_all_by, shares
from fused_tp.attention.layout import all_tokens, local_length
from fused_tp.attention.spec import SCHEMA, AttentionArguments
from fused_tp.ops.attention_arguments import annotate_mismatch, checksum, describe
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.group import group_by_name
from fused_tp.runtime.tracing import span
from fused_tp.schedules.registry import ALL_TO_ALL, select_schedule
from fused_tp.transport.base import accumulate_dtype

OP = "ulysses_attention"


@dataclass(frozen=True)
class Heads:
    """How heads are shared out to `ranks` ranks: query heads equally, and to each the key heads that they read."""

    heads: int
    kv_heads: int
    ranks: int

    @property
    def own(self) -> int:
        """Query heads of each rank."""
        return self.heads // self.ranks

    @property
    def repeated(self) -> bool:
        """Whether a key head goes to several ranks."""
        return self.kv_heads % self.ranks != 0

    def of(self, kind: str, rank: int) -> range:
        """The heads of `rank`: kind "q" or "k"."""
        first, stop = rank * self.own, (rank + 1) * self.own
        if kind == "q":
            return range(first, stop)
        per_kv_head = self.heads // self.kv_heads
        return range(first // per_kv_head, (stop - 1) // per_kv_head + 1)

    def dtype(self, kind: str, dtype: torch.dtype) -> torch.dtype:
        """Of a tensor by heads. Key heads that go to several ranks are in fp32, so that their gradients come so."""
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
    """Elements of one token of q, k and v, of these shapes, of all heads."""
    return q[2] * q[3] + k[2] * (k[3] + v[3])


class HeadsArguments(NamedTuple):
    """What the ops take behind the tensors and before the arguments of the attention, in the order of _SCHEMA.

    Attributes:
        kinds: "q" or "k" for each tensor: it has the tokens and heads of queries or of keys.
        columns: elements of q, k and v for each token, by which all exchanges of one call are dispatched alike.
        alibi_slopes, sinks, return_lse: whether the call has these.
        parts, first_part, stride: rank i of the group holds part first_part + i * stride of `parts` of the layout.
    """

    kinds: str
    heads: int
    kv_heads: int
    columns: int
    alibi_slopes: bool
    sinks: bool
    return_lse: bool
    parts: int
    first_part: int
    stride: int

    def part(self, rank: int) -> int:
        return self.first_part + rank * self.stride


_COUNT = len(HeadsArguments._fields)
_DOCUMENTS = slice(_COUNT + 2, _COUNT + 4)  # cu_seqlens and cu_seqlens_kv, the only tensors
_SCHEMA = (
    "Tensor[] xs, str kinds, int heads, int kv_heads, int columns, bool has_slopes, bool has_sinks, bool return_lse, "
    f"int parts, int first_part, int stride, {SCHEMA}, str group"
)


class _Call:
    """The arguments behind the tensors."""

    def __init__(self, rest: Sequence[Any]) -> None:
        self.given, self.arguments = HeadsArguments(*rest[:_COUNT]), AttentionArguments(*rest[_COUNT:-1])
        self.group = group_by_name(rest[-1])
        self.kinds = self.given.kinds
        self.heads = Heads(self.given.heads, self.given.kv_heads, self.group.size)

    def select(self, xs: Sequence[Tensor]) -> AllToAll:
        """Raises ValueError where FUSED_TP_SCHEDULE names a schedule that cannot serve this group."""
        tokens = self.arguments.seq_len * xs[0].shape[0]
        return all_to_all_by(
            select_schedule(ALL_TO_ALL, self.group, xs[0].dtype, xs[0].device, tokens, None, self.given.columns)
        )

    def rows(self, kind: str, rank: int) -> int:
        """How many tokens a rank holds."""
        length = self.arguments.seq_len if kind == "q" else self.arguments.seq_len_kv
        return local_length(length, self.given.parts, self.given.part(rank), self.arguments.layout)

    def exchange(self, xs: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Exchange, str]:
        """With what its checksum stands for.

        Raises:
            ValueError: cu_seqlens are not the bounds of the sequence.
        """
        given, mask = self.given, self.arguments.mask()
        words = describe(
            self.arguments, mask, alibi_slopes=given.alibi_slopes, sinks=given.sinks, return_lse=given.return_lse
        )
        of_kind = {
            "q": self._share("q", mask.seq_len, mask.cu_seqlens),
            "k": self._share("k", mask.seq_len_kv, mask.cu_seqlens_kv or mask.cu_seqlens),
        }
        dims = (xs[0].shape[0], mask.seq_len, given.heads, given.kv_heads, given.columns, len(xs), checksum(words))
        found = tuple(of_kind[kind] for kind in self.kinds)
        return Exchange(OP, dims, self.group.rank, found, tuple(dtypes)), words

    def _share(self, kind: str, length: int, bounds: tuple[int, ...]) -> Share:
        tokens = all_tokens(length, self.given.parts, self.arguments.layout, bounds)
        ranks = range(self.group.size)
        every = self.heads.heads if kind == "q" else self.heads.kv_heads
        return shares(
            [tokens[self.given.part(rank)] for rank in ranks], tuple(self.heads.of(kind, rank) for rank in ranks), every
        )


def _select(xs: Sequence[Tensor], *rest: Any) -> AllToAll:
    return _Call(rest).select(xs)


def _to_heads(xs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    call = _Call(rest)
    way = call.select(xs)
    dtypes = [call.heads.dtype(kind, x.dtype) for kind, x in zip(call.kinds, xs, strict=True)]
    exchange, words = call.exchange(xs, dtypes)
    with span(f"all_to_all to heads ({way.name})"), annotate_mismatch(OP, exchange.rank, words):
        return way.to_heads(exchange, xs)


def _to_sequence(xs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    call = _Call(rest)
    way = call.select(xs)
    exchange, words = call.exchange(xs, _dtypes_by_sequence(xs, call.kinds))
    with span(f"all_to_all to sequence ({way.name})"), annotate_mismatch(OP, exchange.rank, words):
        return way.to_sequence(exchange, xs)


def _dtypes_by_sequence(xs: Sequence[Tensor], kinds: str) -> list[torch.dtype]:
    return [x.dtype if kind == "q" else xs[0].dtype for kind, x in zip(kinds, xs, strict=True)]


def _to_heads_fake(xs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    call = _Call(rest)
    rank = call.group.rank
    found = []
    for kind, x in zip(call.kinds, xs, strict=True):
        length = sum(call.rows(kind, other) for other in range(call.group.size))
        shape = (x.shape[0], length, len(call.heads.of(kind, rank)), x.shape[3])
        found.append(x.new_empty(shape, dtype=call.heads.dtype(kind, x.dtype)))
    return found


def _to_sequence_fake(xs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    call = _Call(rest)
    found = []
    for kind, x, dtype in zip(call.kinds, xs, _dtypes_by_sequence(xs, call.kinds), strict=True):
        heads = call.heads.heads if kind == "q" else call.heads.kv_heads
        found.append(x.new_empty((x.shape[0], call.rows(kind, call.group.rank), heads, x.shape[3]), dtype=dtype))
    return found


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, *rest = inputs
    ctx.before, ctx.after = rest[: _DOCUMENTS.start], rest[_DOCUMENTS.stop :]
    ctx.save_for_backward(*rest[_DOCUMENTS])
    ctx.set_materialize_grads(False)
    ctx.results = [(x.shape, x.dtype, x.device) for x in output]


def _grads(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """All of them, zeros for those that nothing was made of: which these are may differ between ranks, what is sent may
    not."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    ]


def _to_heads_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    rest = (*ctx.before, *ctx.saved_tensors, *ctx.after)
    return HEADS_TO_SEQUENCE(_grads(ctx, grads), *rest), *[None] * len(rest)


def _to_sequence_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    rest = (*ctx.before, *ctx.saved_tensors, *ctx.after)
    return SEQUENCE_TO_HEADS(_grads(ctx, grads), *rest), *[None] * len(rest)


# [B, this rank's tokens, all heads, D] -> [B, the group's tokens, this rank's heads, D] of each tensor.
SEQUENCE_TO_HEADS = CustomOp(
    f"sequence_to_heads({_SCHEMA}) -> Tensor[]",
    _to_heads,
    _to_heads_fake,
    _setup_context,
    _to_heads_backward,
    _select,
)

# The way back.
HEADS_TO_SEQUENCE = CustomOp(
    f"heads_to_sequence({_SCHEMA}) -> Tensor[]",
    _to_sequence,
    _to_sequence_fake,
    _setup_context,
    _to_sequence_backward,
    _select,
)
