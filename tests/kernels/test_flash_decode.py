"""Split-KV decoding in Triton, interpreted: `context_parallel_decode` through the kernel, and the kernel by itself.

Caches hold NaN in unused slots and are split into parts of a few keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention_reference import dense_attention
from tests.distributed.test_context_decode import CASES, Case, case, check, decoded_by_ranks
from tests.kernels.ranks import interpreted, interpreted_ranks
from tests.reference import seeded

pytest.importorskip("triton")

SERVED = {
    name: CASES[name]
    for name in (
        "ragged",
        "window, several new tokens",
        "all scores",
        "not causal, more new tokens than there are",
        "fp16",
        "no new token",
    )
} | {
    "many rows": case([50, 29], new=9, heads=8, kv_heads=1, head_dim=40, v_head_dim=20),
    "bf16, wide": case([90, 61], new=2, dtype=torch.bfloat16, head_dim=136, v_head_dim=64, block=16),
}


def kernels() -> Any:
    from fused_tp.triton_kernels.attention import decode

    return decode


def by_the_kernel(group: dist.ProcessGroup, cases: list[Case]) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
    """Number of splits in each call of the kernel, and the results."""
    flash = kernels()
    parts: list[int] = []
    whole, shipped = flash.flash_decode, flash.decode_config

    def in_parts(*args: Any, **keywords: Any) -> Tensor:
        parts.append((1, 3, 4)[len(parts) % 3])
        found: Tensor = whole(*args, **keywords, num_splits=parts[-1])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_TP_ATTENTION", "triton")
        patch.setattr(flash, "flash_decode", in_parts)
        patch.setattr(flash, "decode_config", lambda *args: replace(shipped(*args), block_size=16))
        return parts, decoded_by_ranks(group, cases)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "names"), [(1, list(SERVED)), (2, ["all scores", "bf16, wide"])])
def test_is_attention_over_the_whole_cache(world_size: int, names: list[str]) -> None:
    cases = [SERVED[name] for name in names]
    ranks = interpreted_ranks(world_size, by_the_kernel, cases, timeout=120)
    assert len(ranks[0][0]) == 3 * sum(one["new"] > 0 for one in cases)  # dense, and two orders of pages
    for index, one in enumerate(cases):
        check(one, *ranks[0][1][index])
        assert all(torch.equal(a, b) for rank in ranks for a, b in zip(ranks[0][1][index], rank[1][index], strict=True))


@interpreted(1)
def test_the_kernel_by_itself(group: dist.ProcessGroup) -> None:
    """Any number of splits, also the default for the machine, changes out only by rounding; k and v may be views."""
    from fused_tp.triton_kernels.attention.launch import ScoreTerms

    flash, keys = kernels(), 700
    q, both = seeded(2, 1, 4, 16), seeded(2, keys, 2, 2, 16, seed=1)
    k, v = both.unbind(3)
    starts, stops = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[keys], [0]], dtype=torch.int32)
    stops[1], starts[1] = 333, 333  # sees nothing

    def run(**keywords: Any) -> Tensor:
        found: Tensor = flash.flash_decode(q, k, v, starts, stops, keys, ScoreTerms(0.25), **keywords)
        return found

    alone = run(num_splits=1)
    seen = torch.ones(1, keys, dtype=torch.bool)
    q64, k64, v64 = (x[:1].double() for x in (q, k, v))
    wanted, lse = dense_attention(q64, k64, v64, seen, torch.zeros(1, keys), scale=0.25)
    torch.testing.assert_close(alone[:1, ..., :16].double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(alone[:1, ..., 16].double(), lse.transpose(1, 2), rtol=1e-6, atol=1e-6)
    assert not alone[1, ..., :16].any() and bool((alone[1, ..., 16] == -torch.inf).all())
    for splits in (None, 2, 700):
        torch.testing.assert_close(run(num_splits=splits), alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(run(), run())


@pytest.mark.full
@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Compare with plain torch over a cache that is long enough to be split."""
    from fused_tp import context_parallel_decode

    q, cache = seeded(3, 2, 8, 128, dtype=torch.bfloat16), seeded(3, 5000, 2, 128, dtype=torch.bfloat16, seed=1)
    given: dict[str, Any] = {"group": None, "cache_seqlens": torch.tensor([5000, 17, 1]), "return_lse": True}
    wanted = context_parallel_decode(q, cache, cache, **given)
    found = context_parallel_decode(q.cuda(), cache.cuda(), cache.cuda(), **given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0.02, atol=0.01)
