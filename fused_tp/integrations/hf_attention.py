"""transformers' attention and mask functions, over the context parallel ranks where a forward pass is cut over them.

transformers looks both up by name (`AttentionInterface`, `AttentionMaskInterface`). A mask would be seq x seq, so there
is none: what it would have said is said in `Window`, which models hand on to attention in its place, unread.
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

from fused_tp.integrations.forward_shard import CpContext, running_forward
from fused_tp.integrations.layers import holds_sharded_heads
from fused_tp.integrations.own_attention import OwnAttention
from fused_tp.integrations.sequence import SequenceSharding
from fused_tp.nn.sharding import shard_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fused_tp.integrations.hf_cache import CachedPass

PREFIX = "fused_tp_"
SEQUENCE = "_fused_tp_sequence"  # of modules: the SequenceSharding of the model that they are in
EAGER = "eager_attention_forward"  # what a file of models calls the attention that it runs by itself
# Keyword arguments of attention functions that change the result and that the ring does not compute; and those that are
# tensors and change nothing, or that have been read where the forward pass began. Others (indices of selected tokens, a
# bias) could mean anything.
UNSERVED = ("sinks", "position_bias", "head_mask", "cache")
SERVED = {
    *("s_aux", "alibi_slopes", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"),
    *("labels", *SequenceSharding.known),  # that some models hand down with all other keywords
}


@dataclass(frozen=True)
class Window:
    """In the place of a mask: how many keys (before, after) itself a token sees."""

    sides: tuple[int, int]


def register_attention(model: PreTrainedModel, sequence: SequenceSharding) -> str:
    """The name of what computes attention for `model`, known to transformers from here on.

    It is ring attention in forward passes that are cut over context parallel ranks, and the implementation that the
    model has now in all others. It finds `sequence` by the module that calls it. Rejected: a keyword argument, which
    not all models hand down to their attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for module in model.modules():
        setattr(module, SEQUENCE, sequence)
    implementation: str = model.config._attn_implementation
    if implementation.startswith(PREFIX):  # the config of a parallel model, used for another
        return implementation
    name = PREFIX + implementation
    own = _eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, own))
    register_mask(model.config)
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def register_mask(config: Any) -> None:
    """Have masks for that config's attention be those of all tokens in forward passes of which a rank has a part.

    Under their own name: `_mask` asks the forward pass that runs, and is the mask of all others. Rejected: a name of
    ours in the config, as for attention over context parallel ranks. Code of models asks the config which attention it
    has, and sparse latent attention applies its selection for "eager" and "sdpa" alone.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if str(config._attn_implementation).startswith(PREFIX):  # that of a parallel model, used for another
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)
    own = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if own is not None and getattr(own, "func", None) is not _mask:
        ALL_MASK_ATTENTION_FUNCTIONS.register(config._attn_implementation, partial(_mask, own))


def has_eager(module: nn.Module) -> bool:
    """Whether `_eager` could find the attention of models in the file that `module` comes from."""
    return any(hasattr(sys.modules.get(kind.__module__), EAGER) for kind in type(module).__mro__)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The attention that models run by themselves, which has no entry in AttentionInterface."""
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
    sequence: SequenceSharding | None = getattr(module, SEQUENCE, None)  # none in another model of the same config
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
    """Have `modules`, which attend by code of their own, attend over ranks where the others' attention does."""
    for module in modules:
        if hasattr(module, "config"):
            # Its own code, which runs where nothing is cut, asks for the name that the model was loaded with.
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
    """What the attention of a forward pass is shared over; None where each rank computes all of it."""
    cp = sequence.state_now().cp
    frame = running_forward()
    if cp is not None or frame is None or frame.owner is not sequence:
        return cp
    return cast("CachedPass | None", frame.cache)


def _scaled_by_position(attention: Any, query: Tensor, cp: CpContext) -> Tensor:
    """`query` [batch, heads, seq, head_dim] with the scale of its tokens' places in the whole sequence.

    Llama 4's layers without rotary embeddings scale queries by log1p(floor((place + 1) / floor_scale)) * attn_scale + 1
    (Llama4TextAttention of transformers), and count the place from the first token that they are given.
    """
    if not getattr(attention, "attn_temperature_tuning", False) or getattr(attention, "use_rope", True):
        return query

    def scales(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / attention.floor_scale)) * attention.attn_scale + 1.0

    given = torch.arange(query.shape[2], device=query.device)
    change = scales(cp.positions(query.device)) / scales(given)
    return (query * change.unsqueeze(-1)).to(query.dtype)


def _window(mask: Window | None, sliding_window: int | None, causal: bool) -> tuple[int, int] | None:
    """The window that the mask stands for. Not all models tell their attention function, too; of those whose attention
    makes its own masks only that function knows, and they count the token itself."""
    if mask is not None:
        return mask.sides
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _mask(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' mask function, called with keywords: a Window or nothing for a ring, else `own` for the whole
    sequence."""
    frame = running_forward()
    shard, cache = (None, None) if frame is None else (frame.shard, cast("CachedPass | None", frame.cache))
    # Where attention is ours: over tokens, or over a cache, of which each rank has a part.
    ours = cache if cache is not None else None if shard is None else shard.cp
    if frame is not None and ours is not None and getattr(frame.owner, "own_attention", None):
        # Nothing reads it, though MPT converts it.
        return torch.zeros((1, 1, 1, 1), dtype=torch.float32, device="cpu")
    if ours is not None:
        # Of a plain mask, causal or bidirectional, transformers says that attention may do without it.
        if kwargs.get("use_vmap") or not (
            kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip")
        ):
            raise ValueError(
                "The model adds a mask of its own to attention, which context parallel ranks do not serve."
            )
        size = kwargs.get("local_size")
        # transformers' mask of a window of 0 shows nothing: the config means no window, and no layer uses the mask.
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
        kwargs["attention_mask"] = None  # made of the embeddings, where none was given
    # transformers reads the length off the embeddings, of which a sequence parallel rank has a part.
    kwargs["q_length"] = kwargs["kv_length"] = shard.seq_len
    return own(*args, **kwargs)


def _as_window(sees: Callable[..., Tensor], size: int) -> Window:
    """The window of a mask function, sees(batch, head, query, key), of that size."""

    def token_sees(query: int, key: int) -> bool:
        return bool(sees(*torch.tensor([0, 0, query, key], dtype=torch.int64, device="cpu").unbind()))

    if not token_sees(size, 1):  # sees nothing of the `size` tokens before it: a new chunk begins here
        raise ValueError(
            f"The model attends within chunks of {size} tokens, shorter than the sequence, which context parallel "
            "ranks do not serve. Use sequences that fit into a chunk, or no cp_dim."
        )
    if token_sees(0, 1):
        return Window((size, size))  # transformers' bidirectional windows do not count the token itself
    return Window((size - 1, 0))
