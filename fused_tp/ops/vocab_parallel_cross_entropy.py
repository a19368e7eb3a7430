"""Cross entropy of logits whose vocabulary is cut over the ranks, which never brings the logits together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_tp.ops.arguments import check_int, check_tensor, total_size
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.runtime.partition import shard_range
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.layout import as_rows
from fused_tp.schedules.registry import select_schedule
from fused_tp.transport.base import accumulate_dtype

_REDUCTIONS = ("mean", "sum", "none")
_STATISTICS = 4  # numbers of each token that ranks exchange: see _local_stats


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
    """F.cross_entropy of logits cut over the ranks along the vocabulary, which is the last dim here.

    Each rank sends four numbers per token: maximum, sum of exponentials, the target's logit, sum of logits. With
    p = softmax(logits), loss = lse - (1 - s) * logits[target] - s * mean(logits), s the label smoothing.

    Args:
        logits_shard: [..., v], this rank's part of the vocabulary.
        target: [...], int64 class indices of the whole vocabulary or `ignore_index`; the same on all ranks.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        label_smoothing: 0 to 1.
        ignore_index: a target that counts neither in the loss nor in the gradient.
        reduction: "mean" over the targets that count, "sum", or "none" for a loss per token (0 where ignored).
        vocab_size: length of the vocabulary over all ranks, where the parts (as torch.chunk cuts) are not all equal.

    Returns:
        A scalar, or [...] for "none"; float32 (float64 for float64 logits), in which everything is computed. As with
        F.cross_entropy the mean is NaN where every target is ignored.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        loss = vocab_parallel_cross_entropy(lm_head(hidden), labels, group=mesh["tp"])

    Source: the parallel loss of Shoeybi et al., "Megatron-LM", 2019; label smoothing of Szegedy et al., 2016.
    """
    check_tensor("logits_shard", logits_shard)
    _check_target(target, logits_shard)
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, (int, float)):
        raise TypeError(f"label_smoothing must be a float, not {type(label_smoothing).__name__}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be between 0 and 1.")
    check_int("ignore_index", ignore_index)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}.")
    name, size, rank = group_identity(group)
    vocab = total_size("vocab_size", vocab_size, logits_shard.shape[-1], size, rank, "the last dim of logits_shard")
    losses: Tensor
    losses, _ = VOCAB_PARALLEL_CROSS_ENTROPY(logits_shard, target, name, vocab, float(label_smoothing), ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _check_target(target: Any, logits_shard: Tensor) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, not {type(target).__name__}.")
    if target.dtype != torch.int64:
        raise TypeError(f"target has dtype {target.dtype}; it must be int64 class indices (no class probabilities).")
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; it must be {tuple(logits_shard.shape[:-1])}, one for each row of "
            f"logits_shard of shape {tuple(logits_shard.shape)} (the vocabulary is the last dim)."
        )
    if target.device != logits_shard.device:
        raise ValueError(f"target is on {target.device}, but logits_shard on {logits_shard.device}; move one of them.")


def _schedule(
    logits_shard: Tensor, target: Tensor, group: str, vocab_size: int, label_smoothing: float, ignore_index: int
) -> Schedule:
    dtype = accumulate_dtype(logits_shard.dtype)
    return select_schedule(
        "vocab_parallel_cross_entropy", group_by_name(group), dtype, target.device, target.numel(), None, _STATISTICS
    )


def _forward(
    logits_shard: Tensor, target: Tensor, group: str, vocab_size: int, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(loss per token, log sum exp over the whole vocabulary)."""
    known = group_by_name(group)
    counts = target != ignore_index
    if target.device.type == "cpu":  # on a GPU the question would stop the host
        wrong = counts & ((target < 0) | (target >= vocab_size))
        if wrong.any():
            raise ValueError(
                f"target holds {target[wrong][0].item()}; class indices are 0 to {vocab_size - 1}, "
                f"or ignore_index={ignore_index}."
            )
    stats = _local_stats(logits_shard, target, shard_range(vocab_size, known.size, known.rank), label_smoothing != 0.0)
    rows = target.numel()
    schedule = _schedule(logits_shard, target, group, vocab_size, label_smoothing, ignore_index)
    everyone = schedule.all_gather(stats, gather_dim=0, gather_size=None).wait()
    maximum, exp_sum, target_logit, logit_sum = everyone.view(known.size, rows, _STATISTICS).unbind(-1)
    top = maximum.amax(0)
    # exp(-inf - -inf) is NaN: a rank (or all of them) may have nothing but -inf to offer.
    shift = torch.where(top.isinf(), torch.zeros_like(top), top)
    scaled = exp_sum * torch.exp(maximum - shift)
    # lse - target, but from the shift, so that nothing cancels where the target is (nearly) the maximum.
    log_sum = torch.log(_sum(scaled))
    log_sum_exp = log_sum + shift
    losses = log_sum + (1.0 - label_smoothing) * (shift - _sum(target_logit))
    if label_smoothing != 0.0:
        losses = losses + label_smoothing * (shift - _sum(logit_sum) / vocab_size)
    losses = torch.where(counts.reshape(-1), losses, torch.zeros_like(losses))
    return losses.view(target.shape), log_sum_exp.view(target.shape)


