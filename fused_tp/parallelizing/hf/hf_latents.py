"""Latent attention of transformers models over context parallel ranks, and the indexers that select its keys.

transformers' modules expand latents to keys and values by their method `expand_kv`. In passes over context parallel
ranks, a wrapper of this method keeps the latents in an attribute, from which our attention function takes them.

An indexer (DeepSeek-V3.2) computes scores of all keys for each query, and returns the indices of the best ones. Over
ranks, `_index_over_ranks` gathers the indexer's keys, which have one small head, and runs the indexer's own code on
blocks of this rank's queries with the keys of all tokens. Each row of scores is that of a single process, so ties are
resolved alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fused_tp.attention.spec import AttentionMask
from fused_tp.parallelizing.forward_shard import CpContext
from fused_tp.parallelizing.latent_attention import MAX_BLOCK_SCORES, Latents, visible_keys
from fused_tp.parallelizing.outputs import map_tensors
from fused_tp.parallelizing.readers import forward_source_contains

EXPANSION = "kv_b_proj"  # name of the layer that `expand_kv` calls
LATENTS_ATTRIBUTE = "_fused_tp_latents"  # attribute of modules: Latents of the attention that runs next
SELECTS_ATTRIBUTE = "_fused_tp_selects"  # attribute of the modules in `find_selecting_modules`
# Source text in the forward of attention modules that pass the selected indices to the attention function.
INDICES_SOURCE = "indices=sparse_indices"


def find_latent_modules(model: nn.Module) -> list[Any]:
    """Return the attention modules of `model` that expand latents to keys and values."""
    return [
        m for m in model.modules() if hasattr(m, "expand_kv") and isinstance(getattr(m, EXPANSION, None), nn.Module)
    ]


def find_selecting_modules(model: nn.Module) -> list[Any]:
    """Return the modules that attend to latents selected by an indexer; [] if an indexer of `model` is not known.

    They pass the indices to the attention function. Some have no indexer, and receive the indices of another module.
    """
    modules: list[Any] = [m for m in find_latent_modules(model) if hasattr(m, "indexer")]
    are_known = all(
        hasattr(module, SELECTS_ATTRIBUTE)
        or (
            forward_source_contains(module, INDICES_SOURCE, default=False)
            and (module.indexer is None or _is_known_indexer(module.indexer))
        )
        for module in modules
    )
    return modules if are_known else []


def _is_known_indexer(indexer: nn.Module) -> bool:
    """True if `_index_over_ranks` can run the forward of `indexer`."""
    names = {*inspect.signature(type(indexer).forward).parameters}
    has_own_forward = "forward" not in vars(indexer)
    return (
        has_own_forward
        and {"hidden_states", "attention_mask", "past_key_values"} <= names
        and forward_source_contains(indexer, "past_key_values.update_indexer(k,", default=False)
    )


def connect_latents(model: nn.Module, cp_of: Callable[[nn.Module], CpContext | None]) -> None:
    """Make attention modules keep their latents, and indexers score the keys of all ranks.

    Args:
        cp_of: function that returns the ranks that the running pass of a module is sharded over; None for no ranks.
    """
    for module in find_latent_modules(model):
        module.expand_kv = partial(_keep_latents, cp_of, module, module.expand_kv)
    for module in find_selecting_modules(model):
        setattr(module, SELECTS_ATTRIBUTE, True)
        if module.indexer is not None:
            module.indexer.forward = partial(_index_over_ranks, cp_of, module.indexer, module.indexer.forward)


def take_latents(module: nn.Module, key: Tensor, value: Tensor) -> Latents | None:
    """Return the latents that `key` and `value` were expanded from; None if they were changed since, or are unknown."""
    latents: Latents | None = vars(module).pop(LATENTS_ATTRIBUTE, None)
    return latents if latents is not None and latents.key is key and latents.value is value else None


def _keep_latents(
    cp_of: Callable[[nn.Module], CpContext | None],
    module: Any,
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    latent: Tensor,
    rotary: Tensor,
) -> tuple[Tensor, Tensor]:
    key, value = expand(latent, rotary)
    layer: nn.Module = getattr(module, EXPANSION)
    if not torch.compiler.is_compiling() and cp_of(module) is not None and not _holds_parameters_in_forward(layer):
        vars(module)[LATENTS_ATTRIBUTE] = Latents(latent, rotary, expand, layer, key, value)
    return key, value


def _holds_parameters_in_forward(layer: nn.Module) -> bool:
    """True if `layer` has full parameters during its forward only: FSDP wraps it alone, or DeepSpeed ZeRO 3 shards it.

    Its expansion cannot be differentiated apart from the forward pass. Its keys are then exchanged, not its latents.
    """
    return any(isinstance(module, FSDPModule) for module in layer.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in layer.parameters()
    )


# ---- indexers -------------------------------------------------------------------------------------------------------


class _KeysComputed(Exception):
    """Ends the forward of an indexer, whose keys are known."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _KeyReader:
    """Takes the place of a KV cache, and ends the forward of the indexer at the update of its keys."""

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        raise _KeysComputed(keys)


class _GatheredKeys:
    """Takes the place of a KV cache, and returns the indexer's keys of all tokens."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        return self._keys


@torch.compiler.disable
def _index_over_ranks(
    cp_of: Callable[[nn.Module], CpContext | None],
    indexer: Any,
    forward: Callable[..., Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return the positions of the keys that this rank's queries select, [batch, seq, selected keys]."""
    cp = cp_of(indexer)
    if cp is None:
        return forward(*args, **kwargs)
    arguments = inspect.signature(forward).bind(*args, **kwargs).arguments
    with torch.no_grad():
        try:
            forward(**{**arguments, "past_key_values": _KeyReader()})
        except _KeysComputed as computed:
            keys = cp.unshard(computed.keys, 1)
        cache, blocks = _GatheredKeys(keys), _query_blocks(cp, indexer, arguments)
        return torch.cat([forward(**{**block, "past_key_values": cache}) for block in blocks], 1)


def _query_blocks(cp: CpContext, indexer: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of an indexer for blocks of this rank's queries, with their mask over all keys."""
    hidden_states: Tensor = arguments["hidden_states"]
    batch_size, length, _ = hidden_states.shape
    positions = cp.positions(torch.device("cpu")).numpy()
    intervals = AttentionMask(cp.seq_len, cp.seq_len, causal=True, cu_seqlens=cp.documents).visible_intervals(positions)
    num_heads = getattr(indexer, "n_heads", 1)
    num_rows = max(1, MAX_BLOCK_SCORES // (batch_size * num_heads * cp.seq_len))

    def slice_rows(rows: slice, value: Tensor) -> Tensor:
        return value[:, rows] if value.ndim > 1 and value.shape[1] == length else value

    for start in range(0, length, num_rows):
        rows = slice(start, start + num_rows)
        block = {name: map_tensors(partial(slice_rows, rows), value) for name, value in arguments.items()}
        mask = visible_keys(intervals, rows, slice(0, cp.seq_len), hidden_states.device)
        yield {**block, "attention_mask": mask}
