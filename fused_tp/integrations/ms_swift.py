"""Ring attention for ms-swift's sequence parallelism, computed by `ring_attention`.

ms-swift uses a ring if `sequence_parallel_size` exceeds the number of ranks that can share the heads; its function for
this needs CUDA and flash-attn. ms-swift (4.6) looks up the function in one module; replace it there before training:

    import swift.sequence_parallel.sequence_parallel as sequence_parallel
    from fused_tp.integrations.ms_swift import zigzag_ring_flash_attn_varlen_func
    sequence_parallel.zigzag_ring_flash_attn_varlen_func = zigzag_ring_flash_attn_varlen_func
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from fused_tp.integrations.ring_flash_attention import AttentionResult, attend


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | int = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention within documents; rank r holds chunks r and 2W-1-r of each. Returns [1, tokens / W, heads, head_dim].

    Unlike ring-flash-attention's function of this name, ms-swift's takes a batch of one row, and `cu_seqlens` of the
    unsharded documents, whose lengths must be multiples of W.

    Args:
        q, k, v: [1, tokens / W, heads, head_dim].
        cu_seqlens: int32 or int64 [documents + 1], of the unsharded documents.
        window_size: (left, right), or transformers' sliding_window n, which means (n - 1, 0); ms-swift passes either.

    The other arguments are those of `fused_tp.integrations.ring_flash_attention`.
    """
    window = (window_size - 1, 0) if isinstance(window_size, int) else window_size
    options = dropout_p, softmax_scale, causal, window, alibi_slopes, return_attn_probs, group
    return attend("zigzag_documents", q, k, v, *options, cu_seqlens=cu_seqlens)
