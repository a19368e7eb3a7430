"""What a launch of an attention kernel is given, and the checks before: the host's side of blocks.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import (
    DTYPES,
    LEAST_SHARED_BYTES,
    PRECISIONS,
    arch_of,
    fits_tma,
    kind_of,
    on_device,
    shared_bytes_of,
    tma_descriptor,
)
from ..language import INTERPRETED
from .blocks import Constants, Heads, Mask, ScoreArguments
from .configs import MAX_HEAD_DIM, AttentionConfig, attention_config, padded
from .tiles import Step

_L2_BYTES = 16 << 20  # of keys and values that heads in flight share; a third of an H100's L2
_ROW_STRIDES = 2**31 // 256  # elements; blocks have 128 rows at most, and offsets inside of them 32 bits


@dataclass(frozen=True)
class Dropout:
    """Probability `p`, `seed` of 63 bits, and the number in the whole of the first head that is here."""

    p: float
    seed: int
    first_head: int = 0


@dataclass(frozen=True)
class Terms:
    """The terms of a score besides q.k: see blocks.py. `slopes` [heads]."""

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def plain(self) -> bool:
        """Whether a score is scale * q.k and nothing is dropped."""
        return self.softcap == 0.0 and self.slopes is None and not (self.dropout and self.dropout.p > 0)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a kernel but for `C`: scores, seeds and the like."""
        drop = self.dropout or Dropout(0.0, 0)
        keep_scale = 1.0 / (1.0 - drop.p)
        return {
            "scores": ScoreArguments(dense(self.slopes), float(self.scale), float(self.softcap), keep_scale),
            "seed_low": _signed(drop.seed & 0xFFFFFFFF),
            "seed_high": _signed(drop.seed >> 32),
            "dropped_below": _signed(min(int(drop.p * 2**32), 0xFFFFFFFF)),
            "first_head": drop.first_head,
        }


def constants(
    config: AttentionConfig,
    q: Tensor,
    v: Tensor,
    terms: Terms,
    precision: str = "ieee",
    *,
    tma: bool = False,
    first: bool = False,
) -> Constants:
    """The constexpr `C` of an attention kernel."""
    dims = q.shape[3], v.shape[3], padded(q.shape[3]), padded(v.shape[3])
    dropout = terms.dropout is not None and terms.dropout.p > 0.0
    score = terms.softcap != 0.0, terms.slopes is not None, dropout
    return Constants(*dims, precision, config.rows, config.block, tma, *score, first)


def kernel_arguments(
    config: AttentionConfig, q: Tensor, v: Tensor, terms: Terms, precision: str, *, tma: bool, first: bool = False
) -> dict[str, Any]:
    """What all kernels have: what `terms` say, the `constants` and the compiler's options."""
    c = constants(config, q, v, terms, precision, tma=tma, first=first)
    return {**terms.arguments(), "C": c, **config.options()}


def obstacle(
    dtype: torch.dtype, head_dim: int, v_head_dim: int, terms: Terms, device: torch.device | None
) -> str | None:
    """Why the kernels cannot compute it, or None. No device: some GPU that need not be here."""
    if dtype not in DTYPES:
        return f"the Triton kernels of attention compute in bf16, fp16 and fp32, not in {dtype}"
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_head_dim <= MAX_HEAD_DIM):
        return f"head dims go from 1 to {MAX_HEAD_DIM}; here they are {head_dim} and {v_head_dim}"
    if not (terms.scale > 0 and math.isfinite(terms.scale)):
        return f"scale must be a positive number; it is {terms.scale}"
    if terms.dropout and not 0 <= terms.dropout.p < 1:
        return f"the probability of dropout must be at least 0 and less than 1; it is {terms.dropout.p}"
    if device is None:
        return None
    if not INTERPRETED.value and device.type != "cuda":
        return f"Triton kernels run on a GPU, not on {device}, unless TRITON_INTERPRET=1 was set early"
    if not INTERPRETED.value and not arch_of(device):
        return "the Triton kernels of attention need a GPU of sm_80 or later"
    if not INTERPRETED.value and shared_bytes_of(device) < LEAST_SHARED_BYTES:
        return (
            f"the Triton kernels of attention need {LEAST_SHARED_BYTES} bytes of shared memory in a program, and "
            f"{device} has {shared_bytes_of(device)}"
        )
    return None


