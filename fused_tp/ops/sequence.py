"""Positions of a rank's tokens, and conversion of tensors to and from sequence shards."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.layout import TokenRanges, check_layout, local_length, tokens_by_rank
from fused_tp.attention.spec import read_bounds
from fused_tp.backends.schedule import Schedule
from fused_tp.core import settings
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.group import GroupLike, group_by_name, group_identity
from fused_tp.core.partition import SymInt
from fused_tp.core.pending import check_equal_checksums, checksum
from fused_tp.ops.arguments import check_bool, check_int, check_local, normalize_dim, resized_shape
from fused_tp.ops.attention_arguments import move_to_cpu, total_length
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey

# Dtypes that every transport supports. Tensors of other dtypes (bool, complex, float8, ...) are sent as bytes.
_FLOAT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SENT_UNCHANGED_DTYPES = _FLOAT_DTYPES | {torch.int8, torch.uint8, torch.int32, torch.int64}
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
    """Return the positions of this rank's tokens in the sequence, for position embeddings.

    Args:
        seq_len: length of the whole sequence, in tokens.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag": rank r holds chunks r and 2W-1-r of 2W chunks (with the sizes of torch.tensor_split).
            "contiguous": rank r holds chunk r of W. "balanced": each rank holds as many tokens as with "contiguous",
            and all ranks have nearly equal attention work (see `fused_tp.sequence_balance`); documents are split only
            if necessary. "zigzag_documents", "contiguous_documents": each document is sharded by that layout, and its
            length must be a multiple of W.
        cu_seqlens: int32 or int64 [documents + 1], the starts of packed documents and the end: (0, ..., seq_len).
            Required for layouts of documents and `within_documents`. Pass it on the CPU, or every call copies it there.
        within_documents: return positions relative to the start of each document, for rotary embeddings of packed
            documents.
        device: device of the result; None: the default device.

    Returns:
        int64 [seq_local], ascending; with `within_documents`, ascending inside each document.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        cos, sin = rotary(sequence_positions(4096, group=mesh["cp"]))
    """
    bounds = _checked_documents(layout, cu_seqlens)
    check_int("seq_len", seq_len, minimum=0)
    check_bool(within_documents=within_documents)
    if within_documents and bounds is None:
        raise ValueError("within_documents=True needs the bounds of the documents; pass cu_seqlens.")
    if bounds is not None:
        positions: Tensor = SEQUENCE_POSITIONS(bounds, seq_len, layout, within_documents, group)
        # `Tensor.to` does not replace None by the default device, but torch.empty does.
        return positions.to(torch.empty(0, dtype=torch.int64, device=device).device)
    _, size, rank = group_identity(group)
    ranges = tokens_by_rank(seq_len, size, layout)[rank].ranges
    range_positions = [torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in ranges]
    return torch.cat(range_positions) if range_positions else torch.empty(0, dtype=torch.int64, device=device)


def shard_sequence(
    x: Tensor, dim: int, *, group: GroupLike, layout: str = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return this rank's tokens of the replicated `x`.

    Backward gathers the gradients of all shards, so every rank gets the gradient of the full `x`.

    Args:
        x: any shape and dtype, the same on all ranks; the sequence runs along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout: "zigzag", "contiguous", "balanced", ..., see `sequence_positions`.
        cu_seqlens: int32 or int64 [documents + 1], equal on all ranks. Required for layouts of documents; see
            `sequence_positions`. Pass it on the CPU.

    Returns:
        A new tensor like `x` with only this rank's tokens along `dim`; it may be empty.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.

    Example:
        hidden = shard_sequence(hidden, 1, group=mesh["cp"])
    """
    dim = _checked_dim(x, "x", dim)
    bounds = _checked_documents(layout, cu_seqlens)
    result: Tensor = SHARD_SEQUENCE(x, dim, layout, bounds, group)
    return result


