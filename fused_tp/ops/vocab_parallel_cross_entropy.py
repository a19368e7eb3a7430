"""Cross entropy of vocabulary-sharded logits, without gathering the logits."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.backends.gemm import as_rows
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_by_name, group_identity
from fused_tp.core.partition import SymInt, shard_range
from fused_tp.core.pending import accumulate_dtype
from fused_tp.ops.arguments import check_int, check_tensor, checked_number, total_size
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey
from fused_tp.ops.vocab_statistics import (
    NUM_STATISTICS,
    check_reduction,
    check_target,
    check_target_range,
    combine_statistics,
    exchange_statistics,
    fill_statistics,
    find_local_targets,
    loss_kernels,
)


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: GroupLike,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """F.cross_entropy of logits sharded along the vocabulary, which is the last dim of the logits.

    Each rank sends four numbers per token: maximum, sum of exponentials, the target's logit, sum of logits. In the
    table, s is the label smoothing and V the size of the full vocabulary.

    =======  ==========================================================================
    forward  loss = lse - (1 - s) * logits[target] - s * mean(logits), with the four numbers all-gathered
    dgrad    d_logits_shard [..., v] = (exp(logits - lse) - (1 - s) * onehot(target) - s / V) * d_loss; local
    wgrad    none: there are no weights
    =======  ==========================================================================

    Args:
        logits_shard: [..., v], this rank's shard of the vocabulary.
        target: [...], int64 indices into the full vocabulary, or `ignore_index`; equal on all ranks.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        label_smoothing: 0 to 1.
        ignore_index: target value of tokens that are excluded from the loss and the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for a loss per token (0 if ignored).
        vocab_size: length of the vocabulary over all ranks, if the shards (as by torch.chunk) are not all equal.

    Returns:
        A scalar, or [...] for "none", computed in float32 (float64 for float64 logits). As with F.cross_entropy, the
        mean is NaN if every target is ignored.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or was called with other
            keywords or targets (compared on CPU always, elsewhere with FUSED_TP_CHECK=1).

    Example:
        loss = vocab_parallel_cross_entropy(lm_head(hidden), labels, group=mesh["tp"])

    Source: the parallel loss of Shoeybi et al., "Megatron-LM", 2019; label smoothing of Szegedy et al., 2016.
    """
    losses: Tensor
    losses, _ = VOCAB_PARALLEL_CROSS_ENTROPY(
        logits_shard, target, vocab_size, label_smoothing, ignore_index, reduction, group
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _Args(NamedTuple):
    logits_shard: Tensor
    target: Tensor
    vocab_size: SymInt
    label_smoothing: float
    ignore_index: int
    reduction: str  # only compared between ranks: the caller reduces the losses
    group: AnyGroup

    def __str__(self) -> str:
        return (
            f"{self.logits_shard.dtype}, vocab_size={self.vocab_size}, label_smoothing={self.label_smoothing!r}, "
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        )


def _is_valid_smoothing(x: float) -> bool:
    return 0.0 <= x <= 1.0


def _prepare(a: _Args) -> _Args:
    logits_shard, target, vocab_size, label_smoothing, ignore_index, reduction, group = a
    check_reduction(reduction)
    check_tensor("logits_shard", logits_shard)
    check_target(target, "logits_shard", logits_shard, logits_shard.shape[:-1], "the vocabulary")
    smoothing = checked_number("label_smoothing", label_smoothing, _is_valid_smoothing, "between 0 and 1")
    check_int("ignore_index", ignore_index)
    _, size, rank = group_identity(group)
    full_vocab_size = total_size(
        "vocab_size", vocab_size, logits_shard.shape[-1], size, rank, "the last dim of logits_shard"
    )
    return _Args(logits_shard, target, full_vocab_size, smoothing, ignore_index, reduction, group)


def _key(a: _Args) -> ScheduleKey:
    dtype = accumulate_dtype(a.logits_shard.dtype)
    num_rows = prod(a.logits_shard.shape[:-1])
    return ScheduleKey("vocab_parallel_cross_entropy", dtype, a.logits_shard.device, num_rows, None, NUM_STATISTICS)


def _forward(schedule: Schedule, a: _Args) -> tuple[Tensor, Tensor]:
    """Return (loss per token, log-sum-exp over the full vocabulary)."""
    logits_shard, target, vocab_size, label_smoothing, ignore_index, *_, group = a
    resolved_group = group_by_name(group)
    is_counted = target != ignore_index
    check_target_range(target, is_counted, vocab_size, ignore_index)
    logits, dtype = as_rows(logits_shard), accumulate_dtype(logits_shard.dtype)
    stats = logits.new_zeros((logits.shape[0] + 1, NUM_STATISTICS), dtype=dtype)
    vocab_range = shard_range(vocab_size, resolved_group.size, resolved_group.rank)
    needs_logit_sum = label_smoothing != 0.0
    if (kernels := loss_kernels(logits)) is not None:
        kernels.fill_statistics(stats[:-1], logits, target.reshape(-1), vocab_range, needs_logit_sum=needs_logit_sum)
    else:
        fill_statistics(stats[:-1], logits.to(dtype), target, vocab_range, needs_logit_sum=needs_logit_sum)
    gathered = exchange_statistics(schedule, stats, target, "vocab_parallel_cross_entropy", str(a), resolved_group)
    losses, log_sum_exp = combine_statistics(gathered, label_smoothing, vocab_size)
    losses = torch.where(is_counted.reshape(-1), losses, torch.zeros_like(losses))
    return losses.view(target.shape), log_sum_exp.view(target.shape)


def _fake(a: _Args) -> tuple[Tensor, Tensor]:
    shape, dtype = a.target.shape, accumulate_dtype(a.logits_shard.dtype)
    return a.logits_shard.new_empty(shape, dtype=dtype), a.logits_shard.new_empty(shape, dtype=dtype)


def _backward(s: SavedForBackward[_Args], d_losses: Tensor, _: Tensor) -> dict[str, Any]:
    """Compute the gradient of the logits from the saved lse; no communication."""
    if not s.needs.logits_shard:
        return {}
    a, (log_sum_exp,) = s.args, s.outputs
    logits_shard, target = a.logits_shard, a.target
    resolved_group = group_by_name(a.group)
    d_rows = torch.where(target != a.ignore_index, d_losses, torch.zeros_like(d_losses))[..., None]
    if (kernels := loss_kernels(logits_shard)) is not None:
        vocab_range = shard_range(a.vocab_size, resolved_group.size, resolved_group.rank)
        d_row = d_rows.reshape(-1)
        d_terms = (d_row, d_row * (a.label_smoothing / a.vocab_size), d_row * (a.label_smoothing - 1.0))
        d_logits = logits_shard.new_empty(as_rows(logits_shard).shape)
        kernels.fill_gradients(
            d_logits, as_rows(logits_shard), target.reshape(-1), vocab_range, log_sum_exp.reshape(-1), *d_terms
        )
        return {"logits_shard": d_logits.view(logits_shard.shape)}
    d_logits = torch.exp(logits_shard.to(log_sum_exp.dtype) - log_sum_exp[..., None])
    if a.label_smoothing != 0.0:
        d_logits = d_logits - a.label_smoothing / a.vocab_size
    d_logits = d_logits * d_rows
    if logits_shard.shape[-1] > 0:
        local_index, is_local = find_local_targets(
            target, shard_range(a.vocab_size, resolved_group.size, resolved_group.rank)
        )
        d_target = torch.where(is_local.view(target.shape)[..., None], (a.label_smoothing - 1.0) * d_rows, 0.0)
        d_logits = d_logits.scatter_add(-1, local_index.view(target.shape)[..., None], d_target)
    return {"logits_shard": d_logits.to(logits_shard.dtype)}


def _example(size: int, logits_shard: Tensor) -> _Args:
    return _Args(logits_shard, logits_shard, 0, 0.0, 0, "mean", None)


VOCAB_PARALLEL_CROSS_ENTROPY: Op[_Args] = Op(
    "vocab_parallel_cross_entropy",
    _Args,
    "(Tensor, Tensor)",
    _forward,
    _fake,
    key=_key,
    make_example_args=_example,
    prepare=_prepare,
    saves=("logits_shard", "target", 1),
    backward=_backward,
    non_differentiable=(1,),
    has_local_backward=True,
)
