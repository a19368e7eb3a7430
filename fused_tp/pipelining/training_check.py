"""Compare a training step of a new pipeline with the whole model: the loss, and the gradients of all parameters.

| when                        | action                                                                                |
|-----------------------------|---------------------------------------------------------------------------------------|
| before the model is divided | each rank computes loss and gradients of the whole model on a few pseudo-random       |
|                             | tokens, in training mode, microbatch by microbatch; once more with rounding errors    |
|                             | added if it computes in 16 bits; ranks exchange whether all have gradients            |
| when the pipeline is built  | it makes a step with the same tokens; all ranks raise if an error exceeds its bound   |

Afterwards modes, random states, buffers, attributes and gradients are as before. Unlike the steps of a model that only
`parallelize` shards (`parallelizing.checks.step_check`), later ones are not compared, as each rank has only its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.errors import FusedTPError
from fused_tp.nn.sharding import as_dtensors, shard_like
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes
from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.checks.sharding_check import (
    OUTPUT_BOUNDS,
    ROUNDING_FACTOR,
    ShardingOutcome,
    add_rounding_errors,
    candidate_batches,
    least_precise_dtype,
    reason_not_runnable,
)
from fused_tp.parallelizing.checks.step_check import (
    accepted_gradient_error,
    copy_arguments,
    gradient_errors,
    gradient_shards,
    gradients_of,
    two_norm,
)
from fused_tp.parallelizing.checks.undisturbed import LARGE_MODEL_PARAMETERS, Mode, preserve_state

_LOSS_DIFFERENCE = 1e-5  # relative; sums in another order differ by less
_MAX_GRADIENT_BOUND = 0.5  # a larger bound could not detect an error


@dataclass
class _WholeStep:
    """A training step of the whole model.

    Attributes:
        batch: arguments, with labels.
        loss: the loss.
        gradients: gradients of parameters by name; 0 for parameters that have none.
        rounding: effect of rounding on the loss ("") and on gradients, by name; empty if not measured.
        dtype: dtype in which the model computes.
        mode: mode in which both models run.
        loss_difference: relative difference between the loss of the batch and its mean over microbatches.
    """

    batch: dict[str, Any]
    loss: float
    gradients: dict[str, Tensor]
    rounding: dict[str, float]
    dtype: torch.dtype
    mode: Mode
    loss_difference: float


@contextmanager
def compare_step(
    model: nn.Module,
    stage: nn.Module,
    verify: str | bool | Mapping[str, Any],
    meshes: Sequence[DeviceMesh],
    outcome: ShardingOutcome,
    *,
    microbatches: int,
) -> Iterator[None]:
    """Context manager in which the caller builds a pipeline of `model`; on exit it makes a step and is compared.

    Args:
        stage: the only stage of a pipeline over one rank, which holds the whole model.
        verify: see `pipeline`.
        meshes: 1-D meshes whose ranks share the model.
        outcome: object whose `sharded_model` is the pipeline on exit.

    Raises:
        ValueError: raised on all ranks if loss or gradients differ; on a rank alone if its part of the step fails.
    """
    is_trained = any(p.requires_grad for p in model.parameters())
    if verify is False or not meshes or are_checks_suspended() or not is_trained:
        yield
        return
    whole_step, reason = _run_whole(
        model, stage, verify, microbatches, max(8, 2 * prod(mesh.size() for mesh in meshes))
    )
    reasons = gather_over_meshes(meshes, "a step of the whole model", reason)
    if reason := next(filter(None, reasons), ""):
        warn_once(
            meshes,
            reason,
            "pipeline did not compare a training step of the %s with the whole model: %s.",
            type(model).__name__,
            reason,
        )
        yield
        return
    assert whole_step is not None
    if whole_step.loss_difference > (
        _LOSS_DIFFERENCE if whole_step.dtype.itemsize > 2 else OUTPUT_BOUNDS[torch.bfloat16]
    ):
        warn_once(
            meshes,
            "loss_fn",
            "the loss of a batch differs by %.2g from its mean over microbatches, which is a pipeline's loss: it is "
            "no mean over rows (a sum, or weights or statistics of the batch). Return a mean over the rows of a "
            "microbatch for the same loss as without a pipeline.",
            whole_step.loss_difference,
        )
    yield
    _compare(whole_step, outcome.sharded_model, meshes, type(model).__name__)


def _run_whole(
    model: nn.Module, stage: Any, verify: object, microbatches: int, num_tokens: int
) -> tuple[_WholeStep | None, str]:
    """Return (step of the whole model, ""), or (None, reason)."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if reason := reason_not_runnable(model):
        return None, reason
    if sum(p.numel() for p in model.parameters()) > LARGE_MODEL_PARAMETERS:
        return None, f"it has more than {LARGE_MODEL_PARAMETERS:,} parameters; compare a smaller model of this kind"
    device = next(model.parameters()).device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    dtype = dtype or least_precise_dtype(model)
    loss_difference = 0.0

    def run(mode: Mode, batch: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]] | None:
        """Return loss and gradients, or None if random numbers were drawn. Sets `loss_difference`."""
        nonlocal loss_difference
        with preserve_state([stage], mode, with_gradients=True) as drew_random:  # of its loss function, too
            _set_training_mode([model], mode)
            total_loss, loss_difference = stage.compute_batch_loss(copy_arguments(dict(batch)), microbatches)
            gradients = gradients_of([total_loss], [*parameters.values()])
        if drew_random() and mode is not Mode.EVAL:
            return None
        grads = {name: _zeros_if_none(grad, p) for (name, p), grad in zip(parameters.items(), gradients, strict=True)}
        return float(total_loss.detach()), grads

    reason = "no pseudo-random batch for it is known; pass a batch with labels as verify={name: tensor}"
    batches = (
        [dict(verify)] if isinstance(verify, Mapping) else list(candidate_batches(model, microbatches, num_tokens))
    )
    for mode in Mode:
        for batch in (
            labeled_batch for unlabeled_batch in batches for labeled_batch in _with_labels(unlabeled_batch, device)
        ):
            try:
                result = run(mode, batch)
                if result is None:
                    continue
                loss, gradients = result
                rounding = dict[str, float]()
                if dtype.itemsize < 4:
                    with add_rounding_errors(model, dtype):
                        rounded_result = run(mode, batch)
                    assert rounded_result is not None
                    norms = {name: (grad, two_norm(grad)) for name, grad in gradients.items()}
                    rounding = gradient_errors(rounded_result[1], norms) | {
                        "": _relative_error(rounded_result[0], loss)
                    }
            except torch.OutOfMemoryError:
                return None, "a step of the whole model does not fit in the memory"
            except Exception as error:
                reason = f"a step of the whole model fails on {[*batch]}: {type(error).__name__}: {error}"
                continue
            if loss != loss:
                return None, "the loss of the whole model is NaN"
            return _WholeStep(batch, loss, gradients, rounding, dtype, mode, loss_difference), ""
    return None, reason