def unshard_sequence(
    x_shard: Tensor,
    dim: int,
    *,
    group: GroupLike,
    layout: str = "zigzag",
    seq_len: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Undo `shard_sequence`: gather the shards of all ranks in the order of the sequence.

    Backward returns this rank's tokens of the gradient, which is assumed to be equal on all ranks.

    Args:
        x_shard: any shape and dtype; this rank's tokens along `dim`.
        dim: may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        layout, cu_seqlens: as given to `shard_sequence`.
        seq_len: length of the whole sequence, if the ranks do not all hold the same number of tokens.

    Returns:
        A new tensor like `x_shard` with `seq_len` tokens along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or passed a different
            shape or layout (always checked on CPU; on other devices only with FUSED_TP_CHECK=1).

    Example:
        logits = unshard_sequence(logits, 1, group=mesh["cp"], seq_len=seq_len)
    """
    dim = _checked_dim(x_shard, "x_shard", dim)
    bounds = _checked_documents(layout, cu_seqlens)
    _, size, rank = group_identity(group)
    total = total_length("seq_len", seq_len, "x_shard", x_shard.shape[dim], size, rank, layout)
    result: Tensor = UNSHARD_SEQUENCE(x_shard, dim, layout, total, bounds, group)
    return result


def _checked_dim(x: Any, name: str, dim: Any) -> int:
    check_local(name, x)
    return normalize_dim("dim", dim, name, x)


def _checked_documents(layout: Any, cu_seqlens: Any) -> Tensor | None:
    """Move `cu_seqlens` to the CPU and check `layout`. The op checks the values, which torch.compile cannot trace."""
    bounds = move_to_cpu("cu_seqlens", cu_seqlens)
    check_layout(layout, has_documents=bounds is not None)
    return bounds


def _read_tokens_by_rank(
    seq_len: int, world_size: int, layout: str, cu_seqlens: Tensor | None
) -> tuple[TokenRanges, ...]:
    return tokens_by_rank(seq_len, world_size, layout, read_bounds("cu_seqlens", cu_seqlens, seq_len))


class _PositionsArgs(NamedTuple):
    cu_seqlens: Tensor
    seq_len: SymInt
    layout: str
    within_documents: bool
    group: AnyGroup


class _ShardArgs(NamedTuple):
    x: Tensor
    dim: int
    layout: str
    cu_seqlens: Tensor | None
    group: AnyGroup


class _UnshardArgs(NamedTuple):
    x_shard: Tensor
    dim: int
    layout: str
    seq_len: SymInt
    cu_seqlens: Tensor | None
    group: AnyGroup

    @property
    def full_shape(self) -> list[int]:
        return resized_shape(self.x_shard, self.dim, self.seq_len)


def _compute_positions(schedule: None, a: _PositionsArgs) -> Tensor:
    group = group_by_name(a.group)
    indices = _read_tokens_by_rank(a.seq_len, group.size, a.layout, a.cu_seqlens)[group.rank].indices
    if a.within_documents:
        document_starts = a.cu_seqlens[:-1].numpy().astype(np.int64)
        return torch.from_numpy(indices - document_starts[np.searchsorted(document_starts, indices, side="right") - 1])
    return torch.from_numpy(indices.copy())


def _positions_fake(a: _PositionsArgs) -> Tensor:
    group = group_by_name(a.group)
    return a.cu_seqlens.new_empty(local_length(a.seq_len, group.size, group.rank, a.layout), dtype=torch.int64)


def _shard(schedule: None, a: _ShardArgs) -> Tensor:
    group = group_by_name(a.group)
    ranges = _read_tokens_by_rank(a.x.shape[a.dim], group.size, a.layout, a.cu_seqlens)[group.rank].ranges
    return torch.cat([a.x.narrow(a.dim, r.start, len(r)) for r in ranges or (range(0),)], a.dim).contiguous()


def _shard_fake(a: _ShardArgs) -> Tensor:
    group = group_by_name(a.group)
    return a.x.new_empty(resized_shape(a.x, a.dim, local_length(a.x.shape[a.dim], group.size, group.rank, a.layout)))


def _shard_backward(s: SavedForBackward[_ShardArgs], grad: Tensor) -> dict[str, Any]:
    a, shape = s.args, s.shapes.x
    return {"x": UNSHARD_SEQUENCE(grad, a.dim, a.layout, shape[a.dim], a.cu_seqlens, a.group)}


def _unshard_key(a: _UnshardArgs) -> ScheduleKey | None:
    shape, dtype, size = a.x_shard.shape, a.x_shard.dtype, group_by_name(a.group).size
    row_elements = prod(shape[: a.dim]) * prod(shape[a.dim + 1 :])
    if row_elements * a.seq_len == 0:
        return None
    if dtype not in _SENT_UNCHANGED_DTYPES:
        dtype, row_elements = torch.uint8, row_elements * dtype.itemsize
    num_rows = max(local_length(a.seq_len, size, rank, a.layout) for rank in range(size))
    return ScheduleKey("all_gather", dtype, a.x_shard.device, num_rows * size, None, row_elements)


def _unshard(schedule: Schedule | None, a: _UnshardArgs) -> Tensor:
    x_shard, dim, layout, seq_len, cu_seqlens, _ = a
    group = group_by_name(a.group)
    rank_tokens = _read_tokens_by_rank(seq_len, group.size, layout, cu_seqlens)
    out = x_shard.new_empty(a.full_shape)
    if schedule is None:
        return out
    # Shard lengths differ by one or two tokens. Shards are padded to the longest, so that one plain all-gather is
    # enough. Additional rows at the end hold a checksum of the arguments that must be equal on all ranks.
    max_length, row_shape = (
        max(tokens.length for tokens in rank_tokens),
        (*x_shard.shape[:dim], *x_shard.shape[dim + 1 :]),
    )
    is_checked = x_shard.device.type == "cpu" or settings.check_ranks()
    num_rows = max_length + (-(-_CHECKSUM_BYTES // (prod(row_shape) * x_shard.itemsize)) if is_checked else 0)
    padded_shard = x_shard.new_zeros((num_rows, *row_shape))
    padded_shard[: x_shard.shape[dim]].copy_(x_shard.movedim(dim, 0))
    description = _describe_unshard(a) if is_checked else ""
    if is_checked:
        own_checksum = list(checksum(description).to_bytes(_CHECKSUM_BYTES, "little"))
        _checksum_bytes(padded_shard, 1).copy_(torch.tensor(own_checksum, dtype=torch.uint8, device="cpu"))
    sent_tensor = (
        padded_shard if padded_shard.dtype in _SENT_UNCHANGED_DTYPES else padded_shard.unsqueeze(-1).view(torch.uint8)
    )
    try:
        gathered_rows = schedule.all_gather(sent_tensor, gather_dim=0, gather_size=None).wait()
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{str(error).rstrip('.')}. This is the all-gather of an unshard_sequence, with seq_len={seq_len} on rank "
            f"{group.rank}. If ranks hold different numbers of tokens, pass seq_len, the length of the full sequence."
        ) from error
    gathered_rows = gathered_rows.view(padded_shard.dtype).view(-1, *padded_shard.shape[1:])
    if is_checked:
        checksums = [
            int.from_bytes(bytes(rank_checksum), "little")
            for rank_checksum in _checksum_bytes(gathered_rows, group.size).tolist()
        ]
        difference = (
            "call unshard_sequence (or the backward of shard_sequence) with different shapes, dtypes, layouts or "
            "cu_seqlens"
        )
        check_equal_checksums(
            checksums, difference, f"; rank {group.rank} passed {description}. Pass the same on all ranks."
        )
    out_rows = out.movedim(dim, 0)
    for rank, tokens in enumerate(rank_tokens):
        start = rank * num_rows
        for r in tokens.ranges:
            out_rows[r.start : r.stop].copy_(gathered_rows[start : start + len(r)])
            start += len(r)
    return out


def _describe_unshard(a: _UnshardArgs) -> str:
    documents = "" if a.cu_seqlens is None else f", cu_seqlens of checksum {checksum(repr(a.cu_seqlens.tolist()))}"
    return f"layout={a.layout!r}, dim={a.dim}, full shape {a.full_shape}, dtype {a.x_shard.dtype}{documents}"


def _checksum_bytes(rows: Tensor, num_ranks: int) -> Tensor:
    """Return a view, uint8 [num_ranks, _CHECKSUM_BYTES], of the checksum bytes in the rows of `num_ranks` ranks."""
    return rows.view(num_ranks, -1).view(torch.uint8)[:, -_CHECKSUM_BYTES:]


def _unshard_backward(s: SavedForBackward[_UnshardArgs], grad: Tensor) -> dict[str, Any]:
    a = s.args
    return {"x_shard": SHARD_SEQUENCE(grad, a.dim, a.layout, a.cu_seqlens, a.group)}


SEQUENCE_POSITIONS: Op[_PositionsArgs] = Op(
    "sequence_positions", _PositionsArgs, "Tensor", _compute_positions, _positions_fake
)

SHARD_SEQUENCE: Op[_ShardArgs] = Op(
    "shard_sequence", _ShardArgs, "Tensor", _shard, _shard_fake, saves=("cu_seqlens",), backward=_shard_backward
)


def _unshard_sequence_fake(a: _UnshardArgs) -> Tensor:
    return a.x_shard.new_empty(a.full_shape)


UNSHARD_SEQUENCE: Op[_UnshardArgs] = Op(
    "unshard_sequence",
    _UnshardArgs,
    "Tensor",
    _unshard,
    _unshard_sequence_fake,
    key=_unshard_key,
    saves=("cu_seqlens",),
    backward=_unshard_backward,
)
