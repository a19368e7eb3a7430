"""In-place writes to DTensors that produce the same numbers as a single process.

torch's own DTensor operations differ from one process in two ways that affect the initialisation of a sharded model:

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

_DRAWS = (
    *("normal_", "uniform_", "bernoulli_.float", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "random_.to", "random_.from"),
)
_FILLS = ("zero_", "fill_.Scalar")
_NEW = ("rand_like", "randn_like")


@cache
def write_as_one_process() -> None:
    """Override the operations for DTensors in this process. Called when the first parameter is sharded.

    `torch.library.register_torch_dispatch` is torch's public API for this.
    """
    for names, rule in ((_DRAWS, _draw), (_FILLS, _fill), (_NEW, _draw_new)):
        for name in names:
            torch.library.register_torch_dispatch(f"aten::{name}", DTensor, rule)


def _draw(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    given, *rest = args
    if not given._local_tensor.is_meta and not _write_through(given, func, rest, kwargs):
        whole = _whole_like(given)
        func(whole, *rest, **(kwargs or {}))
        _keep_own(given, whole, equalize=func is not torch.ops.aten.bernoulli_.float)  # dropout calls it, too
    return given


def _fill(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    given, *rest = args
    if any(rest):
        _check_no_terms(func, given)
    if not _write_through(given, func, rest, kwargs):
        func(given._local_tensor, *rest, **(kwargs or {}))
    return given


def _draw_new(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    given = args[0]
    _check_no_terms(func, given)
    whole = func(_whole_like(given), *args[1:], **(kwargs or {}))
    return distribute_tensor(whole, given.device_mesh, given.placements, src_data_rank=None)


def _write_through(given: DTensor, func: Any, rest: list[Any], kwargs: Any) -> bool:
    """Write to `given` and its base, and return True, if `given` is a view of a DTensor but has separate memory."""
    base = given._base if given._is_view() else None
    if not isinstance(base, DTensor) or _memory(base) == _memory(given):
        return False
    # Use the detached local tensor, so that autograd does not record this.
    local = base._local_tensor.detach()
    layout: dict[str, Any] = {"shape": base.shape, "stride": base.stride(), "run_check": False}
    whole = DTensor.from_local(local, base.device_mesh, base.placements, **layout).full_tensor().clone()
    part = given._view_func_unsafe(whole)
    func(part, *rest, **(kwargs or {}))
    _keep_own(base, whole)
    _keep_own(given, part)
    return True


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def _whole_like(tensor: DTensor) -> Tensor:
    """Return uninitialized memory for the full tensor, with its strides, because random draws follow memory order."""
    local = tensor._local_tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device)


def _keep_own(tensor: DTensor, whole: Tensor, *, equalize: bool = True) -> None:
    """Write this rank's shard of `whole` into `tensor`.

    With `equalize`, a replicated tensor gets the values of the mesh's first rank, because ranks with different random
    states would otherwise hold different copies.
    """
    _check_no_terms("a random draw", tensor)
    replicated = all(isinstance(placement, Replicate) for placement in tensor.placements)
    source = 0 if equalize and replicated and type(whole) is Tensor else None  # no collective while tracing
    own = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=source)
    tensor._local_tensor.copy_(own._local_tensor)


def _check_no_terms(func: Any, tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"{func} does not support a DTensor with placements {tensor.placements}, whose ranks hold partial sums. "
            "Redistribute it first."
        )