def _local_stats(logits_shard: Tensor, target: Tensor, own: tuple[int, int], smoothed: bool) -> Tensor:
    """[tokens, 4] of this rank's part: maximum, sum of exp(logit - maximum), the target's logit or 0, sum of logits."""
    dtype = accumulate_dtype(logits_shard.dtype)
    logits = as_rows(logits_shard).to(dtype)
    stats = logits.new_zeros((logits.shape[0], _STATISTICS))
    if logits.shape[-1] == 0:
        stats[:, 0] = -torch.inf
        return stats
    stats[:, 0] = logits.amax(-1)
    shift = torch.where(stats[:, 0].isinf(), torch.zeros_like(stats[:, 0]), stats[:, 0])
    stats[:, 1] = torch.exp(logits - shift[:, None]).sum(-1)
    local, here = _local_target(target, own)
    stats[:, 2] = torch.where(here, logits.gather(-1, local[:, None])[:, 0], 0.0)
    if smoothed:
        stats[:, 3] = logits.sum(-1)
    # Sums of exponentials are relative to the shift, so send that: equal to the maximum but where it is infinite.
    stats[:, 0] = torch.where(stats[:, 1] > 0, shift, stats[:, 0])
    return stats


def _local_target(target: Tensor, own: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Targets as indices into this rank's vocabulary, and which of them really are there (the others point to 0)."""
    flat = target.reshape(-1)
    here = (flat >= own[0]) & (flat < own[1])
    return torch.where(here, flat - own[0], 0), here


def _sum(terms: Tensor) -> Tensor:
    """Over ranks, in rank order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _fake(
    logits_shard: Tensor, target: Tensor, group: str, vocab_size: int, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(logits_shard.dtype)
    return logits_shard.new_empty(target.shape, dtype=dtype), logits_shard.new_empty(target.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    logits_shard, target, ctx.group, ctx.vocab_size, ctx.label_smoothing, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits_shard, target, output[1])


def _backward(ctx: Any, d_losses: Tensor, _: Tensor) -> tuple[Any, ...]:
    """d logits = (softmax - (1 - s) * onehot(target) - s / V) * d loss; local, because lse is known."""
    logits_shard, target, log_sum_exp = ctx.saved_tensors
    known = group_by_name(ctx.group)
    d_rows = torch.where(target != ctx.ignore_index, d_losses, torch.zeros_like(d_losses))[..., None]
    d_logits = torch.exp(logits_shard.to(log_sum_exp.dtype) - log_sum_exp[..., None])
    if ctx.label_smoothing != 0.0:
        d_logits = d_logits - ctx.label_smoothing / ctx.vocab_size
    d_logits = d_logits * d_rows
    if logits_shard.shape[-1] > 0:
        local, here = _local_target(target, shard_range(ctx.vocab_size, known.size, known.rank))
        d_target = torch.where(here.view(target.shape)[..., None], (ctx.label_smoothing - 1.0) * d_rows, 0.0)
        d_logits = d_logits.scatter_add(-1, local.view(target.shape)[..., None], d_target)
    return d_logits.to(logits_shard.dtype), None, None, None, None, None


VOCAB_PARALLEL_CROSS_ENTROPY = CustomOp(
    "vocab_parallel_cross_entropy(Tensor logits_shard, Tensor target, str group, SymInt vocab_size, "
    "float label_smoothing, int ignore_index) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
