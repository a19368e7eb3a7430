"""Methods of transformers models that change parameters or serve, adapted to tensor parallel models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication

from fused_tp.nn.sharding import parameters_as_dtensors
from fused_tp.parallelizing.layers import shards_key_value_heads


def adapt_later_calls(model: nn.Module) -> None:
    """Make `init_weights()` of `model` write full parameters, and `resize_token_embeddings()` raise an error.

    This includes the transformers models inside `model`.
    """
    for module in model.modules():
        instance: Any = module  # gets partials, which can be pickled, and refer to the copy in a copied model
        if hasattr(module, "_init_weights"):
            instance._init_weights = partial(_init_weights, module)
        if hasattr(module, "resize_token_embeddings"):
            instance.resize_token_embeddings = partial(_resize_token_embeddings, module)


def enable_continuous_batching(model: Any, tp_mesh: DeviceMesh, *, has_uneven_heads: bool) -> None:
    """Let `generate_batch()` and `init_continuous_batching()` of `model` run over `tp_mesh`, whose rank 0 schedules.

    transformers finds the ranks by the private names below, which its own tensor parallelism sets as well.
    """
    if tp_mesh.size() == 1:
        return
    if has_uneven_heads:
        model.init_continuous_batching = partial(_refuse_uneven_heads, tp_mesh.size())
        return
    ranks = dist.get_process_group_ranks(tp_mesh.get_group())
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks):
        model.init_continuous_batching = partial(_refuse_continuous_batching, ranks)
        return
    # A mesh without names is taken for that of the tensor parallel ranks, whatever ours is called.
    model._device_mesh = DeviceMesh.from_group(tp_mesh.get_group(), tp_mesh.device_type)
    # The paged cache has 1 / size of the heads if the plan names these two layers. Ours may shard other layers: one for
    # q, k and v, or those of a model without a plan in transformers.
    names = [f"layers.*.self_attn.{name}" for name in ("k_proj", "v_proj")]
    other_layers = {
        name: style
        for name, style in (getattr(model, "_tp_plan", None) or {}).items()
        if not name.endswith(tuple(names))
    }
    model._tp_plan = {**other_layers, **(dict.fromkeys(names, "colwise") if shards_key_value_heads(model) else {})}


def _refuse_uneven_heads(num_ranks: int, *args: Any, **keywords: Any) -> None:
    raise ValueError(
        f"continuous batching needs a paged cache with equally many heads on all ranks, but the {num_ranks} tensor "
        "parallel ranks do not divide the heads. Use a tensor parallel size that divides them, or generate()."
    )


def _refuse_continuous_batching(ranks: list[int], *args: Any, **keywords: Any) -> None:
    # transformers seeds each rank by its global rank // tp size, and each rank samples for itself.
    raise ValueError(
        f"continuous batching needs tensor parallel ranks that are neighbours, and these are the global ranks {ranks}. "
        "Make the tensor parallel dim the last dim of the mesh, as fused_tp.make_mesh does."
    )


def _init_weights(model: Any, module: nn.Module) -> None:
    # The method computes full tensors on every rank and copies them into parameters, so treat them as replicated.
    with parameters_as_dtensors(module), implicit_replication():
        type(model)._init_weights(model, module)


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **keywords: Any
) -> nn.Module:
    embeddings: nn.Module = model.get_input_embeddings()
    size: Any = embeddings.num_embeddings
    new_size = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        new_size += -new_size % pad_to_multiple_of
    if new_size != size:
        raise ValueError(
            f"resize_token_embeddings to {new_size} tokens is not supported, because the {size} rows of the embedding "
            "and of the output layer are sharded over tensor parallel ranks. Resize the model before parallelize."
        )
    return embeddings
