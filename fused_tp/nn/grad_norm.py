"""Gradient norm of a module whose parameters are sharded over one or several meshes, as DTensors or plain tensors.

    norm = sqrt(squares of whole gradients + sum over meshes, sum over ranks (squares of gradients sharded over them))

torch.nn.utils.clip_grad_norm_ takes DTensors of one mesh only, and treats a plain shard as the whole parameter.
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
    """Scale the gradients of `module` to a total norm of at most `max_norm`, and return their norm before that.

    A collective: all ranks that hold a shard must call it. Every rank gets the same norm. Gradients must be complete:
    averaged over data parallel ranks, or sharded as DTensors by FSDP2.

    Args:
        module: with plain parameters (`plain_parameters_`), DTensors of any meshes, or both.
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


def clip_by_norm_(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scale gradients of norm `total` to `max_norm` if `total` is greater."""
    scale_gradients_(parameters, torch.clamp(max_norm / (total + 1e-6), max=1.0))


@torch.no_grad()
def scale_gradients_(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients by a scalar, in place: plain ones and DTensors of any meshes."""
    # On local shards: one torch operation takes DTensors of one mesh only.
    own: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            part = grad.to_local() if isinstance(grad, DTensor) else grad
            own.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), parts in own.items():
        torch._foreach_mul_(parts, factor.to(device))


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], *modules: nn.Module) -> Tensor:
    """The norm of the gradients of some parameters of `modules`."""
    dtensors = {key: dtensor for module in modules for key, dtensor in as_dtensors(module).items()}
    # Squares by the groups over which a gradient is sharded. Parameters without a gradient count too: a rank may lack
    # a gradient that another has, and all ranks must make the same sums in the same order.
    squares: dict[tuple[ProcessGroup, ...], Tensor] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None and not parameter.requires_grad:
            continue
        like = parameter if grad is None else grad
        dtensor = like if isinstance(like, DTensor) else dtensors.get(id(parameter))
        own = like.to_local() if isinstance(like, DTensor) else like
        square = torch.zeros((), dtype=torch.float64, device=own.device)
        if grad is not None:
            wide = torch.promote_types(own.dtype, torch.float32)
            square = torch.linalg.vector_norm(own, dtype=wide).double() ** 2
        over = () if dtensor is None else _groups(dtensor)
        squares[over] = squares[over].to(own.device) + square if over in squares else square
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for over, square in squares.items():
        for group in over:
            square = all_reduce(square, group=group)
        total = total.to(square.device) + square
    return total.sqrt()


def _groups(dtensor: DTensor) -> tuple[ProcessGroup, ...]:
    """The groups over which a tensor is sharded."""
    partial = [placement for placement in dtensor.placements if placement.is_partial()]
    if partial:
        raise ValueError(f"a gradient of shape {tuple(dtensor.shape)} is {partial[0]}; take the sum before its norm.")
    mesh = dtensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(dtensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
