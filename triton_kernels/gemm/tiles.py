"""Tiles of y = x @ w^T: their product and store on the device, their shapes, and the launch of kernels that use them.

    y[m, n] = sum_k x[m, k] * w[n, k]        x [M, K], w [N, K] (out, in, as in nn.Linear), summed in fp32

Tile (i, j) is y[i*BLOCK_M : (i+1)*BLOCK_M, j*BLOCK_N : (j+1)*BLOCK_N]. Every operand has two strides, so that a
transposed view is read in place: dX = dY @ W is a product with W's strides swapped.

Any M, N, K >= 1 works. Rows beyond the end are masked: they are read as zeros, never from memory, and not stored. That
mask is the same for all of K, so it costs nothing in the loop; a mask along K is used only without EVEN_K. Rejected:
wrapping rows around with `% M`, as many kernels do, loses the vector loads along M and N that transposed views need.
Offsets are 64-bit: a tensor may have more than 2^31 elements.

TMA loads blocks of a matrix whose rows (or, transposed, columns) are contiguous and begin at multiples of 16 bytes;
all others are loaded by pointers. Callers have checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..device import fits_tma as rows_fit_tma
from ..device import operand_kind, tma_descriptor
from ..language import dot, rounded, split_columns, zeros

ARCHITECTURES = (80, 90, 100)
# Maximum number of products that one launch sums; each one's operands are kernel arguments.
MAX_PRODUCTS = 4


class GemmConstants(NamedTuple):
    """The constexpr `C` of a matmul kernel."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLITS_STORE: bool
    FLATTENS_LOOP: bool
    PRECISION: str  # of fp32: "ieee", or "tf32" (10 bits of mantissa, on tensor cores)
    TMA: bool
    X_IS_COLUMN_MAJOR: bool
    W_IS_COLUMN_MAJOR: bool
    EVEN_K: bool  # every K is a multiple of BLOCK_K: no masks along K
    PRODUCTS: int = 1  # pairs (x, w) that are multiplied and added
    STRIP_M: int = 0  # rows of a tile that are summed over ranks at a time


class GemmSizes(NamedTuple):
    """K and strides of one product x @ w^T."""

    k: Any
    x: Any  # strides of x, (along M, along K)
    w: Any  # strides of w, (along N, along K)


class Matrix(NamedTuple):
    """A matrix in memory with contiguous rows."""

    ptr: Any
    stride: Any


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (tile_m, tile_n) of tile `index`: down columns of GROUP_M tiles, so that tiles in flight share L2."""
    group_size = GROUP_M * tiles_n
    first_m = index // group_size * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    index_in_group = index % group_size
    return first_m + index_in_group % rows, index_in_group // rows


@triton.jit
def tile_offsets(tile, BLOCK: tl.constexpr):
    """Return the 64-bit indices of the rows (or columns) of tile `tile`, not yet masked."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def tile_pointers(matrix, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (pointers, mask) [BLOCK_M, BLOCK_N] of tile (tile_m, tile_n) of a `Matrix` [M, N]."""
    rows = tile_offsets(tile_m, BLOCK_M)[:, None]
    columns = tile_offsets(tile_n, BLOCK_N)[None, :]
    return matrix.ptr + rows * matrix.stride + columns, (rows < M) & (columns < N)


