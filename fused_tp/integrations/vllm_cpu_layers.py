"""Layers and communicator of the plugin for vLLM (`fused_tp.integrations.vllm`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers import linear as linear_layers
from vllm.model_executor.layers import vocab_parallel_embedding as embedding_layers
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from fused_tp import _core
from fused_tp.backends.shared_memory.shm import ShmTransport
from fused_tp.integrations.engine_plugin import COLLECTIVE_DTYPES, LayerType, shared_memory_of
from fused_tp.ops.collectives import all_gather, all_reduce, reduce_scatter
from fused_tp.ops.packed_linear import pack_weight, packed_linear, reason_not_packable
from fused_tp.ops.rms_norm import add_rms_norm, rms_norm, supports_rms_norm

logger = init_logger("vllm.plugins.fused_tp")

_COMMUNICATOR = "fused_tp.integrations.vllm_cpu_layers.SharedMemoryCommunicator"


def register() -> None:
    """Register the layers for those of vLLM with the same names, and the communicator for its CPU platform."""
    for base, layers in ((PluggableLayer, _LAYERS), (CustomOp, _NORMS)):
        for name, layer in layers.items():
            registered = op_registry_oot.get(name)
            if registered is None:
                base.register_oot(layer, name=name)
            elif registered is not layer:
                logger.warning("fused_tp: %s stays that of another plugin, %s.", name, registered.__module__)
    if not _core.use_openmp_threads(True):  # vLLM pins them to the rank's cores
        logger.warning("fused_tp: no OpenMP runtime is loaded, so threads of a rank may share one core.")
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)


# -- weights ----------------------------------------------------------------------------------------------------------


def _pack(layer: Any, *, keep_weight: bool) -> bool:
    """Pack the weight of `layer`, and free it unless `keep_weight`; return False if vLLM's matmul is to be used."""
    weight = layer.weight
    if reason := reason_not_packable(weight) or _reason_slower(weight):
        logger.debug("fused_tp: vLLM's matmul for %s: %s.", getattr(layer, "prefix", layer), reason)
        return False
    layer.packed_weight = pack_weight(weight)
    if not keep_weight:
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
    return True


_MEASURED_ROWS = (1, 8, 64, 256)
_MEASUREMENTS = 3
_EVICTED_BYTES = 1 << 26  # twice the L3 cache of eight cores of an AMD EPYC
_MAX_SLOWER = 1.25


_reasons_slower: dict[tuple[torch.Size, torch.dtype], str] = {}


def _reason_slower(weight: Tensor) -> str:
    """Return the reason why vLLM's matmul is better for weights of this shape on this CPU; empty if it is not.

    Measured once per shape. The limit is above the noise, so that this does not change the choice, and with it the bits
    of a run. Packed weights do not use the multipliers of AMX.
    """
    key = weight.shape, weight.dtype
    if key not in _reasons_slower:
        _reasons_slower[key] = _measure_reason_slower(weight.detach())
    return _reasons_slower[key]


def _measure_reason_slower(weight: Tensor) -> str:
    stock_layer = SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False), bias=None)
    dispatch_cpu_unquantized_gemm(stock_layer, remove_weight=False)
    packed = pack_weight(weight)
    # Before each call, the weights are evicted from the caches, which hold none of the next layer's while a model runs.
    # In the L3 cache vLLM's would be faster: this package's kernels prefetch for the latency of memory.
    evictor = torch.empty(_EVICTED_BYTES, dtype=torch.uint8, device="cpu")

    def measure(multiply: Callable[..., object], *operands: object) -> float:
        evictor.fill_(1)
        start = time.perf_counter()
        multiply(*operands)
        return time.perf_counter() - start

    for num_rows in _MEASURED_ROWS:
        x = torch.ones(num_rows, weight.shape[1], dtype=weight.dtype, device="cpu")
        times = [
            (measure(packed_linear, x, packed), measure(stock_layer.cpu_linear, x, stock_layer.weight, None))
            for _ in range(_MEASUREMENTS)
        ]
        own, stock = (min(column) for column in zip(*times, strict=True))
        if own > _MAX_SLOWER * stock:
            return f"it takes {stock / own:.2f} of a packed weight's time for {num_rows} rows"
    return ""


