"""Sharding of parameters over a tensor parallel mesh, as DTensors or as plain tensors with separate metadata.

The shards are exactly those of `torch.distributed.tensor`. Conversion is local: each rank slices its own copy of a
weight, or draws the same full weight as its peers. So converting a model sends nothing, and ranks may convert modules
in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.core.partition import shard_range
from fused_tp.nn.optimizers import (
    PLAIN_SHARDINGS,
    ShardedLayout,
    install_hooks,
    record_replaced_parameters,
    watch_model,
)
from fused_tp.nn.single_device_writes import write_as_one_process
from fused_tp.ops.main_grad import redirect_to_main_grad

ModuleT = TypeVar("ModuleT", bound=nn.Module)

Memo: TypeAlias = "MutableMapping[Tensor, nn.Parameter]"
"""Converted parameters by original parameter. Pass the same memo to several `from_*` calls to keep tied weights tied.
A `torch.utils.weak.WeakIdKeyDictionary()` does not keep the full weights alive; a dict does."""


class PartsShard(NamedTuple):
    """Sharding along `dim`, of `num_parts` blocks of equal length (gate and up), each sharded by itself."""

    dim: int
    num_parts: int = 1


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh` if layers can be sharded over it: a 1-D DeviceMesh that contains this rank.

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: `mesh` has more than one dim, or does not contain this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a 1-D DeviceMesh, got {type(mesh).__name__}. Create one with "
            'init_device_mesh(device_type, (world_size,), mesh_dim_names=("tp",)) or DeviceMesh.from_group.'
        )
    if mesh.ndim != 1:
        names: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"mesh must have one dim, got {mesh.ndim}: {names}. Pass the tensor parallel dim, such as "
            f"mesh[{names[-1]!r}]."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh must contain this rank. Build layers only on the ranks of the mesh.")
    return mesh


def shard_rows(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return (start, stop) of this rank's shard of a dim of `size`."""
    return shard_range(size, mesh.size(), mesh.get_local_rank())


