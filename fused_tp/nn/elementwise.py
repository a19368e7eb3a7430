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
from torch.utils._python_dispatch import TorchDispatchMode

# Optimizers known to be elementwise, which need no trial. Exact classes only, because a subclass may override the step.
_ELEMENTWISE_OPTIMIZERS = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")
)
# DTensor support in torch 2.13. Optimizers without it raise an error in the middle of a step.
_UNSUPPORTED_ON_DTENSORS = frozenset({torch.optim.Rprop})
_FUSED_ON_DTENSORS = frozenset({torch.optim.Adam, torch.optim.AdamW})
# Optimizers that cannot step without a closure, so no trial is possible. LBFGS supports DTensors, but its updates are
# not elementwise.
_CLOSURE_OPTIMIZERS = (torch.optim.LBFGS,)
# The tolerance is larger than the rounding errors of bfloat16, in which Muon computes, and smaller than the difference
# that non-elementwise updates show on the unequal halves of the trial matrix.
_TRIAL_SIZE, _TRIAL_STEPS, _TRIAL_TOLERANCE = 8, 3, 0.05


def differs_on_shards(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], template: Tensor, dim: int) -> bool:
    """True if `optimizer` updates two halves of a tensor differently from the full tensor. No communication.

    Args:
        options: options of the parameter group.
        template: a parameter that determines the number of dims and the device.
        dim: the dim along which the parameter is sharded.

    Raises:
        Exception: any error of the optimizer in the trial.
    """
    if type(optimizer) in _ELEMENTWISE_OPTIMIZERS:
        return False
    if isinstance(optimizer, _CLOSURE_OPTIMIZERS):
        return True

    def step_shards(full_tensor: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        halves = [part.clone() for part in full_tensor.chunk(2, dim)]
        updated_halves = _run_trial_steps(
            optimizer, options, halves, [gradient.chunk(2, dim) for gradient in gradients]
        )
        return torch.cat(updated_halves, dim)

    with _RefuseCommunication():
        return _trial_differs(optimizer, options, template, step_shards)


def couples_parameters(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], template: Tensor) -> bool:
    """True if an update of `optimizer` depends on its other parameters, as by the norm of all gradients.

    The arguments and errors are those of `differs_on_shards`. No communication.
    """
    if type(optimizer) in _ELEMENTWISE_OPTIMIZERS:
        return False
    if isinstance(optimizer, _CLOSURE_OPTIMIZERS):
        return True

    def step_with_another(tensor: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        pairs = [[gradient, 10 * gradient.flip(0)] for gradient in gradients]
        return _run_trial_steps(optimizer, options, [tensor.clone(), tensor.flip(0)], pairs)[0]

    with _RefuseCommunication():
        return _trial_differs(optimizer, options, template, step_with_another)


class _RefuseCommunication(TorchDispatchMode):
    """Mode in which collectives raise: in a trial that only some ranks make, they would wait for the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("the optimizer communicates in its step")
        return func(*args, **(kwargs or {}))


def differs_on_dtensors(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameter: DTensor) -> bool:
    """True if `optimizer` updates a DTensor with the placements of `parameter` differently from a full tensor.

    A collective call over the mesh of `parameter`. Returns False without a trial for optimizers that are not from torch
    or transformers, because they may run their own communication.

    Raises:
        Exception: any error of the optimizer in the trial.
    """
    optimizer_class = type(optimizer)
    is_elementwise = optimizer_class in _ELEMENTWISE_OPTIMIZERS and optimizer_class not in _UNSUPPORTED_ON_DTENSORS
    if (
        is_elementwise and (not options.get("fused") or optimizer_class in _FUSED_ON_DTENSORS)
    ) or not _is_from_torch_or_transformers(optimizer_class):
        return False
    if optimizer_class in _CLOSURE_OPTIMIZERS:
        return False
    mesh, placements = parameter.device_mesh, parameter.placements

    def step_dtensor(full_tensor: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        (updated_tensor,) = _run_trial_steps(
            optimizer,
            options,
            [_distribute(full_tensor, mesh, placements)],
            [[_distribute(gradient, mesh, placements)] for gradient in gradients],
        )
        return updated_tensor.full_tensor() if isinstance(updated_tensor, DTensor) else updated_tensor

    return _trial_differs(optimizer, options, parameter, step_dtensor)


def _is_from_torch_or_transformers(optimizer_class: type) -> bool:
    return f"{optimizer_class.__module__}.".startswith(("torch.optim.", "transformers."))


def _distribute(full_tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(full_tensor.clone(), mesh, placements, src_data_rank=None)


@torch.no_grad()
def _trial_differs(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    template: Tensor,
    step: Callable[[Tensor, Sequence[Tensor]], Tensor],
) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (_TRIAL_SIZE,) * max(1, template.ndim)
    tensor_options: Any = {"dtype": torch.float32, "device": "cpu"}
    ramp = torch.ones(shape, **tensor_options)
    for dim in range(len(shape)):  # so that the halves of a tensor have different norms, along any dim
        ramp *= torch.arange(1.0, 1 + _TRIAL_SIZE, **tensor_options).view(-1, *[1] * (len(shape) - 1 - dim))
    full_tensor = (torch.randn(shape, generator=generator, **tensor_options) / ramp).to(template.device)
    gradients = [
        (torch.randn(shape, generator=generator, **tensor_options) * ramp).to(template.device)
        for _ in range(_TRIAL_STEPS)
    ]
    (expected_tensor,) = _run_trial_steps(
        optimizer, options, [full_tensor.clone()], [[gradient] for gradient in gradients]
    )
    difference = step(full_tensor, gradients) - expected_tensor
    return bool(difference.norm() > _TRIAL_TOLERANCE * (expected_tensor - full_tensor).norm())


def _run_trial_steps(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Return `parameters` after steps of a new optimizer of the same class and options.

    Rejected: a copy of the optimizer, because it may contain another optimizer that steps the real parameters.
    """
    optimizer_class = type(optimizer)
    accepted_arguments = inspect.signature(optimizer_class).parameters
    constructor_defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted_arguments}
    trial_parameters = [nn.Parameter(parameter) for parameter in parameters]
    group = {name: value for name, value in options.items() if name not in ("params", "initial_lr")}
    if "lr" in group:  # not the current value, which is 0 at the start of a warm-up
        group["lr"] = torch.full_like(group["lr"], 0.1) if isinstance(group["lr"], Tensor) else 0.1
    trial_optimizer: Any = optimizer_class([{"params": trial_parameters, **group}], **constructor_defaults)
    step = inspect.unwrap(optimizer_class.step)  # without hooks
    devices = [trial_parameters[0].device] if trial_parameters[0].is_cuda else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(0)
        if devices:
            torch.cuda.manual_seed(0)
        for step_gradients in gradients:
            for parameter, gradient in zip(trial_parameters, step_gradients, strict=True):
                parameter.grad = gradient.clone()
            step(trial_optimizer)
    return [parameter.detach() for parameter in trial_parameters]
