"""Rival: Megatron-Core's parallel linear layers with sequence parallelism, on gloo (pip package megatron-core).

Megatron-Core targets GPUs. On CPU ranks its layers need three changes, none of which slows them down:

1. `use_cpu_initialization=True` and `perform_initialization=False`: weights are on the CPU, and are copied in here.
2. `gradient_accumulation_fusion=False`: the fused weight gradient is a CUDA extension of APEX.
3. It allocates buffers for gathered and scattered tensors on `torch.cuda.current_device()`, which fails without a GPU.
   Ranks that run Megatron stay inside `fused_tp.integrations.megatron.on_cpu()`, where that returns "cpu".

Megatron's warning about CUDA_DEVICE_MAX_CONNECTIONS concerns CUDA streams and does not apply here.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .case import Unavailable
from .cpu_block import UnshardedLayers
from .ranks import RankContext


def initialize_megatron(context: RankContext) -> None:
    """Form one tensor-parallel group of Megatron from all ranks; a collective call.

    Raises:
        Unavailable: the package is missing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about Transformer Engine and APEX, which are for GPUs
            from megatron.core import parallel_state

            from fused_tp.integrations.megatron import on_cpu
    except ImportError as error:
        raise Unavailable(f"Megatron-Core is not installed ({error}); pip install megatron-core.") from error
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=context.world_size)
        _on_cpu_until_exit.enter_context(on_cpu())
        # Megatron calls collectives by names that torch deprecates, and recommends settings of CUDA.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", module="megatron")


_on_cpu_until_exit = ExitStack()  # never closed: the rank's process ends with the benchmark


class MegatronLayers(UnshardedLayers):
    """Layers of the block as in Megatron's own transformer: q, k, v in one projection, gate and up in another."""

    def create_linears(self, weights: dict[str, Tensor]) -> list[nn.Parameter]:
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        size, rank = dist.get_world_size(), dist.get_rank()
        config = ModelParallelConfig(
            tensor_model_parallel_size=size,
            sequence_parallel=True,
            params_dtype=weights["q"].dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        self._layers: dict[tuple[str, ...], nn.Module] = {}
        for names in (("q", "k", "v"), ("gate", "up"), ("o",), ("down",)):
            layer_options = {"config": config, "init_method": _keep_weight, "bias": False}
            if names in (("o",), ("down",)):
                shard = weights[names[0]].chunk(size, dim=1)[rank]
                sizes = (shard.shape[1] * size, shard.shape[0])
                layer = RowParallelLinear(*sizes, input_is_parallel=True, skip_bias_add=False, **layer_options)
            else:
                shard = torch.cat([weights[name].chunk(size)[rank] for name in names])
                layer = ColumnParallelLinear(shard.shape[1], shard.shape[0] * size, **layer_options)
            with torch.no_grad():
                layer.get_parameter("weight").copy_(shard)
            self._layers[names] = layer
        return [parameter for layer in self._layers.values() for parameter in layer.parameters()]

    def project(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        out, _ = self._layers[names](x)
        return out.chunk(len(names), dim=-1)

    def finish_grads(self) -> None:
        """All-reduce the norms' gradients as one tensor, like Megatron's finalize_model_grads."""
        grads = [norm.grad for norm in self.norms if norm.grad is not None]
        flat_grads = torch.cat(grads)
        dist.all_reduce(flat_grads)
        for grad, summed in zip(grads, flat_grads.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed)


def _keep_weight(weight: Tensor) -> None:
    """Keep the weight unchanged, as an init_method."""
