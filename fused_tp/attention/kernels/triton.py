"""Attention with this package's Triton kernels: they support every mask and score, and do not round between steps."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums, KernelRequest
from fused_tp.attention.kernels.torch_flash import TORCH_CUDA_KERNEL
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core.availability import AVAILABLE, Availability, has_triton, unavailable


def triton_availability(request: KernelRequest) -> Availability:
    """Available if `TritonFlash` supports calls like `request`. All scores and a gradient of lse are supported."""
    if not has_triton():
        return unavailable("Triton is not installed")
    device = None if request.device.type == "cuda" and not torch.cuda.is_available() else request.device
    try:
        kernels = _load_kernels()
    except ImportError as error:
        return unavailable(f"the Triton kernels cannot be loaded ({error})")
    if not request.has_positive_scale:
        return unavailable("the Triton attention kernels require a scale above 0")
    reason = kernels.obstacle(request.dtype, request.head_dim, request.v_head_dim, device)
    return AVAILABLE if reason is None else unavailable(reason)


class TritonFlash(AttentionKernel):
    """Attention with the Triton kernels, which multiply fp32 as IEEE fp32, not TF32."""

    name = "triton"
    reason = "the Triton kernels round once, after all steps"
    devices = ("cuda",)

    def available(self, request: KernelRequest) -> Availability:
        return triton_availability(request)

    def reason_to_avoid(self, request: KernelRequest) -> str:
        if request.device.type != "cuda":
            return "Triton's interpreter is for tests only"
        if request.allows_tile_rounding and TORCH_CUDA_KERNEL.available(request):
            return "torch's FlashAttention is preferred for a single step"
        if request.dtype == torch.float32:
            return "its float32 kernels do not use tensor cores and have small tiles"
        return ""

    def forward(
        self,
        step: Step,
        score_parameters: ScoreParameters,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        is_uninitialized: bool = False,
    ) -> None:
        tensors = (state.acc, state.row_max, state.row_sum)
        _load_kernels().flash_forward(
            q, k, v, step, to_kernel_terms(score_parameters), tensors, is_uninitialized=is_uninitialized
        )

    def forward_single_step(
        self, step: Step, score_parameters: ScoreParameters, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _load_kernels().flash_attention(
            q, k, v, step, to_kernel_terms(score_parameters), sinks=score_parameters.sinks
        )
        return result

    def backward(
        self, step: Step, score_parameters: ScoreParameters, inputs: BackwardTensors, sums: GradientSums
    ) -> None:
        """Add the gradients of this step to `sums`; bitwise equal in every run."""
        _load_kernels().flash_backward(
            inputs.grad_out,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.lse,
            inputs.delta,
            sums.dq,
            sums.dk,
            sums.dv,
            step,
            to_kernel_terms(score_parameters),
            d_slopes=sums.d_slopes,
        )


@cache
def _load_kernels() -> ModuleType:
    from fused_tp.triton_kernels import attention
    from fused_tp.triton_kernels.archive import install_shipped_kernels

    install_shipped_kernels()
    return attention


def to_kernel_terms(score_parameters: ScoreParameters) -> Any:
    """Convert `score_parameters` to `triton_kernels.attention.ScoreTerms`, the argument type of the Triton kernels."""
    kernels = _load_kernels()
    dropout_spec = score_parameters.dropout
    dropout = (
        None
        if dropout_spec is None
        else kernels.DropoutArguments(dropout_spec.p, dropout_spec.seed, dropout_spec.first_head)
    )
    return kernels.ScoreTerms(score_parameters.scale, score_parameters.softcap, score_parameters.alibi_slopes, dropout)


TRITON_KERNEL = TritonFlash()
