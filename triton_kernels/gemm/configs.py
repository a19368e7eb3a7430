"""The tile shapes that are shipped: a few per architecture and dtype, compiled by the tests, timed by triton.autotune.

A set is small so that tuning is over in seconds and nothing runs that the tests have not compiled for its architecture
(without spills, with the matrix instruction of that architecture). The first of a set is taken where nothing can be
timed: while a CUDA graph is captured, and before anything is known.

What bounds them: 255 registers a thread hold an fp32 tile of 128x256 over 8 warps, no more; stages and the tile to be
stored share the 163 KB (sm_80) or 227 KB (sm_90, sm_100) of shared memory. Warp specialization is Triton's own, of
sm_100; on sm_90 it does not take descriptors that the host makes, and before Triton 3.7 it fails on sm_100 too. With it
loops are not flattened: the loads' warps run on across tiles anyway, and a flattened loop costs the epilogue registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

ARCHITECTURES = (80, 90, 100)
# What is multiplied, and Triton's names of it.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# As Triton names them; fp32 by how it is multiplied.
KINDS = ("bf16", "fp16", "tf32", "ieee")


class Constants(NamedTuple):
    """The constexpr `C` of a matmul kernel."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLIT_STORE: bool
    FLATTEN: bool
    WARP_SPECIALIZE: bool
    PRECISION: str  # of fp32: "ieee", or "tf32" (10 bits of mantissa, on tensor cores)
    TMA: bool
    X_SWAPPED: bool  # columns of x, not rows, are in one piece
    W_SWAPPED: bool
    EVEN_K: bool  # every K is a multiple of BLOCK_K: no masks along K
    PRODUCTS: int = 1  # pairs (x, w) that are multiplied and added
    STRIP_M: int = 0  # rows of a tile that are summed over ranks at a time


