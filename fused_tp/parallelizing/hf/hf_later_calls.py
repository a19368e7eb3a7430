"""Methods of transformers that change a model, adapted for calls after tensor parallelism was applied."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from fused_tp.nn.sharding import shown_as_dtensors


def adapt_later_calls(model: nn.Module) -> None:
    """Let `init_weights()` of `model`, and of the models in it, see whole parameters; refuse to resize embeddings."""
    for module in model.modules():
        own: Any = module  # partials can be pickled, unlike methods of the instance; a copied model gets its own
        if hasattr(module, "_init_weights"):
            own._init_weights = partial(_init_weights, module)
        if hasattr(module, "resize_token_embeddings"):
            own.resize_token_embeddings = partial(_resize_token_embeddings, module)


def _init_weights(model: Any, module: nn.Module) -> None:
    # Every rank computes the whole values that the method copies into parameters, as if they were replicated.
    with shown_as_dtensors(module), implicit_replication():
        type(model)._init_weights(model, module)


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **keywords: Any
) -> nn.Module:
    embeddings: nn.Module = model.get_input_embeddings()
    size: Any = embeddings.num_embeddings
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted += -wanted % pad_to_multiple_of
    if wanted != size:
        raise ValueError(
            f"resize_token_embeddings asks for {wanted} tokens, and the {size} rows of the embedding and of the output "
            "layer are sharded over tensor parallel ranks. Resize the model before parallelize."
        )
    return embeddings
