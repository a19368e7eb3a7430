"""Cross entropy of a linear head that is sharded along the vocabulary; the logits are never whole in memory.

    z = hidden @ weight^T + bias        l = softcap * tanh(z * logit_scale / softcap)
    loss = lse - (1 - s) * l[target] - s * mean(l) + z_loss * lse^2
    dl = (softmax(l) * (1 + 2 * z_loss * lse) - (1 - s) * onehot(target) - s / V) * d_loss
    dz = dl * (1 - (l / softcap)^2) * logit_scale

Forward multiplies a chunk of rows by the weight, and keeps the statistics of the products (vocab_statistics.py; on GPUs
by triton_kernels/cross_entropy.py). Backward multiplies all rows by a chunk of the weight's rows, and overwrites these
products by their gradient. So each row of the weight's gradient is one sum, rounded once, and the gradient of the
hidden states is summed in fp32.

That takes four matmuls, where logits in memory need three. Rejected: gradients in forward, chunk by chunk of rows, as
in Liger, with three. The weight's gradient is then rounded to bfloat16 after each chunk (with 16 chunks, its error is
2.7 times as large), or is summed in fp32, in twice the memory of the weight. It also needs the factor of the loss in
forward, which float16 (loss scaling) and losses per token do not know there.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.backends.gemm import as_rows, linear, weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_by_name, group_identity
from fused_tp.core.partition import SymInt, shard_range
from fused_tp.core.pending import accumulate_dtype
from fused_tp.ops.arguments import (
    check_int,
    check_local,
    checked_linear,
    checked_number,
    normalize_token_dim,
    resized_shape,
    total_size,
)
from fused_tp.ops.collectives import all_gather, copy_to_group
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
    rows_per_chunk,
)

_BLOCK_BYTES = 4 << 20  # of logits converted to fp32 at a time, so that they stay in a CPU's cache


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    gather_dim: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_targets: int | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """F.cross_entropy of the logits hidden @ weight^T + bias, sharded along the vocabulary and never whole in memory.

    Instead of logits [T, v], a chunk of 32 MiB of them, or of 256 rows, exists at a time. Tokens whose target is
    `ignore_index` take no time on CPUs. Each rank sends four numbers per token, and the gradient of `hidden`. In the
    table, s is the label smoothing, V the size of the full vocabulary, and d_logits the gradient of the logits.

    =======  ==========================================================================
    forward  loss = lse - (1 - s) * logits[target] - s * mean(logits) + z_loss * lse^2
    dgrad    d_hidden [..., K] = all_reduce(d_logits @ weight); with gather_dim reduce_scatter
    wgrad    d_weight [v, K] = d_logits^T @ hidden; local
    dbias    d_bias [v] = sum of d_logits over tokens; local
    =======  ==========================================================================

    Args:
        hidden: [..., K], the same on all ranks; with `gather_dim` this rank's shard. float16, bfloat16, float32 or
            float64.
        weight: [v, K], this rank's rows of the head's weight.
        target: [...], int64 indices into the full vocabulary, or `ignore_index`; all tokens, equal on all ranks.
        bias: [v] or None.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_dim: token dim along which the ranks' hidden states are gathered (sequence parallelism), split as by
            torch.chunk; None if `hidden` is replicated.
        label_smoothing: 0 to 1.
        ignore_index: target value of tokens that are excluded from the loss and the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for a loss per token (0 if ignored).
        num_targets: divisor of "mean" instead of the number of targets in this call, as for the accumulation of
            gradients or for tokens that are sharded over other ranks too.
        logit_scale: factor of the logits.
        softcap: bound c of the logits, as c * tanh(logits / c); None for none.
        z_loss: weight of the squared log-sum-exp in the loss.
        vocab_size: length of the vocabulary over all ranks, if the shards (as by torch.chunk) are not all equal.

    Returns:
        A scalar, or [...] for "none", in float32 (float64 for float64 hidden states). As with F.cross_entropy, the mean
        is NaN if every target is ignored.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or was called with other
            keywords or targets (compared on CPU always, elsewhere with FUSED_TP_CHECK=1).

    Example:
        loss = linear_cross_entropy(hidden, lm_head.weight, labels, group=mesh["tp"])

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009; z-loss:
    Chowdhery et al., "PaLM", arXiv:2204.02311.
    """
    check_reduction(reduction)
    requested_size: Any = vocab_size  # None until it is checked
    loss = LossArgs(requested_size, label_smoothing, ignore_index, logit_scale, softcap, z_loss)
    check_local("target", target)
    # All is checked before hidden states are gathered: an invalid call on one rank must not leave its peers waiting.
    divisor = _divisor(reduction, num_targets, target, ignore_index)
    hidden, weight, bias = checked_linear("hidden", hidden, weight, bias, min_dims=2)
    loss = _checked_loss(loss, weight, group)
    if gather_dim is None:
        check_target(target, "hidden", hidden, hidden.shape[:-1], "K")
        if hidden.requires_grad:
            hidden = copy_to_group(hidden, group=group)
    else:
        gather_dim = normalize_token_dim("gather_dim", gather_dim, "hidden", hidden)
        num_tokens = target.shape[gather_dim] if target.ndim == hidden.ndim - 1 else 0
        shape = resized_shape(hidden, gather_dim, num_tokens)[:-1]
        check_target(target, "the gathered hidden", hidden, shape, "K")
        hidden = all_gather(hidden, gather_dim, group=group, gather_size=num_tokens)
    return gathered_linear_cross_entropy(hidden, weight, target, bias, divisor, reduction, loss, group=group)


def gathered_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    loss: LossArgs,
    *,
    group: GroupLike,
) -> Tensor:
    """Return `linear_cross_entropy` of replicated `hidden`, whose gradient is this rank's term of a sum over ranks.

    The results of `copy_to_group` and `all_gather` have such gradients. `divisor`, a scalar, divides the sum of losses.
    """
    hidden, weight, bias = checked_linear("hidden", hidden, weight, bias)
    result: Tensor
    result, _ = LINEAR_CROSS_ENTROPY(hidden, weight, bias, target, divisor, reduction, *loss, group)
    return result


def _divisor(reduction: str, num_targets: Any, target: Tensor, ignore_index: int) -> Tensor | None:
    """Return the divisor of the sum of losses, a scalar; None if it is 1."""
    if reduction != "mean":
        if num_targets is not None:
            raise ValueError(f'num_targets is the divisor of reduction="mean"; reduction is {reduction!r}.')
        return None
    if num_targets is None:
        return (target != ignore_index).sum()
    if isinstance(num_targets, Tensor):
        check_local("num_targets", num_targets)
        if num_targets.numel() != 1 or num_targets.is_complex() or num_targets.requires_grad:
            raise ValueError(
                f"num_targets is a tensor of shape {tuple(num_targets.shape)} and dtype {num_targets.dtype}; it must "
                "be one real number without a gradient."
            )
        return num_targets.reshape(()).to(target.device)
    number = checked_number("num_targets", num_targets, lambda x: isfinite(x) and x > 0, "above 0")
    return torch.full((), number, dtype=torch.float64, device=target.device)


class LossArgs(NamedTuple):
    """Keywords of `linear_cross_entropy` that define the loss of a token."""

    vocab_size: SymInt
    label_smoothing: float
    ignore_index: int
    logit_scale: float
    softcap: float | None
    z_loss: float


class _Args(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    divisor: Tensor | None
    reduction: str
    loss: LossArgs
    group: AnyGroup

    def __str__(self) -> str:
        keywords = ", ".join(f"{name}={value!r}" for name, value in self.loss._asdict().items())
        is_readable = self.divisor is not None and self.divisor.is_cpu  # a GPU would be synchronized
        num_targets = f", num_targets={self.divisor.item():g}" if is_readable and self.divisor is not None else ""
        bias = "" if self.bias is None else ", bias"
        return f"{self.hidden.dtype}{bias}, reduction={self.reduction!r}{num_targets}, {keywords}"


class _BackwardArgs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    log_sum_exp: Tensor  # of each token
    d_losses: Tensor  # of each token
    needs: list[bool]  # of hidden, weight and bias
    loss: LossArgs
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    check_target(a.target, "hidden", a.hidden, a.hidden.shape[:-1], "K")
    return a._replace(loss=_checked_loss(a.loss, a.weight, a.group))


def _checked_loss(loss: LossArgs, weight: Tensor, group: GroupLike) -> LossArgs:
    vocab_size, label_smoothing, ignore_index, logit_scale, softcap, z_loss = loss
    check_int("ignore_index", ignore_index)
    _, size, rank = group_identity(group)
    return LossArgs(
        total_size("vocab_size", vocab_size, weight.shape[0], size, rank, "dim 0 of weight"),
        checked_number("label_smoothing", label_smoothing, _is_fraction, "between 0 and 1"),
        ignore_index,
        checked_number("logit_scale", logit_scale, isfinite, "finite"),
        None if softcap is None else checked_number("softcap", softcap, _is_positive, "above 0 and finite"),
        checked_number("z_loss", z_loss, _is_not_negative, "0 or more, and finite"),
    )


def _is_fraction(x: float) -> bool:
    return 0.0 <= x <= 1.0


def _is_positive(x: float) -> bool:
    return x > 0.0 and isfinite(x)


def _is_not_negative(x: float) -> bool:
    return x >= 0.0 and isfinite(x)


def _key(a: _Args) -> ScheduleKey:
    dtype = accumulate_dtype(a.hidden.dtype)
    num_rows = prod(a.hidden.shape[:-1])
    return ScheduleKey("vocab_parallel_cross_entropy", dtype, a.hidden.device, num_rows, None, NUM_STATISTICS)


def _backward_key(a: _Args) -> ScheduleKey:
    """Return the key of the sum of d_hidden, which is the backward of `copy_to_group`."""
    return ScheduleKey.from_shard("all_reduce", a.hidden, a.hidden.shape, None, a.hidden.shape[-1])


def _chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Rows(NamedTuple):
    """Rows of hidden states whose logits are computed.

    Attributes:
        hidden: [T, K].
        target: [T].
        is_counted: [tokens], False for the tokens that are ignored.
        positions: of the T rows among all tokens; None if they are all tokens. On a GPU they are, because finding
            the others would synchronize the host.
    """

    hidden: Tensor
    target: Tensor
    is_counted: Tensor
    positions: Tensor | None

    @classmethod
    def counted(cls, a: _Args | _BackwardArgs) -> _Rows:
        hidden, target = as_rows(a.hidden), a.target.reshape(-1)
        is_counted = target != a.loss.ignore_index
        check_target_range(target, is_counted, a.loss.vocab_size, a.loss.ignore_index)
        if not hidden.is_cpu or is_counted.all():
            return cls(hidden, target, is_counted, None)
        positions = is_counted.nonzero()[:, 0]
        return cls(hidden[positions], target[positions], is_counted, positions)

    def select(self, values: Tensor) -> Tensor:
        """Return the T rows of `values` [tokens]; zeros for ignored tokens."""
        if self.positions is not None:
            return values[self.positions]
        return torch.where(self.is_counted, values, torch.zeros_like(values))

    def spread(self, values: Tensor) -> Tensor:
        """Return `values` [T, ...] at the positions of their rows among all tokens; zeros elsewhere."""
        if self.positions is None:
            return values
        shape = (len(self.is_counted), *values.shape[1:])
        return values.new_zeros(shape).index_copy_(0, self.positions, values)


def _forward(schedule: Schedule, a: _Args) -> tuple[Tensor, Tensor]:
    """Return (loss or losses, lse of each token).

    Ranks exchange the statistics of all tokens, also of ignored ones: what is sent depends on shapes only, so that
    ranks with different targets find out by their checksums.
    """
    group, rows, needs_logit_sum = group_by_name(a.group), _Rows.counted(a), a.loss.label_smoothing != 0.0
    vocab_range = shard_range(a.loss.vocab_size, group.size, group.rank)
    stats = a.hidden.new_zeros((len(rows.target), NUM_STATISTICS), dtype=accumulate_dtype(a.hidden.dtype))
    for chunk in _chunks(len(stats), rows_per_chunk(a.loss.vocab_size, group.size, a.hidden.element_size())):
        products = linear(rows.hidden[chunk], a.weight, a.bias)
        if (kernels := loss_kernels(products)) is not None:
            terms = {"scale": a.loss.logit_scale, "softcap": a.loss.softcap, "needs_logit_sum": needs_logit_sum}
            kernels.fill_statistics(stats[chunk], products, rows.target[chunk], vocab_range, **terms)
            continue
        for block in _blocks(products):
            logits = _scale_and_cap(a.loss, products[block].to(stats.dtype))
            target, block_stats = rows.target[chunk][block], stats[chunk][block]
            fill_statistics(block_stats, logits, target, vocab_range, needs_logit_sum=needs_logit_sum)
    checked_stats = torch.cat([rows.spread(stats), stats.new_zeros((1, NUM_STATISTICS))])
    gathered = exchange_statistics(schedule, checked_stats, a.target, "linear_cross_entropy", str(a), group)
    losses, log_sum_exp = combine_statistics(gathered, a.loss.label_smoothing, a.loss.vocab_size)
    if a.loss.z_loss != 0.0:
        losses = losses + a.loss.z_loss * log_sum_exp.square()
    losses = torch.where(rows.is_counted, losses, torch.zeros_like(losses))
    result = losses.view(a.target.shape) if a.reduction == "none" else losses.sum()
    return result if a.divisor is None else result / a.divisor, log_sum_exp


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return slices of rows of `logits` that fit into a CPU's cache; on other devices one slice of all rows."""
    num_rows, row_bytes = len(logits), max(1, logits.shape[-1]) * accumulate_dtype(logits.dtype).itemsize
    return _chunks(num_rows, max(1, _BLOCK_BYTES // row_bytes) if logits.is_cpu else max(1, num_rows))


def _scale_and_cap(loss: LossArgs, products: Tensor) -> Tensor:
    """Return the logits of `products`, hidden @ weight^T + bias."""
    if loss.softcap is None:
        return products if loss.logit_scale == 1.0 else products * loss.logit_scale
    return (products * (loss.logit_scale / loss.softcap)).tanh_().mul_(loss.softcap)


def _differentiate_(
    products: Tensor,
    loss: LossArgs,
    vocab_range: tuple[int, int],
    target: Tensor,
    log_sum_exp: Tensor,
    d_losses: Tensor,
) -> None:
    """Overwrite `products` [T, v] by their gradient, from the gradients `d_losses` [T] of the tokens' losses."""
    if products.shape[-1] == 0:
        return
    d_exp = d_losses if loss.z_loss == 0.0 else d_losses * (1.0 + 2.0 * loss.z_loss * log_sum_exp)
    d_smoothing = d_losses * (loss.label_smoothing / loss.vocab_size)
    d_target = d_losses * (loss.label_smoothing - 1.0)
    if (kernels := loss_kernels(products)) is not None:
        terms = {"scale": loss.logit_scale, "softcap": loss.softcap}
        d_terms = (log_sum_exp, d_exp, d_smoothing, d_target)
        kernels.fill_gradients(products, products, target, vocab_range, *d_terms, **terms)
        return
    local_index, is_local = find_local_targets(target, vocab_range)
    d_target = torch.where(is_local, d_target, 0.0)
    for block in _blocks(products):
        logits = _scale_and_cap(loss, products[block].to(log_sum_exp.dtype))
        d_logits = (logits - log_sum_exp[block, None]).exp_().mul_(d_exp[block, None])
        if loss.label_smoothing != 0.0:
            d_logits.sub_(d_smoothing[block, None])
        d_logits.scatter_add_(-1, local_index[block, None], d_target[block, None])
        if loss.softcap is not None:
            d_logits.mul_(1.0 - (logits / loss.softcap).square_())
        if loss.logit_scale != 1.0:
            d_logits.mul_(loss.logit_scale)
        products[block] = d_logits


def _fake(a: _Args) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(a.hidden.dtype)
    result = a.hidden.new_empty(a.target.shape if a.reduction == "none" else (), dtype=dtype)
    return result, a.hidden.new_empty(a.target.numel(), dtype=dtype)


# -- backward ---------------------------------------------------------------------------------------------------------


def _backward(s: SavedForBackward[_Args], d_result: Tensor, _: Tensor) -> dict[str, Any]:
    a, (log_sum_exp,), needs = s.args, s.outputs, [s.needs.hidden, s.needs.weight, s.needs.bias]
    d_losses = d_result if a.divisor is None else d_result / a.divisor
    gradients = LINEAR_CROSS_ENTROPY_BACKWARD.call_prepared(
        a.hidden,
        a.weight,
        a.bias,
        a.target,
        log_sum_exp,
        d_losses.expand(a.target.shape).reshape(-1),
        needs,
        *a.loss,
        a.group,
    )
    names = ("hidden", "weight", "bias")
    return {name: d for name, d, needed in zip(names, gradients, needs, strict=True) if needed}


def _compute_gradients(_: None, g: _BackwardArgs) -> list[Tensor]:
    """Return [d_hidden, d_weight, d_bias]; empty if not needed."""
    group, rows, dtype = group_by_name(g.group), _Rows.counted(g), g.log_sum_exp.dtype
    needs_hidden, needs_weight, needs_bias = g.needs
    # With the log-sum-exp of ignored tokens as well: exp(logit - 0) could be infinite, and 0 * infinity NaN.
    log_sum_exp = g.log_sum_exp if rows.positions is None else g.log_sum_exp[rows.positions]
    d_losses = rows.select(g.d_losses.to(dtype))
    d_hidden = rows.hidden.new_zeros(rows.hidden.shape if needs_hidden else (0,), dtype=dtype)
    d_weight = g.weight.new_empty(g.weight.shape if needs_weight else (0,))
    d_bias = g.weight.new_empty(g.weight.shape[:1] if needs_bias else (0,))
    vocab_start = shard_range(g.loss.vocab_size, group.size, group.rank)[0]
    for chunk in _chunks(len(g.weight), rows_per_chunk(max(1, len(rows.target)), 1, g.hidden.element_size())):
        weight = g.weight[chunk]
        products = linear(rows.hidden, weight, None if g.bias is None else g.bias[chunk])
        vocab_range = vocab_start + chunk.start, vocab_start + chunk.stop
        _differentiate_(products, g.loss, vocab_range, rows.target, log_sum_exp, d_losses)
        if needs_hidden:
            d_hidden += linear(products, weight.t())
        if needs_weight:
            d_weight[chunk] = weight_grad(products, rows.hidden)
        if needs_bias:
            d_bias[chunk] = products.sum(0, dtype=dtype)
    d_hidden = d_hidden.to(g.hidden.dtype)
    if needs_hidden:
        d_hidden = rows.spread(d_hidden).view(g.hidden.shape)
    return [d_hidden, d_weight, d_bias]


def _fake_backward(g: _BackwardArgs) -> list[Tensor]:
    shapes = g.hidden.shape, g.weight.shape, g.weight.shape[:1]
    return [g.hidden.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, g.needs, strict=True)]


LINEAR_CROSS_ENTROPY_BACKWARD: Op[_BackwardArgs] = Op(
    "linear_cross_entropy_backward", _BackwardArgs, "Tensor[]", _compute_gradients, _fake_backward
)


def _example(size: int, hidden: Tensor, weight: Tensor) -> _Args:
    loss = LossArgs(weight.shape[0] * size, 0.0, -100, 1.0, None, 0.0)
    return _Args(hidden, weight, None, hidden, None, "mean", loss, None)


LINEAR_CROSS_ENTROPY: Op[_Args] = Op(
    "linear_cross_entropy",
    _Args,
    "(Tensor, Tensor)",
    _forward,
    _fake,
    key=_key,
    backward_key=_backward_key,
    make_example_args=_example,
    prepare=_prepare,
    saves=("hidden", "weight", "bias", "target", "divisor", 1),
    backward=_backward,
    non_differentiable=(1,),
    has_local_backward=True,
)