class PackedLinearMethod(UnquantizedLinearMethod):
    """UnquantizedLinearMethod with a packed weight in place of the weight."""

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, or leave it to vLLM."""
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not _pack(layer, keep_weight=False):
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight^T + bias."""
        if layer.packed_weight is None:
            return super().apply(layer, x, bias)
        return packed_linear(x, layer.packed_weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """UnquantizedEmbeddingMethod with a packed weight for the logits.

    The weight is kept as well, as vLLM keeps it: it may be that of the embedding, and vLLM reads it to compare the
    heads of a draft and its target, and for logits of another dtype.
    """

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, or leave it to vLLM."""
        layer.is_prepared = True
        if not _pack(layer, keep_weight=True):
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight^T + bias."""
        if not layer.is_prepared:
            PackedHeadMethod.process_weights_after_loading(self, layer)
        if layer.packed_weight is None:
            return super().apply(layer, x, bias)
        return packed_linear(x, layer.packed_weight, bias)


class EmbeddingMethod(PackedHeadMethod):
    """PackedHeadMethod for an embedding, whose weight is packed only if a model takes the embedding for its head."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight as it is: a lookup needs no packed copy, which vLLM makes."""


# -- layers -----------------------------------------------------------------------------------------------------------


class _PackedLinear:
    """Mixin of linear layers: replaces the method of unquantized weights."""

    packed_weight: Tensor | None
    quant_method: Any
    register_buffer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("packed_weight", None, persistent=False)
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = PackedLinearMethod()


class PackedReplicatedLinear(_PackedLinear, linear_layers.ReplicatedLinear, metaclass=LayerType):
    """vLLM's layer with a packed weight."""


class PackedColumnParallelLinear(_PackedLinear, linear_layers.ColumnParallelLinear, metaclass=LayerType):
    """vLLM's layer with a packed weight."""


class PackedMergedLinear(_PackedLinear, linear_layers.MergedColumnParallelLinear, metaclass=LayerType):
    """vLLM's layer with a packed weight."""


class PackedQKVLinear(_PackedLinear, linear_layers.QKVParallelLinear, metaclass=LayerType):
    """vLLM's layer with a packed weight."""


class PackedRowParallelLinear(_PackedLinear, linear_layers.RowParallelLinear, metaclass=LayerType):
    """vLLM's layer with a packed weight, whose result is summed over the ranks in place."""

    def forward(self, input_: Tensor) -> Any:
        """Return (y, bias that was not added), or y alone without `return_bias`."""
        communicator = None if torch.compiler.is_compiling() else _tp_communicator(self.tp_size)
        if communicator is None or self.packed_weight is None or not (self.reduce_results and self.input_is_parallel):
            return super().forward(input_)
        bias = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias
        y = packed_linear(input_, self.packed_weight, bias)
        y = communicator.all_reduce_(y)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


class _PackedVocabulary:
    """Mixin of embedding and head: replaces the method of unquantized weights.

    Attributes:
        method: the method's class.
        is_prepared: True once the weight is packed, or left to vLLM's matmul.
    """

    packed_weight: Tensor | None
    quant_method: Any
    register_buffer: Any
    method: type[PackedHeadMethod]
    is_prepared = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("packed_weight", None, persistent=False)
        if type(self.quant_method) is UnquantizedEmbeddingMethod:
            self.quant_method = self.method()


class PackedEmbedding(_PackedVocabulary, embedding_layers.VocabParallelEmbedding, metaclass=LayerType):
    """vLLM's layer without vLLM's packed copy of the weight."""

    method = EmbeddingMethod


class PackedHead(_PackedVocabulary, embedding_layers.ParallelLMHead, metaclass=LayerType):
    """vLLM's layer with a packed weight."""

    method = PackedHeadMethod


class _OnePassNorm:
    """Mixin of norms: one pass over the rows. Compiled graphs keep vLLM's operations, which they fuse."""

    weight_offset = 0.0
    weight: Any
    variance_epsilon: Any
    forward_native: Any

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x, or (the norm of x + residual, x + residual).

        Not in place, although vLLM allows it in RMSNorm: Gemma's callers may use the inputs again.
        """
        weight = self.weight.data
        if (
            torch.compiler.is_compiling()
            or not getattr(self, "has_weight", True)
            or getattr(self, "variance_size_override", None) is not None
            or not supports_rms_norm(x, weight, residual)
        ):
            return self.forward_native(x, residual)
        if residual is None:
            return rms_norm(x, weight, self.variance_epsilon, weight_offset=self.weight_offset)
        return add_rms_norm(x, residual, weight, self.variance_epsilon, weight_offset=self.weight_offset)


class OnePassRMSNorm(_OnePassNorm, layernorm.RMSNorm):
    """vLLM's layer in one pass."""


class OnePassGemmaRMSNorm(_OnePassNorm, layernorm.GemmaRMSNorm):
    """vLLM's layer in one pass."""

    weight_offset = 1.0


_LAYERS = {
    "ReplicatedLinear": PackedReplicatedLinear,
    "ColumnParallelLinear": PackedColumnParallelLinear,
    "MergedColumnParallelLinear": PackedMergedLinear,
    "QKVParallelLinear": PackedQKVLinear,
    "RowParallelLinear": PackedRowParallelLinear,
    "VocabParallelEmbedding": PackedEmbedding,
    "ParallelLMHead": PackedHead,
}
_NORMS = {"RMSNorm": OnePassRMSNorm, "GemmaRMSNorm": OnePassGemmaRMSNorm}


# -- collectives ------------------------------------------------------------------------------------------------------


def _tp_communicator(tp_size: int) -> SharedMemoryCommunicator | None:
    """Return the tensor-parallel group's communicator; None for one rank, or if the ranks share no memory."""
    if tp_size == 1:
        return None
    communicator = get_tp_group().device_communicator
    return communicator if isinstance(communicator, SharedMemoryCommunicator) and communicator.transport else None


class SharedMemoryCommunicator(CpuCommunicator):
    """vLLM's CpuCommunicator, with the tensor-parallel group's collectives through fused_tp's shared memory.

    Attributes:
        transport: the group's shared memory; None for other groups, for one rank, and if the ranks share no memory.
        max_bytes: largest tensor for it, equal on all ranks; 0 without it.
    """

    transport: ShmTransport | None = None
    max_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.unique_name.split(":")[0] == "tp" and self.world_size > 1:
            self.transport, self.max_bytes = shared_memory_of(self.device_group)

    def _transport_for(self, tensor: Tensor) -> ShmTransport | None:
        """Return the transport if it is to send `tensor`; None if vLLM is."""
        return self.transport if 0 < tensor.nbytes <= self.max_bytes and tensor.dtype in COLLECTIVE_DTYPES else None

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of `input_` over the ranks."""
        if torch.compiler.is_compiling() and self.max_bytes == sys.maxsize and input_.dtype in COLLECTIVE_DTYPES:
            return all_reduce(input_, group=self.device_group)
        if torch.compiler.is_compiling() or (transport := self._transport_for(input_)) is None:
            return super().all_reduce(input_)
        return transport.all_reduce(input_.contiguous())

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks in place, and return it."""
        if (transport := self._transport_for(tensor)) is None:
            return super().all_reduce(tensor)
        return transport.all_reduce(tensor, tensor)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all ranks, concatenated along `dim`."""
        if torch.compiler.is_compiling() or self._transport_for(input_) is None:
            return super().all_gather(input_, dim)
        return all_gather(input_, dim, group=self.device_group)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of `dim` of the sum over the ranks."""
        if torch.compiler.is_compiling() or self._transport_for(input_) is None:
            return super().reduce_scatter(input_, dim)
        return reduce_scatter(input_, dim, group=self.device_group)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Return the tensors of all ranks, concatenated along `dim`, on rank `dst` of the group, and None elsewhere."""
        if (transport := self._transport_for(input_)) is None:
            return super().gather(input_, dst, dim)
        return transport.gather(input_, dst, dim)
