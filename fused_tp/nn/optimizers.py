"""Checks of the optimizers and gradient scalers of sharded models.

torch calls `_before_step` before each step of every optimizer, and `_agreeing`'s wrapper when a gradient scaler checks
that gradients are finite. Both detect steps that would silently go wrong on a sharded model:

| situation before a step                                                 | result                                    |
|-------------------------------------------------------------------------|-------------------------------------------|
| a parameter of the optimizer was replaced when its model was sharded    | ValueError                                |
| no parameter has a gradient, or belongs to a sharded model              | ValueError                                |
| parameters are plain shards, and the update is not elementwise          | ValueError                                |
| parameters are DTensors, which this optimizer does not support          | ValueError                                |
| gradients of plain shards were reduced or clipped like full gradients   | ValueError                                |
| with a gradient scaler, one rank's gradients are not finite             | all ranks of the model skip the step      |

The last check always runs. The others run at the steps of each optimizer that `fused_tp.core.checks.is_due` selects.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.core.checks import FIRST_CALLS, is_due
from fused_tp.core.errors import RankMismatchError, listed
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import checksum
from fused_tp.core.store import exchange
from fused_tp.nn.elementwise import differs_on_dtensors, differs_on_parts
from fused_tp.ops.collectives import all_reduce

_log = logging.getLogger(__name__)

PLAIN_SHARDINGS = "_fused_tp_shardings"  # attribute of a module: dict of ShardedLayouts by name of plain parameters


class ShardedLayout(NamedTuple):
    """Metadata of a DTensor, for a plain parameter that holds only its shard."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size


# Attributes of a model: the 1-D meshes whose ranks share it, and the number of steps of each of its optimizers.
_SHARED_OVER, _STEPS = "_fused_tp_shared_over", "_fused_tp_optimizer_steps"
_SAMPLE = 61  # number of elements of each tensor that are compared
# Name of the exchange before a step and in a forward pass, and the two kinds of messages in it. Both use the same
# exchange, so that ranks notice if some are at a step and others at a forward pass.
PARTS_AND_STEPS, STEP, FORWARD = "parts and steps", "step", "forward"
_NORM_TOLERANCE = 1e-3  # of the norm of all gradients, larger than the effect of rounding

_models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
_replaced: Any = WeakIdKeyDictionary()  # names of parameters that were replaced, and that no model uses any more
_optimizers: WeakKeyDictionary[Optimizer, _OptimizerSteps] = WeakKeyDictionary()


@dataclass
class _OptimizerSteps:
    """Number of steps of an optimizer, and its index in the list of steps of each model whose parameters it holds."""

    steps: int = 0
    indices: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)


# -- models -----------------------------------------------------------------------------------------------------------


