"""Core attention of Megatron-Core, also over context parallel ranks.

Megatron shards a sequence over them in the layout "zigzag", and each packed document in "zigzag_documents"; rotary
embeddings follow. `cp_comm_type` selects how keys and values reach the queries:

| cp_comm_type     | runs                                                                                  |
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

from fused_tp.ops.ring_attention import attention_over
from fused_tp.ops.sequence import sequence_positions
from fused_tp.ops.ulysses_attention import attention_of_heads_over

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class FusedDotProductAttention(DotProductAttention):
    """Megatron's DotProductAttention with context parallelism: causal or not, grouped heads, windows, attention sinks
    (softmax_type "learnable" or "off-by-one"), packed documents and dropout.

    Shapes on a rank: query [seq, batch, heads, head_dim], key and value the same with fewer heads; for packed documents
    (qkv_format "thd") [tokens, heads, head_dim]. Returns [seq, batch, heads * head_dim] or [tokens, heads * head_dim].

    `cu_seqlens` covers the documents of all ranks, as in Megatron, with lengths that are multiples of 2 cp. If
    documents are padded, cu_seqlens_q_padded is used: padding follows the tokens of a document, which do not see it.
    Dropout does not depend on the number of ranks if torch's CPU generator has equal states on the ranks of a context
    parallel group, as Megatron seeds it. Gradients of sinks cover this rank's tokens; Megatron sums them with those of
    all other parameters.

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
                f"attention_type is {attention_type!r}; leave the core attention of these layers as it is."
            )
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, name, False):
                raise ValueError(f"{name}=True needs the largest score, which is not kept here; set it to False.")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        given = copy(config)
        given.context_parallel_size = 1  # the parent accepts no other size
        kind, dropout = attn_mask_type, attention_dropout
        super().__init__(given, layer_number, kind, attention_type, dropout, softmax_scale, None, pg_collection)
        self.config = config
        if config.softmax_type == "learnable":  # mark sharded heads for Megatron's gradient norms
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        # Undo the parent's division by layer_number, which its own softmax reverts: it avoids overflows in fp16.
        self.softmax_scale *= self.layer_number if config.apply_query_key_layer_scaling else 1
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if windowed else None
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self._attend = _attention(self.cp_group, cp_comm_type, pg_collection)

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
        """See the class."""
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = kind in _CAUSAL
        if attention_bias is not None:
            raise ValueError("attention_bias was given, of which the whole would have to be on every rank; pass None.")
        if kind == AttnMaskType.arbitrary or (kind == AttnMaskType.padding and packed_seq_params is None):
            raise ValueError(
                f"attn_mask_type is {kind}; it must be causal or no_mask. Pack documents of several lengths, and pass "
                "packed_seq_params."
            )
        keywords: dict[str, Any] = {"causal": causal, "scale": self.softmax_scale, "window": self.window}
        keywords |= {"sinks": self.softmax_offset, "first_head": query.shape[-2] * self.tp_group.rank()}
        keywords["dropout_p"] = self.attention_dropout.p if self.training else 0.0
        if packed_seq_params is not None:
            q, k, v = (t.unsqueeze(0) for t in (query, key, value))
            keywords |= _documents(packed_seq_params, causal, 1 if self.cp_group is None else self.cp_group.size())
            return self._attend(q, k, v, **keywords).squeeze(0).flatten(1)
        if len(key) != len(query):
            if self.cp_group is not None:
                raise ValueError(
                    f"there are {len(query)} queries and {len(key)} keys on a context parallel rank; decode without "
                    "context parallelism."
                )
            keywords["seq_len_kv"] = len(key)
        if causal:
            self._check_mask(attention_mask, len(query), len(key))
        elif attention_mask is not None and len(query) > 1:
            raise ValueError(f"attn_mask_type is {kind} and an attention_mask was given; pass None.")
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        return self._attend(q, k, v, **keywords).transpose(0, 1).flatten(2)

    def _check_mask(self, mask: Tensor | None, queries: int, keys: int) -> None:
        """Refuse a mask that is not causal. Megatron-LM makes causal masks by default; each is read here only, once."""
        if mask is None or mask in _CAUSAL_MASKS:
            return
        if self.cp_group is None:
            seen = torch.arange(keys - queries, keys, device="cpu")
        else:
            keys *= self.cp_group.size()
            seen = sequence_positions(keys, group=self.cp_group, device="cpu")
        hidden = torch.arange(keys, device="cpu") > seen[:, None]
        if mask.shape[-2:] != hidden.shape or not (mask == hidden.to(mask.device)).all():
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} is not the causal mask, which is all that is computed "
                "here. Pass None (--no-create-attention-mask-in-dataloader), and documents by packed_seq_params."
            )
        _CAUSAL_MASKS[mask] = True


_CAUSAL_MASKS = WeakIdKeyDictionary()  # all layers get the same mask


def _attention(cp_group: Any, cp_comm_type: str | None, pg_collection: Any) -> Callable[..., Tensor]:
    if cp_group is None:
        return partial(attention_over, group=None, alone=True)
    if cp_comm_type in (None, "p2p"):
        return partial(attention_over, group=cp_group)
    if cp_comm_type == "a2a":
        return partial(attention_of_heads_over, inner=cp_group, ring=None)
    if cp_comm_type == "a2a+p2p":
        groups = getattr(pg_collection, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(False)
        # Megatron's destroy_model_parallel leaves these groups behind: they may be stale.
        if not groups or len(groups) != 2 or groups[0].size() * groups[1].size() != cp_group.size():
            raise ValueError(
                "cp_comm_type is 'a2a+p2p', which needs two hierarchical_context_parallel_sizes whose product is the "
                f"context parallel size, {cp_group.size()}; give them to initialize_model_parallel and to the config."
            )
        return partial(attention_of_heads_over, inner=groups[0], ring=groups[1])
    raise ValueError(
        f"cp_comm_type is {cp_comm_type!r}; it must be 'p2p', 'a2a' or 'a2a+p2p'. 'p2p' sends what 'all_gather' would, "
        "a step at a time."
    )


def _documents(packed: Any, causal: bool, ranks: int) -> dict[str, Any]:
    """Keyword arguments of attention over packed documents that are sharded over `ranks` context parallel ranks."""
    if packed.qkv_format != "thd":
        raise ValueError(f"qkv_format of packed_seq_params is {packed.qkv_format!r}; it must be 'thd'.")
    if getattr(packed, "cp_group", None) is not None or getattr(packed, "local_cp_size", None) is not None:
        raise ValueError(
            "packed_seq_params has a context parallel group of its own; the model's is used for all batches, so set "
            "cp_group and local_cp_size to None."
        )
    found: dict[str, Any] = {"layout": "zigzag_documents"}
    for name, bounds, padded in (
        ("cu_seqlens", packed.cu_seqlens_q, packed.cu_seqlens_q_padded),
        ("cu_seqlens_kv", packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded),
    ):
        if padded is not None and not causal and not torch.equal(padded, bounds):
            raise ValueError("documents are padded and not causal, so that tokens would see padding; do not pad them.")
        found[name] = (bounds if padded is None else padded).cpu()  # copied once, for the check and the op
        lengths = found[name].diff()
        if ranks > 1 and bool((lengths % (2 * ranks)).any()):
            raise ValueError(
                f"documents have {lengths.tolist()} tokens, and Megatron-Core splits each into {2 * ranks} equal "
                f"chunks; pad documents to a multiple of {2 * ranks}."
            )
    return found
