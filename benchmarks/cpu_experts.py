"""A block of experts (Mixtral's, from transformers) under tensor parallelism: router, experts, and the reduction over
ranks; and under sequence parallelism, where each rank holds a shard of the tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import grouped_mm

from fused_tp import parallelize
from fused_tp.backends.grouped import grouped_linear, grouped_weight_grad
from fused_tp.parallelizing.experts import routing_from_sorted_experts

from .case import DTYPES, EFFICIENCY, FUSED_TP, TIME_RATIO, BenchCase, Contestant, Makers, Rival, assert_close
from .ranks import RankContext

TOKENS, EXPERTS, TOP_K = 1024, 8, 2
# Hidden and intermediate sizes. MIXTRAL_SIZES: those of Mixtral 8x7B (arXiv 2401.04088) on two ranks of four.
SMALL_SIZES, MIXTRAL_SIZES = (2048, 2048), (4096, 14336 // 2)
TORCH_MATMULS = "its matmuls alone"
PLAN = {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}
# transformers calls torch's grouped_mm, fused_tp in fp32 another library (see fused_tp.backends.gemm). Comparing with
# fused_tp's own matmuls separates that gain from the overhead around them.
FUSED_TP_MATMULS = "fused_tp's matmuls alone"
TRANSFORMERS_GLOO = "transformers' + gloo"
TRANSFORMERS_ON_ONE_RANK = "transformers' on one rank"
WHOLE_SEQUENCE = "on the whole sequence"  # gathers all tokens before the block, and all-reduces its outputs


def cases() -> list[BenchCase]:
    """All cases of this file."""
    rivals = {
        TORCH_MATMULS: Rival(TIME_RATIO, bar=1.05),
        FUSED_TP_MATMULS: Rival(TIME_RATIO, bar=1.05),
        TRANSFORMERS_GLOO: Rival(TIME_RATIO),
        TRANSFORMERS_ON_ONE_RANK: Rival(EFFICIENCY),
    }
    return [
        BenchCase(
            f"experts/{dtype}/{name}{'forward+backward' if is_backward else 'forward'}",
            experts_makers,
            {"dtype": dtype, "is_backward": is_backward, "sizes": sizes},
            rivals,
            seconds=30.0 if is_backward or name else 15.0,
        )
        for name, sizes, dtypes in (("", SMALL_SIZES, ("bf16", "fp32")), ("Mixtral ", MIXTRAL_SIZES, ("bf16",)))
        for dtype in dtypes
        for is_backward in (False, True)
    ] + [
        BenchCase(
            f"experts/{dtype}/sequence parallel",
            sequence_parallel_makers,
            {"dtype": dtype},
            {WHOLE_SEQUENCE: Rival(TIME_RATIO)},
            seconds=30.0,
        )
        for dtype in ("bf16", "fp32")
    ]


def experts_makers(context: RankContext, dtype: str, is_backward: bool, sizes: tuple[int, int]) -> Makers:
    """Makers for one block of experts; x is [1, tokens, hidden], equal on all ranks.

    Backward computes the gradients of x and of all weights, including the router's.
    """
    full_block = mixtral_block(dtype, *sizes)
    x, grad_out = make_activations(dtype, sizes[0])
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("tp",))

    def step(block: nn.Module) -> list[Tensor]:
        if is_backward:
            return train_step(block, x, grad_out, "gate.weight")
        with torch.no_grad():
            return [block(x)]

    expected = step(full_block)

    def contestant(block: nn.Module) -> Contestant:
        def check() -> None:
            for actual, expected_tensor in zip(step(block), expected, strict=True):
                assert_close(actual, expected_tensor)

        return Contestant(lambda: step(block), check)

    def fused_tp_contestant() -> Contestant:
        return contestant(parallelize(copy.deepcopy(full_block), mesh, plan=PLAN))

    def gloo_contestant() -> Contestant:
        block = copy.deepcopy(full_block)
        shard_experts(block.experts, context)
        block.experts.register_forward_pre_hook(
            lambda module, args: (_AllReduceGradient.apply(args[0]), args[1], _AllReduceGradient.apply(args[2]))
        )
        block.experts.register_forward_hook(lambda module, args, output: _AllReduceOutput.apply(output))
        return contestant(block)

    def matmul_contestant(linear: Any, weight_grad: Any) -> Contestant:
        experts = copy.deepcopy(full_block.experts)
        shard_experts(experts, context)
        up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        with torch.no_grad():
            _, _, index = full_block.gate(x[0])
        sorted_experts, order = index.reshape(-1).sort(stable=True)
        routing = routing_from_sorted_experts(sorted_experts, order // TOP_K, EXPERTS)
        rows, down_inputs = routing.gather_rows(x), x.new_ones(len(order), down.shape[2])
        grad_up, grad_down = x.new_ones(len(order), up.shape[1]), routing.gather_rows(grad_out)

        def run() -> None:
            linear(rows, up, routing)
            linear(down_inputs, down, routing)
            if is_backward:
                linear(grad_down, down.transpose(1, 2), routing)
                weight_grad(grad_down, down_inputs, down, routing)
                linear(grad_up, up.transpose(1, 2), routing)
                weight_grad(grad_up, rows, up, routing)

        return Contestant(run)

    return {
        FUSED_TP: fused_tp_contestant,
        TORCH_MATMULS: lambda: matmul_contestant(
            lambda x, w, routing: grouped_mm(x, w.transpose(1, 2), offs=routing.offsets),
            lambda grad_out, x, w, routing: grouped_mm(grad_out.t(), x, offs=routing.offsets),
        ),
        FUSED_TP_MATMULS: lambda: matmul_contestant(grouped_linear, grouped_weight_grad),
        TRANSFORMERS_GLOO: gloo_contestant,
        TRANSFORMERS_ON_ONE_RANK: lambda: contestant(full_block),
    }


class OneLayerModel(nn.Module):
    """Model of one block, whose tokens sequence parallelism shards, and an output layer that gathers the tokens."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": block})])
        self.head = nn.Linear(SMALL_SIZES[0], 8, bias=False, dtype=next(block.parameters()).dtype)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.get_submodule("layers.0.mlp")(tokens))
        return out


