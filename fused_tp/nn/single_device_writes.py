"""Operations on DTensors that torch computes differently from a single process, or refuses: writes and random draws.

| operation                 | torch                                                | here                             |
|---------------------------|------------------------------------------------------|----------------------------------|
| `weight.normal_()`, CPU   | each rank draws its shard: with equal random states  | each rank draws the whole and    |
|                           | all shards are equal                                 | keeps its shard                  |
| `weight.normal_()`, GPUs  | shards differ, and depend on the number of ranks     | the same                         |
| `weight[padding].zero_()` | along a sharded dim it writes to a copy: no effect   | writes to the parameter          |
| `weight[60:] = rows`      | the same                                             | writes to the parameter          |
| `float(weight.norm())`    | the norm of this rank's shard                        | the norm                         |
| `norm.clamp_min_(1e-6)`   | RuntimeError if `norm` is a term of each rank        | reduces the terms first          |
| `weight.data = tensor`    | no effect                                            | writes to the parameter          |
| `torch.bernoulli(p)`      | each rank draws its shard, or NotImplementedError    | each rank draws the whole and    |
| and all other draws       |                                                      | keeps its shard                  |
| `torch._foreach_copy_`,   | NotImplementedError; RuntimeError if a list has      | the operation of one tensor for  |
| `_foreach_lerp_`, ...     | both DTensors and tensors (buffers)                  | each item of the lists           |

So `torch.nn.init`, `model.apply(init)`, transformers' `init_weights()` and loops over parameters produce the same
values as in one process with the same random state. A draw, and a write to a slice along a sharded dim, temporarily
allocate the whole tensor. All ranks must call these operations, `float()` and `item()` too.

Not overridden: attention and recurrent layers, which draw only if their dropout is not 0, because a rule cannot call
the torch rule that it overrides.

Rejected: passing initializers a plain, full tensor in place of the parameter. Initializers may also freeze, mark or
collect parameters, and would do so with the substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils._pytree import tree_map_only

from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange

_CONSTANT_WRITES = ("zero_", "fill_.Scalar", "fill_.Tensor")  # assignment of a number to a slice is the last
_TENSOR_DATA: Any = Tensor.data  # the attribute's descriptor
_OUT_OF_PLACE: dict[OpOverload, OpOverload] = {}  # such as aten.mul_.Tensor: aten.mul.Tensor


@cache
def write_as_one_process() -> None:
    """Override the operations for DTensors in this process. Called when the first parameter is sharded.

    `torch.library.register_torch_dispatch` is torch's public API for this.
    """
    special_rules = ((_CONSTANT_WRITES, _fill), (("copy_",), _copy), (("_local_scalar_dense",), _item))
    rules = {f"aten::{name}": rule for names, rule in special_rules for name in names}
    operations = list(_operations())
    rules.update((operation.name(), _draw) for operation in operations if _is_random(operation))
    rules.update((operation.name(), _for_each) for operation in operations if _one_tensor_function(operation))
    rules["aten::native_dropout"] = _drop_out
    pairs = _writes_and_out_of_place(operations)
    _OUT_OF_PLACE.update((write, form) for write, form in pairs if write.name() not in rules)
    for name, rule in [*rules.items(), *((write.name(), _write) for write in _OUT_OF_PLACE)]:
        torch.library.register_torch_dispatch(name, DTensor, rule)
    DTensor.data = property(_TENSOR_DATA.__get__, _assign_data)  # type: ignore[assignment]  # Tensor declares a value


def _operations() -> Iterator[OpOverload]:
    """Yield all operations of torch. Those in `dir(torch.ops.aten)` are only the ones that were used before."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet_name, _, overload_name = name.partition(".")
        if namespace == "aten":
            yield getattr(getattr(torch.ops.aten, packet_name), overload_name or "default")


def _writes_and_out_of_place(operations: Iterable[OpOverload]) -> Iterator[tuple[OpOverload, OpOverload]]:
    """Yield each operation of torch that writes its first argument, such as `mul_`, with its out-of-place form."""
    for write_op in operations:
        name = _packet_name(write_op)
        out_of_place = getattr(getattr(torch.ops.aten, name[:-1], None), write_op._overloadname, None)
        if not name.endswith("_") or name.startswith(("_", "resize")) or out_of_place is None:
            continue
        # Operations that change the shape write no values. Composite ones call other operations of this list.
        if not (torch.Tag.inplace_view in write_op.tags or write_op._can_decompose()):
            yield write_op, out_of_place


def _packet_name(operation: OpOverload) -> str:
    return operation._schema.name.removeprefix("aten::")


def _is_random(operation: OpOverload) -> bool:
    """True if `operation` always draws random numbers and takes a tensor. Composite ones call others of this kind."""
    arguments = operation._schema.arguments
    return (
        torch.Tag.nondeterministic_seeded in operation.tags
        and any(isinstance(argument.type, torch.TensorType) for argument in arguments)
        and not any(argument.name in ("dropout", "dropout_p") for argument in arguments)
        and not operation._can_decompose()
    )


