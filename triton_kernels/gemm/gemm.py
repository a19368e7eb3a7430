"""y = x @ w^T (+ bias) in one persistent launch: every program takes one tile after the other.

    x [M, K], w [N, K] -> y [M, N], summed in fp32; tiles, their order and odd sizes: tiles.py

The matmul that those with a collective are measured against. Operands are loaded by TMA on sm_90 and later, by pointers
on sm_80 and where TMA cannot (`plan_gemm` says why). The loop over tiles is flattened with the one over K, so that the
loads of a tile are under way while the tile before it is stored; on sm_100 the loads, the multiplying and the epilogue
also have warps of their own.

Sources: Triton tutorial 09 (persistent matmul); Thakkar et al., CUTLASS 3 (TMA, warp specialization).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import arch_of, check_current, sms_of
from ..language import INTERPRETED, zeros
from .configs import DTYPES, INTERPRETED_CONFIG, GemmConfig, gemm_configs
from .launch import (
    ALIGNED,
    LoadPlan,
    check_like,
    check_operands,
    descriptor,
    fits_tma,
    is_swapped,
    sizes_of,
    tma_obstacle,
)
from .tiles import Matrix, add_product, store_result, tile_at

MAX_BLOCK_K = 128  # a K that is a multiple of it needs no masks along K, whichever config is taken


@triton.jit
def gemm_kernel(x, w, y, bias_ptr, sizes, M, N, C: tl.constexpr):
    """With TMA x, w and y are descriptors; else x and w pointers and y a `Matrix`."""
    tiles_m = tl.cdiv(M, C.BLOCK_M)
    tiles_n = tl.cdiv(N, C.BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=C.FLATTEN, warp_specialize=C.WARP_SPECIALIZE
    ):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, C.GROUP_M)
        total = add_product(zeros(C.BLOCK_M, C.BLOCK_N), x, w, sizes, tile_m, tile_n, M, N, 0, C)
        store_result(y, total, bias_ptr, tile_m, tile_n, M, N, C.SPLIT_STORE, C.TMA)


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    precision: str = "ieee",
    num_sms: int | None = None,
) -> Tensor:
    """x @ weight^T (+ bias) [M, N], in the dtype of x.

    x [M, K], weight [N, K], bias [N]: bf16, fp16 or fp32; sums in fp32. Views are read as they lie:
    `gemm(dy, weight.t())` copies nothing.

    Args:
        out: where to write, rows in one piece; must not overlap what is read.
        precision: of fp32: "ieee", or "tf32" (tensor cores, 10 bits of mantissa).
        num_sms: how many SMs to fill, default all; the rest is left to what runs beside.

    Raises:
        ValueError: something is not as above, or is on a device that cannot run it; says what. Nothing has run then.

    The first call of a new size (M up to the next power of two) times `plan_gemm(...).configs`, unless a CUDA graph is
    being captured: then it takes the first of them.

    Example:
        y = gemm(x, weight, bias)
    """
    plan = plan_gemm(x, weight, out=out, precision=precision)
    M, K = x.shape
    N = weight.shape[0]
    check_like("bias", bias, (N,), x)
    check_like("out", out, (M, N), x)
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms must be at least 1; got {num_sms}.")
    y = x.new_empty(M, N) if out is None else out
    if y.numel() == 0:
        return y
    if plan.tma and not fits_tma(y):
        plan = _plan_pointers(x, weight, precision, "rows of the result are not 16-byte aligned")

    def arguments(config: GemmConfig) -> dict[str, Any]:
        return _arguments(config, plan, x, weight, bias, y, precision)

    def grid(config: GemmConfig) -> tuple[int]:
        tiles = -(-M // config.block_m) * -(-N // config.block_n)
        sms = sms_of(x.device)
        return (min(tiles, config.programs_per_sm * min(num_sms or sms, sms)),)

    key = (x.device, x.dtype, (M - 1).bit_length(), N, K, num_sms, plan)
    config = _tuned.get(key)
    if config is None and len(plan.configs) > 1 and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):

        def time(config: GemmConfig) -> float:
            try:
                return triton.testing.do_bench(
                    lambda: gemm_kernel[grid(config)](**arguments(config)), return_mode="median"
                )
            except triton.runtime.errors.OutOfResources:  # GPUs of an architecture differ in shared memory
                return float("inf")

        config = _tuned[key] = min(plan.configs, key=time)
    config = config or plan.configs[0]
    gemm_kernel[grid(config)](**arguments(config))
    return y


_tuned: dict[Any, GemmConfig] = {}


def plan_gemm(x: Tensor, weight: Tensor, *, out: Tensor | None = None, precision: str = "ieee") -> LoadPlan:
    """How `gemm` would run: by TMA or by pointers, the `reason`, and its configs. Raises ValueError as `gemm` does."""
    _check(x, weight, precision)
    arch, kind = arch_of(x.device), _kind(x, precision)
    if arch and arch < 90:
        reason = f"sm_{arch} has no TMA"
    elif kind == "ieee":
        reason = "fp32 in full precision is bound by CUDA cores, not by loads"
    elif x.shape[1] == 0:
        reason = "K is 0"
    elif obstacle := tma_obstacle([x], [weight]):
        reason = obstacle
    elif out is not None and (not fits_tma(out) or is_swapped(out)):
        reason = "rows of out are not in one piece, or do not begin at multiples of 16 bytes"
    else:
        configs = gemm_configs(arch, kind, tma=True) if arch else (INTERPRETED_CONFIG,)
        return LoadPlan(configs, True, ALIGNED, is_swapped(x), is_swapped(weight))
    return _plan_pointers(x, weight, precision, reason)


def _plan_pointers(x: Tensor, weight: Tensor, precision: str, reason: str) -> LoadPlan:
    arch = arch_of(x.device)
    configs = gemm_configs(arch, _kind(x, precision), tma=False) if arch else (INTERPRETED_CONFIG,)
    return LoadPlan(configs, False, reason, is_swapped(x), is_swapped(weight))


def _kind(x: Tensor, precision: str) -> str:
    return precision if x.dtype == torch.float32 else DTYPES[x.dtype]


def _arguments(
    config: GemmConfig, plan: LoadPlan, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, precision: str
) -> dict[str, Any]:
    operands: dict[str, Any] = {"x": x, "w": weight, "y": Matrix(y, y.stride(0))}
    if plan.tma:
        columns = config.block_n // 2 if config.split_store else config.block_n
        blocks = (config.block_m, config.block_k), (config.block_n, config.block_k), (config.block_m, columns)
        operands = {name: descriptor(t, block) for name, t, block in zip("xwy", (x, weight, y), blocks, strict=True)}
    return {
        **operands,
        "bias_ptr": bias,
        "sizes": sizes_of(x, weight),
        "M": y.shape[0],
        "N": y.shape[1],
        "C": plan.constants(precision, even_k=x.shape[1] % MAX_BLOCK_K == 0, config=config),
        **config.options(),
    }


def _check(x: Tensor, weight: Tensor, precision: str) -> None:
    check_operands(x, weight)
    if weight.device != x.device:
        raise ValueError(f"weight must be on x's device; they are on {weight.device} and {x.device}.")
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision must be 'ieee' or 'tf32'; got {precision!r}.")
    if INTERPRETED.value:
        return
    if not x.is_cuda:
        raise ValueError(f"x must be on a GPU; it is on {x.device}. (TRITON_INTERPRET=1, set early, runs it on CPU.)")
    check_current(x.device)
    if not arch_of(x.device):
        raise ValueError("gemm needs a GPU of sm_80 or later.")
