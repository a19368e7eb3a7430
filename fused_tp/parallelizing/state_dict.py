"""Load a full state dict into a parallel model, where each rank keeps its shard, and save the full model to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import isnan, prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils.stateless import _reparametrize_module

from fused_tp.nn import gather_state_dict
from fused_tp.nn.sharding import as_dtensors, copy_full_, fill_unset_, packed_dims, unset_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DISTRIBUTED_CONFIG = "distributed_config"  # attribute of a transformers config


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True
) -> None:
    """Load the state of the unsharded model into a model that `parallelize` returned, or into any DTensor model.

    There is no communication: every rank reads the full tensors and copies its shard. With an iterator that reads a
    file tensor by tensor, only one full tensor is in memory at a time. Use it for models built on the meta device.

    Args:
        model: the parallel model.
        state_dict: full tensors by their names in the unsharded model, as a dict or an iterable of pairs.
        strict: raise if a name is missing or unknown. For tied weights one of their names is enough.

    Raises:
        ValueError: a tensor has another shape than in the model; with `strict`, a name is missing or unknown.

    Example:
        >>> with torch.device("meta"):
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> parallelize(model, mesh)
        >>> with safetensors.safe_open("model.safetensors", "pt") as file:
        ...     load_full_state_dict(model, ((name, file.get_tensor(name)) for name in file.keys()))
    """
    loader, unknown_names = FullTensorLoader(model), []
    for name, full_tensor in state_dict.items() if isinstance(state_dict, Mapping) else state_dict:
        if name in loader.state:
            loader.load(name, full_tensor)
        else:
            unknown_names.append(name)
    missing_names = loader.missing_names()
    if strict and (missing_names or unknown_names):
        problems = [
            f"{description} {names[:5]}{'...' if len(names) > 5 else ''}"
            for description, names in (("lacks the names", missing_names), ("has the unknown names", unknown_names))
            if names
        ]
        raise ValueError(f"state_dict {' and '.join(problems)}. Pass strict=False to load the other tensors.")


class FullTensorLoader:
    """Loader of full tensors into a parallel model, one by one.

    Attributes:
        state: parameters and persistent buffers by name, those with plain values as DTensors.
    """

    def __init__(self, model: nn.Module) -> None:
        dtensors = as_dtensors(model)
        self._packed_dim_by_id = packed_dims(model)
        self._packed_dim_by_id |= {
            id(dtensors[key]): dim for key, dim in self._packed_dim_by_id.items() if key in dtensors
        }
        self.state = {name: dtensors.get(id(t), t) for name, t in model.state_dict(keep_vars=True).items()}
        self._loaded_ids: set[int] = set()

    @torch.no_grad()
    def load(self, name: str, full_tensor: Tensor) -> None:
        """Copy this rank's shard of `full_tensor`.

        Raises:
            ValueError: the tensor has another shape than in the model, or the model's other placements than Shard.
        """
        target = self.state[name]
        shape = list(target.shape)
        # A packed parameter has one dim more than the unsharded one.
        if (dim := self._packed_dim_by_id.get(id(target))) is not None:
            shape[dim : dim + 2] = [prod(shape[dim : dim + 2])]
        if list(full_tensor.shape) != shape:
            raise ValueError(
                f"{name!r} must have shape {tuple(shape)} as in the model, got {tuple(full_tensor.shape)}."
            )
        if any(type(placement) not in (Shard, Replicate) for placement in getattr(target, "placements", ())):
            raise ValueError(
                f"Loading into {name!r} with placements {target.placements} is not supported. Load before fully_shard."
            )
        copy_full_(target, full_tensor.reshape(target.shape).to(target.device), broadcast=False)
        self._loaded_ids.add(id(target))

    def missing_names(self) -> list[str]:
        """Return the names of the tensors that have not been loaded; for tied weights one of their names is enough."""
        return [name for name, tensor in self.state.items() if id(tensor) not in self._loaded_ids]


def check_buffers(model: nn.Module, *, is_hf: bool) -> None:
    """Check that all buffers of a model on the meta device can be set.

    Raises:
        ValueError: a buffer is on the meta device, not in checkpoints, and not computed by any method.
    """
    for name, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers[key]
            if buffer is not None and buffer.is_meta and not is_hf and not hasattr(module, "reset_buffers"):
                raise ValueError(
                    f"The buffer {f'{name}.{key}'.lstrip('.')!r} is on the meta device and not persistent, so loading "
                    f"weights does not set it. Add a method reset_buffers() that computes it to "
                    f"{type(module).__name__}, or build the model on a real device."
                )


@torch.no_grad()
def materialize(model: nn.Module, device_type: str, *, is_hf: bool) -> None:
    """Allocate tensors that are still on the meta device, filled with NaN, and move the other tensors to the device."""
    new_parameters: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one parameter
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in new_parameters:
                    empty = torch.empty_like(parameter, device=device_type)
                    fill_unset_(empty)
                    new_parameters[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    vars(new_parameters[parameter]).update(vars(parameter))
                module._parameters[key] = new_parameters[parameter]
        has_unset_buffer = False
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _make_unset_buffer(buffer, device_type)
                has_unset_buffer |= key in module._non_persistent_buffers_set
        if has_unset_buffer and hasattr(module, "reset_buffers"):
            reset_buffers: Any = module.reset_buffers
            reset_buffers()
        elif has_unset_buffer and is_hf:
            enclosing_modules = map(model.get_submodule, _enclosing_names(name))
            init_weights: Any = next(m for m in enclosing_modules if hasattr(m, "_init_weights"))._init_weights
            # transformers fills such buffers (RoPE frequencies) in the method `_init_weights` of the enclosing model,
            # which also initialises parameters. So replace the module's DTensors by temporary tensors.
            dtensors = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
            temporary_tensors = {
                n: torch.empty(p.shape, dtype=p.dtype, device=device_type) for n, p in dtensors.items()
            }
            with _reparametrize_module(module, temporary_tensors):
                init_weights(module)
            for key in module._non_persistent_buffers_set:
                buffer = module._buffers[key]
                if buffer is not None and _is_unset(buffer):
                    raise ValueError(
                        f"The buffer {name}.{key} is not in checkpoints, and transformers does not compute it for a "
                        f"{type(module).__name__} built on the meta device. Build the model on a real device."
                    )
    tensors = (*model.parameters(), *model.buffers())
    if any(t.device.type != device_type for t in tensors):
        model.to(device_type)


def _make_unset_buffer(template: Tensor, device: torch.device | str) -> Tensor:
    """Return a buffer like `template`, filled with a value that marks it as unset: NaN for floating-point dtypes."""
    return torch.full_like(template, unset_value(template.dtype), device=device)


def _is_unset(buffer: Tensor) -> bool:
    is_always_set = buffer.dtype == torch.bool or not buffer.numel()  # no value can mark such a buffer as unset
    unset = unset_value(buffer.dtype)
    return not is_always_set and bool((buffer.isnan() if isnan(unset) else buffer == unset).all())


def _enclosing_names(name: str) -> Iterator[str]:
    """Yield the name of a module and then the names of the modules that contain it, innermost first."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def save_full_model_in_save_pretrained(model: PreTrainedModel) -> None:
    """Make `model.save_pretrained(folder)` write the full model, as `save_pretrained` below does."""
    # A partial can be pickled, unlike a closure, and deepcopy binds it to the copied model.
    model.save_pretrained = partial(save_pretrained, model)


