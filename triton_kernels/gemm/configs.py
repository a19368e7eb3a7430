"""Tile shapes of matmuls: a few per architecture and dtype, all compiled by the tests.

Limits: 255 registers per thread hold at most an fp32 tile of 128x256 over 8 warps; stages share the 163 KB (sm_80) or
227 KB (sm_90, sm_100) of shared memory. None is warp specialized: on sm_90 Triton's warp specialization does not
support descriptors made by the host, and before Triton 3.7 it fails on sm_100 too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

ARCHITECTURES = (80, 90, 100)


class GemmConstants(NamedTuple):
    """The constexpr `C` of a matmul kernel."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLIT_STORE: bool
    FLATTEN: bool
    PRECISION: str  # of fp32: "ieee", or "tf32" (10 bits of mantissa, on tensor cores)
    TMA: bool
    X_SWAPPED: bool  # columns of x, not rows, are contiguous
    W_SWAPPED: bool
    EVEN_K: bool  # every K is a multiple of BLOCK_K: no masks along K
    PRODUCTS: int = 1  # pairs (x, w) that are multiplied and added
    STRIP_M: int = 0  # rows of a tile that are summed over ranks at a time


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape and compiler options of a matmul."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_store: bool = False  # a tile is stored in two halves of its columns
    flatten: bool = False  # one loop over tiles and K, so that loads are prefetched across tiles
    programs_per_sm: int = 1

    def options(self) -> dict[str, int]:
        """The compiler's options. By default ptxas uses fewer registers than there are, and spills."""
        registers = min(255, 65536 // (self.programs_per_sm * self.num_warps * 32))
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": registers}

    def half_k(self) -> GemmConfig:
        """The same tiles with half the block_k, unless that is short: for loops with many pointers."""
        return replace(self, block_k=self.block_k // 2) if self.block_k > 32 else self

    def __str__(self) -> str:
        flags = " split_store" * self.split_store + " flatten" * self.flatten
        shape = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{shape} warps {self.num_warps} stages {self.num_stages}{flags}"


@dataclass(frozen=True)
class FusedConfig:
    """Tiles of a matmul that communicates: the same on all ranks, however each rank loads its operands."""

    pointers: GemmConfig
    tma: GemmConfig | None = None
    speed: float = 1.0  # of the inner loop on a full GPU, relative to the largest tiles; weighs the number of waves


_FLAT = {"flatten": True, "split_store": True}
_INTERPRETED = GemmConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, split_store=True)
_SMALL_16, _SMALL_32 = (GemmConfig(64, 64, block_k, 4, 4, programs_per_sm=2) for block_k in (64, 32))
_FUSED: dict[int, dict[str, list[FusedConfig]]] = {
    0: {kind: [FusedConfig(_INTERPRETED, _INTERPRETED)] for kind in ("16", "tf32")},
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
            FusedConfig(GemmConfig(128, 256, 64, 8, 3), GemmConfig(128, 256, 64, 8, 4, **_FLAT)),
            FusedConfig(GemmConfig(128, 128, 64, 8, 4), GemmConfig(128, 128, 64, 8, 4, **_FLAT), 0.85),
            FusedConfig(_SMALL_16, replace(_SMALL_16, flatten=True), 0.5),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, **_FLAT)),
            FusedConfig(_SMALL_32, replace(_SMALL_32, flatten=True), 0.6),
        ],
    },
    100: {
        "16": [
            FusedConfig(GemmConfig(128, 256, 64, 8, 2), GemmConfig(128, 256, 64, 8, 4, **_FLAT)),
            FusedConfig(GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 128, 64, 8, 4, **_FLAT), 0.7),
            FusedConfig(_SMALL_16, _SMALL_16, 0.4),
        ],
        "tf32": [
            FusedConfig(GemmConfig(128, 128, 32, 8, 3), GemmConfig(128, 128, 32, 8, 4, split_store=True)),
            FusedConfig(_SMALL_32, _SMALL_32, 0.5),
        ],
    },
}
# On CUDA cores, the same on all architectures: no matrix unit multiplies all 24 bits of fp32.
_FUSED_IEEE = [
    FusedConfig(GemmConfig(64, 64, 16, 8, 3)),
    FusedConfig(GemmConfig(32, 32, 16, 4, 3, programs_per_sm=2), speed=0.5),
]


def fused_configs(arch: int, kind: str) -> tuple[FusedConfig, ...]:
    """Tile configs of a matmul of `kind` operands (`device.KINDS`) that is fused with a collective on `arch`.

    `arch` is one of ARCHITECTURES, or 0 for the interpreter.
    """
    if kind == "ieee" and arch in ARCHITECTURES:
        return tuple(_FUSED_IEEE)
    family = "16" if kind in ("bf16", "fp16") else "tf32"
    return tuple(_FUSED.get(arch, {}).get(family, ()))
