"""Providers of one step: against fp64 attention, steps that add up, and that choices are what they should be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_tp.attention.kernels import select, triton
from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery, Saved, Sums
from fused_tp.attention.kernels.native import NATIVE
from fused_tp.attention.kernels.reference import REFERENCE, Reference
from fused_tp.attention.kernels.select import choose_kernel, kernel_for
from fused_tp.attention.kernels.torch_flash import TORCH_CPU
from fused_tp.attention.layout import Tokens
from fused_tp.attention.plan import Step, make_step
from fused_tp.attention.softmax import SoftmaxState, row_sums
from fused_tp.attention.spec import AttentionMask, Dropout, Scores
from fused_tp.runtime.availability import AVAILABLE, unavailable
from tests.attention_reference import dense, dense_attention
from tests.reference import seeded

SCALE = 0.3
PLAIN = Scores(SCALE)
KERNEL = pytest.mark.parametrize("kernel", [NATIVE, TORCH_CPU, REFERENCE], ids=lambda kernel: kernel.name)
MASKS = {
    "full": AttentionMask(37, 37),
    "causal": AttentionMask(37, 37, causal=True),
    "window": AttentionMask(300, 300, causal=True, window=(70, 0)),
    "window on both sides": AttentionMask(300, 300, window=(65, 80)),
    "documents": AttentionMask(260, 260, True, (-1, -1), (0, 1, 1, 90, 100, 260), (0, 1, 1, 90, 100, 260)),
    "cross": AttentionMask(50, 150, causal=True),
    "more queries": AttentionMask(150, 50, causal=True),
}


def everything(mask: AttentionMask) -> Step:
    """One rank's only step."""
    return make_step(mask, Tokens((range(mask.seq_len),)), Tokens((range(mask.seq_len_kv),)))


