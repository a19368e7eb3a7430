"""In-place writes to DTensors that produce the same numbers as a single process.

torch's own DTensor operations differ from one process in two ways that affect the initialization of a sharded model:

| write                     | torch                                                | here                             |
|---------------------------|------------------------------------------------------|----------------------------------|
| `weight.normal_()`, CPU   | each rank draws its shard: with equal random states  | each rank draws the whole and    |
|                           | all shards are equal                                 | keeps its shard                  |
| `weight.normal_()`, GPUs  | shards differ, and depend on the number of ranks     | the same                         |
| `weight[padding].zero_()` | along a sharded dim it writes to a copy: no effect   | writes to the parameter          |

So `torch.nn.init`, `model.apply(init)`, transformers' `init_weights()` and loops over parameters produce the same
values as in one process with the same random state. A draw temporarily allocates the whole tensor.

Rejected: passing initializers a plain, full tensor in place of the parameter. Initializers may also freeze, mark or
collect parameters, and would do so with the substitute.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

_RANDOM_WRITES = (
    *("normal_", "uniform_", "bernoulli_.float", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.to", "random_.from"),
)
_CONSTANT_WRITES = ("zero_", "fill_.Scalar", "fill_.Tensor")  # assignment of a number to a slice is the last
_RANDOM_CONSTRUCTORS = ("rand_like", "randn_like")


@cache
def write_as_one_process() -> None:
    """Override the operations for DTensors in this process. Called when the first parameter is sharded.

    `torch.library.register_torch_dispatch` is torch's public API for this.
    """
    for names, rule in ((_RANDOM_WRITES, _draw), (_CONSTANT_WRITES, _fill), (_RANDOM_CONSTRUCTORS, _draw_new)):
        for name in names:
            torch.library.register_torch_dispatch(f"aten::{name}", DTensor, rule)


def _draw(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, *other_args = args
    if not target._local_tensor.is_meta and not _write_through(target, func, other_args, kwargs):
        full_tensor = _empty_full_tensor(target)
        func(full_tensor, *other_args, **(kwargs or {}))
        _write_local_shard(
            target, full_tensor, equalize=func is not torch.ops.aten.bernoulli_.float
        )  # dropout also calls bernoulli_
    return target


def _fill(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    target, *other_args = args
    if any(isinstance(value, Tensor) or value for value in other_args):
        _check_not_partial(func, target)
    if not _write_through(target, func, other_args, kwargs):
        func(target._local_tensor, *other_args, **(kwargs or {}))
    return target


def _draw_new(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    like = args[0]
    _check_not_partial(func, like)
    full_tensor = func(_empty_full_tensor(like), *args[1:], **(kwargs or {}))
    return distribute_tensor(full_tensor, like.device_mesh, like.placements, src_data_rank=None)


def _write_through(target: DTensor, func: Any, other_args: list[Any], kwargs: Any) -> bool:
    """Write to `target` and its base, and return True, if `target` is a view of a DTensor but has separate memory."""
    base = target._base if target._is_view() else None
    if not isinstance(base, DTensor) or _storage_address(base) == _storage_address(target):
        return False
    # Use the detached local tensor, so that autograd does not record this.
    local = base._local_tensor.detach()
    layout: dict[str, Any] = {"shape": base.shape, "stride": base.stride(), "run_check": False}
    full_tensor = DTensor.from_local(local, base.device_mesh, base.placements, **layout).full_tensor().clone()
    view = target._view_func_unsafe(full_tensor)
    func(view, *other_args, **(kwargs or {}))
    _write_local_shard(base, full_tensor)
    _write_local_shard(target, view)
    return True


def _storage_address(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


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
