"""Attention and mask functions for transformers that run over the context parallel ranks of a forward pass.

transformers looks up both by name (`AttentionInterface`, `AttentionMaskInterface`). A mask would be seq x seq, so none
is built: models pass a `Window` to attention in its place, without reading it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fused_tp.nn.sharding import shard_rows
from fused_tp.parallelizing.forward_shard import CpContext, running_forward
from fused_tp.parallelizing.layers import holds_sharded_heads
from fused_tp.parallelizing.own_attention import OwnAttention
from fused_tp.parallelizing.sequence_sharding import SequenceSharding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fused_tp.parallelizing.hf.hf_cache import CachedPass

PREFIX = "fused_tp_"
SEQUENCE = "_fused_tp_sequence"  # attribute of modules: the SequenceSharding of their model
EAGER = "eager_attention_forward"  # name of the eager attention in transformers' modeling files
# UNSERVED: keyword arguments of attention functions that change the result and are not supported over a ring. SERVED:
# tensors that change nothing, are supported, or were read at the start of the forward pass. Other tensors (indices of
# selected tokens, a bias) could mean anything, and are refused.
UNSERVED = ("sinks", "position_bias", "head_mask", "cache")
SERVED = {
    *("s_aux", "alibi_slopes", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"),
    *("labels", *SequenceSharding.known),  # some models pass these on with all other keywords
}


@dataclass(frozen=True)
class Window:
    """Replacement for a mask: the number of keys (before, after) itself that a token sees."""

    sides: tuple[int, int]


def register_attention(model: PreTrainedModel, sequence: SequenceSharding) -> str:
    """Register the attention function for `model` with transformers, and return its name.

    It runs ring attention in forward passes that are sharded over context parallel ranks, and the model's current
    implementation in all others. It finds `sequence` through the calling module. Rejected: a keyword argument, since
    not all models pass keywords on to their attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for module in model.modules():
        setattr(module, SEQUENCE, sequence)
    implementation: str = model.config._attn_implementation
    if implementation.startswith(PREFIX):  # the config of a parallel model, reused for another model
        return implementation
    name = PREFIX + implementation
    own = _eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, own))
    register_mask(model.config)
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def register_mask(config: Any) -> None:
    """Make the mask function of the config's attention return masks of all tokens when a rank holds a part of them.

    `_mask` is registered under the existing name: it checks the running forward pass, and falls back to the previous
    function. Rejected: a new name in the config, as for attention over context parallel ranks. Some models read the
    name of the attention in the config, and sparse latent attention selects tokens only for "eager" and "sdpa".
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if str(config._attn_implementation).startswith(PREFIX):  # from a parallel model, reused for another
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)
    own = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if own is not None and getattr(own, "func", None) is not _mask:
        ALL_MASK_ATTENTION_FUNCTIONS.register(config._attn_implementation, partial(_mask, own))


def has_eager(module: nn.Module) -> bool:
    """True if `_eager` finds an attention function in a file that defines the class of `module` or a base."""
    return any(hasattr(sys.modules.get(kind.__module__), EAGER) for kind in type(module).__mro__)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the eager attention of the model's own file, which has no entry in AttentionInterface."""
    for kind in type(module).__mro__:
        own = getattr(sys.modules.get(kind.__module__), EAGER, None)
        if own is not None:
            result: tuple[Tensor, Tensor | None] = own(module, *args, **kwargs)
            return result
    raise ValueError(
        f"attn_implementation='eager': the file that {type(module).__name__} comes from has no {EAGER}. Load the model "
        "with another attention of transformers."
    )


