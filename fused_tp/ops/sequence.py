"""Which tokens of a sequence a rank holds, and getting tensors in and out of that order."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fused_tp.ops.arguments import any_dim, check_int, check_local
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.ring_plan import check_layout, local_length, position_ranges
from fused_tp.schedules.select import select_schedule

# What every transport has a name for; anything else (bool, complex, float8, ...) moves as its bytes.
_MOVED_AS_THEY_ARE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


def sequence_positions(
    seq_len: int, *, group: GroupLike, layout: str = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """Global positions of the tokens that this rank holds, ascending: what position embeddings need.

    Args:
        seq_len: length of the whole sequence, in tokens.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag" (chunks r and 2W-1-r of 2W, sizes as torch.tensor_split) or "contiguous" (chunk r of W).
        device: of the result; None is the default device.

    Returns:
        int64 [seq_local].

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        cos, sin = rotary(sequence_positions(4096, group=mesh["cp"]))
    """
    check_layout(layout)
    _check_length(seq_len)
    _, size, rank = group_identity(group)
    ranges = position_ranges(seq_len, size, rank, layout)
    return torch.cat([torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in ranges])


def shard_sequence(x: Tensor, dim: int, *, group: GroupLike, layout: str = "zigzag") -> Tensor:
    """This rank's tokens of `x`, which all ranks hold in full.

    The backward gathers the shards' gradients, so that every rank gets the gradient of all of `x`, as `scatter` does.

    Args:
        x: any shape and dtype, the same on all ranks; the sequence runs along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag" or "contiguous", see `sequence_positions`.

    Returns:
        A new tensor like `x` with only this rank's tokens along `dim`; there may be none of them.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.

    Example:
        hidden = shard_sequence(hidden, 1, group=mesh["cp"])
    """
    dim = _check(x, "x", dim, layout)
    return SHARD_SEQUENCE(x, dim, layout, group_identity(group)[0])


def unshard_sequence(
    x_shard: Tensor, dim: int, *, group: GroupLike, layout: str = "zigzag", seq_len: int | None = None
) -> Tensor:
    """The whole of what `shard_sequence` cut, in the order of the sequence, on all ranks.

    The backward keeps this rank's tokens of the gradient, which is taken to be the same on all ranks.

    Args:
        x_shard: any shape and dtype; this rank's tokens along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag" or "contiguous", as given to `shard_sequence`.
        seq_len: length of the whole sequence, where the ranks do not all hold equally many tokens.

    Returns:
        A new tensor like `x_shard` with `seq_len` tokens along `dim`.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        logits = unshard_sequence(logits, 1, group=mesh["cp"], seq_len=seq_len)
    """
    dim = _check(x_shard, "x_shard", dim, layout)
    name, size, rank = group_identity(group)
    return UNSHARD_SEQUENCE(x_shard, dim, layout, _total(seq_len, x_shard.shape[dim], size, rank, layout), name)


def _check(x: Any, name: str, dim: Any, layout: Any) -> int:
    check_local(name, x)
    check_layout(layout)
    return any_dim("dim", dim, name, x)


def _check_length(seq_len: Any) -> None:
    check_int("seq_len", seq_len)
    if seq_len < 0:
        raise ValueError(f"seq_len is {seq_len}; it must be at least 0.")


def _total(seq_len: Any, length: int, world_size: int, rank: int, layout: str) -> int:
    if seq_len is None:
        return length * world_size
    _check_length(seq_len)
    wanted = local_length(seq_len, world_size, rank, layout)
    if wanted != length:
        raise ValueError(
            f"seq_len={seq_len} in layout {layout!r} gives rank {rank} of {world_size} {wanted} tokens, but x_shard "
            f"holds {length}."
        )
    return int(seq_len)


def _shard(x: Tensor, dim: int, layout: str, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    ranges = position_ranges(x.shape[dim], group.size, group.rank, layout)
    return torch.cat([x.narrow(dim, r.start, len(r)) for r in ranges], dim).contiguous()


def _shard_fake(x: Tensor, dim: int, layout: str, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    length = local_length(x.shape[dim], group.size, group.rank, layout)
    return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))


def _unshard_schedule(x_shard: Tensor, dim: int, layout: str, seq_len: int, group_name: str) -> Schedule | None:
    group = group_by_name(group_name)
    row = prod(x_shard.shape[:dim]) * prod(x_shard.shape[dim + 1 :])
    if row * seq_len == 0:
        return None
    dtype = x_shard.dtype
    if dtype not in _MOVED_AS_THEY_ARE:
        dtype, row = torch.uint8, row * dtype.itemsize
    rows = max(local_length(seq_len, group.size, rank, layout) for rank in range(group.size))
    return select_schedule("all_gather", group, dtype, x_shard.device, rows * group.size, None, row)


def _unshard(x_shard: Tensor, dim: int, layout: str, seq_len: int, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    lengths = [local_length(seq_len, group.size, rank, layout) for rank in range(group.size)]
    out = x_shard.new_empty((*x_shard.shape[:dim], seq_len, *x_shard.shape[dim + 1 :]))
    schedule = _unshard_schedule(x_shard, dim, layout, seq_len, group_name)
    if schedule is None:
        return out
    # Shards differ by a token or two; padded to the longest, one plain all-gather moves them.
    rows = max(lengths)
    padded = x_shard.new_zeros((rows, *x_shard.shape[:dim], *x_shard.shape[dim + 1 :]))
    padded[: x_shard.shape[dim]].copy_(x_shard.movedim(dim, 0))
    bits = padded if padded.dtype in _MOVED_AS_THEY_ARE else padded.unsqueeze(-1).view(torch.uint8)
    everyone = schedule.all_gather(bits, gather_dim=0, gather_size=None).wait()
    everyone = everyone.view(padded.dtype).view(-1, *padded.shape[1:])
    whole = out.movedim(dim, 0)
    for rank in range(group.size):
        start = rank * rows
        for positions in position_ranges(seq_len, group.size, rank, layout):
            whole[positions.start : positions.stop].copy_(everyone[start : start + len(positions)])
            start += len(positions)
    return out


def _unshard_fake(x_shard: Tensor, dim: int, layout: str, seq_len: int, group_name: str) -> Tensor:
    return x_shard.new_empty((*x_shard.shape[:dim], seq_len, *x_shard.shape[dim + 1 :]))


def _shard_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.dim, ctx.layout, ctx.group = inputs
    ctx.seq_len = x.shape[ctx.dim]


def _shard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return UNSHARD_SEQUENCE(grad, ctx.dim, ctx.layout, ctx.seq_len, ctx.group), None, None, None


def _unshard_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.dim, ctx.layout, _, ctx.group = inputs


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return SHARD_SEQUENCE(grad, ctx.dim, ctx.layout, ctx.group), None, None, None, None


SHARD_SEQUENCE = CustomOp(
    "shard_sequence(Tensor x, int dim, str layout, str group) -> Tensor",
    _shard,
    _shard_fake,
    _shard_setup,
    _shard_backward,
)

UNSHARD_SEQUENCE = CustomOp(
    "unshard_sequence(Tensor x_shard, int dim, str layout, SymInt seq_len, str group) -> Tensor",
    _unshard,
    _unshard_fake,
    _unshard_setup,
    _unshard_backward,
    _unshard_schedule,
)
