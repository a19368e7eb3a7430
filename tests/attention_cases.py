"""Attention over a sequence sharded over ranks, with every kind of mask and score: cases and their reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from fused_tp.attention.layout import tokens_by_rank
from fused_tp.attention.spec import Dropout
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.ops.ring_attention import ring_attention
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import seeded
from tests.workers import run_ranks

ROUTES = {
    "one_sided": {"FUSED_TP_SHM": "1", "FUSED_TP_SCHEDULE": "one_sided"},
    "pipelined": {"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": "pipelined"},
    "plain": {"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": "plain"},
}
MASK = ("causal", "window", "cu_seqlens", "cu_seqlens_kv")
NAMES = ("out", "lse", "dq", "dk", "dv", "d_slopes", "d_sinks")

Case = dict[str, Any]
Op = Callable[..., Any]


def case(seq_len: int, **more: Any) -> Case:
    """Keywords of ring_attention (documents as lists), with the shapes and dtype of the tensors."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "dtype": torch.float32, "batch": 1}
    return {"seq_len": seq_len, "layout": "zigzag", **shape, **more}


def inputs(one: Case) -> list[Tensor]:
    """q, k, v, grad_out, grad_lse of the whole sequence."""
    b, h, hk, d, dv, dtype = (one[n] for n in ("batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype"))
    s, sk = one["seq_len"], one.get("seq_len_kv") or one["seq_len"]
    shapes = [(b, s, h, d), (b, sk, hk, d), (b, sk, hk, dv), (b, s, h, dv)]
    tensors = [seeded(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [*tensors, seeded(b, h, s, dtype=torch.float64 if dtype == torch.float64 else torch.float32, seed=9)]


def per_head(one: Case) -> dict[str, Tensor]:
    found = {}
    if one.get("alibi"):
        found["alibi_slopes"] = 0.3 / torch.arange(1, one["heads"] + 1)
    if one.get("sinks"):
        found["sinks"] = seeded(one["heads"], seed=7)
    return found


def keywords(one: Case) -> dict[str, Any]:
    """Keywords of the case that the op takes; lists of document bounds become tensors."""
    names = ("causal", "window", "softcap", "dropout_p", "layout", "seq_len", "seq_len_kv", "scale")
    given = {name: one[name] for name in names if name in one}
    for name in ("cu_seqlens", "cu_seqlens_kv"):
        if one.get(name) is not None:
            given[name] = torch.tensor(one[name], dtype=torch.int32)
    return given


def cut(t: Tensor, dim: int, indices: Tensor) -> Tensor:
    return t.index_select(dim, indices).contiguous()


def results_of(group: dist.ProcessGroup, cases: list[Case], op: Op = ring_attention) -> list[list[Tensor | None]]:
    """Token positions (of q, of k) and shards of NAMES on this rank, per case; `op` takes ring_attention's keywords."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    results: list[list[Tensor | None]] = []
    for one in cases:
        bounds, bounds_kv = tuple(one.get("cu_seqlens") or ()), tuple(one.get("cu_seqlens_kv") or ())
        of_q = tokens_by_rank(one["seq_len"], size, one["layout"], bounds)[rank]
        of_k = tokens_by_rank(one.get("seq_len_kv") or one["seq_len"], size, one["layout"], bounds_kv or bounds)[rank]
        queries, keys = (torch.from_numpy(tokens.indices) for tokens in (of_q, of_k))
        q, k, v, grad_out, grad_lse = inputs(one)
        q, k, v = (cut(t, 1, i) for t, i in ((q, queries), (k, keys), (v, keys)))
        if one.get("strided"):  # non-contiguous in every dim; in q the last dim, too, has a stride above 1
            q, k, v = q.mT.contiguous().mT, *(t.transpose(0, 2).contiguous().transpose(0, 2) for t in (k, v))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        heads: Any = {name: t.clone().requires_grad_() for name, t in per_head(one).items()}
        torch.manual_seed(5)
        out, lse = op(q, k, v, group=group, return_lse=True, **heads, **keywords(one))
        outputs, grads = [out], [cut(grad_out, 1, queries)]
        if one.get("grad_lse"):
            outputs.append(lse)
            grads.append(cut(grad_lse, 2, queries))
        found = torch.autograd.grad(outputs, (q, k, v, *heads.values()), grads)
        by_head: dict[str, Tensor] = dict(zip(heads, found[3:], strict=True))
        parts = [out.detach(), lse.detach(), *found[:3], by_head.get("alibi_slopes"), by_head.get("sinks")]
        results.append([queries, keys, *parts])
    return results


def sent(group: dist.ProcessGroup, cases: list[Case], op: Op = ring_attention) -> list[list[int]]:
    """Bytes of each message or all-to-all that this rank sends, forward and backward, per case."""
    found: list[list[int]] = []
    shift, all_to_all = TorchDist.shift, TorchDist.all_to_all

    def shifted(self: TorchDist, name: str, x: Tensor, *more: Any) -> Any:
        found[-1].append(x.nbytes)
        return shift(self, name, x, *more)

    def exchanged(self: TorchDist, name: str, x: Tensor, send_sizes: Any, recv_sizes: Any) -> Any:
        found[-1].append(sum(send_sizes))
        return all_to_all(self, name, x, send_sizes, recv_sizes)

    with patch.object(TorchDist, "shift", shifted), patch.object(TorchDist, "all_to_all", exchanged):
        for one in cases:
            found.append([])
            results_of(group, [one], op)
    return found


def whole(one: Case, ranks: list[list[Tensor | None]]) -> list[Tensor | None]:
    """NAMES of the whole sequence, assembled from the ranks' shards; gradients of slopes and sinks are summed."""
    seq_len, seq_len_kv = one["seq_len"], one.get("seq_len_kv") or one["seq_len"]
    found: list[Tensor | None] = []
    for i, name in enumerate(NAMES):
        parts = [rank[2 + i] for rank in ranks]
        if parts[0] is None:
            found.append(None)
            continue
        tensors = [part for part in parts if part is not None]
        if name in ("d_slopes", "d_sinks"):
            found.append(torch.stack(tensors).sum(0))
            continue
        dim, where = (2 if name == "lse" else 1), (1 if name in ("dk", "dv") else 0)
        shape = list(tensors[0].shape)
        shape[dim] = seq_len_kv if where else seq_len
        total = tensors[0].new_full(shape, torch.nan)
        for rank, part in zip(ranks, tensors, strict=True):
            indices = rank[where]
            assert indices is not None
            total.index_copy_(dim, indices, part)
        found.append(total)
    return found


def reference(one: Case) -> list[Tensor | None]:
    q, k, v, grad_out, grad_lse = (t.double() for t in inputs(one))
    heads: Any = {name: t.double().requires_grad_() for name, t in per_head(one).items()}
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    seen, distance = dense_mask(
        one["seq_len"], k.shape[1], **{name: one[name] for name in MASK if one.get(name) is not None}
    )
    dropout = None
    if one.get("dropout_p"):
        torch.manual_seed(5)
        dropout = Dropout(one["dropout_p"], int(torch.randint(2**63 - 1, (1,)).item()))
    scores = {name: one[name] for name in ("softcap", "scale") if name in one}
    out, lse = dense_attention(q, k, v, seen, distance, dropout=dropout, **scores, **heads)
    total = (out * grad_out).sum()
    if one.get("grad_lse"):
        total = total + torch.where(lse == -torch.inf, 0.0, lse * grad_lse).sum()
    found = torch.autograd.grad(total, (q, k, v, *heads.values()))
    by_head = dict(zip(heads, found[3:], strict=True))
    return [out.detach(), lse.detach(), *found[:3], by_head.get("alibi_slopes"), by_head.get("sinks")]


def check(one: Case, got: list[Tensor | None]) -> None:
    dtype = one["dtype"]
    for name, actual, wanted in zip(NAMES, got, reference(one), strict=True):
        if actual is None or wanted is None:
            assert actual is None and wanted is None
        elif name == "lse":
            torch.testing.assert_close(actual.double(), wanted, atol=2e-5, rtol=2e-5)
        elif name in ("d_slopes", "d_sinks"):
            torch.testing.assert_close(actual.double(), wanted, atol=3e-4 * one["seq_len"] ** 0.5, rtol=1e-3)
        else:
            # Much larger terms of both signs cancel in dq and dk, so the error is relative to the largest element.
            assert bool(torch.isfinite(actual).all()), f"{name} of {one}"
            scale = max(1.0, float(wanted.abs().max()))
            eps = torch.finfo(dtype).eps
            error = float((actual.double() - wanted).abs().max())
            assert error <= (12 * eps + 2e-6 * (dtype != torch.float64)) * scale, f"{name} of {one}: {error}"


def check_all(cases: list[Case], ranks: list[list[list[Tensor | None]]]) -> None:
    """Compare the results of `results_of` on all ranks with the reference."""
    for index, one in enumerate(cases):
        check(one, whole(one, [rank[index] for rank in ranks]))


def assert_same_bits(ranks: list[list[list[Tensor | None]]], others: list[list[list[Tensor | None]]]) -> None:
    for one, other in zip(itertools.chain(*ranks), itertools.chain(*others), strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def of_route(route: str) -> dict[str, str | None]:
    return ROUTES[route]


def run(world_size: int, cases: list[Case], route: str, op: Op = ring_attention) -> None:
    check_all(cases, run_ranks(world_size, results_of, cases, op, env=ROUTES[route]))


DOCUMENTS = [0, 1, 1, 14, 15, 37]  # lengths 1, 0, 13, 1, 22
FEATURES: dict[str, Case] = {
    "window": case(37, causal=True, window=(5, 0)),
    "window on both sides": case(37, window=(3, 4)),
    "window of itself": case(19, causal=True, window=(0, 0)),
    "documents": case(37, causal=True, cu_seqlens=DOCUMENTS),
    "documents seen from both sides": case(37, cu_seqlens=DOCUMENTS, layout="contiguous"),
    "documents, balanced": case(37, causal=True, cu_seqlens=DOCUMENTS, layout="balanced", batch=2),
    "documents, zigzag in each": case(
        60, causal=True, cu_seqlens=[0, 12, 12, 48, 60], layout="zigzag_documents", batch=2
    ),
    "documents, contiguous in each": case(
        24, cu_seqlens=[0, 12, 24], window=(4, 9), alibi=True, layout="contiguous_documents"
    ),
    "documents, window, softcap": case(37, causal=True, cu_seqlens=DOCUMENTS, window=(4, 0), softcap=3.0),
    "softcap": case(23, causal=True, softcap=2.0),
    "ALiBi": case(23, causal=True, alibi=True),
    "ALiBi seen from both sides": case(23, alibi=True, kv_heads=4),
    "sinks": case(23, causal=True, sinks=True, window=(6, 0)),
    "sinks and the gradient of lse": case(23, causal=True, sinks=True, grad_lse=True),
    "the gradient of lse": case(23, causal=True, grad_lse=True, batch=2),
    "dropout": case(29, causal=True, dropout_p=0.3),
    "all scores": case(29, causal=True, softcap=4.0, alibi=True, sinks=True, dropout_p=0.2, window=(9, 0)),
    "cross": case(11, seq_len_kv=23),
    "cross, causal": case(11, seq_len_kv=23, causal=True, v_head_dim=6),
    "cross, causal, more queries": case(23, seq_len_kv=11, causal=True, sinks=True),
    "cross, window": case(23, seq_len_kv=17, window=(3, 2), alibi=True),
    "cross, documents": case(12, seq_len_kv=17, cu_seqlens=[0, 3, 3, 12], cu_seqlens_kv=[0, 5, 9, 17], causal=True),
    "cross, documents without keys": case(12, seq_len_kv=9, cu_seqlens=[0, 3, 7, 12], cu_seqlens_kv=[0, 4, 4, 9]),
    "bf16": case(61, causal=True, window=(17, 0), dtype=torch.bfloat16),
    "fp16": case(61, cu_seqlens=[0, 30, 61], dtype=torch.float16, softcap=5.0),
    "fp64": case(37, causal=True, window=(17, 0), dtype=torch.float64, alibi=True, sinks=True),
    "one token": case(1, causal=True, window=(2, 0), sinks=True),
}


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    if bounds[-1] == 0:
        bounds[-1] = 1
    side = st.integers(-1, 6)
    one = case(
        bounds[-1],
        causal=draw(st.booleans()),
        window=(draw(side), draw(side)),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.25])),
        layout=draw(st.sampled_from(["zigzag", "contiguous", "balanced"])),
        cu_seqlens=bounds,
    )
    if draw(st.booleans()):
        return one
    if one["layout"] == "balanced":
        one["layout"] = "zigzag"
    one.pop("cu_seqlens")
    if draw(st.booleans()):
        one["seq_len_kv"] = draw(st.integers(1, 30))
    return one
