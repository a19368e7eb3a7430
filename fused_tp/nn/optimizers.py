"""Checks of the optimizers and gradient scalers of sharded models.

torch calls `_before_step` before each step of every optimizer, and the wrapper of `_with_shared_result` when a gradient
scaler checks that gradients are finite. Both detect steps that would silently go wrong on a sharded model:

| situation before a step                                                 | result                                    |
|-------------------------------------------------------------------------|-------------------------------------------|
| a parameter of the optimizer was replaced when its model was sharded    | ValueError                                |
| no parameter has a gradient, or belongs to a sharded model              | ValueError                                |
| parameters are plain shards, and the update is not elementwise          | ValueError                                |
| a rank has shards or a pipeline stage, and updates depend on all        | ValueError                                |
| parameters                                                              |                                           |
| parameters are DTensors, which this optimizer does not support          | ValueError                                |
| a state was loaded that has the shape of a full parameter               | ValueError                                |
| gradients of plain shards were reduced or clipped like full gradients   | ValueError                                |
| with a gradient scaler, one rank's gradients are not finite             | all ranks of the model skip the step      |

The last check always runs. The others run at the steps that `fused_tp.core.checks.is_check_due` selects.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.core.checks import FIRST_CALLS, is_check_due
from fused_tp.core.errors import RankMismatchError, join_words
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import checksum
from fused_tp.core.store import exchange
from fused_tp.nn.elementwise import couples_parameters, differs_on_dtensors, differs_on_shards
from fused_tp.ops.collectives import all_reduce

_log = logging.getLogger(__name__)

PLAIN_SHARDINGS = "_fused_tp_shardings"  # attribute of a module: dict of ShardedLayouts by name of plain parameters


class ShardedLayout(NamedTuple):
    """Metadata of a DTensor, for a plain parameter that holds only its shard."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size


# Attributes of a model: the 1-D meshes whose ranks share it, and the number of steps of each of its optimizers.
_MESHES_ATTRIBUTE, _STEPS_ATTRIBUTE = "_fused_tp_shared_over", "_fused_tp_optimizer_steps"
_IS_STAGE_ATTRIBUTE = "_fused_tp_is_stage"
_SAMPLE_ELEMENTS = 61  # number of elements of each tensor that are compared
# Name of the exchange before a step and in a forward pass, and the two kinds of messages in it. Both use the same
# exchange, so that ranks notice if some are at a step and others at a forward pass.
STEP_EXCHANGE_NAME, STEP_MOMENT, FORWARD_MOMENT = "parts and steps", "step", "forward"
_NORM_TOLERANCE = 1e-3  # relative to the norm of all gradients; larger than rounding errors

_watched_models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
_methods_before_steps: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[nn.Module], None]]] = WeakKeyDictionary()
_methods_after_steps: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[Optimizer], None]]] = WeakKeyDictionary()
# Names of parameters that were replaced, and that no model uses any more.
_replaced_parameters: Any = WeakIdKeyDictionary()
_step_records: WeakKeyDictionary[Optimizer, _StepRecord] = WeakKeyDictionary()


@dataclass
class _StepRecord:
    """Number of steps of an optimizer, and its index in the list of steps of each model whose parameters it holds."""

    num_steps: int = 0
    indices: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)


# -- models -----------------------------------------------------------------------------------------------------------


def watch_model(model: nn.Module, meshes: Sequence[DeviceMesh], *, is_stage: bool = False) -> None:
    """Check the optimizers and gradient scalers of `model` from now on.

    Args:
        meshes: the 1-D meshes that share `model`.
        is_stage: True if other ranks hold other parameters of the same model.
    """
    setattr(model, _MESHES_ATTRIBUTE, tuple(meshes))
    setattr(model, _IS_STAGE_ATTRIBUTE, is_stage)
    if not hasattr(model, _STEPS_ATTRIBUTE):
        setattr(model, _STEPS_ATTRIBUTE, [])
    rewatch_model(model)


def rewatch_model(model: nn.Module) -> None:
    """Register `model` again after a copy or pickle, which keeps its attributes but not its registration."""
    if model not in _watched_models:
        _watched_models[model] = None
        install_hooks()


def call_before_steps(model: nn.Module, method: Callable[[nn.Module], None]) -> None:
    """Call the bound `method` with `model` before each checked step of its optimizers, while its object exists.

    Ranks may have different numbers of optimizers, so `method` must not communicate.
    """
    _methods_before_steps[model] = WeakMethod(method)


