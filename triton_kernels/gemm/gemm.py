"""y = epilogue(x @ w^T) in one persistent launch: every program takes one tile after the other.

    x [M, K], w [N, K] -> y [M, N], summed in fp32; epilogues: epilogues.py; tiles, their order and odd sizes: tiles.py

Operands are loaded by TMA on sm_90 and later, by pointers on sm_80 and where TMA cannot (`plan_gemm` says why). The
loop over tiles is flattened with the one over K, so that the loads of a tile are under way while the tile before it is
stored; on sm_100 the loads, the multiplying and the epilogue also have warps of their own.

A gated layer takes two weights, not one with interleaved rows: that is how checkpoints keep gate and up projection, so
nothing is repacked, and the two halves of a merged weight [2N, K] are two views of it. Both products share x's tile.

Sources: Triton tutorial 09 (persistent matmul); Thakkar et al., CUTLASS 3 (TMA, warp specialization).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..resources import Variant
from .checks import DTYPES, check_epilogue, check_operands, check_out, check_scales
from .configs import INTERPRETED as INTERPRETED_CONFIG
from .configs import KINDS, GemmConfig, gemm_configs
from .epilogues import activate, add_bias, scale_tile
from .operands import arch_of, check_current, descriptor, fits_tma, is_swapped, sms_of
from .tiles import INTERPRETED, add_products, halves, rounded, store_tile, tile_at


@triton.jit
def gemm_kernel(
    x,
    w,
    gate_w,
    y,
    bias_ptr,
    gate_bias_ptr,
    x_scale_ptr,
    w_scale_ptr,
    gate_scale_ptr,
    M,
    N,
    K,
    start,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_gn,
    stride_gk,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_SWAPPED: tl.constexpr,
    W_SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Tiles start, start + 1, ... of y, around the end; x, w, gate_w and y are descriptors with TMA, else pointers."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for index in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
        tile_m, tile_n = tile_at((index + start) % tiles, tiles_m, tiles_n, GROUP_M)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        gate = None
        if gate_w is not None:
            gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        total, added = add_products(
            total, gate, x, w, gate_w, tile_m, tile_n, M, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk, stride_gn, stride_gk, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EVEN_K, TMA, X_SWAPPED, W_SWAPPED,
        )  # fmt: skip
        if gate_w is not None:
            gate = added

        if SPLIT_STORE:
            left, right = halves(total)
            gate_left, gate_right = None, None
            if gate_w is not None:
                gate_left, gate_right = halves(gate)
            finish_tile(
                y, left, gate_left, bias_ptr, gate_bias_ptr, x_scale_ptr, w_scale_ptr, gate_scale_ptr,
                tile_m, 2 * tile_n, M, N, stride_ym, stride_yn, ACTIVATION, SCALES, TMA,
            )  # fmt: skip
            finish_tile(
                y, right, gate_right, bias_ptr, gate_bias_ptr, x_scale_ptr, w_scale_ptr, gate_scale_ptr,
                tile_m, 2 * tile_n + 1, M, N, stride_ym, stride_yn, ACTIVATION, SCALES, TMA,
            )  # fmt: skip
        else:
            finish_tile(
                y, total, gate, bias_ptr, gate_bias_ptr, x_scale_ptr, w_scale_ptr, gate_scale_ptr,
                tile_m, tile_n, M, N, stride_ym, stride_yn, ACTIVATION, SCALES, TMA,
            )  # fmt: skip


@triton.jit
def finish_tile(
    y,
    total,
    gate,
    bias_ptr,
    gate_bias_ptr,
    x_scale_ptr,
    w_scale_ptr,
    gate_scale_ptr,
    tile_m,
    tile_n,
    M,
    N,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    TMA: tl.constexpr,
):
    """The epilogue of one tile, and its store."""
    total = scale_tile(total, x_scale_ptr, w_scale_ptr, tile_m, tile_n, M, N, SCALES)
    total = add_bias(total, bias_ptr, tile_n, N)
    if gate is not None:
        gate = scale_tile(gate, x_scale_ptr, gate_scale_ptr, tile_m, tile_n, M, N, SCALES)
        total *= activate(add_bias(gate, gate_bias_ptr, tile_n, N), ACTIVATION)
    else:
        total = activate(total, ACTIVATION)
    if TMA:
        y.store([tile_m * total.shape[0], tile_n * total.shape[1]], rounded(total, y.dtype))
    else:
        store_tile(y, total, tile_m, tile_n, M, N, stride_ym, stride_yn, total.shape[0], total.shape[1])


MAX_BLOCK_K = 128  # a K that is a multiple of it needs no masks along K, whichever config is taken


@dataclass(frozen=True)
class GemmPlan:
    """How `gemm` would load its operands, and from which configs it would take one."""

    tma: bool
    reason: str
    x_swapped: bool
    w_swapped: bool
    configs: tuple[GemmConfig, ...]


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "none",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    gate_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    start: int = 0,
    num_sms: int | None = None,
) -> Tensor:
    """activation(x @ weight^T + bias), or activation(x @ gate_weight^T + gate_bias) * (x @ weight^T + bias).

    x [M, K], weight and gate_weight [N, K] -> [M, N]; bias and gate_bias [N]; sums in fp32. Views are read as they lie:
    `gemm(dy, weight.t())` copies nothing. All operands are bf16, fp16, fp32 or float8_e4m3fn (sm_90 or later), the
    result is of their dtype; for fp8 of `out_dtype`: bf16, which is the default, or fp16.

    Args:
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        x_scale, weight_scale, gate_scale: fp32, only of fp8: one number each, or x_scale [M] and the others [N].
        out: where to write; must not overlap what is read.
        precision: of fp32: "ieee", or "tf32" (tensor cores, 10 bits of mantissa).
        start: the tile to begin with; ranks that begin at different tiles write to different peers at any time.
        num_sms: how many SMs to fill, default all; the rest is left to what runs beside.

    Raises:
        ValueError: something is not as above, or is on a device that cannot run it; says what. Nothing has run then.

    The first call of a new size (M up to the next power of two) times `plan_gemm(...).configs`, unless a CUDA graph is
    being captured: then it takes the first of them.

    Example:
        y = gemm(x, up_proj, gate_weight=gate_proj, activation="silu")
    """
    plan = plan_gemm(x, weight, gate_weight, out=out, precision=precision)
    M, K = x.shape
    N = weight.shape[0]
    check_epilogue(x, weight, bias, gate_weight, gate_bias, activation)
    scales = check_scales(x, weight, gate_weight, x_scale, weight_scale, gate_scale)
    out_dtype = check_out(x, weight, out, out_dtype)
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms must be at least 1; got {num_sms}.")
    if start < 0:
        raise ValueError(f"start is the number of a tile, 0 or more; got {start}.")
    y = torch.empty((M, N), dtype=out_dtype, device=x.device) if out is None else out
    if y.numel() == 0:
        return y
    if plan.tma and not fits_tma(y):
        plan = _plan_pointers(
            x, weight, gate_weight is not None, precision, "rows of the result are not 16-byte aligned"
        )
    arguments = {
        "gate_w": gate_weight,
        "bias_ptr": bias,
        "gate_bias_ptr": gate_bias,
        "x_scale_ptr": x_scale,
        "w_scale_ptr": weight_scale,
        "gate_scale_ptr": gate_scale,
        "M": M,
        "N": N,
        "K": K,
        "start": start,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        "stride_gn": 0 if gate_weight is None else gate_weight.stride(0),
        "stride_gk": 0 if gate_weight is None else gate_weight.stride(1),
        "stride_ym": y.stride(0),
        "stride_yn": y.stride(1),
        "ACTIVATION": activation,
        "SCALES": scales,
        "PRECISION": precision,
        "TMA": plan.tma,
        "X_SWAPPED": plan.x_swapped,
        "W_SWAPPED": plan.w_swapped,
        "EVEN_K": K % MAX_BLOCK_K == 0,
    }
    key = (
        x.device,
        x.dtype,
        y.dtype,
        (M - 1).bit_length(),
        N,
        K,
        num_sms,
        gate_weight is None,
        activation,
        scales,
        plan,
    )
    config = _tuned.get(key)
    if config is None and len(plan.configs) > 1 and not _capturing(x):
        config = _tuned[key] = _tune(plan, x, weight, y, arguments, num_sms)
    _launch(config or plan.configs[0], plan, x, weight, y, arguments, num_sms)
    return y


def plan_gemm(
    x: Tensor,
    weight: Tensor,
    gate_weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    precision: str = "ieee",
) -> GemmPlan:
    """How `gemm` would run: by TMA or by pointers, the `reason`, and its configs. Raises ValueError as `gemm` does."""
    check_operands(x, weight, gate_weight, precision)
    _check_device(x)
    gated = gate_weight is not None
    kind = precision if x.dtype == torch.float32 else DTYPES[x.dtype]
    arch = arch_of(x.device)
    operands = {"x": x, "weight": weight} | ({"gate_weight": gate_weight} if gate_weight is not None else {})
    swapped = {name: is_swapped(t) for name, t in operands.items()}
    if arch and arch < 90:
        reason = f"sm_{arch} has no TMA"
    elif kind == "ieee":
        reason = "fp32 in full precision is bound by CUDA cores, not by loads"
    elif x.shape[1] == 0:
        reason = "K is 0"
    elif any(not fits_tma(t) for t in operands.values()):
        names = " and ".join(name for name, t in operands.items() if not fits_tma(t))
        reason = f"{names} has rows that are not in one piece, or do not begin at multiples of 16 bytes"
    elif any(swapped.values()) and x.element_size() != 2:
        reason = "a transposed operand of this dtype is loaded by pointers: tensor cores transpose 16-bit numbers only"
    elif gated and swapped["weight"] != swapped["gate_weight"]:
        reason = "weight and gate_weight do not lie alike"
    elif out is not None and (not fits_tma(out) or is_swapped(out)):
        reason = "rows of out are not in one piece, or do not begin at multiples of 16 bytes"
    else:
        configs = gemm_configs(arch, kind, tma=True, gated=gated) if arch else (INTERPRETED_CONFIG,)
        return GemmPlan(True, "operands are aligned", swapped["x"], swapped["weight"], configs)
    return _plan_pointers(x, weight, gated, precision, reason)


def _plan_pointers(x: Tensor, weight: Tensor, gated: bool, precision: str, reason: str) -> GemmPlan:
    kind = precision if x.dtype == torch.float32 else DTYPES[x.dtype]
    arch = arch_of(x.device)
    configs = gemm_configs(arch, kind, tma=False, gated=gated) if arch else (INTERPRETED_CONFIG,)
    if not configs:
        raise ValueError(f"gemm of {x.dtype} needs a GPU of sm_90 or later; this is sm_{arch}. Use bf16 there.")
    return GemmPlan(False, reason, is_swapped(x), is_swapped(weight), configs)


def _launch(
    config: GemmConfig,
    plan: GemmPlan,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    arguments: dict[str, Any],
    num_sms: int | None,
) -> None:
    operands = _operands(plan, x, weight, arguments["gate_w"], y)
    set_blocks(arguments | operands | config.constants())
    grid = _grid(x, y, config.block_m, config.block_n, config.programs_per_sm, num_sms)
    gemm_kernel[grid](**arguments | operands, **config.constants(), **config.options())


def _tune(
    plan: GemmPlan,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    arguments: dict[str, Any],
    num_sms: int | None,
) -> GemmConfig:
    """The fastest config. It is kept here and not in the autotuner, which is slow to ask and cannot be captured."""
    choices = {
        triton.Config(config.constants(), **config.options(), pre_hook=set_blocks): config for config in plan.configs
    }
    tuner = triton.autotune(configs=list(choices), key=[])(gemm_kernel)
    per_sm = {tuple(config.constants().items()): config.programs_per_sm for config in plan.configs}

    def grid(meta: dict[str, Any]) -> tuple[int]:
        constants = tuple((name, meta[name]) for name in plan.configs[0].constants())
        return _grid(x, y, meta["BLOCK_M"], meta["BLOCK_N"], per_sm[constants], num_sms)

    with torch.cuda.device(x.device):
        tuner[grid](**arguments | _operands(plan, x, weight, arguments["gate_w"], y))
    return choices[tuner.best_config]


_tuned: dict[Any, GemmConfig] = {}


def _operands(plan: GemmPlan, x: Tensor, weight: Tensor, gate_w: Tensor | None, y: Tensor) -> dict[str, Any]:
    tensors = {"x": x, "w": weight, "gate_w": gate_w, "y": y}
    return {name: t if t is None or not plan.tma else descriptor(t) for name, t in tensors.items()}


def set_blocks(arguments: dict[str, Any]) -> None:
    """Gives the descriptors among a launch's arguments the blocks of its config."""
    block_m, block_n, block_k = (arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    blocks = {
        "x": [block_k, block_m] if arguments["X_SWAPPED"] else [block_m, block_k],
        "w": [block_k, block_n] if arguments["W_SWAPPED"] else [block_n, block_k],
        "y": [block_m, block_n // 2 if arguments["SPLIT_STORE"] else block_n],
    }
    blocks["gate_w"] = blocks["w"]
    for name, block in blocks.items():
        if isinstance(arguments[name], TensorDescriptor):
            arguments[name].block_shape = block


def _grid(x: Tensor, y: Tensor, block_m: int, block_n: int, per_sm: int, num_sms: int | None) -> tuple[int]:
    tiles = -(-y.shape[0] // block_m) * -(-y.shape[1] // block_n)
    sms = sms_of(x.device)
    return (min(tiles, per_sm * min(num_sms or sms, sms)),)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_device(x: Tensor) -> None:
    if INTERPRETED.value:
        return
    if not x.is_cuda:
        raise ValueError(f"x must be on a GPU; it is on {x.device}. (TRITON_INTERPRET=1, set early, runs it on CPU.)")
    check_current(x.device)
    if not arch_of(x.device):
        raise ValueError("gemm needs a GPU of sm_80 or later.")


def compile_variants(arch: int) -> Iterator[Variant]:
    """Every kind, config and layout that `gemm` may launch on `arch`, with the epilogues that take most registers.

    Layouts: as they lie, with gelu and bias, or gated by silu with both biases; weight transposed (dX), and both (dW),
    with bias. fp8 has row scales. By pointers with masks along K, which costs more than without. fp16 differs from bf16
    in the name of a type: it is compiled ungated, as it lies, the way that its arch loads best.
    """
    for kind in KINDS:
        for tma in (True, False):
            for gated in (False, True):
                if kind == "fp16" and (gated or tma != (arch >= 90)):
                    continue
                for config in gemm_configs(arch, kind, tma=tma, gated=gated):
                    for layout in ("nt", "nn") if gated else ("nt", "nn", "tn"):
                        # By TMA, gemm transposes 16-bit operands only.
                        if layout == "nt" or kind == "bf16" or (not tma and kind != "fp16"):
                            yield _variant(arch, kind, tma, gated, config, layout)


def _variant(arch: int, kind: str, tma: bool, gated: bool, config: GemmConfig, layout: str) -> Variant:
    """`layout` as BLAS names it: whether x is transposed, and whether weight is, to [K, N]."""
    x_swapped, w_swapped = layout[0] == "t", layout[1] == "n"
    dtype = kind if kind in DTYPES.values() else "fp32"
    out = "bf16" if dtype == "fp8e4nv" else dtype
    constants = config.constants() | {
        "ACTIVATION": "silu" if gated else "gelu" if layout == "nt" else "none",
        "SCALES": "row" if dtype == "fp8e4nv" else "none",
        "PRECISION": kind if dtype == "fp32" else "ieee",
        "TMA": tma,
        "X_SWAPPED": x_swapped,
        "W_SWAPPED": w_swapped,
        "EVEN_K": tma,
    }

    def matrix(element: str, rows: int, columns: int, swapped: bool = False) -> str:
        block = f"[{columns}, {rows}]" if swapped else f"[{rows}, {columns}]"
        return f"tensordesc<{element}{block}>" if tma else f"*{element}"

    half = 2 if config.split_store else 1
    weight = matrix(dtype, config.block_n, config.block_k, w_swapped)
    scale = "*fp32" if dtype == "fp8e4nv" else None
    arguments: dict[str, str | int | None] = {
        "x": matrix(dtype, config.block_m, config.block_k, x_swapped),
        "w": weight,
        "gate_w": weight if gated else None,
        "y": matrix(out, config.block_m, config.block_n // half),
        "bias_ptr": f"*{out}",
        "gate_bias_ptr": f"*{out}" if gated else None,
        "x_scale_ptr": scale,
        "w_scale_ptr": scale,
        "gate_scale_ptr": scale if gated else None,
        **dict.fromkeys(("M", "N", "K", "start"), "i32"),
        "stride_xm": 1 if x_swapped else "i32",
        "stride_xk": "i32" if x_swapped else 1,
        "stride_wn": 1 if w_swapped else "i32",
        "stride_wk": "i32" if w_swapped else 1,
        "stride_gn": 1 if w_swapped else "i32",
        "stride_gk": "i32" if w_swapped else 1,
        "stride_ym": "i32",
        "stride_yn": 1,
    }
    name = f"{kind} {layout} {'gated ' if gated else ''}{'tma' if tma else 'pointers'} {config}"
    options = config.options()
    odd = frozenset({"start"})
    # wgmma and tcgen05 take 64 rows; fp32 in full precision has no matrix unit.
    return Variant("gemm", name, arch, gemm_kernel, arguments, constants, options, odd, kind != "ieee")
