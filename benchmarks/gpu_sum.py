"""Sum kernel that fused sums are compared with; in a separate file, since importing a kernel loads Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_tp.triton_kernels.cache_keys import fix_cache_keys


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]  # Triton types the arguments, at the launch
    terms_ptr, out_ptr, num_elements, term_stride, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute out[i] = sum over terms in fp32, rounded once."""
    for block in tl.range(tl.program_id(0), tl.cdiv(num_elements, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for term in tl.static_range(WORLD):
            total += tl.load(terms_ptr + term * term_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


fix_cache_keys(__name__)
