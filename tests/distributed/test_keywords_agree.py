"""Ranks that call an op with different keywords or targets: RankMismatchError on all, and they stay in step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fused_tp
from fused_tp.core.errors import RankMismatchError
from tests.distributed.schedule_cases import NEEDS_CORE
from tests.workers import error_of, on_ranks

X, Q = torch.ones(4, 4), torch.ones(1, 4, 2, 4)
STACKED, TOKENS, OFFSETS = X.expand(2, 4, 4), torch.tensor([0, 1, 2, 3]), torch.tensor([2, 4], dtype=torch.int32)
SLOPES, BOUNDS = torch.ones(2), torch.tensor([0, 3, 8])
ATTENTION = {
    "causal": True,
    "scale": 0.25,
    "window": (1, 1),
    "softcap": 2.0,
    "alibi_slopes": SLOPES,
    "sinks": SLOPES,
    "layout": "contiguous",
    "dropout_p": 0.5,
    "cu_seqlens": BOUNDS,
}
DECODE = {name: ATTENTION[name] for name in ("scale", "window", "softcap", "alibi_slopes", "sinks")}
LENGTHS = torch.tensor([5])

# By op: arguments, keywords, and for each keyword another value that is valid on one rank.
Case = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "all_gather": ((X, 0), {}, {"dim": 1}),
    "reduce_scatter": ((X, 0), {}, {"dim": 1}),
    "all_gather_matmul": ((X.view(4, 1, 4), X, X[0]), {}, {"gather_dim": 1, "float8": "rowwise"}),
    "matmul_reduce_scatter": ((X.view(2, 2, 4), X), {}, {"scatter_dim": 1, "bias": X[0], "float8": "rowwise"}),
    "matmul_all_reduce": ((X, X), {}, {"bias": X[0], "float8": "rowwise"}),
    "all_gather_grouped_matmul": ((X.view(4, 1, 4), STACKED, TOKENS, OFFSETS), {}, {"gather_dim": 1}),
    "grouped_matmul_reduce_scatter": (
        (X, STACKED, TOKENS, OFFSETS),
        {"shape": (2, 2)},
        {"scatter_dim": 1, "shape": (4, 4)},
    ),
    "grouped_matmul_all_reduce": ((X, STACKED, TOKENS, OFFSETS), {"shape": (4,)}, {"shape": (4, 4)}),
    "all_reduce_rms_norm": ((X, X, X[0], 1e-6), {}, {"eps": 1e-5}),
    "matmul_all_reduce_rms_norm": ((X, X, X, X[0], 1e-6), {}, {"eps": 1e-5}),
    "vocab_parallel_cross_entropy": (
        (X, torch.tensor([0, 1, 2, 7])),
        {"reduction": "sum"},
        {
            "label_smoothing": 0.1,
            "ignore_index": 2,
            "reduction": "mean",
            "target": torch.tensor([0, 2, 1, 7]),
            "logits_shard": X.bfloat16(),
        },
    ),
    "linear_cross_entropy": (
        (X, X, torch.tensor([0, 1, 2, 7])),
        {},
        {
            "bias": X[0],
            "label_smoothing": 0.1,
            "ignore_index": 2,
            "reduction": "sum",
            "num_targets": 3,
            "logit_scale": 2.0,
            "softcap": 4.0,
            "z_loss": 0.1,
            "target": torch.tensor([0, 2, 1, 7]),
        },
    ),
    "ring_attention": ((Q, Q, Q), {}, ATTENTION),
    "ulysses_attention": ((Q, Q, Q), {}, {**ATTENTION, "return_lse": True}),
    "context_parallel_decode": (
        (Q[:, :1], Q, Q),
        {"cache_seqlens": LENGTHS, "block": 4},
        {**DECODE, "causal": False, "window": (1, 1), "block": 2, "cache_seqlens": LENGTHS + 1},
    ),
    "unshard_sequence": ((X, 0), {}, {"dim": 1, "layout": "contiguous", "cu_seqlens": BOUNDS}),
}
# Keywords that may differ: they affect only a rank's own results, or can express the same value differently.
OWN = {"return_lse", "return_gathered", "page_table", "group", "mesh", "gather_size", "vocab_size", "seq_len"}
OWN |= {"seq_len_kv", "cu_seqlens_kv"}
# Factors of rows may differ, too, but attention's "scale" may not. The shapes of hidden and target imply gather_dim.
ROWS = {"grouped_matmul_reduce_scatter": {"scale"}, "grouped_matmul_all_reduce": {"scale"}}
ROWS["linear_cross_entropy"] = {"gather_dim"}
ALWAYS = {
    "vocab_parallel_cross_entropy",
    "linear_cross_entropy",
    "context_parallel_decode",
    "unshard_sequence",
}  # sent without a check


SENDS_NO_KEYWORD = {"all_reduce", "column_parallel_matmul", "column_parallel_grouped_matmul"}
SENDS_NO_KEYWORD |= {"shard_sequence", "sequence_positions", "sequence_balance"}


def test_every_keyword_has_a_case() -> None:
    ops = [
        name
        for name in fused_tp.__all__
        if inspect.isfunction(op := getattr(fused_tp, name)) and "group" in inspect.signature(op).parameters
    ]
    assert set(ops) - SENDS_NO_KEYWORD - {"explain"} == set(CASES)
    for name, (args, _, others) in CASES.items():
        parameters = inspect.signature(getattr(fused_tp, name)).parameters
        tensors = [p for p, arg in zip(parameters, args, strict=False) if isinstance(arg, torch.Tensor)]
        keywords = [p for p in parameters if p not in tensors]
        assert set(keywords) - OWN - ROWS.get(name, set()) <= set(others), name


@pytest.mark.parametrize(
    ("schedule", "checked"),
    [pytest.param("one_sided", False, marks=NEEDS_CORE), ("plain", True), ("plain", False)],
)
@on_ranks(2, env=lambda schedule, checked: {"FUSED_TP_SCHEDULE": schedule, "FUSED_TP_CHECK": str(int(checked))})
def test_ranks_learn_that_keywords_differ(group: Any, schedule: str, checked: bool) -> None:
    quiet = []
    for name, (args, given, others) in CASES.items():
        op: Callable[..., Any] = getattr(fused_tp, name)
        of_args = list(inspect.signature(op).parameters)[: len(args)]
        if schedule == "plain" and not checked and name not in ALWAYS:
            continue
        for keyword, value in others.items():
            call = {**dict(zip(of_args, args, strict=True)), **given, "group": group}
            if group.rank() == 1:
                call[keyword] = value
            with torch.no_grad():
                error = error_of(op, **call)
            if not isinstance(error, RankMismatchError):
                quiet.append((name, keyword, error))
            total = fused_tp.all_reduce(torch.ones(3), group=group)
            assert total.eq(2).all(), (name, keyword)
    assert not quiet, "\n".join(map(str, quiet))
