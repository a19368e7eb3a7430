"""Attention and mask functions for transformers that run over the context parallel ranks of a forward pass.

transformers looks up both by name (`AttentionInterface`, `AttentionMaskInterface`). A mask would have seq x seq
elements, so the mask function returns a `MaskWindow` instead, which models pass on to attention without reading it.
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
from fused_tp.parallelizing.custom_attention import CustomAttention
from fused_tp.parallelizing.forward_shard import CpContext, running_forward
from fused_tp.parallelizing.hf.hf_latents import SELECTS_ATTRIBUTE, take_latents
from fused_tp.parallelizing.latent_attention import attend_to_latents, attend_to_selected
from fused_tp.parallelizing.layers import holds_sharded_heads
from fused_tp.parallelizing.sequence_sharding import SequenceSharding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fused_tp.parallelizing.hf.hf_cache import CachedPass

NAME_PREFIX = "fused_tp_"
SEQUENCE_ATTRIBUTE = "_fused_tp_sequence"  # attribute of modules: the SequenceSharding of their model
EAGER_FUNCTION = "eager_attention_forward"  # name of the eager attention in transformers' modeling files
# Keyword arguments of attention functions that change the result, and are not supported over context parallel ranks.
UNSUPPORTED_KEYWORDS = ("sinks", "position_bias", "head_mask", "cache")
# Keyword arguments that may be tensors: they do not change the result, are supported, or were read at the start of the
# forward pass. Other tensors (indices of selected tokens, a bias) may change the result, and raise an error.
SUPPORTED_KEYWORDS = {
    *("s_aux", "alibi_slopes", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"),
    *("labels", *SequenceSharding.unsharded_names),  # some models pass these on with all other keywords
}


@dataclass(frozen=True)
class MaskWindow:
    """Replacement for a mask: the numbers of keys that a token sees, as (before itself, after itself)."""

    window: tuple[int, int]


def register_attention(model: PreTrainedModel, sequence: SequenceSharding) -> str:
    """Register the attention function for `model` with transformers, and return its name.

    In forward passes that are sharded over context parallel ranks, the function runs ring attention. In all others, it
    runs the model's current implementation. It reads `sequence` from an attribute of the calling module. Rejected:
    passing it as a keyword argument, because not all models pass keywords on to their attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for module in model.modules():
        setattr(module, SEQUENCE_ATTRIBUTE, sequence)
    implementation: str = model.config._attn_implementation
    if implementation.startswith(NAME_PREFIX):  # the config of a parallel model, reused for another model
        return implementation
    name = NAME_PREFIX + implementation
    original_attention = _run_eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_run_attention, original_attention))
    register_mask(model.config)
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def is_original_attention_replaced(name: str) -> bool:
    """True if the attention that `name`, from `register_attention`, wraps was registered anew since then."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wrapper, original_name = ALL_ATTENTION_FUNCTIONS.get(name), name.removeprefix(NAME_PREFIX)
    if not isinstance(wrapper, partial) or original_name not in ALL_ATTENTION_FUNCTIONS:
        return False
    return ALL_ATTENTION_FUNCTIONS[original_name] is not wrapper.args[0]


def register_mask(config: Any) -> None:
    """Make the mask function of the config's attention build masks for the full sequence if a rank holds a shard of it.

    `_build_mask` is registered under the existing name. It checks the running forward pass, and falls back to the
    previous function. Rejected: a new name in the config, as for attention over context parallel ranks. Some models
    depend on the name: sparse latent attention selects tokens only for "eager" and "sdpa".
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if str(config._attn_implementation).startswith(NAME_PREFIX):  # from a parallel model, reused for another
        config._attn_implementation = config._attn_implementation.removeprefix(NAME_PREFIX)
    original_mask_function = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if original_mask_function is not None and getattr(original_mask_function, "func", None) is not _build_mask:
        ALL_MASK_ATTENTION_FUNCTIONS.register(config._attn_implementation, partial(_build_mask, original_mask_function))


