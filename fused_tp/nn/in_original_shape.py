"""Packed parameters as torch.distributed.checkpoint is to see them. It takes a DTensor for one rectangle; of a packed
parameter a rank has several: one of gate, one of up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class InOriginalShape(Tensor):
    """A DTensor [.., parts, rows, ..] as [.., parts * rows, ..], for `save` and `load` only: it has what torch's
    `_Checkpointable` names. (Rejected: LocalShardsWrapper of torch, which takes no more than two dims.)"""

    shards: dict[torch.Size, Tensor]  # by their offset in the whole

    @staticmethod
    def __new__(cls, packed: DTensor, dim: int) -> InOriginalShape:
        rows = packed.shape[dim + 1]
        shape = torch.Size([*packed.shape[:dim], packed.shape[dim] * rows, *packed.shape[dim + 2 :]])
        made: InOriginalShape = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=packed.dtype, device=packed.device
        )
        local = packed.to_local().detach()
        _, offset = compute_local_shape_and_global_offset(packed.shape, packed.device_mesh, packed.placements)
        made.shards = {
            torch.Size([*offset[:dim], (offset[dim] + part) * rows + offset[dim + 1], *offset[dim + 2 :]]): rectangle
            for part, rectangle in enumerate(local.unbind(dim) if local.numel() else ())
        }
        return made

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
