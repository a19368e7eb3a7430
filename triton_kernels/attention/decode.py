"""Attention of a few new tokens of each text to a cache of keys and values, dense or in pages, in one or two launches.

See flash_decode_parts.py for what is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.operands import sms_of
from .configs import AttentionConfig, config_arguments, decode_config, padded
from .decode_parts import merge_kernel, parts_kernel
from .launch import (
    Terms,
    check_per_head,
    check_rows,
    kind_of,
    obstacle,
    on_device,
    strides_of,
)

_PROGRAMS_PER_SM = 2
_FEWEST_BLOCKS = 4  # of keys in a part; with fewer, merging them costs more than it saves


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    stops: Tensor,
    most: int,
    terms: Terms,
    *,
    pages: Tensor | None = None,
    places: Tensor | None = None,
    k_indices: Tensor | None = None,
    splits: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """fp32 [batch, new, heads, v_head_dim + 1]: out, and behind it lse; 0 and -inf where a query sees nothing.

    Args:
        q: [batch, new, heads, head_dim], bf16, fp16 or fp32.
        k, v: [batch, capacity, kv_heads, head_dim] and [..., v_head_dim], any strides with a dense last dim; with
            `pages` [pages, page_size, kv_heads, ...].
        starts, stops: int32 [batch, new]: query i of a text sees the rows [starts, stops) of it. No others are read.
        most: keys that a text has between the lowest start and the highest stop, at most.
        pages: int32 [batch, most pages of a text].
        places, k_indices: with slopes alone: int32 [batch, new] places of queries and [rows] of the cache's rows.
        splits: in how many parts a text of `most` keys is cut; None: as many as keep the GPU busy.
        config: tiles, in place of the shipped ones.

    Raises:
        ValueError: something is not as above; says what. Nothing has run then.

    Example:
        found = flash_decode(q, k_cache, v_cache, starts, stops, 4096, Terms(scale=128**-0.5))
    """
    _check(q, k, v, starts, stops, terms, pages, places, k_indices)
    batch, new, heads, head_dim = q.shape
    kv_heads, v_head_dim = k.shape[2], v.shape[3]
    found = q.new_empty((batch, new, heads, v_head_dim + 1), dtype=torch.float32)
    if found.numel() == 0:
        return found
    group = heads // kv_heads
    config = config or decode_config(kind_of(q.dtype, "ieee"), max(head_dim, v_head_dim), group * new)
    tiles = -(-group * new // config.rows)
    programs = batch * kv_heads * tiles
    if splits is None:
        splits = min(sms_of(q.device) * _PROGRAMS_PER_SM // programs, most // (_FEWEST_BLOCKS * config.block))
    span = max(1, -(-most // (max(1, splits) * config.block))) * config.block
    splits = max(1, -(-most // span))
    weighted = highest = total = None
    if splits > 1:
        weighted = q.new_empty((programs, splits, config.rows, padded(v_head_dim)), dtype=torch.float32)
        highest, total = (q.new_empty(weighted.shape[:3], dtype=torch.float32) for _ in range(2))
    shape = {"kv_heads": kv_heads, "group": group, "new": new, "tiles": tiles, "splits": splits}
    sums = {"weighted": weighted, "highest": highest, "total": total}
    of_terms = terms.arguments()
    arguments = config_arguments(config, head_dim, v_head_dim, "ieee")
    with on_device(q):
        parts_kernel[(programs, splits)](
            q=q,
            k=k,
            v=v,
            pages=pages,
            starts=starts,
            stops=stops,
            places=places if terms.slopes is not None else None,
            k_indices=k_indices if terms.slopes is not None else None,
            found=found if splits == 1 else None,
            span=span,
            page_size=k.shape[1],
            pages_stride=0 if pages is None else pages.stride(0),
            q_strides=strides_of(q),
            k_strides=strides_of(k),
            v_strides=strides_of(v),
            found_strides=strides_of(found),
            **{name: of_terms[name] for name in ("slopes", "scale", "softcap", "CAPPED")},
            **shape,
            **sums,
            **arguments,
        )
        if splits > 1:
            merge_kernel[(programs,)](
                found=found,
                found_strides=strides_of(found),
                **shape,
                **sums,
                **{name: arguments[name] for name in ("DV", "PADDED_DV", "ROWS")},
                num_warps=8,
            )
    return found


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    stops: Tensor,
    terms: Terms,
    pages: Tensor | None,
    places: Tensor | None,
    k_indices: Tensor | None,
) -> None:
    why = obstacle(q.dtype, q.shape[-1], v.shape[-1], terms, q.device)
    if why is not None:
        raise ValueError(f"{why[0].upper()}{why[1:]}.")
    if terms.dropout is not None and terms.dropout.p > 0:
        raise ValueError("Decoding drops nothing; give terms without dropout, and train with flash_attention.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype != q.dtype or x.device != q.device or (x.stride(-1) != 1 and x.shape[-1] > 1):
            raise ValueError(
                f"{name} must have four dims, the last dense, in {q.dtype} on {q.device}; got {list(x.shape)} with "
                f"strides {x.stride()} in {x.dtype} on {x.device}."
            )
        check_rows(name, x)
    batch, new, heads, head_dim = q.shape
    fits = k.shape[3] == head_dim and v.shape[:3] == k.shape[:3] and heads % k.shape[2] == 0
    if not fits or (pages is None and k.shape[0] != batch):
        raise ValueError(
            "k must be [batch, capacity, kv_heads, head_dim], or in place of the first two [pages, page_size], and v "
            f"[..., any], with a number of kv_heads that divides that of heads; q, k, v are {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)}."
        )
    per_query = {"starts": starts, "stops": stops}
    if terms.slopes is not None:
        if places is None or k_indices is None:
            raise ValueError("With slopes, places and k_indices say how far apart queries and keys are; give both.")
        per_query["places"] = places
    for name, x in per_query.items():
        if list(x.shape) != [batch, new]:
            raise ValueError(f"{name} must be [{batch}, {new}]; got {list(x.shape)}.")
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != batch):
        raise ValueError(f"pages must be [{batch}, most pages of a text]; got {list(pages.shape)}.")
    integers = {**per_query, "pages": pages, "k_indices": k_indices}
    for name, given in integers.items():
        if given is not None and (given.dtype != torch.int32 or given.device != q.device or given.stride(-1) != 1):
            raise ValueError(
                f"{name} must be int32 on {q.device} with a dense last dim; got {given.dtype} on {given.device}."
            )
    check_per_head("slopes", terms.slopes, q)
