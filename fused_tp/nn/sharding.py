"""Parameters sharded over a tensor parallel mesh: DTensors with exactly the shards of `torch.distributed.tensor`, or
plain tensors with a DTensor's metadata beside them.

Conversion is local. A rank slices its own copy of a weight (or draws the same full weight as its peers) instead of
receiving it, so converting a model sends nothing, and ranks may convert in any order.
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
from fused_tp.nn.optimizers import PLAIN_SHARDINGS, ShardedLayout, install, note_replaced, watch
from fused_tp.nn.single_device_writes import write_as_one_process
from fused_tp.ops.main_grad import into_main_grad

ModuleT = TypeVar("ModuleT", bound=nn.Module)

Memo: TypeAlias = "MutableMapping[Tensor, nn.Parameter]"
"""Converted parameters, keyed by their originals. Passing the same memo to several `from_*` keeps tied weights
tied. With `torch.utils.weak.WeakIdKeyDictionary()` it does not keep full weights alive; a dict does."""


class PartsShard(NamedTuple):
    """Sharding of a parameter along `dim`, which joins `parts` of equal length (gate and up); each part is sharded."""

    dim: int
    parts: int = 1


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh` if layers can be sharded over it: a 1-D DeviceMesh that contains this rank.

    Raises:
        TypeError: it is not a DeviceMesh.
        ValueError: it has more than one dim, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a 1-D DeviceMesh, not {type(mesh).__name__}; make one with "
            'init_device_mesh(device_type, (world_size,), mesh_dim_names=("tp",)) or DeviceMesh.from_group.'
        )
    if mesh.ndim != 1:
        names: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"mesh has {mesh.ndim} dims {names}; pass the tensor parallel one, such as mesh[{names[-1]!r}]."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh does not contain this rank; only its members can build layers on it.")
    return mesh


def shard_rows(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Start and stop of this rank's shard of a dim of `size`."""
    return shard_range(size, mesh.size(), mesh.get_local_rank())


def placements_on(mesh: DeviceMesh, placement: Placement) -> tuple[Placement, ...]:
    """`placement` on the last dim of `mesh`; Shard(0), by experts, on the (expert parallel) dims before it."""
    return (*[Shard(0)] * (mesh.ndim - 1), placement)


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | tuple[int, ...]) -> DTensor:
    """The DTensor of global `shape` whose shard on this rank is `local`. Sends nothing, unlike distribute_tensor."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))  # of a contiguous tensor
    placements = placements_on(mesh, placement)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _own_parts(
    shape: tuple[int, ...] | torch.Size, mesh: DeviceMesh, placement: Placement
) -> Iterator[tuple[int, int, int]]:
    """Yield (dim, start, length) of this rank's shard for each sharded dim."""
    for at, sharding in enumerate(placements_on(mesh, placement)):
        if isinstance(sharding, Shard):
            start, stop = shard_range(shape[sharding.dim], mesh.size(at), mesh.get_local_rank(at))
            yield sharding.dim, start, stop - start


