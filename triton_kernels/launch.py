"""How a matmul that talks to other ranks is launched, and the checks of what it is given before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configs import KINDS, GemmConfig, gemm_configs
from .workspace import Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """Programs and tiles of a launch; equal on all ranks, because flags are counted in tiles and programs."""

    programs: int  # at most what the device runs at once
    config: GemmConfig  # one that needs no descriptors
    precision: str = "ieee"  # of fp32: "ieee" or "tf32"
    strip_elements: int = 8192  # of a sum over ranks at a time: 32 per thread of 8 warps

    @property
    def block_m(self) -> int:
        return self.config.block_m

    @property
    def block_n(self) -> int:
        return self.config.block_n

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        return -(-m // self.block_m), -(-n // self.block_n)

    def constants(self) -> dict[str, Any]:
        """Constexprs that are the same for all K."""
        return {
            "PRECISION": self.precision,
            "STRIP_M": max(1, min(self.block_m, self.strip_elements // self.block_n)),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.config.block_k,
            "GROUP_M": self.config.group_m,
        }

    def options(self, k: int) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        return self.constants() | {"EVEN_K": k % self.config.block_k == 0} | self.config.options()


def launches(arch: int) -> Iterator[tuple[str, str, Launch]]:
    """(kind of matmul, element type, launch) of what is shipped for `arch`: what the tests compile."""
    for kind in KINDS:
        if kind != "fp8e4nv":  # terms of a sum do not travel in 8 bits
            element = "fp32" if kind in ("tf32", "ieee") else kind
            for config in gemm_configs(arch, kind, tma=False, gated=False):
                precision = kind if element == "fp32" else "ieee"
                yield kind, element, Launch(config.programs_per_sm, config, precision)


def compile_arguments(function: Any, element: str) -> dict[str, str | int | None]:
    """What `resources.Variant` wants to know of a kernel's run-time arguments, for contiguous operands."""
    words = ("workspaces_ptr", "state_ptr", "error_ptr")
    wide = ("half_bytes", "timeout_ns", "terms_offset", "sums_offset")
    known = dict.fromkeys(words, "*i64") | dict.fromkeys(wide, "i64") | {"eps": "fp32", "stride_xk": 1, "stride_wk": 1}
    return {
        name: known.get(name, f"*{element}" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
        if not name.isupper() or name in ("M", "N", "K")
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
