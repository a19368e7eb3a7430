"""State dicts of plain tensors from modules whose parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.nn.sharding import parts_dims
from fused_tp.runtime.group import resolve_group
from fused_tp.transport.store import exchange


@torch.no_grad()
def gather_state_dict(module: nn.Module, *, rank0_only: bool = False, device: str | None = None) -> dict[str, Tensor]:
    """The state dict of the unsharded module: full plain tensors under the same names.

    A collective: all ranks that hold a part must call it. Works for tensor parallel modules and for FSDP2 over them.
    For large models prefer torch.distributed.checkpoint, which saves and loads parts (also at another number of ranks).

    Args:
        rank0_only: only global rank 0 keeps the tensors; the others get an empty dict and hold one full tensor at a
            time.
        device: where to put the tensors, such as "cpu"; default where they are.

    Returns:
        Tensors that share no memory with the module. Tied parameters are one tensor under several names.

    Raises:
        TypeError: `module` is no nn.Module.
        CollectiveTimeoutError, PeerLostError: some rank that holds a part did not call it within `FUSED_TP_TIMEOUT`
            seconds, or has died. What the group's ops need to agree on afterwards is lost: make a new group.

    Example:
        >>> full = gather_state_dict(model, device="cpu")
        >>> unsharded_model.load_state_dict(full)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, not {type(module).__name__}.")
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    full: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # by id of the parameter: state_dict() of tied names gives views of one tensor
    tensors = module.state_dict(keep_vars=True)
    parts = parts_dims(module)
    _meet(tensors.values())
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):  # extra state
            if keep:
                full[name] = tensor
            continue
        if id(tensor) not in gathered:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if id(tensor) in parts:
                whole = whole.flatten(parts[id(tensor)], parts[id(tensor)] + 1)
            if not keep:
                gathered[id(tensor)] = whole.new_empty(0)
                continue
            # full_tensor of a replicated parameter is that parameter's own memory.
            gathered[id(tensor)] = whole.detach().to(device or whole.device, copy=True)
        if keep:
            full[name] = gathered[id(tensor)]
    return full


def _meet(tensors: Iterable[Any]) -> None:
    """Waits until all ranks that hold parts have arrived, or names the missing ones: torch would wait half an hour."""
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        for dim, ranks in enumerate(mesh.shape):
            if ranks > 1:
                exchange(resolve_group(mesh.get_group(dim)), "gather_state_dict")