def call_after_steps(model: nn.Module, method: Callable[[Optimizer], None]) -> None:
    """Call the bound `method` with the optimizer after each step on `model`, while the object of `method` exists."""
    _methods_after_steps[model] = WeakMethod(method)


def optimizer_step_counts(model: nn.Module) -> list[int]:
    """Return the number of steps on `model` of each optimizer with more than one parameter, ordered by first step."""
    return list(getattr(model, _STEPS_ATTRIBUTE, ()))


def record_replaced_parameters(old_parameters: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Store the parameters in `old_parameters` that `model` no longer has, by weak references."""
    current_ids = {id(parameter) for parameter in model.parameters()}
    for parameter, name in old_parameters.items():
        if id(parameter) not in current_ids:
            _replaced_parameters[parameter] = name
    install_hooks()


@functools.cache
def install_hooks() -> None:
    """Register this module's functions with torch, once per process, when the first parameter is sharded."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    for scaler_class in (torch.amp.GradScaler, ShardedGradScaler):  # patch both: the second class overrides the method
        scaler_class._unscale_grads_ = _with_shared_result(scaler_class._unscale_grads_)  # type: ignore[method-assign]


def _models_with(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the watched models that contain some of `parameters`, in the order of their registration."""
    ids = {id(parameter) for parameter in parameters}
    return [model for model in list(_watched_models) if any(id(p) in ids for p in model.parameters())]


# -- steps ------------------------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    record = _step_records.get(optimizer)
    if record is None:
        record = _step_records[optimizer] = _StepRecord()
    record.num_steps += 1
    if is_check_due(record.num_steps):
        _check_step(optimizer, record)
    for model, index in list(record.indices.items()):
        getattr(model, _STEPS_ATTRIBUTE)[index] += 1


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    record = None if torch.compiler.is_compiling() else _step_records.get(optimizer)
    if record is None:
        return
    parameters = _optimizer_parameters(optimizer)
    # `_check_step` records no models of optimizers of one parameter.
    models = [*record.indices] if len(parameters) > 1 else _models_with(parameters)
    for model in models:
        method = _methods_after_steps.get(model, lambda: None)()
        if method is not None:
            method(optimizer)


def _optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_step(optimizer: Optimizer, record: _StepRecord) -> None:
    parameters = _optimizer_parameters(optimizer)
    _refuse_unrelated_parameters(optimizer, parameters)
    models = _models_with(parameters)
    shardings = {key: sharding for model in models for key, sharding in _plain_shardings(model)}
    _refuse_sharing_of_shards(optimizer, shardings)
    _refuse_full_states(optimizer, shardings)
    _refuse_wrong_updates(optimizer, shardings)
    if shardings or any(getattr(model, _IS_STAGE_ATTRIBUTE, False) for model in models):
        _refuse_coupled_updates(optimizer)
    if len(parameters) == 1:
        return  # stepped during backward, in which ranks with different experts may step different parameters
    for model in models:
        method = _methods_before_steps.get(model, lambda: None)()
        if method is not None:
            method(model)
        if model not in record.indices:
            steps = getattr(model, _STEPS_ATTRIBUTE)
            record.indices[model] = len(steps)
            steps.append(0)
    if record.num_steps == FIRST_CALLS:
        return  # the next forward pass may not exchange, so a rank that skips this step might go undetected
    for mesh in {id(sharding.mesh): sharding.mesh for sharding in shardings.values()}.values():
        mesh_parameters = [
            (parameter, shardings[id(parameter)])
            for parameter in parameters
            if id(parameter) in shardings and shardings[id(parameter)].mesh is mesh
        ]
        _compare_gradients(mesh, mesh_parameters)


def _refuse_sharing_of_shards(optimizer: Optimizer, shardings: Mapping[int, ShardedLayout]) -> None:
    """Raise ValueError if the optimizer would send a rank's shards to ranks that hold other shards."""
    group = getattr(optimizer, "process_group", None)  # an attribute of ZeroRedundancyOptimizer
    if isinstance(group, ProcessGroup) and shardings:
        mesh = next(iter(shardings.values())).mesh
        shared_ranks = sorted(set(mesh.mesh.flatten().tolist()) & set(get_process_group_ranks(group)))
        if len(shared_ranks) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} sends updated parameters between global ranks "
                f"{join_words(map(str, shared_ranks))}, which hold different shards with parameters='plain'. Pass "
                "the group of the data parallel ranks: process_group=mesh['dp'].get_group()."
            )


