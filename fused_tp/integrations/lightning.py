"""Lightning's ModelParallelStrategy over meshes of more than two dims, with checkpoints that load over any of them.

A tensor parallel model, with or without FSDP2 over data parallel ranks, does not need this module: call
`parallelize(self.model, self.device_mesh, tp_dim="tensor_parallel")` in `configure_model`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fused_tp.nn import original_shapes
from fused_tp.nn.plain_data import PlainPlanner, PlainReader
from fused_tp.parallelizing.checks.model_check import is_parallelized
from fused_tp.parallelizing.mesh import DIM_ORDER, make_mesh

T = TypeVar("T", bound=type)

_METADATA_FILENAME = "meta.pt"  # Lightning's name for the part of a checkpoint besides weights and optimizers
_BATCH_DIMS = ("dp_replicate", "dp_shard", "ep")


def parallel_strategy(strategy_class: T) -> T:
    """Extend the ModelParallelStrategy of `lightning` or `pytorch_lightning` to meshes of `make_mesh`.

    The constructor takes the sizes of `make_mesh` (dp_replicate, dp_shard, ep, cp, tp) instead of Lightning's, and
    `process_group_backend` and `timeout`. `self.device_mesh` of the LightningModule is the mesh of these sizes. Ranks
    along cp and tp get the same batch; ranks along other dims get different ones. Checkpoints are folders of
    torch.distributed.checkpoint in the unsharded model's shapes, so they load over a mesh of other sizes.

    Args:
        strategy_class: lightning.pytorch.strategies.ModelParallelStrategy, or a subclass of it.

    Returns:
        A subclass of `strategy_class`. Fitting raises ValueError if `configure_model` omits a call that the mesh
        requires: `parallelize` for cp and tp, `fully_shard` for ranks with different batches.

    Example:
        >>> strategy = parallel_strategy(ModelParallelStrategy)(dp_shard=-1, cp=2, tp=4)
        >>> trainer = lightning.Trainer(strategy=strategy, devices=8, num_nodes=4)
    """
    parallel_class: T = _make_parallel_class(strategy_class)
    return parallel_class


@cache
def _make_parallel_class(base_class: Any) -> Any:
    return type(f"Parallel{base_class.__name__}", (_ParallelStrategy, base_class), {"__doc__": base_class.__doc__})


class _ParallelStrategy:
    """Mixin that `parallel_strategy` puts before a ModelParallelStrategy in the MRO."""

    model: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    root_device: torch.device
    device_mesh: DeviceMesh
    _setup_distributed: Any
    broadcast: Any

    def __init__(self, *, process_group_backend: str | None = None, timeout: Any = None, **sizes: int) -> None:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        strategy: Any = super()
        strategy.__init__(process_group_backend=process_group_backend, **options)
        if "pp" in sizes:
            raise ValueError("pp is not supported: Lightning does not run pipeline schedules. Omit pp.")
        if unknown_dims := sorted(sizes.keys() - set(DIM_ORDER)):
            raise TypeError(f"{unknown_dims[0]!r} is not a dim of a mesh. Pass sizes of {', '.join(DIM_ORDER[1:])}.")
        self._sizes = sizes

    def setup_environment(self) -> None:
        self._setup_distributed()
        self._device_mesh = make_mesh(self.root_device.type, **self._sizes)
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Any) -> None:
        strategy: Any = super()
        strategy.setup(trainer)
        mesh, dims = self.device_mesh, self.device_mesh.mesh_dim_names or ()
        sharded_dims = [dim for dim in ("cp", "tp") if dim in dims and mesh[dim].size() > 1]
        if sharded_dims and not is_parallelized(self.model):
            raise ValueError(
                f"the mesh has {' and '.join(sharded_dims)}, but configure_model did not shard the model over these "
                "ranks. Call fused_tp.parallelize(self.model, self.device_mesh) in configure_model."
            )
        num_replicas = self.distributed_sampler_kwargs["num_replicas"]
        if num_replicas > 1 and not any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise ValueError(
                f"there are {num_replicas} groups of ranks with different batches, whose gradients are not averaged. "
                "Apply fully_shard over fused_tp.fsdp_mesh(self.device_mesh) to the model in configure_model."
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        names, num_replicas, rank = self.device_mesh.mesh_dim_names or (), 1, 0
        for name in _BATCH_DIMS:
            if name in names:
                mesh = self.device_mesh[name]
                num_replicas, rank = num_replicas * mesh.size(), rank * mesh.size() + mesh.get_local_rank()
        return {"num_replicas": num_replicas, "rank": rank}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options is not supported: a checkpoint is a folder of torch.distributed.checkpoint. Omit it."
            )
        folder = Path(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        state |= {f"optimizer_{optimizer_index}": optimizer for optimizer_index, optimizer in enumerate(optimizers)}
        dcp.save(original_shapes(self.model, state), checkpoint_id=str(folder))
        if torch.distributed.get_rank() == 0:
            torch.save(checkpoint, folder / _METADATA_FILENAME)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(self.broadcast(checkpoint_path))
        # Without metadata, the path is a checkpoint file written by one process, or no checkpoint at all.
        if not (folder / _METADATA_FILENAME).exists():
            strategy: Any = super()
            checkpoint: dict[str, Any] = strategy.load_checkpoint(folder, weights_only)
            return checkpoint
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for optimizer_index, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{optimizer_index}"] = get_optimizer_state_dict(self.model, optimizer)
        strict = self.lightning_module.strict_loading
        # None means True, as in the call of torch.load below.
        is_plain_data = weights_only is not False
        planner = (PlainPlanner if is_plain_data else DefaultLoadPlanner)(allow_partial_load=not strict)
        reader = (PlainReader if is_plain_data else dcp.FileSystemReader)(folder)
        dcp.load(original_shapes(self.model, state), storage_reader=reader, planner=planner)
        set_model_state_dict(self.model, state["state_dict"], options=StateDictOptions(strict=strict))
        for optimizer_index, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state[f"optimizer_{optimizer_index}"])
        metadata: dict[str, Any] = torch.load(folder / _METADATA_FILENAME, weights_only=weights_only)
        return metadata
