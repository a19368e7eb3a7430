"""Key/value cache of transformers (as filled by `generate()`), sharded over the context parallel ranks.

The layers of an empty `DynamicCache` are replaced in place, so the caller can keep using the same object. Caches of
other classes or contents are not changed: every rank then holds all keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core import settings
from fused_tp.core.pending import checksum
from fused_tp.nn.kv_cache import ContextKVCache
from fused_tp.ops.context_parallel_decode import DEFAULT_BLOCK
from fused_tp.parallelizing.forward_shard import running_forward

CACHE_BLOCK = DEFAULT_BLOCK


class ShardedCacheLayer:
    """This rank's shard of the keys and values of one attention layer.

    Each rank passes the keys and values of all new tokens to `update`, which stores the rank's shard. The layer keeps
    tokens outside a sliding window: the mask hides them.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, mesh: DeviceMesh, window: int | None) -> None:
        super().__init__()  # calls CacheLayerMixin.__init__ in the subclass of `_layer_class`
        for name in ("keys", "values"):
            vars(self).pop(name, None)  # see `__getattr__`
        self.window = window  # size of the replaced layer's sliding window, outside which it would drop tokens
        self.is_initialized = False
        self.cache = ContextKVCache(mesh, block=CACHE_BLOCK)
        self._new_shapes: tuple[torch.Size, ...] = ()  # shapes of new keys and values, until attention has used them
        self.column_count = 0  # columns of the batch: the longest sequence with its padding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return them alone: our attention reads the earlier ones from this layer."""
        frame = running_forward()
        running_pass = None if frame is None else frame.cache
        if not isinstance(running_pass, CachedPass) or self not in running_pass.layers:
            raise ValueError(
                "A key/value cache that is sharded over context parallel ranks was passed to another module than the "
                "model that filled it, and only that model can read it. Call the model that parallelize returned."
            )
        if self._new_shapes:
            raise ValueError(
                "The model stores keys and values in its cache, but does not use transformers' AttentionInterface to "
                "attend to them, so the cache cannot be sharded over context parallel ranks. Pass use_cache=False, or "
                "a cache of another class than DynamicCache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache.append(key_states.transpose(1, 2), value_states.transpose(1, 2), running_pass.new_lengths)
        self.column_count += key_states.shape[2]
        self._new_shapes = key_states.shape, value_states.shape
        return key_states, value_states

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values"):
            name = (
                f"{name} of this cache are sharded over context parallel ranks, none of which has those of all tokens. "
                "Pass a cache of another class than DynamicCache, such as StaticCache: each rank then has all."
            )
        raise AttributeError(name)

    def check_keys(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Raise ValueError if `key` and `value` differ in shape from the result of `update`.

        The module has then computed them from cached tensors, of which this rank has a shard only.
        """
        if (key.shape, value.shape) != self._new_shapes:
            raise ValueError(
                f"{type(module).__name__} passes keys {tuple(key.shape)} and values {tuple(value.shape)} to attention, "
                f"but {tuple(map(tuple, self._new_shapes))} to its cache, so the cache cannot be sharded over context "
                "parallel ranks. Pass use_cache=False, or a cache of another class than DynamicCache."
            )
        self._new_shapes = ()

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Before transformers 5 the argument holds the positions of the new tokens.
        num_new_tokens = query_length if isinstance(query_length, int) else len(query_length)
        return self.column_count + num_new_tokens, 0

    def get_seq_length(self) -> int:
        return self.column_count

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # name of this method before transformers 5

    def reset(self) -> None:
        self.cache.reset()
        self.column_count, self._new_shapes = 0, ()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, such as rejected drafts.

        Args:
            tokens_to_remove: minus the number of tokens to drop; or, as before transformers 5, a positive number of
                tokens to keep.
        """
        if tokens_to_remove == 0 or self.column_count == 0:
            return
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - self.column_count, 0)
        if len(set(self.cache.lengths)) > 1:
            raise ValueError(
                "crop of a cache that is sharded over context parallel ranks needs sequences of equal length, got "
                f"{self.cache.lengths}. Use a cache of another class than DynamicCache."
            )
        num_removed = min(abs(tokens_to_remove), self.column_count)
        self.cache.crop(max(0, self.cache.length - num_removed))
        self.column_count -= num_removed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.column_count:
            self.cache.reorder(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.cache.lengths), device="cpu").repeat_interleave(repeats))


@lru_cache
def _layer_class() -> Any:
    """Return a subclass of ShardedCacheLayer that is also a cache layer of transformers, imported when first needed."""
    from transformers.cache_utils import CacheLayerMixin

    return type("ContextParallelLayer", (ShardedCacheLayer, CacheLayerMixin), {})


