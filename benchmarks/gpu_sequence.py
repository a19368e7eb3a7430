"""What the fused kernels are compared with, on ranks that are threads of one GPU: the matmul, then the movement."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]  # Triton types the arguments, at the launch
    terms_ptr, out_ptr, count, term_stride, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = sum over terms in fp32, rounded once."""
    for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < count
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for term in tl.static_range(WORLD):
            total += tl.load(terms_ptr + term * term_stride + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_rows(terms: Tensor, out: Tensor, rows: slice, sms: int) -> None:
    """out[rows] = terms [W, M, N] summed over W, rows [rows] of each; both contiguous. On `sms` multiprocessors."""
    part, target = terms[:, rows], out[rows]
    # 8 programs of 4 warps, with 16 bytes of each term in flight per thread, fill the memory pipes of an SM.
    sum_kernel[(8 * sms,)](
        part, target, target.numel(), terms.stride(0), WORLD=terms.shape[0], BLOCK=1024, num_warps=4
    )  # fmt: skip


def add_norm(out: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """out += residual, in place; its RMS norm."""
    out.add_(residual)
    return torch.nn.functional.rms_norm(out, (out.shape[-1],), norm_weight, eps)
