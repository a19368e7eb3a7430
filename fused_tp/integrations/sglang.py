"""Plugin for SGLang on CPUs: linear layers by kernels for few rows, norms in one pass, collectives by shared memory.

SGLang loads it in each of its processes through the entry point `sglang.srt.plugins`, so installing fused_tp beside
SGLang is all it takes. `FUSED_TP_SGLANG=0` turns it off, as does an `SGLANG_PLUGINS` without `fused_tp`. One line of
SGLang's log says what is on, or why nothing is.

| SGLang's                                            | fused_tp's                                   |
|-----------------------------------------------------|----------------------------------------------|
| `UnquantizedLinearMethod.apply`, logits of the head | `linear`: up to 32 rows read the weight once |
| `RMSNorm`, `GemmaRMSNorm`, `Gemma3RMSNorm`          | `rms_norm`, `add_rms_norm`                   |
| `GroupCoordinator.all_reduce`, `all_gather`         | shared memory of the group                   |

Weights stay as SGLang stores them, because it may write new values to them while it serves. Where SGLang has packed a
weight for AMX, or sums over its own shared memory, that stays, and so does all that torch.compile traces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fused_tp.backends.gemm import linear
from fused_tp.backends.shared_memory.shm import ShmTransport
from fused_tp.core import settings
from fused_tp.core.native import missing_reason
from fused_tp.integrations.engine_plugin import (
    COLLECTIVE_DTYPES,
    Signatures,
    find_change,
    find_version,
    shared_memory_of,
)
from fused_tp.ops.collectives import all_gather
from fused_tp.ops.rms_norm import add_rms_norm, rms_norm, supports_rms_norm

_TESTED = "tested: sglang 0.5.23"
_LOG_IS_READY = "managers.scheduler.configure_scheduler_process"

# Parameters of SGLang's functions by which hooks and the log line are registered.
_REGISTRATION_SIGNATURES: Signatures = {
    "sglang.srt.plugins.hook_registry": {"HookRegistry.register": ("target", "hook", "hook_type", "source")},
    "sglang.srt.managers.scheduler": {
        "configure_scheduler_process": (
            *("server_args", "gpu_id"),
            *("display_tp_rank", "display_dp_rank", "display_moe_ep_rank"),
        )
    },
}
# Parameters of SGLang's functions that the hooks wrap or call. The plugin steps aside if one has changed.
_SIGNATURES: Signatures = {
    "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod.apply": ("self", "layer", "x", "bias")},
    "sglang.srt.layers.logits_processor": {
        "LogitsProcessor._compute_lm_head": ("self", "hidden_states", "lm_head", "embedding_bias", "out"),
        "should_apply_lm_head_quant_method": ("lm_head", "quant_method"),
    },
    "sglang.srt.layers.layernorm": {
        "RMSNorm.forward_native": ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "GemmaRMSNorm.forward_native": ("self", "x", "residual", "post_residual_addition"),
        "Gemma3RMSNorm.forward_native": ("self", "x", "residual"),
    },
    "sglang.srt.distributed.parallel_state": {
        "GroupCoordinator.all_reduce": ("self", "input_"),
        "GroupCoordinator.all_gather": ("self", "input_", "dim", "output_tensor_list"),
        "is_shm_available": ("dtype", "world_size", "local_size"),
    },
    "sglang.srt.utils": {"is_cpu": (), "use_intel_amx_backend": ("layer",)},
}


def register() -> None:
    """Hook fused_tp's functions around SGLang's in this process, or log why not; SGLang's entry point."""
    logger = logging.getLogger("sglang.plugins.fused_tp")
    if name := find_change(_REGISTRATION_SIGNATURES):  # at this moment SGLang shows warnings only
        logger.warning("fused_tp: off, because %s of sglang has changed; %s.", name, _TESTED)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if reason := _reason_off():
        line = f"fused_tp: off, because {reason}."
    else:
        line = (
            "fused_tp: linear layers by kernels for few rows, collectives by shared memory; "
            f"sglang {find_version('sglang')} ({_TESTED}); FUSED_TP_SGLANG=0: off"
        )
        for target, hook in _HOOKS.items():
            HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)

    def log_line(result: None, *args: Any, **kwargs: Any) -> None:
        logger.info(line)

    # SGLang loads plugins before it sets up the log of a scheduler's process.
    HookRegistry.register(f"sglang.srt.{_LOG_IS_READY}", log_line, HookType.AFTER)


def _reason_off() -> str:
    """Return the reason why the plugin does nothing; empty if it can work."""
    if not settings.sglang_plugin_allowed():
        return "FUSED_TP_SGLANG=0 turns it off"
    if missing_reason:
        return missing_reason
    if name := find_change(_SIGNATURES):
        return f"{name} of sglang {find_version('sglang')} has changed; {_TESTED}"
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return "it supports SGLang's engine for CPUs (SGLANG_USE_CPU_ENGINE=1)"
    return ""


