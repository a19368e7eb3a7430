"""Attention kernels in the shipped configs on a GPU, against the fp64 references of the interpreted kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.attention.spec import AttentionMask, ScoreParameters
from tests.kernels.test_flash_attention import MASKS, SCORES, Case, case, check

pytestmark = pytest.mark.gpu
LONG = {
    "causal": AttentionMask(700, 700, causal=True),
    "window": AttentionMask(700, 700, causal=True, window=(200, -1)),
    "documents": AttentionMask(
        700, 700, causal=True, cu_seqlens=(0, 3, 300, 301, 700), cu_seqlens_kv=(0, 3, 300, 301, 700)
    ),
}


def there(c: Case, device: torch.device) -> Case:
    moved: dict[str, Any] = {name: x.to(device) for name, x in vars(c).items() if isinstance(x, torch.Tensor)}
    if c.scores.alibi_slopes is not None:
        moved["scores"] = replace(c.scores, alibi_slopes=c.scores.alibi_slopes.to(device))
    return replace(c, gradients={name: x.to(device) for name, x in c.gradients.items()}, **moved)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Make the GPU torch's default device for the test."""
    with torch.device("cuda") as device:
        yield device


def made(mask: AttentionMask, scores: ScoreParameters, device: torch.device, **shape: object) -> Case:
    with torch.device("cpu"):
        c = case(mask, scores, **shape)  # type: ignore[arg-type]
    return there(c, device)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, device: torch.device) -> None:
    check(made(MASKS[name], SCORES["plain"], device, dtype=torch.bfloat16, sinks=True), shipped=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24)], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    for name in ("plain", "all"):
        scores = replace(SCORES[name], scale=dims[0] ** -0.5)
        check(made(LONG["causal"], scores, device, dims=dims, dtype=dtype, sinks=name == "all"), shipped=True)


@pytest.mark.parametrize("name", LONG)
def test_long(name: str, device: torch.device) -> None:
    for scores in SCORES.values():
        c = made(LONG[name], replace(scores, scale=0.125), device, dims=(64, 64), dtype=torch.bfloat16, batch=2)
        first, second = check(c, shipped=True), check(c, shipped=True)
        assert all(torch.equal(first[what], second[what]) for what in first), "not the same bits"
