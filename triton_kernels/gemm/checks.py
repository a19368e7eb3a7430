"""The checks of what `gemm` is given: each raises a ValueError that names the argument, before anything runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .epilogues import ACTIVATIONS

# What is multiplied, and Triton's names of it.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}


def check_operands(x: Tensor, weight: Tensor, gate_weight: Tensor | None, precision: str) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, K] and weight [N, K]; got {tuple(x.shape)} and {tuple(weight.shape)}.")
    if gate_weight is not None and gate_weight.shape != weight.shape:
        given = f"{tuple(gate_weight.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"gate_weight must have weight's shape [N, K]; they are {given}.")
    for name, t in (("weight", weight), ("gate_weight", gate_weight)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype; they are {t.dtype} and {x.dtype}.")
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} must be on x's device; they are on {t.device} and {x.device}.")
    if x.dtype not in DTYPES:
        given = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"x must be one of {given}; got {x.dtype}.")
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision must be 'ieee' or 'tf32'; got {precision!r}.")


def check_epilogue(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
    if gate_bias is not None and gate_weight is None:
        raise ValueError("gate_bias needs a gate_weight.")
    for name, vector in (("bias", bias), ("gate_bias", gate_bias)):
        if vector is None:
            continue
        check_vector(name, vector, weight.shape[0], x)
        if vector.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{name} must be bf16, fp16 or fp32; got {vector.dtype}.")


def check_vector(name: str, vector: Tensor, length: int, x: Tensor) -> None:
    if tuple(vector.shape) != (length,):
        raise ValueError(f"{name} must be [{length}]; got {tuple(vector.shape)}.")
    if vector.device != x.device:
        raise ValueError(f"{name} must be on x's device; they are on {vector.device} and {x.device}.")
    if length > 1 and vector.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous; its stride is {vector.stride(0)}.")


def check_scales(
    x: Tensor,
    weight: Tensor,
    gate_weight: Tensor | None,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    gate_scale: Tensor | None,
) -> str:
    """The kind of the scales, one of epilogues.SCALES."""
    given = {"x_scale": x_scale, "weight_scale": weight_scale, "gate_scale": gate_scale}
    wanted = {"x_scale", "weight_scale"} | ({"gate_scale"} if gate_weight is not None else set())
    found = {name for name, scale in given.items() if scale is not None}
    if not found:
        return "none"
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{', '.join(sorted(found))}: only fp8 operands have scales; x is {x.dtype}.")
    if found != wanted:
        raise ValueError(f"scales must be given as {sorted(wanted)} together; got {sorted(found)}.")
    scales = {name: scale for name, scale in given.items() if scale is not None}
    for name, scale in scales.items():
        if scale.dtype != torch.float32:
            raise ValueError(f"{name} must be fp32; got {scale.dtype}.")
    if all(scale.ndim == 0 for scale in scales.values()):
        for name, scale in scales.items():
            if scale.device != x.device:
                raise ValueError(f"{name} must be on x's device; they are on {scale.device} and {x.device}.")
        return "tensor"
    for name, scale in scales.items():
        check_vector(name, scale, x.shape[0] if name == "x_scale" else weight.shape[0], x)
    return "row"


def check_out(x: Tensor, weight: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result."""
    fp8 = x.dtype == torch.float8_e4m3fn
    allowed = (torch.bfloat16, torch.float16) if fp8 else (x.dtype,)
    dtype = out_dtype or (out.dtype if out is not None else allowed[0])
    if dtype not in allowed:
        raise ValueError(f"out of {x.dtype} operands must be {' or '.join(map(str, allowed))}; got {dtype}.")
    if out is None:
        return dtype
    shape = (x.shape[0], weight.shape[0])
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != x.device:
        given = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"out must be {shape} {dtype} on {x.device}; got {given}.")
    return dtype