def check(q: Tensor, k: Tensor, v: Tensor, step: Step, terms: Terms, precision: str) -> None:
    """Raises ValueError, in a sentence, where the kernels cannot compute it."""
    check_tensors(q, k, v, terms, precision)
    rows, keys = q.shape[1], k.shape[1]
    if (rows, keys) != (step.rows, step.keys):
        raise ValueError(f"the mask is of {step.rows} queries and {step.keys} keys; q and k have {rows} and {keys}.")


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, precision: str = "ieee", *, paged: bool = False
) -> None:
    """`check` of all but the mask; `paged`: the rows of k and v lie in pages [pages, page_size]."""
    why = obstacle(q.dtype, q.shape[-1], v.shape[-1], terms, q.device)
    if why is not None:
        raise ValueError(f"{why[0].upper()}{why[1:]}.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'ieee' or 'tf32'; got {precision!r}.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or (x.stride(-1) != 1 and x.shape[-1] > 1):
            raise ValueError(
                f"{name} must be [batch, seq, heads, head_dim] with a dense last dim; got strides {x.stride()}."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be {q.dtype} on {q.device}, as q is.")
        check_rows(name, x)
    fits = k.shape[3] == q.shape[3] and v.shape[:3] == k.shape[:3] and q.shape[2] % k.shape[2] == 0
    if not fits or not (paged or k.shape[0] == q.shape[0]):
        rows = "pages, page_size" if paged else "batch, keys"
        raise ValueError(
            f"k must be [{rows}, kv_heads, head_dim] and v [{rows}, kv_heads, any], with a number of kv_heads "
            f"that divides that of heads; q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}."
        )
    check_per_head("slopes", terms.slopes, q)


def check_rows(name: str, x: Tensor) -> None:
    """Raises ValueError where offsets inside of a block of rows of x [B, S, H, D] do not fit 32 bits."""
    if x.dim() == 4 and x.shape[1] > 1 and x.stride(1) >= _ROW_STRIDES:
        raise ValueError(
            f"rows of {name} are {x.stride(1)} elements apart; the kernels take less than {_ROW_STRIDES}. Make it "
            "contiguous, or compute fewer heads or batch rows at once."
        )


def check_per_head(name: str, x: Tensor | None, q: Tensor) -> None:
    """Raises ValueError unless x, if given, is [heads] where q is."""
    if x is not None and (x.shape != q.shape[2:3] or x.device != q.device):
        raise ValueError(f"{name} must be [{q.shape[2]}] on {q.device}; got {list(x.shape)} on {x.device}.")


def dense(x: Tensor | None) -> Tensor | None:
    """As kernels read a vector of heads: fp32, one number behind the other."""
    return None if x is None else x.detach().float().contiguous()


def check_like(q: Tensor, given: Mapping[str, tuple[Tensor | None, Sequence[int]]], *, sums: bool = True) -> None:
    """Raises ValueError unless each tensor that is given has its shape, is where q is, and has a dense last dim; `sums`
    are fp32."""
    for name, (x, shape) in given.items():
        if x is None:
            continue
        if list(x.shape) != list(shape) or x.device != q.device:
            raise ValueError(f"{name} must be {list(shape)} on {q.device}; got {list(x.shape)} on {x.device}.")
        if (sums and x.dtype != torch.float32) or (x.stride(-1) != 1 and x.shape[-1] > 1):
            raise ValueError(
                f"{name} must {'be fp32 with' if sums else 'have'} a dense last dim; got {x.dtype} with strides "
                f"{x.stride()}."
            )
        check_rows(name, x)


def config_for(kernel: str, q: Tensor, v: Tensor, terms: Terms, precision: str) -> AttentionConfig:
    """The shipped config of `kernel` (`configs.KERNELS`)."""
    widest = max(q.shape[-1], v.shape[-1])
    arch, kind = arch_of(q.device), kind_of(q.dtype, precision)
    shared_bytes = shared_bytes_of(q.device) if arch else LEAST_SHARED_BYTES
    return attention_config(kernel, arch, kind, widest, plain=terms.plain, shared_bytes=shared_bytes)


def launch_tiles(
    kernel: Any,
    tiles: Tensor,
    config: AttentionConfig,
    qkv: tuple[Tensor, Tensor, Tensor],
    terms: Terms,
    precision: str,
    tma: Mapping[str, Tensor],
    *,
    of_keys: bool = False,
    first: bool = False,
    **arguments: Any,
) -> None:
    """Launches a program for each tile of rows and head, of keys or of queries; `tma` is loaded so where that fits."""
    q, k, v = qkv
    heads, shared = k.shape[2] if of_keys else q.shape[2], q.shape[2] // k.shape[2]
    # Tiles of keys walk through the rows of all queries that share their head.
    read = q if of_keys else k
    per_head = read.shape[1] * (q.shape[3] + v.shape[3]) * q.element_size() * (shared if of_keys else 1)
    together = max(1, _L2_BYTES // max(1, per_head)) * (1 if of_keys else shared)
    batch_heads = q.shape[0] * heads
    loaded = descriptors(config, *tma.values())
    with on_device(q):
        kernel[(len(tiles) * batch_heads,)](
            q=heads_of(q),
            k=heads_of(k),
            v=heads_of(v),
            **dict(zip(tma, loaded, strict=True)),
            **arguments,
            tiles=tiles,
            tile_count=len(tiles),
            heads=heads,
            batch_heads=batch_heads,
            together=min(together, batch_heads),
            shared=shared,
            **kernel_arguments(config, q, v, terms, precision, tma=loaded[0] is not None, first=first),
        )


def descriptors(config: AttentionConfig, *tensors: Tensor) -> tuple[Any, ...]:
    """Of each tensor [B, S, H, D] as [B, H, S, D], in blocks of `config.block` rows of one head; None of all where one
    does not fit TMA, or the config does without."""
    if not (config.tma and all(x.element_size() <= 2 and fits_tma(x) for x in tensors)):
        return (None,) * len(tensors)
    return tuple(tma_descriptor(x.transpose(1, 2), (1, 1, config.block, padded(x.shape[3]))) for x in tensors)


def heads_of(x: Tensor) -> Heads:
    """x as a kernel takes it; its last dim is dense."""
    return Heads(x, x.stride()[:-1])


def mask_of(on: Mapping[str, Tensor], first: str, last: str) -> Mask:
    """The vectors of a `Step`, or of a ring's chunks, as a kernel takes them."""
    return Mask(on[first], on[last], on["places"], on["q_indices"], on["k_indices"])


def _signed(word: int) -> int:
    """The same 32 bits as a signed number: always one type of argument."""
    return word - (1 << 32) if word >> 31 else word
