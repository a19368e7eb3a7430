"""Ring attention with every kind of mask and score, on real ranks: forward and all gradients against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_tp.attention.layout import all_tokens
from fused_tp.ops.ring_attention import ring_attention
from tests.attention_cases import (
    DOCUMENTS,
    FEATURES,
    ROUTES,
    Case,
    any_case,
    case,
    check,
    cut,
    inputs,
    keywords,
    on_ranks,
    run,
    whole,
)
from tests.attention_reference import dense_mask
from tests.workers import run_ranks

ON_EVERY_ROUTE = pytest.mark.parametrize("route", list(ROUTES))


@pytest.mark.parametrize(("world_size", "route"), [(1, "one_sided"), (2, "pipelined"), (3, "plain"), (4, "one_sided")])
def test_features(world_size: int, route: str) -> None:
    run(world_size, list(FEATURES.values()), route)


@ON_EVERY_ROUTE
def test_features_on_three_ranks(route: str) -> None:
    run(3, [one for name, one in FEATURES.items() if "cross" in name or "documents" in name], route)


def on_ranks_in_parts(group: dist.ProcessGroup, cases: list[Case]) -> list[list[Tensor | None]]:
    patch = pytest.MonkeyPatch()
    patch.setattr("fused_tp.attention.ring._FEWEST_ROWS_OF_A_CHUNK", 2)
    patch.setattr("fused_tp.attention.ring._MOST_CHUNKS", 5)
    try:
        return on_ranks(group, cases)
    finally:
        patch.undo()


@pytest.mark.parametrize(("world_size", "route"), [(2, "one_sided"), (3, "one_sided"), (4, "pipelined")])
def test_backwards_in_parts(world_size: int, route: str) -> None:
    cases = [one for name, one in FEATURES.items() if "documents" in name or "window" in name or "cross" in name]
    results = run_ranks(world_size, on_ranks_in_parts, cases, env=ROUTES[route])
    for index, one in enumerate(cases):
        check(one, whole(one, [rank[index] for rank in results]))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases=st.lists(any_case(), min_size=6, max_size=6), where=st.sampled_from([(2, "one_sided"), (3, "pipelined")]))
def test_any_mask(cases: list[Case], where: tuple[int, str]) -> None:
    run(where[0], cases, where[1])


def test_dropout_does_not_depend_on_the_group() -> None:
    one = FEATURES["dropout"]
    kept = [whole(one, [r[0] for r in run_ranks(size, on_ranks, [one], env=ROUTES["one_sided"])]) for size in (1, 4)]
    for a, b in zip(*kept, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def leaks(group: dist.ProcessGroup, one: Case, token: int) -> list[bool]:
    """For each of this rank's queries, whether its output changes when a token of the keys does."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    where = torch.from_numpy(all_tokens(one["seq_len"], size, one["layout"], tuple(one["cu_seqlens"]))[rank].indices)
    q, k, v, *_ = inputs(one)
    outs = []
    for change in (0.0, 3.0):
        k2, v2 = k.clone(), v.clone()
        k2[:, token] += change
        v2[:, token] -= change
        out = ring_attention(*(cut(t, 1, where) for t in (q, k2, v2)), group=group, **keywords(one))
        outs.append(out)
    return [not torch.equal(outs[0][:, i], outs[1][:, i]) for i in range(len(where))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_leaks_between_documents_or_out_of_windows(dtype: torch.dtype) -> None:
    one = case(37, causal=True, window=(4, 0), cu_seqlens=DOCUMENTS, layout="balanced", dtype=dtype)
    seen, _ = dense_mask(37, 37, causal=True, window=(4, 0), cu_seqlens=DOCUMENTS)
    tokens = all_tokens(37, 2, "balanced", tuple(DOCUMENTS))
    for token in (0, 1, 9, 14, 15, 30):
        for rank, changed in enumerate(run_ranks(2, leaks, one, token, env=ROUTES["one_sided"])):
            assert changed == seen[torch.from_numpy(tokens[rank].indices), token].tolist()


def sent(group: dist.ProcessGroup, one: Case) -> int:
    """Bytes of K/V and their gradients that this rank gives to others, forward and backward."""
    from fused_tp.transport.torch_dist import TorchDist

    total = 0
    shift = TorchDist.shift

    def counting(self: TorchDist, op: str, x: Tensor, out: Tensor, step: int) -> Any:
        nonlocal total
        total += x.numel() * x.element_size()
        return shift(self, op, x, out, step)

    TorchDist.shift = counting
    try:
        on_ranks(group, [one])
    finally:
        TorchDist.shift = shift
    return total


def test_what_a_window_hides_does_not_travel() -> None:
    one = case(64, causal=True, window=(3, 0), layout="contiguous", kv_heads=1)
    row = 2 * 8 * 4  # K and V of one token, one head, in fp32; gradients are as large
    sizes = run_ranks(4, sent, one, env=ROUTES["pipelined"])
    # Each rank but the last gives the next its last three tokens, forward and backward, and each but the first gives
    # three gradients back.
    assert sizes == [6 * row, 9 * row, 9 * row, 3 * row]


def test_what_a_window_to_both_sides_hides_does_not_travel() -> None:
    one = case(64, window=(5, 3), kv_heads=1)
    row = 2 * 8 * 4
    # Of a neighbour in zigzag both ranks look at eight tokens: where the shards meet, twice. Forward and backward go
    # the keys, backward come their gradients.
    assert run_ranks(2, sent, one, env=ROUTES["pipelined"]) == [3 * 8 * row] * 2
    for route in ("pipelined", "one_sided"):
        check(one, whole(one, [rank[0] for rank in run_ranks(2, on_ranks, [one], env=ROUTES[route])]))


@pytest.mark.parametrize("how", ["wide", "input"])
def test_gradients_travel_wide_or_in_the_dtype_of_the_keys(how: str) -> None:
    one = case(64, kv_heads=1, dtype=torch.bfloat16, layout="contiguous")
    env = {**ROUTES["pipelined"], "FUSED_TP_RING_GRADIENTS": how}
    (sizes,) = {tuple(run_ranks(2, sent, one, env=env))}
    keys = 2 * 8 * 32  # elements of K and V of 32 tokens; they travel forward and backward
    assert sizes == (keys * (2 + 2 + (4 if how == "wide" else 2)),) * 2
    results = run_ranks(2, on_ranks, [one], env=env)
    check(one, whole(one, [rank[0] for rank in results]))


def test_what_other_documents_hide_does_not_travel() -> None:
    one = case(64, causal=True, cu_seqlens=[0, 16, 32, 48, 64], layout="contiguous")
    assert run_ranks(4, sent, one, env=ROUTES["pipelined"]) == [0, 0, 0, 0]


def test_bad_arguments() -> None:
    q = torch.zeros(1, 4, 2, 8)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"window": (1, -2)}, "each side must be at least 0, or -1"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be finite and positive"),
        ({"dropout_p": 1.0}, r"dropout_p is 1.0; it must be in \[0, 1\)"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\); it must be \[2\]"),
        ({"alibi_slopes": torch.zeros(1)}, r"alibi_slopes has shape \(1,\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "end with the 4 tokens"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "never go back"),
        ({"layout": "balanced"}, "needs their cu_seqlens"),
        ({"layout": "spiral"}, "it must be one of"),
        ({"cu_seqlens_kv": torch.tensor([0, 4])}, "given without cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 2, 4]), "cu_seqlens_kv": torch.tensor([0, 4])}, "2 documents and"),
        ({"seq_len_kv": 5}, "seq_len_kv=5 in layout 'zigzag' gives rank 0 of 1 5 tokens, but k holds 4"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            ring_attention(q, q, q, group=None, **arguments)
    for arguments in ({"window": 3}, {"softcap": "1"}, {"sinks": [0.0, 0.0]}, {"cu_seqlens": torch.tensor([0.0, 4.0])}):
        with pytest.raises(TypeError):
            ring_attention(q, q, q, group=None, **arguments)
    with pytest.raises(ValueError, match="unless seq_len_kv says that keys are of another sequence"):
        ring_attention(q, q[:, :3], q[:, :3], group=None)
