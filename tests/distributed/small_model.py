"""A small transformer, plain and over a tensor parallel mesh, for tests of training and checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn import ColumnParallelLinear, ParallelAttention, ParallelMLP, RotaryEmbedding, VocabParallelEmbedding
from fused_tp.nn.norm import replicate_own_parameters, sequence_parallel_
from tests.distributed.layers import HEAD_DIM, HIDDEN, Attention, Gated

VOCABULARY, KV_HEADS = 22, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm: nn.Module = nn.RMSNorm(HIDDEN)
        self.attention: nn.Module = Attention(KV_HEADS, True, False, RotaryEmbedding(HEAD_DIM), True)
        self.mlp_norm: nn.Module = nn.RMSNorm(HIDDEN)
        self.mlp: nn.Module = Gated(hidden=HIDDEN, intermediate=24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """ids [batch, seq] -> logits [batch, seq, VOCABULARY]; the embedding and the output layer are tied."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm: nn.Module = nn.RMSNorm(HIDDEN)
        self.head: nn.Module = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.mul_(1 + i / 50)  # otherwise the attention of all blocks starts equal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_block(block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> Block:
    block.attention = ParallelAttention.from_module(
        block.attention, mesh=mesh, rope=RotaryEmbedding(HEAD_DIM), sequence_parallel=sequence_parallel
    )
    block.mlp = ParallelMLP.from_module(block.mlp, mesh=mesh, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        sequence_parallel_(block.attention_norm, mesh)
        sequence_parallel_(block.mlp_norm, mesh)
    return block


def replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Turn the parameters that are not sharded into replicated DTensors."""
    for module in model.modules():
        replicate_own_parameters(module, mesh, None, sums_gradients=lambda: False)


def shard_model(model: Model, mesh: DeviceMesh, sequence_parallel: bool) -> Model:
    memo: WeakIdKeyDictionary = WeakIdKeyDictionary()
    assert isinstance(model.embed, nn.Embedding) and isinstance(model.head, nn.Linear)
    model.embed = VocabParallelEmbedding.from_embedding(
        model.embed, mesh=mesh, sequence_parallel=sequence_parallel, memo=memo
    )
    model.head = ColumnParallelLinear.from_linear(
        model.head, mesh=mesh, sequence_parallel=sequence_parallel, gather_output=True, memo=memo
    )
    for block in model.blocks:
        assert isinstance(block, Block)
        shard_block(block, mesh, sequence_parallel)
    if sequence_parallel:
        sequence_parallel_(model.norm, mesh)
    replicate(model, mesh)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
