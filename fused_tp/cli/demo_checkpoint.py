"""Save and load model, optimizer and step by torch.distributed.checkpoint, between any two layouts of the ranks.

Parameters are DTensors, so a checkpoint describes whole tensors whatever cut them: one saved at TP 2 loads at
TP 1 x CP 2, and into the unsharded model too.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, *, steps: int) -> None:
    """Write what `load_checkpoint` reads; called by all ranks. `steps` have been trained so far."""
    dcp.save(_state(model, optimizer, steps), checkpoint_id=path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, *, alone: bool = False) -> int:
    """Fill `model` and `optimizer` from `path` and return how many steps they have been trained.

    Called by all ranks, or by one for its own unsharded model (`alone`).

    Raises:
        ValueError: the checkpoint is of a model of other sizes.
    """
    state = _state(model, optimizer, 0)
    _check_sizes(path, state["model"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what `alone` asks for
        dcp.load(state, checkpoint_id=path, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["steps"])


def _check_sizes(path: Path, model_state: dict[str, Any]) -> None:
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in model_state.items():
        size = getattr(saved.get(f"model.{name}"), "size", None)
        if size != tensor.shape:
            found = f"{name} as {tuple(size)}" if size is not None else f"no {name}"
            raise ValueError(
                f"--resume is {path}, which holds {found}; this model has it as {tuple(tensor.shape)}. "
                "Give the model the sizes that it was saved with."
            )


def _state(model: nn.Module, optimizer: Optimizer, steps: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "steps": steps}
