"""q, k and v in e4m3, of which a forward has products at twice the rate: what flash_attention_forward.py takes.

    x8 = round(x / scale),  scale = 2^e  with  max |x| <= 448 * 2^e      one for each batch row and head

Scales are powers of 2, so that dividing by them rounds nothing: what becomes of a number does not depend on those
around it, but for what is 2^14 times below the largest and loses bits. So it hardly matters how a sequence is cut into
steps. The largest is that of finite numbers: NaN and infinities, all NaN in e4m3, change no scale.

v lies turned, [B, H, D, S], rows padded to 16: wgmma reads fp8 along what it sums over only. Blocks begin at multiples
of 16 keys: so a tile may visit 15 keys that none of its queries sees, whose NaN and infinities would show.

p is rounded to e4m3 as well, since both factors of an fp8 product must be of 8 bits, and v in 16 would halve the rate
of the second product. Each p is off by 2^-4 at most, at random, which an average over many keys takes out again; the
softmax and all sums are fp32.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision"
(arXiv:2407.08608), section 3.3, with a scale for each head in place of one for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.operands import arch_of
from ..gemm.tiles import INTERPRETED

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
KEYS_ALIGNED = 16  # bytes, which TMA and wide loads want of where a block of turned v begins


def fp8_obstacle(dtype: torch.dtype, device: torch.device | None) -> str | None:
    """Why a forward cannot be in fp8, or None. No device: some GPU that need not be here."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"fp8 is made of bfloat16 and float16, not of {str(dtype).removeprefix('torch.')}"
    if device is not None and not INTERPRETED.value and arch_of(device) not in (90, 100):
        return "fp8 takes a GPU of sm_90 or sm_100"
    return None


def quantised(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q8, k8, v8, scales [B, H, 2] of the products and of v); v8 is [B, Sk, Hkv, Dv] too, and lies turned.

    Example: `q8, k8, v8, scales = quantised(q, k, v)`
    """
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (_quantised(x) for x in (q, k, v))
    batch, keys, kv_heads, width = v8.shape
    turned = v8.new_empty((batch, kv_heads, width, -(-keys // KEYS_ALIGNED) * KEYS_ALIGNED))[..., :keys].permute(
        0, 3, 1, 2
    )
    turned.copy_(v8)
    group = q.shape[2] // kv_heads
    k_scale, v_scale = (x.repeat_interleave(group, 1) for x in (k_scale, v_scale))
    return q8, k8, turned, torch.stack((q_scale * k_scale, v_scale), -1)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, S, H, D] in e4m3, and its scales [B, H]."""
    highest = x.new_zeros((x.shape[0], x.shape[2]), dtype=torch.float32)
    if x.numel():
        highest = x.abs().nan_to_num_(nan=0.0, posinf=0.0).amax((1, 3)).float()
    exponent = torch.frexp(highest / LARGEST).exponent.masked_fill(highest == 0, 0)
    scale = torch.ldexp(torch.ones_like(highest), exponent)
    return (x.float() / scale[:, None, :, None]).to(DTYPE), scale
