"""Tile shapes of attention, one for each kernel, architecture, kind of operands and head dim.

Limits: 255 registers per thread hold the sums of a tile ([rows, head dim] in fp32; tiles of keys have two of them) and
two blocks of scores; the stages of the loop's operands share the 163 KB (sm_80) or 227 KB (sm_90, sm_100) of shared
memory with the tile's own rows. Other GPUs that use the tiles of sm_80 have 99 KB (sm_86, sm_89, sm_120): all tiles but
one need at most 96 KB, compiled for sm_80. `tests/compile` checks that none spills in a hot loop, with the oldest and
the newest Triton, whose code needs different registers.

Above a head dim of 128 the sums alone take 128 registers of 8 warps for the 64 rows that wgmma requires. On sm_90 the
keys kernel then only has room for one loop and plain scores; other scores stay with 32 rows and mma.sync.

None is warp specialized. Triton 3.7 fails on a specialized loop followed by a loop with the same sums, as the loop over
masked blocks is here. With that loop first the forward compiles for sm_100 (16 or 20 warps), but spills 8 to 112 bytes
because so many warps leave few registers; on sm_90 nothing is specialized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KERNELS = ("forward", "ring", "queries", "keys")
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionConfig:
    """Tile shape and compiler options of an attention kernel.

    A tile has `rows` queries, and its loop reads blocks of `block_size` keys. In the kernel "keys" they are swapped.
    """

    rows: int
    block_size: int
    num_warps: int
    num_stages: int
    tma: bool = False

    def options(self) -> dict[str, int]:
        """Return the compiler's options. By default ptxas uses fewer registers than there are, and spills."""
        programs = 1 if self.num_warps >= 8 else 2
        registers = min(255, 65536 // (programs * self.num_warps * 32))
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": registers}

    def __str__(self) -> str:
        return f"{self.rows}x{self.block_size} warps {self.num_warps} stages {self.num_stages}{' tma' * self.tma}"


INTERPRETED = AttentionConfig(32, 32, num_warps=4, num_stages=1)

_C = AttentionConfig
_HOPPER = {
    "forward": {64: _C(128, 128, 8, 3, True), 128: _C(128, 128, 8, 2, True), 256: _C(64, 64, 8, 2, True)},
    "queries": {64: _C(128, 64, 8, 3, True), 128: _C(128, 64, 8, 2, True), 256: _C(64, 32, 8, 2, True)},
    "keys": {64: _C(128, 64, 8, 2, True), 128: _C(128, 32, 8, 2, True), 256: _C(64, 16, 8, 2)},
}
_BLACKWELL = {
    "forward": {64: _C(128, 128, 8, 3, True), 128: _C(128, 64, 8, 3, True), 256: _C(128, 32, 8, 3, True)},
    "queries": {64: _C(128, 64, 8, 2, True), 128: _C(128, 64, 8, 2, True), 256: _C(128, 32, 8, 2, True)},
    "keys": {64: _C(128, 32, 8, 2, True), 128: _C(128, 32, 8, 2, True), 256: _C(64, 32, 8, 2, True)},
}
_AMPERE = {
    "forward": {64: _C(128, 64, 4, 3), 128: _C(128, 64, 8, 3), 256: _C(64, 32, 8, 2)},
    "queries": {64: _C(128, 64, 8, 2), 128: _C(64, 64, 8, 2), 256: _C(64, 32, 8, 1)},
    "keys": {64: _C(128, 16, 8, 2), 128: _C(64, 32, 8, 2), 256: _C(32, 32, 8, 2)},
}
_PLAIN_CONFIGS = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL}
# Scores with a cap, slopes or dropout, which take registers too.
_RICH_HOPPER = {
    "forward": {64: _C(128, 64, 8, 2, True), 128: _C(128, 64, 8, 2, True), 256: _C(64, 32, 8, 2, True)},
    "queries": {64: _C(64, 32, 8, 2, True), 128: _C(64, 32, 8, 2, True), 256: _C(64, 16, 8, 2, True)},
    "keys": {64: _C(64, 32, 8, 2, True), 128: _C(64, 32, 8, 2, True), 256: _C(32, 32, 8, 1)},
}
_RICH_BLACKWELL = {
    "forward": {64: _C(64, 32, 8, 2, True), 128: _C(64, 32, 8, 2, True), 256: _C(128, 32, 8, 2, True)},
    "queries": {64: _C(64, 32, 8, 2, True), 128: _C(64, 32, 8, 2, True), 256: _C(64, 32, 8, 2, True)},
    "keys": {64: _C(64, 32, 8, 2, True), 128: _C(64, 32, 8, 2, True), 256: _C(64, 32, 8, 2, True)},
}
_RICH_AMPERE = {
    "forward": {64: _C(64, 64, 8, 2), 128: _C(64, 32, 8, 2), 256: _C(32, 32, 8, 1)},
    "queries": {64: _C(64, 32, 8, 2), 128: _C(64, 32, 8, 2), 256: _C(32, 32, 8, 1)},
    "keys": {64: _C(32, 32, 8, 2), 128: _C(32, 32, 8, 2), 256: _C(32, 32, 8, 1)},
}
_RICH_CONFIGS = {80: _RICH_AMPERE, 90: _RICH_HOPPER, 100: _RICH_BLACKWELL}
# The ring kernel also keeps its position among chunks in registers: these replace tiles of "forward" that would spill.
_RING_CONFIGS = {
    80: {64: _C(128, 64, 8, 3), 128: _C(128, 16, 8, 3), 256: _C(64, 16, 8, 2)},
    90: {128: _C(128, 64, 8, 3, True), 256: _C(64, 32, 8, 2, True)},
    100: {128: _C(128, 64, 8, 3, True), 256: _C(64, 32, 8, 2, True)},
}
_RICH_RING_CONFIGS = {
    80: {128: _C(32, 32, 8, 2)},
    90: {64: _C(128, 32, 8, 2, True), 128: _C(128, 32, 8, 2, True), 256: _C(32, 32, 8, 1)},
    100: {256: _C(64, 32, 8, 2, True)},
}
_TF32_CONFIGS = {
    "forward": {64: _C(64, 32, 8, 2), 128: _C(64, 32, 8, 1), 256: _C(32, 16, 8, 1)},
    "queries": {64: _C(32, 32, 8, 2), 128: _C(32, 32, 8, 1), 256: _C(32, 16, 8, 1)},
    "keys": {64: _C(32, 32, 8, 2), 128: _C(32, 32, 8, 1), 256: _C(32, 16, 8, 1)},
}
# On CUDA cores: no tensor core multiplies fp32 with its full 24-bit mantissa.
_IEEE_CONFIGS = {
    "forward": {64: _C(16, 16, 8, 1), 128: _C(16, 16, 8, 1), 256: _C(16, 16, 8, 1)},
    "queries": {64: _C(32, 16, 8, 1), 128: _C(32, 16, 8, 1), 256: _C(16, 16, 8, 1)},
    "keys": {64: _C(32, 16, 8, 1), 128: _C(32, 16, 8, 1), 256: _C(16, 16, 8, 1)},
}

