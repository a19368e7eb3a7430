"""Operations on DTensors that torch computes differently from a single process, mostly in-place writes:

| operation                 | torch                                                | here                             |
|---------------------------|------------------------------------------------------|----------------------------------|
| `weight.normal_()`, CPU   | each rank draws its shard: with equal random states  | each rank draws the whole and    |
|                           | all shards are equal                                 | keeps its shard                  |
| `weight.normal_()`, GPUs  | shards differ, and depend on the number of ranks     | the same                         |
| `weight[padding].zero_()` | along a sharded dim it writes to a copy: no effect   | writes to the parameter          |
| `weight[60:] = rows`      | the same                                             | writes to the parameter          |
| `float(weight.norm())`    | the norm of this rank's shard                        | the norm                         |
| `weight.data = tensor`    | no effect                                            | writes to the parameter          |

So `torch.nn.init`, `model.apply(init)`, transformers' `init_weights()` and loops over parameters produce the same
values as in one process with the same random state. A draw, and a write to a slice along a sharded dim, temporarily
allocate the whole tensor. All ranks must call these operations, `float()` and `item()` too.

Rejected: passing initializers a plain, full tensor in place of the parameter. Initializers may also freeze, mark or
collect parameters, and would do so with the substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange

_RANDOM_WRITES = (
    *("normal_", "uniform_", "bernoulli_.float", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.to", "random_.from"),
)
_CONSTANT_WRITES = ("zero_", "fill_.Scalar", "fill_.Tensor")  # assignment of a number to a slice is the last
_RANDOM_CONSTRUCTORS = ("rand_like", "randn_like")
_TENSOR_DATA: Any = Tensor.data  # the attribute's descriptor
_OUT_OF_PLACE: dict[OpOverload, OpOverload] = {}  # such as aten.mul_.Tensor: aten.mul.Tensor


@cache
def write_as_one_process() -> None:
    """Override the operations for DTensors in this process. Called when the first parameter is sharded.

    `torch.library.register_torch_dispatch` is torch's public API for this.
    """
    special_rules = (
        *((_RANDOM_WRITES, _draw), (_RANDOM_CONSTRUCTORS, _draw_new)),
        *((_CONSTANT_WRITES, _fill), (("copy_",), _copy), (("_local_scalar_dense",), _item)),
    )
    rules = {f"aten::{name}": rule for names, rule in special_rules for name in names}
    _OUT_OF_PLACE.update((write, form) for write, form in _writes_and_out_of_place() if write.name() not in rules)
    for name, rule in [*rules.items(), *((write.name(), _write) for write in _OUT_OF_PLACE)]:
        torch.library.register_torch_dispatch(name, DTensor, rule)
    DTensor.data = property(_TENSOR_DATA.__get__, _assign_data)  # type: ignore[assignment]  # Tensor declares a value


def _writes_and_out_of_place() -> Iterator[tuple[OpOverload, OpOverload]]:
    """Yield each operation of torch that writes its first argument, such as `mul_`, with its out-of-place form."""
    for name in dir(torch.ops.aten):
        if not name.endswith("_") or name.startswith("_"):
            continue
        for overload_name in getattr(torch.ops.aten, name).overloads():
            write_op = getattr(getattr(torch.ops.aten, name), overload_name)
            out_of_place = getattr(getattr(torch.ops.aten, name[:-1], None), overload_name, None)
            if out_of_place is None or not torch._C._dispatch_has_kernel(write_op.name()):  # exists in TorchScript only
                continue
            # Operations that change the shape write no values. Composite ones call other operations of this list.
            if not (torch.Tag.inplace_view in write_op.tags or write_op._can_decompose()):
                yield write_op, out_of_place


def _draw(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, *other_args = args
    if not target._local_tensor.is_meta and not _write_through(target, func, other_args, kwargs):
        full_tensor = _empty_full_tensor(target)
        func(full_tensor, *other_args, **(kwargs or {}))
        # Not equalized by bernoulli_, because dropout also calls it.
        _write_local_shard(target, full_tensor, equalize=func is not torch.ops.aten.bernoulli_.float)
    return target


def _fill(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, *other_args = args
    if any(isinstance(value, Tensor) or value for value in other_args):
        _check_not_partial(func, target)
    if not _write_through(target, func, other_args, kwargs):
        func(target._local_tensor, *other_args, **(kwargs or {}))
    return target


@torch.no_grad()
def _write(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, *other_args = args
    kwargs = kwargs or {}
    if isinstance(target, DTensor) and _write_through(target, func, other_args, kwargs):
        return target
    if torch.Tag.pointwise in func.tags and all(_is_sharded_like(target, value) for value in other_args):
        local_args = (value._local_tensor if isinstance(value, DTensor) else value for value in other_args)
        func(target._local_tensor, *local_args, **kwargs)
        return target
    adds_number = func.name().startswith(("aten::add_", "aten::sub_")) and not isinstance(other_args[0], DTensor)
    if adds_number and isinstance(target, DTensor):
        _check_not_partial(func, target)  # torch 2.10 adds it on each rank
    # A rule cannot call the torch rule that it overrides. torch's rule for the out-of-place form computes the same.
    try:
        result = _OUT_OF_PLACE[func](target, *other_args, **kwargs)
    except NotImplementedError:  # older versions have fewer rules
        if not isinstance(target, DTensor):
            raise
        _check_not_partial(func, target)
        full_tensor = _full_values(target).clone()
        func(full_tensor, *(_full_values(t) if isinstance(t, DTensor) else t for t in other_args), **kwargs)
        _write_local_shard(target, full_tensor)
        return target
    if not torch.can_cast(result.dtype, target.dtype):  # `copy_` below would cast it without an error
        raise RuntimeError(f"{func}: result type {result.dtype} cannot be cast to {target.dtype}.")
    if isinstance(target, DTensor):
        if result.placements != target.placements:
            _check_not_partial(func, target)
        target._local_tensor.copy_(result.redistribute(placements=target.placements)._local_tensor)
    else:  # with torch's `implicit_replication`
        target.copy_(_full_values(result))
    return target


@torch.no_grad()
def _copy(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, source, *other_args = args
    is_mixed = not (isinstance(target, DTensor) and isinstance(source, DTensor))
    if is_mixed and not DTensor._op_dispatcher._allow_implicit_replication:
        descriptions = [f"a {type(t).__name__} of shape {tuple(t.shape)}" for t in (source, target)]
        raise RuntimeError(
            f"copy_ cannot copy {descriptions[0]} to {descriptions[1]}: they are mixed torch.Tensor and DTensor. "
            "Convert the first with torch.distributed.tensor.distribute_tensor or full_tensor(), or use "
            "load_full_state_dict."
        )
    if not isinstance(target, DTensor):
        target.copy_(_full_values(source), *other_args, **(kwargs or {}))
    elif not _write_through(target, func, [source, *other_args], kwargs):
        mesh, expanded_source = target.device_mesh, source.expand(target.shape)
        if not isinstance(expanded_source, DTensor):
            expanded_source = DTensor.from_local(expanded_source, mesh, [Replicate()] * mesh.ndim)
        shard = expanded_source.redistribute(mesh, target.placements)
        target._local_tensor.copy_(shard._local_tensor, *other_args, **(kwargs or {}))
    return target


def _item(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    (tensor,) = args
    result = func(tensor._local_tensor)
    if is_fake(tensor._local_tensor):  # while tracing
        return result
    value_type = type(result)
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial) and tensor.device_mesh.size(mesh_dim) > 1:
            # Rejected: full_tensor(). If only one rank calls item(), as for a log, it waits for the group's timeout.
            group = resolve_group(tensor.device_mesh.get_group(mesh_dim))
            result = _reduce(placement, exchange(group, "item() of a DTensor", result))
    return value_type(result)


def _reduce(placement: Partial, values: Sequence[Any]) -> Any:
    """Return the number of which ranks hold the partial `values`."""
    if (norm_type := getattr(placement, "norm_type", None)) is not None:  # a norm of shards
        return torch.linalg.vector_norm(torch.tensor(values, dtype=torch.float64, device="cpu"), norm_type).item()
    reductions: dict[str, Callable[[Sequence[Any]], Any]] = {
        "sum": sum,
        "product": prod,
        "max": max,
        "min": min,
        "avg": lambda numbers: sum(numbers) / len(numbers),
    }
    return reductions[placement.reduce_op](values)


@torch.no_grad()
def _assign_data(target: DTensor, value: Tensor) -> None:
    """Assign to `target.data`: a DTensor, the full tensor, or this rank's shard."""
    mesh, placements = _layout(target)
    if isinstance(value, DTensor):
        assigned = value.redistribute(mesh, placements)
    elif value.shape == target.shape:
        assigned = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    elif value.shape == target._local_tensor.shape:
        layout: dict[str, Any] = {"shape": target.shape, "stride": target.stride(), "run_check": False}
        assigned = DTensor.from_local(value.detach(), mesh, placements, **layout)
    else:
        raise ValueError(
            f"a tensor of shape {tuple(value.shape)} was assigned to the data of a parameter of shape "
            f"{tuple(target.shape)}, of which this rank holds {tuple(target._local_tensor.shape)}. Assign a tensor of "
            "one of these shapes."
        )
    _TENSOR_DATA.__set__(target, assigned)
    target._local_tensor, target._spec = assigned._local_tensor.detach(), assigned._spec


