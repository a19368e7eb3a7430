"""Conversion of a sharded module's state dicts to the unsharded module's: gathered, or as shards for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange
from fused_tp.nn.sharding import as_dtensor, as_dtensors, packed_dims


def gather_state_dict(module: nn.Module, *, rank0_only: bool = False, device: str | None = None) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded module: full plain tensors under the same names.

    A collective call: all ranks that hold a shard must make it. It supports tensor parallel modules, also under FSDP2.
    For large models use torch.distributed.checkpoint, which saves and loads shards (also on other numbers of ranks).

    Args:
        rank0_only: only global rank 0 keeps the tensors; the other ranks return an empty dict, and hold one full tensor
            at a time.
        device: device of the result, such as "cpu"; default: the device of each tensor.

    Returns:
        Tensors that share no memory with the module. Tied parameters are one tensor under several names.

    Raises:
        TypeError: `module` is not an nn.Module.
        CollectiveTimeoutError, PeerLostError: some rank that holds a shard did not make the call within
            `FUSED_TP_TIMEOUT` seconds, or has died. The group cannot be used any more: create a new one.

    Example:
        >>> full = gather_state_dict(model, device="cpu")
        >>> unsharded_model.load_state_dict(full)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}.")
    state = module.state_dict(keep_vars=True)
    keep_result = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    return gather_tensors(state, module, keep_result=keep_result, device=device)


@torch.no_grad()
def gather_tensors(
    tensors: Mapping[str, Any], module: nn.Module, *, keep_result: bool, device: str | None
) -> dict[str, Any]:
    """Gather `tensors`, entries of a state dict of `module` that are its parameters themselves, not copies.

    Args:
        keep_result: return the tensors on this rank; False: take part in gathering, and return {}.
    """
    packed_dim_by_id, dtensors = packed_dims(module), as_dtensors(module)
    full_tensors: dict[str, Any] = {}
    gathered_by_id: dict[int, Tensor] = {}  # by id of the parameter: tied names share one tensor
    _wait_for_all_ranks(dtensors.get(id(tensor), tensor) for tensor in tensors.values())
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):  # the extra state of a module
            if keep_result:
                full_tensors[name] = tensor
            continue
        if id(tensor) not in gathered_by_id:
            dtensor = dtensors.get(id(tensor), tensor)
            full_tensor = dtensor.full_tensor() if isinstance(dtensor, DTensor) else dtensor
            if id(tensor) in packed_dim_by_id:
                full_tensor = full_tensor.flatten(packed_dim_by_id[id(tensor)], packed_dim_by_id[id(tensor)] + 1)
            if not keep_result:
                gathered_by_id[id(tensor)] = full_tensor.new_empty(0)
                continue
            # full_tensor of a replicated parameter shares the parameter's memory.
            gathered_by_id[id(tensor)] = full_tensor.detach().to(device or full_tensor.device, copy=True)
        if keep_result:
            full_tensors[name] = gathered_by_id[id(tensor)]
    return full_tensors


def _wait_for_all_ranks(tensors: Iterable[Any]) -> None:
    """Wait until all ranks that hold shards arrive, or raise an error that names the missing ranks.

    Without this, torch's collectives would hang for their own timeout of many minutes.
    """
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        for dim, num_ranks in enumerate(mesh.shape):
            if num_ranks > 1:
                exchange(resolve_group(mesh.get_group(dim)), "gather_state_dict")


def original_shapes(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `state_dict` to the shapes of the unsharded module, for torch.distributed.checkpoint's `save` and `load`.

    Packed parameters (gate and up of experts), and their moments in an optimizer, are DTensors with one dim more than
    the original. A state dict of plain parameters (`plain_parameters_`) holds this rank's shards. The result describes
    both in the original shape, so that a checkpoint fits any number of tensor parallel ranks, and the unsharded model.
    The result shares memory with `state_dict`, into which `load` thus writes. All other tensors are returned unchanged.

    Args:
        module: the parallel module.
        state_dict: from `get_model_state_dict` or `get_optimizer_state_dict`, or dicts of these.

    Returns:
        Dicts of the same structure with packed and plain sharded tensors replaced, for `save` and `load` only.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
        >>> state = {"model": get_model_state_dict(model)}
        >>> dcp.save(original_shapes(model, state), checkpoint_id=folder)
        >>> dcp.load(original_shapes(model, state), checkpoint_id=folder)
        >>> set_model_state_dict(model, state["model"])
    """
    shapes = OriginalShapes(module)

    def convert(path: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert((*path, *str(key).split(".")), item) for key, item in value.items()}
        parameter = shapes.find_parameter(path) if isinstance(value, Tensor) else None
        return value if parameter is None or value.shape != parameter.shape else shapes(value, parameter)

    converted_state: dict[str, Any] = convert((), state_dict)
    return converted_state


class OriginalShapes:
    """Conversion of parameters of `modules`, and of tensors like them, to the shapes of the unsharded model.

    Attributes:
        parameters_by_name: parameters by their names in torch.distributed.checkpoint; a tied parameter is listed under
            each of its names.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._packed_dims = {key: dim for module in modules for key, dim in packed_dims(module).items()}
        self._dtensors = {key: dtensor for module in modules for key, dtensor in as_dtensors(module).items()}
        self.parameters_by_name = {
            strip_wrapper_names(name): parameter
            for module in modules
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def find_parameter(self, path: Sequence[str]) -> nn.Parameter | None:
        """Return the parameter with the longest name that `path` contains, because one name may end in another."""
        for length in range(len(path), 0, -1):
            for start in range(len(path) - length + 1):
                if (parameter := self.parameters_by_name.get(".".join(path[start : start + length]))) is not None:
                    return parameter
        return None

    def __call__(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Convert `value`, shaped and sharded like `parameter`, to its form in a checkpoint. Memory is shared."""
        from fused_tp.nn.original_shape_tensor import OriginalShapeTensor  # slow to import

        dtensor = self._dtensors.get(id(parameter))
        if dtensor is not None and not isinstance(value, DTensor):
            value = as_dtensor(value.detach(), dtensor.device_mesh, dtensor.placements[-1], dtensor.shape)
        if id(parameter) not in self._packed_dims:
            return value
        assert isinstance(value, DTensor)
        return OriginalShapeTensor.from_dtensor(value, self._packed_dims[id(parameter)])


_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def strip_wrapper_names(name: str) -> str:
    """Return the name of a parameter without the prefixes of wrappers, as torch.distributed.checkpoint names it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPER_NAMES)
