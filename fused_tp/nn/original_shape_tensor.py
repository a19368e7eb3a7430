"""Tensor type for torch.distributed.checkpoint that describes this rank's blocks of a full tensor.

torch.distributed.checkpoint treats a DTensor as one block, stored where the model computes. But a rank has several
blocks of a packed parameter (one of gate, one of up), and a background save needs blocks in a CPU copy.
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


class OriginalShapeTensor(Tensor):
    """This rank's blocks of a full tensor, for `save` and `load` only. Implements torch's `_Checkpointable`.

    Rejected: torch's LocalShardsWrapper, which supports at most two dims.
    """

    shards: dict[torch.Size, Tensor]  # by offset in the full tensor

    @staticmethod
    def __new__(cls, shape: torch.Size, shards: dict[torch.Size, Tensor], template: Tensor) -> OriginalShapeTensor:
        instance: OriginalShapeTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=template.dtype, device=template.device
        )
        instance.shards = shards
        return instance

    @classmethod
    def from_dtensor(cls, tensor: DTensor, dim: int | None = None) -> OriginalShapeTensor:
        """Wrap a DTensor. With `dim`, join the dims `dim` (parts) and `dim + 1` (rows) to one dim of parts * rows."""
        local = tensor.to_local().detach()
        with torch.device("cpu"):  # torch computes the offset in tensors on the default device, and reads each of them
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if dim is None:
            # A rank without elements has no block, except if the full tensor has no elements, which needs one.
            shards_by_offset = {torch.Size(offset): local} if local.numel() or not tensor.numel() else {}
            return cls(tensor.shape, shards_by_offset, local)
        num_rows = tensor.shape[dim + 1]
        shape = torch.Size([*tensor.shape[:dim], tensor.shape[dim] * num_rows, *tensor.shape[dim + 2 :]])
        shards = {
            torch.Size([*offset[:dim], (offset[dim] + part) * num_rows + offset[dim + 1], *offset[dim + 2 :]]): block
            for part, block in enumerate(local.unbind(dim) if local.numel() else ())
        }
        return cls(shape, shards, local)

    def copy_to_cpu(self, copy: Callable[[Tensor], Tensor]) -> OriginalShapeTensor:
        """Return this tensor with its blocks replaced by the CPU copies that `copy` returns."""
        template = torch.empty(0, dtype=self.dtype, device="cpu")
        return OriginalShapeTensor(self.shape, {offset: copy(shard) for offset, shard in self.shards.items()}, template)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} is not supported for a tensor from original_shapes(), which can only be passed to save and load "
            "of torch.distributed.checkpoint."
        )

    def __create_write_items__(self, fqn: str, full_tensor: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(shard), full_tensor.size()),
            )
            for chunk, shard in zip(self.__create_chunk_list__(), self.shards.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, shard.shape) for offset, shard in self.shards.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.shards[index.offset]
