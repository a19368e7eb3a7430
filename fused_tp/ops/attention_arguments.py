"""What the ops of context parallel attention are called with: checked in one place, the same for all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.layout import LAYOUTS, check_layout, local_length
from fused_tp.attention.scores import Dropout, Scores
from fused_tp.attention.spec import UNLIMITED, AttentionMask
from fused_tp.ops.arguments import check_bool, check_int, check_like, check_local, check_tensor, is_int
from fused_tp.ops.cu_seqlens import as_bounds, on_host
from fused_tp.runtime.errors import RankMismatchError
from fused_tp.transport.base import accumulate_dtype


@dataclass(frozen=True)
class Keywords:
    """The keywords of one call besides its tensors, as its op's schema has them: HOW."""

    causal: bool
    left: int
    right: int
    scale: float
    softcap: float
    dropout_p: float
    first_head: int
    layout: str
    seq_len: int
    seq_len_kv: int

    def as_tuple(self) -> tuple[Any, ...]:
        """The fields in the order of the schema."""
        # By name: torch.compile of torch 2.11 cannot look into the __dict__ of a frozen dataclass.
        return tuple([getattr(self, name) for name in _KEYWORDS])

    def mask(self, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None) -> AttentionMask:
        """With the documents' bounds, which are checked here: where their values are known."""
        bounds = as_bounds("cu_seqlens", cu_seqlens, self.seq_len)
        bounds_kv = as_bounds("cu_seqlens_kv", cu_seqlens_kv, self.seq_len_kv)
        if bounds and not bounds_kv:
            if self.seq_len_kv != self.seq_len:
                raise ValueError(
                    f"cu_seqlens says how the {self.seq_len} queries belong to documents, but there are "
                    f"{self.seq_len_kv} keys; pass cu_seqlens_kv, which says that of the keys."
                )
            bounds_kv = bounds
        if len(bounds) != len(bounds_kv):
            raise ValueError(
                f"cu_seqlens has {max(0, len(bounds) - 1)} documents and cu_seqlens_kv {len(bounds_kv) - 1}; queries "
                "and keys belong to the same documents."
            )
        return AttentionMask(self.seq_len, self.seq_len_kv, self.causal, (self.left, self.right), bounds, bounds_kv)

    def scores(self, q: Tensor, alibi_slopes: Tensor | None, seed: Tensor | None) -> Scores:
        slopes = None if alibi_slopes is None else alibi_slopes.to(accumulate_dtype(q.dtype))
        dropout = None if seed is None else Dropout(self.dropout_p, int(seed.item()), self.first_head)
        return Scores(self.scale, self.softcap, slopes, dropout)

    def __str__(self) -> str:
        return (
            f"causal={self.causal}, layout={self.layout!r}, scale={self.scale!r}, window={(self.left, self.right)}, "
            f"softcap={self.softcap!r}, dropout_p={self.dropout_p!r}, seq_len_kv={self.seq_len_kv}"
        )


_KEYWORDS = tuple(field.name for field in fields(Keywords))

HOW = (
    "bool causal, int left, int right, float scale, float softcap, float dropout_p, int first_head, str layout, "
    "SymInt seq_len, SymInt seq_len_kv"
)


def in_words(keywords: Keywords, mask: AttentionMask, **given: bool) -> str:
    """What ranks must agree on besides shapes; `given`: which other arguments there are.

    What they compare are at most eight numbers (those of shared memory): all of this is one of them, its checksum.
    """
    bounds = mask.cu_seqlens, mask.cu_seqlens_kv
    documents = f"checksum {zlib.crc32(repr(bounds).encode())}" if any(bounds) else "one length"
    return ", ".join(
        [str(keywords), *(f"{name}={value}" for name, value in given.items()), f"documents of {documents}"]
    )


def checksum(words: str) -> int:
    return zlib.crc32(words.encode())


@contextmanager
def explained(op: str, rank: int, words: str) -> Iterator[None]:
    """Each rank that hears of a disagreement says what its checksum stands for."""
    try:
        yield
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{str(error).rstrip('.')}. The last number of a {op} is a checksum; on rank {rank} it stands for {words}. "
            "Ranks that hold unequally many tokens need seq_len, the length of the whole sequence."
        ) from error


@dataclass(frozen=True)
class Call:
    """Checked arguments of one call."""

    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_kv: Tensor | None
    seed: Tensor | None
    keywords: Keywords

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """As the op takes them behind q, k and v."""
        return self.alibi_slopes, self.sinks, self.cu_seqlens, self.cu_seqlens_kv, self.seed


