"""Training tensor parallel models with what people train with: optimizers, clip_grad_norm_, FSDP2, checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fused_tp.nn import gather_state_dict
from tests.distributed.small_model import Model, loss_of, shard_model, tokens
from tests.workers import device_mesh, on_ranks

# fp64, 3 steps of Adam. Where a gradient is near 0 Adam divides small by small, so errors of 1e-15 grow.
TRAINED = {"rtol": 1e-6, "atol": 1e-8}


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for ids in batches:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def same_training(
    model: torch.nn.Module,
    full: Model,
    mine: list[torch.Tensor],
    all_of_them: list[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    wanted_losses, wanted_norms = train(full, all_of_them)
    losses, norms = train(model, mine)
    if group is not None:  # the mean over data parallel ranks
        means = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(means, group=group)
        losses = (means / group.size()).tolist()
    assert losses == pytest.approx(wanted_losses, rel=1e-8)
    assert norms == pytest.approx(wanted_norms, rel=1e-8)
    assert wanted_norms[0] > 0.5  # clipping did something
    gathered = gather_state_dict(model)
    wanted = full.state_dict()
    assert list(gathered) == list(wanted)
    for name, tensor in gathered.items():
        assert not isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor, wanted[name], msg=lambda m, name=name: f"{name}: {m}", **TRAINED)


@on_ranks(1, 2, 4)
def test_training_equals_that_of_one_process(group: dist.ProcessGroup) -> None:
    full = Model()
    batches = [tokens(2, 9, seed) for seed in range(3)]
    for sequence_parallel in (False, True):
        if sequence_parallel:  # whole parts: a model has no place to say how long the sequence is
            batches = [tokens(2, 2 * group.size(), seed) for seed in range(3)]
        sharded = shard_model(copy.deepcopy(full), device_mesh(group), sequence_parallel)
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        same_training(sharded, copy.deepcopy(full), batches, batches, None)


@on_ranks(4)
def test_fsdp2_over_tensor_parallelism_equals_one_process(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sequence_parallel in (False, True):
        full = Model()
        sharded = shard_model(copy.deepcopy(full), mesh["tp"], sequence_parallel)
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(sharded, mesh=mesh["dp"])
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2
        all_of_them = [tokens(4, 8, seed) for seed in range(3)]
        mine = [ids.chunk(2)[mesh["dp"].get_local_rank()] for ids in all_of_them]
        same_training(sharded, full, mine, all_of_them, mesh["dp"].get_group())
