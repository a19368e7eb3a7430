"""Keywords that the ops of attention share, stated once for type checkers; what they mean: `ring_attention`."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class ScoreKeywords(TypedDict, total=False):
    """What becomes of the scores: in training and over a cache."""

    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class AttentionKeywords(ScoreKeywords, total=False):
    """Those of attention over a sequence that is cut over ranks."""

    layout: str
    dropout_p: float
    cu_seqlens: Tensor | None
    cu_seqlens_kv: Tensor | None
    seq_len: int | None
    seq_len_kv: int | None
