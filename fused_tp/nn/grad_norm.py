"""Gradient norm of a module whose parameters are sharded over one or several meshes, as DTensors or plain tensors.

    norm^2 = |replicated gradients|^2 + sum over meshes, sum over the mesh's ranks of |shards of gradients|^2

Rejected: torch.nn.utils.clip_grad_norm_. It supports DTensors of one mesh only, and treats a plain shard as the full
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fused_tp.nn.sharding import as_dtensors
from fused_tp.ops.collectives import all_reduce


def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of `module` to a total norm of at most `max_norm`, and return their norm before scaling.

    A collective call: all ranks that hold a shard must make it. Every rank returns the same norm. Gradients must be
    complete: averaged over data parallel ranks, or sharded as DTensors by FSDP2.

    Args:
        module: a module with plain parameters (`plain_parameters_`), DTensors of any meshes, or both.
        max_norm: limit of the 2-norm of all gradients together; float("inf") scales nothing.

    Returns:
        float64 scalar.

    Raises:
        ValueError: a gradient is a partial sum (`Partial()`).

    Example:
        >>> model(x).sum().backward()
        >>> norm = clip_grad_norm_(model, 1.0)
    """
    total = grad_norm(module.parameters(), module)
    clip_by_norm_(module.parameters(), max_norm, total)
    return total


def clip_by_norm_(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale the gradients of `parameters`, whose norm is `total_norm`, to `max_norm` if `total_norm` is greater."""
    scale_gradients_(parameters, torch.clamp(max_norm / (total_norm + 1e-6), max=1.0))


@torch.no_grad()
def scale_gradients_(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients of `parameters` by `factor` in place; they may be plain or DTensors of any meshes."""
    # Scale the local shards, because one torch operation supports DTensors of one mesh only.
    local_gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            local_gradient = grad.to_local() if isinstance(grad, DTensor) else grad
            local_gradients.setdefault((local_gradient.device, local_gradient.dtype), []).append(local_gradient)
    for (device, _), gradients in local_gradients.items():
        torch._foreach_mul_(gradients, factor.to(device))


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], *modules: nn.Module) -> Tensor:
    """Return the norm of the gradients of `parameters`, which belong to `modules`. A collective call."""
    dtensors = {key: dtensor for module in modules for key, dtensor in as_dtensors(module).items()}
    # Sums of squares by the groups over which the gradients are sharded. A parameter without a gradient here counts as
    # 0: another rank may have one, and all ranks must run the same all-reduces in the same order.
    squares: dict[tuple[ProcessGroup, ...], Tensor] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None and not parameter.requires_grad:
            continue
        grad_or_parameter = parameter if grad is None else grad
        dtensor = grad_or_parameter if isinstance(grad_or_parameter, DTensor) else dtensors.get(id(parameter))
        local_grad = grad_or_parameter.to_local() if isinstance(grad_or_parameter, DTensor) else grad_or_parameter
        square = torch.zeros((), dtype=torch.float64, device=local_grad.device)
        if grad is not None:
            wide_dtype = torch.promote_types(local_grad.dtype, torch.float32)
            square = torch.linalg.vector_norm(local_grad, dtype=wide_dtype).double() ** 2
        groups = () if dtensor is None else _sharding_groups(dtensor)
        squares[groups] = squares[groups].to(local_grad.device) + square if groups in squares else square
    total_square = torch.zeros((), dtype=torch.float64, device="cpu")
    for groups, square in squares.items():
        for group in groups:
            square = all_reduce(square, group=group)
        total_square = total_square.to(square.device) + square
    return total_square.sqrt()


def _sharding_groups(dtensor: DTensor) -> tuple[ProcessGroup, ...]:
    """Return the groups over which `dtensor` is sharded."""
    partial_placements = [placement for placement in dtensor.placements if placement.is_partial()]
    if partial_placements:
        raise ValueError(
            f"a gradient of shape {tuple(dtensor.shape)} has the placement {partial_placements[0]}, and the "
            "norm of partial sums is not defined. Redistribute the gradient to Shard or Replicate first."
        )
    mesh = dtensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(dtensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