@dataclass(frozen=True)
class CachedPass:
    """Forward pass that every rank computes in full, except for attention, in which each rank reads its cache shard.

    Attributes:
        layers: layers of the cache.
        seq_len: number of columns of the batch after the pass.
        new_lengths: number of new tokens that are not padding, per sequence; None if no token is padding.
        token_checksum: checksum of the new tokens, which the ranks compare, because ranks with unequal random states
            would sample different tokens for the same cache. 0 if reading the tokens would synchronize with the device.
    """

    layers: tuple[ShardedCacheLayer, ...]
    seq_len: int
    new_lengths: list[int] | None
    token_checksum: int = 0

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """Attend to new and cached tokens: [batch, heads, new, head_dim] -> [batch, new, heads, head_dim].

        `keywords` are those of `context_parallel_decode`.
        """
        layer = self.layers[module.layer_id if hasattr(module, "layer_id") else module.layer_idx]  # layer_id: GPT-Neo
        layer.check_keys(module, k, v)
        if layer.window is not None and keywords.get("window") is None and self.seq_len > layer.window:
            raise ValueError(
                f"{type(module).__name__} attends to all tokens in its cache without a sliding window. A cache of this "
                f"config would hold the last {layer.window} of {self.seq_len} tokens, but a cache that is sharded over "
                "context parallel ranks holds all. Pass DynamicCache() without a config, or a cache of another class."
            )
        out: Tensor = layer.cache.attend(q.transpose(1, 2), tokens=self.token_checksum, **keywords)
        return out


def make_cached_pass(
    arguments: dict[str, Any], num_new_tokens: int, mesh: DeviceMesh, config: Any
) -> CachedPass | None:
    """Describe a pass of `num_new_tokens` tokens over the cache in `arguments`.

    Returns None if each rank holds the full cache.

    An empty cache becomes a sharded one if its class allows it. The caller must have checked that the model does.

    Raises:
        ValueError: the mask hides other tokens than in earlier passes.
    """
    from transformers import DynamicCache

    cache = arguments.get("past_key_values")
    if cache is None:
        cache = DynamicCache(config=config)
    if not is_sharded(cache):
        mask = arguments.get("attention_mask")
        if not _can_be_sharded(cache) or not (mask is None or _has_only_left_padding(mask)):
            return None
        text_config = config.get_text_config(decoder=True)
        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        cache.layers = [_layer_class()(mesh, window) for window in windows or [None] * text_config.num_hidden_layers]
        cache.layer_class_to_replicate = None
        arguments["past_key_values"] = cache
    layers = tuple(cache.layers)
    new_lengths = _count_new_tokens(arguments.get("attention_mask"), layers[0], num_new_tokens)
    tokens, token_checksum = arguments.get("input_ids"), 0
    if tokens is not None and (tokens.is_cpu or settings.check_ranks()):
        token_checksum = checksum(tokens.cpu().numpy().tobytes())
    return CachedPass(layers, layers[0].column_count + num_new_tokens, new_lengths, token_checksum)


def is_sharded(cache: Any) -> bool:
    """True if `cache` is already sharded over the ranks."""
    return any(isinstance(layer, ShardedCacheLayer) for layer in getattr(cache, "layers", ()))


def _can_be_sharded(cache: Any) -> bool:
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        and cache.layer_class_to_replicate in (None, DynamicLayer)
        and cache.get_seq_length() == 0
    )


def _has_only_left_padding(mask: Any) -> bool:
    """True if `mask` [batch, columns] has padding only on the left of each sequence."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:  # it may be a dict with one mask for each kind of layer
        return False
    is_token = mask.bool()
    return bool(is_token[:, -1:].all()) and not bool((is_token[:, :-1] & ~is_token[:, 1:]).any())


def _count_new_tokens(mask: Tensor | None, layer: ShardedCacheLayer, num_new_tokens: int) -> list[int] | None:
    cached_lengths, cached_columns = layer.cache.lengths, layer.column_count
    if mask is None:
        unmasked_lengths, new_lengths = [cached_columns] * len(cached_lengths), None
    else:
        if not _has_only_left_padding(mask) or mask.shape[1] != cached_columns + num_new_tokens:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; with a cache of {cached_columns} tokens that is "
                f"sharded over context parallel ranks it must be [batch, {cached_columns + num_new_tokens}], with "
                "padding only on the left."
            )
        is_token = mask.bool()
        unmasked_lengths, new_lengths = (
            is_token[:, :cached_columns].sum(1).tolist(),
            is_token[:, cached_columns:].sum(1).tolist(),
        )
    if cached_lengths and unmasked_lengths != cached_lengths:
        raise ValueError(
            f"attention_mask is True for {unmasked_lengths} earlier tokens of the sequences, but the cache holds "
            f"{cached_lengths}. A cache that is sharded over context parallel ranks does not store padding, so pass "
            "the same mask as in earlier calls for earlier tokens."
        )
    return new_lengths
