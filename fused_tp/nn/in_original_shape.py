"""Tensors in the form that torch.distributed.checkpoint reads: this rank's rectangles of a full tensor.

torch.distributed.checkpoint takes a DTensor for one rectangle, in the memory of the computation. A rank has several
rectangles of a packed parameter (one of gate, one of up), and a background thread writes a copy in other memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class InOriginalShape(Tensor):
    """Rectangles of a tensor on this rank, for `save` and `load` only; implements torch's `_Checkpointable`. (Rejected:
    torch's LocalShardsWrapper, which takes at most two dims.)"""

    shards: dict[torch.Size, Tensor]  # by their offset in the whole

    @staticmethod
    def __new__(cls, shape: torch.Size, shards: dict[torch.Size, Tensor], like: Tensor) -> InOriginalShape:
        made: InOriginalShape = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.shards = shards
        return made

    @classmethod
    def of(cls, tensor: DTensor, dim: int | None = None) -> InOriginalShape:
        """Wrap a DTensor: without `dim` in its own shape, else [.., parts, rows, ..] as [.., parts * rows, ..], with
        the parts along `dim`."""
        local = tensor.to_local().detach()
        with torch.device("cpu"):  # torch computes the offset in tensors on the default device, and reads each
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if dim is None:
            # A rank without rows has no rectangle, but a full tensor without elements has one.
            own = {torch.Size(offset): local} if local.numel() or not tensor.numel() else {}
            return cls(tensor.shape, own, local)
        rows = tensor.shape[dim + 1]
        shape = torch.Size([*tensor.shape[:dim], tensor.shape[dim] * rows, *tensor.shape[dim + 2 :]])
        shards = {
            torch.Size([*offset[:dim], (offset[dim] + part) * rows + offset[dim + 1], *offset[dim + 2 :]]): rectangle
            for part, rectangle in enumerate(local.unbind(dim) if local.numel() else ())
        }
        return cls(shape, shards, local)

    def on_cpu(self, copy: Callable[[Tensor], Tensor]) -> InOriginalShape:
        """Return this tensor with rectangles that `copy` has copied to the CPU."""
        like = torch.empty(0, dtype=self.dtype, device="cpu")
        return InOriginalShape(self.shape, {offset: copy(shard) for offset, shard in self.shards.items()}, like)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} of a tensor of original_shapes(), which is for save and load of torch.distributed.checkpoint only."
        )

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(shard), whole.size()),
            )
            for chunk, shard in zip(self.__create_chunk_list__(), self.shards.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, shard.shape) for offset, shard in self.shards.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.shards[index.offset]