def save_pretrained(
    model: PreTrainedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *args: Any,
    **keywords: Any,
) -> None:
    """Write the full transformers model, whose shards the ranks hold (by `parallelize` or FSDP2), to a folder.

    All ranks of the mesh must call it, as for models that transformers itself has sharded; global rank 0 gathers the
    shards on the CPU and writes them. Its arguments are those of transformers' `save_pretrained`. With the argument
    `state_dict` nothing is gathered, and any rank may call it alone. Before reading the folder on another rank, wait
    for rank 0 (torch.distributed.barrier()).
    """
    do_all_write = bool(keywords.get("distributed_checkpoint"))  # all ranks call transformers' method, which may raise
    is_writer = is_main_process or do_all_write
    if state_dict is None and not do_all_write:
        state_dict = gather_state_dict(model, rank0_only=True, device="cpu")
        is_writer = is_main_process and dist.get_rank() == 0
    if is_writer:
        # Hide the distributed_config that `integrations.trainer` sets: with it, transformers would gather again and
        # wait for all ranks.
        distributed_config = model.config.__dict__.get(_DISTRIBUTED_CONFIG)
        if distributed_config is not None:
            setattr(model.config, _DISTRIBUTED_CONFIG, None)
        try:
            type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **keywords)
        finally:
            if distributed_config is not None:
                setattr(model.config, _DISTRIBUTED_CONFIG, distributed_config)
