"""Kernels of a step of attention against dense fp64: masks, scores, dtypes, strides, several steps; their choice.

Native kernels run in every instruction set of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_tp.attention.kernels import select, triton
from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums, KernelRequest
from fused_tp.attention.kernels.native import NATIVE_KERNEL, NativeCpu
from fused_tp.attention.kernels.reference import REFERENCE_KERNEL, ReferenceKernel
from fused_tp.attention.kernels.select import choose_kernel, select_kernel
from fused_tp.attention.kernels.torch_flash import TORCH_CPU_KERNEL
from fused_tp.attention.layout import TokenRanges
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import AttentionMask, Dropout, ScoreParameters
from fused_tp.core import dispatch
from fused_tp.core.availability import AVAILABLE, unavailable
from fused_tp.ops.explain import explain_hypothetical
from tests.attention_reference import Gradients, Inputs, backward, forward, one_step, whole_reference
from tests.attention_reference import kernel_inputs as inputs
from tests.native_build import REPOSITORY, build_program, native_build, output_of, require_sanitizer
from tests.reference import assert_within_dtype_error
from tests.tiers import quick

core: Any = pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")

ISAS = ("plain", "avx2", "avx512", "avx512_bf16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = ScoreParameters(0.3)
KERNEL = pytest.mark.parametrize(
    "kernel", [NATIVE_KERNEL, TORCH_CPU_KERNEL, REFERENCE_KERNEL], ids=lambda kernel: kernel.name
)
DOCUMENTS = (0, 1, 1, 90, 150, 151, 210)
MASKS = {
    "full": AttentionMask(37, 37),
    "causal": AttentionMask(210, 210, causal=True),
    "window": AttentionMask(210, 210, window=(40, 7)),
    "causal window": AttentionMask(300, 300, causal=True, window=(70, 0)),
    "documents": AttentionMask(210, 210, True, (-1, -1), DOCUMENTS, DOCUMENTS),
    "cross": AttentionMask(50, 150, causal=True),
    "more queries": AttentionMask(150, 50, causal=True),
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    if core.attention_isa(1, request.param) != request.param:  # 1: bfloat16
        pytest.skip(f"this CPU, or the compiler of the native core, has no {request.param}")
    return str(request.param)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(
    kernel: AttentionKernel, mask: AttentionMask, scores: ScoreParameters, x: Inputs, keys: Sequence[TokenRanges] = ()
) -> None:
    """Compare forward and backward with fp64, in a step for each of `keys`, or in one step."""
    dtype = x.q.dtype
    out, lse, grads = whole_reference(mask, scores, x)
    got, got_lse = forward(kernel, mask, scores, x, keys=keys).finalize(dtype)
    # Rounded: probabilities, then the result. The error of a score, a sum over the head dim, is a relative one of exp.
    terms = mask.seq_len_kv + 16 * x.q.shape[-1]
    assert_within_dtype_error(got, out, dtype, reduced_over=terms, roundings=3, name="out")
    assert_within_dtype_error(got_lse, lse, got_lse.dtype, reduced_over=terms, roundings=3, name="lse")
    sums = torch.einsum("bshd,bshd->bhs", x.grad_out.double(), out)
    made = backward(kernel, mask, scores, x, out, lse, sums, keys=keys)
    # With few visible keys the two terms of dscore nearly cancel: their difference keeps the error of the terms.
    terms_size = abs(scores.scale) * (x.v.shape[-1] ** 0.5) * 8
    eps, sum_eps = torch.finfo(dtype).eps, torch.finfo(made.dq.dtype).eps
    for name in ("dq", "dk", "dv"):
        actual, wanted = getattr(made, name).double(), getattr(grads, name)
        rms = wanted.pow(2).mean().sqrt()
        bound = 4 * eps * (wanted.abs() + rms) + 8 * sum_eps * (terms**0.5 * rms + 4 * terms_size)
        excess = ((actual - wanted).abs() / bound).max()
        assert excess < 1, f"{name} is off by {excess} times what {dtype} allows"
    if scores.alibi_slopes is not None:
        # Terms of alternating sign, as large as the longest distance.
        size = float(grads.d_slopes.abs().max()) + float(mask.seq_len_kv)
        assert float((made.d_slopes.detach().double() - grads.d_slopes).abs().max()) < 64 * sum_eps * size


def in_parts(length: int) -> list[TokenRanges]:
    """Keys in three unaligned parts: those of a zigzag rank, a single key, and the others."""
    first, last = length // 7, length - length // 5
    parts = ((range(first), range(last, length)), (range(first, first + 1),), (range(first + 1, last),))
    return [TokenRanges(tuple(filter(len, ranges))) for ranges in parts]


@KERNEL
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.bfloat16, torch.float64), ids=str)
def test_masks_in_one_step_and_in_several(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    for name, mask in MASKS.items():
        sizes = {"heads": 4} if "window" not in name else {"heads": 3, "kv_heads": 1, "dim": 5, "v_dim": 12}
        x = inputs(mask, dtype, batch=2, **sizes)
        check(kernel, mask, PLAIN, x)
        if kernel is not TORCH_CPU_KERNEL or dtype == torch.float64:  # it rounds the result of each step
            check(kernel, mask, PLAIN, x, in_parts(mask.seq_len_kv))


def test_blocks_take_queries_and_keys_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_tp.attention.kernels.reference._MAX_BLOCK_SCORES", 1)  # 16 rows
    monkeypatch.setattr("fused_tp.attention.kernels.reference._MAX_BLOCK_KEYS", 24)
    mask, slopes = MASKS["documents"], torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    scores = ScoreParameters(0.3, 2.0, slopes, Dropout(0.3, 12345678901234567))
    check(ReferenceKernel(), mask, scores, inputs(mask, torch.float64, batch=2, heads=4, dim=8))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    st.booleans(),
    st.tuples(st.integers(-1, 50), st.integers(-1, 50)),
    st.sampled_from([TORCH_CPU_KERNEL, ReferenceKernel()]),
)
def test_any_mask_in_small_tiles_and_blocks(
    lengths: list[int], causal: bool, window: tuple[int, int], kernel: AttentionKernel
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for place in ("torch_flash._MIN_TILE_ROWS", "reference._MAX_BLOCK_KEYS"):
            patch.setattr(f"fused_tp.attention.kernels.{place}", 8)
        patch.setattr("fused_tp.attention.kernels.torch_flash._MAX_BAND_ROWS", 32)
        patch.setattr("fused_tp.attention.kernels.reference._MAX_BLOCK_SCORES", 1)  # 16 rows
        bounds = (0, *itertools.accumulate(lengths))
        mask = AttentionMask(bounds[-1], bounds[-1], causal, window, bounds, bounds)
        check(kernel, mask, PLAIN, inputs(mask, torch.float64, batch=2, kv_heads=1, dim=4))


def test_choice_of_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    native = select_kernel(q, q, ScoreParameters(1.0, softcap=2.0))
    assert (
        native.name == "native-cpu"
        and select_kernel(q, q, PLAIN, has_grad_lse=True, allows_tile_rounding=False) is native
    )
    assert select_kernel(q.to("meta"), q.to("meta"), PLAIN) is REFERENCE_KERNEL

    cuda = partial(KernelRequest, torch.device("cuda"), torch.bfloat16, 128, 128)
    monkeypatch.setattr(triton, "triton_availability", lambda query: AVAILABLE)
    select._choose_kernel.cache_clear()
    for wanted, name in (
        (cuda(), "torch-cuda"),  # one step: nothing is rounded twice
        (cuda(allows_tile_rounding=False), "triton"),
        (cuda(has_plain_scores=False), "triton"),
        (cuda(has_grad_lse=True), "triton"),
        (replace(cuda(allows_tile_rounding=False), dtype=torch.float32), "torch-blocks"),
    ):
        assert choose_kernel(wanted)[0].name == name
    monkeypatch.setattr(triton, "triton_availability", lambda query: unavailable("it is not installed"))
    select._choose_kernel.cache_clear()
    provider, reason = choose_kernel(cuda(allows_tile_rounding=False))
    assert provider.name == "torch-cuda" and "; no triton: it is not installed" in reason
    assert choose_kernel(cuda(has_plain_scores=False))[0] is REFERENCE_KERNEL
    select._choose_kernel.cache_clear()


def test_torch_serves_single_plain_steps_where_the_cpu_has_matrix_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "has_matrix_tiles", lambda: True)
    select._choose_kernel.cache_clear()
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    assert select_kernel(q, q, PLAIN) is TORCH_CPU_KERNEL
    assert select_kernel(q, q, PLAIN, allows_tile_rounding=False).name == "native-cpu"
    assert select_kernel(q, q, ScoreParameters(1.0, softcap=2.0)).name == "native-cpu"
    select._choose_kernel.cache_clear()


def test_the_dispatch_table_says_which_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[dict[str, Any]] = [
        {"kernel": "native-cpu", "dtypes": ["float32"], "backward": True, "max_head_dim": 90},
        {"kernel": "torch-cpu", "dtypes": ["float32", "bfloat16"], "backward": True},
    ]
    table = tmp_path / "dispatch.json"
    table.write_text(json.dumps({"arch": dispatch.load_table(), "attention": rules}))
    monkeypatch.setenv("FUSED_TP_TABLE", str(table))
    cpu = partial(KernelRequest, torch.device("cpu"))
    for wanted, name in (
        (cpu(torch.float32, 64, 64), "native-cpu"),
        (cpu(torch.float32, 64, 64, is_backward=True), "native-cpu"),
        (cpu(torch.float32, 64, 128, is_backward=True), "torch-cpu"),
        (cpu(torch.float32, 128, 128, is_backward=True, has_grad_lse=True), "native-cpu"),
        (cpu(torch.bfloat16, 8, 8, is_backward=True), "torch-cpu"),
        (
            cpu(torch.bfloat16, 8, 8, is_backward=True, allows_tile_rounding=False),
            "native-cpu",
        ),  # it rounds once over all steps
        (cpu(torch.float64, 8, 8, is_backward=True), "native-cpu"),
    ):
        assert choose_kernel(wanted)[0].name == name, wanted
    shapes, place = [(1, 8, 2, 128)] * 3, {"world_size": 2, "transport": "shm", "arch": "cpu"}
    provider = explain_hypothetical("ring_attention", *shapes, dtype=torch.float32, **place).provider
    assert provider is not None and provider.name == "native-cpu"
    assert "; its backward uses torch-cpu: " in provider.reason and "by the dispatch table" in provider.reason
    table.with_name("bad.json").write_text(json.dumps({"arch": {}, "attention": [{"kernel": "torch-cpu"}]}))
    with pytest.raises(
        ValueError, match=r"bad.json is not .* \(rule 0 of attention, {'kernel': 'torch-cpu'}: required are kernel, "
    ):
        dispatch.load_table(str(table.with_name("bad.json")))


def test_a_provider_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 1, 8)
    monkeypatch.setenv("FUSED_TP_ATTENTION", "torch-cpu")
    assert select_kernel(q, q, PLAIN) is TORCH_CPU_KERNEL
    with pytest.raises(ValueError, match="ATTENTION=torch-cpu does not support this call: torch's kernels do not"):
        select_kernel(q, q, ScoreParameters(1.0, softcap=2.0))
    monkeypatch.setenv("FUSED_TP_ATTENTION", "magic")
    with pytest.raises(ValueError, match="FUSED_TP_ATTENTION must be one of native-cpu, triton, torch-cuda"):
        select_kernel(q, q, PLAIN)


@pytest.mark.gpu
def test_cuda_flash() -> None:
    for mask in MASKS.values():
        x = inputs(mask, torch.bfloat16, batch=2, heads=4, dim=20, v_dim=12)
        on_gpu = Inputs(*(t.cuda() for t in x))
        kernel = select_kernel(on_gpu.q, on_gpu.v, PLAIN)
        out, _ = forward(kernel, mask, PLAIN, on_gpu).finalize(torch.bfloat16)
        torch.testing.assert_close(out.cpu().double(), whole_reference(mask, PLAIN, x)[0], atol=0.02, rtol=0.02)


# -- native kernels ---------------------------------------------------------------------------------------------------


def random_mask(draw: random.Random) -> AttentionMask:
    lengths = [draw.choice([1, 3, 47, 48, 49, 63, 64, 65, 130, 200]) for _ in range(2)]
    causal = draw.random() < 0.5
    window = draw.choice([(-1, -1), (0, 0), (5, 3), (70, -1), (-1, 20), (100, 100)])
    if draw.random() < 0.4:
        cuts = sorted(draw.choices(range(lengths[0] + 1), k=draw.randint(1, 6)))
        keys = sorted(draw.choices(range(lengths[1] + 1), k=len(cuts)))
        documents, keys_of = (0, *cuts, lengths[0]), (0, *keys, lengths[1])
        return AttentionMask(lengths[0], lengths[1], causal, window, documents, keys_of)
    return AttentionMask(lengths[0], lengths[1], causal, window)


def random_scores(draw: random.Random, heads: int, dim: int) -> ScoreParameters:
    return ScoreParameters(
        dim**-0.5 * draw.choice([1.0, 1.0, -0.7]),
        softcap=draw.choice([0.0, 0.0, 2.0, 50.0]),
        alibi_slopes=torch.rand(heads, generator=torch.Generator().manual_seed(3)) / 8 if draw.random() < 0.3 else None,
        dropout=Dropout(draw.choice([0.1, 0.5]), draw.getrandbits(63), draw.randint(0, 5))
        if draw.random() < 0.3
        else None,
    )


def spread(t: Tensor) -> Tensor:
    """The same values in other strides: heads first, rows far apart, an odd offset."""
    room = torch.full((t.shape[0], t.shape[2], 2 * t.shape[1], t.shape[3] + 3), torch.nan, dtype=t.dtype)
    return room[:, :, ::2, 3:].transpose(1, 2).copy_(t)


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(isa: str, seed: int) -> None:
    draw = random.Random(seed)
    mask = random_mask(draw)
    kv_heads, group, dim = draw.randint(1, 2), draw.randint(1, 3), draw.choice([1, 7, 16, 33, 64, 80, 96, 128])
    v_dim = draw.choice([dim, dim, 5, 48])
    heads = kv_heads * group
    how = {"batch": draw.randint(1, 2), "heads": heads, "kv_heads": kv_heads, "dim": dim, "v_dim": v_dim, "seed": seed}
    x, scores = inputs(mask, DTYPES[seed % 4], **how), random_scores(draw, heads, dim)
    if draw.random() < 0.5:
        x = Inputs(*map(spread, x))
    check(NativeCpu(isa), mask, scores, x, in_parts(mask.seq_len_kv) if draw.random() < 0.5 else [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads_and_many_blocks(dtype: torch.dtype) -> None:
    mask = AttentionMask(900, 900, causal=True)  # more blocks of queries than a pass of the backward takes
    check(NativeCpu(), mask, ScoreParameters(0.1), inputs(mask, dtype, heads=1, kv_heads=1))
    mask = AttentionMask(70, 130, causal=True)
    check(NativeCpu(), mask, ScoreParameters(1 / 17), inputs(mask, dtype, dim=271, v_dim=256, heads=2, kv_heads=1))


def test_large_scores_neither_overflow_nor_lose_digits(isa: str) -> None:
    mask = AttentionMask(100, 300)
    x = inputs(mask, torch.float32, dim=32)
    x.q.mul_(30)
    x.k.mul_(torch.linspace(0.1, 10, 300)[:, None, None])  # the highest score grows from block to block
    out, lse, _ = whole_reference(mask, ScoreParameters(0.2), x)
    got, got_lse = forward(NativeCpu(isa), mask, ScoreParameters(0.2), x).finalize(torch.float32)
    assert lse.max() > 500
    # Scores reach some thousands; their rounding errors are errors of exponents.
    torch.testing.assert_close(got.double(), out, rtol=0, atol=4e-3)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-6, atol=0)


HALVES, GAPS = (0, 850, 1700), ((0, 20, 40, 40, 900, 1700), (0, 5, 300, 700, 900, 1700))
LONG = {
    "causal": AttentionMask(850, 850, causal=True),
    "documents": AttentionMask(1700, 1700, True, (-1, -1), HALVES, HALVES),
    "window": AttentionMask(1700, 1700, window=(70, 9)),
    "gaps of keys inside of a block of queries": AttentionMask(1700, 1700, True, (-1, -1), *GAPS),
}


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "kv_heads"),
    [
        *(("causal", *one) for one in ((DTYPES[0], 2, 2), (DTYPES[1], 4, 1), (DTYPES[0], 3, 3))),
        *((name, torch.float64, 1, 1) for name in LONG),
    ],
)
def test_long_sequences_on_any_number_of_threads(name: str, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """All numbers of threads give the same bits; chunks of queries visit all visible keys; gradients accumulate."""
    mask, kernel, scores = LONG[name], NativeCpu(), ScoreParameters(0.25, alibi_slopes=torch.linspace(0.01, 0.1, heads))
    x = inputs(mask, dtype, batch=2, heads=heads, kv_heads=kv_heads)
    found: list[list[Tensor]] = []
    for count in (1, 2, 3, 2):
        with threads(count):
            state = forward(kernel, mask, scores, x)
            sums = [t.clone() for t in (state.acc, state.row_max, state.row_sum)]
            found.append([*backward(kernel, mask, scores, x, *state.finalize(dtype), start=3.0), *sums])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    if dtype == torch.float64:
        for made, wanted in zip(found[0], whole_reference(mask, scores, x)[2], strict=False):
            torch.testing.assert_close(made - 3.0, wanted, rtol=1e-9, atol=1e-9)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_nothing_leaks(isa: str, name: str, dtype: torch.dtype, value: float) -> None:
    """A token changes no bit for tokens that do not see it, and its NaN reaches all that do."""
    mask, provider, scores = MASKS[name], NativeCpu(isa), ScoreParameters(0.25)
    _, starts, stops = map(torch.from_numpy, mask.visible_intervals(np.arange(mask.seq_len)))

    def run(x: Inputs) -> tuple[SoftmaxState, Gradients]:
        state = forward(provider, mask, scores, x)
        kept = SoftmaxState(state.acc.clone(), state.row_max, state.row_sum)
        return kept, backward(provider, mask, scores, x, *state.finalize(torch.float32))

    before, grads_before = run(inputs(mask, dtype))
    for token in (0, 70, 149, 209):
        blind = (starts > token) | (stops <= token)  # queries that do not see this key
        for changed in ("k", "v"):
            x = inputs(mask, dtype)
            getattr(x, changed)[:, token] = value
            after, grads = run(x)
            for a, b in ((before.acc, after.acc), (grads_before.dq, grads.dq)):
                assert torch.equal(bits(a[:, blind]), bits(b[:, blind]))
            for a, b in ((before.row_max, after.row_max), (before.row_sum, after.row_sum)):
                assert torch.equal(bits(a[..., blind]), bits(b[..., blind]))
            if value != value:
                assert after.acc[:, ~blind].isnan().all() and grads.dq[:, ~blind].isnan().all()
        unseen = torch.ones(mask.seq_len_kv, dtype=torch.bool)
        unseen[int(starts[token]) : int(stops[token])] = False  # keys that this query does not see
        for changed in ("q", "grad_out"):
            x = inputs(mask, dtype)
            getattr(x, changed)[:, token] = value
            _, grads = run(x)
            for a, b in ((grads_before.dk, grads.dk), (grads_before.dv, grads.dv)):
                assert torch.equal(bits(a[:, unseen]), bits(b[:, unseen]))
            if value != value:
                assert grads.dv[:, ~unseen].isnan().all() and grads.dk[:, ~unseen].isnan().all()


def test_rows_that_see_nothing(isa: str) -> None:
    """Rows without visible keys keep their state, to the last bit, and get no gradients."""
    mask = AttentionMask(60, 30, causal=True, cu_seqlens=(0, 20, 60), cu_seqlens_kv=(0, 12, 30))
    provider, scores, x = NativeCpu(isa), ScoreParameters(0.3), inputs(mask, torch.float32)
    step = one_step(mask)
    rows = slice(step.q_start, step.q_stop)
    state = SoftmaxState(
        torch.randn(1, 60, 2, 16), 10 * torch.randn(1, 2, 60), torch.rand(1, 2, 60)
    )  # as earlier steps may leave it
    before = SoftmaxState(state.acc.clone(), state.row_max.clone(), state.row_sum.clone())
    provider.forward(step, scores, x.q[:, rows], x.k, x.v, state.rows(step.q_start, step.q_stop))
    _, starts, stops = map(torch.from_numpy, mask.visible_intervals(np.arange(mask.seq_len)))
    blind = starts >= stops
    assert blind.sum() > 20
    assert torch.equal(state.acc[:, blind], before.acc[:, blind])
    assert torch.equal(state.row_max[..., blind], before.row_max[..., blind])
    assert torch.equal(state.row_sum[..., blind], before.row_sum[..., blind])
    # A row with lse -inf contributes nothing, although the mask shows it keys.
    out, lse, _ = whole_reference(mask, scores, x)
    lse[..., 15] = -torch.inf
    sums = torch.full_like(lse, torch.nan).masked_fill(~blind, 0.0)
    made = backward(provider, mask, scores, x, out, lse, sums)
    assert not made.dk.isnan().any() and not made.dv.isnan().any()
    assert not made.dq[:, 15].any() and not made.dq[:, blind].any()


def test_scores_of_minus_infinity_count_nothing(isa: str) -> None:
    mask = AttentionMask(50, 70)
    x = inputs(mask, torch.float32)
    x.q[..., 0], x.k[..., 0] = 1.0, 0.0
    x.k[:, 10:, :, 0] = -torch.inf
    state = forward(NativeCpu(isa), mask, ScoreParameters(0.3), x)
    short = AttentionMask(50, 10)
    y = Inputs(x.q, x.k[:, :10], x.v[:, :10], x.grad_out)
    wanted = forward(NativeCpu(isa), short, ScoreParameters(0.3), y)
    for a, b in zip(state.finalize(torch.float32), wanted.finalize(torch.float32), strict=True):
        torch.testing.assert_close(a, b)
    x.k[..., 0] = -torch.inf
    out, lse = forward(NativeCpu(isa), mask, ScoreParameters(0.3), x).finalize(torch.float32)
    assert not out.any() and (lse == -torch.inf).all()
    # 50 queries do not fill a block: its padding must not be multiplied by infinity.
    mask = AttentionMask(50, 64)
    x = inputs(mask, torch.float32)
    x.q[..., 0], x.k[..., 0] = -1.0, 0.0
    x.k[:, 3, :, 0] = torch.inf
    out, lse = forward(NativeCpu(isa), mask, ScoreParameters(0.3), x).finalize(torch.float32)
    made = backward(NativeCpu(isa), mask, ScoreParameters(0.3), x, out, lse)
    assert made.dk.isfinite().all() and made.dv.isfinite().all()
    assert not made.dk[:, 3].any() and not made.dv[:, 3].any()


def test_threads_call_at_the_same_time_and_children_of_fork_too() -> None:
    mask = AttentionMask(200, 200, causal=True)
    x = inputs(mask, torch.float32)

    def run() -> Tensor:
        return forward(NativeCpu(), mask, ScoreParameters(0.2), x).acc

    with threads(2):
        wanted = run()
        results: list[Tensor] = []
        callers = [threading.Thread(target=lambda: results.extend(run() for _ in range(5))) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert len(results) == 15 and all(torch.equal(result, wanted) for result in results)
        step, state = one_step(mask), SoftmaxState.empty(x.q, 16)
        step.index_tensors_on(x.q.device)
        child = os.fork()
        if child == 0:  # without torch's own threads, so torch must not compute here
            signal.alarm(20)
            NativeCpu().forward(step, ScoreParameters(0.2), x.q, x.k, x.v, state)
            os._exit(0 if state.acc.numpy().tobytes() == wanted.numpy().tobytes() else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_vectors_of_a_step_outlive_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may both use a step first; the step keeps the vectors of one of them only."""

    class Forgetful(dict[str, Tensor]):
        def __missing__(self, name: str) -> Tensor:
            vector = torch.from_numpy(getattr(step, name).astype(np.int32))
            made.append(weakref.ref(vector))
            return vector

    class Replaced(dict[bool, Any]):
        """A dict that another thread has overwritten."""

        def __setitem__(self, placed: bool, vectors: Any) -> None:
            pass

    def native(function: Any, *args: Any) -> None:
        assert len(made) == 5 and all(vector() is not None for vector in made)
        function(*args)

    mask = AttentionMask(20, 20, causal=True)
    x, step = inputs(mask, torch.float32), one_step(mask)
    made: list[weakref.ref[Tensor]] = []
    step._device_vectors[x.q.device] = Forgetful()
    vars(step)["native_vectors"] = Replaced()
    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(core, name, functools.partial(native, getattr(core, name)))
    state, scores = SoftmaxState.empty(x.q, 16), ScoreParameters(0.2, alibi_slopes=torch.ones(x.q.shape[2]))
    NativeCpu().forward(step, scores, x.q, x.k, x.v, state)
    made.clear()
    lse = state.finalize(torch.float32)[1]
    sums = GradientSums(*(torch.zeros_like(t) for t in x[:3]), torch.zeros(x.q.shape[2]))
    NativeCpu().backward(
        step, scores, BackwardTensors(x.q, x.k, x.v, x.q, lse, x.grad_out, torch.zeros_like(lse)), sums
    )


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_products_do_nothing_but_load_and_multiply() -> None:
    """Intel's cores add and shuffle 512 bits on the two ports that multiply: each such instruction costs a product."""
    text = subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", core.__file__], text=True)
    tiles = [body for body in text.split("\n\n") if re.match(r"[0-9a-f]+ <[^>]*4tile[^>]*Avx(2|512)Lanes", body)]
    if not tiles:
        pytest.skip("the native core has no kernels for x86, or no symbols")
    for body in tiles:
        assert "vfmadd" in body
        assert re.findall(r"vadd.*|vbroadcastss %.*|.*[yz]mm\d+,[-\w]*\(%rsp\)", body) == [], body.partition("\n")[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "sanitizer", ["thread", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("address", "undefined"))]
)
def test_under_sanitizers(sanitizer: str) -> None:
    require_sanitizer(sanitizer)
    sources = [
        source for part in ("attention", "matmul", "threads") for source in (REPOSITORY / "csrc" / part).glob("*.cpp")
    ]
    flags = ["-Icsrc", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    if sanitizer == "address" and core.attention_isa(0).startswith("avx512"):
        flags += ["-DFUSED_TP_X86=1", "-Wno-error", *native_build().X86_FLAGS["_avx512"]]
    else:  # the other sanitizers find the same in all instruction sets, and each takes long to compile
        sources = [source for source in sources if "_avx" not in source.stem]
        flags += ["-DFUSED_TP_X86=0"]
    program = build_program("attention_stress", [*sources, REPOSITORY / "tests/native/attention/stress.cpp"], flags)
    output_of(program, timeout=300)
