"""Providers of one step: against fp64 attention, steps that add up, and that choices are what they should be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_tp.attention.kernels import select, triton
from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery
from fused_tp.attention.kernels.native import NATIVE
from fused_tp.attention.kernels.reference import REFERENCE, Reference
from fused_tp.attention.kernels.select import choose_kernel, kernel_for
from fused_tp.attention.kernels.torch_flash import TORCH_CPU
from fused_tp.attention.layout import Tokens
from fused_tp.attention.spec import AttentionMask, Dropout, Scores
from fused_tp.runtime.availability import AVAILABLE, unavailable
from tests.attention_reference import Inputs, backward, forward, kernel_inputs, whole_reference

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


def check(kernel: AttentionKernel, mask: AttentionMask, scores: Scores, x: Inputs, keys: Sequence[Tokens] = ()) -> None:
    """Forward and backward, by a step for each of `keys`, against fp64."""
    dtype = x.q.dtype
    state = forward(kernel, mask, scores, x, keys=keys)
    out, lse = state.result(dtype)
    got = [out, lse, *backward(kernel, mask, scores, x, out, lse, keys=keys)[:3]]
    wanted_out, wanted_lse, grads = whole_reference(mask, scores, x)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), got, (wanted_out, wanted_lse, *grads), strict=False):
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
        sizes = {"heads": 4} if name != "window" else {"heads": 3, "kv_heads": 1, "dim": 5, "v_dim": 12}
        check(kernel, mask, PLAIN, kernel_inputs(mask, dtype, batch=2, **sizes))


@KERNEL
def test_steps_add_up(kernel: AttentionKernel) -> None:
    """Keys in three parts, one of them of a zigzag rank."""
    mask = AttentionMask(300, 300, causal=True, window=(90, -1))
    parts = [Tokens((range(40), range(260, 300))), Tokens((range(40, 41),)), Tokens((range(41, 260),))]
    check(kernel, mask, PLAIN, kernel_inputs(mask, torch.float64, batch=2, dim=8), parts)


def test_blocks_take_queries_and_keys_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_tp.attention.kernels.reference._MOST_SCORES", 1)  # 16 rows
    monkeypatch.setattr("fused_tp.attention.kernels.reference._KEYS", 24)
    mask, slopes = MASKS["documents"], torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    scores = Scores(SCALE, 2.0, slopes, Dropout(0.3, 12345678901234567))
    check(Reference(), mask, scores, kernel_inputs(mask, torch.float64, batch=2, heads=4, dim=8))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
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
        check(kernel, mask, PLAIN, kernel_inputs(mask, torch.float64, batch=2, kv_heads=1, dim=4))


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
def test_cuda_flash() -> None:
    for mask in MASKS.values():
        x = kernel_inputs(mask, torch.bfloat16, batch=2, heads=4, dim=20, v_dim=12)
        on_gpu = Inputs(*(t.cuda() for t in x))
        kernel = kernel_for(on_gpu.q, on_gpu.v, PLAIN)
        out, _ = forward(kernel, mask, PLAIN, on_gpu).result(torch.bfloat16)
        torch.testing.assert_close(out.cpu().double(), whole_reference(mask, PLAIN, x)[0], atol=0.02, rtol=0.02)
