"""vocab_parallel_cross_entropy against F.cross_entropy of the whole logits in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.runtime.partition import shard_range
from tests.distributed.schedule_variants import SCHEDULES, run_variant
from tests.reference import assert_within_dtype_error, refuses, seeded
from tests.workers import on_ranks, run_ranks


def own(logits: Tensor, group: Any) -> Tensor:
    start, stop = shard_range(logits.shape[-1], dist.get_world_size(group), dist.get_rank(group))
    return logits[..., start:stop]


def against_torch(group: Any, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in [(1, 1), (7, 5), (2, 3, 11), (6, 32), (0, 4)]:
        vocab = shape[-1]
        logits = seeded(*shape, dtype=dtype, seed=1, scale=4.0)
        target = torch.randint(vocab, shape[:-1], generator=torch.Generator().manual_seed(2))
        target.view(-1)[1::3] = -100
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                whole = logits.double().clone().requires_grad_()
                flat = whole.reshape(-1, vocab), target.reshape(-1)
                wanted = torch.nn.functional.cross_entropy(*flat, reduction=reduction, label_smoothing=smoothing)
                shard = own(logits, group).clone().requires_grad_()
                loss = fused_tp.vocab_parallel_cross_entropy(
                    shard,
                    target,
                    group=group,
                    label_smoothing=smoothing,
                    reduction=reduction,
                    vocab_size=vocab,
                )
                d = seeded(*loss.shape, dtype=torch.float64, seed=3)
                if shape[0] == 0:
                    assert loss.shape == wanted.shape or reduction == "none"
                    continue
                wanted.backward(d.reshape(wanted.shape))
                loss.backward(d.to(wide))
                assert whole.grad is not None and shard.grad is not None
                name = f"{shape} {reduction} {smoothing}"
                # Logits of +-16 in exp: relative errors of their size times eps.
                assert_within_dtype_error(
                    loss, wanted.detach().reshape(loss.shape), wide, reduced_over=vocab, roundings=32, name=name
                )
                assert_within_dtype_error(
                    shard.grad, own(whole.grad, group), dtype, reduced_over=vocab, roundings=32, name=f"d {name}"
                )


@pytest.mark.parametrize(
    ("world_size", "dtype_name"), [(2, "float64"), (3, "bfloat16"), (4, "float32"), (3, "float16")]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_against_torch(schedule: str, world_size: int, dtype_name: str) -> None:
    run_variant(schedule, world_size, against_torch, dtype_name)


def test_one_rank() -> None:
    run_ranks(1, against_torch, "float32")


@on_ranks(1, 2, 4)
def test_extreme_logits(group: Any) -> None:
    """Masked vocabulary (-inf, on some ranks all of it) and logits whose exp overflows."""
    logits = torch.full((3, 4), -torch.inf)
    logits[0, 1] = 2.0
    logits[0, 3] = 1.0
    logits[1] = torch.tensor([3e38, -3e38, 3e38, 0.0])
    logits[2, 0] = 0.0  # the other ranks have nothing but -inf
    target = torch.tensor([1, 2, 0])
    whole = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole, target, reduction="none")
    wanted.sum().backward()
    shard = own(logits, group).clone().requires_grad_()
    loss = fused_tp.vocab_parallel_cross_entropy(shard, target, group=group, reduction="none")
    loss.sum().backward()
    assert whole.grad is not None and shard.grad is not None
    torch.testing.assert_close(loss[[0, 2]].double(), wanted[[0, 2]].detach())
    torch.testing.assert_close(shard.grad[[0, 2]].double(), own(whole.grad, group)[[0, 2]])
    assert loss[1].isfinite() and shard.grad[1].isfinite().all()


@on_ranks(2)
def test_every_target_ignored(group: Any) -> None:
    logits = own(seeded(3, 4), group).clone().requires_grad_()
    target = torch.full((3,), 7)
    mean = fused_tp.vocab_parallel_cross_entropy(logits, target, group=group, ignore_index=7)
    total = fused_tp.vocab_parallel_cross_entropy(logits, target, group=group, ignore_index=7, reduction="sum")
    total.backward()
    assert logits.grad is not None and not logits.grad.any()
    assert mean.isnan() and total == 0


@on_ranks(2)
def test_target_out_of_range(group: Any) -> None:
    said = "^target holds 4; class indices are 0 to 3, or ignore_index=-100.$"
    target = torch.tensor([0, 4])
    refuses(ValueError, said, fused_tp.vocab_parallel_cross_entropy, torch.zeros(2, 2), target, group=group)