@triton.jit
def load_tile(matrix, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tile (tile_m, tile_n) of a `Matrix` [M, N]; zeros beyond its ends."""
    pointers, mask = tile_pointers(matrix, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(matrix, values, tile_m, tile_n, M, N):
    """Write `values`, rounded to the dtype of the `Matrix` [M, N], to its tile (tile_m, tile_n) of their shape."""
    pointers, mask = tile_pointers(matrix, tile_m, tile_n, M, N, values.shape[0], values.shape[1])
    tl.store(pointers, rounded(values, matrix.ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_bias(values, bias_ptr, tile_n, N):
    """Return `values` plus bias [N], if there is one."""
    if bias_ptr is None:
        return values
    else:
        columns = tile_offsets(tile_n, values.shape[1])
        return values + tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_result(y, acc, bias_ptr, tile_m, tile_n, M, N, SPLIT: tl.constexpr):
    """Write acc (+ bias) to tile (tile_m, tile_n) of `Matrix` y [M, N].

    With SPLIT the left columns are written first, then the right ones."""
    if SPLIT:
        left, right = split_columns(acc)
        store_tile(y, add_bias(left, bias_ptr, 2 * tile_n, N), tile_m, 2 * tile_n, M, N)
        store_tile(y, add_bias(right, bias_ptr, 2 * tile_n + 1, N), tile_m, 2 * tile_n + 1, M, N)
    else:
        store_tile(y, add_bias(acc, bias_ptr, tile_n, N), tile_m, tile_n, M, N)


@triton.jit
def load_operand(
    operand, tile, k, size, K, strides, BLOCK: tl.constexpr, IS_COLUMN_MAJOR: tl.constexpr, C: tl.constexpr, first_row=0
):
    """Return a block [BLOCK, BLOCK_K] of the `size` rows from `first_row` on of an operand [.., K] of a matmul.

    The block begins at row tile * BLOCK of these and at column k. Elements beyond `size` and K are zero; with TMA only
    those beyond the operand's ends.

    `operand` is a pointer or, with TMA, a descriptor of blocks [BLOCK, BLOCK_K]; if IS_COLUMN_MAJOR, of blocks
    [BLOCK_K, BLOCK] of the transposed matrix. With pointers IS_COLUMN_MAJOR only affects speed.
    """
    if C.TMA:
        if IS_COLUMN_MAJOR:
            return operand.load([k, first_row + tile * BLOCK]).T
        else:
            return operand.load([first_row + tile * BLOCK, k])
    else:
        # The contiguous dim is last, because sm_80 does not pipeline the loads of a transposed weight otherwise.
        rows = tile_offsets(tile, BLOCK)
        ks = k + tl.arange(0, C.BLOCK_K)
        if IS_COLUMN_MAJOR:
            rows, ks = rows[None, :], ks[:, None]
        else:
            rows, ks = rows[:, None], ks[None, :]
        mask = rows < size
        if not C.EVEN_K:
            mask = mask & (ks < K)
        block = tl.load(operand + (first_row + rows) * strides[0] + ks.to(tl.int64) * strides[1], mask=mask, other=0.0)
        if IS_COLUMN_MAJOR:
            block = block.T
        return block


@triton.jit
def add_product(acc, x, w, sizes, tile_m, tile_n, M, N, first_row, C: tl.constexpr):
    """Return acc + tile (tile_m, tile_n) of x @ w^T: the loop over K of every matmul.

    x has M rows from `first_row` on, w has N; with pointers the tile is zero beyond them.
    """
    for step in tl.range(0, tl.cdiv(sizes.k, C.BLOCK_K)):
        k = step * C.BLOCK_K
        x_block = load_operand(x, tile_m, k, M, sizes.k, sizes.x, C.BLOCK_M, C.X_IS_COLUMN_MAJOR, C, first_row)
        w_block = load_operand(w, tile_n, k, N, sizes.k, sizes.w, C.BLOCK_N, C.W_IS_COLUMN_MAJOR, C)
        acc = dot(x_block, w_block.T, acc, C)
    return acc


@triton.jit
def multiply_products(xs, ws, sizes, tile_m, tile_n, M, N, first_row, C: tl.constexpr):
    """Return fp32 [BLOCK_M, BLOCK_N]: tile (tile_m, tile_n) of the sum of xs[i] @ ws[i]^T over i < C.PRODUCTS."""
    PRODUCTS: tl.constexpr = C.PRODUCTS
    acc = zeros(C.BLOCK_M, C.BLOCK_N)
    for i in tl.static_range(PRODUCTS):
        acc = add_product(acc, xs[i], ws[i], sizes[i], tile_m, tile_n, M, N, first_row, C)
    return acc


# -- tile shapes -------------------------------------------------------------------------------------------------------

# There are a few tile shapes per architecture and dtype; the tests compile all of them. 255 registers per thread hold
# at most an fp32 tile of 128x256 over 8 warps; stages share the 163 KB (sm_80) or 227 KB (sm_90, sm_100) of shared
# memory. No kernel is warp specialized: on sm_90 Triton's warp specialization does not support descriptors made by the
# host, and before Triton 3.7 it fails on sm_100 too.


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape and compiler options of a matmul."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_store: bool = False  # the columns of a tile are stored in two halves
    flatten: bool = False  # one loop over tiles and K, so that loads are prefetched across tiles
    programs_per_sm: int = 1

    def options(self) -> dict[str, int]:
        """Return the compiler's options. By default ptxas uses fewer registers than there are, and spills."""
        registers = min(255, 65536 // (self.programs_per_sm * self.num_warps * 32))
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": registers}

    def with_half_block_k(self) -> GemmConfig:
        """Return the same config with half the block_k if that is at least 32: for loops with many pointers."""
        return replace(self, block_k=self.block_k // 2) if self.block_k > 32 else self

    def __str__(self) -> str:
        flags = " split_store" * self.split_store + " flatten" * self.flatten
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{shape} warps {self.num_warps} stages {self.num_stages}{flags}"


@dataclass(frozen=True)
class FusedConfig:
    """Tiles of a matmul that communicates: the same on all ranks, however each rank loads its operands."""

    pointer_config: GemmConfig
    tma_config: GemmConfig | None = None  # None: operands are always loaded by pointers
    speed: float = 1.0  # of the inner loop on a full GPU, relative to the largest tiles; for `launch_for`


_FLAT_OPTIONS = {"flatten": True, "split_store": True}
_INTERPRETED_CONFIG = GemmConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, split_store=True)
_SMALL_16, _SMALL_32 = (GemmConfig(64, 64, block_k, 4, 4, programs_per_sm=2) for block_k in (64, 32))
_FUSED_CONFIGS: dict[int, dict[str, list[FusedConfig]]] = {
    0: {kind: [FusedConfig(_INTERPRETED_CONFIG, _INTERPRETED_CONFIG)] for kind in ("16", "tf32")},
    80: {
        "16": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 4)),
            FusedConfig(replace(_SMALL_16, num_stages=3), speed=0.75),
            FusedConfig(GemmConfig(16, 64, 128, 4, 3, programs_per_sm=2), speed=0.3),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3)),
            FusedConfig(replace(_SMALL_32, num_stages=3), speed=0.75),
        ],
    },
    90: {
        "16": [
            FusedConfig(GemmConfig(128, 256, 64, 8, 3), GemmConfig(128, 256, 64, 8, 4, **_FLAT_OPTIONS)),
            FusedConfig(GemmConfig(128, 128, 64, 8, 4), GemmConfig(128, 128, 64, 8, 4, **_FLAT_OPTIONS), 0.85),
            FusedConfig(_SMALL_16, replace(_SMALL_16, flatten=True), 0.5),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, **_FLAT_OPTIONS)),
            FusedConfig(_SMALL_32, replace(_SMALL_32, flatten=True), 0.6),
        ],
    },
    100: {
        "16": [
            FusedConfig(GemmConfig(128, 256, 64, 8, 2), GemmConfig(128, 256, 64, 8, 4, **_FLAT_OPTIONS)),
            FusedConfig(GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 128, 64, 8, 4, **_FLAT_OPTIONS), 0.7),
            FusedConfig(_SMALL_16, _SMALL_16, 0.4),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, split_store=True)),
            FusedConfig(_SMALL_32, _SMALL_32, 0.5),
        ],
    },
}
# On CUDA cores of any architecture: no tensor core multiplies fp32 with its full 24-bit mantissa.
_IEEE_CONFIGS = [
    FusedConfig(GemmConfig(64, 64, 16, 8, 3)),
    FusedConfig(GemmConfig(32, 32, 16, 4, 3, programs_per_sm=2), speed=0.5),
]


