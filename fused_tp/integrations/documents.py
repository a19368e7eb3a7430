"""Packed documents, as callers of transformers describe them: positions that start again, or flash attention's bounds.

transformers takes positions [1 or batch, seq] that do not count up by one for documents that do not see each other,
where there is neither a mask nor a cache; data collators that pack ("padding-free") make such positions. They may also
hand over `cu_seq_lens_q` and its companions, which transformers' flash attention reads. Here documents never see each
other, also in the few models (gpt-oss) whose masks for sdpa and eager, other than their flash attention, do not look at
positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def take_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> tuple[int, ...]:
    """The bounds (0, ..., seq_len) of the documents in each row, () where there is one; BOUNDS leave `arguments`.

    `makes_cache`: transformers would collect keys and values, whether somebody asked for them or not.

    Raises:
        ValueError: rows of different documents, two descriptions that do not agree, or positions alone in a call for
            which transformers does not take them for documents.
    """
    bounds = _from_bounds({name: arguments.pop(name, None) for name in BOUNDS}, seq_len)
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    counted = () if positions is None or positions.shape[-1] != seq_len else _from_positions(positions, mask)
    if counted and not bounds:
        _check_known_apart(mask, makes_cache)
    if bounds and counted and _distinct(bounds) != _distinct((*counted, seq_len)):
        raise ValueError(
            f"cu_seq_lens_q has documents that begin at {_few(bounds[:-1])}, and position_ids start again at "
            f"{_few(counted)}; they must describe the same documents."
        )
    return bounds or ((*counted, seq_len) if counted else ())


def check_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> None:
    """The same for a forward pass without a ring, where transformers itself keeps documents apart, or not.

    Turning its cache off would make documents of what it lets see each other.
    """
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if not makes_cache or positions is None or positions.shape[-1] != seq_len or arguments.get(BOUNDS[0]) is not None:
        return
    if positions.ndim == 2 and mask is None and bool((positions.diff(dim=-1) != 1).any()):
        _check_known_apart(mask, makes_cache)


def _check_known_apart(mask: Tensor | None, makes_cache: bool) -> None:
    if makes_cache or mask is not None:
        # Flash attention keeps documents apart here, too; masks of sdpa and eager let them see each other.
        raise ValueError(
            "position_ids start again inside of rows, as those of packed documents do. Whether these documents see "
            "each other depends on transformers' attention where there is an attention_mask or use_cache is on, which "
            "it is by default. Pass use_cache=False and no attention_mask: documents then see only themselves. (Or "
            "pass their bounds, cu_seq_lens_q.)"
        )


def _from_bounds(given: dict[str, Any], seq_len: int) -> tuple[int, ...]:
    queries, keys = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    if queries is None:
        return ()
    bounds = tuple(torch.as_tensor(queries).tolist())
    if keys is not None and tuple(torch.as_tensor(keys).tolist()) != bounds:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; tokens attend to those of the same rows.")
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or list(bounds) != sorted(bounds):
        raise ValueError(
            f"cu_seq_lens_q is {_few(bounds)}; it must be the bounds (0, ..., {seq_len}) of the documents in the one "
            f"row of {seq_len} tokens, never going back."
        )
    return bounds


def _from_positions(positions: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """(0, ...): where the documents begin that `positions` [seq], [rows, seq] or [.., rows, seq] count; () for one."""
    breaks = positions.diff(dim=-1) != 1
    if mask is not None and mask.ndim == 2 and mask.shape == breaks.shape[:-1] + positions.shape[-1:]:
        breaks = breaks & mask[:, 1:].bool()  # padding is counted in many ways
    if not bool(breaks.any()):
        return ()
    if positions.ndim > 2:
        raise ValueError(
            f"position_ids {tuple(positions.shape)} do not count up by one; over context parallel ranks only positions "
            "[batch, seq] may, those of packed documents."
        )
    rows = breaks.view(-1, breaks.shape[-1])
    if not bool((rows == rows[0]).all()):
        raise ValueError(
            "position_ids do not count up by one, and start again at other places in some rows than in others; over "
            "context parallel ranks all rows must be packed of documents of the same lengths. Pack into one long row."
        )
    return (0, *(rows[0].nonzero().flatten() + 1).tolist())


def _distinct(bounds: tuple[int, ...]) -> list[int]:
    return sorted(set(bounds))


def _few(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"({shown}, ...)" if len(numbers) > 8 else f"({shown})"
