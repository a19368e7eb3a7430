"""Which provider computes the steps of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.schedules.attention.blocks import BLOCKS
from fused_tp.schedules.attention.provider import AttentionProvider
from fused_tp.schedules.attention.scores import Scores
from fused_tp.schedules.attention.torch_flash import CUDA_MAX_HEAD_DIM, TORCH_CPU, TORCH_CUDA


def choose_provider(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    *,
    plain: bool = True,
    grad_lse: bool = False,
) -> tuple[AttentionProvider, str]:
    """The fastest provider for such tensors and scores, and why it is that one; `grad_lse`: the log-sum-exp has a
    gradient, which torch's kernels do not take."""
    if not plain or grad_lse:
        what = "softcap, ALiBi and dropout are" if not plain else "the gradient of the log-sum-exp is"
        return BLOCKS, f"{what} not in torch's flash attention"
    if device_type == "cpu":
        return TORCH_CPU, "torch's flash attention for CPUs takes every dtype and head_dim"
    if device_type != "cuda":
        return BLOCKS, f"there is flash attention for cpu and cuda only, not for {device_type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return BLOCKS, f"FlashAttention takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if max(head_dim, v_head_dim) > CUDA_MAX_HEAD_DIM:
        return BLOCKS, f"FlashAttention takes a head_dim of at most {CUDA_MAX_HEAD_DIM}"
    return TORCH_CUDA, f"FlashAttention takes float16 and bfloat16 with a head_dim up to {CUDA_MAX_HEAD_DIM}"


def provider_for(q: Tensor, v: Tensor, scores: Scores, *, grad_lse: bool = False) -> AttentionProvider:
    """The fastest provider for q and v [B, S, H, D]."""
    return choose_provider(q.device.type, q.dtype, q.shape[-1], v.shape[-1], plain=scores.plain, grad_lse=grad_lse)[0]
