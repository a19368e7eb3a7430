"""Checkpoints: full plain tensors, and torch.distributed.checkpoint from one tensor parallel size to another."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fused_tp import CollectiveTimeoutError
from fused_tp.nn import gather_state_dict
from tests.distributed.small_model import Model, shard_model, tokens
from tests.workers import device_mesh, fresh_ranks, on_ranks, run_ranks


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
    # no memory in common, also where the parameter is replicated
    before = sharded.norm.weight.to_local().clone()
    state["norm.weight"].zero_()
    assert torch.equal(sharded.norm.weight.to_local(), before)
    on_first = gather_state_dict(sharded, rank0_only=True, device="cpu")
    assert bool(on_first) == (dist.get_rank() == 0)
    with pytest.raises(TypeError, match=r"module must be an nn\.Module"):
        gather_state_dict({})


def one_rank_alone(group: dist.ProcessGroup) -> None:
    model = shard_model(Model(), device_mesh(group), False)
    if dist.get_rank() == 0:  # as one would who saves on the main process
        with pytest.raises(CollectiveTimeoutError, match=r"Rank 1 did not take part in gather_state_dict of group"):
            gather_state_dict(model)
    dist.barrier()


def test_who_gathers_alone_is_told_who_did_not_come() -> None:
    for outcome in fresh_ranks(2, one_rank_alone, env={"FUSED_TP_TIMEOUT": "0.5"}):
        outcome.unwrap()


@on_ranks(2)
def test_a_full_state_dict_loads(group: dist.ProcessGroup) -> None:
    """A full state dict, such as of the unsharded model, goes into parts by distribute_tensor or by torch's own "
    "helper."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

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


def load(group: dist.ProcessGroup, folder: str) -> dict[str, torch.Tensor]:
    sharded = shard_model(Model(), device_mesh(group), False)
    state = get_model_state_dict(sharded)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(sharded, state)
    return gather_state_dict(sharded)


def load_under_fsdp(group: dist.ProcessGroup, folder: str) -> dict[str, torch.Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = shard_model(Model(), mesh["tp"], True)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    state = get_model_state_dict(sharded)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(sharded, state)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    return gather_state_dict(sharded)


def test_saved_at_two_ranks_loads_at_one_four_and_under_fsdp(tmp_path: Path) -> None:
    """KV heads are 2: cut at 1 and 2 ranks, repeated at 4, so the placements of the weights differ too."""
    folder = str(tmp_path / "checkpoint")
    wanted = Model()
    with torch.no_grad():
        for index, parameter in enumerate(wanted.parameters()):
            parameter.mul_(1 + index / 7)
    for output in run_ranks(2, save, folder):
        torch.testing.assert_close(output, wanted(tokens(2, 5)).detach())
    for world_size, fn in ((1, load), (4, load), (4, load_under_fsdp)):
        for state in run_ranks(world_size, fn, folder):
            for name, tensor in wanted.state_dict().items():
                assert torch.equal(state[name], tensor), (world_size, name)  # bit for bit