def watch(model: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Check the optimizers and gradient scalers of `model` from now on. `meshes`: the 1-D meshes that share it."""
    setattr(model, _SHARED_OVER, tuple(meshes))
    if not hasattr(model, _STEPS):
        setattr(model, _STEPS, [])
    watch_again(model)


def watch_again(model: nn.Module) -> None:
    """Register `model` again after a copy or pickle, which keeps its attributes but not its registration."""
    if model not in _models:
        _models[model] = None
        install()


def steps_of(model: nn.Module) -> list[int]:
    """Return the number of steps on `model` of each optimizer with more than one parameter, ordered by first step."""
    return list(getattr(model, _STEPS, ()))


def note_replaced(before: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Store the parameters in `before` that `model` no longer has, by weak references."""
    now = {id(parameter) for parameter in model.parameters()}
    for parameter, name in before.items():
        if id(parameter) not in now:
            _replaced[parameter] = name
    install()


@functools.cache
def install() -> None:
    """Register this module's functions with torch, once per process, when the first parameter is sharded."""
    register_optimizer_step_pre_hook(_before_step)
    for kind in (torch.amp.GradScaler, ShardedGradScaler):  # patch both: the second class overrides the method
        kind._unscale_grads_ = _agreeing(kind._unscale_grads_)  # type: ignore[method-assign]


def _models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the watched models that contain some of `parameters`, in the order of their registration."""
    ids = {id(parameter) for parameter in parameters}
    return [model for model in list(_models) if any(id(p) in ids for p in model.parameters())]


# -- steps ------------------------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    seen = _optimizers.get(optimizer)
    if seen is None:
        seen = _optimizers[optimizer] = _OptimizerSteps()
    seen.steps += 1
    if is_due(seen.steps):
        _check(optimizer, seen)
    for model, index in list(seen.indices.items()):
        getattr(model, _STEPS)[index] += 1


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check(optimizer: Optimizer, seen: _OptimizerSteps) -> None:
    parameters = _parameters_of(optimizer)
    _refuse_idle(optimizer, parameters)
    models = _models_of(parameters)
    shardings = {key: sharding for model in models for key, sharding in _plain_shardings(model)}
    _refuse_copies(optimizer, shardings)
    _refuse_updates_of_parts(optimizer, shardings)
    if len(parameters) == 1:
        return  # stepped during backward, in which ranks with different experts may step different parameters
    for model in models:
        if model not in seen.indices:
            steps = getattr(model, _STEPS)
            seen.indices[model] = len(steps)
            steps.append(0)
    if seen.steps == FIRST_CALLS:
        return  # the next forward pass may not exchange, so a rank that skips this step might go undetected
    for mesh in {id(sharding.mesh): sharding.mesh for sharding in shardings.values()}.values():
        held = [(p, shardings[id(p)]) for p in parameters if id(p) in shardings and shardings[id(p)].mesh is mesh]
        _compare_gradients(mesh, held)


def _refuse_copies(optimizer: Optimizer, shardings: Mapping[int, ShardedLayout]) -> None:
    """Raise ValueError if the optimizer would send a rank's shards to ranks that hold other shards."""
    group = getattr(optimizer, "process_group", None)  # of ZeroRedundancyOptimizer
    if isinstance(group, ProcessGroup) and shardings:
        mesh = next(iter(shardings.values())).mesh
        ours = sorted(set(mesh.mesh.flatten().tolist()) & set(get_process_group_ranks(group)))
        if len(ours) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} sends updated parameters between global ranks {listed(map(str, ours))}, "
                "which hold different shards with parameters='plain'. Pass it the data parallel ranks only: "
                "process_group=mesh['dp'].get_group()."
            )


