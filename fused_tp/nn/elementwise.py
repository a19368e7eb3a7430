"""Trial steps that show whether an optimizer updates a sharded matrix like the full matrix.

Adam computes each element's update from that element's gradients, so stepping shards equals stepping the full matrix.
Muon orthogonalizes a matrix, and Adafactor averages over its rows and columns: on plain shards they silently compute
other updates. On DTensors they compute the update of the full matrix, if torch supports the optimizer there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

# Optimizers known to be elementwise, which need no trial. Exact classes only, because a subclass may override the step.
_KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")
)
# DTensor support in torch 2.13. Optimizers without it raise an error in the middle of a step.
_NOT_ON_DTENSORS = frozenset({torch.optim.Rprop})
_FUSED_ON_DTENSORS = frozenset({torch.optim.Adam, torch.optim.AdamW})
# Optimizers that cannot step without a closure, so no trial is possible. LBFGS supports DTensors, but its updates are
# not elementwise.
_WITH_CLOSURE = (torch.optim.LBFGS,)
# The tolerance is larger than the rounding errors of bfloat16, in which Muon computes, and smaller than the difference
# that non-elementwise updates show on the unequal halves of the trial matrix.
_SIZE, _STEPS, _TOLERANCE = 8, 3, 0.05


def differs_on_parts(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: Tensor, dim: int) -> bool:
    """True if `optimizer` updates two halves of a tensor differently from the full tensor. Sends nothing.

    Args:
        options: options of the parameter group.
        like: a parameter that determines the number of dims and the device.
        dim: the dim along which it is sharded.

    Raises:
        Exception: any error of the optimizer in the trial.
    """
    if type(optimizer) in _KNOWN:
        return False
    if isinstance(optimizer, _WITH_CLOSURE):
        return True

    def step_parts(whole: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        parts = [part.clone() for part in whole.chunk(2, dim)]
        made = _stepped(optimizer, options, parts, [gradient.chunk(2, dim) for gradient in gradients])
        return torch.cat(made, dim)

    return _differs(optimizer, options, like, step_parts)


def differs_on_dtensors(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameter: DTensor) -> bool:
    """True if `optimizer` updates a DTensor with the placements of `parameter` differently from a full tensor.

    A collective call over its mesh. For optimizers that are not of torch or transformers it returns False without a
    trial, because they may run their own communication.

    Raises:
        Exception: any error of the optimizer in the trial.
    """
    kind = type(optimizer)
    known = kind in _KNOWN and kind not in _NOT_ON_DTENSORS
    if (known and (not options.get("fused") or kind in _FUSED_ON_DTENSORS)) or not _is_common(kind):
        return False
    if kind in _WITH_CLOSURE:
        return False
    mesh, placements = parameter.device_mesh, parameter.placements

    def step_dtensor(whole: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        (made,) = _stepped(
            optimizer,
            options,
            [_distributed(whole, mesh, placements)],
            [[_distributed(gradient, mesh, placements)] for gradient in gradients],
        )
        return made.full_tensor() if isinstance(made, DTensor) else made

    return _differs(optimizer, options, parameter, step_dtensor)


def _is_common(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(("torch.optim.", "transformers."))


def _distributed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


@torch.no_grad()
def _differs(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    like: Tensor,
    step: Callable[[Tensor, Sequence[Tensor]], Tensor],
) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (_SIZE,) * max(1, like.ndim)
    how: Any = {"dtype": torch.float32, "device": "cpu"}
    ramp = torch.ones(shape, **how)
    for dim in range(len(shape)):  # so that the halves of a tensor have different norms, along any dim
        ramp *= torch.arange(1.0, 1 + _SIZE, **how).view(-1, *[1] * (len(shape) - 1 - dim))
    whole = (torch.randn(shape, generator=generator, **how) / ramp).to(like.device)
    gradients = [(torch.randn(shape, generator=generator, **how) * ramp).to(like.device) for _ in range(_STEPS)]
    (wanted,) = _stepped(optimizer, options, [whole.clone()], [[gradient] for gradient in gradients])
    difference = step(whole, gradients) - wanted
    return bool(difference.norm() > _TOLERANCE * (wanted - whole).norm())


def _stepped(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Return `parameters` after steps of a new optimizer of the same class and options.

    Rejected: a copy of the optimizer, because it may contain another optimizer that steps the real parameters.
    """
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    held = [nn.Parameter(parameter) for parameter in parameters]
    group = {name: value for name, value in options.items() if name not in ("params", "initial_lr")}
    if "lr" in group:  # not the current value, which is 0 at the start of a warm-up
        group["lr"] = torch.full_like(group["lr"], 0.1) if isinstance(group["lr"], Tensor) else 0.1
    twin: Any = kind([{"params": held, **group}], **given)
    step = inspect.unwrap(kind.step)  # without hooks
    devices = [held[0].device] if held[0].is_cuda else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(0)
        if devices:
            torch.cuda.manual_seed(0)
        for of_step in gradients:
            for parameter, gradient in zip(held, of_step, strict=True):
                parameter.grad = gradient.clone()
            step(twin)
    return [parameter.detach() for parameter in held]