def fused_configs(arch: int, kind: str) -> tuple[FusedConfig, ...]:
    """Return the tile configs, on `arch`, of a matmul of `kind` operands (`device.OPERAND_KINDS`) with a collective.

    `arch` is one of ARCHITECTURES, or 0 for the interpreter.
    """
    if kind == "ieee" and arch in ARCHITECTURES:
        return tuple(_IEEE_CONFIGS)
    family = "16" if kind in ("bf16", "fp16") else "tf32"
    return tuple(_FUSED_CONFIGS.get(arch, {}).get(family, ()))


# -- launches ----------------------------------------------------------------------------------------------------------


def is_column_major(t: Tensor) -> bool:
    """True if the columns of `t` are contiguous, not its rows."""
    return t.stride(0) == 1 and t.stride(1) != 1 and t.shape[1] > 1


def fits_tma(t: Tensor) -> bool:
    """True if TMA can load blocks of `t`."""
    rows = t.t() if is_column_major(t) else t
    return rows.stride(1) == 1 and rows_fit_tma(rows)


def descriptor(t: Tensor, block_shape: Sequence[int]) -> Any:
    """Return the TMA descriptor of blocks [rows, columns] of `t`; if column-major, of [columns, rows] of t^T."""
    return tma_descriptor(t.t(), block_shape[::-1]) if is_column_major(t) else tma_descriptor(t, block_shape)


