"""Operand loads and launch parameters of matmuls fused with a collective. Callers have checked the arguments.

TMA loads blocks of a matrix whose rows (or, transposed, columns) are contiguous and begin at multiples of 16 bytes;
all others are loaded by pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import fits_tma as rows_fit_tma
from ..device import kind_of, tma_descriptor
from .configs import FusedConfig, GemmConfig, GemmConstants, fused_configs
from .tiles import GemmSizes

# Most products that one launch adds: the operands of each are arguments of the kernel.
MAX_PRODUCTS = 4


def is_swapped(t: Tensor) -> bool:
    """True if columns, not rows, are contiguous."""
    return t.stride(0) == 1 and t.stride(1) != 1 and t.shape[1] > 1


def fits_tma(t: Tensor) -> bool:
    """True if TMA can load blocks of `t`."""
    rows = t.t() if is_swapped(t) else t
    return rows.stride(1) == 1 and rows_fit_tma(rows)


def descriptor(t: Tensor, block: Sequence[int]) -> Any:
    """TMA descriptor of blocks [rows, columns] of `t`; if it `is_swapped`, of the transpose's [columns, rows]."""
    return tma_descriptor(t.t(), block[::-1]) if is_swapped(t) else tma_descriptor(t, block)


@dataclass(frozen=True)
class Launch:
    """Programs and tiles of a launch; equal on all ranks, because flags are counted in tiles and programs.

    Each rank loads its operands in its own way: by TMA if they are aligned for it, else by pointers.
    """

    programs: int  # at most as many as the device runs at once
    config: GemmConfig  # for loads by pointers
    precision: str = "ieee"  # of fp32: "ieee" or "tf32"
    strip_elements: int | None = None  # elements summed over ranks at a time; None: as many as registers hold
    tma_config: GemmConfig | None = None  # for loads by TMA; None: never

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

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        return -(-m // self.block_m), -(-n // self.block_n)

    def strip_rows(self, config: GemmConfig, element_bytes: int) -> int:
        """Rows of a tile that are summed over ranks at a time: the terms of 8 ranks then take half the registers."""
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
    kind = kind_of(dtype, precision)

    def tiles(config: GemmConfig) -> int:
        # No tile spans the rows of two ranks, if rows belong to ranks.
        rows_per_rank = -(-m // world_size)
        return world_size * -(-rows_per_rank // config.block_m) * -(-n // config.block_n)

    def at_once(config: GemmConfig) -> int:
        return max(1, min(config.programs_per_sm * (sms - sm_margin), tiles(config)))

    def time(choice: FusedConfig) -> float:
        config = choice.pointers
        rounds = -(-tiles(config) // at_once(config))
        return rounds * config.block_m * config.block_n * config.programs_per_sm / choice.speed

    best = min(fused_configs(arch, kind), key=time)
    return Launch(
        at_once(best.pointers), best.pointers, precision if kind == precision else "ieee", tma_config=best.tma
    )


class LoadPlan(NamedTuple):
    """Tiles of a launch, and the way in which this rank loads its operands."""

    config: GemmConfig
    tma: bool
    x_swapped: bool
    w_swapped: bool

    def constants(self, precision: str, *, even_k: bool, flatten: bool = True) -> GemmConstants:
        """The kernel's constants. `flatten` False: its loop over tiles cannot be flattened with the one over K."""
        c = self.config
        return GemmConstants(
            *(c.block_m, c.block_n, c.block_k, c.group_m, c.split_store, c.flatten and flatten),
            *(precision, self.tma, self.x_swapped, self.w_swapped, even_k),
        )


def plan_loads(products: Sequence[tuple[Tensor, Tensor]], launch: Launch) -> LoadPlan:
    """Choose TMA if all operands are aligned for it and have the same order of strides, else pointers."""
    xs, ws = [x for x, _ in products], [w for _, w in products]
    swapped = [{is_swapped(t) for t in tensors} for tensors in (xs, ws)]
    # With pointers, the order of the other operands' strides only affects speed.
    of_first = is_swapped(xs[0]), is_swapped(ws[0])
    # Tensor cores transpose 16-bit numbers only.
    transposes = not any(of_first) or xs[0].element_size() == 2
    alike = all(len(found) == 1 for found in swapped)
    if launch.tma_config is not None and alike and transposes and all(map(fits_tma, (*xs, *ws))):
        return LoadPlan(launch.tma_config, True, *of_first)
    # Several products take as many loops, all of whose pointers are live at once: halve the pointers of each.
    return LoadPlan(launch.config.half_k() if len(products) > 1 else launch.config, False, *of_first)


def operand_arguments(products: Sequence[tuple[Tensor, Tensor]], launch: Launch, *, flatten: bool) -> dict[str, Any]:
    """Kernel arguments of the products of a launch: x0, w0, ... up to MAX_PRODUCTS, sizes, constants and options.

    `flatten` False: the kernel's loop over tiles cannot be flattened with the one over K.
    """
    plan = plan_loads(products, launch)
    config = plan.config
    arguments: dict[str, Any] = dict.fromkeys(f"{name}{i}" for i in range(MAX_PRODUCTS) for name in "xw")
    for i, (x, w) in enumerate(products):
        if plan.tma:
            arguments[f"x{i}"] = descriptor(x, (config.block_m, config.block_k))
            arguments[f"w{i}"] = descriptor(w, (config.block_n, config.block_k))
        else:
            arguments[f"x{i}"], arguments[f"w{i}"] = x, w
    arguments["sizes"] = tuple(GemmSizes(x.shape[1], x.stride(), w.stride()) for x, w in products)
    even_k = all(x.shape[1] % config.block_k == 0 for x, _ in products)
    # Triton flattens two loops into one, not three.
    c = plan.constants(launch.precision, even_k=even_k, flatten=flatten and len(products) == 1)
    strip_rows = launch.strip_rows(config, products[0][0].element_size())
    return arguments | config.options() | {"C": c._replace(PRODUCTS=len(products), STRIP_M=strip_rows)}
