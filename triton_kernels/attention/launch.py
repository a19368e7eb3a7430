"""Launch arguments of attention kernels: the host side of blocks.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import (
    DTYPES,
    LEAST_SHARED_BYTES,
    arch_of,
    fits_tma,
    on_device,
    operand_kind,
    runs_kernels,
    shared_bytes_of,
    tma_descriptor,
)
from ..language import INTERPRETED
from .blocks import AttentionConstants, HeadsTensor, Mask, ScoreArguments
from .configs import MAX_HEAD_DIM, AttentionConfig, attention_config, padded_head_dim

_L2_BYTES = 16 << 20  # keys and values of all heads in flight fit in this; a third of an H100's L2
_MAX_ROW_STRIDE = 2**31 // 256  # stride limit: blocks have up to 128 rows, and offsets inside a block have 32 bits


@dataclass(frozen=True)
class DropoutArguments:
    """Probability `p`, `seed` of 63 bits, and the index of this rank's first head among all heads."""

    p: float
    seed: int
    first_head: int = 0


@dataclass(frozen=True)
class ScoreTerms:
    """Parameters of a score besides q.k, for which blocks.py has the formula. `slopes` has shape [heads]."""

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout: DropoutArguments | None = None

    @property
    def is_plain(self) -> bool:
        """True if a score is scale * q.k and nothing is dropped."""
        return self.softcap == 0.0 and self.slopes is None and not (self.dropout and self.dropout.p > 0)

    def arguments(self) -> dict[str, Any]:
        """Return the kernel arguments that describe these terms: `scores`, the seeds and the dropout threshold."""
        dropout = self.dropout or DropoutArguments(0.0, 0)
        keep_scale = 1.0 / (1.0 - dropout.p)
        return {
            "scores": ScoreArguments(dense_vector(self.slopes), float(self.scale), float(self.softcap), keep_scale),
            "seed_low": _as_signed(dropout.seed & 0xFFFFFFFF),
            "seed_high": _as_signed(dropout.seed >> 32),
            "dropped_below": _as_signed(min(int(dropout.p * 2**32), 0xFFFFFFFF)),
            "first_head": dropout.first_head,
        }


def kernel_constants(
    config: AttentionConfig,
    q: Tensor,
    v: Tensor,
    terms: ScoreTerms,
    precision: str = "ieee",
    *,
    tma: bool = False,
    is_first_step: bool = False,
) -> AttentionConstants:
    """Return the constexpr `C` of an attention kernel."""
    dims = q.shape[3], v.shape[3], padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    dropout = terms.dropout is not None and terms.dropout.p > 0.0
    score_flags = terms.softcap != 0.0, terms.slopes is not None, dropout
    return AttentionConstants(*dims, precision, config.rows, config.block_size, tma, *score_flags, is_first_step)


def kernel_arguments(
    config: AttentionConfig,
    q: Tensor,
    v: Tensor,
    terms: ScoreTerms,
    precision: str,
    *,
    tma: bool,
    is_first_step: bool = False,
) -> dict[str, Any]:
    """Return the arguments that all kernels take: those of `terms`, the constants and the compiler's options."""
    constants = kernel_constants(config, q, v, terms, precision, tma=tma, is_first_step=is_first_step)
    return {**terms.arguments(), "C": constants, **config.options()}


def obstacle(dtype: torch.dtype, head_dim: int, v_head_dim: int, device: torch.device | None) -> str | None:
    """Return why the kernels cannot compute attention, or None. `device` None: a GPU that need not be present."""
    if dtype not in DTYPES:
        return f"the Triton kernels of attention compute in bf16, fp16 and fp32, not in {dtype}"
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_head_dim <= MAX_HEAD_DIM):
        return f"head dims must be from 1 to {MAX_HEAD_DIM}; they are {head_dim} and {v_head_dim}"
    if device is None:
        return None
    if not INTERPRETED.value and not runs_kernels(device):
        return (
            f"Triton kernels run on a GPU, not on {device}, unless TRITON_INTERPRET=1 is set before Triton is imported"
        )
    if not INTERPRETED.value and not arch_of(device):
        return "the Triton kernels of attention need a GPU of sm_80 or later"
    if not INTERPRETED.value and shared_bytes_of(device) < LEAST_SHARED_BYTES:
        return (
            f"the Triton kernels of attention need {LEAST_SHARED_BYTES} bytes of shared memory in a program, and "
            f"{device} has {shared_bytes_of(device)}"
        )
    return None