@torch.no_grad()
def _draw(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Draw with full tensors as one process does, and keep this rank's shards of the results."""
    signature = {argument.name: argument for argument in func._schema.arguments}
    given = {**dict(zip(signature, args, strict=False)), **(kwargs or {})}
    dtensors = {key: value for key, value in given.items() if isinstance(value, DTensor)}
    written = {key for key, argument in signature.items() if argument.is_write}
    # Draws in place and `rand_like` do not read the values of their tensor.
    is_read = "rrelu" in _packet_name(func)
    unread = set() if is_read else written | ({"self"} if _packet_name(func).endswith("_like") else set())
    full_tensors = {key: _empty_full_tensor(value) for key, value in dtensors.items()}
    for key, value in dtensors.items():
        if key not in unread and not value._local_tensor.is_meta:
            full_tensors[key].copy_(_full_values(value))
    arguments = {**given, **full_tensors}
    results = func(**arguments)
    for key, target in dtensors.items():  # in the same order on all ranks
        full_tensor = full_tensors[key]
        if key not in written or target._local_tensor.is_meta:
            continue
        if full_tensor.shape != target.shape:
            raise ValueError(
                f"{func} writes a result of shape {tuple(full_tensor.shape)} to a DTensor of shape "
                f"{tuple(target.shape)}. Pass an `out` that has the shape of the result, or none."
            )
        if not _write_through(target, torch.ops.aten.copy_.default, [full_tensor], {}):
            # Not equalized by bernoulli_, because dropout also calls it.
            equalize = key in unread and func is not torch.ops.aten.bernoulli_.float
            _write_local_shard(target, full_tensor, equalize=equalize)
    written_tensors = {id(arguments[key]): given[key] for key in written if key in given}

    def distribute(result: Tensor) -> Tensor:
        if id(result) in written_tensors:
            written_tensor: Tensor = written_tensors[id(result)]
            return written_tensor
        template = next((value for value in dtensors.values() if value.shape == result.shape), None)
        return _distribute(result, next(iter(dtensors.values())).device_mesh, template)

    return tree_map_only(Tensor, distribute, results)


def _drop_out(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Draw the mask of the full tensor and apply it to the shard, without communication. For dropout of activations."""
    tensor, probability, training = args
    _check_not_partial(func, tensor)
    mask = _distribute(func(_empty_full_tensor(tensor), probability, training)[1], tensor.device_mesh, tensor)
    scale = 1.0 if training is False else 0.0 if probability == 1 else 1 / (1 - probability)
    return torch.ops.aten.native_dropout_backward(tensor, mask, scale), mask


def _distribute(full_tensor: Tensor, mesh: DeviceMesh, template: DTensor | None) -> DTensor:
    """Return the DTensor of `full_tensor`, which all ranks hold, sharded like `template`, or replicated."""
    placements = [Replicate()] * mesh.ndim if template is None or _is_partial(template) else template.placements
    return distribute_tensor(full_tensor, mesh, placements, src_data_rank=None)


def _one_tensor_function(operation: OpOverload) -> Callable[..., Any] | None:
    """Return the function of one tensor, such as `Tensor.add_`, for an operation of lists, such as `_foreach_add_`."""
    arguments, name = operation._schema.arguments, _packet_name(operation)
    if not name.startswith("_foreach_") or not isinstance(arguments[0].type, torch.ListType):
        return None
    if any(argument.is_out for argument in arguments) or name == "_foreach_norm":
        return None
    method_name = name.removeprefix("_foreach_").replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    return getattr(Tensor, method_name, None)


@torch.no_grad()
def _for_each(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call `func` on the local tensors, if all in a place of the lists are sharded alike; else item by item.

    Some items may be plain tensors, such as buffers.
    """
    function, kwargs, original_args = _one_tensor_function(func), kwargs or {}, args
    assert function is not None
    is_scaled = function.__name__.startswith("addc")  # the factor is their fourth argument, or the keyword `value`
    if is_scaled and len(args) > 3 and isinstance(args[3], Tensor):
        args = (*args[:3], args[3].tolist())
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] * len(args[0]) for arg in args]
    items = [*zip(*lists, strict=True)]
    if _packet_name(func).endswith("_") and all(
        not tensor._is_view() and all(_is_sharded_like(tensor, value) for value in (tensor, *values))
        for tensor, *values in items
    ):
        func(*tree_map_only(DTensor, lambda t: t._local_tensor, original_args), **kwargs)
        return None
    results = []
    for tensor, *values in items:
        scale = {"value": values.pop()} if is_scaled and len(values) > 2 else {}
        results.append(function(tensor, *values, **scale, **kwargs))
    return results if func._schema.returns else None


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
        if result.placements != target.placements and _is_partial(target):
            if target._is_view():
                _check_not_partial(func, target)
            # A norm of shards, for example. No other tensor has its memory, so it can hold the reduced values instead.
            reduced = result.to(target.dtype)
            target._local_tensor, target._spec = reduced._local_tensor, reduced._spec
            return target
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
    if not isinstance(target, DTensor) or _is_partial(target):
        return False
    if isinstance(value, DTensor):
        return value.shape == target.shape and _layout(value) == _layout(target)
    return not isinstance(value, Tensor) or value.ndim == 0


def _layout(tensor: DTensor) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


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


def _is_partial(tensor: DTensor) -> bool:
    return any(isinstance(placement, Partial) for placement in tensor.placements)


def _check_not_partial(func: Any, tensor: DTensor) -> None:
    if _is_partial(tensor):
        raise ValueError(
            f"{func} does not support a DTensor with placements {tensor.placements}, whose ranks hold partial sums. "
            "Redistribute the tensor first."
        )
