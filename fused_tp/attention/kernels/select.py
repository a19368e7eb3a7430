"""Choice of the kernel for a call: the kernel that FUSED_TP_ATTENTION names, else the first suitable one in KERNELS.

On CPUs the order follows measurements. The native kernels are the fastest, except for bf16 if torch's kernels use
matrix tiles (AMX). A dispatch table, which `fused-tp bench --tune` measures, overrides this. On GPUs the order is not
based on measurements: the Triton kernels round once for any number of steps, and torch's kernels once per tile of a
step. So torch's kernels are used only for calls of a single step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, KernelRequest
from fused_tp.attention.kernels.native import NATIVE_KERNEL
from fused_tp.attention.kernels.reference import REFERENCE_KERNEL
from fused_tp.attention.kernels.torch_flash import TORCH_CPU_KERNEL, TORCH_CUDA_KERNEL
from fused_tp.attention.kernels.triton import TRITON_KERNEL
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core import settings

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (NATIVE_KERNEL, TRITON_KERNEL, TORCH_CUDA_KERNEL, TORCH_CPU_KERNEL, REFERENCE_KERNEL)
}


def choose_kernel(request: KernelRequest) -> tuple[AttentionKernel, str]:
    """Return the kernel for calls like `request`, and the reason for the choice.

    Raises:
        ValueError: FUSED_TP_ATTENTION is not the name of a kernel, or that kernel does not support the call.
    """
    return _choose_kernel(request, forced_kernel(), settings.table_path())


def forced_kernel() -> str | None:
    """Return the kernel name in FUSED_TP_ATTENTION, or None.

    Raises:
        ValueError: FUSED_TP_ATTENTION is not the name of a kernel.
    """
    forced_name = settings.forced_attention()
    if forced_name is not None and forced_name not in KERNELS:
        raise ValueError(f"FUSED_TP_ATTENTION must be one of {', '.join(KERNELS)}, got {forced_name!r}.")
    return forced_name


def select_kernel(
    q: Tensor,
    v: Tensor,
    score_parameters: ScoreParameters,
    *,
    has_grad_lse: bool = False,
    allows_tile_rounding: bool = True,
    is_backward: bool = False,
) -> AttentionKernel:
    """Return the kernel for `q`, `v` [B, S, H, D] and `score_parameters`; flags as in `KernelRequest`."""
    dims = q.shape[-1], v.shape[-1]
    return choose_kernel(
        KernelRequest(
            q.device,
            q.dtype,
            *dims,
            score_parameters.is_plain,
            has_grad_lse,
            allows_tile_rounding,
            score_parameters.scale > 0,
            is_backward,
        )
    )[0]


@lru_cache(maxsize=256)
def _choose_kernel(request: KernelRequest, forced_name: str | None, table: str | None) -> tuple[AttentionKernel, str]:
    """Implement `choose_kernel`. `table`, the path of the dispatch table, is only a cache key: the kernels read it."""
    if forced_name is not None:
        # In the backward, lse may have a gradient on some ranks only. A forced kernel that does not support this
        # gradient must not raise on those ranks only: they use another kernel (below).
        availability = KERNELS[forced_name].available(replace(request, has_grad_lse=False))
        if not availability:
            raise ValueError(f"FUSED_TP_ATTENTION={forced_name} does not support this call: {availability.reason}.")
        if KERNELS[forced_name].available(request):
            return KERNELS[forced_name], f"FUSED_TP_ATTENTION={forced_name} forces it"
    notes = ""
    for name, kernel in KERNELS.items():
        reason = kernel.available(request).reason or kernel.reason_to_avoid(request)
        if not reason:
            return kernel, kernel.reason + notes
        if request.device.type in kernel.devices:
            notes += f"; no {name}: {reason}"
    raise AssertionError("unreachable: torch-blocks supports every call")