def _attention(
    own: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Window | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: [batch, heads, seq, head_dim] -> ([batch, seq, heads, head_dim], None)."""
    sequence: SequenceSharding | None = getattr(module, SEQUENCE, None)  # None in another model with the same config
    over = None if sequence is None else _attends_over(sequence)
    if over is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    return _attention_over(over, module, query, key, value, attention_mask, **kwargs), None


def _attention_over(
    over: CpContext | CachedPass,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Window | None,
    **kwargs: Any,
) -> Tensor:
    """[batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim], with keywords of transformers' functions."""
    kind = type(module).__name__
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{kind} asks for {name}, which attention over context parallel ranks does not do.")
    tensors = (name for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim)
    unknown = next((name for name in tensors if name not in SERVED), None)
    if unknown is not None:
        raise ValueError(
            f"{kind} gives its attention the tensor {unknown!r}, of which attention over context parallel ranks knows "
            "nothing. Use no cp_dim."
        )
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"{kind} makes an attention mask of its own {tuple(attention_mask.shape)}; attention over context parallel "
            "ranks takes no masks but causal ones, sliding windows and packed documents."
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    how: dict[str, Any] = {
        "causal": causal,
        "scale": kwargs.get("scaling"),
        "window": _window(attention_mask, kwargs.get("sliding_window"), causal),
        "softcap": kwargs.get("softcap") or 0.0,
        "sinks": kwargs.get("s_aux"),
        "alibi_slopes": kwargs.get("alibi_slopes"),
    }
    if not isinstance(over, CpContext):
        return over.attention(module, query, key, value, **how).contiguous()
    if over.padded and not causal:
        raise ValueError(
            f"{kind} is not causal, so its tokens would attend to the padding in attention_mask, which context "
            "parallel ranks do not mask. Use rows of equal length, or no cp_dim."
        )
    query = _scaled_by_position(module, query, over)
    dropout = kwargs.get("dropout", 0.0)
    out = over.attention(query, key, value, dropout_p=dropout, heads_sharded=holds_sharded_heads(module), **how)
    return out.transpose(1, 2).contiguous()


def replace_own_attention(modules: Sequence[nn.Module], own: OwnAttention) -> None:
    """Make `modules` with their own attention code attend over ranks in the same forward passes as other modules."""
    for module in modules:
        if hasattr(module, "config"):
            # The module's own code, which runs if nothing is sharded, reads the name that the model was loaded with.
            module.config = copy.copy(module.config)
        setattr(module, own.method, partial(_by_ours, own, module, getattr(module, own.method)))


def _by_ours(own: OwnAttention, module: nn.Module, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    sequence: SequenceSharding = getattr(module, SEQUENCE)
    over, mesh = _attends_over(sequence), sequence.parallelism.tp_mesh
    if over is None:
        return theirs(*args, **kwargs)

    def attend(query: Tensor, key: Tensor, value: Tensor, alibi_slopes: Tensor | None = None, **how: Any) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen rotates in fp32
        if alibi_slopes is not None and mesh is not None and holds_sharded_heads(module):
            start, stop = shard_rows(len(alibi_slopes), mesh)
            alibi_slopes = alibi_slopes[start:stop]
        how |= {"alibi_slopes": alibi_slopes, "dropout": own.dropped(module)}
        return _attention_over(over, module, query, key, value, None, **how)

    return own.ours(module, attend, *args, **kwargs)


def _attends_over(sequence: SequenceSharding) -> CpContext | CachedPass | None:
    """Return the object that shares attention over ranks now; None if each rank computes all of it."""
    cp = sequence.state_now().cp
    frame = running_forward()
    if cp is not None or frame is None or frame.owner is not sequence:
        return cp
    return cast("CachedPass | None", frame.cache)


def _scaled_by_position(attention: Any, query: Tensor, cp: CpContext) -> Tensor:
    """Scale `query` [batch, heads, seq, head_dim] by its tokens' places in the whole sequence.

    Llama 4's layers without rotary embeddings scale queries by log1p(floor((place + 1) / floor_scale)) * attn_scale + 1
    (Llama4TextAttention of transformers), and count places from the first token that they receive.
    """
    if not getattr(attention, "attn_temperature_tuning", False) or getattr(attention, "use_rope", True):
        return query

    def scales(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / attention.floor_scale)) * attention.attn_scale + 1.0

    given = torch.arange(query.shape[2], device=query.device)
    change = scales(cp.positions(query.device)) / scales(given)
    return (query * change.unsqueeze(-1)).to(query.dtype)


def _window(mask: Window | None, sliding_window: int | None, causal: bool) -> tuple[int, int] | None:
    """Window of the mask, or else of `sliding_window`, which counts the token itself. Not all models pass
    `sliding_window` to their attention function; models whose attention makes its own masks pass only that."""
    if mask is not None:
        return mask.sides
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _mask(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mask function for transformers, called with keywords: returns a Window or None for a ring, else the mask of `own`
    for the whole sequence."""
    frame = running_forward()
    shard, cache = (None, None) if frame is None else (frame.shard, cast("CachedPass | None", frame.cache))
    # Set if we compute attention: over sharded tokens, or over a sharded cache.
    ours = cache if cache is not None else None if shard is None else shard.cp
    if frame is not None and ours is not None and getattr(frame.owner, "own_attention", None):
        # Nothing reads this tensor, but MPT converts it.
        return torch.zeros((1, 1, 1, 1), dtype=torch.float32, device="cpu")
    if ours is not None:
        # transformers allows attention to skip a plain mask, causal or bidirectional.
        if kwargs.get("use_vmap") or not (
            kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip")
        ):
            raise ValueError(
                "The model adds a mask of its own to attention, which context parallel ranks do not serve."
            )
        size = kwargs.get("local_size")
        # transformers' mask of a window of 0 hides all keys: the config means no window, and no layer uses the mask.
        return None if not size or size >= ours.seq_len else _as_window(kwargs["mask_function"], size)
    if shard is None:
        return own(*args, **kwargs)
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.shape[1] != shard.seq_len:
        if not bool(mask.all()):
            raise ValueError(
                f"The model makes an attention_mask of its own {tuple(mask.shape)}, of a sequence of {shard.seq_len} "
                "tokens; a sequence parallel rank serves only one without padding. Pass sequence_parallel=False."
            )
        kwargs["attention_mask"] = None  # the model derives one from the embeddings if the caller passes none
    # transformers reads the length from the embeddings, which are sharded on a sequence parallel rank.
    kwargs["q_length"] = kwargs["kv_length"] = shard.seq_len
    return own(*args, **kwargs)


def _as_window(sees: Callable[..., Tensor], size: int) -> Window:
    """Convert a mask function sees(batch, head, query, key) with a window or chunk of `size` to a Window."""

    def token_sees(query: int, key: int) -> bool:
        return bool(sees(*torch.tensor([0, 0, query, key], dtype=torch.int64, device="cpu").unbind()))

    if not token_sees(size, 1):  # does not see the `size` tokens before it: a new chunk begins here
        raise ValueError(
            f"The model attends within chunks of {size} tokens, shorter than the sequence, which context parallel "
            "ranks do not serve. Use sequences that fit into a chunk, or no cp_dim."
        )
    if token_sees(0, 1):
        return Window((size, size))  # transformers' bidirectional windows do not count the token itself
    return Window((size - 1, 0))
