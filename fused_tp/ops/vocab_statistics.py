"""Statistics of a rank's shard of the logits, from which all ranks compute the cross entropy of each token.

Each rank sends four numbers per token, in this order: the maximum m_r of its logits, the sum of exp(logit - m_r), the
target's logit (0 on ranks that do not hold it), and the sum of its logits. With M = max over ranks of m_r, s the label
smoothing and V the size of the full vocabulary:

    lse  = M + log(sum over ranks of exp_sum_r * exp(m_r - M))
    loss = lse - (1 - s) * logit[target] - s * (sum of logits) / V
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.backends.schedule import Schedule
from fused_tp.core import settings
from fused_tp.core.availability import has_triton
from fused_tp.core.group import Group
from fused_tp.core.pending import check_equal_checksums, checksum
from fused_tp.ops.arguments import check_device, check_local, check_shape

REDUCTIONS = ("mean", "sum", "none")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_STATISTICS = 4  # numbers per token that ranks exchange

# Bytes of the logits that linear_cross_entropy holds at a time, and least rows of a chunk: each chunk reads the other
# operand, and with so many rows multiplying takes far longer.
MAX_CHUNK_BYTES, MIN_CHUNK_ROWS = 32 << 20, 256


def rows_per_chunk(num_columns: int, num_ranks: int, element_size: int) -> int:
    """Return the number of rows in a chunk of logits of `num_columns` over all ranks; equal on all ranks."""
    return max(MIN_CHUNK_ROWS, MAX_CHUNK_BYTES // max(1, -(-num_columns // num_ranks) * element_size))


def exceeds_chunk(num_rows: int, num_columns: int, num_ranks: int, element_size: int) -> bool:
    """True if a rank's logits of `num_columns` over all ranks are more than one chunk; equal on all ranks."""
    return num_rows * -(-num_columns // num_ranks) * element_size > MAX_CHUNK_BYTES


def check_reduction(reduction: Any) -> None:
    """Check that `reduction` is one of REDUCTIONS."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")


def check_target(target: Any, name: str, t: Tensor, shape: Sequence[int], last_dim: str) -> None:
    """Check that `target` holds an index for each row of `t`, whose rows have `shape`; `last_dim` is for the error."""
    check_local("target", target)
    if target.dtype != torch.int64:
        raise TypeError(f"target has dtype {target.dtype}; it must be int64 class indices, not class probabilities.")
    reason = f"one for each row of {name} of shape {tuple(t.shape)} ({last_dim} is the last dim)"
    check_shape("target", target, shape, reason)
    check_device("target", target, name, t)


def check_target_range(target: Tensor, is_counted: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Check on a CPU that all counted targets are in the vocabulary. On a GPU this would synchronize the host."""
    if target.device.type != "cpu":
        return
    is_invalid = is_counted & ((target < 0) | (target >= vocab_size))
    if is_invalid.any():
        raise ValueError(
            f"target holds {target[is_invalid][0].item()}; class indices are 0 to {vocab_size - 1}, "
            f"or ignore_index={ignore_index}."
        )


def find_local_targets(target: Tensor, vocab_range: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (index of each target in the vocabulary shard `vocab_range`, True for targets in the shard), both [T].

    The index of a target that is not in the shard is 0.
    """
    flat_target = target.reshape(-1)
    is_local = (flat_target >= vocab_range[0]) & (flat_target < vocab_range[1])
    return torch.where(is_local, flat_target - vocab_range[0], 0), is_local


def loss_kernels(x: Tensor) -> Any:
    """Return the module of Triton kernels for the cross entropy of `x`, on GPUs; None if torch's operations serve.

    They do where they are traced (torch.compile traces a backward that is no op of its own).
    """
    is_traced = torch._C._len_torch_dispatch_stack() > 0 or type(x) not in (Tensor, nn.Parameter)
    if not x.is_cuda or x.dtype not in _KERNEL_DTYPES or is_traced or not has_triton():
        return None
    from fused_tp.triton_kernels import cross_entropy

    return cross_entropy


def fill_statistics(
    stats: Tensor, logits: Tensor, target: Tensor, vocab_range: tuple[int, int], *, needs_logit_sum: bool
) -> None:
    """Write the statistics of `logits` [T, v], in fp32 or fp64, to `stats` [T, 4], which must be zeros."""
    if logits.shape[-1] == 0:
        stats[:, 0] = -torch.inf
        return
    maximum = logits.amax(-1)
    shift = torch.where(maximum.isinf(), torch.zeros_like(maximum), maximum)
    stats[:, 1] = (logits - shift[:, None]).exp_().sum(-1)
    local_index, is_local = find_local_targets(target, vocab_range)
    stats[:, 2] = torch.where(is_local, logits.gather(-1, local_index[:, None])[:, 0], 0.0)
    if needs_logit_sum:
        stats[:, 3] = logits.sum(-1)
    # The sums of exponentials are relative to the shift, so send the shift. It is the maximum unless that is infinite.
    stats[:, 0] = torch.where(stats[:, 1] > 0, shift, maximum)


def exchange_statistics(
    schedule: Schedule, rows: Tensor, target: Tensor, call: str, arguments: str, group: Group
) -> Tensor:
    """Return the statistics of all ranks, [W, T, 4], from this rank's in `rows` [T + 1, 4].

    The last row carries checksums, which on CPUs, or with FUSED_TP_CHECK=1, tell ranks that passed different arguments
    or targets. (On a GPU, the checksum of the targets synchronizes the host.)

    Args:
        target: the targets to compare.
        call: name of the op, for the error.
        arguments: description of the arguments, equal on all ranks of a correct call.
    """
    is_checked = group.size > 1 and (rows.device.type == "cpu" or settings.check_ranks())
    if is_checked:
        checksums = checksum(arguments), checksum(target.cpu().contiguous().numpy())
        rows[-1, :2] = torch.tensor(checksums, dtype=rows.dtype, device="cpu")
    gathered = schedule.all_gather(rows, gather_dim=0, gather_size=None).wait().view(group.size, -1, NUM_STATISTICS)
    if is_checked:
        arguments_checksums, target_checksums = gathered[:, -1, :2].T.tolist()
        difference, remedy = f"call {call} with different", "Pass the same on all ranks."
        check_equal_checksums(
            arguments_checksums, f"{difference} keywords", f"; rank {group.rank} passed {arguments}. {remedy}"
        )
        check_equal_checksums(target_checksums, f"{difference} targets", f", of shape {tuple(target.shape)}. {remedy}")
    return gathered[:, :-1]


def combine_statistics(gathered: Tensor, label_smoothing: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (loss, log-sum-exp over the full vocabulary) of each token, both [T], from the statistics [W, T, 4]."""
    maximum, exp_sum, target_logit, logit_sum = gathered.unbind(-1)
    global_maximum = maximum.amax(0)
    # exp(-inf - -inf) would be NaN: the logits of a rank, or of all ranks, may all be -inf.
    shift = torch.where(global_maximum.isinf(), torch.zeros_like(global_maximum), global_maximum)
    scaled_exp_sum = exp_sum * torch.exp(maximum - shift)
    # The loss is lse - target logit. Both are computed relative to the shift, to avoid cancellation.
    log_sum = torch.log(_sum_over_ranks(scaled_exp_sum))
    losses = log_sum + (1.0 - label_smoothing) * (shift - _sum_over_ranks(target_logit))
    if label_smoothing != 0.0:
        losses = losses + label_smoothing * (shift - _sum_over_ranks(logit_sum) / vocab_size)
    return losses, log_sum + shift


def _sum_over_ranks(terms: Tensor) -> Tensor:
    """Sum `terms` [W, ...] over ranks, in rank order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
