"""Methods of transformers models that change parameters, adapted to tensor parallel models."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from fused_tp.nn.sharding import parameters_as_dtensors


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
