"""Cross entropy kernels in Triton, interpreted: statistics and gradients against torch's operations in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_tp
from fused_tp.ops import linear_cross_entropy, vocab_parallel_cross_entropy, vocab_statistics
from fused_tp.ops.vocab_statistics import fill_statistics
from tests.kernels.ranks import interpreted
from tests.reference import seeded

pytest.importorskip("triton")

VOCAB_RANGE = (100, 100 + 9001)  # several blocks, and a last one of few columns


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (x, targets): infinite, large and equal elements, the largest in any block, targets out of the range."""
    x = seeded(7, VOCAB_RANGE[1] - VOCAB_RANGE[0], dtype=dtype) * 3
    x[1] = -torch.inf
    x[2, :5000] = -torch.inf
    x[3, 8999] = 300.0
    x[4, 0] = -1000.0
    x[4, 1:] = -1200.0
    x[5] = 2.0
    return x, torch.tensor([100, 5, 100 + 9000, 100 + 8999, 99, 100 + 9001, 4500])


def logits_of(x: Tensor, scale: float, softcap: float | None) -> Tensor:
    return x.double() * scale if softcap is None else (x.double() * scale / softcap).tanh() * softcap


CASES: list[tuple[torch.dtype, float, float | None]] = [
    (torch.float32, 1.0, None),
    (torch.bfloat16, 0.25, None),
    (torch.float16, 1.5, 30.0),
]


@interpreted(1)
def test_statistics(group: dist.ProcessGroup) -> None:
    from fused_tp.triton_kernels import cross_entropy

    for dtype, scale, softcap in CASES:
        x, targets = rows(dtype)
        logits = logits_of(x, scale, softcap)
        wanted = torch.zeros(len(x), 4, dtype=torch.float64)
        fill_statistics(wanted, logits, targets, VOCAB_RANGE, needs_logit_sum=True)
        found = torch.zeros(len(x), 4)
        terms: dict[str, Any] = {"scale": scale, "softcap": softcap}
        padded = torch.full((len(x), x.shape[1] + 8), torch.nan, dtype=dtype)  # rows with a stride
        padded[:, : x.shape[1]] = x
        for given in (x, padded[:, : x.shape[1]]):
            cross_entropy.fill_statistics(found, given, targets, VOCAB_RANGE, needs_logit_sum=True, **terms)
            torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-2)
            torch.testing.assert_close(found[:, :3].double(), wanted[:, :3], rtol=2e-5, atol=1e-5)
        cross_entropy.fill_statistics(found, x, targets, VOCAB_RANGE, needs_logit_sum=False, **terms)
        assert not found[:, 3].any()
    x[0, 17] = torch.nan
    x[6, 17] = torch.inf
    cross_entropy.fill_statistics(found, x, targets, VOCAB_RANGE, needs_logit_sum=False)
    assert found[0, 1].isnan() and found[6, 1] == torch.inf


@interpreted(1)
def test_gradients(group: dist.ProcessGroup) -> None:
    from fused_tp.triton_kernels import cross_entropy

    for dtype, scale, softcap in CASES:
        x, targets = rows(dtype)
        x = x[[0, 2, 5, 6]]
        targets = targets[[0, 2, 5, 6]]
        d_losses, smoothing, z_loss = torch.tensor([1.0, 0.5, 0.0, -2.0]), 0.1, 1e-2
        leaf = x.double().requires_grad_()
        logits = logits_of(leaf, scale, softcap)
        lse = logits.logsumexp(-1)
        is_local = (targets >= VOCAB_RANGE[0]) & (targets < VOCAB_RANGE[1])
        picked = logits.gather(-1, torch.where(is_local, targets - VOCAB_RANGE[0], 0)[:, None])[:, 0]
        finite_sum = torch.where(logits.isinf(), 0, logits).sum(-1)
        losses = lse - (1 - smoothing) * torch.where(is_local, picked, 0) - smoothing * finite_sum / 20000
        ((losses + z_loss * lse.square()) * d_losses).sum().backward()
        assert leaf.grad is not None
        wanted = torch.where(x.isinf(), 0, leaf.grad)
        lse32 = lse.detach().float()
        lse32[2] = torch.nan  # of a token that is ignored
        arguments = (
            *(targets, VOCAB_RANGE, lse32, torch.where(d_losses == 0, 0, d_losses * (1 + 2 * z_loss * lse32))),
            *(d_losses * smoothing / 20000, d_losses * (smoothing - 1)),
        )
        for out in (torch.empty_like(x), x):
            cross_entropy.fill_gradients(out, x, *arguments, scale=scale, softcap=softcap)
            eps = torch.finfo(dtype).eps
            found = torch.where(wanted == 0, 0, out)  # smoothing counts elements that are -inf as well
            torch.testing.assert_close(found.double(), wanted, rtol=2 * eps, atol=1e-7 + (1e-7 if eps > 1e-4 else 0))


def test_traced_calls_run_torchs_operations() -> None:
    """torch.compile traces the backward of vocab_parallel_cross_entropy with tensors that have no memory."""
    with FakeTensorMode():
        assert vocab_statistics.loss_kernels(torch.empty(2, 3, device="cuda")) is None


@interpreted(2)
def test_ops_through_the_kernels(group: dist.ProcessGroup) -> None:
    """Losses and gradients are those of torch's operations, also with ignored and strided targets, and without any."""
    from fused_tp.triton_kernels import cross_entropy

    hidden, weight = seeded(9, 8, seed=3), seeded(33, 8, seed=4)[: 17 - dist.get_rank()] * 40  # logits far above 88
    logits = seeded(9, 40, seed=5)[:, ::2] * 5
    target = torch.arange(18)[::2].clone()
    target[[2, 7]] = -100

    def run() -> list[Tensor]:
        found = []
        for count in (9, 0):
            wide_target = torch.zeros(2 * count, dtype=torch.int64)
            wide_target[::2] = target[:count]
            given = wide_target[::2]
            for dtype in (torch.float32, torch.bfloat16):
                leaves = [t[:count].to(dtype).requires_grad_() for t in (hidden, logits)]
                leaves.append(weight.to(dtype).requires_grad_())
                one = fused_tp.linear_cross_entropy(
                    leaves[0], leaves[2], given, group=group, vocab_size=33, reduction="sum", z_loss=0.01,
                    label_smoothing=0.1, softcap=200.0,
                )  # fmt: skip
                two = fused_tp.vocab_parallel_cross_entropy(
                    leaves[1], given, group=group, vocab_size=40, reduction="sum", label_smoothing=0.1
                )
                (one + two).backward()
                found += [one.detach(), two.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        return found

    wanted = run()
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear_cross_entropy, vocab_parallel_cross_entropy):
            patch.setattr(module, "loss_kernels", lambda x: cross_entropy)
        for a, b in zip(run(), wanted, strict=True):
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=8 * eps, atol=8 * eps * float(b.abs().max() if b.numel() else 0))