def _plain_shardings(model: nn.Module) -> Iterator[tuple[int, ShardedLayout]]:
    """Yield (id, ShardedLayout) of each plain parameter of `model`."""
    for module in model.modules():
        for name, sharding in vars(module).get(PLAIN_SHARDINGS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and not isinstance(parameter, DTensor):
                yield id(parameter), sharding


def _refuse_unrelated_parameters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if the optimizer has no parameter of the sharded model, such as one built before sharding."""
    name = type(optimizer).__name__
    replaced_names = (
        [_replaced_parameters[parameter] for parameter in parameters if parameter in _replaced_parameters]
        if _replaced_parameters
        else []
    )
    if replaced_names:
        raise ValueError(
            f"{name} has {len(replaced_names)} parameters (such as {replaced_names[0]!r}) that were replaced when the "
            "model was sharded, so its steps would not train the model. Create the optimizer after parallelize, from "
            "model.parameters()."
        )
    if any(parameter.grad is not None for parameter in parameters) or _models_with(parameters):
        return
    unstepped_models = [model for model in list(_watched_models) if not optimizer_step_counts(model)]
    if any(parameter.grad is not None for model in unstepped_models for parameter in model.parameters()):
        raise ValueError(
            f"{name} would train nothing: none of its {len(parameters)} parameters has a gradient or belongs to the "
            "parallel model, whose parameters have gradients. Create the optimizer from model.parameters() after all "
            "calls that replace them: parallelize, pipeline, plain_parameters_, fully_shard."
        )


def _refuse_wrong_updates(optimizer: Optimizer, shardings: Mapping[int, ShardedLayout]) -> None:
    """Raise ValueError if the optimizer updates shards differently from full parameters, or cannot step DTensors."""
    if any(isinstance(attribute, Optimizer) for attribute in vars(optimizer).values()):
        return  # a wrapper: the optimizer inside is checked before its own step
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        tried_keys = set()
        for parameter in group["params"]:
            sharding = shardings.get(id(parameter))
            if sharding is None and isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                key: Any = (parameter.ndim, parameter.device_mesh, parameter.placements)
                if key not in tried_keys:
                    _try_dtensors(name, optimizer, group, parameter)
            elif sharding is not None and isinstance(sharding.placement, Shard):
                key = (parameter.ndim, sharding.placement.dim)
                if key not in tried_keys:
                    _try_shards(name, optimizer, group, parameter, sharding.placement.dim)
            else:
                continue
            tried_keys.add(key)


def _refuse_full_states(optimizer: Optimizer, shardings: Mapping[int, ShardedLayout]) -> None:
    """Raise ValueError if the optimizer has loaded states of an unsharded model for sharded parameters."""
    for parameter, states in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(states, Mapping):
            continue
        if isinstance(parameter, DTensor):
            is_sharded, full_shape = any(p.is_shard() for p in parameter.placements), parameter.shape
        elif (layout := shardings.get(id(parameter))) is not None:
            is_sharded, full_shape = layout.shape != parameter.shape, layout.shape
        else:
            continue
        for name, state in states.items():
            is_full = isinstance(state, Tensor) and not isinstance(state, DTensor) and state.shape == full_shape
            if is_sharded and is_full and full_shape.numel() > 1:
                raise ValueError(
                    f"the state {name!r} of {type(optimizer).__name__} is a full tensor of shape {tuple(full_shape)}, "
                    "but its parameter is sharded; it was probably loaded from the state dict of an unsharded model. "
                    "Save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, and load with "
                    "set_optimizer_state_dict(model, optimizer, state, "
                    "options=StateDictOptions(full_state_dict=True)), which needs DTensors (not parameters='plain')."
                )


def _refuse_coupled_updates(optimizer: Optimizer) -> None:
    """Raise ValueError if updates depend on other parameters, of which this rank has only some, or only shards."""
    if any(isinstance(attribute, Optimizer) for attribute in vars(optimizer).values()):
        return  # a wrapper: the optimizer inside is checked before its own step
    for group in optimizer.param_groups:
        for template in {parameter.ndim: parameter for parameter in group["params"]}.values():
            try:
                is_coupled = couples_parameters(optimizer, group, template)
            except Exception:
                continue  # it does not accept the trial's parameters
            if is_coupled:
                name = type(optimizer).__name__
                raise ValueError(
                    f"{name} computes the update of a parameter also from other parameters (a norm of all gradients, a "
                    "line search), which is not supported in a pipeline, where each rank has the parameters of its "
                    "stages, or with parameters='plain', where it has shards. Use an optimizer that updates each "
                    "parameter by itself, such as AdamW, and clip_grad_norm_ of fused_tp."
                )


def _try_shards(name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, dim: int) -> None:
    try:
        differs = differs_on_shards(optimizer, group, parameter, dim)
    except Exception as error:
        if _step_records[optimizer].num_steps == 1:
            _log.warning(
                "A trial step of %s on shards of a matrix failed (%s: %s). If the optimizer's update of an "
                "element depends on other elements of the tensor, the update is wrong for parameters='plain'.",
                name,
                type(error).__name__,
                error,
            )
        return
    if differs:
        raise ValueError(
            f"{name} computes updates from the full parameter (a norm, means over rows, a product of matrices), which "
            "is not supported with parameters='plain', where each rank has only a shard. Use an elementwise optimizer "
            "such as AdamW for sharded parameters (partition_dim >= 0), or omit parameters='plain'."
        )


def _try_dtensors(name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: DTensor) -> None:
    remedy = (
        "Use AdamW, Adam (also with fused=True), SGD, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Adamax, ASGD, or Muon "
        "for matrices only"
    )
    try:
        differs, reason = differs_on_dtensors(optimizer, group, parameter), "updates them differently from full tensors"
    except Exception as error:
        differs, reason = True, f"fails on them ({type(error).__name__}: {str(error).splitlines()[0]})"
    if differs:
        fused_text = ", fused=True," if group.get("fused") else ""
        raise ValueError(
            f"{name}{fused_text} cannot step parameters that are DTensors sharded as {tuple(parameter.placements)}: it "
            f"{reason}. {remedy}."
        )


def _compare_gradients(mesh: DeviceMesh, mesh_parameters: Sequence[tuple[Tensor, ShardedLayout]]) -> None:
    """Compare gradients of plain parameters over the ranks of `mesh` before a step uses them. A collective call."""
    shard_grads = [
        p.grad for p, sharding in mesh_parameters if isinstance(sharding.placement, Shard) and p.grad is not None
    ]
    replicated_grads = [
        p.grad for p, sharding in mesh_parameters if not isinstance(sharding.placement, Shard) and p.grad is not None
    ]
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in replicated_grads]
    norm = float(torch.stack([t.double().cpu() for t in norms]).norm()) if norms else 0.0
    own_message = [STEP_MOMENT, sample_checksum(shard_grads), norm if isfinite(norm) else None]
    messages = [
        message
        for rank_messages in exchange(resolve_group(mesh), STEP_EXCHANGE_NAME, [own_message])
        for message in rank_messages
    ]
    refuse_different_moments(mesh, [message[0] for message in messages])
    _, all_checksums, all_norms = zip(*messages, strict=True)
    dim = repr((mesh.mesh_dim_names or ("tp",))[0])
    checksums = [shard_checksum for shard_checksum in all_checksums if shard_checksum is not None]
    if len(set(checksums)) < len(checksums):
        raise ValueError(
            f"before the optimizer's step, ranks of {dim} have equal gradients of different weight shards, so the "
            "gradients were averaged or broadcast over these ranks. With parameters='plain', reduce gradients over the "
            "data parallel ranks only: group=mesh['dp'].get_group()."
        )
    finite_norms = [rank_norm for rank_norm in all_norms if rank_norm is not None]
    if finite_norms and max(finite_norms) - min(finite_norms) > _NORM_TOLERANCE * max(finite_norms):
        raise ValueError(
            f"before the optimizer's step, the ranks of {dim} have different gradients of replicated parameters, with "
            f"norms from {min(finite_norms):.4g} to {max(finite_norms):.4g}. Most likely "
            "torch.nn.utils.clip_grad_norm_ scaled "
            "them by the norm of each rank's own shards. With parameters='plain', use "
            "fused_tp.nn.clip_grad_norm_(model, max_norm)."
        )


def refuse_different_moments(mesh: DeviceMesh, moments: Sequence[str]) -> None:
    """Raise RankMismatchError if some ranks are about to step an optimizer and others are not."""
    if len(set(moments)) > 1:
        raise RankMismatchError(
            f"rank {moments.index(STEP_MOMENT)} along mesh dim {(mesh.mesh_dim_names or ('?',))[0]!r} is at an "
            f"optimizer step, but rank {moments.index(FORWARD_MOMENT)} has skipped the step and is at the next "
            "forward pass, most likely because of its own gradients. Use torch.amp.GradScaler and "
            "fused_tp.nn.clip_grad_norm_, which take the same decision on all ranks."
        )


def sample_checksum(tensors: Iterable[Tensor]) -> int | None:
    """Return a checksum of a sample of each tensor, or None if there is nothing to compare.

    A tensor whose sample is constant (such as zeros) is skipped. The cost is one small copy per tensor, and one
    transfer per device.
    """
    samples_by_device: dict[torch.device, list[Tensor]] = {}
    sizes_by_device: dict[torch.device, list[tuple[int, int]]] = {}
    for t in tensors:
        local_tensor = (t.to_local() if isinstance(t, DTensor) else t).detach()
        if (
            type(local_tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
            or local_tensor.layout != torch.strided
        ):
            continue
        if local_tensor.is_meta or local_tensor.is_quantized or local_tensor.is_nested or not local_tensor.numel():
            continue
        flat_tensor = local_tensor.view(-1) if local_tensor.is_contiguous() else local_tensor.flatten()
        sample = (
            flat_tensor[:: max(1, flat_tensor.numel() // _SAMPLE_ELEMENTS)][:_SAMPLE_ELEMENTS]
            .contiguous()
            .view(torch.uint8)
        )
        samples_by_device.setdefault(local_tensor.device, []).append(sample)
        sizes_by_device.setdefault(local_tensor.device, []).append((sample.numel(), local_tensor.element_size()))
    samples_to_compare = []
    for device, samples in samples_by_device.items():
        content, start = torch.cat(samples).cpu().numpy().tobytes(), 0
        for sample_size, item_bytes in sizes_by_device[device]:
            sample_bytes = content[start : start + sample_size]
            start += sample_size
            if sample_bytes != sample_bytes[:item_bytes] * (sample_size // item_bytes):
                samples_to_compare.append(sample_bytes)
    return checksum(b"".join(samples_to_compare)) if samples_to_compare else None


# -- gradient scalers -------------------------------------------------------------------------------------------------


def _with_shared_result(unscale: Any) -> Any:
    """Wrap `unscale`, the gradient scaler method that unscales gradients and checks that they are finite.

    With the wrapper, all ranks that share a model get the same result. torch itself determines these ranks from the
    first gradient only, and finds none for plain tensors. Rejected: a custom scaler class, because Trainer, accelerate
    and Lightning would not create it.
    """

    @functools.wraps(unscale)
    def _unscale_grads_(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        parameters = _optimizer_parameters(optimizer)
        groups = _sharing_groups(parameters)
        unscaled_optimizer = optimizer
        if any(isinstance(parameter.grad, DTensor) for parameter in parameters):
            unscaled_optimizer = SimpleNamespace(
                param_groups=[{"params": [_with_local_gradient(p) for p in parameters]}]
            )
        found_inf_per_device: dict[torch.device, Tensor] = unscale(
            scaler, unscaled_optimizer, inv_scale, found_inf, *args
        )
        if groups:
            # If this rank has no gradient, other ranks may have one.
            found_inf_per_device = found_inf_per_device or {found_inf.device: found_inf}
            _share_flags(groups, found_inf_per_device)
        elif not found_inf_per_device:
            _refuse_unrelated_parameters(optimizer, parameters)
        return found_inf_per_device

    return _unscale_grads_


def _sharing_groups(parameters: Sequence[Tensor]) -> list[tuple[ProcessGroup, str]]:
    """Return the groups that share a model of `parameters`, with their device types, in equal order on all ranks."""
    groups: dict[str, tuple[ProcessGroup, str]] = {}
    for model in _models_with(parameters):
        for mesh in getattr(model, _MESHES_ATTRIBUTE):
            groups.setdefault(mesh.get_group().group_name, (mesh.get_group(), mesh.device_type))
    for mesh in dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                groups.setdefault(mesh.get_group(dim).group_name, (mesh.get_group(dim), mesh.device_type))
    return list(groups.values())


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """Return a tensor whose `grad` is this rank's shard of the gradient, in the same memory."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return parameter
    shard_with_grad = grad.to_local().detach()
    shard_with_grad.grad = grad.to_local().detach()
    return shard_with_grad


@torch.no_grad()
def _share_flags(groups: Sequence[tuple[ProcessGroup, str]], flags_per_device: Mapping[torch.device, Tensor]) -> None:
    """Set all flags in `flags_per_device` if any rank has set one, by one all-reduce of a scalar per group."""
    flags = list(flags_per_device.values())
    total = sum((flag.detach().reshape(1).to(flags[0].device) for flag in flags[1:]), flags[0].detach().reshape(1))
    for group, device_type in groups:
        total = all_reduce(total.to(device_type), group=group)
    for flag in flags:
        flag.copy_(total.reshape(flag.shape))