def check_row_strides(**tensors: Tensor) -> None:
    """Raise ValueError if offsets inside a block of rows of a tensor [B, S, H, D] do not fit 32 bits.

    The ops have checked all other arguments.
    """
    for name, x in tensors.items():
        if x.shape[1] > 1 and x.stride(1) >= _MAX_ROW_STRIDE:
            raise ValueError(
                f"rows of {name} are {x.stride(1)} elements apart; the kernels need fewer than {_MAX_ROW_STRIDE}. Make "
                f"{name} contiguous, or compute fewer heads or batch rows at once."
            )


def dense_vector(x: Tensor | None) -> Tensor | None:
    """Return x as kernels read a vector of heads: fp32 and contiguous."""
    return None if x is None else x.detach().float().contiguous()


def default_config(kernel: str, q: Tensor, v: Tensor, terms: ScoreTerms, precision: str) -> AttentionConfig:
    """Return the default config of `kernel` (`configs.KERNELS`)."""
    widest = max(q.shape[-1], v.shape[-1])
    arch, kind = arch_of(q.device), operand_kind(q.dtype, precision)
    shared_bytes = shared_bytes_of(q.device) if arch else LEAST_SHARED_BYTES
    return attention_config(kernel, arch, kind, widest, is_plain=terms.is_plain, shared_bytes=shared_bytes)


def launch_tiles(
    kernel: Any,
    tiles: Tensor,
    config: AttentionConfig,
    qkv: tuple[Tensor, Tensor, Tensor],
    terms: ScoreTerms,
    precision: str,
    tma_tensors: Mapping[str, Tensor],
    *,
    are_key_tiles: bool = False,
    is_first_step: bool = False,
    **arguments: Any,
) -> None:
    """Launch a program for each tile and head, of keys or of queries; TMA loads `tma_tensors` if they are aligned."""
    q, k, v = qkv
    heads, heads_per_kv_head = k.shape[2] if are_key_tiles else q.shape[2], q.shape[2] // k.shape[2]
    # Tiles of keys read the rows of all query heads that share their key head.
    other_side = q if are_key_tiles else k
    bytes_per_head = (
        other_side.shape[1] * (q.shape[3] + v.shape[3]) * q.element_size() * (heads_per_kv_head if are_key_tiles else 1)
    )
    interleaved_heads = max(1, _L2_BYTES // max(1, bytes_per_head)) * (1 if are_key_tiles else heads_per_kv_head)
    batch_heads = q.shape[0] * heads
    descriptors_or_none = descriptors(config, *tma_tensors.values())
    with on_device(q):
        kernel[(len(tiles) * batch_heads,)](
            q=heads_tensor(q),
            k=heads_tensor(k),
            v=heads_tensor(v),
            **dict(zip(tma_tensors, descriptors_or_none, strict=True)),
            **arguments,
            tiles=tiles,
            tile_count=len(tiles),
            heads=heads,
            batch_heads=batch_heads,
            interleaved_heads=min(interleaved_heads, batch_heads),
            heads_per_kv_head=heads_per_kv_head,
            **kernel_arguments(
                config, q, v, terms, precision, tma=descriptors_or_none[0] is not None, is_first_step=is_first_step
            ),
        )


def descriptors(config: AttentionConfig, *tensors: Tensor) -> tuple[Any, ...]:
    """Return TMA descriptors of tensors [B, S, H, D] as [B, H, S, D], in blocks of `block_size` rows of one head.

    All are None if one tensor does not fit TMA, or the config does not use it."""
    if not (config.tma and all(x.element_size() <= 2 and fits_tma(x) for x in tensors)):
        return (None,) * len(tensors)
    return tuple(
        tma_descriptor(x.transpose(1, 2), (1, 1, config.block_size, padded_head_dim(x.shape[3]))) for x in tensors
    )


def heads_tensor(x: Tensor) -> HeadsTensor:
    """Return x as a kernel argument; its last dim is dense."""
    return HeadsTensor(x, x.stride()[:-1])


def mask_arguments(vectors: Mapping[str, Tensor], start_name: str, stop_name: str) -> Mask:
    """Return the vectors of a `StepMask`, or of a ring's chunks, as a kernel argument."""
    return Mask(
        vectors[start_name], vectors[stop_name], vectors["q_positions"], vectors["q_indices"], vectors["k_indices"]
    )


def _as_signed(word: int) -> int:
    """Return the same 32 bits as a signed number, so that the argument's type never changes."""
    return word - (1 << 32) if word >> 31 else word
