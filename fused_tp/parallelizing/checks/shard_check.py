"""Check that each rank still has its own shard of a model, and that all ranks take the same optimizer steps.

Code that treats a rank's shard as the full model (DistributedDataParallel over all ranks, or a broadcast from rank 0)
leaves all tensor parallel ranks with the same shard. If a single rank skips an optimizer step, its weights no longer
match those of the other ranks. Neither mistake raises an error elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from fused_tp.core.checks import is_check_due
from fused_tp.core.errors import RankMismatchError, join_words
from fused_tp.nn.optimizers import (
    FORWARD_MOMENT,
    PLAIN_SHARDINGS,
    STEP_EXCHANGE_NAME,
    ShardedLayout,
    optimizer_step_counts,
    refuse_different_moments,
    rewatch_model,
    sample_checksum,
)
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes

_DATA_PARALLEL_EXAMPLE = "DistributedDataParallel(model, process_group=mesh['dp'].get_group())"


class ShardCheck:
    """Forward pre-hook that compares samples of weight shards, and numbers of optimizer steps, over ranks.

    It runs at calls that `is_check_due` selects. Each run copies 61 elements of each sharded parameter, transfers them
    from the device at once, and exchanges a few numbers over each mesh.

    Args:
        meshes: meshes whose ranks call the model together; if weights are sharded, the first one must be `tp_mesh`.
        tp_mesh: mesh over which weights are sharded, or None.

    Raises:
        ValueError: two ranks hold the same shard; or a wrapper shards or averages over ranks that hold different
            shards.
        RankMismatchError: ranks have taken different numbers of steps.
    """

    def __init__(self, meshes: Sequence[DeviceMesh], tp_mesh: DeviceMesh | None) -> None:
        self.meshes, self.tp_mesh = tuple(meshes), tp_mesh
        self.calls_by_mode = {True: 0, False: 0}  # per mode: weights may be loaded between training and evaluation
        self._accepted_ddp_id = 0  # id of the DistributedDataParallel that has passed the check

    def __call__(self, model: nn.Module, args: Any) -> None:
        if are_checks_suspended():
            return
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"a parallel {type(model).__name__} does not support torch.func transforms (grad, vmap, ...), because "
                "its ranks exchange values of tensors. Instead of vmap, call it with a batch dim; instead of grad, use "
                "backward()."
            )
        rewatch_model(model)
        self._check_data_parallel(model)
        call = self.calls_by_mode[model.training] = self.calls_by_mode[model.training] + 1
        if not is_check_due(call):
            return
        tp_rank, checksum = 0, None
        if self.tp_mesh is not None:
            tp_rank, checksum = self.tp_mesh.get_local_rank(), sample_checksum(self._weight_shards(model))
        rank_states = gather_over_meshes(
            self.meshes, STEP_EXCHANGE_NAME, [FORWARD_MOMENT, tp_rank, checksum, optimizer_step_counts(model)]
        )
        refuse_different_moments(self.meshes[0], [rank_state[0] for rank_state in rank_states])
        rank_by_checksum: dict[int, int] = {}
        for _, other_rank, other_checksum, _ in rank_states:
            if other_checksum is not None and rank_by_checksum.setdefault(other_checksum, other_rank) != other_rank:
                self._raise_shard_error(
                    f"ranks {rank_by_checksum[other_checksum]} and {other_rank} hold the same values in all weight "
                    "shards"
                )
        check_equal_steps(self.meshes, [steps for *_, steps in rank_states])

    def _check_data_parallel(self, model: nn.Module) -> None:
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or self.tp_mesh is None or id(wrapper) == self._accepted_ddp_id:
            return
        shared_ranks = self._tp_ranks_among(dist.get_process_group_ranks(wrapper.process_group))
        if shared_ranks and any(True for _ in _plain_shards(model)):
            self._raise_shard_error(
                f"DistributedDataParallel is over global ranks {join_words(map(str, shared_ranks))}, which hold"
            )
        self._accepted_ddp_id = id(wrapper)

    def _tp_ranks_among(self, global_ranks: Sequence[int]) -> list[int]:
        """Return the tensor parallel ranks among the global `global_ranks`; [] if there is only one."""
        assert self.tp_mesh is not None
        tp_ranks = set(self.tp_mesh.mesh.flatten().tolist()) & set(global_ranks)
        return sorted(tp_ranks) if len(tp_ranks) > 1 else []

    def _weight_shards(self, model: nn.Module) -> Iterator[Tensor]:
        """Yield this rank's shards of weights over `tp_mesh`, except experts, which may start with equal values."""
        assert self.tp_mesh is not None
        for name, parameter, layout in _plain_shards(model):
            if not isinstance(parameter, DTensor):
                if not _has_distributed_experts(parameter, layout.placement):
                    yield parameter
            elif shared_ranks := self._tp_ranks_among(parameter.device_mesh.mesh.flatten().tolist()):
                self._raise_shard_error(
                    f"{name!r} is sharded over global ranks {join_words(map(str, shared_ranks))}, which hold"
                )
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                placements = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
                tp_placement = dict(placements).get((self.tp_mesh.mesh_dim_names or ("",))[0])
                if (
                    tp_placement is not None
                    and tp_placement.is_shard()
                    and not _has_distributed_experts(parameter, tp_placement)
                ):
                    yield parameter.to_local()

    def _raise_shard_error(self, problem: str) -> None:
        assert self.tp_mesh is not None
        dim = repr((self.tp_mesh.mesh_dim_names or ("tp",))[0])
        raise ValueError(
            f"{problem}{' different shards of the model' if problem.endswith('hold') else ''}, along the tensor "
            f"parallel dim {dim}. Their shards were, or would be, overwritten: a broadcast or an average over these "
            "ranks treats each shard as a copy. Build or load the model again, and replicate or shard it over its data "
            f"parallel ranks only: {_DATA_PARALLEL_EXAMPLE}, fully_shard(model, mesh=mesh['dp']). "
            "Accelerator.prepare(model) uses all ranks: do not pass the model to it, or use parallel_trainer with "
            "parameters='dtensor'."
        )


def check_equal_steps(meshes: Sequence[DeviceMesh], step_counts: Sequence[object]) -> None:
    """Raise RankMismatchError if ranks have taken different numbers of optimizer steps."""
    other_rank = next(
        (rank for rank, rank_step_counts in enumerate(step_counts) if rank_step_counts != step_counts[0]), None
    )
    if other_rank is None:
        return
    dims = join_words(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in meshes)
    raise RankMismatchError(
        f"the {len(step_counts)} ranks of {dims} share a model, but have taken different numbers of optimizer steps "
        f"with its parameters: {step_counts[0]} on rank 0, {step_counts[other_rank]} on rank {other_rank}. Their "
        "weights differ from the first such step on: resume from a checkpoint. Most likely a rank has skipped a step "
        "because of its own gradients. Use torch.amp.GradScaler and fused_tp.nn.clip_grad_norm_, which take the same "
        "decision on all ranks."
    )


def _plain_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedLayout]]:
    """Yield (path, parameter, layout) for each sharded parameter that `plain_parameters_` has converted.

    The parameter is a DTensor if fully_shard has replaced it.
    """
    for path, module in model.named_modules():
        for key, layout in vars(module).get(PLAIN_SHARDINGS, {}).items():
            parameter = module._parameters.get(key)
            if parameter is not None and layout.placement.is_shard():
                yield f"{path}.{key}" if path else key, parameter, layout


def _has_distributed_experts(parameter: Tensor, placement: Placement) -> bool:
    return parameter.ndim > 2 and placement.is_shard(0)