@dataclass(frozen=True)
class GemmConfig:
    """How a matmul is cut into tiles and run."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_store: bool = False  # a tile is stored in two halves of its columns
    flatten: bool = False  # one loop over tiles and K, so that loads run on across tiles
    warp_specialize: bool = False
    programs_per_sm: int = 1

    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def all_registers(self) -> dict[str, int]:
        """`options`, with all registers there are: left alone ptxas takes fewer, for more programs, and spills."""
        return self.options() | {"maxnreg": min(255, 65536 // (self.programs_per_sm * self.num_warps * 32))}

    def half_k(self) -> GemmConfig:
        """The same tiles in half the steps along K, unless these are short: for loops with many pointers."""
        return replace(self, block_k=self.block_k // 2) if self.block_k > 32 else self

    def __str__(self) -> str:
        named = ("split_store", "flatten", "warp_specialize")
        flags = "".join(f" {name}" for name in named if getattr(self, name))
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{shape} warps {self.num_warps} stages {self.num_stages}{flags}"


INTERPRETED_CONFIG = GemmConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, split_store=True)

_BY_POINTERS = {
    80: {
        "16": [
            GemmConfig(128, 128, 32, 8, 4),
            GemmConfig(128, 128, 64, 8, 3),
            GemmConfig(64, 64, 64, 4, 3, programs_per_sm=2),
            GemmConfig(16, 64, 128, 4, 4, programs_per_sm=2),
        ],
        "tf32": [GemmConfig(128, 128, 32, 8, 3), GemmConfig(64, 64, 32, 4, 3, programs_per_sm=2)],
    },
    90: {
        "16": [
            GemmConfig(128, 128, 64, 8, 3),
            GemmConfig(128, 128, 64, 8, 4),
            GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2),
        ],
        "tf32": [GemmConfig(128, 128, 32, 8, 3), GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2)],
    },
    100: {
        "16": [GemmConfig(128, 128, 64, 8, 3), GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2)],
        "tf32": [GemmConfig(128, 128, 32, 8, 3), GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2)],
    },
}
# On CUDA cores, the same everywhere: no matrix unit multiplies all 24 bits of fp32.
_IEEE = [GemmConfig(64, 64, 32, 8, 3, programs_per_sm=2), GemmConfig(32, 32, 32, 4, 3, programs_per_sm=2)]

_flat = {"flatten": True}
_flat_split = {"flatten": True, "split_store": True}
_SPECIALIZES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)
_special = {"warp_specialize": _SPECIALIZES}
_special_split = _special | {"split_store": True}
_BY_TMA = {
    90: {
        "16": [
            GemmConfig(128, 256, 64, 8, 4, **_flat_split),
            GemmConfig(128, 256, 64, 8, 3, **_flat_split),
            GemmConfig(128, 128, 64, 8, 4, **_flat_split),
            GemmConfig(64, 128, 64, 4, 4, **_flat),
            GemmConfig(64, 32, 128, 4, 4, programs_per_sm=2, **_flat),
        ],
        "tf32": [
            GemmConfig(128, 128, 32, 8, 4, **_flat_split),
            GemmConfig(64, 32, 64, 4, 4, programs_per_sm=2, **_flat),
        ],
    },
    100: {
        "16": [
            GemmConfig(128, 256, 64, 8, 3, **_special_split),
            GemmConfig(128, 128, 64, 8, 4, **_special_split),
            GemmConfig(64, 64, 128, 4, 4, **_special),
        ],
        "tf32": [
            GemmConfig(128, 128, 32, 8, 4, **_special_split),
            GemmConfig(64, 64, 64, 4, 3, **_special),
        ],
    },
}


def gemm_configs(arch: int, kind: str, *, tma: bool) -> tuple[GemmConfig, ...]:
    """The configs of `gemm` of operands of `kind` (KINDS) on `arch` (ARCHITECTURES); empty where it cannot run.

    Example: `gemm_configs(90, "bf16", tma=True)[0]` is the default of bf16 on an H100.
    """
    if kind == "ieee":
        return () if tma else tuple(_IEEE)
    return tuple((_BY_TMA if tma else _BY_POINTERS).get(arch, {}).get(_family(kind), ()))


def _family(kind: str) -> str:
    return "16" if kind in ("bf16", "fp16") else kind


@dataclass(frozen=True)
class FusedConfig:
    """Tiles of a matmul that talks to other ranks: the same on all ranks, however each of them loads its operands."""

    pointers: GemmConfig
    tma: GemmConfig | None = None
    speed: float = 1.0  # of its inner loop on a full GPU, of the largest tiles' one: what decides between waves

    @property
    def block_m(self) -> int:
        return self.pointers.block_m

    @property
    def block_n(self) -> int:
        return self.pointers.block_n

    @property
    def programs_per_sm(self) -> int:
        return self.pointers.programs_per_sm


_FUSED: dict[int, dict[str, list[FusedConfig]]] = {
    0: {
        "16": [FusedConfig(INTERPRETED_CONFIG, INTERPRETED_CONFIG)],
        "tf32": [FusedConfig(INTERPRETED_CONFIG, INTERPRETED_CONFIG)],
    },
    80: {
        "16": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 4)),
            FusedConfig(GemmConfig(64, 64, 64, 4, 3, programs_per_sm=2), speed=0.75),
            FusedConfig(GemmConfig(16, 64, 128, 4, 3, programs_per_sm=2), speed=0.3),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3)),
            FusedConfig(GemmConfig(64, 64, 32, 4, 3, programs_per_sm=2), speed=0.75),
        ],
    },
    90: {
        "16": [
            FusedConfig(GemmConfig(128, 256, 64, 8, 3), GemmConfig(128, 256, 64, 8, 4, **_flat_split)),
            FusedConfig(GemmConfig(128, 128, 64, 8, 4), GemmConfig(128, 128, 64, 8, 4, **_flat_split), 0.85),
            FusedConfig(
                GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2),
                GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2, **_flat),
                0.5,
            ),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, **_flat_split)),
            FusedConfig(
                GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2),
                GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2, **_flat),
                0.6,
            ),
        ],
    },
    100: {
        "16": [
            FusedConfig(GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 128, 64, 8, 4, split_store=True)),
            FusedConfig(
                GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2), GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2), 0.4
            ),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, split_store=True)),
            FusedConfig(
                GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2), GemmConfig(64, 64, 32, 4, 4, programs_per_sm=2), 0.5
            ),
        ],
    },
}
# Half the steps: beside what follows the sum _IEEE would spill.
_FUSED_IEEE = [
    FusedConfig(GemmConfig(64, 64, 16, 8, 3)),
    FusedConfig(GemmConfig(32, 32, 16, 4, 3, programs_per_sm=2), speed=0.5),
]


def fused_configs(arch: int, kind: str) -> tuple[FusedConfig, ...]:
    """The tiles that a matmul of operands of `kind` (KINDS) may have beside a collective on `arch`.

    `arch` is one of ARCHITECTURES, or 0 for the interpreter.
    """
    if kind == "ieee" and arch in ARCHITECTURES:
        return tuple(_FUSED_IEEE)
    family = "tf32" if kind == "ieee" else _family(kind)
    return tuple(_FUSED.get(arch, {}).get(family, ()))
