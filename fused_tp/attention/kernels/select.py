"""Which provider computes the steps of a call: the first in the order of PROVIDERS that can, or FUSED_TP_ATTENTION's.

The order holds what was measured: on CPUs the native kernels are the fastest but for bf16 where torch's have matrix
tiles (AMX). On GPUs nothing has been measured yet: Triton's kernels round once however many steps there are, torch's
once each piece of a step; so torch's serve what is a single one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fused_tp.attention.kernels import native, triton
from fused_tp.attention.kernels.base import AttentionProvider
from fused_tp.attention.kernels.reference import BLOCKS
from fused_tp.attention.kernels.torch_flash import CUDA_MAX_HEAD_DIM, TORCH_CPU, TORCH_CUDA
from fused_tp.attention.scores import Scores
from fused_tp.runtime import settings

NATIVE = native.NativeCpu()


@dataclass(frozen=True)
class Wanted:
    """What decides about a provider.

    Attributes:
        plain: scores are scale * q.k, and nothing is dropped.
        grad_lse: the log-sum-exp has a gradient.
        single: there is one step only, in one piece, so that what torch's kernels round is rounded once.
        rising: scale is above 0.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    plain: bool = True
    grad_lse: bool = False
    single: bool = True
    rising: bool = True


@dataclass(frozen=True)
class _Entry:
    provider: AttentionProvider
    reason: str
    obstacle: Callable[[Wanted], str | None]  # why it cannot
    yields: Callable[[Wanted], str | None] = lambda wanted: None  # why it could, and another is better


def choose_provider(wanted: Wanted) -> tuple[AttentionProvider, str]:
    """The provider for such calls, and why it is that one.

    Raises:
        ValueError: FUSED_TP_ATTENTION names none, or one that cannot.
    """
    return _choose(wanted, forced_provider())


def forced_provider() -> str | None:
    """The name that FUSED_TP_ATTENTION gives, or None.

    Raises:
        ValueError: there is no such provider.
    """
    forced = settings.forced_attention()
    if forced is not None and forced not in PROVIDERS:
        raise ValueError(f"FUSED_TP_ATTENTION names {forced!r}; there are {', '.join(PROVIDERS)}.")
    return forced


def provider_for(
    q: Tensor, v: Tensor, scores: Scores, *, grad_lse: bool = False, single: bool = True
) -> AttentionProvider:
    """The provider for q and v [B, S, H, D]."""
    rising = scores.scale > 0
    wanted = Wanted(q.device, q.dtype, q.shape[-1], v.shape[-1], scores.plain, grad_lse, single, rising)
    return choose_provider(wanted)[0]


@lru_cache(maxsize=256)
def _choose(wanted: Wanted, forced: str | None) -> tuple[AttentionProvider, str]:
    if forced is not None:
        # Only ranks whose log-sum-exp has a gradient know of it, in the backward: it must not make them alone raise.
        obstacle = PROVIDERS[forced].obstacle(replace(wanted, grad_lse=False))
        if obstacle is not None:
            raise ValueError(f"FUSED_TP_ATTENTION={forced} cannot serve this call: {obstacle}.")
        if PROVIDERS[forced].obstacle(wanted) is None:
            return PROVIDERS[forced].provider, f"FUSED_TP_ATTENTION={forced} forces it"
    notes = ""
    for name, entry in PROVIDERS.items():
        reason = entry.obstacle(wanted) or entry.yields(wanted)
        if reason is None:
            return entry.provider, entry.reason + notes
        if _is_for(name, wanted.device):
            notes += f"; no {name}: {reason}"
    raise AssertionError("torch-blocks serves everything")


def _is_for(name: str, device: torch.device) -> bool:
    """Whether somebody would look for that provider on such a device."""
    cuda = ("triton", "torch-cuda")
    return (name in ("native-cpu", "torch-cpu") and device.type == "cpu") or (name in cuda and device.type == "cuda")


def _no_native(wanted: Wanted) -> str | None:
    like = torch.empty((1, 1, 1, 1), dtype=wanted.dtype, device="cpu" if wanted.device.type == "cpu" else "meta")
    reason = NATIVE.obstacle(like, like, like, Scores(1.0))
    return None if reason is None else reason[0].lower() + reason[1:].rstrip(".")


def _torch_has_tiles(wanted: Wanted) -> str | None:
    if wanted.single and _no_torch(wanted) is None and not NATIVE.is_faster(wanted.dtype):
        return "torch's kernels use this CPU's matrix tiles (AMX)"
    return None


def _no_triton(wanted: Wanted) -> str | None:
    scores = Scores(1.0 if wanted.rising else -1.0)
    return triton.obstacle(wanted.device, wanted.dtype, wanted.head_dim, wanted.v_head_dim, scores)


def _others_are_better(wanted: Wanted) -> str | None:
    if wanted.device.type != "cuda":
        return "interpreted kernels are for tests"
    if wanted.single and _no_torch_cuda(wanted) is None:
        return "torch's FlashAttention serves what is a single step"
    if wanted.dtype == torch.float32:
        return "in float32, exact, its kernels multiply without tensor cores in small tiles"
    return None


def _no_torch(wanted: Wanted) -> str | None:
    if not wanted.plain:
        return "torch's kernels know no softcap, ALiBi and dropout by position"
    if not wanted.rising:
        return "torch's kernels mask scores before they scale them, which takes a scale above 0"
    return "torch's kernels take no gradient of the log-sum-exp" if wanted.grad_lse else None


def _no_torch_cpu(wanted: Wanted) -> str | None:
    return "it takes CPU tensors" if wanted.device.type != "cpu" else _no_torch(wanted)


def _no_torch_cuda(wanted: Wanted) -> str | None:
    if wanted.device.type != "cuda":
        return "it takes CUDA tensors"
    if wanted.dtype not in (torch.float16, torch.bfloat16):
        return f"torch's attention on GPUs takes float16 and bfloat16, not {str(wanted.dtype).removeprefix('torch.')}"
    if max(wanted.head_dim, wanted.v_head_dim) > CUDA_MAX_HEAD_DIM:
        return f"torch's attention on GPUs takes a head_dim of at most {CUDA_MAX_HEAD_DIM}"
    return _no_torch(wanted)


PROVIDERS = {
    entry.provider.name: entry
    for entry in (
        _Entry(NATIVE, "the native kernels have every mask and score", _no_native, _torch_has_tiles),
        _Entry(triton.TRITON, "the Triton kernels round once in all steps", _no_triton, _others_are_better),
        _Entry(TORCH_CUDA, "torch's FlashAttention serves plain scores", _no_torch_cuda),
        _Entry(TORCH_CPU, "torch's flash attention serves plain scores", _no_torch_cpu),
        _Entry(BLOCKS, "plain torch serves every device, dtype and score", lambda wanted: None),
    )
}
