"""Modules whose parameters every rank has: norms, above all those that run on a part of the sequence.

Under sequence parallelism each rank sees only its tokens, so the gradient it finds for a norm's weight is one term of a
sum. `reduce_grad` adds the terms inside the backward; the gradient of the parameter is complete when `backward()`
returns, as everywhere here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fused_tp.nn.sharding import Memo, check_mesh, local, shard_parameter
from fused_tp.ops.collectives import copy_to_group
from fused_tp.runtime.group import GroupLike

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reduce_grad(parameter: Tensor, group: GroupLike) -> Tensor:
    """`parameter` itself; its gradient is summed over the ranks of `group`.

    Takes a plain tensor or a DTensor (of which it returns the local part), any shape and floating point dtype. For what
    all ranks have but each uses on its own tokens or heads.

    Example:
        >>> y = F.rms_norm(x_shard_m, norm.weight.shape, reduce_grad(norm.weight, mesh["tp"]))
    """
    return copy_to_group(local(parameter), group=group)


def sequence_parallel_(module: ModuleT, mesh: DeviceMesh, memo: Memo | None = None) -> ModuleT:
    """Prepares, in place, a module without submodules that will see only this rank's part of the sequence.

    For nn.LayerNorm, nn.RMSNorm and any module that treats tokens alike. Its parameters become replicated DTensors on
    `mesh`, under the same names; their gradients are complete after a plain backward. Returns `module`, whose forward
    still computes with plain tensors. Modules without parameters (nn.Dropout) are returned as they are.

    Raises:
        TypeError: a parameter is a DTensor already.
        ValueError: `module` has submodules, or `mesh` is not 1-D.

    Example:
        >>> block.norm = sequence_parallel_(nn.RMSNorm(512), mesh["tp"])
        >>> normed_shard_m = block.norm(x_shard_m)
    """
    check_mesh(mesh)
    if next(module.children(), None) is not None:
        raise ValueError(
            f"{type(module).__name__} has submodules; call sequence_parallel_ on those that hold parameters."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"{name} of this {type(module).__name__} is a DTensor already; give the whole module.")
    replicate_own(module, mesh, memo, sums=_always)
    return module


def replicate_(module: ModuleT, mesh: DeviceMesh, memo: Memo | None = None) -> ModuleT:
    """Makes, in place, all still plain parameters of `module` and its submodules replicated DTensors on `mesh`.

    For what all ranks run on the same data, so that each rank's gradient is complete: norms without sequence
    parallelism, a classifier. Then all parameters of a model are DTensors on one mesh, which clip_grad_norm_, FSDP2 and
    fused optimizers want. Modules still compute with plain tensors. Returns `module`.

    Raises:
        TypeError, ValueError: `mesh` is no 1-D DeviceMesh.

    Example:
        >>> model.mlp = ParallelMLP.from_module(model.mlp, mesh=mesh["tp"])
        >>> replicate_(model, mesh["tp"])                       # the rest
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    check_mesh(mesh)
    for child in module.modules():
        replicate_own(child, mesh, memo)
    return module


def replicate_own(
    module: nn.Module, mesh: DeviceMesh, memo: Memo | None, *, sums: Callable[[], bool] | None = None
) -> None:
    """Makes the parameters that `module` itself holds replicated DTensors, of which its forward sees the local parts.

    Those that are DTensors already stay as they are. `sums` is asked at each forward whether gradients are summed over
    their mesh; without it they never are.
    """
    plain = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
    for name, parameter in plain.items():
        module.register_parameter(name, shard_parameter(parameter, mesh, Replicate(), memo))
    if plain:
        wrap_forward(module, _on_local_parameters, module, sums)


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any], *bound: Any) -> None:
    """Replace `module.forward` by wrapper(*bound, forward, ..); a partial, unlike a closure, survives copy.deepcopy."""
    forward = module.forward
    wrapped: Any = partial(wrapper, *bound, forward)
    wrapped.__signature__ = inspect.signature(forward)  # transformers' generate reads it
    module.forward = wrapped


def _always() -> bool:
    return True


def _on_local_parameters(
    module: nn.Module, sums: Callable[[], bool] | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`forward` with the module's own DTensor parameters replaced by their local tensors while it runs."""
    held: dict[str, Any] = dict(module._parameters)
    sum_gradient = sums is not None and sums()
    for key, parameter in held.items():
        if isinstance(parameter, DTensor):
            own: Any = reduce_grad(parameter, parameter.device_mesh) if sum_gradient else local(parameter)
            module._parameters[key] = own  # not setattr, which refuses a tensor that is no Parameter
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(held)