def empty_parameter(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    placement: Placement,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """An uninitialised parameter of global `shape`; only this rank's shard of it is allocated."""
    write_as_one_process()
    install()
    local_shape = list(shape)
    for dim, _, length in _own_parts(shape, mesh, placement):
        local_shape[dim] = length
    local = torch.empty(local_shape, device=device or mesh.device_type, dtype=dtype)
    return nn.Parameter(as_dtensor(local, mesh, placement, shape))


def shard_parameter(
    parameter: Tensor, mesh: DeviceMesh, placement: Placement | PartsShard, memo: Memo | None = None
) -> nn.Parameter:
    """Convert `parameter`, of which every rank holds the same full copy, to a DTensor parameter on `mesh`.

    With several parts it gets one more dim: [experts, 2 * out, in] becomes [experts, 2, out, in], sharded along out,
    with its elements in the same order. (Rejected: torch's _StridedShard, which keeps the shape. In torch 2.13 it loses
    its order under FSDP2 if both shard one dim, cannot be saved by torch.distributed.checkpoint, and is filled with
    wrong rows by set_model_state_dict.)

    On the meta device there is nothing to slice: this rank's shard is allocated on the mesh's device, and holds NaN
    until it is loaded or initialised. Attributes set on the parameter (marks for optimizers) are kept.

    Raises:
        TypeError: `parameter` is a DTensor already.
        ValueError: `memo` holds it with another placement (tied weights must be sharded alike).
    """
    if isinstance(parameter, DTensor):
        raise TypeError(
            f"the parameter is a DTensor already ({parameter.placements} on {parameter.device_mesh}); convert modules "
            "that are still whole, tensor parallelism first and fully_shard after it."
        )
    install()
    whole, parts = parameter, 1
    if isinstance(placement, PartsShard):
        if placement.parts > 1:
            _serve_original_shapes()
        dim, parts = placement
        placement = Shard(dim if parts == 1 else dim + 1)
        whole = parameter if parts == 1 else parameter.detach().unflatten(dim, (parts, -1))
    known = None if memo is None else memo.get(parameter)
    if known is not None:
        if not isinstance(known, DTensor) or known.placements != placements_on(mesh, placement):
            raise ValueError(
                f"this weight is shared with a module that shardings it as {getattr(known, 'placements', None)}, and "
                f"{(placement,)} is asked for here; tied weights must be sharded alike (an embedding by vocabulary "
                "goes with a column-parallel output layer). Untie them or convert only one."
            )
        return known
    if parameter.is_meta:
        made = empty_parameter(tuple(whole.shape), mesh, placement, dtype=parameter.dtype)
        no_values_(made)
        made.requires_grad_(parameter.requires_grad)
    else:
        write_as_one_process()
        own = whole.detach()
        for dim, start, length in _own_parts(own.shape, mesh, placement):
            own = own.narrow(dim, start, length)
        own = own.clone(memory_format=torch.contiguous_format)  # a copy, so that the full storage can be freed
        dtensor = as_dtensor(own, mesh, placement, whole.shape)
        made = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    vars(made).update((key, value) for key, value in vars(parameter).items() if not isinstance(value, Tensor))
    if memo is not None:
        memo[parameter] = made
    return made


@cache
def _serve_original_shapes() -> None:
    """Make torch's `set_model_state_dict` and `set_optimizer_state_dict` accept full tensors of packed parameters in
    the original's shape: they would shard them along the dims of the parameter, which has one more."""
    from torch.distributed.checkpoint import state_dict as of_torch

    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        if (own := getattr(of_torch, name, None)) is not None:
            setattr(of_torch, name, partial(_with_own_shapes, own))


def _with_own_shapes(
    own: Callable[..., Any], full: dict[str, Any], held: dict[str, Any], *args: Any, **how: Any
) -> Any:
    for name, value in full.items():
        like = held.get(name)
        if isinstance(like, DTensor) and isinstance(value, Tensor) and value.ndim == like.ndim - 1:
            own_shape = tuple(like.shape)
            joined = ((*own_shape[:d], own_shape[d] * own_shape[d + 1], *own_shape[d + 2 :]) for d in range(value.ndim))
            if tuple(value.shape) in joined:
                full[name] = value.reshape(like.shape)
    return own(full, held, *args, **how)


@torch.no_grad()
def no_values_(tensor: Tensor) -> None:
    """Fill `tensor` with a marker for unset values: NaN, or an integer at the end of the range."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local.fill_(value_of_nothing(local.dtype))


def value_of_nothing(dtype: torch.dtype) -> float:
    """The number that marks unset values of a tensor of `dtype`."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min + 1 if dtype.is_signed else torch.iinfo(dtype).max - 1


def parts_dims(module: nn.Module) -> dict[int, int]:
    """Map the id of each parameter of `module` with one dim more than its original to the first of the two dims that
    are one there. See `shard_parameter`. (Not by name: checkpoint wrappers leave their own names out of those of a
    state dict.)"""
    return {
        id(child._parameters[key]): dim
        for child in module.modules()
        for key, dim in vars(child).get("_parts_dims", {}).items()  # wrappers have the attributes of the module inside
    }


def plain_parameters_(module: ModuleT) -> ModuleT:
    """Replace the DTensor parameters of `module` in place by plain ones, this rank's shards in the same memory.

    For libraries without DTensor support: DeepSpeed, Megatron-Core, flat parameters. Each parameter gets the attributes
    with which Megatron-Core describes sharding: `tensor_model_parallel`, `partition_dim` (-1 if every rank holds the
    whole) and `partition_stride`. `state_dict` then holds shards; `gather_state_dict` and `load_full_state_dict` accept
    the module as before. Tied parameters stay tied.

    Args:
        module: a module with layers of fused_tp.nn, or a model from `parallelize`, before its first forward.

    Raises:
        ValueError: a parameter is on several dims of a mesh, as under FSDP2.

    Example:
        >>> mlp = plain_parameters_(ParallelMLP(512, 2048, mesh=mesh["tp"]))
        >>> mlp.up_proj.weight.partition_dim
        0
    """
    named = {id(p): (name, p) for name, p in module.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)}
    for name, parameter in named.values():
        if parameter.device_mesh.ndim > 1:
            raise ValueError(
                f"{name!r} lies over several dims of a mesh ({parameter.placements}), which plain parameters are not "
                "told of; make parameters plain before fully_shard, and distribute experts over tensor parallel ranks "
                "only."
            )
    made = {key: _plain(parameter) for key, (_, parameter) in named.items()}
    before = WeakIdKeyDictionary({parameter: name for name, parameter in named.values()})
    for child in module.modules():
        own: Any
        for key, own in child._parameters.items():
            if isinstance(own, DTensor):
                child._parameters[key] = made[id(own)]
                vars(child).setdefault(PLAIN_SHARDINGS, {})[key] = ShardedLayout(
                    own.device_mesh, own.placements[0], own.shape
                )
                changed: Any = child
                changed.apply = partial(_apply_to_dtensors, child)
    note_replaced(before, module)
    watch(module, [*dict.fromkeys(parameter.device_mesh for _, parameter in named.values())])
    return module


