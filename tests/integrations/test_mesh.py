"""Meshes over all kinds of parallelism, data parallelism over them, and gradients that are summed once."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

import fused_tp
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.core.group import resolve_group
from tests.integrations.models import assert_same_gradients, copy_of, make, make_tokens, mesh_of
from tests.workers import error_of, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


@on_ranks(4)
def test_sizes_and_order(group: dist.ProcessGroup) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = fused_tp.make_mesh(tp=2, pp=2, dp_shard=1)
        assert mesh.mesh_dim_names == ("pp", "dp_shard", "tp") and tuple(mesh.shape) == (2, 1, 2)
        assert fused_tp.make_mesh("cpu", dp_replicate=-1).shape == (4,)
        for sizes, wanted in (
            ({"dp_shard": 2, "cp": 2}, (4,)),
            ({"dp_shard": 4}, (4,)),
            ({"cp": -1}, (4,)),
            ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, (2, 2)),
            ({"dp_replicate": 2, "dp_shard": 2}, (2, 2)),
            ({"dp_replicate": 1, "dp_shard": 2, "cp": 2}, (4,)),
            ({"dp_shard": 2, "tp": 2}, (2,)),
        ):
            mesh = fused_tp.make_mesh(**sizes)
            for _ in range(2):
                assert tuple(fused_tp.fsdp_mesh(mesh).shape) == wanted, sizes
    for says, sizes in {
        "pp=2 x tp=3 is 6, but there are 4 ranks. The product": {"pp": 2, "tp": 3},
        "tp=3 is 3, but there are 4 ranks, which is not a multiple": {"tp": 3, "cp": -1},
        "Only one dim can be -1, got dp_shard and cp": {"dp_shard": -1, "cp": -1},
        "tp must be at least 1": {"tp": 0},
        "no dims. Pass the size": {},
    }.items():
        error = error_of(fused_tp.make_mesh, **sizes)
        assert isinstance(error, ValueError) and says in str(error), (says, error)
    assert "must have a dim 'dp_shard' or 'cp'" in str(error_of(fused_tp.fsdp_mesh, fused_tp.make_mesh(tp=4)))
    assert "different experts" in str(error_of(fused_tp.fsdp_mesh, fused_tp.make_mesh(dp_shard=2, ep=2)))


@on_ranks(4)
def test_data_parallel_ranks_around_a_parallel_model(group: dist.ProcessGroup) -> None:
    for sizes in ({"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 1, "cp": 2}):
        whole, mesh = make("llama"), fused_tp.make_mesh(**sizes)
        tokens = make_tokens(4, 16)
        whole(input_ids=tokens, labels=tokens).loss.backward()
        parallel = fused_tp.parallelize(copy_of(whole), mesh, grad_sync=False)
        if "dp_shard" in sizes:
            for layer in [*parallel.model.layers, parallel]:
                fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh))
        else:
            replicate(parallel, mesh=mesh["dp_replicate"])
        batches = "dp_shard" if sizes.get("dp_shard", 1) > 1 else "dp_replicate"
        own = tokens.chunk(2)[mesh[batches].get_local_rank()]
        parallel(input_ids=own, labels=own).loss.backward()
        assert_same_gradients(parallel, whole)


def accumulate(parallel: Any, wholes: list[Any], batches: list[Any], deferred: list[bool]) -> None:
    for batch, defer in zip(batches, deferred, strict=True):
        for whole in wholes:
            (whole(input_ids=batch, labels=batch).loss / len(batches)).backward()
        with fused_tp.no_sync(parallel) if defer else nullcontext():
            (parallel(input_ids=batch, labels=batch).loss / len(batches)).backward()


@on_ranks(2, env={"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_CHECK_BATCH": "0"})
def test_gradients_are_summed_once_in_an_accumulation(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 1)
    transport = torch_dist(resolve_group(mesh), "cpu")
    whole = make("llama")
    parallel = fused_tp.parallelize(copy_of(whole), mesh)
    batches = [make_tokens(2, seq) for seq in (12, 16, 9)]
    parameters = sum(p.requires_grad for p in parallel.parameters())
    calls = {}
    for deferred in itertools.product([False, True], repeat=3):
        for model in (whole, parallel):
            model.zero_grad()
        before = transport.calls
        accumulate(parallel, [whole], batches, list(deferred))
        calls[deferred] = transport.calls - before
        if deferred[-1]:
            fused_tp.sync_gradients(parallel)
        assert_same_gradients(parallel, whole)
        fused_tp.sync_gradients(parallel)  # nothing is left to sum
        assert_same_gradients(parallel, whole)
    assert calls[False, False, False] - calls[True, True, True] >= 3 * parameters
    # One sum per gradient, and one call that exchanges which exist; a backward that sums at once compares names.
    assert calls[True, True, False] - calls[True, True, True] == parameters + 1
    with parallel.no_sync():  # the method that accelerate looks for
        parallel(input_ids=batches[0], labels=batches[0]).loss.backward()
    fused_tp.sync_gradients(parallel)
    whole(input_ids=batches[0], labels=batches[0]).loss.backward()
    assert_same_gradients(parallel, whole)
    assert "is not parallel: call parallelize" in str(error_of(lambda: fused_tp.no_sync(nn.Linear(2, 2)).__enter__()))


@on_ranks(2)
def test_experts_that_only_some_ranks_have_used(group: dist.ProcessGroup) -> None:
    whole = make("qwen3_moe", num_experts=16)
    parallel = fused_tp.parallelize(copy_of(whole), mesh_of(group, 2, 1))
    batches = [make_tokens(1, 6), make_tokens(1, 4)]
    for deferred in ([True, True], [True, False], [False, True]):
        for model in (whole, parallel):
            model.zero_grad()
        accumulate(parallel, [whole], batches, deferred)
        fused_tp.sync_gradients(parallel)
        assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_fsdp_reduces_once(group: dist.ProcessGroup) -> None:
    whole, mesh = make("llama"), mesh_of(group, 2, 1)
    parallel = fused_tp.parallelize(copy_of(whole), mesh, grad_sync=False)
    for layer in [*parallel.model.layers, parallel]:
        fully_shard(layer, mesh=mesh)
    accumulate(parallel, [whole], [make_tokens(2, 12), make_tokens(2, 16)], [True, False])
    assert_same_gradients(parallel, whole)
    assert "in backward only" in str(error_of(fused_tp.sync_gradients, parallel))
