"""Flash attention from and to sums in fp32: what a ring computes step by step, or one call at once.

    flash_forward     folds keys into a state (weighted, highest, total); see flash_attention_forward.py
    flash_attention   the same, and ends it: out and lse, rounded once
    flash_backward    adds the gradients of a step to dq, dk, dv; see flash_attention_backward.py

A mask is an interval of keys for each query (`attention_tiles.Seen`): causal, windows, packed documents, lengths that
differ, and any part of these that falls to a rank. Tensors are [batch, seq, heads, head_dim]; k and v may have fewer
heads, v another head dim.

What a query does not see changes no bit of its results as long as it is finite. NaN and infinities in k or v reach all
queries whose tile visits a block of keys with such a key, also those that do not see it: their probability of it is 0,
and the product with 0 is NaN. In the same way those in q or grad_out reach, in dk and dv, all keys whose tile visits
the block of such a query. Keys that no query of a tile sees, and queries that see no key of one, are not visited: see
attention_tiles.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backward import keys_kernel, queries_kernel
from .configs import AttentionConfig, config_arguments, padded
from .forward import forward_kernel
from .fp8 import KEYS_ALIGNED, fp8_obstacle, quantised
from .launch import (
    Dropout,
    Terms,
    check,
    check_alike,
    check_like,
    check_per_head,
    check_rows,
    config_for,
    dense,
    descriptor,
    fits_tma,
    obstacle,
    on_device,
    programs,
    strides_of,
)
from .tiles import Seen, key_tiles, query_tiles

__all__ = ["Dropout", "Terms", "flash_attention", "flash_backward", "flash_forward", "obstacle"]

State = tuple[Tensor, Tensor, Tensor]


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Seen,
    terms: Terms,
    state: State,
    *,
    fresh: bool = False,
    precision: str = "ieee",
    fp8: bool = False,
    config: AttentionConfig | None = None,
) -> None:
    """Fold k and v into `state`: (weighted [B, S, H, Dv], highest [B, H, S], total [B, H, S]), fp32.

    Args:
        q, k, v: bf16, fp16 or fp32 of any strides with a dense last dim.
        fresh: `state` holds nothing yet and is not read; it need not be initialised.
        precision: of fp32: "ieee", or "tf32" (tensor cores, 10 bits of mantissa).
        fp8: multiply in e4m3 (flash_attention_fp8.py): bf16 and fp16 on sm_90 and sm_100.
        config: tiles, in place of the shipped ones.

    Raises:
        ValueError: something is not as above; says what. Nothing has run then.

    Example:
        flash_forward(q, k, v, step, Terms(scale=128**-0.5), (weighted, highest, total))
    """
    check(q, k, v, seen, terms, precision)
    _launch(q, k, v, seen, terms, state, None, None, None, fresh, precision, fp8, config)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Seen,
    terms: Terms,
    *,
    sinks: Tensor | None = None,
    state: State | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    precision: str = "ieee",
    fp8: bool = False,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, Dv] in the dtype of q, lse fp32 [B, H, S]): 0 and -inf where a query sees nothing.

    Args:
        sinks: [H] scores of one more key each, whose value is 0; they count in lse.
        state: what earlier keys have given, as `flash_forward` left it; it is read only.
        out, lse: where to write; the last dim dense.

    The other arguments and errors are those of `flash_forward`.
    """
    check(q, k, v, seen, terms, precision)
    check_per_head("sinks", sinks, q)
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3])) if out is None else out
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32) if lse is None else lse
    _launch(q, k, v, seen, terms, state, out, lse, sinks, state is None, precision, fp8, config)
    return out, lse


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Seen,
    terms: Terms,
    state: State | None,
    out: Tensor | None,
    lse: Tensor | None,
    sinks: Tensor | None,
    first: bool,
    precision: str,
    fp8: bool,
    config: AttentionConfig | None,
) -> None:
    why = fp8_obstacle(q.dtype, q.device) if fp8 else None
    if why is not None:
        raise ValueError(f"{why}.")
    if q.numel() == 0:
        return
    values, per_row = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    weighted, highest, total = state or (None, None, None)
    check_like(
        q,
        {
            "weighted": (weighted, values),
            "highest": (highest, per_row),
            "total": (total, per_row),
            "lse": (lse, per_row),
        },
    )
    check_like(q, {"out": (out, values)}, sums=False)
    if highest is not None and total is not None:
        check_alike({"highest": highest, "total": total})
    scales = None
    if fp8:
        q, k, v, scales = quantised(q, k, v)
    config = config or config_for("forward", q, v, terms, precision)
    tiles = query_tiles(seen, config.rows, config.block, q.device, KEYS_ALIGNED if fp8 else 1)
    vectors = seen.on(q.device)
    laid = v.transpose(1, 3) if fp8 else v  # as it lies in memory
    check_rows("v in fp8" if fp8 else "v", laid)
    tma = config.tma and fits_tma(k) and fits_tma(laid)
    grid = programs(q, k, v, tiles, of_keys=False)
    arguments = config_arguments(config, q.shape[3], values[3], precision, fp8=fp8)
    names = ("starts", "stops", "places", "q_indices", "k_indices")
    block = (config.block, arguments["PADDED_DV"])
    with on_device(q):
        forward_kernel[(grid["tile_count"] * grid["batch_heads"],)](
            q=q,
            k=k,
            v=v,
            k_tma=descriptor(k, config.block, arguments["PADDED_D"]) if tma else None,
            v_tma=descriptor(laid, *(block[::-1] if fp8 else block)) if tma else None,
            weighted=weighted,
            highest=highest,
            total=total,
            out=out,
            lse=lse,
            sinks=dense(sinks),
            scales=scales,
            tiles=tiles,
            q_strides=strides_of(q),
            k_strides=strides_of(k),
            v_strides=strides_of(laid),
            weighted_strides=strides_of(weighted),
            state_strides=strides_of(highest, 2),
            out_strides=strides_of(out),
            lse_strides=strides_of(lse, 2),
            FIRST=first,
            TMA=tma,
            **{name: vectors[name] for name in names},
            **grid,
            **terms.arguments(),
            **arguments,
        )


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    sums: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    seen: Seen,
    terms: Terms,
    *,
    d_slopes: Tensor | None = None,
    precision: str = "ieee",
    queries_config: AttentionConfig | None = None,
    keys_config: AttentionConfig | None = None,
) -> None:
    """Add the gradients of a step to dq, dk, dv and d_slopes [H], all fp32 and of any strides with a dense last dim.

    Args:
        grad_out: [B, S, H, Dv] in the dtype of q.
        lse, sums: fp32 [B, H, S], of all keys: sums = sum(grad_out * out, -1) - grad_lse.

    The other arguments and errors are those of `flash_forward`.

    Example:
        flash_backward(grad_out, q, k, v, lse, (grad_out * out).sum(-1).mT, dq, dk, dv, step, Terms(128**-0.5))
    """
    check(q, k, v, seen, terms, precision)
    if grad_out.shape != (*q.shape[:3], v.shape[3]) or grad_out.dtype != q.dtype:
        raise ValueError(
            f"grad_out must be {[*q.shape[:3], v.shape[3]]} in {q.dtype}; got {list(grad_out.shape)}, {grad_out.dtype}."
        )
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    lse, sums = (x if x.stride(-1) == 1 else x.contiguous() for x in (lse, sums))
    per_row = (q.shape[0], q.shape[2], q.shape[1])
    check_like(q, {"grad_out": (grad_out, grad_out.shape)}, sums=False)
    check_like(
        q,
        {
            "lse": (lse, per_row),
            "sums": (sums, per_row),
            "dq": (dq, q.shape),
            "dk": (dk, k.shape),
            "dv": (dv, v.shape),
            "d_slopes": (d_slopes, q.shape[2:3]),
        },
    )
    if q.numel() == 0 or k.numel() == 0:
        return
    vectors = seen.on(q.device)
    common: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "grad_out": grad_out,
        "lse": lse,
        "sums": sums,
        "q_strides": strides_of(q),
        "k_strides": strides_of(k),
        "v_strides": strides_of(v),
        "grad_strides": strides_of(grad_out),
        "lse_strides": strides_of(lse, 2),
        "sums_strides": strides_of(sums, 2),
        **{name: vectors[name] for name in ("places", "q_indices", "k_indices")},
        **terms.arguments(),
    }

    config = queries_config or config_for("queries", q, v, terms, precision)
    tiles = query_tiles(seen, config.rows, config.block, q.device)
    tma = config.tma and fits_tma(k) and fits_tma(v)
    grid = programs(q, k, v, tiles, of_keys=False)
    of_tiles = None
    if d_slopes is not None:
        of_tiles = q.new_empty((len(tiles), q.shape[0], q.shape[2]), dtype=torch.float32)
    with on_device(q):
        queries_kernel[(grid["tile_count"] * grid["batch_heads"],)](
            k_tma=descriptor(k, config.block, padded(k.shape[3])) if tma else None,
            v_tma=descriptor(v, config.block, padded(v.shape[3])) if tma else None,
            dq=dq,
            d_slopes=of_tiles,
            starts=vectors["starts"],
            stops=vectors["stops"],
            tiles=tiles,
            dq_strides=strides_of(dq),
            TMA=tma,
            **grid,
            **common,
            **config_arguments(config, q.shape[3], v.shape[3], precision),
        )
    if d_slopes is not None and of_tiles is not None:
        d_slopes += of_tiles.sum((0, 1))

    config = keys_config or config_for("keys", q, v, terms, precision)
    tiles = key_tiles(seen, config.rows, config.block, q.device)
    tma = config.tma and fits_tma(q) and fits_tma(grad_out)
    grid = programs(q, k, v, tiles, of_keys=True)
    with on_device(q):
        keys_kernel[(grid["tile_count"] * grid["batch_heads"],)](
            q_tma=descriptor(q, config.block, padded(q.shape[3])) if tma else None,
            grad_tma=descriptor(grad_out, config.block, padded(v.shape[3])) if tma else None,
            dk=dk,
            dv=dv,
            first=vectors["first"],
            last=vectors["last"],
            tiles=tiles,
            dk_strides=strides_of(dk),
            dv_strides=strides_of(dv),
            TMA=tma,
            **grid,
            **common,
            **config_arguments(config, q.shape[3], v.shape[3], precision),
        )
