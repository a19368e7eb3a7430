"""Balance of attention work over the ranks of a layout, computed without running attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fused_tp.attention.layout import check_layout, tokens_by_rank
from fused_tp.attention.spec import AttentionMask, read_bounds
from fused_tp.core.group import GroupLike, group_identity
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.ops.attention_arguments import checked_window, move_to_cpu


@dataclass(frozen=True)
class SequenceBalance:
    """Number of tokens and attention work per rank; `print` shows a table.

    Attributes:
        description: layout, lengths and mask as text.
        tokens: number of tokens per rank.
        work: attention work per rank: the number of (query, key) pairs that the mask does not hide.
        runs: number of contiguous ranges of tokens per rank.
    """

    description: str
    tokens: tuple[int, ...]
    work: tuple[int, ...]
    runs: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean work divided by the maximum: the mean fraction of time that ranks are busy. 1.0: all work is equal."""
        return sum(self.work) / (len(self.work) * max(self.work)) if any(self.work) else 1.0

    def __str__(self) -> str:
        mean = sum(self.work) / len(self.work) or 1.0
        rows = [("rank", "tokens", "runs", "pairs", "of mean")]
        for rank, (tokens, runs, work) in enumerate(zip(self.tokens, self.runs, self.work, strict=True)):
            rows.append((str(rank), str(tokens), str(runs), str(work), f"{work / mean:.3f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{self.description}: balance {self.balance:.3f}", *lines])


def sequence_balance(
    cu_seqlens: Tensor | None = None,
    *,
    seq_len: int | None = None,
    group: GroupLike = None,
    world_size: int | None = None,
    layout: str | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
) -> SequenceBalance:
    """Count the tokens and the attention work of each rank exactly, without communication.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], the starts of packed documents and the end; None for one sequence.
        seq_len: length of the sequence; pass it if cu_seqlens is None, and only then.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        world_size: number of ranks; pass it or `group`.
        layout: as in `sequence_positions`. None: "balanced" with cu_seqlens, "zigzag" without.
        causal, window: as in `ring_attention`.

    Returns:
        A `SequenceBalance`: `tokens`, `work` and `runs` of each rank, and `balance`, 1.0 if all work is equal. It
        prints as a table.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> print(sequence_balance(torch.tensor([0, 5, 8]), world_size=2, layout="contiguous"))
        contiguous, 8 tokens, 2 documents, 2 ranks, causal: balance 0.955
        rank  tokens  runs  pairs  of mean
           0       4     1     10    0.952
           1       4     1     11    1.048
    """
    if (cu_seqlens is None) == (seq_len is None):
        raise ValueError(
            "sequence_balance needs either cu_seqlens (for packed documents) or seq_len (for one sequence); pass "
            f"one of them, not {'both' if seq_len is not None else 'none'}."
        )
    cpu_cu_seqlens = move_to_cpu("cu_seqlens", cu_seqlens)
    length: Any = seq_len if cpu_cu_seqlens is None else int(cpu_cu_seqlens[-1]) if len(cpu_cu_seqlens) else 0
    check_int("seq_len", length, minimum=0)
    bounds = read_bounds("cu_seqlens", cpu_cu_seqlens, length)
    if world_size is not None and group is not None:
        raise ValueError("group and world_size must not both be passed; pass one of them.")
    size = group_identity(group)[1] if world_size is None else world_size
    check_int("world_size", size, minimum=1)
    layout = ("balanced" if bounds else "zigzag") if layout is None else layout
    check_layout(layout, has_documents=bool(bounds))
    window_limits = checked_window(window)
    check_bool(causal=causal)
    mask = AttentionMask(length, length, causal, window_limits, bounds, bounds)
    _, starts, stops = mask.visible_intervals(np.arange(length))
    cumulative_pairs = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(stops - starts)])
    tokens_per_rank = tokens_by_rank(length, size, layout, bounds)
    description = [
        layout,
        _format_count(length, "token"),
        _format_count(size, "rank"),
        "causal" if causal else "not causal",
    ]
    if bounds:
        description.insert(2, _format_count(len(bounds) - 1, "document"))
    if window is not None:
        description.append(f"window {window_limits}")
    return SequenceBalance(
        ", ".join(description),
        tuple(tokens.length for tokens in tokens_per_rank),
        tuple(
            sum(int(cumulative_pairs[r.stop] - cumulative_pairs[r.start]) for r in tokens.ranges)
            for tokens in tokens_per_rank
        ),
        tuple(len(tokens.ranges) for tokens in tokens_per_rank),
    )


def _format_count(count: int, unit: str) -> str:
    return f"{count} {unit}" + "s" * (count != 1)
