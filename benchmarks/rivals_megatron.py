"""Rival: Megatron-Core's parallel linear layers with sequence parallelism, on gloo (pip package megatron-core).

Megatron-Core is made for GPUs. On CPU ranks its layers need three things, none of which slows them down:

1. `use_cpu_initialization=True` and `perform_initialization=False`: weights live on the CPU, and are copied in here.
2. `gradient_accumulation_fusion=False`: the fused weight gradient is a CUDA extension of APEX.
3. Buffers for gathered and scattered tensors are made on `torch.cuda.current_device()`, which fails without a GPU. In
   ranks that race Megatron that function answers "cpu"; nothing else here asks it.

CUDA_DEVICE_MAX_CONNECTIONS, which it warns about, orders CUDA streams and has no meaning here.
"""

from __future__ import annotations

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .case import Unavailable
from .ranks import RankContext


def prepare(context: RankContext) -> None:
    """Make all ranks one tensor-parallel group of Megatron's. Every rank calls it.

    Raises:
        Unavailable: the package is missing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Transformer Engine and APEX, which are for GPUs
            from megatron.core import parallel_state
    except ImportError as error:
        raise Unavailable(f"Megatron-Core is not installed ({error}); pip install megatron-core.") from error
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=context.world_size)
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")).start()  # for good: the rank ends with us
        # It calls collectives by names that torch deprecates, and recommends settings of CUDA.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", module="megatron")


class MegatronLayers:
    """The block's layers as Megatron's own transformer has them: q, k, v in one projection, gate and up in one."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        size, rank = dist.get_world_size(), dist.get_rank()
        dtype = weights["q"].dtype
        config = ModelParallelConfig(
            tensor_model_parallel_size=size,
            sequence_parallel=True,
            params_dtype=dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )

        def column(*names: str) -> nn.Module:
            shard = torch.cat([weights[name].chunk(size)[rank] for name in names])
            layer = ColumnParallelLinear(
                shard.shape[1], shard.shape[0] * size, config=config, init_method=_leave, bias=False
            )
            return _filled(layer, shard)

        def row(name: str) -> nn.Module:
            out_features, in_features = weights[name].shape
            layer = RowParallelLinear(
                in_features,
                out_features,
                config=config,
                init_method=_leave,
                bias=False,
                input_is_parallel=True,
                skip_bias_add=False,
            )
            return _filled(layer, weights[name].chunk(size, dim=1)[rank])

        self._qkv, self._gate_up = column("q", "k", "v"), column("gate", "up")
        self._o, self._down = row("o"), row("down")
        self._norms = [nn.Parameter(weights[f"norm{index}"].clone()) for index in range(2)]
        layers = (self._qkv, self._gate_up, self._o, self._down)
        self.parameters = [*self._norms, *(p for layer in layers for p in layer.parameters())]

    def norm_weight(self, index: int) -> Tensor:
        return self._norms[index]

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _run(self._qkv, x).chunk(3, dim=-1)
        return q, k, v

    def attention_out(self, x: Tensor) -> Tensor:
        return _run(self._o, x)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = _run(self._gate_up, x).chunk(2, dim=-1)
        return gate, up

    def down(self, x: Tensor) -> Tensor:
        return _run(self._down, x)

    def finish_grads(self) -> None:
        """Sum the norms' gradients in one piece, as Megatron's finalize_model_grads does."""
        grads = [norm.grad for norm in self._norms if norm.grad is not None]
        together = torch.cat(grads)
        dist.all_reduce(together)
        for grad, summed in zip(grads, together.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed)

    def norm_grad(self) -> Tensor:
        grad = self._norms[0].grad
        assert grad is not None
        return grad


def _leave(weight: Tensor) -> None:
    """An init_method that leaves the weight as it is."""


def _filled(layer: nn.Module, shard: Tensor) -> nn.Module:
    with torch.no_grad():
        layer.get_parameter("weight").copy_(shard)
    return layer


def _run(layer: nn.Module, x: Tensor) -> Tensor:
    out, _ = layer(x)
    return out