def made(mask: AttentionMask, dtype: torch.dtype, heads: int, kv_heads: int, width: int, v_width: int) -> list[Tensor]:
    """q, k, v, grad_out."""
    shapes = [
        (2, mask.seq_len, heads, width),
        (2, mask.seq_len_kv, kv_heads, width),
        (2, mask.seq_len_kv, kv_heads, v_width),
        (2, mask.seq_len, heads, v_width),
    ]
    return [seeded(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def attend(
    kernel: AttentionKernel,
    steps: list[tuple[Step, int]],
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
) -> list[Tensor]:
    """[out, lse, dq, dk, dv] by these steps, one after the other, each with the row its keys begin at."""
    state = SoftmaxState.empty(q, v.shape[3])
    steps = [(step, first) for step, first in steps if not step.empty]
    for step, first in steps:
        rows, keys = slice(step.q_start, step.q_stop), slice(first + step.k_start, first + step.k_stop)
        kernel.forward(step, scores, q[:, rows], k[:, keys], v[:, keys], state.rows(step.q_start, step.q_stop))
    out, lse = state.result(q.dtype)
    saved = Saved(q, k, v, out, lse, grad, row_sums(grad, out, None))
    sums = Sums(*(torch.zeros(t.shape, dtype=lse.dtype) for t in (q, k, v)), None)
    for step, first in steps:
        rows, keys = slice(step.q_start, step.q_stop), slice(first + step.k_start, first + step.k_stop)
        kernel.backward(step, scores, saved.part(rows, keys), sums.part(rows, keys))
    return [out, lse, *sums[:3]]


def run(kernel: AttentionKernel, mask: AttentionMask, scores: Scores, *tensors: Tensor) -> list[Tensor]:
    """By one step of everything."""
    return attend(kernel, [(everything(mask), 0)], scores, *tensors)


def wanted(mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **scores: Any) -> list[Tensor]:
    q, k, v = (t.detach().double().clone().requires_grad_() for t in (q, k, v))
    out, lse = dense_attention(q, k, v, *dense(mask), scale=SCALE, **scores)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def close(got: list[Tensor], reference: list[Tensor], dtype: torch.dtype) -> None:
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, reference, strict=True):
        # lse is fp32; gradients are what is left of larger terms that were rounded.
        eps = 1e-6 if name == "lse" and dtype != torch.float64 else torch.finfo(dtype).eps
        finite = torch.isfinite(other)
        assert torch.equal(torch.isfinite(one), finite), name
        limit = 16 * eps * max(1.0, float(other[finite].abs().max()) if bool(finite.any()) else 1.0)
        assert float((one.double() - other)[finite].abs().max()) <= limit, name


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masks(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    for name, mask in MASKS.items():
        heads, kv_heads, width, v_width = (4, 2, 16, 16) if name != "window" else (3, 1, 5, 12)
        tensors = made(mask, dtype, heads, kv_heads, width, v_width)
        close(run(kernel, mask, PLAIN, *tensors), wanted(mask, *tensors), dtype)


@KERNEL
def test_steps_add_up(kernel: AttentionKernel) -> None:
    """Queries of a zigzag rank, and keys in three parts."""
    mask = AttentionMask(300, 300, causal=True, window=(90, -1))
    q, k, v, grad = made(mask, torch.float64, 2, 2, 8, 8)
    reference = wanted(mask, q, k, v, grad)
    parts = [Tokens((range(40), range(260, 300))), Tokens((range(40, 41),)), Tokens((range(41, 260),))]
    order = torch.from_numpy(np.concatenate([part.indices for part in parts]))
    bounds = itertools.accumulate((part.length for part in parts), initial=0)
    steps = [(make_step(mask, Tokens((range(300),)), part), first) for part, first in zip(parts, bounds, strict=False)]
    got = attend(kernel, steps, PLAIN, q, k[:, order], v[:, order], grad)
    close(got, [*reference[:3], *(t[:, order] for t in reference[3:])], torch.float64)


@KERNEL
def test_a_fresh_state_may_hold_anything(kernel: AttentionKernel) -> None:
    """And a ring whose first step has but some of the rows does not read what it never wrote."""
    mask = AttentionMask(100, 100, causal=True)
    q, k, v, _ = made(mask, torch.float32, 2, 2, 8, 8)
    states = [SoftmaxState.empty(q, 8), SoftmaxState.uninitialised(q, 8)]
    for x in (states[1].weighted, states[1].highest, states[1].total):
        x.fill_(torch.nan)
    for state, fresh in zip(states, (False, True), strict=True):
        kernel.forward(everything(mask), PLAIN, q, k, v, state, fresh=fresh)
    for one, other in zip(*(state.result(q.dtype) for state in states), strict=True):
        assert torch.equal(one, other)


def test_blocks_take_queries_and_keys_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_tp.attention.kernels.reference._MOST_SCORES", 1)  # 16 rows
    monkeypatch.setattr("fused_tp.attention.kernels.reference._KEYS", 24)
    mask = MASKS["documents"]
    tensors = made(mask, torch.float64, 4, 2, 8, 8)
    slopes, dropout = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), Dropout(0.3, 12345678901234567)
    how: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": slopes, "dropout": dropout}
    got = run(Reference(), mask, Scores(SCALE, 2.0, slopes, dropout), *tensors)
    close(got, wanted(mask, *tensors, **how), torch.float64)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.booleans(),
    st.tuples(st.integers(-1, 50), st.integers(-1, 50)),
    st.sampled_from([TORCH_CPU, Reference()]),
)
def test_any_mask_in_small_tiles_and_blocks(
    lengths: list[int], causal: bool, window: tuple[int, int], kernel: AttentionKernel
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for place in ("torch_flash._FEWEST_ROWS", "reference._KEYS"):
            patch.setattr(f"fused_tp.attention.kernels.{place}", 8)
        patch.setattr("fused_tp.attention.kernels.torch_flash._MOST_ROWS", 32)
        patch.setattr("fused_tp.attention.kernels.reference._MOST_SCORES", 1)  # 16 rows
        bounds = (0, *itertools.accumulate(lengths))
        mask = AttentionMask(bounds[-1], bounds[-1], causal, window, bounds, bounds)
        tensors = made(mask, torch.float64, 2, 1, 4, 4)
        if not everything(mask).empty:
            close(run(kernel, mask, PLAIN, *tensors), wanted(mask, *tensors), torch.float64)


def test_choice_of_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    native = kernel_for(q, q, Scores(1.0, softcap=2.0))
    assert native.name == "native-cpu" and kernel_for(q, q, PLAIN, grad_lse=True, single=False) is native
    assert kernel_for(q.to("meta"), q.to("meta"), PLAIN) is REFERENCE

    cuda = partial(KernelQuery, torch.device("cuda"), torch.bfloat16, 128, 128)
    monkeypatch.setattr(triton, "launchable", lambda query: AVAILABLE)
    select._choose.cache_clear()
    for wanted, name in (
        (cuda(), "torch-cuda"),  # one step: nothing is rounded twice
        (cuda(single=False), "triton"),
        (cuda(plain=False), "triton"),
        (cuda(grad_lse=True), "triton"),
        (replace(cuda(single=False), dtype=torch.float32), "torch-blocks"),
    ):
        assert choose_kernel(wanted)[0].name == name
    monkeypatch.setattr(triton, "launchable", lambda query: unavailable("it is not installed"))
    select._choose.cache_clear()
    provider, reason = choose_kernel(cuda(single=False))
    assert provider.name == "torch-cuda" and "; no triton: it is not installed" in reason
    assert choose_kernel(cuda(plain=False))[0] is REFERENCE
    select._choose.cache_clear()


def test_torch_serves_single_plain_steps_where_the_cpu_has_matrix_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NATIVE, "is_faster", lambda dtype: False)
    select._choose.cache_clear()
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
    assert kernel_for(q, q, PLAIN) is TORCH_CPU
    assert kernel_for(q, q, PLAIN, single=False).name == "native-cpu"
    assert kernel_for(q, q, Scores(1.0, softcap=2.0)).name == "native-cpu"
    select._choose.cache_clear()


def test_a_provider_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 1, 8)
    monkeypatch.setenv("FUSED_TP_ATTENTION", "torch-cpu")
    assert kernel_for(q, q, PLAIN) is TORCH_CPU
    with pytest.raises(ValueError, match="ATTENTION=torch-cpu cannot serve this call: torch's kernels know no"):
        kernel_for(q, q, Scores(1.0, softcap=2.0))
    monkeypatch.setenv("FUSED_TP_ATTENTION", "magic")
    with pytest.raises(ValueError, match="FUSED_TP_ATTENTION names 'magic'; there are native-cpu, triton, torch-cuda"):
        kernel_for(q, q, PLAIN)


@pytest.mark.gpu
def test_cuda_flash_agrees_with_blocks() -> None:
    for mask in MASKS.values():
        tensors = [t.cuda() for t in made(mask, torch.bfloat16, 4, 2, 20, 12)]
        kernel = kernel_for(tensors[0], tensors[2], PLAIN)
        got, reference = ([t.cpu().double() for t in run(one, mask, PLAIN, *tensors)] for one in (kernel, REFERENCE))
        close([t.to(torch.bfloat16) for t in got], reference, torch.bfloat16)
