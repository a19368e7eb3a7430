"""Decoding over this rank's part of a cache by one launch of a Triton kernel for all sequences: see `decode`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.decode import MAX_DECODE_QUERIES, rows_seen
from fused_tp.attention.kernels import triton
from fused_tp.attention.kernels.base import KernelQuery
from fused_tp.attention.kernels.select import forced_kernel
from fused_tp.attention.layout import BlockCyclicLayout
from fused_tp.attention.spec import Scores
from fused_tp.transport.symm_mem import is_capturing


def serves(query: KernelQuery, new: int) -> bool:
    """Whether the kernel computes it: on GPUs, unless FUSED_TP_ATTENTION names another one."""
    forced = forced_kernel()
    wanted = forced == "triton" or (forced is None and query.device.type == "cuda")
    return 0 < new <= MAX_DECODE_QUERIES and wanted and bool(triton.launchable(query))


def attend(
    layout: BlockCyclicLayout,
    scores: Scores,
    limits: tuple[int, int],
    q: Tensor,
    lengths: Sequence[int],
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None,
) -> Tensor:
    """What `decode.attend` gives, of caches that are as `context_parallel_decode` takes them; `limits` is that of
    `CacheCall`."""
    starts, stops, places, most = _seen(layout, limits, q.shape[1], tuple(lengths), q.device)
    k_indices = None
    if scores.alibi_slopes is not None:
        k_indices = _indices(layout, max(map(layout.count, lengths)), q.device)
    if page_table is not None:
        page_table = page_table.to(torch.int32).contiguous().to(q.device)
    from fused_tp.triton_kernels.attention.decode import flash_decode

    for table in (starts, k_indices):  # stops and places lie behind starts
        _read_here(table)
    q = q if q.stride(-1) == 1 else q.contiguous()
    found: Tensor = flash_decode(
        q, k, v, starts, stops, most, triton.terms_of(scores), pages=page_table, places=places, k_indices=k_indices
    )
    return found


# A graph reads them at every replay, and nothing tells when it goes: tables that were captured are kept for good, once
# each (tensors hash by identity).
_captured: set[Tensor] = set()


def _read_here(x: Tensor | None) -> None:
    """Memory of what a cache drops must not be given away before the kernels of this stream have read it."""
    if x is None or not x.is_cuda:
        return
    if is_capturing(x.device):
        _captured.add(x)
    else:
        x.record_stream(torch.cuda.current_stream(x.device))


def _on(device: torch.device, table: np.ndarray[Any, Any]) -> Tensor:
    if is_capturing(device):
        raise RuntimeError(
            "context_parallel_decode needs tables for these cache_seqlens that are not on the device yet, and they "
            "cannot be copied there while a CUDA graph is being captured. Run the same call once before the capture."
        )
    return torch.from_numpy(table).to(device)


@lru_cache(maxsize=4)  # each layer of a model asks for the same
def _seen(
    layout: BlockCyclicLayout, limits: tuple[int, int], new: int, lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(starts, stops, places) int32 [batch, new] of the rows here that each query sees, and how many of a sequence at
    most."""
    places = [[length - new + i for i in range(new)] for length in lengths]
    intervals = np.array(
        [
            [rows_seen(layout, limits, place, length) if place >= 0 else (0, 0) for place in seq]
            for seq, length in zip(places, lengths, strict=True)
        ],
        dtype=np.int32,
    )
    starts, stops = intervals[..., 0], intervals[..., 1]
    sees = starts < stops
    lowest, highest = np.where(sees, starts, np.iinfo(np.int32).max).min(1), np.where(sees, stops, 0).max(1)
    both = _on(device, np.stack((starts, stops, np.array(places, dtype=np.int32))))
    return both[0], both[1], both[2], int(np.maximum(highest.astype(np.int64) - lowest, 0).max())


@lru_cache(maxsize=2)
def _indices(layout: BlockCyclicLayout, rows: int, device: torch.device) -> Tensor:
    """int32 [rows, up to 1024 more]: which token lies in each row."""
    rows = -(-rows // 1024) * 1024
    return _on(device, layout.indices(0, rows).astype(np.int32))
