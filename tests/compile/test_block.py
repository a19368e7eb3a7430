"""torch.compile(fullgraph=True) of a transformer block: RMSNorm, ParallelAttention, ParallelMLP."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fused_tp.integrations.dtensor import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel
from fused_tp.nn import ParallelAttention, VocabParallelEmbedding
from tests.distributed.small_model import HIDDEN, Block, Model, replicate, shard_block, tokens
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks, run_ranks

pytestmark = pytest.mark.full

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        grads[name] = parameter.grad.to_local()
    return grads


def compiled_block(group: dist.ProcessGroup, sequence_parallel: bool, backend: str) -> None:
    torch.manual_seed(0)
    mesh = device_mesh(group)
    block = shard_block(Block().double(), mesh, sequence_parallel)
    replicate(block, mesh)
    x = seeded(2, 6, HIDDEN, dtype=torch.float64)
    # torch 2.13 cannot compile a checkpoint with DTensor parameters that recomputes an op with random numbers, such as
    # scaled_dot_product_attention (functionalize_rng_ops miscounts the saved tensors), with or without fused_tp. Saving
    # the op's result, which selective checkpointing does anyway as it is expensive to recompute, avoids that.
    saved = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    save_attention = functools.partial(create_selective_checkpoint_contexts, saved)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "block": block,
        "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False, context_fn=save_attention),
    }
    if group.size() > 2:  # repeated key/value heads behave the same inside a checkpoint
        del runs["checkpoint"]
    eager_x = x.clone().requires_grad_()
    wanted = block(eager_x)
    wanted.square().sum().backward()
    wanted_grads = gradients(block)
    for name, run in runs.items():
        torch._dynamo.reset()
        block.zero_grad()
        compiled_x = x.clone().requires_grad_()
        y = torch.compile(run, fullgraph=True, backend=backend)(compiled_x)
        y.square().sum().backward()
        torch.testing.assert_close(y, wanted, **EXACT)
        torch.testing.assert_close(compiled_x.grad, eager_x.grad, **EXACT)
        for key, grad in gradients(block).items():
            torch.testing.assert_close(grad, wanted_grads[key], msg=lambda m, at=(name, key): f"{at}: {m}", **EXACT)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_block(sequence_parallel: bool) -> None:
    run_ranks(2, compiled_block, sequence_parallel, "aot_eager")


def test_block_with_repeated_kv_heads() -> None:
    run_ranks(4, compiled_block, True, "aot_eager")


@on_ranks(2)
def test_embedding_and_attention_with_dropout_and_mask(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    mesh = device_mesh(group)
    embed = VocabParallelEmbedding(11, 8, 3, mesh=mesh, dtype=torch.float64)
    attention = ParallelAttention(8, 4, mesh=mesh, causal=True, dropout=0.3, dtype=torch.float64)
    ids = torch.tensor([[1, 5, 10, 3]])

    def run(ids: Tensor) -> Tensor:
        return attention(embed(ids))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    wanted = run(ids)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(ids), wanted, **EXACT)
    attention.eval()
    mask = torch.tensor([[True, True, False, True]])
    torch._dynamo.reset()
    masked = torch.compile(lambda x: attention(x, attention_mask=mask), fullgraph=True, backend="aot_eager")
    x = seeded(1, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(masked(x), attention(x, attention_mask=mask), **EXACT)


@on_ranks(2)
def test_styles(group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    torch._dynamo.reset()
    torch.manual_seed(0)
    full = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)).double()
    plan = {
        "0": FusedSequenceParallel(use_local_output=True),
        "1": FusedColwiseParallel(input_layouts=Shard(1)),
        "3": FusedRowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = device_mesh(group)
    model = parallelize_module(copy.deepcopy(full), mesh, plan)
    x_full = seeded(2, 2 * group.size(), 6, dtype=torch.float64)
    x = x_full.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, full(x_full).chunk(group.size(), 1)[group.rank()], **EXACT)
    y.sum().backward()
    full(x_full).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), full.get_parameter(name).grad, **EXACT)


@on_ranks(2)
def test_whole_model_with_tied_weights(group: dist.ProcessGroup) -> None:
    from tests.distributed.small_model import loss_of, shard_model

    torch._dynamo.reset()
    model = shard_model(Model(), device_mesh(group), True)
    ids = tokens(2, 8)
    with torch.no_grad():
        wanted = loss_of(model, ids)
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(model, ids)
    loss.backward()
    torch.testing.assert_close(loss, wanted, **EXACT)