# Decoding; `rows` is a maximum. A memory-bound loop is faster with small blocks and several programs per SM.
_DECODE_CONFIGS = {64: _C(64, 64, 4, 3), 128: _C(64, 64, 4, 3), 256: _C(32, 32, 4, 3)}
_DECODE_FP32_CONFIGS = {64: _C(16, 32, 4, 2), 128: _C(16, 32, 4, 1), 256: _C(16, 16, 4, 1)}


# Replaces the widest keys tile of `_TF32_CONFIGS` on GPUs with less than the 112 KB of shared memory that it needs.
_SMALL_TF32_KEYS = _C(16, 16, 8, 1)


def attention_config(
    kernel: str, arch: int, kind: str, head_dim: int, *, is_plain: bool = True, shared_bytes: int = 163 << 10
) -> AttentionConfig:
    """Return the config of `kernel` (KERNELS) for operands of `kind` (`device.OPERAND_KINDS`).

    `head_dim` is the larger head dim of q and v. `arch` is 80, 90 or 100, or 0 for the interpreter. `is_plain`: neither
    cap, slopes nor dropout. `shared_bytes`: shared memory available to a program, at least `device.LEAST_SHARED_BYTES`.
    """
    if not arch:
        return INTERPRETED
    if kernel == "keys" and kind == "tf32" and head_dim > 128 and shared_bytes < 112 << 10:
        return _SMALL_TF32_KEYS
    if kind in ("ieee", "tf32"):
        table = _IEEE_CONFIGS if kind == "ieee" else _TF32_CONFIGS
    elif is_plain:
        table = _PLAIN_CONFIGS[arch]
    else:
        table = _RICH_CONFIGS[arch]
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else MAX_HEAD_DIM
    if kernel != "ring":
        return table[kernel][width]
    ring_configs = {} if kind in ("ieee", "tf32") else (_RING_CONFIGS if is_plain else _RICH_RING_CONFIGS).get(arch, {})
    return ring_configs.get(width, table["forward"][width])


def decode_config(kind: str, head_dim: int, rows: int) -> AttentionConfig:
    """Return the config of decode.py, which is the same on every architecture.

    `head_dim` is the larger head dim of q and v, and `rows` the number of rows per key head.

    >>> str(decode_config("bf16", 128, 8))
    '16x64 warps 4 stages 3'
    """
    table = _DECODE_CONFIGS if kind in ("bf16", "fp16") else _DECODE_FP32_CONFIGS
    config = table[64 if head_dim <= 64 else 128 if head_dim <= 128 else MAX_HEAD_DIM]
    return replace(config, rows=min(config.rows, max(16, 1 << (rows - 1).bit_length())))


def padded_head_dim(head_dim: int) -> int:
    """Return the head dim padded to a power of 2 that matrix units support.

    >>> padded_head_dim(40), padded_head_dim(192)
    (64, 256)
    """
    return max(16, 1 << (head_dim - 1).bit_length())
