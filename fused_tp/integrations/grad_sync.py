"""Gradients over the context parallel ranks, each of which has only seen its own tokens.

Every rank holds the derivative of the global loss through its own tokens, so the gradient is the SUM over the ranks.
`sum_gradients_over` adds them up in backward. FSDP2 and DDP over a mesh that includes the CP ranks take the MEAN
instead; for them `scale_gradient` makes every rank's share as many times larger as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fused_tp.ops.collectives import all_reduce

_HOOKED = "_fused_tp_gradient_summed"


def sum_gradients_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make backward sum the gradient of every trainable parameter of `model` over `mesh`. May be called again.

    The hook sits before AccumulateGrad, so it sums what one backward adds and never what was there before: gradients
    may be accumulated over several backwards.

    Raises:
        ValueError: FSDP2 manages a part of the model; it takes gradients away before any hook sees them.
    """
    missing = [p for p in _parameters(model) if p.requires_grad and getattr(p, _HOOKED, None) != id(p)]
    if not missing:
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "fully_shard was applied to a model that was parallelized with grad_sync=True. Pass grad_sync=False to "
            "parallelize and a mesh that includes the context parallel ranks to fully_shard: it then reduces the "
            "gradients."
        )
    for parameter in missing:
        parameter.register_hook(partial(_sum_over, mesh))
        # The id tells a parameter from copies that carry its attributes but not its hooks.
        setattr(parameter, _HOOKED, id(parameter))


def _parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.parameters()


@torch.no_grad()
def _sum_over(mesh: DeviceMesh, grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor):
        return all_reduce(grad.contiguous(), group=mesh)
    total = all_reduce(grad.to_local().contiguous(), group=mesh)
    return DTensor.from_local(
        total, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None  # type: ignore[attr-defined]  # set in forward


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself; its gradient comes back times `factor`."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)
