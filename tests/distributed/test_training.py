"""Tensor parallel models in training: optimizers, clip_grad_norm_, FSDP2, checkpoints of both kinds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fused_tp import CollectiveTimeoutError
from fused_tp.nn import gather_state_dict
from tests.distributed.small_model import Model, loss_of, shard_model, tokens
from tests.workers import device_mesh, on_ranks, run_fresh, run_ranks


def under_fsdp(model: Model, mesh: DeviceMesh, sequence_parallel: bool) -> Model:
    sharded = shard_model(model, mesh["tp"], sequence_parallel)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh["dp"])
    return sharded


# -- training ----------------------------------------------------------------------------------------------------------

# fp64, 3 steps of Adam. For a gradient near 0, Adam divides two small numbers, so that errors of 1e-15 grow.
TRAINED = {"rtol": 1e-6, "atol": 1e-8}


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Train a few steps; return losses and gradient norms."""
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
        if sequence_parallel:  # equal shards, since the model has no argument for seq_len
            batches = [tokens(2, 2 * group.size(), seed) for seed in range(3)]
        sharded = shard_model(copy.deepcopy(full), device_mesh(group), sequence_parallel)
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        same_training(sharded, copy.deepcopy(full), batches, batches, None)


@on_ranks(4)
def test_fsdp2_over_tensor_parallelism_equals_one_process(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sequence_parallel in (False, True):
        full = Model()
        sharded = under_fsdp(copy.deepcopy(full), mesh, sequence_parallel)
        for parameter in sharded.parameters():
            assert isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2
        all_of_them = [tokens(4, 8, seed) for seed in range(3)]
        mine = [ids.chunk(2)[mesh["dp"].get_local_rank()] for ids in all_of_them]
        same_training(sharded, full, mine, all_of_them, mesh["dp"].get_group())


# -- checkpoints -------------------------------------------------------------------------------------------------------


@on_ranks(1, 4)
def test_gather_state_dict(group: dist.ProcessGroup) -> None:
    full = Model()
    sharded = shard_model(copy.deepcopy(full), device_mesh(group), False)
    state = gather_state_dict(sharded)
    assert list(state) == list(full.state_dict())
    for name, tensor in full.state_dict().items():
        assert type(state[name]) is torch.Tensor
        assert torch.equal(state[name], tensor)
    assert state["embed.weight"] is state["head.weight"]
    # The state shares no memory with the model, even for a replicated parameter.
    before = sharded.norm.weight.to_local().clone()
    state["norm.weight"].zero_()
    assert torch.equal(sharded.norm.weight.to_local(), before)
    on_first = gather_state_dict(sharded, rank0_only=True, device="cpu")
    assert bool(on_first) == (dist.get_rank() == 0)
    with pytest.raises(TypeError, match=r"module must be an nn\.Module"):
        gather_state_dict({})


@on_ranks(2, run=run_fresh, env={"FUSED_TP_TIMEOUT": "0.5"})
def test_who_gathers_alone_is_told_who_did_not_come(group: dist.ProcessGroup) -> None:
    model = shard_model(Model(), device_mesh(group), False)
    if dist.get_rank() == 0:  # a common mistake when saving on the main process
        with pytest.raises(CollectiveTimeoutError, match=r"Rank 1 did not take part in gather_state_dict of group"):
            gather_state_dict(model)
    dist.barrier()


@on_ranks(2)
def test_a_full_state_dict_loads(group: dist.ProcessGroup) -> None:
    """A full state dict, such as that of the unsharded model, loads by torch's own helper."""
    full = Model()
    sharded = shard_model(Model(), device_mesh(group), True)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    set_model_state_dict(sharded, full.state_dict(), options=StateDictOptions(full_state_dict=True))
    for name, tensor in gather_state_dict(sharded).items():
        assert torch.equal(tensor, full.state_dict()[name]), name


def save(group: dist.ProcessGroup, folder: str) -> torch.Tensor:
    sharded = shard_model(Model(), device_mesh(group), False)
    with torch.no_grad():
        for index, parameter in enumerate(sharded.parameters()):
            parameter.mul_(1 + index / 7)
    dcp.save(get_model_state_dict(sharded), checkpoint_id=folder, process_group=group)
    return sharded(tokens(2, 5)).detach()


def load(group: dist.ProcessGroup, folder: str, fsdp: bool) -> dict[str, torch.Tensor]:
    if fsdp:
        sharded = under_fsdp(Model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), True)
    else:
        sharded = shard_model(Model(), device_mesh(group), False)
    state = get_model_state_dict(sharded)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(sharded, state)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    return gather_state_dict(sharded)


def test_saved_at_two_ranks_loads_at_one_four_and_under_fsdp(tmp_path: Path) -> None:
    """The 2 KV heads are sharded over 1 and 2 ranks and repeated over 4, so that placements of weights differ, too."""
    folder = str(tmp_path / "checkpoint")
    wanted = Model()
    with torch.no_grad():
        for index, parameter in enumerate(wanted.parameters()):
            parameter.mul_(1 + index / 7)
    for output in run_ranks(2, save, folder):
        torch.testing.assert_close(output, wanted(tokens(2, 5)).detach())
    for world_size, fsdp in ((1, False), (4, False), (4, True)):
        for state in run_ranks(world_size, load, folder, fsdp):
            for name, tensor in wanted.state_dict().items():
                assert torch.equal(state[name], tensor), (world_size, name)  # bit for bit