def sequence_parallel_makers(context: RankContext, dtype: str) -> Makers:
    """Makers for forward and backward; outside the block, each rank holds a shard of the tokens."""
    torch.manual_seed(0)
    full_model = OneLayerModel(mixtral_block(dtype, *SMALL_SIZES))
    x, grad_out = make_activations(dtype, SMALL_SIZES[0])
    grad_out = grad_out[..., : full_model.head.out_features]
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("tp",))
    plan = {f"layers.*.mlp.{name}": style for name, style in PLAN.items()} | {"head": "colwise_gather_output"}

    def step(model: nn.Module) -> list[Tensor]:
        return train_step(model, x, grad_out, "layers.0.mlp.gate.weight")

    expected = step(full_model)

    def contestant(*, has_hook: bool) -> Contestant:
        model = copy.deepcopy(full_model)
        if has_hook:  # fused_tp then gathers all tokens, as the hook may read them
            model.get_submodule("layers.0.mlp").register_forward_hook(lambda module, args, output: None)
        model = parallelize(model, mesh, plan=plan, sequence_parallel=True)

        def check() -> None:
            for actual, expected_tensor in zip(step(model), expected, strict=True):
                assert_close(actual, expected_tensor)

        return Contestant(lambda: step(model), check)

    return {FUSED_TP: lambda: contestant(has_hook=False), WHOLE_SEQUENCE: lambda: contestant(has_hook=True)}


def train_step(model: nn.Module, x: Tensor, grad_out: Tensor, router: str) -> list[Tensor]:
    """Run forward on x, and backward; return the output and the gradients of x and of the router's weight."""
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    y.backward(grad_out)
    grad: Any = model.get_parameter(router).grad
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, grad.to_local() if hasattr(grad, "to_local") else grad]


def mixtral_block(dtype: str, hidden: int, inner: int) -> Any:
    """Mixtral's block with random weights, equal on all ranks."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "grouped_mm"
    block: Any = MixtralSparseMoeBlock(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / math.sqrt(parameter.shape[-1]))
    return block.to(DTYPES[dtype])


def make_activations(dtype: str, hidden: int) -> list[Tensor]:
    """Make the input of the block, and the gradient of its output."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, TOKENS, hidden, generator=random).to(DTYPES[dtype]) for _ in range(2)]


def shard_experts(experts: Any, context: RankContext) -> None:
    """Keep only this rank's shard of every expert: of its gate, up and down projections."""
    size, rank = context.world_size, context.rank
    gate_up = experts.gate_up_proj.detach().unflatten(1, (2, size, -1))[:, :, rank].flatten(1, 2)
    experts.gate_up_proj = nn.Parameter(gate_up.clone())
    experts.down_proj = nn.Parameter(experts.down_proj.detach().chunk(size, 2)[rank].clone())


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _AllReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
