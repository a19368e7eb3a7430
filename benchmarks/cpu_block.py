"""Forward and backward of a Llama block under tensor and sequence parallelism, including the reduction of gradients.

Contestants share the block, norms, rotary attention and gated MLP, and differ in its linear layers only. The optimizer
step is left out, as it is the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fused_tp.core.settings import override_environment

from .case import DTYPES, FUSED_TP, SPEEDUP, BenchCase, Contestant, Makers, Rival, assert_close
from .ranks import RankContext

MEGATRON = "Megatron-Core on gloo"
PLAIN_SCHEDULE = "fused_tp, plain schedule"
EPS = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class BlockSize:
    """Sizes of the block before sharding."""

    hidden: int
    intermediate: int
    heads: int
    seq: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES = {
    "hidden=1024 seq=1024": BlockSize(hidden=1024, intermediate=2816, heads=16, seq=1024),
    "hidden=2048 seq=512": BlockSize(hidden=2048, intermediate=5632, heads=32, seq=512),
}


def cases() -> list[BenchCase]:
    """All cases of this file."""
    rivals = {MEGATRON: Rival(SPEEDUP, bar=1.3, aim=1.6), PLAIN_SCHEDULE: Rival(SPEEDUP)}
    return [
        BenchCase(
            f"llama_block/{dtype}/{name}", llama_block_makers, {"dtype": dtype, "size": size}, rivals, seconds=20.0
        )
        for dtype in ("bf16", "fp32")
        for name, size in SIZES.items()
    ]


def llama_block_makers(context: RankContext, dtype: str, size: BlockSize) -> Makers:
    """Makers of the contestants; x is [seq/W, 1, hidden] on a rank: Megatron's layout, and no worse for others."""
    torch_dtype = DTYPES[dtype]
    weights = make_full_weights(size, torch_dtype)
    random = torch.Generator().manual_seed(1)
    x, d_out = (torch.randn(size.seq, 1, size.hidden, generator=random).to(torch_dtype) for _ in range(2))
    rows = slice(context.rank * size.seq // context.world_size, (context.rank + 1) * size.seq // context.world_size)
    expected_out, expected_dx, expected_dnorm = TransformerBlock(size, UnshardedLayers(weights)).step(x, d_out)

    def contestant(layers: Callable[[], UnshardedLayers], settings: dict[str, str]) -> Contestant:
        with override_environment(settings):
            block = TransformerBlock(size, layers())

        def run() -> tuple[Tensor, Tensor, Tensor]:
            with override_environment(settings):
                return block.step(x[rows], d_out[rows])

        def check() -> None:
            out, dx, dnorm = run()
            assert_close(out, expected_out[rows])
            assert_close(dx, expected_dx[rows])
            assert_close(dnorm, expected_dnorm)

        return Contestant(run, check)

    def megatron_contestant() -> Contestant:
        from . import rivals_megatron

        rivals_megatron.initialize_megatron(context)
        return contestant(lambda: rivals_megatron.MegatronLayers(weights), {})

    return {
        FUSED_TP: lambda: contestant(lambda: FusedLayers(weights), {}),
        PLAIN_SCHEDULE: lambda: contestant(lambda: FusedLayers(weights), {"FUSED_TP_SCHEDULE": "plain"}),
        MEGATRON: megatron_contestant,
    }


def make_full_weights(size: BlockSize, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the full weights of the block, equal on every rank; [out, in] as in nn.Linear."""
    random = torch.Generator().manual_seed(0)

    def weight(out_features: int, in_features: int) -> Tensor:
        values = torch.randn(out_features, in_features, generator=random)
        return (values / math.sqrt(in_features)).to(dtype)

    hidden, inner = size.hidden, size.intermediate
    weights = {name: weight(hidden, hidden) for name in ("q", "k", "v", "o")}
    weights |= {"gate": weight(inner, hidden), "up": weight(inner, hidden), "down": weight(hidden, inner)}
    return weights | {"norm0": torch.ones(hidden, dtype=dtype), "norm1": torch.ones(hidden, dtype=dtype)}


class UnshardedLayers:
    """Parts of the block that depend on parallelism. This class runs on one rank, as the reference for its subclasses.

    x is [seq_local, 1, hidden]; inside attention and the MLP it is [seq, 1, local].
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.norms = [nn.Parameter(weights[f"norm{index}"].clone()) for index in range(2)]
        linears = self.create_linears({name: weight for name, weight in weights.items() if not name.startswith("norm")})
        self.parameters: list[nn.Parameter] = [*self.norms, *linears]

    def create_linears(self, weights: dict[str, Tensor]) -> list[nn.Parameter]:
        """Create the linear layers and return their parameters."""
        self._weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        return list(self._weights.values())

    def project(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Apply the linear layers `names` to x: q, k, v or gate, up or o or down."""
        return tuple(F.linear(x, self._weights[name]) for name in names)

    def norm_weight(self, index: int) -> Tensor:
        """Weight of norm 0 (before attention) or 1 (before the MLP)."""
        return self.norms[index]

    def finish_grads(self) -> None:
        """Complete the gradients after backward(); nothing to do on one rank."""


class FusedLayers(UnshardedLayers):
    """Column- and row-parallel layers of fused_tp.nn; q, k, v share a gather, as do gate and up."""

    def create_linears(self, weights: dict[str, Tensor]) -> list[nn.Parameter]:
        from fused_tp.nn import ColumnParallelLinear, RowParallelLinear
        from fused_tp.nn.share_gather import share_gather

        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        self._layers: dict[str, nn.Module] = {}
        for name, weight in weights.items():
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight)
            layer_class = RowParallelLinear if name in ("o", "down") else ColumnParallelLinear
            self._layers[name] = layer_class.from_linear(
                linear, mesh=self._mesh, sequence_parallel=True, sequence_dim=0
            )
        share_gather([self._layers[name] for name in ("q", "k", "v")])
        share_gather([self._layers[name] for name in ("gate", "up")])
        return [layer.get_parameter("weight") for layer in self._layers.values()]

    def project(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        return tuple(self._layers[name](x) for name in names)

    def norm_weight(self, index: int) -> Tensor:
        from fused_tp.nn.norm import with_reduced_grad

        return with_reduced_grad(self.norms[index], self._mesh)


class TransformerBlock:
    """Pre-norm transformer block as in Llama, without dropout and biases."""

    def __init__(self, size: BlockSize, layers: UnshardedLayers) -> None:
        self.size = size
        self.layers = layers
        dtype = layers.parameters[0].dtype
        inverse_frequencies = ROTARY_BASE ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angles = torch.outer(torch.arange(size.seq).float(), inverse_frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def step(self, x: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run forward and backward; return the output, dx and the complete gradient of the first norm's weight."""
        for parameter in self.layers.parameters:
            parameter.grad = None
        x = x.detach().requires_grad_()
        out = self._forward(x)
        out.backward(d_out)
        self.layers.finish_grads()
        norm_grad = self.layers.norms[0].grad
        assert x.grad is not None and norm_grad is not None
        return out.detach(), x.grad, norm_grad

    def _forward(self, x: Tensor) -> Tensor:
        layers = self.layers
        (attention_output,) = layers.project(self._attention(*layers.project(self._norm(0, x), "q", "k", "v")), "o")
        x = x + attention_output
        gate, up = layers.project(self._norm(1, x), "gate", "up")
        (down,) = layers.project(F.silu(gate) * up, "down")
        return x + down

    def _norm(self, index: int, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size.hidden,), self.layers.norm_weight(index), EPS)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(t.shape[0], -1, self.size.head_dim).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return out.squeeze(0).transpose(0, 1).reshape(out.shape[2], 1, -1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin
