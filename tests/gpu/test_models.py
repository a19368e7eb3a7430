"""Models on GPUs: `parallelize` of a transformers model, against the same model on one GPU.

Ranks are processes over NCCL, or over gloo if they have to share a GPU, which NCCL supports from 2.30 on only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fused_tp import parallelize
from tests.gpu.on_device import device_of, environment
from tests.integrations.models import assert_trains_alike, copy_of, make, make_tokens
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu

LAYOUTS = {"tp": ("tp", False), "tp+sp": ("tp", True), "cp": ("cp", False)}  # dim of the mesh, sequence_parallel


def trained_and_generated(group: Any, kind: str, layout: str) -> None:
    """Compare a step, the step after it, and generated tokens."""
    device, world_size = device_of(dist.get_rank(group), kind), dist.get_world_size(group)
    shares_gpu = kind == "cpu" or torch.cuda.device_count() < world_size
    ranks = group if shares_gpu else dist.new_group(backend="nccl")
    dim, sequence_parallel = LAYOUTS[layout]
    mesh = DeviceMesh.from_group(ranks, device.type, mesh_dim_names=(dim,))
    whole = make("llama").to(device)
    model = parallelize(copy_of(whole), mesh, sequence_parallel=sequence_parallel)
    tokens = make_tokens(2, 32).to(device)
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-3) for one in (model, whole)]
    for _ in range(2):
        assert_trains_alike(model, whole, lambda one: one(input_ids=tokens, labels=tokens).loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if layout != "cp":
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens[:, :8])}
        generated, expected = (one.eval().generate(tokens[:, :8], **options) for one in (model, whole))
        assert torch.equal(generated, expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_generation(layout: str, world_size: int, kind: str = "cuda") -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    env = environment(world_size)
    for outcome in fresh_ranks(world_size, trained_and_generated, kind, layout, timeout=300, env=env):
        outcome.unwrap()