def has_eager_attention(module: nn.Module) -> bool:
    """True if a file that defines the class of `module`, or one of its base classes, has an eager attention."""
    return any(hasattr(sys.modules.get(base.__module__), EAGER_FUNCTION) for base in type(module).__mro__)


def _run_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the eager attention of the model's own file, because AttentionInterface has no entry for it."""
    for base in type(module).__mro__:
        function = getattr(sys.modules.get(base.__module__), EAGER_FUNCTION, None)
        if function is not None:
            result: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
            return result
    raise ValueError(
        f"attn_implementation='eager' is not supported: the file that defines {type(module).__name__} has no "
        f"{EAGER_FUNCTION}. Load the model with another attn_implementation, such as 'sdpa'."
    )


def _run_attention(
    original_attention: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskWindow | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend like a transformers attention function: [batch, heads, seq, head_dim] -> ([batch, seq, heads, head_dim],
    weights or None)."""
    # The attribute is missing in another model that uses the same config.
    sequence: SequenceSharding | None = getattr(module, SEQUENCE_ATTRIBUTE, None)
    distributor = None if sequence is None else _find_distributor(sequence)
    if distributor is None:
        if hasattr(module, SELECTS_ATTRIBUTE) and isinstance(attention_mask, Tensor):
            # The module's own code does this only for the name of the original attention.
            attention_mask = _hide_unselected_keys(attention_mask, kwargs["indices"], key.shape[2])
        return original_attention(module, query, key, value, attention_mask, **kwargs)
    return _attend_over_ranks(distributor, module, query, key, value, attention_mask, **kwargs), None


def _attend_over_ranks(
    distributor: CpContext | CachedPass,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskWindow | None,
    **kwargs: Any,
) -> Tensor:
    """Attend over ranks: [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim].

    `kwargs` are those of transformers' attention functions.
    """
    class_name = type(module).__name__
    indices: Tensor | None = None
    if hasattr(module, SELECTS_ATTRIBUTE):
        indices, latents = kwargs.pop("indices"), take_latents(module, key, value)
        attention_mask = None if indices is not None else attention_mask  # the indexer's mask: see `_build_mask`
    else:
        latents = take_latents(module, key, value)
    for name in UNSUPPORTED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{class_name} passes {name} to its attention, which is not supported with a cp_dim. Omit cp_dim."
            )
    tensor_names = (name for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim)
    unknown_name = next((name for name in tensor_names if name not in SUPPORTED_KEYWORDS), None)
    if unknown_name is not None:
        raise ValueError(
            f"{class_name} passes the tensor {unknown_name!r} to its attention, which is not supported with a cp_dim. "
            "Omit cp_dim."
        )
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"{class_name} builds a custom attention mask of shape {tuple(attention_mask.shape)}; with a cp_dim only "
            "causal masks, sliding windows and packed documents are supported. Omit cp_dim."
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    options: dict[str, Any] = {
        "causal": causal,
        "scale": kwargs.get("scaling"),
        "window": _mask_window(attention_mask, kwargs.get("sliding_window"), causal),
        "softcap": kwargs.get("softcap") or 0.0,
        "sinks": kwargs.get("s_aux"),
        "alibi_slopes": kwargs.get("alibi_slopes"),
    }
    if not isinstance(distributor, CpContext):
        return distributor.attend(module, query, key, value, **options).contiguous()
    if distributor.has_padding and not causal:
        raise ValueError(
            f"{class_name} is not causal, so its tokens would attend to the padding in attention_mask, which is not "
            "masked with a cp_dim. Use rows of equal length, or omit cp_dim."
        )
    query = _rescale_query(module, query, distributor)
    options |= {"dropout_p": kwargs.get("dropout", 0.0), "are_heads_sharded": holds_sharded_heads(module)}
    out: Tensor | None = None
    if indices is not None:
        if latents is None:
            raise ValueError(
                f"{class_name} selects tokens by an indexer, but its keys are not those of its expand_kv, or FSDP or "
                "ZeRO 3 wraps its kv_b_proj alone, which a cp_dim does not support. Wrap whole blocks, or omit cp_dim."
            )
        out = attend_to_selected(distributor, query, latents, indices, **options)
    elif latents is not None:
        out = attend_to_latents(distributor, query, latents, **options)
    if out is None:
        out = distributor.attend(query, key, value, **options)
    return out.transpose(1, 2).contiguous()


def _hide_unselected_keys(attention_mask: Tensor, indices: Tensor | None, num_keys: int) -> Tensor:
    """Mask all keys but those at `indices` [batch, queries, selected keys], like transformers' sparse attention."""
    if indices is None:
        return attention_mask
    is_hidden = indices.new_ones((*indices.shape[:2], num_keys), dtype=torch.bool)
    is_hidden = is_hidden.scatter_(-1, indices.long(), False).unsqueeze(1)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~is_hidden
    return attention_mask.masked_fill(is_hidden, torch.finfo(attention_mask.dtype).min)


def replace_custom_attention(modules: Sequence[nn.Module], custom_attention: CustomAttention) -> None:
    """Make `modules`, which compute attention by their own code, attend over ranks like all other modules.

    They do so in the forward passes that are sharded over context parallel ranks.
    """
    for module in modules:
        if hasattr(module, "config"):
            # In unsharded passes the module's own code runs, and needs the attention name that the model was loaded
            # with. The shared config gets another name.
            module.config = copy.copy(module.config)
        setattr(
            module,
            custom_attention.method_name,
            partial(_run_custom_attention, custom_attention, module, getattr(module, custom_attention.method_name)),
        )


def _run_custom_attention(
    custom_attention: CustomAttention, module: nn.Module, original_method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    sequence: SequenceSharding = getattr(module, SEQUENCE_ATTRIBUTE)
    distributor, mesh = _find_distributor(sequence), sequence.parallelism.tp_mesh
    if distributor is None:
        return original_method(*args, **kwargs)

    def attend(query: Tensor, key: Tensor, value: Tensor, alibi_slopes: Tensor | None = None, **options: Any) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen returns q and k in fp32
        if alibi_slopes is not None and mesh is not None and holds_sharded_heads(module):
            start, stop = shard_rows(len(alibi_slopes), mesh)
            alibi_slopes = alibi_slopes[start:stop]
        options |= {"alibi_slopes": alibi_slopes, "dropout": custom_attention.dropout_probability(module)}
        return _attend_over_ranks(distributor, module, query, key, value, None, **options)

    return custom_attention.replacement(module, attend, *args, **kwargs)


def cp_context_of(module: nn.Module) -> CpContext | None:
    """Return the context parallel ranks of the running pass of `module`, a module of a parallel model."""
    sequence: SequenceSharding | None = getattr(module, SEQUENCE_ATTRIBUTE, None)
    return None if sequence is None else sequence.current_state().cp


def _find_distributor(sequence: SequenceSharding) -> CpContext | CachedPass | None:
    """Return the object that distributes attention in the running pass; None if each rank computes all of it."""
    cp = sequence.current_state().cp
    frame = running_forward()
    if cp is not None or frame is None or frame.owner is not sequence:
        return cp
    return cast("CachedPass | None", frame.cache)


def _rescale_query(attention_module: Any, query: Tensor, cp: CpContext) -> Tensor:
    """Correct the scale of `query` [batch, heads, seq, head_dim] to the positions of its tokens in the full sequence.

    Llama 4's layers without rotary embeddings (Llama4TextAttention of transformers) multiply queries by
    log1p(floor((position + 1) / floor_scale)) * attn_scale + 1. They count positions from 0 on each rank.
    """
    if not getattr(attention_module, "attn_temperature_tuning", False) or getattr(attention_module, "use_rope", True):
        return query

    def query_scales(positions: Tensor) -> Tensor:
        return (
            torch.log1p(torch.floor((positions.float() + 1.0) / attention_module.floor_scale))
            * attention_module.attn_scale
            + 1.0
        )

    local_positions = torch.arange(query.shape[2], device=query.device)
    ratio = query_scales(cp.positions(query.device)) / query_scales(local_positions)
    return (query * ratio.unsqueeze(-1)).to(query.dtype)


def _mask_window(mask: MaskWindow | None, sliding_window: int | None, causal: bool) -> tuple[int, int] | None:
    """Return the window of `mask`, or else the window that `sliding_window` specifies.

    `sliding_window` counts the token itself. Some models pass only the mask, and some only `sliding_window`.
    """
    if mask is not None:
        return mask.window
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _build_mask(original_mask_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a mask for transformers, which passes keywords.

    If our attention computes the pass, return a MaskWindow or None. Else return the mask of
    `original_mask_function` for the full sequence.
    """
    frame = running_forward()
    shard, cache = (None, None) if frame is None else (frame.shard, cast("CachedPass | None", frame.cache))
    # Not None if our attention computes this pass: over sharded tokens, or over a sharded cache.
    distributor = cache if cache is not None else None if shard is None else shard.cp
    owner = None if frame is None else frame.owner
    if distributor is not None and getattr(owner, "custom_attention", None):
        # Our attention does not read this tensor, but MPT's model code converts the mask, so None would fail.
        return torch.zeros((1, 1, 1, 1), dtype=torch.float32, device="cpu")
    if distributor is not None:
        # transformers sets one of these flags if the mask is plain causal or bidirectional, which needs no tensor.
        is_plain = kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip")
        if not (is_plain or kwargs.get("use_vmap")) and getattr(owner, "selects_tokens", False):
            # Indexers receive a slice of this tensor, in place of which `_index_over_ranks` passes a mask.
            return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device="cpu")
        if kwargs.get("use_vmap") or not is_plain:
            raise ValueError(
                "The model changes the attention mask by custom code, which a cp_dim does not support. Omit cp_dim."
            )
        size = kwargs.get("local_size")
        # A config with a window of 0 means no window. No layer uses the mask for it, which would hide all keys.
        return None if not size or size >= distributor.seq_len else _convert_window(kwargs["mask_function"], size)
    if shard is None:
        return original_mask_function(*args, **kwargs)
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.shape[1] != shard.seq_len:
        if not bool(mask.all()):
            raise ValueError(
                f"The model builds a custom attention_mask of shape {tuple(mask.shape)} for a sequence of "
                f"{shard.seq_len} tokens, and it has padding, which is not supported with sequence_parallel=True. Pass "
                "sequence_parallel=False."
            )
        kwargs["attention_mask"] = None  # the model has derived this mask from the sharded embeddings
    # transformers reads the length from the embeddings, which are sharded on a sequence parallel rank.
    kwargs["q_length"] = kwargs["kv_length"] = shard.seq_len
    return original_mask_function(*args, **kwargs)


def _convert_window(mask_function: Callable[..., Tensor], size: int) -> MaskWindow:
    """Convert `mask_function(batch, head, query, key)`, True inside a window of `size` tokens, to a MaskWindow.

    Raises:
        ValueError: `mask_function` describes chunks of `size` tokens instead.
    """

    def token_sees(query: int, key: int) -> bool:
        return bool(mask_function(*torch.tensor([0, 0, query, key], dtype=torch.int64, device="cpu").unbind()))

    if not token_sees(size, 1):  # a window at `size` includes token 1, a new chunk does not
        raise ValueError(
            f"The model attends within chunks of {size} tokens, which is not supported with a cp_dim for sequences "
            "longer than a chunk. Use sequences that fit into a chunk, or omit cp_dim."
        )
    if token_sees(0, 1):
        return MaskWindow((size, size))  # transformers' bidirectional windows do not count the token itself
    return MaskWindow((size - 1, 0))
