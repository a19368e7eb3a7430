"""`save_pretrained` of a transformers model whose parameters are parts: the whole model's files, as of any other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fused_tp.nn import gather_state_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_whole(model: PreTrainedModel) -> None:
    """Let `model.save_pretrained(folder)` write the whole model. All ranks of the mesh must call it, as they must where
    transformers itself has cut a model; global rank 0 gathers on the CPU what the others hold, and writes.

    It takes what it took. With a `state_dict` nothing is gathered, and any rank may call it alone. Who reads the folder
    on another rank waits for rank 0 first (torch.distributed.barrier()).
    """
    # Unlike a method of the instance it can be pickled; a copy of the model has its own.
    model.save_pretrained = partial(_save_pretrained, model)


def _save_pretrained(
    model: PreTrainedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *args: Any,
    **keywords: Any,
) -> None:
    each = bool(keywords.get("distributed_checkpoint"))  # then all ranks write, or are all told that they cannot
    writes = is_main_process or each
    if state_dict is None and not each:
        state_dict = gather_state_dict(model, rank0_only=True, device="cpu")
        writes = is_main_process and dist.get_rank() == 0
    if writes:
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **keywords)
