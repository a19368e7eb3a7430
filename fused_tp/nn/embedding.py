"""Embedding table sharded by vocabulary over a tensor parallel mesh (Megatron-LM, https://arxiv.org/abs/1909.08053).

Each rank looks up the tokens whose rows it holds, and returns zeros for all other tokens. In the sum over ranks each
element has one nonzero term, so the sum is exact in every dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fused_tp.nn.linear import check_positive, check_sequence_dim
from fused_tp.nn.sharding import Memo, check_mesh, copy_full_, empty_parameter, local_shard, shard_parameter, shard_rows
from fused_tp.ops.arguments import check_bool
from fused_tp.ops.collectives import all_reduce, reduce_scatter


class VocabParallelEmbedding(nn.Embedding):
    """nn.Embedding whose vocabulary is sharded over `mesh`.

    Shapes on a rank: ids [...] (integers, equal on all ranks) -> [..., embedding_dim]. With `sequence_parallel`, the
    result is this rank's shard along `sequence_dim`. Any vocabulary size works: the weight is a DTensor with Shard(0),
    so the last ranks may hold fewer rows, or none.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in nn.Embedding, with sizes of the full table.
        mesh: the 1-D DeviceMesh of the tensor parallel ranks.
        sequence_parallel: return only this rank's shard of the sequence (a reduce-scatter instead of an all-reduce).
        sequence_dim: the sequence dim of the output; used only with `sequence_parallel`.

    Raises:
        TypeError: ids are not integers.
        ValueError: a size is below 1, padding_idx is out of range, or the output has no dim `sequence_dim`.
        IndexError: an id is outside [0, num_embeddings), on the CPU. On a GPU, a device assertion fails instead, as in
            nn.Embedding.

    Example:
        >>> embed = VocabParallelEmbedding(32_000, 512, mesh=mesh)
        >>> hidden = embed(ids)             # [batch, seq] -> [batch, seq, 512] on every rank
    """

    # Attributes of nn.Embedding at their defaults. `from_embedding` raises an error for other values.
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would allocate a full table
        check_positive("num_embeddings", num_embeddings)
        check_positive("embedding_dim", embedding_dim)
        check_bool(sequence_parallel=sequence_parallel)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in [-{num_embeddings}, {num_embeddings}), got {padding_idx}.")
        self.mesh = check_mesh(mesh)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.weight = empty_parameter((num_embeddings, embedding_dim), mesh, Shard(0), device=device, dtype=dtype)
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        mesh: DeviceMesh,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        memo: Memo | None = None,
    ) -> VocabParallelEmbedding:
        """Build the layer over `mesh` from an nn.Embedding that every rank holds. Each rank copies its rows locally.

        Raises:
            TypeError: `embedding` is not an nn.Embedding, or its weight is a DTensor.
            ValueError: `embedding` uses max_norm, scale_grad_by_freq or sparse, which are not supported.

        Example:
            >>> model.embed = VocabParallelEmbedding.from_embedding(model.embed, mesh=mesh["tp"])
        """
        if isinstance(embedding, VocabParallelEmbedding) or not isinstance(embedding, nn.Embedding):
            raise TypeError(f"{cls.__name__}.from_embedding needs an nn.Embedding, got {type(embedding).__name__}.")
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name):
                raise ValueError(
                    f"embedding has {name}={getattr(embedding, name)}, which {cls.__name__} does not support."
                )
        sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        layer = cls(*sizes, mesh=mesh, device="meta", dtype=embedding.weight.dtype, **options)
        layer.weight = shard_parameter(embedding.weight, mesh, Shard(0), memo)
        return layer.train(embedding.training)

    from_module = from_embedding

    def reset_parameters(self) -> None:
        """Draw the table from N(0, 1) with a zero row at `padding_idx`, as nn.Embedding does."""
        if self.weight.is_meta:
            return
        full_table = torch.empty(self.weight.shape, device=self.weight.device, dtype=self.weight.dtype).normal_()
        if self.padding_idx is not None:
            full_table[self.padding_idx].zero_()
        copy_full_(self.weight, full_table)

    def forward(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        scatter_dim = self.sequence_dim if self.sequence_parallel else None
        return sharded_lookup(
            ids, local_shard(self.weight), self.num_embeddings, self.padding_idx, self.mesh, scatter_dim
        )

    def _check_ids(self, ids: Tensor) -> None:
        check_integer_ids(ids)
        if self.sequence_parallel:
            check_sequence_dim("ids", ids, (*ids.shape, self.embedding_dim), self.sequence_dim)
        check_ids_in_range(ids, self.num_embeddings)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, tp={self.mesh.size()}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def sharded_lookup(
    ids: Tensor,
    weight: Tensor,
    num_embeddings: int,
    padding_idx: int | None,
    mesh: DeviceMesh,
    scatter_dim: int | None = None,
) -> Tensor:
    """Look up ids [...] -> [..., dim] in a table whose rows are sharded; `weight` is this rank's shard.

    If `scatter_dim` is given, return only this rank's shard of the result along that dim.
    """
    start, stop = shard_rows(num_embeddings, mesh)
    is_elsewhere = (ids < start) | (ids >= stop)
    rows = (ids - start).masked_fill(is_elsewhere, 0)
    if start == stop:
        # This rank has no rows. A row of zeros keeps the output dependent on the weight. Without an autograd node, this
        # rank would not take part in the collective of backward.
        weight = F.pad(weight, (0, 0, 0, 1))
    padding_row = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
    partial = F.embedding(rows, weight, padding_row).masked_fill(is_elsewhere.unsqueeze(-1), 0)
    return all_reduce(partial, group=mesh) if scatter_dim is None else reduce_scatter(partial, scatter_dim, group=mesh)


def check_integer_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        ids_type = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids must be a Tensor of dtype int64 or int32, got {ids_type}.")
    if ids.layout is not torch.strided or ids.is_nested:
        raise TypeError(f"ids must be a dense tensor, got a {'nested' if ids.is_nested else ids.layout} tensor.")


def check_ids_in_range(ids: Tensor, num_embeddings: int) -> None:
    """Raise IndexError for ids outside the table.

    On a GPU or under torch.compile, a device assertion fails instead, because reading ids would block the CPU, or break
    the graph.
    """
    if ids.is_meta or ids.numel() == 0:
        return
    is_in_range = ((ids >= 0) & (ids < num_embeddings)).all()
    if not ids.is_cpu or torch.compiler.is_compiling():
        torch._assert_async(is_in_range, f"ids must be in [0, {num_embeddings})")
    elif not is_in_range:
        raise IndexError(f"ids must be in [0, {num_embeddings}), got ids from {int(ids.min())} to {int(ids.max())}.")
