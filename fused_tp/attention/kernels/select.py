"""Choice of the kernel for a call: the first suitable one in the order of KERNELS, or that of FUSED_TP_ATTENTION.

On CPUs the order follows measurements: the native kernels are the fastest, except for bf16 where torch's kernels use
matrix tiles (AMX), or where a dispatch table says otherwise (`fused-tp bench --tune` measures it). On GPUs nothing has
been measured yet: Triton's kernels round once for any number of steps, torch's once per tile of a step, so torch's
serve calls of a single step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery
from fused_tp.attention.kernels.native import NATIVE
from fused_tp.attention.kernels.reference import REFERENCE
from fused_tp.attention.kernels.torch_flash import TORCH_CPU, TORCH_CUDA
from fused_tp.attention.kernels.triton import TRITON
from fused_tp.attention.spec import Scores
from fused_tp.core import settings

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel for kernel in (NATIVE, TRITON, TORCH_CUDA, TORCH_CPU, REFERENCE)
}


def choose_kernel(query: KernelQuery) -> tuple[AttentionKernel, str]:
    """The kernel for such calls, and the reason for the choice.

    Raises:
        ValueError: FUSED_TP_ATTENTION names no kernel, or one that cannot serve the call.
    """
    return _choose(query, forced_kernel(), settings.table_path())


def forced_kernel() -> str | None:
    """The kernel name in FUSED_TP_ATTENTION, or None.

    Raises:
        ValueError: there is no such kernel.
    """
    forced = settings.forced_attention()
    if forced is not None and forced not in KERNELS:
        raise ValueError(f"FUSED_TP_ATTENTION names {forced!r}; there are {', '.join(KERNELS)}.")
    return forced


def kernel_for(
    q: Tensor, v: Tensor, scores: Scores, *, grad_lse: bool = False, single: bool = True, backward: bool = False
) -> AttentionKernel:
    """The kernel for q and v [B, S, H, D]."""
    dims = q.shape[-1], v.shape[-1]
    return choose_kernel(
        KernelQuery(q.device, q.dtype, *dims, scores.plain, grad_lse, single, scores.scale > 0, backward)
    )[0]


@lru_cache(maxsize=256)
def _choose(query: KernelQuery, forced: str | None, table: str | None) -> tuple[AttentionKernel, str]:
    """Implement `choose_kernel`; `table`, the dispatch table, is only a cache key: kernels read it by themselves."""
    if forced is not None:
        # Only ranks whose log-sum-exp has a gradient know this, in the backward; they must not raise alone.
        available = KERNELS[forced].available(replace(query, grad_lse=False))
        if not available:
            raise ValueError(f"FUSED_TP_ATTENTION={forced} cannot serve this call: {available.reason}.")
        if KERNELS[forced].available(query):
            return KERNELS[forced], f"FUSED_TP_ATTENTION={forced} forces it"
    notes = ""
    for name, kernel in KERNELS.items():
        reason = kernel.available(query).reason or kernel.deprioritized(query)
        if not reason:
            return kernel, kernel.reason + notes
        if query.device.type in kernel.devices:
            notes += f"; no {name}: {reason}"
    raise AssertionError("torch-blocks serves everything")
