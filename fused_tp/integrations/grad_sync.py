"""Gradients over the context parallel ranks, each of which has only seen its own tokens.

Every rank holds the derivative of the global loss through its own tokens, so the gradient is the SUM over the ranks.
`GradientSync` adds them up in backward. FSDP2 and DDP over a mesh that includes the CP ranks take the MEAN instead;
for them `scale_gradient` makes every rank's share as many times larger as there are ranks.

Each gradient is summed where autograd hands it over: hooks that were there before the first forward see this rank's
share, all that comes later sees the sum. Rejected: buckets that move while backward goes on, as DDP has them. Whoever
looks at a gradient in the middle of backward (a hook, an optimizer that runs in backward, DDP itself) would see this
rank's share, and a bucket that starts when it is full starts at different points of the ranks' own ring attention where
they do not run the very same layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fused_tp.ops.collectives import all_reduce

_HOOKED = "_fused_tp_gradient_summed"


class GradientSync:
    """Makes backward sum the gradients of a model's parameters over `mesh`.

    The hook sits before AccumulateGrad, so it sums what one backward adds and never what was there before: gradients
    may be accumulated over several backwards. All ranks of `mesh` must find gradients of the same parameters.

    Example:
        >>> sync = GradientSync(mesh["cp"])
        >>> sync.watch(model)                   # before each forward
        >>> model(tokens).sum().backward()
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def watch(self, model: nn.Module) -> None:
        """Hook every trainable parameter of `model` that has not been.

        Raises:
            ValueError: FSDP2 manages a part of the model; it takes gradients away before any hook sees them.
        """
        # The id tells a parameter from copies that carry its attributes but not its hooks.
        missing = [p for p in model.parameters() if p.requires_grad and getattr(p, _HOOKED, None) != id(p)]
        if missing and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise ValueError(
                "fully_shard was applied to a model that was parallelized with grad_sync=True. Pass grad_sync=False to "
                "parallelize and a mesh that includes the context parallel ranks to fully_shard: it then reduces the "
                "gradients."
            )
        for parameter in missing:
            parameter.register_hook(partial(_sum_over, self.mesh))
            setattr(parameter, _HOOKED, id(parameter))


@torch.no_grad()
def _sum_over(mesh: DeviceMesh, grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(
            f"backward found a gradient of layout {grad.layout} for a parameter of shape {tuple(grad.shape)}; "
            "grad_sync=True sums dense ones only. Make the embedding with sparse=False."
        )
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
