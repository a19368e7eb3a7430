"""Which kernel computes the steps of a call: the first in the order of KERNELS that can, or FUSED_TP_ATTENTION's.

The order holds what was measured: on CPUs the native kernels are the fastest but for bf16 where torch's have matrix
tiles (AMX), or where a dispatch table says otherwise (`fused-tp bench --tune` measures it). On GPUs nothing has been
measured yet: Triton's kernels round once however many steps there are, torch's once each tile of a step; so torch's
serve what is a single one.
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
from fused_tp.runtime import settings

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel for kernel in (NATIVE, TRITON, TORCH_CUDA, TORCH_CPU, REFERENCE)
}


def choose_kernel(query: KernelQuery) -> tuple[AttentionKernel, str]:
    """The kernel for such calls, and why it is that one.

    Raises:
        ValueError: FUSED_TP_ATTENTION names none, or one that cannot.
    """
    return _choose(query, forced_kernel(), settings.table_path())


def forced_kernel() -> str | None:
    """The name that FUSED_TP_ATTENTION gives, or None.

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
    """`table`: the one in force, which kernels read by themselves; here it tells calls apart."""
    if forced is not None:
        # Only ranks whose log-sum-exp has a gradient know of it, in the backward: it must not make them alone raise.
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