def placements_on(mesh: DeviceMesh, placement: Placement) -> tuple[Placement, ...]:
    """Return placements for the dims of `mesh`: `placement` on the last, Shard(0) on expert parallel dims before it."""
    return (*[Shard(0)] * (mesh.ndim - 1), placement)


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | tuple[int, ...]) -> DTensor:
    """Return the DTensor of global `shape` with this rank's shard `local`, without communication."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))  # strides of a contiguous tensor
    placements = placements_on(mesh, placement)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _local_ranges(
    shape: tuple[int, ...] | torch.Size, mesh: DeviceMesh, placement: Placement
) -> Iterator[tuple[int, int, int]]:
    """Yield (dim, start, length) of this rank's shard for each sharded dim."""
    for mesh_dim, mesh_dim_placement in enumerate(placements_on(mesh, placement)):
        if isinstance(mesh_dim_placement, Shard):
            start, stop = shard_range(shape[mesh_dim_placement.dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            yield mesh_dim_placement.dim, start, stop - start


def empty_parameter(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    placement: Placement,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return an uninitialized parameter of global `shape`, of which only this rank's shard is allocated."""
    write_as_one_process()
    install_hooks()
    local_shape = list(shape)
    for dim, _, length in _local_ranges(shape, mesh, placement):
        local_shape[dim] = length
    local = torch.empty(local_shape, device=device or mesh.device_type, dtype=dtype)
    return nn.Parameter(as_dtensor(local, mesh, placement, shape))


def shard_parameter(
    parameter: Tensor, mesh: DeviceMesh, placement: Placement | PartsShard, memo: Memo | None = None
) -> nn.Parameter:
    """Convert `parameter`, of which every rank holds the same full copy, to a DTensor parameter on `mesh`.

    With several parts, the result has one more dim: [experts, 2 * out, in] becomes [experts, 2, out, in], sharded along
    out, with its elements in the same order. Rejected: torch's _StridedShard, which keeps the shape. In torch 2.13, the
    order of its shards is wrong under FSDP2 if both shard the same dim, torch.distributed.checkpoint cannot save it,
    and set_model_state_dict loads wrong rows.

    For a parameter on the meta device, this rank's shard is allocated on the mesh's device, and holds NaN until it is
    loaded or initialized. Attributes of the parameter (marks for optimizers) are kept.

    Raises:
        TypeError: `parameter` is a DTensor already.
        ValueError: `memo` contains `parameter` with another placement. Tied weights must have equal placements.
    """
    if isinstance(parameter, DTensor):
        raise TypeError(
            f"the parameter is a DTensor already ({parameter.placements} on {parameter.device_mesh}). Apply tensor "
            "parallelism to modules with plain parameters, before fully_shard."
        )
    install_hooks()
    full_tensor, num_parts = parameter, 1
    if isinstance(placement, PartsShard):
        if placement.num_parts > 1:
            _accept_original_shapes()
        dim, num_parts = placement
        placement = Shard(dim if num_parts == 1 else dim + 1)
        full_tensor = parameter if num_parts == 1 else parameter.detach().unflatten(dim, (num_parts, -1))
    tied_parameter = None if memo is None else memo.get(parameter)
    if tied_parameter is not None:
        if not isinstance(tied_parameter, DTensor) or tied_parameter.placements != placements_on(mesh, placement):
            raise ValueError(
                f"this weight is tied to a weight with placements {getattr(tied_parameter, 'placements', None)}, but "
                f"{(placement,)} is requested here. Tied weights must have equal placements: an embedding sharded by "
                "vocabulary needs a column-parallel output layer. Change the styles, or untie the weights."
            )
        return tied_parameter
    if parameter.is_meta:
        sharded_parameter = empty_parameter(tuple(full_tensor.shape), mesh, placement, dtype=parameter.dtype)
        fill_unset_(sharded_parameter)
        sharded_parameter.requires_grad_(parameter.requires_grad)
    else:
        write_as_one_process()
        local_tensor = full_tensor.detach()
        for dim, start, length in _local_ranges(local_tensor.shape, mesh, placement):
            local_tensor = local_tensor.narrow(dim, start, length)
        # A copy, so that the full storage can be freed.
        local_tensor = local_tensor.clone(memory_format=torch.contiguous_format)
        dtensor = as_dtensor(local_tensor, mesh, placement, full_tensor.shape)
        sharded_parameter = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    vars(sharded_parameter).update(
        (key, value) for key, value in vars(parameter).items() if not isinstance(value, Tensor)
    )
    if memo is not None:
        memo[parameter] = sharded_parameter
    return sharded_parameter


@cache
def _accept_original_shapes() -> None:
    """Make torch's `set_model_state_dict` and `set_optimizer_state_dict` accept packed parameters in original shape.

    Without this patch, torch would shard such a full tensor along a wrong dim, since the parameter has one dim more.
    """
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        if (original_function := getattr(torch_state_dict, name, None)) is not None:
            setattr(torch_state_dict, name, partial(_reshape_to_packed, original_function))


def _reshape_to_packed(
    original_function: Callable[..., Any],
    full_state: dict[str, Any],
    local_state: dict[str, Any],
    *args: Any,
    **keywords: Any,
) -> Any:
    for name, value in full_state.items():
        parameter = local_state.get(name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim == parameter.ndim - 1:
            packed_shape = tuple(parameter.shape)
            original_shapes = (
                (*packed_shape[:d], packed_shape[d] * packed_shape[d + 1], *packed_shape[d + 2 :])
                for d in range(value.ndim)
            )
            if tuple(value.shape) in original_shapes:
                full_state[name] = value.reshape(parameter.shape)
    return original_function(full_state, local_state, *args, **keywords)


@torch.no_grad()
def fill_unset_(tensor: Tensor) -> None:
    """Fill `tensor` with a marker for unset values: NaN, or an integer at the end of the range."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local.fill_(unset_value(local.dtype))


def unset_value(dtype: torch.dtype) -> float:
    """Return the number that marks unset values of a tensor of `dtype`."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min + 1 if dtype.is_signed else torch.iinfo(dtype).max - 1


def renamed_error(module: nn.Module, key: str) -> ValueError:
    """Return the error for a converted parameter that `module` no longer has, so that its layout is not known."""
    return ValueError(
        f"the parameter {key!r} of {type(module).__name__} was removed or renamed after it was sharded, as by pruning "
        f"or weight_norm: the layer has {sorted(module._parameters)}. Undo this first (torch.nn.utils.prune.remove, "
        "remove_weight_norm), or change the model before it is sharded."
    )


def _current_parameter(module: nn.Module, key: str) -> nn.Parameter | None:
    if key not in module._parameters:
        raise renamed_error(module, key)
    return module._parameters[key]


def packed_dims(module: nn.Module) -> dict[int, int]:
    """Map the id of each packed parameter of `module` to the first of the two dims that are one dim in the original.

    See `shard_parameter`. Rejected: names as keys, because checkpoint wrappers change the names in a state dict.
    """
    return {
        id(_current_parameter(child, key)): dim
        for child in module.modules()
        for key, dim in vars(child).get("_packed_parameter_dims", {}).items()  # not getattr: wrappers forward it
    }


def plain_parameters_(module: ModuleT) -> ModuleT:
    """Replace the DTensor parameters of `module` in place by plain parameters: this rank's shards, in the same memory.

    For libraries without DTensor support: DeepSpeed, Megatron-Core, flat parameters. Each parameter gets the attributes
    with which Megatron-Core describes sharding: `tensor_model_parallel`, `partition_dim` (-1 if it is replicated) and
    `partition_stride`. `state_dict` then contains shards. `gather_state_dict` and `load_full_state_dict` still support
    the module. Tied parameters stay tied.

    Args:
        module: a module with layers of fused_tp.nn, or a model from `parallelize`, before its first forward.

    Raises:
        ValueError: the mesh of a parameter has several dims, as under FSDP2.

    Example:
        >>> mlp = plain_parameters_(ParallelMLP(512, 2048, mesh=mesh["tp"]))
        >>> mlp.up_proj.weight.partition_dim
        0
    """
    dtensors = {
        id(p): (name, p) for name, p in module.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)
    }
    for name, parameter in dtensors.values():
        if parameter.device_mesh.ndim > 1:
            raise ValueError(
                f"{name!r} is distributed over several mesh dims ({parameter.placements}), which plain parameters do "
                "not support. Call plain_parameters_ before fully_shard, and distribute experts over tensor parallel "
                "ranks only."
            )
    plain_parameter_by_id = {key: _make_plain_parameter(parameter) for key, (_, parameter) in dtensors.items()}
    replaced_parameter_names = WeakIdKeyDictionary({parameter: name for name, parameter in dtensors.values()})
    for child in module.modules():
        dtensor: Any
        for key, dtensor in child._parameters.items():
            if isinstance(dtensor, DTensor):
                child._parameters[key] = plain_parameter_by_id[id(dtensor)]
                vars(child).setdefault(PLAIN_SHARDINGS, {})[key] = ShardedLayout(
                    dtensor.device_mesh, dtensor.placements[0], dtensor.shape
                )
                patched_child: Any = child
                patched_child.apply = partial(_apply_to_dtensors, child)
    record_replaced_parameters(replaced_parameter_names, module)
    watch_model(module, [*dict.fromkeys(parameter.device_mesh for _, parameter in dtensors.values())])
    return module


def _apply_to_dtensors(module: ModuleT, function: Callable[[nn.Module], Any]) -> ModuleT:
    """Run `module.apply(function)` with parameters shown as DTensors, so that an initializer sees the full sizes."""
    for child in module.children():
        child.apply(function)
    with parameters_as_dtensors(module, recurse=False):
        function(module)
    return module


@contextmanager
def parameters_as_dtensors(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Context in which parameters converted by `plain_parameters_` are DTensors again, in the same memory.

    An initializer then sees the full sizes, and each rank keeps its shard of the full draw.
    """
    replaced_parameters = []
    for child in module.modules() if recurse else [module]:
        for key, sharding in vars(child).get(PLAIN_SHARDINGS, {}).items():
            plain_parameter: Any = _current_parameter(child, key)
            if plain_parameter is not None and not isinstance(plain_parameter, DTensor):  # a DTensor is shown already
                dtensor = as_dtensor(plain_parameter.detach(), sharding.mesh, sharding.placement, sharding.shape)
                parameter = nn.Parameter(dtensor, requires_grad=plain_parameter.requires_grad)
                vars(parameter).update(vars(plain_parameter))
                child._parameters[key] = parameter
                replaced_parameters.append((child, key, plain_parameter, parameter))
    try:
        yield
    finally:
        for child, key, plain_parameter, parameter in replaced_parameters:
            if child._parameters.get(key) is parameter:  # otherwise the initializer has replaced it
                child._parameters[key] = plain_parameter.requires_grad_(parameter.requires_grad)
                vars(plain_parameter).update(vars(parameter))


def _make_plain_parameter(parameter: DTensor) -> nn.Parameter:
    plain_parameter: Any = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    (placement,) = parameter.placements
    plain_parameter.partition_dim = placement.dim if isinstance(placement, Shard) else -1
    plain_parameter.tensor_model_parallel, plain_parameter.partition_stride = isinstance(placement, Shard), 1
    result: nn.Parameter = plain_parameter
    return result


def as_dtensors(module: nn.Module) -> dict[int, DTensor]:
    """Map the id of each parameter converted by `plain_parameters_` to a DTensor in the same memory.

    Raises:
        ValueError: a parameter no longer has the shape of its shard.
    """
    dtensors: dict[int, DTensor] = {}
    for child in module.modules():
        for key, sharding in vars(child).get(PLAIN_SHARDINGS, {}).items():
            parameter = _current_parameter(child, key)
            if parameter is None:
                continue
            expected_shape = list(sharding.shape)
            for dim, _, length in _local_ranges(sharding.shape, sharding.mesh, sharding.placement):
                expected_shape[dim] = length
            if list(parameter.shape) != expected_shape:
                raise ValueError(
                    f"{key!r} must have the shape of this rank's shard, {tuple(expected_shape)}, got "
                    f"{tuple(parameter.shape)}. "
                    "If another library shards parameters, gather them first. Under ZeRO 3, make this call inside "
                    "`with deepspeed.zero.GatheredParameters(list(model.parameters())):`."
                )
            dtensors[id(parameter)] = as_dtensor(parameter.detach(), sharding.mesh, sharding.placement, sharding.shape)
    return dtensors


def shard_like(full_tensor: Tensor, sharded_parameter: Any) -> Tensor:
    """Return this rank's shard of `full_tensor`, sharded like the parameter `sharded_parameter`."""
    shard = full_tensor.reshape(sharded_parameter.shape)
    if isinstance(sharded_parameter, DTensor):
        return distribute_tensor(
            shard, sharded_parameter.device_mesh, sharded_parameter.placements, src_data_rank=None
        ).to_local()
    return shard


@torch.no_grad()
def copy_full_(parameter: Tensor, full_tensor: Tensor, *, broadcast: bool = True) -> None:
    """Write this rank's shard of `full_tensor` into a parameter of any placement (also on the 2-D mesh of FSDP2).

    A shard is sliced from this rank's own `full_tensor`. With `broadcast`, a fully replicated parameter gets the
    values of the mesh's first rank, because ranks with different random states would otherwise train different copies.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(full_tensor)
        return
    is_replicated = all(isinstance(placement, Replicate) for placement in parameter.placements)
    source = 0 if is_replicated and broadcast else None
    shard = distribute_tensor(full_tensor, parameter.device_mesh, parameter.placements, src_data_rank=source)
    parameter.to_local().copy_(shard.to_local())


@overload
def local_shard(parameter: Tensor) -> Tensor: ...


@overload
def local_shard(parameter: Tensor | None) -> Tensor | None: ...


def local_shard(parameter: Tensor | None) -> Tensor | None:
    """Return the local shard of a parameter.

    In backward, its gradient becomes a DTensor with the parameter's placements, or is added to its `main_grad`.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return parameter._local_tensor  # to_local() is slow: a tenth of the time of a decoding step's matmul
    if getattr(parameter, "main_grad", None) is not None:
        parameter = redirect_to_main_grad(parameter)
    if not torch.compiler.is_compiling() and _has_uneven_shards(parameter):
        shard: Tensor = _ToLocal.apply(parameter)
        return shard
    return parameter.to_local()


def _has_uneven_shards(parameter: DTensor) -> bool:
    """True if shards along a dim after the first differ in length, so one shard does not determine the full strides."""
    return any(
        isinstance(placement, Shard) and placement.dim > 0 and parameter.shape[placement.dim] % num_ranks
        for placement, num_ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


class _ToLocal(torch.autograd.Function):
    """Variant of `to_local` whose gradient has the strides of the parameter.

    torch's version assumes that all shards have equal length. If they do not, autograd copies the gradient to the
    parameter's strides, and torch 2.11 gathers the full gradient for that.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.layout = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        shard = parameter.to_local()
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.layout
        # Contiguous, like the stated strides, so that autograd keeps this gradient and accumulates into it in place.
        return DTensor.from_local(grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