@dataclass(frozen=True)
class Launch:
    """Programs and tiles of a launch, equal on all ranks, because the number of flags depends on them.

    Ranks may load their operands differently: by TMA if they are aligned for it, else by pointers.
    """

    programs: int  # at most as many as the device runs at once
    config: GemmConfig  # for operands loaded by pointers
    precision: str = "ieee"  # of fp32: "ieee" or "tf32"
    strip_elements: int | None = None  # elements summed over ranks at a time; None: as many as registers hold
    tma_config: GemmConfig | None = None  # for operands loaded by TMA; None: never used

    def __post_init__(self) -> None:
        tma = self.tma_config
        if tma and (tma.block_m, tma.block_n, tma.group_m) != (self.block_m, self.block_n, self.config.group_m):
            raise ValueError(f"config and tma_config must have the same tiles; they are {self.config} and {tma}.")

    @property
    def block_m(self) -> int:
        return self.config.block_m

    @property
    def block_n(self) -> int:
        return self.config.block_n

    def tile_counts(self, m: int, n: int) -> tuple[int, int]:
        return -(-m // self.block_m), -(-n // self.block_n)

    def strip_rows(self, config: GemmConfig, element_bytes: int) -> int:
        """Return the number of rows of a tile to sum at a time: the terms of 8 ranks then take half the registers."""
        elements = self.strip_elements or 1024 // element_bytes * config.num_warps
        return max(1, min(config.block_m, elements // config.block_n))


def launch_for(
    dtype: torch.dtype,
    m: int,
    n: int,
    world_size: int,
    *,
    arch: int,
    sms: int,
    sm_margin: int = 0,
    precision: str = "ieee",
) -> Launch:
    """Choose the launch of a matmul [m, n] over `world_size` ranks, from values that all ranks know.

    Args:
        dtype: bf16, fp16 or fp32, of the operands and of the result.
        m, n: size of the whole result. K does not matter: it may differ between ranks.
        arch: 80, 90 or 100 (`device.arch_of`); 0 under the interpreter.
        sms: multiprocessors of the GPU; the same on all ranks.
        sm_margin: number of multiprocessors to leave to other kernels.
        precision: precision of fp32 products, "ieee" or "tf32".

    Raises:
        ValueError: `sm_margin` leaves no SM.
    """
    if not 0 <= sm_margin < sms:
        raise ValueError(f"sm_margin must leave at least one of the {sms} SMs; got {sm_margin}.")
    kind = operand_kind(dtype, precision)

    def tile_count(config: GemmConfig) -> int:
        # No tile spans the rows of two ranks, if rows belong to ranks.
        rows_per_rank = -(-m // world_size)
        return world_size * -(-rows_per_rank // config.block_m) * -(-n // config.block_n)

    def program_count(config: GemmConfig) -> int:
        return max(1, min(config.programs_per_sm * (sms - sm_margin), tile_count(config)))

    def estimate_time(fused_config: FusedConfig) -> float:
        config = fused_config.pointer_config
        rounds = -(-tile_count(config) // program_count(config))
        return rounds * config.block_m * config.block_n * config.programs_per_sm / fused_config.speed

    best = min(fused_configs(arch, kind), key=estimate_time)
    return Launch(
        program_count(best.pointer_config),
        best.pointer_config,
        precision if kind == precision else "ieee",
        tma_config=best.tma_config,
    )


class LoadPlan(NamedTuple):
    """Tiles of a launch, and how this rank loads its operands."""

    config: GemmConfig
    uses_tma: bool
    x_is_column_major: bool
    w_is_column_major: bool

    def constants(self, precision: str, *, even_k: bool, flatten: bool = True) -> GemmConstants:
        """Return the kernel's constants. `flatten` False: its loop over tiles cannot be flattened with that over K."""
        c = self.config
        return GemmConstants(
            *(c.block_m, c.block_n, c.block_k, c.group_m, c.split_store, c.flatten and flatten),
            *(precision, self.uses_tma, self.x_is_column_major, self.w_is_column_major, even_k),
        )


def plan_loads(products: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> LoadPlan:
    """Choose TMA if all operands are aligned for it and have the same order of strides, else pointers."""
    xs, ws = [x for x, _ in products], [w for _, w in products]
    stride_orders = [{is_column_major(t) for t in tensors} for tensors in (xs, ws)]
    # With pointers, the order of the other operands' strides only affects speed.
    x_is_column_major, w_is_column_major = is_column_major(xs[0]), is_column_major(ws[0])
    # Tensor cores transpose 16-bit numbers only.
    can_transpose = not (x_is_column_major or w_is_column_major) or xs[0].element_size() == 2
    have_equal_orders = all(len(orders) == 1 for orders in stride_orders)
    if launch.tma_config is not None and have_equal_orders and can_transpose and all(map(fits_tma, (*xs, *ws))):
        return LoadPlan(launch.tma_config, True, x_is_column_major, w_is_column_major)
    # Several products take as many loops, all of whose pointers are live at once: halve the pointers of each.
    config = launch.config.with_half_block_k() if len(products) > 1 else launch.config
    return LoadPlan(config, False, x_is_column_major, w_is_column_major)


def operand_arguments(products: Sequence[tuple[Tensor, Tensor]], launch: Launch, *, flatten: bool) -> dict[str, Any]:
    """Return the kernel arguments of the products of a launch: x0, w0, ..., sizes, constants and options.

    Products beyond MAX_PRODUCTS are concatenated along K into one. `flatten` False: the kernel's loop over tiles cannot
    be flattened with the one over K.
    """
    if len(products) > MAX_PRODUCTS:
        xs, ws = zip(*products[MAX_PRODUCTS - 1 :], strict=True)
        products = [*products[: MAX_PRODUCTS - 1], (torch.cat(xs, dim=1), torch.cat(ws, dim=1))]
    plan = plan_loads(products, launch)
    config = plan.config
    arguments: dict[str, Any] = dict.fromkeys(f"{name}{i}" for i in range(MAX_PRODUCTS) for name in "xw")
    for i, (x, w) in enumerate(products):
        if plan.uses_tma:
            arguments[f"x{i}"] = descriptor(x, (config.block_m, config.block_k))
            arguments[f"w{i}"] = descriptor(w, (config.block_n, config.block_k))
        else:
            arguments[f"x{i}"], arguments[f"w{i}"] = x, w
    arguments["sizes"] = tuple(GemmSizes(x.shape[1], x.stride(), w.stride()) for x, w in products)
    even_k = all(x.shape[1] % config.block_k == 0 for x, _ in products)
    # Several products are a third loop, and Triton flattens two loops only.
    c = plan.constants(launch.precision, even_k=even_k, flatten=flatten and len(products) == 1)
    strip_rows = launch.strip_rows(config, products[0][0].element_size())
    return arguments | config.options() | {"C": c._replace(PRODUCTS=len(products), STRIP_M=strip_rows)}


fix_cache_keys(__name__)
