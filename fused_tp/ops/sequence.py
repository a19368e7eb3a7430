"""Which tokens of a sequence a rank holds, and getting tensors in and out of that order."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.layout import Tokens, all_tokens, check_layout, local_length
from fused_tp.attention.spec import read_bounds
from fused_tp.ops.arguments import any_dim, check_int, check_local
from fused_tp.ops.attention_arguments import on_host
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime import settings
from fused_tp.runtime.errors import RankMismatchError
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.registry import select_schedule
from fused_tp.transport.base import checksum, first_apart

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
_CHECKSUM_BYTES = 3


def sequence_positions(
    seq_len: int,
    *,
    group: GroupLike,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    within_documents: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of the tokens that this rank holds: what position embeddings need.

    Args:
        seq_len: length of the whole sequence, in tokens.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag" (chunks r and 2W-1-r of 2W, sizes as torch.tensor_split), "contiguous" (chunk r of W), or
            "balanced": as many tokens as with "contiguous", of documents that stay whole where they can, so that all
            ranks have nearly the same attention to compute (`fused_tp.sequence_balance` tells).
        cu_seqlens: int32 or int64 [documents + 1], where packed documents begin, and the end: (0, ..., seq_len). Needed
            for "balanced" and `within_documents`. Pass it on the CPU: from elsewhere every call copies it there.
        within_documents: count from the begin of each document, as rotary embeddings of packed documents do, and not
            from that of the sequence.
        device: of the result; None is the default device.

    Returns:
        int64 [seq_local]; ascending, but from document to document where `within_documents`.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        cos, sin = rotary(sequence_positions(4096, group=mesh["cp"]))
    """
    bounds = _checked_documents(layout, cu_seqlens)
    _check_length(seq_len)
    if within_documents and bounds is None:
        raise ValueError("within_documents=True counts from where documents begin; pass cu_seqlens, which says where.")
    name, size, rank = group_identity(group)
    if bounds is not None:
        positions = SEQUENCE_POSITIONS(bounds, seq_len, layout, bool(within_documents), name)
        return positions.to(torch.empty(0, device=device).device)  # the default device where None
    ranges = all_tokens(seq_len, size, layout)[rank].ranges
    parts = [torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def shard_sequence(
    x: Tensor, dim: int, *, group: GroupLike, layout: str = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """This rank's tokens of `x`, which all ranks hold in full.

    The backward gathers the shards' gradients, so that every rank gets the gradient of all of `x`, as `scatter` does.

    Args:
        x: any shape and dtype, the same on all ranks; the sequence runs along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag", "contiguous" or "balanced", see `sequence_positions`.
        cu_seqlens: int32 or int64 [documents + 1], the same on all ranks: needed for "balanced", see
            `sequence_positions`; best on the CPU.

    Returns:
        A new tensor like `x` with only this rank's tokens along `dim`; there may be none of them.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.

    Example:
        hidden = shard_sequence(hidden, 1, group=mesh["cp"])
    """
    dim = _checked_dim(x, "x", dim)
    bounds = _checked_documents(layout, cu_seqlens)
    return SHARD_SEQUENCE(x, dim, layout, bounds, group_identity(group)[0])


def unshard_sequence(
    x_shard: Tensor,
    dim: int,
    *,
    group: GroupLike,
    layout: str = "zigzag",
    seq_len: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole of what `shard_sequence` cut, in the order of the sequence, on all ranks.

    The backward keeps this rank's tokens of the gradient, which is taken to be the same on all ranks.

    Args:
        x_shard: any shape and dtype; this rank's tokens along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout, cu_seqlens: as given to `shard_sequence`.
        seq_len: length of the whole sequence, where the ranks do not all hold equally many tokens.

    Returns:
        A new tensor like `x_shard` with `seq_len` tokens along `dim`.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not arrive, or cut another sequence
            or in another layout (compared on CPU always, elsewhere with FUSED_TP_CHECK=1).

    Example:
        logits = unshard_sequence(logits, 1, group=mesh["cp"], seq_len=seq_len)
    """
    dim = _checked_dim(x_shard, "x_shard", dim)
    bounds = _checked_documents(layout, cu_seqlens)
    name, size, rank = group_identity(group)
    total = _total(seq_len, x_shard.shape[dim], size, rank, layout)
    return UNSHARD_SEQUENCE(x_shard, dim, layout, total, bounds, name)


def _checked_dim(x: Any, name: str, dim: Any) -> int:
    check_local(name, x)
    return any_dim("dim", dim, name, x)


def _checked_documents(layout: Any, cu_seqlens: Any) -> Tensor | None:
    """On the host. Their values are checked where they are read: in the op, which a compiler does not look into."""
    bounds = on_host("cu_seqlens", cu_seqlens)
    check_layout(layout, documents=bounds is not None)
    return bounds


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


def _everyone(seq_len: int, world_size: int, layout: str, cu_seqlens: Tensor | None) -> tuple[Tokens, ...]:
    return all_tokens(seq_len, world_size, layout, read_bounds("cu_seqlens", cu_seqlens, seq_len))


def _positions(cu_seqlens: Tensor, seq_len: int, layout: str, within_documents: bool, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    indices = _everyone(seq_len, group.size, layout, cu_seqlens)[group.rank].indices
    if within_documents:
        begins = cu_seqlens[:-1].numpy().astype(np.int64)
        return torch.from_numpy(indices - begins[np.searchsorted(begins, indices, side="right") - 1])
    return torch.from_numpy(indices.copy())


def _positions_fake(cu_seqlens: Tensor, seq_len: int, layout: str, within_documents: bool, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    return cu_seqlens.new_empty(local_length(seq_len, group.size, group.rank, layout), dtype=torch.int64)


def _shard(x: Tensor, dim: int, layout: str, cu_seqlens: Tensor | None, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    ranges = _everyone(x.shape[dim], group.size, layout, cu_seqlens)[group.rank].ranges
    return torch.cat([x.narrow(dim, r.start, len(r)) for r in ranges or (range(0),)], dim).contiguous()


def _shard_fake(x: Tensor, dim: int, layout: str, cu_seqlens: Tensor | None, group_name: str) -> Tensor:
    group = group_by_name(group_name)
    length = local_length(x.shape[dim], group.size, group.rank, layout)
    return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))


def _unshard_schedule(
    x_shard: Tensor, dim: int, layout: str, seq_len: int, cu_seqlens: Tensor | None, group_name: str
) -> Schedule | None:
    group = group_by_name(group_name)
    row = prod(x_shard.shape[:dim]) * prod(x_shard.shape[dim + 1 :])
    if row * seq_len == 0:
        return None
    dtype = x_shard.dtype
    if dtype not in _MOVED_AS_THEY_ARE:
        dtype, row = torch.uint8, row * dtype.itemsize
    rows = max(local_length(seq_len, group.size, rank, layout) for rank in range(group.size))
    return select_schedule("all_gather", group, dtype, x_shard.device, rows * group.size, None, row)


def _unshard(
    x_shard: Tensor, dim: int, layout: str, seq_len: int, cu_seqlens: Tensor | None, group_name: str
) -> Tensor:
    group = group_by_name(group_name)
    held = _everyone(seq_len, group.size, layout, cu_seqlens)
    out = x_shard.new_empty((*x_shard.shape[:dim], seq_len, *x_shard.shape[dim + 1 :]))
    schedule = _unshard_schedule(x_shard, dim, layout, seq_len, cu_seqlens, group_name)
    if schedule is None:
        return out
    # Shards differ by a token or two; padded to the longest, one plain all-gather moves them.
    # Behind them, in one row or a few, is what all ranks must have been called with.
    longest, row = max(tokens.length for tokens in held), (*x_shard.shape[:dim], *x_shard.shape[dim + 1 :])
    checked = x_shard.device.type == "cpu" or settings.check_ranks()
    rows = longest + (-(-_CHECKSUM_BYTES // (prod(row) * x_shard.itemsize)) if checked else 0)
    padded = x_shard.new_zeros((rows, *row))
    padded[: x_shard.shape[dim]].copy_(x_shard.movedim(dim, 0))
    words = _in_words(x_shard, dim, layout, seq_len, cu_seqlens) if checked else ""
    if checked:
        _checksums(padded, 1).copy_(torch.tensor(list(checksum(words).to_bytes(_CHECKSUM_BYTES, "little"))))
    bits = padded if padded.dtype in _MOVED_AS_THEY_ARE else padded.unsqueeze(-1).view(torch.uint8)
    try:
        everyone = schedule.all_gather(bits, gather_dim=0, gather_size=None).wait()
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{str(error).rstrip('.')}. It is the all-gather of an unshard_sequence, of seq_len={seq_len} on rank "
            f"{group.rank}; where ranks hold unequally many tokens, pass seq_len, the length of the whole sequence."
        ) from error
    everyone = everyone.view(padded.dtype).view(-1, *padded.shape[1:])
    if checked:
        _check_alike(_checksums(everyone, group.size), words, group.rank)
    whole = out.movedim(dim, 0)
    for rank, tokens in enumerate(held):
        start = rank * rows
        for r in tokens.ranges:
            whole[r.start : r.stop].copy_(everyone[start : start + len(r)])
            start += len(r)
    return out


def _in_words(x_shard: Tensor, dim: int, layout: str, seq_len: int, cu_seqlens: Tensor | None) -> str:
    documents = "" if cu_seqlens is None else f", cu_seqlens of checksum {checksum(repr(cu_seqlens.tolist()))}"
    shape = [*x_shard.shape[:dim], seq_len, *x_shard.shape[dim + 1 :]]
    return f"layout={layout!r}, dim={dim}, the whole of shape {shape} in {x_shard.dtype}{documents}"


def _checksums(rows: Tensor, ranks: int) -> Tensor:
    """uint8 [ranks, _CHECKSUM_BYTES]: where the rows of so many ranks have the bytes of their checksums."""
    return rows.view(ranks, -1).view(torch.uint8)[:, -_CHECKSUM_BYTES:]


def _check_alike(checksums: Tensor, words: str, rank: int) -> None:
    found = [int.from_bytes(bytes(theirs), "little") for theirs in checksums.tolist()]
    if other := first_apart(found):
        raise RankMismatchError(
            f"Ranks 0 and {other} put together different sequences, or cut in different ways, in unshard_sequence or "
            f"the backward of shard_sequence (checksums {found[0]} and {found[other]}); rank {rank} with {words}. "
            "They must be the same on all."
        )


def _unshard_fake(
    x_shard: Tensor, dim: int, layout: str, seq_len: int, cu_seqlens: Tensor | None, group_name: str
) -> Tensor:
    return x_shard.new_empty((*x_shard.shape[:dim], seq_len, *x_shard.shape[dim + 1 :]))


def _shard_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.dim, ctx.layout, cu_seqlens, ctx.group = inputs
    ctx.seq_len = x.shape[ctx.dim]
    ctx.save_for_backward(cu_seqlens)


def _shard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    return UNSHARD_SEQUENCE(grad, ctx.dim, ctx.layout, ctx.seq_len, cu_seqlens, ctx.group), None, None, None, None


def _unshard_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.dim, ctx.layout, _, cu_seqlens, ctx.group = inputs
    ctx.save_for_backward(cu_seqlens)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    return SHARD_SEQUENCE(grad, ctx.dim, ctx.layout, cu_seqlens, ctx.group), None, None, None, None, None


SEQUENCE_POSITIONS = CustomOp(
    "sequence_positions(Tensor cu_seqlens, SymInt seq_len, str layout, bool within_documents, str group) -> Tensor",
    _positions,
    _positions_fake,
)

SHARD_SEQUENCE = CustomOp(
    "shard_sequence(Tensor x, int dim, str layout, Tensor? cu_seqlens, str group) -> Tensor",
    _shard,
    _shard_fake,
    _shard_setup,
    _shard_backward,
)

UNSHARD_SEQUENCE = CustomOp(
    "unshard_sequence(Tensor x_shard, int dim, str layout, SymInt seq_len, Tensor? cu_seqlens, str group) -> Tensor",
    _unshard,
    _unshard_fake,
    _unshard_setup,
    _unshard_backward,
    _unshard_schedule,
)