# -- linear layers and norms -------------------------------------------------------------------------------------------


def _apply_linear(original: Any, method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias for x [..., K] and the layer's weight [N, K]."""
    from sglang.srt.utils import use_intel_amx_backend

    if torch.compiler.is_compiling() or use_intel_amx_backend(layer):
        return original(method, layer, x, bias)
    return linear(x, layer.weight, bias)


def _compute_lm_head(
    original: Any,
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the logits [tokens, vocab] of hidden_states [tokens, K]."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
    from sglang.srt.utils import use_intel_amx_backend

    if (
        torch.compiler.is_compiling()
        or hasattr(lm_head, "set_lora")
        or not hasattr(lm_head, "weight")
        or should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
        or use_intel_amx_backend(lm_head)
        or processor.use_fp32_lm_head
        or processor.rl_on_policy_target is not None
    ):
        return original(processor, hidden_states, lm_head, embedding_bias, out=out)
    return linear(hidden_states.to(lm_head.weight.dtype), lm_head.weight)


def _make_norm_hook(eps_name: str, weight_offset: float) -> Callable[..., Any]:
    """Return a hook around forward_native of a norm with the attribute `eps_name`."""

    def compute_norm(original: Any, norm: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **kw: Any) -> Any:
        """Return the norm of x, or (the norm of x + residual, x + residual)."""
        weight = norm.weight.detach()
        if (
            torch.compiler.is_compiling()
            or any(argument is not None for argument in (*args, *kw.values()))
            or getattr(norm, "variance_size_override", None) is not None
            or getattr(norm, "override_orig_dtype", None) is not None
            or getattr(norm, "fp32_residual", False)
            or (getattr(norm, "cast_x_before_out_mul", False) and x.dtype.itemsize < 4)  # it rounds twice
            or not supports_rms_norm(x, weight, residual)
        ):
            return original(norm, x, residual, *args, **kw)
        eps = getattr(norm, eps_name)
        if residual is None:
            return rms_norm(x, weight, eps, weight_offset=weight_offset)
        return add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)

    return compute_norm


# -- collectives -------------------------------------------------------------------------------------------------------

# Of each of SGLang's groups: its shared memory or None, and the largest tensor for it.
_memory_by_group: WeakKeyDictionary[Any, tuple[ShmTransport | None, int]] = WeakKeyDictionary()


def _transport_for(group: Any, tensor: Tensor) -> ShmTransport | None:
    """Return the shared memory that is to send `tensor` over SGLang's `group`; None if SGLang is to send it."""
    from sglang.srt.distributed.parallel_state import is_shm_available

    if (
        torch.compiler.is_compiling()
        or not tensor.is_cpu
        or group.world_size == 1
        or tensor.dtype not in COLLECTIVE_DTYPES
        or is_shm_available(tensor.dtype, group.world_size, group.local_size)
    ):
        return None
    if group not in _memory_by_group:  # collective: all ranks of a group make its first call together
        _memory_by_group[group] = shared_memory_of(group.device_group)
    transport, max_bytes = _memory_by_group[group]
    return transport if 0 < tensor.nbytes <= max_bytes else None


def _all_reduce(original: Any, group: Any, input_: Tensor) -> Tensor:
    """Sum `input_` over the ranks in place, as SGLang does on CPUs, and return it."""
    if (transport := _transport_for(group, input_)) is None:
        return original(group, input_)
    if input_.is_contiguous():
        return transport.all_reduce(input_, input_)
    return input_.copy_(transport.all_reduce(input_.contiguous()))


def _all_gather(
    original: Any, group: Any, input_: Tensor, dim: int = -1, output_tensor_list: list[Tensor] | None = None
) -> Any:
    """Return the tensors of all ranks, concatenated along `dim`."""
    if output_tensor_list is not None or _transport_for(group, input_) is None:
        return original(group, input_, dim, output_tensor_list)
    return all_gather(input_, dim, group=group.device_group)


_HOOKS: dict[str, Callable[..., Any]] = {  # target below sglang.srt -> hook around it
    "layers.quantization.unquant.UnquantizedLinearMethod.apply": _apply_linear,
    "layers.logits_processor.LogitsProcessor._compute_lm_head": _compute_lm_head,
    "layers.layernorm.RMSNorm.forward_native": _make_norm_hook("variance_epsilon", 0.0),
    "layers.layernorm.GemmaRMSNorm.forward_native": _make_norm_hook("variance_epsilon", 1.0),
    "layers.layernorm.Gemma3RMSNorm.forward_native": _make_norm_hook("eps", 1.0),
    "distributed.parallel_state.GroupCoordinator.all_reduce": _all_reduce,
    "distributed.parallel_state.GroupCoordinator.all_gather": _all_gather,
}