def _with_labels(batch: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield `batch` with labels: its own, or its tokens."""
    batch_on_device = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in batch.items()}
    if "labels" in batch_on_device:
        yield batch_on_device
    for t in batch_on_device.values() if "labels" not in batch_on_device else ():
        if isinstance(t, Tensor) and t.ndim > 1:
            yield batch_on_device | {"labels": t.clone()}
            return


def _set_training_mode(modules: Sequence[nn.Module], mode: Mode) -> None:
    """Set the mode inside `preserve_state`, which has set the probability of dropout that `train` enables."""
    for module in modules:
        module.train(mode is not Mode.EVAL)


def _relative_error(actual: float, expected: float) -> float:
    return abs(actual - expected) / max(abs(expected), 1e-3)


def _compare(whole_step: _WholeStep, pipe: Any, meshes: Sequence[DeviceMesh], class_name: str) -> None:
    remedy = (
        "A stage has only its own layers: forward must not read other layers, tensors kept by them, or statistics of "
        "more than a microbatch, in training mode either; hooks on gradients see this rank's shards. Pass verify=False "
        "to skip this check."
    )
    try:
        loss, gradients = _run_pipeline(whole_step, pipe)
    except FusedTPError:
        raise
    except Exception as error:
        raise ValueError(
            f"the pipeline of the {class_name} fails in a training step on {_describe(whole_step)}, on which the whole "
            f"model runs: {type(error).__name__}: {next(iter(str(error).splitlines()), '')} If another rank has failed "
            f"before, its error is the cause. {remedy}"
        ) from error
    errors = gradient_errors(
        {name: shard for name, (shard, _) in gradients.items()},
        {name: (expected, two_norm(whole_step.gradients[name])) for name, (_, expected) in gradients.items()},
        total_norm=sum(two_norm(gradient) ** 2 for gradient in whole_step.gradients.values()) ** 0.5,
    )
    dtype = whole_step.dtype
    is_routed = dtype.itemsize < 4 and any("expert" in name for name in whole_step.gradients)
    loss_bound = max(
        OUTPUT_BOUNDS.get(dtype, OUTPUT_BOUNDS[torch.bfloat16]), ROUNDING_FACTOR * whole_step.rounding.get("", 0.0)
    )
    bounds = {
        name: inf
        if is_routed
        else max(accepted_gradient_error(dtype), ROUNDING_FACTOR * whole_step.rounding.get(name, 0.0))
        for name in errors
    }
    excess = {name: error / bounds[name] for name, error in errors.items() if bounds[name] <= _MAX_GRADIENT_BOUND}
    name = max(excess, key=lambda name: excess[name], default="")
    loss_error = _relative_error(loss, whole_step.loss)
    reports = gather_over_meshes(
        meshes,
        "errors of a training step",
        [loss_error / loss_bound, loss_error, excess.get(name, 0.0), name, errors.get(name, 0.0)],
    )
    worst_report = max(reports, key=lambda report: report[0])
    if worst_report[0] > 1:
        raise ValueError(
            f"the pipeline of the {class_name} does not match the whole model: in a training step on "
            f"{_describe(whole_step)} its relative error of the loss is {worst_report[1]:.2g}. {remedy}"
        )
    worst_report = max(reports, key=lambda report: report[2])
    if worst_report[2] > 1:
        raise ValueError(
            f"the pipeline of the {class_name} does not match the whole model: in a training step on "
            f"{_describe(whole_step)} its relative error of the gradient of {worst_report[3]!r} is "
            f"{worst_report[4]:.2g}. {remedy}"
        )


def _describe(whole_step: _WholeStep) -> str:
    num_rows, num_tokens = next(t.shape[:2] for t in whole_step.batch.values() if isinstance(t, Tensor) and t.ndim > 1)
    return f"{num_rows} rows of {num_tokens} tokens"


def _run_pipeline(whole_step: _WholeStep, pipe: Any) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """Return the loss, and this rank's shards of (actual gradient, expected gradient) by parameter name."""
    modules = [stage.model for stage in pipe.stages.values()]
    parameters: list[Any] = list(pipe.parameters())
    saved_grads = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    with preserve_state([*pipe.stages.values()], whole_step.mode, with_gradients=True), pipe.preserve_steps():
        _set_training_mode(modules, whole_step.mode)
        try:
            for p in parameters:
                p.grad = p._post_accumulate_grad_hooks = None
            device = parameters[0].device
            loss = float(pipe.step({name: _copy_to_device(value, device) for name, value in whole_step.batch.items()}))
            for module in modules:
                actual_shards, expected_shards = (
                    _actual_shards(module, grad_sync=pipe.grad_sync),
                    _expected_shards(module, whole_step),
                )
                gradients |= {name: (actual_shards[name], expected_shards[name]) for name in expected_shards}
        finally:
            for p, grad, hooks in saved_grads:
                p.grad, p._post_accumulate_grad_hooks = grad, hooks
    return loss, gradients


def _copy_to_device(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def _actual_shards(module: nn.Module, *, grad_sync: bool) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    parallelism = getattr(module, PARALLELISM_ATTRIBUTE, None)
    if parallelism is None:
        return {name: _zeros_if_none(grad, module.get_parameter(name)) for name, grad in gradients.items()}
    # Stages themselves do not average gradients: `Pipeline.step` does.
    return gradient_shards(module, replace(parallelism, grad_sync=grad_sync), gradients, is_summed=True)


def _zeros_if_none(grad: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if grad is None else grad


@torch.no_grad()
def _expected_shards(module: nn.Module, whole_step: _WholeStep) -> dict[str, Tensor]:
    dtensors = as_dtensors(module)
    return {
        name: shard_like(whole_step.gradients[name].to(p.device), dtensors.get(id(p), p))
        for name, p in module.named_parameters()
        if name in whole_step.gradients
    }
