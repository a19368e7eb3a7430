"""How a matmul that talks to other ranks is launched, and the checks of what it is given before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workspace import Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """Tiles and programs of a launch; equal on all ranks, because flags are counted in tiles and programs."""

    programs: int  # at most what the device runs at once
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    precision: str = "ieee"
    strip_elements: int = 8192  # of a sum over ranks at a time: 32 per thread of 8 warps

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        return -(-m // self.block_m), -(-n // self.block_n)

    def options(self, k: int) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        return {
            "PRECISION": self.precision,
            "EVEN_K": k % self.block_k == 0,
            "STRIP_M": max(1, min(self.block_m, self.strip_elements // self.block_n)),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def check_matmul(x: Tensor, weight: Tensor, workspace: Workspace) -> None:
    """Raises ValueError where x [M, K] and weight [N, K] are not what a kernel can multiply."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, K] and weight [N, K]; got {tuple(x.shape)} and {tuple(weight.shape)}.")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(f"x and weight must be both bf16, fp16 or fp32; got {x.dtype} and {weight.dtype}.")
    if not x.device == weight.device == workspace.state.device:
        raise ValueError(
            f"x, weight and the workspace must be on one device; they are on {x.device}, {weight.device} and "
            f"{workspace.state.device}."
        )


def check_like(name: str, tensor: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Raises ValueError where an optional tensor has not this shape, x's dtype and device, and rows in one piece."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}; got {tuple(tensor.shape)}.")
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(f"{name} must be {x.dtype} on {x.device} as x is; got {tensor.dtype} on {tensor.device}.")
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} must have its rows in one piece; its strides are {tensor.stride()}.")
