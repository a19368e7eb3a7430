"""Core attention of Megatron-Core, also over context parallel ranks.

Megatron shards a sequence over these ranks in the layout "zigzag", or each packed document in "zigzag_documents", and
applies rotary embeddings in that order. `cp_comm_type` selects the communication:

| cp_comm_type     | op                                                                                    |
|------------------|---------------------------------------------------------------------------------------|
| "p2p", None      | `ring_attention`                                                                      |
| "a2a"            | `ulysses_attention`                                                                   |
| "a2a+p2p"        | both, as `context_parallel_attention`: over hierarchical_context_parallel_sizes       |
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.ops.ring_attention import ring_attention_from_head
from fused_tp.ops.sequence import sequence_positions
from fused_tp.ops.ulysses_attention import context_parallel_attention_from_head

_CAUSAL_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class FusedDotProductAttention(DotProductAttention):
    """Megatron's DotProductAttention with context parallelism: causal or not, grouped heads, windows, attention sinks
    (softmax_type "learnable" or "off-by-one"), packed documents and dropout.

    Shapes on a rank: query [seq, batch, heads, head_dim], key and value the same with fewer heads; for packed documents
    (qkv_format "thd") [tokens, heads, head_dim]. Returns [seq, batch, heads * head_dim] or [tokens, heads * head_dim].

    `cu_seqlens` covers the documents of all ranks, as in Megatron; lengths must be multiples of 2 cp. If documents are
    padded, cu_seqlens_q_padded is used: padding is at the end of a document, so causal attention does not see it.
    Dropout does not depend on the number of ranks if torch's CPU generator has equal states on the ranks of a context
    parallel group, as with Megatron's seeds. Gradients of sinks cover this rank's tokens; Megatron sums them over
    ranks, like those of all other parameters.

    Args:
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, pg_collection: as in
            DotProductAttention.
        cp_comm_type: "p2p", "a2a" or "a2a+p2p"; None means "p2p".

    Raises:
        ValueError: cross-attention, cp_comm_type="all_gather", qk_clip, log_max_attention_logit; at a call: an
            attention_bias, an attention_mask that is not the causal one, or padding without documents.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        if attention_type != "self":
            raise ValueError(
                f"attention_type={attention_type!r} is not supported. Keep Megatron's core attention in these layers."
            )
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, name, False):
                raise ValueError(f"{name}=True is not supported: the largest score is not computed. Set it to False.")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        parent_config = copy(config)
        parent_config.context_parallel_size = 1  # the parent accepts no other size
        mask_type, dropout = attn_mask_type, attention_dropout
        super().__init__(
            parent_config, layer_number, mask_type, attention_type, dropout, softmax_scale, None, pg_collection
        )
        self.config = config
        if config.softmax_type == "learnable":  # mark sharded heads for Megatron's gradient norms
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        # Undo the parent's division by layer_number, which avoids overflows in fp16 and which the parent's softmax
        # multiplies back.
        self.softmax_scale *= self.layer_number if config.apply_query_key_layer_scaling else 1
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if has_window else None
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self._attend = _choose_attention(self.cp_group, cp_comm_type, pg_collection)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the attention output; see the class for shapes and the supported masks."""
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = mask_type in _CAUSAL_TYPES
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported: every rank would need all of it. Pass None.")
        if mask_type == AttnMaskType.arbitrary or (mask_type == AttnMaskType.padding and packed_seq_params is None):
            raise ValueError(
                f"attn_mask_type must be causal or no_mask, got {mask_type}. For documents of different lengths, pack "
                "the documents and pass packed_seq_params."
            )
        keywords: dict[str, Any] = {"causal": causal, "scale": self.softmax_scale, "window": self.window}
        keywords |= {"sinks": self.softmax_offset, "first_head": query.shape[-2] * self.tp_group.rank()}
        keywords["dropout_p"] = self.attention_dropout.p if self.training else 0.0
        if packed_seq_params is not None:
            q, k, v = (t.unsqueeze(0) for t in (query, key, value))
            keywords |= _document_keywords(
                packed_seq_params, causal, 1 if self.cp_group is None else self.cp_group.size()
            )
            return self._attend(q, k, v, **keywords).squeeze(0).flatten(1)
        if len(key) != len(query):
            if self.cp_group is not None:
                raise ValueError(
                    f"a context parallel rank must have as many keys as queries, got {len(query)} queries and "
                    f"{len(key)} keys. Decode without context parallelism."
                )
            keywords["seq_len_kv"] = len(key)
        if causal:
            self._check_mask(attention_mask, len(query), len(key))
        elif attention_mask is not None and len(query) > 1:
            raise ValueError(f"attention_mask is not supported with attn_mask_type={mask_type}. Pass None.")
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        return self._attend(q, k, v, **keywords).transpose(0, 1).flatten(2)

    def _check_mask(self, mask: Tensor | None, query_count: int, key_count: int) -> None:
        """Raise ValueError if `mask` is not the causal mask, which Megatron-LM creates by default.

        Each mask is read once: the result is cached.
        """
        if mask is None or mask in _CAUSAL_MASKS:
            return
        if self.cp_group is None:
            query_positions = torch.arange(key_count - query_count, key_count, device="cpu")
        else:
            key_count *= self.cp_group.size()
            query_positions = sequence_positions(key_count, group=self.cp_group, device="cpu")
        is_masked = torch.arange(key_count, device="cpu") > query_positions[:, None]
        if mask.shape[-2:] != is_masked.shape or not (mask == is_masked.to(mask.device)).all():
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} is not the causal mask; other masks are not supported. "
                "Pass None (--no-create-attention-mask-in-dataloader), and pass documents by packed_seq_params."
            )
        _CAUSAL_MASKS[mask] = True


_CAUSAL_MASKS = WeakIdKeyDictionary()  # masks found to be causal; all layers get the same one


def _choose_attention(cp_group: Any, cp_comm_type: str | None, pg_collection: Any) -> Callable[..., Tensor]:
    if cp_group is None:
        return partial(ring_attention_from_head, group=None, is_unsharded=True)
    if cp_comm_type in (None, "p2p"):
        return partial(ring_attention_from_head, group=cp_group)
    if cp_comm_type == "a2a":
        return partial(context_parallel_attention_from_head, head_group=cp_group, ring_group=None)
    if cp_comm_type == "a2a+p2p":
        groups = getattr(pg_collection, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(False)
        # Megatron's destroy_model_parallel leaves these groups behind: they may be stale.
        if not groups or len(groups) != 2 or groups[0].size() * groups[1].size() != cp_group.size():
            raise ValueError(
                "cp_comm_type='a2a+p2p' needs two hierarchical_context_parallel_sizes whose product is the context "
                f"parallel size, {cp_group.size()}. Pass them to initialize_model_parallel and to the config."
            )
        return partial(context_parallel_attention_from_head, head_group=groups[0], ring_group=groups[1])
    raise ValueError(
        f"cp_comm_type must be 'p2p', 'a2a' or 'a2a+p2p', got {cp_comm_type!r}. 'p2p' sends the same data as "
        "'all_gather', step by step."
    )


def _document_keywords(packed_seq_params: Any, causal: bool, num_ranks: int) -> dict[str, Any]:
    """Return the keywords of attention over packed documents sharded over `num_ranks` context parallel ranks."""
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(f"qkv_format of packed_seq_params must be 'thd', got {packed_seq_params.qkv_format!r}.")
    if (
        getattr(packed_seq_params, "cp_group", None) is not None
        or getattr(packed_seq_params, "local_cp_size", None) is not None
    ):
        raise ValueError(
            "cp_group and local_cp_size of packed_seq_params are not supported: the model's context parallel group is "
            "used for all batches. Set them to None."
        )
    keywords: dict[str, Any] = {"layout": "zigzag_documents"}
    for name, bounds, padded_bounds in (
        ("cu_seqlens", packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded),
        ("cu_seqlens_kv", packed_seq_params.cu_seqlens_kv, packed_seq_params.cu_seqlens_kv_padded),
    ):
        if padded_bounds is not None and not causal and not torch.equal(padded_bounds, bounds):
            raise ValueError(
                "padded documents are not supported without a causal mask: tokens would attend to padding. Do not pad "
                "the documents."
            )
        # One copy to the CPU, for the check below and for the op.
        keywords[name] = (bounds if padded_bounds is None else padded_bounds).cpu()
        lengths = keywords[name].diff()
        if num_ranks > 1 and bool((lengths % (2 * num_ranks)).any()):
            raise ValueError(
                f"each document must have a multiple of {2 * num_ranks} tokens, because Megatron-Core splits it into "
                f"{2 * num_ranks} equal chunks, got {lengths.tolist()}. Pad the documents."
            )
    return keywords