def _apply_to_dtensors(module: ModuleT, function: Callable[[nn.Module], Any]) -> ModuleT:
    """`module.apply(function)` that initialises the full parameters of which this rank holds plain shards."""
    for child in module.children():
        child.apply(function)
    with shown_as_dtensors(module, recurse=False):
        function(module)
    return module


@contextmanager
def shown_as_dtensors(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Context in which parameters made plain by `plain_parameters_` are DTensors in the same memory: an initialiser
    then sees the full sizes, and draws different numbers for each rank."""
    shown = []
    for child in module.modules() if recurse else [module]:
        for key, sharding in vars(child).get(PLAIN_SHARDINGS, {}).items():
            plain: Any = child._parameters[key]
            if plain is not None and not isinstance(plain, DTensor):  # a DTensor is shown already
                whole = as_dtensor(plain.detach(), sharding.mesh, sharding.placement, sharding.shape)
                parameter = nn.Parameter(whole, requires_grad=plain.requires_grad)
                vars(parameter).update(vars(plain))
                child._parameters[key] = parameter
                shown.append((child, key, plain, parameter))
    try:
        yield
    finally:
        for child, key, plain, parameter in shown:
            if child._parameters.get(key) is parameter:  # else the initialiser has replaced it
                child._parameters[key] = plain.requires_grad_(parameter.requires_grad)
                vars(plain).update(vars(parameter))


def _plain(parameter: DTensor) -> nn.Parameter:
    plain: Any = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    (placement,) = parameter.placements
    plain.partition_dim = placement.dim if isinstance(placement, Shard) else -1
    plain.tensor_model_parallel, plain.partition_stride = isinstance(placement, Shard), 1
    made: nn.Parameter = plain
    return made


def as_dtensors(module: nn.Module) -> dict[int, DTensor]:
    """Map the id of each parameter made plain by `plain_parameters_` to its DTensor in the same memory.

    Raises:
        ValueError: a parameter no longer has the shape of its shard.
    """
    made: dict[int, DTensor] = {}
    for child in module.modules():
        for key, sharding in vars(child).get(PLAIN_SHARDINGS, {}).items():
            parameter = child._parameters[key]
            if parameter is None:
                continue
            wanted = list(sharding.shape)
            for dim, _, length in _own_parts(sharding.shape, sharding.mesh, sharding.placement):
                wanted[dim] = length
            if list(parameter.shape) != wanted:
                raise ValueError(
                    f"a rank's part of {key!r} is {tuple(wanted)}, and it has {tuple(parameter.shape)}; what shards "
                    "parameters must give them back before. Under ZeRO 3 call this inside `with "
                    "deepspeed.zero.GatheredParameters(list(model.parameters())):`."
                )
            made[id(parameter)] = as_dtensor(parameter.detach(), sharding.mesh, sharding.placement, sharding.shape)
    return made


@torch.no_grad()
def copy_full_(parameter: Tensor, full: Tensor, *, broadcast: bool = True) -> None:
    """Write this rank's shard of `full` into a parameter of any placement (also on the 2-D mesh of FSDP2).

    Shards are taken from this rank's own `full`. With `broadcast`, a fully replicated parameter gets the values of the
    mesh's first rank, since ranks with different random states would otherwise train different copies.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    replicated = all(isinstance(placement, Replicate) for placement in parameter.placements)
    source = 0 if replicated and broadcast else None
    shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=source)
    parameter.to_local().copy_(shard.to_local())


@overload
def local(parameter: Tensor) -> Tensor: ...


@overload
def local(parameter: Tensor | None) -> Tensor | None: ...


def local(parameter: Tensor | None) -> Tensor | None:
    """Local shard of a parameter; its gradient becomes a DTensor of its placement, or is added to its `main_grad`."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return parameter._local_tensor  # to_local() runs through many frames, a tenth of a decoding step's matmul
    if getattr(parameter, "main_grad", None) is not None:
        parameter = into_main_grad(parameter)
    if not torch.compiler.is_compiling() and _lies_unevenly(parameter):
        part: Tensor = _ToLocal.apply(parameter)
        return part
    return parameter.to_local()


def _lies_unevenly(parameter: DTensor) -> bool:
    """True if the ranks' shards of rows differ in length, so that the full strides do not follow from one shard."""
    return any(
        isinstance(placement, Shard) and placement.dim > 0 and parameter.shape[placement.dim] % ranks
        for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


class _ToLocal(torch.autograd.Function):
    """`to_local` whose gradient has the parameter's own strides. torch's assumes that all shards are as long as this
    one; autograd then copies the gradient into the strides of the parameter, which torch 2.11 does by gathering it."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.lie = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        part = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.lie
        # Contiguous, as the strides say: autograd keeps such a gradient, and adds to it and scales it in place.
        return DTensor.from_local(grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