def _plain_shardings(model: nn.Module) -> Iterator[tuple[int, ShardedLayout]]:
    """Yield (id, ShardedLayout) of each plain parameter of `model`."""
    for module in model.modules():
        for name, sharding in vars(module).get(PLAIN_SHARDINGS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and not isinstance(parameter, DTensor):
                yield id(parameter), sharding


def _refuse_idle(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if the optimizer has no parameter of the sharded model, such as one built before sharding."""
    name = type(optimizer).__name__
    replaced = [_replaced[parameter] for parameter in parameters if parameter in _replaced] if _replaced else []
    if replaced:
        raise ValueError(
            f"{name} has {len(replaced)} parameters (such as {replaced[0]!r}) that were replaced when the model was "
            "sharded, so its steps would not train the model. Create the optimizer after parallelize, from "
            "model.parameters()."
        )
    if any(parameter.grad is not None for parameter in parameters) or _models_of(parameters):
        return
    unstepped = [model for model in list(_models) if not steps_of(model)]
    if any(parameter.grad is not None for model in unstepped for parameter in model.parameters()):
        raise ValueError(
            f"{name} would train nothing: none of its {len(parameters)} parameters has a gradient or belongs to the "
            "parallel model, whose parameters have gradients. Create the optimizer from model.parameters() after all "
            "calls that replace them: parallelize, pipeline, plain_parameters_, fully_shard."
        )


def _refuse_updates_of_parts(optimizer: Optimizer, shardings: Mapping[int, ShardedLayout]) -> None:
    """Raise ValueError if the optimizer updates shards differently from full parameters, or cannot step DTensors."""
    if any(isinstance(held, Optimizer) for held in vars(optimizer).values()):
        return  # a wrapper: the optimizer inside is checked before its own step
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        tried = set()
        for parameter in group["params"]:
            sharding = shardings.get(id(parameter))
            if sharding is None and isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                key: Any = (parameter.ndim, parameter.device_mesh, parameter.placements)
                if key not in tried:
                    _try_dtensors(name, optimizer, group, parameter)
            elif sharding is not None and isinstance(sharding.placement, Shard):
                key = (parameter.ndim, sharding.placement.dim)
                if key not in tried:
                    _try_parts(name, optimizer, group, parameter, sharding.placement.dim)
            else:
                continue
            tried.add(key)


def _try_parts(name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, dim: int) -> None:
    try:
        differs = differs_on_parts(optimizer, group, parameter, dim)
    except Exception as error:
        if _optimizers[optimizer].steps == 1:
            _log.warning(
                "A trial step of %s on shards of a matrix failed (%s: %s). If its update of an element depends on "
                "other elements of the tensor, it is wrong for parameters='plain'.",
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
    instead = (
        "Use AdamW, Adam (also with fused=True), SGD, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Adamax, ASGD, or Muon "
        "for matrices only"
    )
    try:
        differs, why = differs_on_dtensors(optimizer, group, parameter), "updates them differently from full tensors"
    except Exception as error:
        differs, why = True, f"fails on them ({type(error).__name__}: {str(error).splitlines()[0]})"
    if differs:
        how = ", fused=True," if group.get("fused") else ""
        raise ValueError(
            f"{name}{how} cannot step parameters that are DTensors sharded as {tuple(parameter.placements)}: it {why}. "
            f"{instead}."
        )


def _compare_gradients(mesh: DeviceMesh, held: Sequence[tuple[Tensor, ShardedLayout]]) -> None:
    """Compare gradients of plain parameters over the ranks of `mesh` before a step uses them. A collective call."""
    parts = [p.grad for p, sharding in held if isinstance(sharding.placement, Shard) and p.grad is not None]
    whole = [p.grad for p, sharding in held if not isinstance(sharding.placement, Shard) and p.grad is not None]
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in whole]
    norm = float(torch.stack([one.double().cpu() for one in norms]).norm()) if norms else 0.0
    mine = [STEP, checksum_of_parts(parts), norm if isfinite(norm) else None]
    found = [one for theirs in exchange(resolve_group(mesh), PARTS_AND_STEPS, [mine]) for one in theirs]
    refuse_different_moments(mesh, [one[0] for one in found])
    _, sums, totals = zip(*found, strict=True)
    dim = repr((mesh.mesh_dim_names or ("tp",))[0])
    known = [one for one in sums if one is not None]
    if len(set(known)) < len(known):
        raise ValueError(
            f"before the optimizer's step, ranks of {dim} have equal gradients of different weight shards, so the "
            "gradients were averaged or broadcast over these ranks. With parameters='plain', reduce gradients over the "
            "data parallel ranks only: group=mesh['dp'].get_group()."
        )
    finite = [one for one in totals if one is not None]
    if finite and max(finite) - min(finite) > _NORM_TOLERANCE * max(finite):
        raise ValueError(
            f"before the optimizer's step, the ranks of {dim} have different gradients of replicated parameters, with "
            f"norms from {min(finite):.4g} to {max(finite):.4g}. Most likely torch.nn.utils.clip_grad_norm_ scaled "
            "them by the norm of each rank's own shards. With parameters='plain', use "
            "fused_tp.nn.clip_grad_norm_(model, max_norm)."
        )


def refuse_different_moments(mesh: DeviceMesh, moments: Sequence[str]) -> None:
    """Raise RankMismatchError if some ranks are about to step an optimizer and others are not."""
    if len(set(moments)) > 1:
        raise RankMismatchError(
            f"rank {moments.index(STEP)} along mesh dim {(mesh.mesh_dim_names or ('?',))[0]!r} is at an optimizer "
            f"step, but rank {moments.index(FORWARD)} has skipped the step and is at the next forward pass, most "
            "likely because of its own gradients. Use torch.amp.GradScaler and "
            "fused_tp.nn.clip_grad_norm_, which take the same decision on all ranks."
        )


def checksum_of_parts(tensors: Iterable[Tensor]) -> int | None:
    """Return a checksum of a sample of each tensor, or None if there is nothing to compare.

    A tensor whose sample is constant (such as zeros) is skipped. The cost is one small copy per tensor, and one
    transfer per device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    sizes: dict[torch.device, list[tuple[int, int]]] = {}
    for t in tensors:
        own = (t.to_local() if isinstance(t, DTensor) else t).detach()
        if type(own).__torch_dispatch__ is not Tensor.__torch_dispatch__ or own.layout != torch.strided:
            continue
        if own.is_meta or own.is_quantized or own.is_nested or not own.numel():
            continue
        flat = own.view(-1) if own.is_contiguous() else own.flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].contiguous().view(torch.uint8)
        by_device.setdefault(own.device, []).append(sample)
        sizes.setdefault(own.device, []).append((sample.numel(), own.element_size()))
    kept = []
    for device, samples in by_device.items():
        content, start = torch.cat(samples).cpu().numpy().tobytes(), 0
        for size, item in sizes[device]:
            sample_bytes = content[start : start + size]
            start += size
            if sample_bytes != sample_bytes[:item] * (size // item):
                kept.append(sample_bytes)
    return checksum(b"".join(kept)) if kept else None


# -- gradient scalers -------------------------------------------------------------------------------------------------


def _agreeing(own: Any) -> Any:
    """Wrap `own`, the gradient scaler method that unscales gradients and checks that they are finite.

    With the wrapper, all ranks that share a model get the same result. torch itself determines these ranks from the
    first gradient only, and finds none for plain tensors. Rejected: a custom scaler class, because Trainer, accelerate
    and Lightning would not create it.
    """

    @functools.wraps(own)
    def _unscale_grads_(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        parameters = _parameters_of(optimizer)
        groups = _groups_of(parameters)
        given = optimizer
        if any(isinstance(parameter.grad, DTensor) for parameter in parameters):
            given = SimpleNamespace(param_groups=[{"params": [_with_local_gradient(p) for p in parameters]}])
        found: dict[torch.device, Tensor] = own(scaler, given, inv_scale, found_inf, *args)
        if groups:
            found = found or {found_inf.device: found_inf}  # this rank has no gradient, but other ranks may
            _agree(groups, found)
        elif not found:
            _refuse_idle(optimizer, parameters)
        return found

    return _unscale_grads_


def _groups_of(parameters: Sequence[Tensor]) -> list[tuple[ProcessGroup, str]]:
    """Return the groups that share a model of `parameters`, with their device types, in equal order on all ranks."""
    found: dict[str, tuple[ProcessGroup, str]] = {}
    for model in _models_of(parameters):
        for mesh in getattr(model, _SHARED_OVER):
            found.setdefault(mesh.get_group().group_name, (mesh.get_group(), mesh.device_type))
    for mesh in dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                found.setdefault(mesh.get_group(dim).group_name, (mesh.get_group(dim), mesh.device_type))
    return list(found.values())


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """Return a tensor whose `grad` is this rank's shard of the gradient, in the same memory."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return parameter
    part = grad.to_local().detach()
    part.grad = grad.to_local().detach()
    return part


@torch.no_grad()
def _agree(groups: Sequence[tuple[ProcessGroup, str]], found: Mapping[torch.device, Tensor]) -> None:
    """Set all flags in `found` if one of them is set on any rank, by one all-reduce of a scalar per group."""
    flags = list(found.values())
    total = sum((flag.detach().reshape(1).to(flags[0].device) for flag in flags[1:]), flags[0].detach().reshape(1))
    for group, device_type in groups:
        total = all_reduce(total.to(device_type), group=group)
    for flag in flags:
        flag.copy_(total.reshape(flag.shape))
