"""Distribution of packed documents: every token once, equally many per rank, nearly equal work."""

from __future__ import annotations

import itertools
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fused_tp import sequence_balance
from fused_tp.attention.balance import balanced_ranges
from fused_tp.attention.layout import tokens_by_rank


def bounds_of(lengths: Any) -> tuple[int, ...]:
    return tuple(accumulate(map(int, lengths), initial=0))


def causal_work(bounds: tuple[int, ...], ranges: tuple[range, ...]) -> int:
    """Visible pairs from first principles: each token sees those of its document up to itself."""
    offsets = np.concatenate([np.arange(1, n + 1) for n in np.diff(bounds)]) if bounds[-1] else np.empty(0, int)
    return sum(int(offsets[r.start : r.stop].sum()) for r in ranges)


def zipf(documents: int, tokens: int, seed: int | None = None) -> tuple[int, ...]:
    """Bounds of documents, the n-th longest 1/n as long as the longest; shuffled if a seed is given."""
    shares = 1 / np.arange(1, documents + 1)
    lengths = np.floor(shares / shares.sum() * tokens).astype(int)
    lengths[0] += tokens - lengths.sum()
    if seed is not None:
        np.random.default_rng(seed).shuffle(lengths)
    return bounds_of(lengths)


def uniform(documents: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    cuts = np.sort(np.random.default_rng(seed).integers(0, tokens + 1, documents - 1))
    return (0, *map(int, cuts), tokens)


def log_normal(documents: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    weights = np.random.default_rng(seed).lognormal(0, 1.2, documents)
    return bounds_of(np.floor(weights / weights.sum() * tokens))


lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60), st.sampled_from([0, 1, 200, 1000])), min_size=1)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 9))
@example([0], 3)
@example([1], 4)
@example([5, 5, 5], 2)
@example([1] * 40, 7)
@example([900, 900] + [1] * 30, 4)
@example([900, 0, 1], 8)
def test_every_token_once_in_order_and_no_worse_than_zigzag(lengths: list[int], world_size: int) -> None:
    bounds = bounds_of(lengths)
    total = bounds[-1]
    held = balanced_ranges(bounds, world_size)
    assert held == balanced_ranges(bounds, world_size)
    assert [sum(map(len, ranges)) for ranges in held] == list(map(len, torch.arange(total).tensor_split(world_size)))
    for ranges in held:
        assert all(ranges) and all(a.stop < b.start for a, b in pairwise(ranges))
    assert sorted(token for ranges in held for r in ranges for token in r) == list(range(total))
    zigzag = tokens_by_rank(total, world_size, "zigzag")
    busiest = max(causal_work(bounds, ranges) for ranges in held)
    assert busiest <= max(causal_work(bounds, tokens.ranges) for tokens in zigzag)


FEW = [zipf(32, 16384, seed) for seed in (None, 0, 1, 2)]
MANY = [make(1000, 100_000) for make in (zipf, uniform, log_normal)]


@pytest.mark.parametrize(("of", "world_sizes"), [(FEW, (2, 3, 4, 8)), (MANY, (3, 8, 64))], ids=["few", "many"])
def test_work_is_equal_to_one_percent(of: list[tuple[int, ...]], world_sizes: tuple[int, ...]) -> None:
    for bounds, world_size in itertools.product(of, world_sizes):
        work = [causal_work(bounds, ranges) for ranges in balanced_ranges(bounds, world_size)]
        assert max(work) <= 1.01 * sum(work) / world_size, (len(bounds), world_size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("bounds", "world_size"),
    [
        (bounds_of([1000] * 3), 2),
        (bounds_of([1000] * 8), 8),
        (bounds_of([7000]), 4),
        (bounds_of([1] * 3000), 5),
        (bounds_of([9000, 9000] + [3] * 2000), 8),
        (bounds_of([9000] + [1] * 3000 + [5000]), 4),
        (bounds_of([5000, 3000]), 6),
    ],
)
def test_awkward_lengths_with_and_without_a_causal_mask(bounds: tuple[int, ...], world_size: int, causal: bool) -> None:
    figure = sequence_balance(torch.tensor(bounds), world_size=world_size, causal=causal)
    assert figure.balance >= (0.995 if causal else 0.97)


def test_documents_stay_whole_where_they_can() -> None:
    held = balanced_ranges(bounds_of([100] * 8), 4)
    assert all(r.start % 100 == 0 and r.stop % 100 == 0 for ranges in held for r in ranges)
    bounds = zipf(32, 16384)
    assert sum(map(len, balanced_ranges(bounds, 8))) < 64  # sharded like zigzag, 32 documents would be 480 pieces


def test_one_document_is_cut_like_zigzag() -> None:
    held = balanced_ranges((0, 8192), 4)
    assert held == [tokens.ranges for tokens in tokens_by_rank(8192, 4, "zigzag")]


def test_the_figure_counts_what_the_mask_shows() -> None:
    documents = [5, 0, 1, 9, 4]
    bounds = bounds_of(documents)
    for layout in ("zigzag", "contiguous", "balanced"):
        figure = sequence_balance(torch.tensor(bounds), world_size=3, layout=layout, window=(2, 1), causal=False)
        of = np.repeat(np.arange(len(documents)), documents)
        q, k = np.arange(19)[:, None], np.arange(19)
        dense = (of[:, None] == of) & (k >= q - 2) & (k <= q + 1)
        held = tokens_by_rank(19, 3, layout, bounds)
        assert figure.work == tuple(int(dense[tokens.indices].sum()) for tokens in held)
        assert figure.tokens == tuple(tokens.length for tokens in held)
        assert figure.balance == pytest.approx(dense.sum() / 3 / max(figure.work))


def test_the_figure_is_printed_as_a_table() -> None:
    figure = sequence_balance(torch.tensor([0, 5, 8], dtype=torch.int32), world_size=2, layout="contiguous")
    assert str(figure) == (
        "contiguous, 8 tokens, 2 documents, 2 ranks, causal: balance 0.955\n"
        "rank  tokens  runs  pairs  of mean\n"
        "   0       4     1     10    0.952\n"
        "   1       4     1     11    1.048"
    )
    assert str(sequence_balance(seq_len=1, group=None)).startswith("zigzag, 1 token, 1 rank, causal: balance 1.000")
    assert sequence_balance(torch.tensor([0, 0]), world_size=2).balance == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "pass one of them, not none"),
        ({"cu_seqlens": torch.tensor([0, 4]), "seq_len": 4}, ValueError, "pass one of them, not both"),
        ({"seq_len": 4, "layout": "balanced"}, ValueError, "needs their cu_seqlens"),
        ({"seq_len": 4, "layout": "stripe"}, ValueError, "layout is 'stripe'"),
        ({"seq_len": -4}, ValueError, "seq_len is -4"),
        ({"seq_len": 4, "world_size": 0}, ValueError, "world_size is 0"),
        ({"seq_len": 4, "world_size": 2, "group": "cp"}, ValueError, "must not both be passed"),
        *(
            ({"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "seq_len": None}, ValueError, "must begin with 0")
            for bounds in ([], [0], [1, 4], [0, 5, 4])
        ),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, ValueError, r"\[documents \+ 1\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sequence_balance(**arguments)
