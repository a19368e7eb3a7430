"""DeepSpeed's ZeRO for models that `parallelize` has sharded, and fused collectives for DeepSpeed's AutoTP.

ZeRO shards flat buffers of plain tensors, so the model needs plain parameters. Groups that DeepSpeed requests:

| DeepSpeed's name                                     | ranks     | for                                              |
|------------------------------------------------------|-----------|--------------------------------------------------|
| (tensor) model parallel                              | tp        | norms, overflow, names of checkpoint files       |
| data parallel: size, rank                            | dp        | size of batches, samplers                        |
| data parallel: group; sequence data parallel         | dp x cp   | mean of gradients, shards of ZeRO                |

With grad_sync=False, each context parallel rank holds the gradient from its tokens, multiplied by the number of these
ranks. The mean over dp x cp is then the gradient. The mpu reports no sequence parallel ranks to DeepSpeed, which would
sum over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.nn.linear import column_matmul, row_matmul


class MeshMPU:
    """`mpu` for `deepspeed.initialize`: provides the groups of ranks from the dims of a mesh.

    Args:
        mesh: mesh from `make_mesh`. Dims other than `tp_dim` and `cp_dim` are data parallel.
        tp_dim, cp_dim: as in `parallelize`.

    Raises:
        ValueError: the mesh has pipeline stages, or expert parallel ranks.

    Example:
        >>> mesh = fused_tp.make_mesh(dp_shard=4, cp=2, tp=8)
        >>> fused_tp.parallelize(model, mesh, parameters="plain", grad_sync=False)
        >>> engine, *_ = deepspeed.initialize(model=model, mpu=MeshMPU(mesh), config=config)
    """

    def __init__(self, mesh: DeviceMesh, *, tp_dim: str = "tp", cp_dim: str = "cp") -> None:
        names = mesh.mesh_dim_names or ()
        for dim, reason in (
            ("pp", "DeepSpeed's pipelines accept no mpu"),
            ("ep", "ZeRO would average different experts"),
        ):
            if dim in names and mesh[dim].size() > 1:
                raise ValueError(
                    f"mesh dim {dim!r} has size {mesh[dim].size()}, which is not supported: {reason}. Use a mesh "
                    f"without {dim!r}."
                )
        batch_dims = tuple(dim for dim in names if dim not in (tp_dim, cp_dim))
        self._tp_group, self._dp_group = (
            _get_group(mesh, tuple(d for d in dims if d in names)) for dims in ((tp_dim,), batch_dims)
        )
        self._sharding_group = _get_group(mesh, tuple(dim for dim in names if dim != tp_dim))

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._tp_group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tp_group)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tp_group)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._sharding_group  # ZeRO 3 uses this method; ZeRO 1 and 2 use get_sequence_data_parallel_group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._dp_group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._dp_group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._sharding_group)

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        return self._sharding_group

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self._sharding_group)

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._sharding_group)


def _get_group(mesh: DeviceMesh, dims: tuple[str, ...]) -> ProcessGroup:
    """Return the group of this rank and all ranks that differ from it only along `dims`."""
    if not dims:
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return (mesh[dims[0]] if len(dims) == 1 else mesh[dims]._flatten("_".join(dims))).get_group()


def use() -> None:
    """Overlap the collectives of AutoTP's linear layers with their matmuls, in all models of this process.

    Use it with `{"tensor_parallel": {"autotp_size": W}}` in DeepSpeed's config. Config, parameters and checkpoints do
    not change. It applies to models that AutoTP has sharded or will shard. LinearAllreduce runs
    `matmul_all_reduce`, and LinearLayer `column_parallel_matmul`, whose all-reduce in backward overlaps the weight
    gradient.

    DeepSpeed's own forward still runs for quantized weights, for layers that are not sharded, and under DeepCompile,
    which inserts collectives itself. Calling `use` again changes nothing.

    Raises:
        ImportError: DeepSpeed is not installed, or does not have these layers.

    Example:
        >>> fused_tp.integrations.deepspeed.use()
        >>> engine, *_ = deepspeed.initialize(model=model, config={"tensor_parallel": {"autotp_size": 2}, ...})
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    for layer_class, is_row in ((LinearAllreduce, True), (LinearLayer, False)):
        if getattr(layer_class.forward, "__wrapped__", None) is None:
            layer_class.forward = _fused_forward(layer_class.forward, is_row)


def _fused_forward(own_forward: Callable[..., Tensor], is_row: bool) -> Callable[..., Tensor]:
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion

    @wraps(own_forward)
    def forward(layer: Any, input: Tensor) -> Tensor:
        defers_collectives = getattr(layer, "defer_collectives_to_compiler", False)
        if layer.mp_group is None or defers_collectives or layer.weight.dtype != input.dtype or layer.weight.ndim != 2:
            return own_forward(layer, input)
        if is_row:
            return row_matmul(input, layer.weight, layer.bias, layer.mp_group)
        y: Tensor = column_matmul(input, layer.weight, layer.bias, layer.mp_group)
        if layer.gather_output:
            y = GatherFromTensorParallelRegion.apply(layer.mp_group, y, layer._partition_sizes)
        return y

    return forward
