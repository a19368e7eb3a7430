"""Attention over a sequence sharded over a 2-D mesh: Ulysses attention in one dim, ring attention in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload
from weakref import WeakSet

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.group import SINGLE_GROUP_IDENTITY, check_mesh_order, group_identity
from fused_tp.ops.attention_arguments import (
    AttentionKeywords,
    OutAndLseKeywords,
    OutKeywords,
    build_arguments,
    with_keywords,
)
from fused_tp.ops.ulysses_attention import head_sharded_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    ulysses_dim: str | int | None = None,
    ring_dim: str | int | None = None,
    **keywords: Unpack[OutKeywords],
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    ulysses_dim: str | int | None = None,
    ring_dim: str | int | None = None,
    **keywords: Unpack[OutAndLseKeywords],
) -> tuple[Tensor, Tensor]: ...


@with_keywords(AttentionKeywords)
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    ulysses_dim: str | int | None = None,
    ring_dim: str | int | None = None,
    return_lse: bool = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the whole sequence, sharded over all ranks of `mesh` by `layout`.

    Returns the same result as `ring_attention` over all ranks of the mesh, with the same arguments. Ranks along
    `ulysses_dim` exchange tokens for heads, as in `ulysses_attention`. Ranks along `ring_dim` form rings, as in
    `ring_attention`. Use `ulysses_dim` for ranks with fast links, such as the ranks of one host. In contrast to
    `ulysses_attention`, there may be more ranks than heads. Forward and gradients are as in the table of
    `ulysses_attention`, with ring attention as the local attention.

    The sequence is sharded over all ranks of the mesh in mesh order (last dim fastest). This is the rank order of the
    flattened mesh's group, or of the world if the mesh spans it. Shard tensors with `shard_sequence`, that group and
    `layout`. The ranks along `ulysses_dim` together hold the tokens of one ring rank. With "zigzag" these tokens are,
    up to one or two, the tokens of a zigzag layout over the ring only, so that causal work is equal on all ranks.

    Args:
        q, k, v: as for `ring_attention`; the size of `ulysses_dim` divides heads.
        mesh: 2-D DeviceMesh. The ranks of a 1-D mesh form a ring, or shard heads if `ulysses_dim` is its dim.
        ulysses_dim: mesh dim, by name or index, over which heads are sharded. None: the last dim.
        ring_dim: mesh dim, by name or index, of the rings. None: the other dim.
        return_lse: also return the log-sum-exp of the scores of every row, sinks included. Differentiable; see
            `ulysses_attention`.
        causal, scale, layout, window, softcap, alibi_slopes, sinks, dropout_p: as for `ring_attention`.
        cu_seqlens, cu_seqlens_kv, seq_len, seq_len_kv: as for `ring_attention`, lengths of the whole sequence.

    Returns:
        The same as `ring_attention`. Sum gradients of alibi_slopes and sinks over all ranks of the mesh.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("ring", "ulysses"))
        q, k, v = (shard_sequence(t, 1, group=None) for t in (q, k, v))  # the mesh spans the world
        out = context_parallel_attention(q, k, v, mesh=mesh, causal=True, seq_len=seq_len)

    Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI",
    arXiv:2405.07719.
    """
    ulysses_index, ring_index = _resolve_mesh_dims(mesh, ulysses_dim, ring_dim)
    is_unchecked = mesh.ndim > 1 and not is_dynamo_compiling() and mesh not in _checked_meshes
    if is_unchecked and check_mesh_order(mesh, (0, 1), is_flattened=True):
        _checked_meshes.add(mesh)
    return head_sharded_attention(
        q,
        k,
        v,
        build_arguments("context_parallel_attention", keywords),
        *(
            SINGLE_GROUP_IDENTITY if dim is None else group_identity(mesh.get_group(dim))
            for dim in (ulysses_index, ring_index)
        ),
        # If the ring is the last dim, its ranks are adjacent in mesh order, and ranks that shard heads are strided.
        is_strided=ulysses_index is not None and ring_index is not None and ring_index > ulysses_index,
        return_lse=return_lse,
    )


# Meshes whose rank order has been checked. Weak references, because a mesh keeps its process groups alive.
_checked_meshes: WeakSet[DeviceMesh] = WeakSet()


def _resolve_mesh_dims(mesh: Any, ulysses_dim: Any, ring_dim: Any) -> tuple[int | None, int | None]:
    """Return (dim of heads, dim of the ring) as indices; for a 1-D mesh one of them is None."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}; use ring_attention for a ProcessGroup.")
    if mesh.ndim > 2:
        names: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(f"mesh has {mesh.ndim} dims {names}; pass one or two of them, such as mesh[{names[-2:]!r}].")
    ulysses_index = None if ulysses_dim is None else _resolve_dim("ulysses_dim", ulysses_dim, mesh)
    ring_index = None if ring_dim is None else _resolve_dim("ring_dim", ring_dim, mesh)
    if ulysses_index is not None and ulysses_index == ring_index:
        raise ValueError(
            f"ulysses_dim={ulysses_dim!r} and ring_dim={ring_dim!r} are the same dim of mesh; pass two dims."
        )
    if mesh.ndim == 1:
        return (None, 0) if ulysses_index is None else (0, None)
    if ulysses_index is None:
        ulysses_index = 1 if ring_index is None else 1 - ring_index
    return ulysses_index, 1 - ulysses_index


def _resolve_dim(name: str, dim: Any, mesh: DeviceMesh) -> int:
    names: tuple[object, ...] = mesh.mesh_dim_names or ()
    if isinstance(dim, str):
        if dim not in names:
            raise ValueError(f"{name} is {dim!r}; the dims of mesh are {names or 'unnamed'}.")
        return names.index(dim)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name} must be the name or index of a dim of mesh, not {type(dim).__name__}.")
    if not -mesh.ndim <= dim < mesh.ndim:
        raise ValueError(f"{name}={dim} is out of range for a mesh of {mesh.ndim} dims.")
    return dim % mesh.ndim