def checked_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    size: int,
    rank: int,
    causal: Any,
    scale: Any,
    layout: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: Any,
    cu_seqlens: Any,
    cu_seqlens_kv: Any,
    seq_len: Any,
    seq_len_kv: Any,
    first_head: int = 0,
) -> Call:
    """All keywords of `ring_attention`, of rank `rank` among `size` that share the sequence.

    Raises:
        TypeError, ValueError: one of them does not fit.
    """
    check_heads(q, k, v)
    check_bool("causal", causal)
    if layout not in LAYOUTS:
        check_layout(layout)
    bounds, bounds_kv = on_host("cu_seqlens", cu_seqlens), on_host("cu_seqlens_kv", cu_seqlens_kv)
    if layout == "balanced" and bounds is None:
        raise ValueError(
            "layout 'balanced' shares out packed documents and needs their cu_seqlens; for one sequence 'zigzag' is "
            "balanced."
        )
    if bounds is None and bounds_kv is not None:
        raise ValueError("cu_seqlens_kv was given without cu_seqlens; queries and keys belong to the same documents.")
    crossed = seq_len_kv is not None or bounds_kv is not None
    if not crossed and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} tokens on rank {rank}, but q has {q.shape[1]} (dim 1: [batch, seq_local, heads, "
            "head_dim]); each rank holds the queries and keys of the same tokens, unless seq_len_kv says that keys are "
            "of another sequence."
        )
    total = _total_length("seq_len", seq_len, "q", q.shape[1], size, rank, layout)
    total_kv = total
    if seq_len_kv is not None or k.shape[1] != q.shape[1]:
        total_kv = _total_length("seq_len_kv", seq_len_kv, "k", k.shape[1], size, rank, layout)
    for name, length in (("q", total), ("k", total_kv)):
        if length >= 2**31:
            raise ValueError(f"{name} has {length} tokens on all ranks; tokens are numbered with 31 bits.")
    left, right = checked_window(window)
    keywords = Keywords(
        causal,
        left,
        right,
        checked_scale(scale, q.shape[3]),
        checked_softcap(softcap),
        _checked_dropout(dropout_p),
        first_head,
        layout,
        total,
        total_kv,
    )
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        check_per_head(name, per_head, q)
    # Of the CPU's generator, whatever the device: reading it on the host waits for nothing.
    seed = torch.randint(2**63 - 1, (1,)) if keywords.dropout_p else None
    return Call(alibi_slopes, sinks, bounds, bounds_kv, seed, keywords)


def check_heads(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError or ValueError unless q, k and v fit each other."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Tensor) and t.is_nested:
            raise TypeError(f"{name} is a nested tensor; pack the documents into one row and pass their cu_seqlens.")
    check_tensor("q", q)
    check_like("k", k, "q", q)
    check_like("v", v, "q", q)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be [batch, seq_local, heads, head_dim].")
        if 0 in (t.shape[0], *t.shape[2:]):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; only seq_local may be 0.")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has a batch of {k.shape[0]}, but q has {q.shape[0]}; they must be equal.")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head_dim {k.shape[3]}, but q has {q.shape[3]}; they must be equal.")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"k has {k.shape[2]} heads, of which the {q.shape[2]} heads of q are not a multiple.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has batch, seq_local and heads {tuple(v.shape[:3])}, but k has {tuple(k.shape[:3])}; make them equal."
        )


def _total_length(name: str, given: Any, of: str, length: int, size: int, rank: int, layout: str) -> int:
    if given is None:
        return length * size
    check_int(name, given)
    wanted = local_length(given, size, rank, layout) if given >= 0 else -1
    if wanted != length:
        raise ValueError(
            f"{name}={given} in layout {layout!r} gives rank {rank} of {size} {max(0, wanted)} tokens, but {of} "
            f"holds {length}; cut q, k and v with shard_sequence."
        )
    return int(given)


def checked_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5
    _check_number("scale", scale, "a float or None")
    if not isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite.")
    return float(scale)


def checked_softcap(softcap: Any) -> float:
    _check_number("softcap", softcap, "a float")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}; it must be finite and positive, or 0.0 for no cap.")
    return float(softcap)


def _checked_dropout(dropout_p: Any) -> float:
    _check_number("dropout_p", dropout_p, "a float")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must be in [0, 1).")
    return float(dropout_p)


def _check_number(name: str, value: Any, wanted: str) -> None:
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}.")


def checked_window(window: Any) -> tuple[int, int]:
    if window is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right), how many keys on each side a query sees, not {window!r}.")
    if not all(map(is_int, window)):
        raise TypeError(f"window is {tuple(window)}; each side must be an int, and -1 where there is no limit.")
    if min(window) < UNLIMITED:
        raise ValueError(f"window is {tuple(window)}; each side must be at least 0, or -1 for no limit.")
    left, right = window
    return int(left), int(right)


def check_per_head(name: str, value: Any, q: Tensor) -> None:
    if value is None:
        return
    check_local(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} has dtype {value.dtype}; it must be a floating-point tensor.")
    if tuple(value.shape) != (q.shape[2],):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be [{q.shape[2]}], one for each head of q.")
    if value.device != q.device:
        raise ValueError(f"{name} is on {value.device}, but q is on {q.device}; move one of them.")
