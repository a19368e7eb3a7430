"""Providers of one step: against fp64 attention, and that steps add up when the backward gets the final lse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_tp.schedules.attention_providers import MATH, TORCH_CPU, AttentionProvider, Math, provider_for
from fused_tp.schedules.ring_state import merge
from tests.reference import assert_within_dtype_error, attention64, gradients64, seeded

PROVIDERS = pytest.mark.parametrize("provider", [TORCH_CPU, MATH], ids=lambda provider: provider.name)
SCALE = 0.3


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def made(
    dtype: torch.dtype, sq: int, sk: int, heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> list[Tensor]:
    q, k = seeded(2, sq, heads, head_dim, dtype=dtype), seeded(2, sk, kv_heads, head_dim, dtype=dtype, seed=1)
    return [q, k, seeded(2, sk, kv_heads, v_head_dim, dtype=dtype, seed=2)]


@PROVIDERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sq", "sk", "causal", "heads", "kv_heads", "head_dim", "v_head_dim"),
    [
        (1, 1, True, 1, 1, 8, 8),
        (37, 37, True, 4, 2, 16, 16),
        (5, 19, False, 6, 1, 16, 16),
        (19, 5, False, 4, 4, 24, 8),
        (7, 7, True, 4, 2, 8, 24),
    ],
)
def test_step(
    provider: AttentionProvider,
    dtype: torch.dtype,
    sq: int,
    sk: int,
    causal: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
) -> None:
    q, k, v = made(dtype, sq, sk, heads, kv_heads, head_dim, v_head_dim)
    grad = seeded(2, sq, heads, v_head_dim, dtype=dtype, seed=3)
    expected, grads = gradients64(lambda q, k, v: attention64(q, k, v, causal=causal, scale=SCALE)[0], (q, k, v), grad)
    out, lse = provider.forward(*heads_first(q, k, v), causal=causal, scale=SCALE)
    (q1, k1, v1, g1), out1 = heads_first(q, k, v, grad), out.to(dtype)
    got = provider.backward(g1, q1, k1, v1, out1, lse, causal=causal, scale=SCALE)
    # Probabilities and scores are rounded to the dtype between the two matmuls, forward and backward.
    reduced_over, roundings = sk * head_dim, 8
    assert_within_dtype_error(out1.transpose(1, 2), expected, dtype, reduced_over=reduced_over, roundings=roundings)
    for name, one, reference in zip(("dq", "dk", "dv"), got, grads, strict=True):
        assert reference is not None
        if sk == 1 and name != "dv":  # softmax over one key is constant: what is left is p * (g v - sum(g out)), near 0
            assert one.abs().max() <= 16 * torch.finfo(dtype).eps
        else:
            assert_within_dtype_error(
                one.to(dtype).transpose(1, 2),
                reference,
                dtype,
                reduced_over=reduced_over,
                roundings=roundings,
                name=name,
            )
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@PROVIDERS
def test_terms_of_two_steps_add_up(provider: AttentionProvider) -> None:
    q, k, v = made(torch.float64, 11, 13, 4, 2, 8, 8)
    grad = seeded(2, 11, 4, 8, dtype=torch.float64, seed=3)
    whole, (dq, dk, dv) = gradients64(lambda q, k, v: attention64(q, k, v, scale=SCALE)[0], (q, k, v), grad)
    assert dq is not None and dk is not None and dv is not None
    q, k, v, grad = heads_first(q, k, v, grad)
    out, lse = provider.forward(q, k[:, :, :4], v[:, :, :4], causal=False, scale=SCALE)
    merge(out, lse, *provider.forward(q, k[:, :, 4:], v[:, :, 4:], causal=False, scale=SCALE))
    torch.testing.assert_close(out.transpose(1, 2), whole)
    one, two = (
        provider.backward(grad, q, k[:, :, part], v[:, :, part], out, lse, causal=False, scale=SCALE)
        for part in (slice(0, 4), slice(4, None))
    )
    torch.testing.assert_close((one[0] + two[0]).transpose(1, 2), dq)
    torch.testing.assert_close(torch.cat([one[1], two[1]], 2).transpose(1, 2), dk)
    torch.testing.assert_close(torch.cat([one[2], two[2]], 2).transpose(1, 2), dv)


def test_math_takes_queries_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_tp.schedules.attention_providers._MATH_ROWS", 4)
    test_step(Math(), torch.float64, 11, 11, True, 4, 2, 8, 8)


def test_merge_of_rows_that_see_nothing() -> None:
    lse = torch.tensor([-torch.inf, -torch.inf, 1.0, 1.0, 800.0, -800.0])
    step_lse = torch.tensor([-torch.inf, 2.0, -torch.inf, 1.0, -800.0, 800.0])
    out = torch.tensor([0.0, 0.0, 3.0, 3.0, 3.0, 3.0])[:, None].expand(6, 4).clone()
    merge(out, lse, torch.tensor([0.0, 5.0, 0.0, 5.0, 5.0, 5.0])[:, None].expand(6, 4), step_lse)
    assert out[:, 0].tolist() == [0.0, 5.0, 3.0, 4.0, 3.0, 5.0]
    assert lse.tolist() == pytest.approx([-torch.inf, 2.0, 1.0, 1.0 + torch.tensor(2.0).log().item(), 800.0, 800.0])


def test_merge_does_not_hide_nan() -> None:
    out, lse = torch.ones(1, 2), torch.zeros(1)
    merge(out, lse, torch.full((1, 2), torch.nan), torch.full((1,), torch.nan))
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_choice_of_provider() -> None:
    assert provider_for(torch.empty(1, dtype=torch.bfloat16), torch.empty(1)) is TORCH_CPU
    assert provider_for(torch.empty(1, device="meta"), torch.empty(1, device="meta")) is MATH


@pytest.mark.gpu
def test_cuda_flash_agrees_with_math() -> None:
    q, k, v = (t.cuda().transpose(1, 2) for t in made(torch.bfloat16, 33, 33, 4, 2, 20, 12))
    grad = seeded(2, 33, 4, 12, dtype=torch.bfloat16, seed=3).cuda().transpose(1, 2)
    provider = provider_for(q, v)
    assert provider.name == "torch-cuda"
    out, lse = provider.forward(q, k, v, causal=True, scale=SCALE)
    wanted, wanted_lse = MATH.forward(q, k, v, causal=True, scale=SCALE)
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)
    got = provider.backward(grad, q, k, v, out, lse, causal=True, scale=SCALE)
    for one, reference in zip(got, MATH.backward(grad, q, k, v, out, lse, causal=True, scale=SCALE), strict=True):
        torch.testing.assert_close(one.float(), reference, atol=0.05, rtol=0.05)