def _is_sharded_like(target: DTensor, value: object) -> bool:
    """True if a pointwise operation on the shard of `target` can use the local tensor of `value`, or a number."""
    if not isinstance(target, DTensor) or any(isinstance(placement, Partial) for placement in target.placements):
        return False
    if isinstance(value, DTensor):
        return value.shape == target.shape and _layout(value) == _layout(target)
    return not isinstance(value, Tensor) or value.ndim == 0


def _layout(tensor: DTensor) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


def _draw_new(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    template = args[0]
    _check_not_partial(func, template)
    full_tensor = func(_empty_full_tensor(template), *args[1:], **(kwargs or {}))
    return distribute_tensor(full_tensor, template.device_mesh, template.placements, src_data_rank=None)


def _write_through(target: DTensor, func: Any, other_args: list[Any], kwargs: Any) -> bool:
    """Write to `target` and its base, and return True, if `target` is a view of a DTensor but has separate memory."""
    base = target._base if target._is_view() else None
    if not isinstance(base, DTensor) or _storage_address(base) == _storage_address(target):
        return False
    full_tensor = _full_values(base).clone()
    view = target._view_func_unsafe(full_tensor)
    full_args = (_full_values(value) if isinstance(value, DTensor) else value for value in other_args)
    func(view, *full_args, **(kwargs or {}))
    _write_local_shard(base, full_tensor)
    _write_local_shard(target, view)
    return True


def _full_values(tensor: DTensor) -> Tensor:
    """Return the full tensor without a gradient. Inside a rule, torch 2.10 cannot detach a DTensor."""
    layout: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    local = tensor._local_tensor.detach()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **layout).full_tensor()


def _storage_address(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage()._cdata  # data_ptr() raises while tracing


def _empty_full_tensor(tensor: DTensor) -> Tensor:
    """Return uninitialized memory for the full tensor, with its strides, because random draws follow memory order."""
    local = tensor._local_tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def _write_local_shard(tensor: DTensor, full_tensor: Tensor, *, equalize: bool = True) -> None:
    """Write this rank's shard of `full_tensor` into `tensor`.

    With `equalize`, a replicated tensor gets the values of the mesh's first rank, because ranks with different random
    states would otherwise hold different copies.
    """
    _check_not_partial("a random draw", tensor)
    is_replicated = all(isinstance(placement, Replicate) for placement in tensor.placements)
    source = 0 if equalize and is_replicated and type(full_tensor) is Tensor else None  # no collective while tracing
    shard = distribute_tensor(full_tensor, tensor.device_mesh, tensor.placements, src_data_rank=source)
    tensor._local_tensor.copy_(shard._local_tensor)


def _check_not_partial(func: Any, tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"{func} does not support a DTensor with placements {tensor.placements}, whose ranks hold partial sums. "
            "Redistribute the tensor first."
        )
