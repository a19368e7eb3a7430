"""linear_cross_entropy, forward and all gradients, against F.cross_entropy of whole logits in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fused_tp
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.partition import shard_range
from fused_tp.ops import linear_cross_entropy, vocab_statistics
from tests.distributed.schedule_cases import SCHEDULES, run_variant
from tests.reference import assert_within_dtype_error, refuses, seeded
from tests.workers import on_ranks, run_ranks

K = 6
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 0.02},
    {"softcap": 2.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.2},
]


def own_shard(t: Tensor, dim: int, group: Any) -> Tensor:
    start, stop = shard_range(t.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return t.narrow(dim, start, stop - start).detach().clone()


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str,
) -> Tensor:
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view(target.shape)
    is_counted = target != -100
    losses = losses + torch.where(is_counted, z_loss * logits.logsumexp(-1).square(), 0.0)
    return losses if reduction == "none" else losses.sum() / (is_counted.sum() if reduction == "mean" else 1)


def cases(group: Any, dtype_name: str) -> None:
    """Chunks of 3 rows, blocks of 1: several chunks, and a last one that is not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_statistics, "MIN_CHUNK_ROWS", 3)
        patch.setattr(vocab_statistics, "MAX_CHUNK_BYTES", 1)
        patch.setattr(linear_cross_entropy, "_BLOCK_BYTES", 1)
        compare_cases(group, dtype_name)


def compare_cases(group: Any, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Logits are rounded to `dtype`; the error of a loss is that of its logits.
    roundings = 16 if dtype in (torch.bfloat16, torch.float16) else 64
    for vocab, shape, has_bias in [(3, (1,), True), (7, (5,), False), (13, (2, 4), True), (32, (7,), True)]:
        hidden = seeded(*shape, K, dtype=dtype, seed=1)
        weight, bias = seeded(vocab, K, dtype=dtype, seed=2), seeded(vocab, dtype=dtype, seed=3) if has_bias else None
        target = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(4))
        target.view(-1)[1::3] = -100
        for reduction, keywords, gather_dim in itertools.product(("mean", "sum", "none"), KEYWORDS, (None, -2)):
            wholes = [
                t.detach().double().clone().requires_grad_() if t is not None else None for t in (hidden, weight, bias)
            ]
            wanted = reference(*wholes, target, reduction=reduction, **keywords)  # type: ignore[arg-type]
            d = seeded(*wanted.shape, dtype=torch.float64, seed=5)
            wanted.backward(d)
            own_hidden = hidden.detach().clone() if gather_dim is None else own_shard(hidden, gather_dim, group)
            shards = [own_hidden, own_shard(weight, 0, group), None if bias is None else own_shard(bias, 0, group)]
            leaves = [None if t is None else t.requires_grad_() for t in shards]
            loss = fused_tp.linear_cross_entropy(
                leaves[0], leaves[1], target, leaves[2], group=group, gather_dim=gather_dim, vocab_size=vocab,
                reduction=reduction, **keywords,
            )  # fmt: skip
            loss.backward(d.to(wide))
            name = f"{dtype} {vocab} {shape} {reduction} {keywords} gather_dim={gather_dim}"
            error = {"reduced_over": max(vocab, K), "roundings": roundings}
            assert loss.dtype == wide, name
            assert_within_dtype_error(loss.to(dtype), wanted.detach(), dtype, name=name, **error)
            for leaf, whole, dim in zip(leaves, wholes, (gather_dim, 0, 0), strict=True):
                if leaf is None or whole is None:
                    continue
                wanted_grad = whole.grad if dim is None else own_shard(whole.grad, dim, group)
                assert leaf.grad is not None, name
                assert_within_dtype_error(leaf.grad, wanted_grad, dtype, name=f"d {name}", **error)


@pytest.mark.parametrize(
    ("world_size", "dtype_name"), [(2, "float64"), (3, "bfloat16"), (4, "float32"), (3, "float16")]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_loss_of_whole_logits(schedule: str, world_size: int, dtype_name: str) -> None:
    run_variant(schedule, world_size, cases, dtype_name)


def test_on_one_rank() -> None:
    run_ranks(1, cases, "float32")


@on_ranks(2)
def test_large_logits_of_ignored_tokens(group: Any) -> None:
    """All tokens are multiplied on GPUs; ignored ones add 0 to gradients, not 0 * exp of their logits."""
    counted = linear_cross_entropy._Rows.counted

    def all_tokens(args: Any) -> Any:
        hidden, target = args.hidden.flatten(0, -2), args.target.flatten()
        return linear_cross_entropy._Rows(hidden, target, target != -100, None)

    hidden, weight = seeded(5, K, seed=1) * 1e3, own_shard(seeded(8, K, seed=2), 0, group)
    target = torch.tensor([1, -100, 7, -100, 2])
    gradients = []
    for rows in (counted, all_tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_cross_entropy._Rows, "counted", rows)
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            fused_tp.linear_cross_entropy(*leaves, target, group=group, vocab_size=8).backward()
            gradients.append([leaf.grad for leaf in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(3)
def test_frozen_operands_strides_and_ranks_that_differ(group: Any) -> None:
    hidden, weight = seeded(4, 5, K).transpose(0, 1), seeded(K, 8, seed=2).t()  # views: [5, 4, K] and [8, K]
    target = torch.randint(8, (5, 4), generator=torch.Generator().manual_seed(4))
    own_weight = weight.tensor_split([3, 6])[dist.get_rank(group)]
    wanted = [t.double().clone().requires_grad_() for t in (hidden, weight)]
    reference(wanted[0], wanted[1], None, target, reduction="mean").backward()
    for trained in ((True, False), (False, True)):
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip((hidden, own_weight), trained, strict=True)]
        fused_tp.linear_cross_entropy(*leaves, target, group=group, vocab_size=8).backward()
        assert [leaf.grad is not None for leaf in leaves] == list(trained)
        index = trained.index(True)
        expected = wanted[index].grad if index == 0 else own_shard(wanted[1].grad, 0, group)
        torch.testing.assert_close(leaves[index].grad.double(), expected, rtol=1e-4, atol=1e-6)
    # Ranks whose targets differ in the number of ignored tokens send the same shapes, and find out.
    if dist.get_rank(group) == 1:
        target = target.index_fill(0, torch.tensor([2]), -100)
    says = "different (keywords|targets)"
    refuses(
        RankMismatchError, says, fused_tp.linear_cross_entropy, hidden, own_weight, target, group=group, vocab_size=8
    )
    # An argument that is invalid on one rank raises there before hidden states are gathered.
    if dist.get_rank(group) == 0:
        call = fused_tp.linear_cross_entropy
        keywords: dict[str, Any] = {"group": group, "gather_dim": 0, "vocab_size": 8}
        refuses(ValueError, "z_loss is -1", call, hidden, own_weight, target, z_loss=-1.0, **keywords)
        refuses(ValueError, "weight has shape", call, hidden[..., :3], own_weight, target, **keywords)
        refuses(ValueError, "target has shape", call, hidden, own_weight, target[:, :2], **keywords)
    assert fused_tp.all_reduce(torch.ones(2), group=group).eq(3).all()
