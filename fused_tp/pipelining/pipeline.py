"""`pipeline(model, mesh)`: split a model into pipeline stages, each tensor and context parallel inside.

Every rank receives the whole batch, as for `parallelize`, so that masks, positions and document bounds are not sent
between stages. Only this rank's shard of the hidden state is sent, with sequence parallelism 1/tp of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map

from fused_tp.backends.messages.torch_dist import TorchDist, torch_dist
from fused_tp.core import settings
from fused_tp.core.checks import is_capturing, is_change_check_due, is_check_due
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.core.partition import shard_range
from fused_tp.core.store import exchange
from fused_tp.nn.checkpoint import gather_tensors
from fused_tp.nn.grad_norm import clip_by_norm_, grad_norm
from fused_tp.nn.optimizers import call_after_steps, call_before_steps, optimizer_step_counts, watch_model
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.ops.split_backward import split_backward
from fused_tp.parallelizing.checks.batch_check import BatchCheck, gather_over_meshes
from fused_tp.parallelizing.checks.gradient_check import norm_and_projection
from fused_tp.parallelizing.checks.model_check import allow_warnings, check_equal_models, is_library_function, warn_once
from fused_tp.parallelizing.checks.shard_check import check_equal_steps
from fused_tp.parallelizing.checks.sharding_check import check_verify, compare_sharding
from fused_tp.parallelizing.forward_shard import tensor_version
from fused_tp.parallelizing.grad_sync import average_gradients, has_distributed_experts
from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.readers import forward_source_contains
from fused_tp.parallelizing.sequence_sharding import INNER_STAGE_ATTRIBUTE
from fused_tp.parallelizing.shard_plan import Style, resolve_plan
from fused_tp.parallelizing.state_dict import check_buffers, load_full_state_dict, materialize
from fused_tp.pipelining.rank_checks import HyperparameterCheck, NumbersOfRanks
from fused_tp.pipelining.schedules import ScheduleKind, find_schedule
from fused_tp.pipelining.stages import (
    PROBE_TOKENS,
    Boundary,
    ModelLayers,
    estimated_costs,
    find_layers,
    share_out,
    take_stages,
    training_mode,
    zeros_for_meta_tensors,
)
from fused_tp.pipelining.timeline import Recorder, Span
from fused_tp.pipelining.training_check import compare_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

LossFunction = Callable[[Any, Any], Tensor]
_IGNORED_LABEL = -100  # label of ignored tokens, as everywhere in transformers
_TIED_TOLERANCE = 1e-4  # relative difference of copies of a parameter that the order of sums may explain
_SCALE_TOLERANCE = 0.01  # relative difference of factors between stages that rounding may explain
_NOT_HERE = -1  # in place of a flag of a parameter that another rank holds
_LABEL_NAMES = ("labels", "shift_labels")
# Argument of forward: divisor of the sum over targets, in place of a microbatch's own number of targets.
_TARGET_COUNT_NAME = "num_items_in_batch"


class StageKeywords(TypedDict, total=False):
    """Keywords of `parallelize` that `pipeline` takes."""

    tp_dim: str
    cp_dim: str
    ep_dim: str | None
    plan: str | Mapping[str, Style]
    sequence_parallel: bool
    loss_parallel: bool
    ulysses_size: int
    grad_sync: bool


_STAGE_DEFAULTS = {
    name: inspect.signature(parallelize).parameters[name].default for name in StageKeywords.__annotations__
}


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    microbatches: int,
    schedule: str = "1F1B",
    virtual_stages: int | None = None,
    layers: str | None = None,
    costs: Sequence[float] | None = None,
    loss_fn: LossFunction | None = None,
    example: Mapping[str, Any] | None = None,
    pp_dim: str = "pp",
    verify: str | bool | Mapping[str, Any] = "auto",
    **stage_keywords: Unpack[StageKeywords],
) -> Pipeline:
    """Split `model` into a pipeline over `mesh[pp_dim]`; `step(batch)` of the result trains on a batch.

    The model is split between the layers of one nn.ModuleList; embeddings stay with the first layer, norms and output
    layers after the layers with the last. Each stage is parallelized over the other dims as by `parallelize`. `model`
    is taken apart, and memory for other ranks' stages is freed: use the pipeline from here on, and pass its
    `parameters()` to optimizers. For a model on the meta device, each rank allocates its own stages, uninitialized:
    call `load_state_dict` afterwards.

    Args:
        model: a transformers causal language model, or any nn.Module whose layers pass on only a hidden state
            [batch, seq, hidden]; the same on all ranks. Models that cannot be split are refused.
        mesh: DeviceMesh with the dim `pp_dim` and the dims over which each stage is parallel.
        microbatches: number of equal parts into which the rows of a batch are split.
        schedule: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble" ("ZBV") or "DualPipeV",
            of torch.distributed.pipelining. Backward of the last three runs inside `fused_tp.split_backward()`.
        virtual_stages: stages per rank, for the two interleaved schedules; None: 2.
        layers: name of the ModuleList; None: the one in transformers' plan for pipelines, or the only one.
        costs: cost of each layer, in any unit, by which stages are balanced, with the embedding added to the first and
            the output layer to the last; None: multiplications per token, counted from parameters.
        loss_fn: loss_fn(output, labels) -> mean over a microbatch; output is the model's output (the logits of a
            transformers model). The loss of a batch is the mean over its microbatches. None: the model's own loss, the
            `loss` that forward returns for `labels` (not shifted; -100 is ignored), averaged over the batch's targets.
        example: keyword arguments of a forward pass on a few tokens, with which the model is examined; None: token ids.
        verify: compare the pipeline with the whole model: outputs as `parallelize` does, and loss and gradients of one
            training step; the tensors of a dict must have `microbatches` rows, or a multiple, and may include "labels".
        stage_keywords: keywords of `parallelize`, for each stage: tp_dim, cp_dim, ep_dim (one of these two), plan,
            sequence_parallel, loss_parallel, ulysses_size, grad_sync. With grad_sync, gradients are averaged over the
            context parallel ranks at the end of a step.

    Raises:
        TypeError, ValueError: an argument does not fit, or the model cannot be split, with the reason; raised before
            anything is changed or sent. If `parallelize` refuses a stage, all ranks raise, with the model taken apart.

    Example:
        >>> mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("pp", "tp"))
        >>> pipe = fused_tp.pipeline(model, mesh, schedule="ZBV", microbatches=8, sequence_parallel=True)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> loss = pipe.step({"input_ids": tokens, "labels": tokens})
        >>> optimizer.step()

    Source: Narayanan et al., arXiv:2104.04473 (1F1B, interleaved); Qi et al., arXiv:2401.10241 (zero bubble, ZBV);
    DeepSeek-AI, arXiv:2412.19437 (DualPipe).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}.")
    dim_names = mesh.mesh_dim_names or ()
    if pp_dim not in dim_names:
        raise ValueError(
            f"mesh must have the dim pp_dim={pp_dim!r}, got {dim_names or 'dims without names'}. Add the dim, or pass "
            "the name of another one as pp_dim."
        )
    unknown_keywords = sorted(set(stage_keywords) - set(StageKeywords.__annotations__))
    if unknown_keywords:
        raise TypeError(
            f"pipeline has no keyword {unknown_keywords[0]!r}. The keywords of parallelize that it accepts are "
            f"{', '.join(_STAGE_DEFAULTS)}."
        )
    keywords: dict[str, Any] = {**_STAGE_DEFAULTS, **stage_keywords}
    dims = tuple(keywords[key] for key in ("tp_dim", "cp_dim"))
    if keywords["ep_dim"] not in (None, *dims):
        raise ValueError(
            f"ep_dim={keywords['ep_dim']!r} is not supported in a pipeline. Use {dims[0]!r} or {dims[1]!r} to "
            "distribute experts."
        )
    check_int("microbatches", microbatches, 1)
    check_verify(verify)
    grad_sync, plan = keywords.pop("grad_sync"), keywords.pop("plan")
    check_bool(**{key: keywords[key] for key in ("sequence_parallel", "loss_parallel")}, grad_sync=grad_sync)
    if virtual_stages is not None:
        check_int("virtual_stages", virtual_stages, 1)
    needed_dims = {"sequence_parallel": dims[0], "loss_parallel": dims[0], "ep_dim": keywords["ep_dim"]}
    needed_dims["ulysses_size"] = dims[1] if keywords["ulysses_size"] != 1 else None
    for keyword, dim in needed_dims.items():
        if keywords[keyword] and dim is not None and dim not in dim_names:
            raise ValueError(
                f"{keyword}={keywords[keyword]} needs ranks along {dim!r}, but mesh has the dims {dim_names}. Add the "
                f"dim, or omit {keyword}."
            )
    is_hf = is_transformers_model(model)
    if loss_fn is None and "labels" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__}.forward has no argument labels. Pass loss_fn(output, labels).")
    if is_hf and getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True in the model's config is not supported: the router loss needs the logits of all "
            "layers, but the last stage has only its own. Set model.config.output_router_logits = False."
        )
    pp_mesh = mesh[pp_dim]
    num_ranks, rank = pp_mesh.size(), pp_mesh.get_local_rank()
    schedule_kind, stages_per_rank = find_schedule(schedule, num_ranks, microbatches, virtual_stages)
    check_buffers(model, is_hf=is_hf)
    with zeros_for_meta_tensors(model):
        layer_split = find_layers(model, layers, example or _make_example(model, is_hf))
    if costs is None:
        costs = estimated_costs(model, layer_split)
    elif len(costs) != layer_split.num_layers:
        raise ValueError(
            f"costs has {len(costs)} numbers for the {layer_split.num_layers} layers of {layer_split.container!r}. "
            "Pass one number for each layer."
        )
    parts = share_out(costs, num_ranks * stages_per_rank)
    meshes = {dim: mesh[dim] for dim in dims if dim in dim_names and mesh[dim].size() > 1}
    tp_mesh, cp_mesh = (meshes.get(dim) for dim in dims)
    tied_names = _find_tied_names(model, layer_split)
    has_adapters = hasattr(model, "peft_config")  # its plan has the names without adapters
    full_plan = resolve_plan(model, plan) if tp_mesh is not None and not has_adapters else None
    named_styles: dict[str, Style] | None = None if full_plan is None else {**full_plan.modules, **full_plan.parameters}
    if named_styles is not None and (tied_names or plan != "auto"):
        # In the whole model's plan an embedding is sharded like the output layer tied to it, which is in another stage.
        plan = named_styles
    disable_input_grads: Any = getattr(model, "disable_input_require_grads", None)
    if disable_input_grads is not None and getattr(model, "_require_grads_hooks", None):
        disable_input_grads()  # hooks from gradient_checkpointing_enable, which parallel embeddings do not support
    stages: dict[int, Stage] = {}
    checked_meshes = [pp_mesh, *meshes.values()]
    allow_warnings()
    if verify is not False:  # each rank computes the whole model
        check_equal_models(model, checked_meshes)
    whole_stage = Stage(model, Boundary(), 0, 1, is_hf, loss_fn)
    verify_outputs = verify
    if isinstance(verify, Mapping):
        verify_outputs = {name: value for name, value in verify.items() if name not in _LABEL_NAMES}
    with (
        compare_sharding(
            model, verify_outputs, checked_meshes, tp=tp_mesh, cp=cp_mesh, num_rows=microbatches, is_pipeline=True
        ) as outcome,
        compare_step(model, whole_stage, verify, checked_meshes, outcome, microbatches=microbatches),
    ):
        error_of_stage: Exception | None = None
        try:
            for stage_index, (stage_model, boundary) in take_stages(
                model, layer_split, parts, schedule_kind.stages_of(rank, num_ranks, stages_per_rank)
            ).items():
                if stage_index + 1 < len(parts):
                    setattr(stage_model, INNER_STAGE_ATTRIBUTE, True)
                # A stage with nothing to shard is replicated over the tensor parallel ranks.
                is_replicated = (
                    named_styles is not None
                    and not keywords["sequence_parallel"]
                    and not _restrict_plan(stage_model, named_styles)
                )
                stage_meshes = {
                    dim: dim_mesh for dim, dim_mesh in meshes.items() if not (is_replicated and dim_mesh is tp_mesh)
                }
                if stage_meshes:
                    stage_mesh = mesh if len(stage_meshes) == len(meshes) else next(iter(stage_meshes.values()))
                    own_keywords = keywords | {"loss_parallel": keywords["loss_parallel"] and not is_replicated}
                    # A stage cannot run alone.
                    parallelize_keywords = own_keywords | {"grad_sync": False, "verify": False}
                    parallelize(stage_model, stage_mesh, plan=_restrict_plan(stage_model, plan), **parallelize_keywords)
                else:
                    materialize(stage_model, mesh.device_type, is_hf=is_hf)
                stages[stage_index] = Stage(stage_model, boundary, stage_index, len(parts), is_hf, loss_fn)
        except Exception as error:
            error_of_stage = error
        _raise_on_all_ranks(pp_mesh, error_of_stage)
        _free_other_stages(model, stages.values())
        pipe = Pipeline(
            stages,
            schedule_kind,
            layer_split,
            parts,
            pp_mesh,
            tp_mesh,
            cp_mesh,
            microbatches,
            tied_names,
            sequence_parallel=keywords["sequence_parallel"],
            grad_sync=grad_sync,
        )
        outcome.sharded_model, outcome.modules, outcome.run = (
            pipe,
            [stage.model for stage in stages.values()],
            pipe.eval,
        )
    return pipe


def _make_example(model: nn.Module, is_hf: bool) -> dict[str, Any]:
    device = next(model.parameters()).device
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device)
    if is_hf:
        return {"input_ids": tokens, "use_cache": False}
    return {next(iter(inspect.signature(model.forward).parameters), "tokens"): tokens}


def _find_tied_names(model: nn.Module, layers: ModelLayers) -> tuple[str, str] | None:
    """Return both names of the parameter that the first and the last stage share, or None."""

    def parameter_names(modules: Sequence[str]) -> dict[int, str]:
        return {
            id(p): f"{name}.{leaf}"
            for name in modules
            for leaf, p in model.get_submodule(name).named_parameters(recurse=False, remove_duplicate=False)
        }

    names_before_layers, names_after_layers = (
        parameter_names(layers.modules_before_layers),
        parameter_names(layers.modules_after_layers),
    )
    shared_names = [
        (names_before_layers[key], names_after_layers[key]) for key in names_before_layers if key in names_after_layers
    ]
    if len(shared_names) > 1:
        raise ValueError(
            f"The first and last stages share {len(shared_names)} parameters: {shared_names}. At most one tied "
            "parameter is supported; untie the others."
        )
    return shared_names[0] if shared_names else None


def _restrict_plan(stage_model: nn.Module, plan: str | Mapping[str, Style]) -> str | Mapping[str, Style]:
    """Restrict a plan with concrete names to the names in a stage."""
    if isinstance(plan, str):
        return plan
    stage_names = {name for name, module in stage_model.named_modules() if not isinstance(module, nn.Identity)}
    stage_names |= {name for name, _ in stage_model.named_parameters(remove_duplicate=False)}
    return {name: style for name, style in plan.items() if name in stage_names or "*" in name}


def _raise_on_all_ranks(pp_mesh: DeviceMesh, error: Exception | None) -> None:
    """Raise on all pipeline ranks if one raised: its peers would otherwise wait for it in their first step."""
    messages: list[Any] = [None] * pp_mesh.size()
    dist.all_gather_object(messages, None if error is None else str(error), group=pp_mesh.get_group())
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(
                f"Pipeline rank {rank} failed to parallelize its stage. The model is already split, so build it again. "
                f"The error was: {message}"
            )


def _free_other_stages(model: nn.Module, stages: Iterable[Stage]) -> None:
    """Free the parameters of other ranks' stages, which the caller's `model` still holds."""
    own_modules = {module for stage in stages for module in stage.modules()}
    for module in model.modules():
        if module not in own_modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


class Stage(nn.Module):
    """Pipeline stage: computes the hidden state to send from the one received.

    Attributes:
        model: a model of the same class as the whole one, with placeholders for the modules of other stages.
        stage_index: index of this stage.
        num_stages: number of stages over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        boundary: Boundary,
        stage_index: int,
        num_stages: int,
        is_hf: bool,
        loss_fn: LossFunction | None,
    ) -> None:
        super().__init__()
        self.model, self.boundary, self.stage_index, self.num_stages = model, boundary, stage_index, num_stages
        self.is_hf, self.loss_fn = is_hf, loss_fn
        self.shared_arguments: dict[str, Any] = {}  # arguments equal for all microbatches of the running batch
        self.microbatches = 1
        self.recorded_outputs: list[Tensor] | None = None  # arguments of loss_fn, if they are recorded
        self.hidden_spec: tuple[tuple[int, ...], torch.dtype] | None = None  # shape and dtype sent and received
        self.takes_target_count = takes_target_count(model, is_hf=is_hf)

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward(self, *received: Tensor, **batch: Any) -> Any:
        """Return the hidden state to send; in the last stage the loss, or the output if the batch has no labels."""
        target_count = self.shared_arguments.get(_TARGET_COUNT_NAME)
        batch |= {name: value for name, value in self.shared_arguments.items() if name != _TARGET_COUNT_NAME}
        labels = {name: batch.get(name) for name in _LABEL_NAMES}
        uses_model_loss = self.is_last and self.loss_fn is None and labels["labels"] is not None
        if not uses_model_loss:
            batch = {name: value for name, value in batch.items() if name not in _LABEL_NAMES}
        elif self.takes_target_count:
            batch[_TARGET_COUNT_NAME] = target_count
        boundary = self.boundary
        boundary.received_hidden = received[0] if received else None
        try:
            output = self.model(**batch)
            sent_hidden = boundary.sent_hidden
        finally:
            boundary.received_hidden = boundary.sent_hidden = None
        if not self.is_last:
            return self._check_sent_hidden(sent_hidden)
        if labels["labels"] is None:
            return output.logits if self.is_hf else output
        if self.loss_fn is not None:
            logits = output.logits if self.is_hf else output
            if self.recorded_outputs is not None:
                self.recorded_outputs.append(logits)
            return self.loss_fn(logits, labels["labels"]) / self.microbatches
        return output.loss * (1 if self.takes_target_count else 1 / self.microbatches)

    def compute_batch_loss(self, batch: Mapping[str, Any], microbatches: int) -> tuple[Tensor, float]:
        """Compute the loss of `batch`, microbatch by microbatch, if this stage is the whole model.

        Returns:
            The loss, and the relative difference of the loss of the whole batch at once.
        """
        shared_arguments = {name: value for name, value in batch.items() if not _is_split(value)}
        if self.loss_fn is None:
            shared_arguments.setdefault(_TARGET_COUNT_NAME, count_targets(batch))
        self.shared_arguments, self.microbatches, self.recorded_outputs = shared_arguments, microbatches, []
        chunks = {name: t.chunk(microbatches) for name, t in batch.items() if _is_split(t)}
        loss = torch.stack([self(**{name: t[i] for name, t in chunks.items()}) for i in range(microbatches)]).sum()
        outputs, self.recorded_outputs = self.recorded_outputs, None
        with torch.no_grad():
            if self.loss_fn is not None and all(isinstance(t, Tensor) and t.ndim for t in outputs):
                whole_loss = self.loss_fn(torch.cat(outputs), batch["labels"])
            else:
                self.microbatches = 1
                whole_loss = self(**{name: t for name, t in batch.items() if _is_split(t)})
            return loss, float((whole_loss - loss).abs() / loss.abs().clamp_min(1e-3))

    def _check_sent_hidden(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None and self.hidden_spec is not None
        if (tuple(hidden.shape), hidden.dtype) != self.hidden_spec:
            raise ValueError(
                f"Stage {self.stage_index} returned a hidden state {tuple(hidden.shape)} of {hidden.dtype}, but the "
                f"next stage expects {self.hidden_spec[0]} of {self.hidden_spec[1]}. Build the pipeline under the same "
                "autocast as its steps."
            )
        # torch detaches the sent tensor in place, which fails for views.
        return hidden.clone() if hidden._is_view() else hidden.contiguous()


def _is_split(value: object) -> bool:
    """True if each microbatch has a part of `value`, an argument of the batch."""
    return isinstance(value, Tensor) and value.ndim > 0


def takes_target_count(model: nn.Module, *, is_hf: bool) -> bool:
    """True if the model divides its loss by the argument `num_items_in_batch`."""
    parameters = inspect.signature(model.forward).parameters
    # transformers' own loss functions take it among other keywords; other loss functions would ignore it.
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return _TARGET_COUNT_NAME in parameters or (
        is_hf
        and takes_keywords
        and forward_source_contains(model, "loss_function", default=False)
        and is_library_function(model.loss_function)
    )


def count_targets(batch: Mapping[str, Any]) -> Tensor:
    """Count the targets that are not ignored, in unshifted `labels` or in `shift_labels`."""
    shifted_labels = batch.get("shift_labels")
    ignored_label = batch.get("ignore_index", _IGNORED_LABEL)  # an argument of transformers' losses
    return ((batch["labels"][:, 1:] if shifted_labels is None else shifted_labels) != ignored_label).sum()


class Pipeline:
    """Stages of this rank and the schedule that runs them.

    Attributes:
        stages: stages of this rank, by index.
        parts: layers of each stage, over all ranks.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule_kind: ScheduleKind,
        layers: ModelLayers,
        parts: list[range],
        pp_mesh: DeviceMesh,
        tp_mesh: DeviceMesh | None,
        cp_mesh: DeviceMesh | None,
        microbatches: int,
        tied_names: tuple[str, str] | None,
        *,
        sequence_parallel: bool,
        grad_sync: bool,
    ) -> None:
        self.stages, self.parts, self.microbatches = stages, parts, microbatches
        self._schedule_kind, self._layers, self._tied_names = schedule_kind, layers, tied_names
        self._pp_mesh, self._group = pp_mesh, pp_mesh.get_group()
        self._tp_mesh, self._cp_mesh = tp_mesh, cp_mesh
        self._sequence_parallel, self.grad_sync = sequence_parallel, grad_sync
        self._schedules: dict[tuple[int, ...], Any] = {}  # by the shape of the hidden state
        for stage in stages.values():
            stage.microbatches = microbatches
        self._has_unsynced_gradients = False  # True while gradients are not yet reduced over ranks
        num_ranks = pp_mesh.size()
        self._rank_by_stage = {
            stage_index: rank
            for rank in range(num_ranks)
            for stage_index in schedule_kind.stages_of(rank, num_ranks, len(parts) // num_ranks)
        }
        any_stage = next(iter(stages.values()))
        self._is_hf, self._uses_model_loss, self._takes_target_count = (
            any_stage.is_hf,
            any_stage.loss_fn is None,
            any_stage.takes_target_count,
        )
        first_argument = next(iter(inspect.signature(any_stage.model.forward).parameters), "tokens")
        self._token_names = ("input_ids", "inputs_embeds") if self._is_hf else (first_argument,)
        self._batch_check = BatchCheck([pp_mesh]) if pp_mesh.size() > 1 else None
        self._step_count = 0  # calls of `step`
        # After a checked step: norms of this rank's gradients, and the factor by which all of them were scaled before
        # the optimizer's step.
        self._gradient_norms: Tensor | None = None
        self._gradient_scale: float | None = None
        self._num_changes: int | None = None  # after a checked step and the optimizers' steps: see `_count_changes`
        self._has_changed_gradients = False  # gradients were changed by other than one factor since a checked step
        for stage in stages.values():
            shared_meshes = [mesh for mesh in (tp_mesh, cp_mesh, pp_mesh) if mesh is not None]
            watch_model(stage.model, shared_meshes, is_stage=pp_mesh.size() > 1)
            call_before_steps(stage.model, self._record_gradient_scale)
            call_after_steps(stage.model, self._record_step)
        self._hyperparameter_check = HyperparameterCheck()
        self._total_steps = 0  # steps of optimizers up to the last call of `step`
        self._recorder = Recorder()

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Any], *, sync_gradients: bool = True) -> Tensor:
        """Return the loss of `batch`, equal on all pipeline ranks, and accumulate gradients in the parameters.

        Args:
            batch: arguments of the model's forward by name, and "labels"; tensors [batch, ...], equal on all ranks of
                the pipeline and of the dims inside its stages. Pass packed documents as position_ids [batch, seq].
            sync_gradients: False in all steps but the last of an accumulation over several batches: gradients are then
                reduced over ranks once.

        Raises:
            TypeError, ValueError: the batch does not fit; raised before anything is sent.
        """
        check_bool(sync_gradients=sync_gradients)
        self._check_parameters()
        self._check_steps()
        prepared_batch = self._prepare_batch(batch, with_labels=True)
        rank_states = self._gather_rank_states()
        earlier_gradients = [] if self._has_unsynced_gradients else self._detach_gradients()
        try:
            with self._backward_context():
                losses = self._run_schedule(prepared_batch)
            self._check_rank_states(rank_states)
            self._has_unsynced_gradients = True
            if sync_gradients:
                self._sync_gradients()
                self._has_unsynced_gradients = False
        except BaseException:
            # A failed step leaves partial gradients on some parameters. Discard them, and keep those of earlier steps.
            for parameter in () if self._has_unsynced_gradients else self.parameters():
                parameter.grad = None
            for parameter, grad in earlier_gradients:
                parameter.grad = grad
            raise
        for parameter, grad in earlier_gradients:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._gradient_norms = self._local_gradient_norms() if is_check_due(self._step_count) else None
        is_checked = is_change_check_due(self._step_count) and self._pp_mesh.size() > 1
        self._num_changes = self._count_changes() if is_checked else None
        self._gradient_scale, self._has_changed_gradients = None, False
        return self._broadcast_loss(losses)

    @torch.no_grad()
    def eval(self, batch: Mapping[str, Any]) -> Any:
        """Return the loss of `batch`, in eval mode without gradients.

        Without labels, return the model's output (the logits of a transformers model) on the ranks of the last stage,
        and None on others.
        """
        prepared_batch = self._prepare_batch(batch, with_labels=False)
        with training_mode(self.stages.values(), is_training=False):
            outputs = self._run_forward(prepared_batch)
        if "labels" in prepared_batch:
            return self._broadcast_loss(outputs)
        return tree_map(_concatenate, *outputs) if outputs else None

    @contextmanager
    def preserve_steps(self) -> Iterator[None]:
        """Context for a step that is not counted. Schedules are created again after it."""
        step_count = self._step_count
        try:
            yield
        finally:
            self._step_count, self._schedules, self._gradient_norms, self._num_changes = step_count, {}, None, None

    def _check_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                if self._tied_names is not None or (self._cp_mesh is not None and self.grad_sync):
                    reason = (
                        "the first stage and the last share a weight"
                        if self._tied_names
                        else "grad_sync=True sums over cp"
                    )
                    raise ValueError(
                        f"{name!r} has a main_grad, but {reason}, and that reduction reads .grad only. Remove "
                        "main_grad."
                    )
                break
        for stage in self.stages.values() if self._schedule_kind.splits_backward else ():
            for module in stage.modules():
                if isinstance(module, FSDPModule) and reshards_after_forward(module):
                    raise ValueError(
                        f"schedule {self._schedule_kind.name!r} splits backward, which torch's FSDP2 supports only "
                        "without resharding after forward. Call fully_shard with reshard_after_forward=False."
                    )

    def _check_steps(self) -> None:
        """Compare over pipeline ranks what optimizers did since the last step; log changes that no optimizer made.

        Raises:
            RankMismatchError: optimizers stepped the stages a different number of times. Each rank reports its
                most-stepped optimizer: several optimizers may divide parameters differently per stage.
            ValueError: gradients of the stages were scaled by different factors.
        """
        self._step_count += 1
        is_due, was_due = (is_change_check_due(count) for count in (self._step_count, self._step_count - 1))
        if not (is_due or was_due) or self._pp_mesh.size() == 1:
            return
        hyperparameters = self._hyperparameter_check.report(self._step_count)
        report = [
            self._max_steps(),
            self._gradient_scale,
            self._has_changes_by_hand(),
            hyperparameters,
            self._tied_copy(),
        ]
        reports = gather_over_meshes([self._pp_mesh], "changes between steps", report)
        if is_check_due(self._step_count):
            check_equal_steps([self._pp_mesh], [count for count, *_ in reports if count])  # frozen stages report 0
        self._hyperparameter_check.compare([report[3] for report in reports], self._pp_mesh)
        self._check_tied_copies([copy for *_, copy in reports if copy is not None])
        if any(report[2] for report in reports):
            warn_once(
                [self._pp_mesh],
                "changes by hand",
                "Parameters or gradients of a pipeline's stages were changed since its last step, but not by an "
                "optimizer of torch.optim itself (subclasses may compute norms). If the change depends on a norm or a "
                "maximum over pipe.parameters(), that is one of a rank's stages only: combine it over the ranks of the "
                "pipeline, for example by fused_tp.all_reduce(squared_norm, group=mesh['pp']).",
            )
        scales = [report[1] for report in reports if report[1] is not None]
        if scales and max(scales) - min(scales) > _SCALE_TOLERANCE * max(scales):
            raise ValueError(
                "between the pipeline's step and the optimizer's, gradients of the stages were scaled by different "
                f"factors, from {min(scales):.4g} to {max(scales):.4g}. Most likely torch.nn.utils.clip_grad_norm_ "
                "scaled each stage by its own norm. Use the pipeline's clip_grad_norm_(max_norm)."
            )

    def _gather_rank_states(self) -> NumbersOfRanks | None:
        """Gather the numbers that `_check_rank_states` compares. A collective call."""
        if self._pp_mesh.size() == 1 or is_capturing():
            return None
        counts = [optimizer_step_counts(stage.model) for stage in self.stages.values()]
        earlier_total, self._total_steps = self._total_steps, sum(map(sum, counts))
        tied = self._tied_parameters()
        numbers = [
            max(map(len, counts)),
            self._max_steps(),
            self._total_steps != earlier_total,
            *(tied[stage].requires_grad if stage in tied else _NOT_HERE for stage in (0, len(self.parts) - 1)),
        ]
        return NumbersOfRanks(numbers, self._group, torch.device(self._pp_mesh.device_type))

    def _check_rank_states(self, states: NumbersOfRanks | None) -> None:
        """Compare over pipeline ranks if optimizers have stepped, and if copies of a tied parameter are trained.

        Raises:
            RankMismatchError: only some ranks have stepped an optimizer since the last step of the pipeline.
            ValueError: only one copy of the parameter that the first and last stage share requires a gradient.
        """
        if states is None:
            return
        rows = states.read()
        # Frozen stages have no optimizers. Where ranks have different numbers of them, these may step in turn.
        with_optimizers = [(rank, row) for rank, row in enumerate(rows) if row[0]]
        num_optimizers, step_counts, has_stepped = ([row[column] for _, row in with_optimizers] for column in range(3))
        if len(set(has_stepped)) > 1 and (len(set(num_optimizers)) == 1 or len(set(step_counts)) > 1):
            stepped_rank, other_rank = (with_optimizers[has_stepped.index(flag)][0] for flag in (1, 0))
            raise RankMismatchError(
                f"since the pipeline's last step, pipeline rank {stepped_rank} has stepped its optimizer, but pipeline "
                f"rank {other_rank} has not, most likely because of a norm over the parameters or gradients of its own "
                "stages. Their parameters no longer match: resume from a checkpoint. Skip steps on all ranks or on "
                "none: decide by pipe.clip_grad_norm_(max_norm), which returns the norm over all stages, or use "
                "torch.amp.GradScaler."
            )
        first_flag, last_flag = (max(row[column] for row in rows) for column in (3, 4))
        if self._tied_names is not None and first_flag != last_flag:
            trained, frozen = self._tied_names if first_flag else self._tied_names[::-1]
            raise ValueError(
                f"{trained!r} requires a gradient, but {frozen!r} does not, and they are one parameter, of which the "
                "first and the last stage hold a copy each. Call requires_grad_ for both names: each rank has those "
                "of its stages in pipe.named_parameters()."
            )

    def _check_tied_copies(self, copies: Sequence[Sequence[float]]) -> None:
        """Raise ValueError if the copies of the parameter that the first and last stage share have different values."""
        norms, projections = zip(*copies, strict=True) if copies else ((0.0,), (0.0,))
        difference = max(max(norms) - min(norms), max(projections) - min(projections))
        if difference > _TIED_TOLERANCE * max(norms):
            assert self._tied_names is not None
            first_name, last_name = self._tied_names
            raise ValueError(
                f"the first stage's {first_name!r} and the last stage's {last_name!r} are one parameter in two copies, "
                "whose values differ. Most likely the optimizer treats them differently: other groups by name, or "
                "noise, or a norm over the parameters of one rank. Treat both copies alike on their ranks."
            )

    def _max_steps(self) -> int:
        """Return the number of steps of this rank's most-stepped optimizer."""
        return max((count for stage in self.stages.values() for count in optimizer_step_counts(stage.model)), default=0)

    def _count_changes(self) -> int:
        """Return the number of changes in place of this rank's parameters."""
        return sum(tensor_version(_local_tensor(parameter)) or 0 for parameter in self.parameters())

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record hyperparameters, and that the changes so far are those of an optimizer. Runs after its step."""
        if self._num_changes is None:
            return
        self._hyperparameter_check.record(optimizer)
        # The step of another class may compute a norm over its parameters, those of one rank's stages.
        if f"{type(optimizer).__module__}.".startswith("torch.optim."):
            self._num_changes = self._count_changes()

    def _has_changes_by_hand(self) -> bool:
        """True if this rank's parameters or gradients were changed since the last step, but by no optimizer."""
        has_changed_parameters = self._num_changes is not None and self._num_changes != self._count_changes()
        return has_changed_parameters or self._has_changed_gradients

    def _tied_copy(self) -> list[float] | None:
        """Return norm and projection of this rank's copy of the parameter that two stages on different ranks share."""
        tied_parameters = self._tied_parameters()
        if len(tied_parameters) != 1:
            return None
        values: list[float] = norm_and_projection(_local_tensor(*tied_parameters.values()).detach()).tolist()
        return values

    def _tied_parameters(self) -> dict[int, nn.Parameter]:
        """Return this rank's copies of the parameter that the first and last stage share, by stage."""
        stage_indices = (0, len(self.parts) - 1)
        return {
            stage_index: self.stages[stage_index].model.get_parameter(name)
            for stage_index, name in zip(stage_indices, self._tied_names or (), strict=False)
            if stage_index in self.stages
        }

    def _record_gradient_scale(self, model: nn.Module) -> None:
        """Record the factor by which all gradients were scaled since the pipeline's step, if it is the same for all.

        Runs before an optimizer's step.
        """
        if self._gradient_norms is None or self._gradient_scale is not None:
            return
        norms = self._local_gradient_norms()
        if len(norms) == len(self._gradient_norms):
            factors = (norms / self._gradient_norms)[self._gradient_norms > 0]
            if len(factors) and float(factors.max() - factors.min()) <= _SCALE_TOLERANCE * float(factors.max()):
                self._gradient_scale = float(factors.mean())
            elif len(factors):
                self._has_changed_gradients = True

    def _local_gradient_norms(self) -> Tensor:
        """Return the norms of the gradient shards of this rank."""
        gradients = [_local_tensor(p.grad) for p in self.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in gradients]
        return (
            torch.stack([norm.double() for norm in norms]).cpu()
            if norms
            else torch.empty(0, dtype=torch.float64, device="cpu")
        )

    def _backward_context(self) -> AbstractContextManager[None]:
        return split_backward() if self._schedule_kind.splits_backward else nullcontext()

    def _run_schedule(self, batch: dict[str, Any]) -> list[Tensor]:
        """Run the schedule; return the losses of the microbatches on the rank of the last stage, [] on others."""
        schedule, losses = self._get_schedule(batch), list[Tensor]()
        target = {"target": batch["labels"]} if self._has_last_stage else {}
        try:
            schedule.step(**self._split_arguments(batch), **target, losses=losses, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, (ValueError, TypeError, FusedTPError)):
                raise error.__cause__ from None  # torch's own message starts with all arguments
            raise
        return losses

    def _split_arguments(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Pass the arguments common to all microbatches to the stages; return the tensors to split."""
        tensors = {name: t for name, t in batch.items() if _is_split(t)}
        for stage in self.stages.values():
            stage.shared_arguments = {name: value for name, value in batch.items() if name not in tensors}
            stage.hidden_spec = self._hidden_spec(batch)
        return tensors

    def _run_forward(self, batch: dict[str, Any]) -> list[Any]:
        """Return the outputs of the last stage for each microbatch, on its rank; [] on others.

        Rejected: `eval` of torch's schedules, which fails for V-shaped ones in torch 2.13, and infers shapes again at
        each switch between training and evaluation.
        """
        tensors = self._split_arguments(batch)
        microbatch_tensors = {name: t.chunk(self.microbatches) for name, t in tensors.items()}
        shape, dtype = self._hidden_spec(batch)
        hidden_states: dict[int, list[Any]] = {}  # outputs by the next stage's index, if this rank has that stage, too
        pending_sends: list[tuple[dist.Work | None, int]] = []
        for stage_index, stage in sorted(self.stages.items()):
            outputs = []
            for microbatch_index in range(self.microbatches):
                stage_inputs = []
                if stage_index in hidden_states:
                    stage_inputs.append(hidden_states[stage_index][microbatch_index])
                elif stage_index:
                    stage_inputs.append(torch.empty(shape, dtype=dtype, device=self._pp_mesh.device_type))
                    peer = self._global_rank_of(stage_index - 1)
                    _wait(dist.irecv(stage_inputs[0], peer, group=self._group), peer, f"stage {stage_index - 1}")
                microbatch = {name: chunks[microbatch_index] for name, chunks in microbatch_tensors.items()}
                output = stage(*stage_inputs, **microbatch)
                outputs.append(output)
                if not stage.is_last and stage_index + 1 not in self.stages:
                    peer = self._global_rank_of(stage_index + 1)
                    pending_sends.append((dist.isend(output, peer, group=self._group), peer))
            hidden_states = {stage_index + 1: outputs}
        for work, peer in pending_sends:
            _wait(work, peer, "the next stage")
        return outputs if self._has_last_stage else []

    def _global_rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._rank_by_stage[stage])

    @property
    def _has_last_stage(self) -> bool:
        return len(self.parts) - 1 in self.stages

    def _prepare_batch(self, batch: Mapping[str, Any], *, with_labels: bool) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a mapping from names to tensors, not {type(batch).__name__}.")
        arguments = {name: value for name, value in batch.items() if value is not None}
        labels = arguments.get("labels")
        if labels is None and (with_labels or "shift_labels" in arguments):
            raise ValueError("batch has no 'labels', which are needed to compute the loss. Add 'labels' to the batch.")
        if arguments.get("return_dict") is False:
            raise ValueError("batch has return_dict=False; a pipeline reads loss and logits by name. Remove it.")
        tensors = {name: value for name, value in arguments.items() if _is_split(value)}
        num_rows = len(self._find_tokens(arguments))
        if not num_rows or num_rows % self.microbatches:
            raise ValueError(
                f"batch has {num_rows} rows, but {self.microbatches} microbatches need a positive multiple of "
                f"{self.microbatches}. Pad or shorten the batch."
            )
        for name, t in tensors.items():
            if t.requires_grad:
                raise ValueError(
                    f"batch[{name!r}] requires a gradient, but a pipeline returns no gradients of its inputs. Detach "
                    "the tensor."
                )
            if len(t) != num_rows:
                if len(t) != 1:
                    raise ValueError(
                        f"batch[{name!r}] has shape {tuple(t.shape)}, but needs {num_rows} rows, to be split into "
                        "microbatches. Pass packed documents as position_ids [batch, seq]."
                    )
                arguments[name] = t.expand(num_rows, *t.shape[1:])
        if self._is_hf:
            arguments.setdefault("use_cache", False)
        if labels is not None and self._uses_model_loss:
            if arguments.get(_TARGET_COUNT_NAME) is None:
                arguments[_TARGET_COUNT_NAME] = count_targets(arguments)
            if not self._takes_target_count:
                self._check_equal_counts(arguments["labels"])
        elif with_labels and is_check_due(self._step_count):
            self._report_unequal_counts(arguments["labels"])
        if self._batch_check is not None:
            self._batch_check(next(iter(self.stages.values())), (), arguments)
        return arguments

    def _check_equal_counts(self, labels: Tensor) -> None:
        """Refuse microbatches with unequal numbers of targets, over which the mean of mean losses is not the batch's.

        Targets are counted with and without shift, because the model may shift labels.
        """
        counts = [
            (int((part != _IGNORED_LABEL).sum()), int((part[:, 1:] != _IGNORED_LABEL).sum()))
            for part in labels.chunk(self.microbatches)
        ]
        for microbatch_index, count in enumerate(counts):
            if count != counts[0]:
                raise ValueError(
                    f"microbatches must have equal numbers of targets, got {counts[0][0]} in the first and {count[0]} "
                    f"in microbatch {microbatch_index}: the model's loss does not accept num_items_in_batch, so the "
                    "result would be a mean of means. Make the numbers equal, or pass loss_fn(output, labels) to "
                    "pipeline."
                )

    def _report_unequal_counts(self, labels: Tensor) -> None:
        """Log that microbatches have different numbers of ignored labels, over which `loss_fn` may take means."""
        counts = [int((part != _IGNORED_LABEL).sum()) for part in labels.chunk(self.microbatches)]
        if len(set(counts)) > 1:
            warn_once(
                [mesh for mesh in (self._pp_mesh, self._tp_mesh, self._cp_mesh) if mesh is not None],
                "unequal numbers of targets",
                "microbatches have %d to %d labels other than -100. The loss of a batch is the mean over its "
                "microbatches, so if loss_fn is a mean over targets, a target counts more in a microbatch with few. "
                "Divide a sum by the mean number of targets of a microbatch, or make the numbers equal.",
                min(counts),
                max(counts),
            )

    def _find_tokens(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the tokens of a batch, or their embeddings."""
        for name in self._token_names:
            if isinstance(t := batch.get(name), Tensor) and t.ndim > 1:
                return t
        raise ValueError(
            f"batch must have {' or '.join(map(repr, self._token_names))} [batch, seq, ...], got only {[*batch]}. Add "
            "the tokens."
        )

    def _detach_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return gradients of earlier steps, which are already reduced over ranks."""
        gradients = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None
        return gradients

    def _broadcast_loss(self, losses: list[Tensor]) -> Tensor:
        last_stage = len(self.parts) - 1
        device = torch.device(self._pp_mesh.device_type)
        # In double precision, so that the sum over microbatches is rounded once.
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        if self._has_last_stage:
            total_loss = torch.stack([loss.detach().double() for loss in losses]).sum()
        dist.broadcast(total_loss, self._global_rank_of(last_stage), group=self._group)
        return total_loss

    # -- schedules ----------------------------------------------------------------------------------------------------

    def _hidden_spec(self, batch: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a microbatch's hidden state between stages."""
        tokens = self._find_tokens(batch)
        num_rows, seq_len = tokens.shape[0] // self.microbatches, tokens.shape[1]
        return (num_rows, self._local_seq_len(seq_len), self._layers.hidden_size), self._layers.dtype

    def _get_schedule(self, batch: Mapping[str, Any]) -> Any:
        """Return torch's schedule for batches of this shape.

        Stages receive the shapes that they exchange. torch would otherwise infer them by a forward and a backward pass
        of its own, with all their collectives.
        """
        shape, dtype = self._hidden_spec(batch)
        if shape not in self._schedules:
            hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            torch_stages = [
                PipelineStage(
                    stage,
                    stage_index,
                    len(self.parts),
                    torch.device(self._pp_mesh.device_type),
                    input_args=hidden if stage_index else (),
                    output_args=torch.empty((), dtype=torch.float32, device="meta") if stage.is_last else hidden,
                    group=self._group,
                )
                for stage_index, stage in sorted(self.stages.items())
            ]
            self._schedules[shape] = self._schedule_kind.make_schedule(
                torch_stages, self.microbatches, lambda loss, labels: loss
            )
            for torch_stage in torch_stages:
                self._recorder.watch(torch_stage)
        return self._schedules[shape]

    def _local_seq_len(self, seq_len: int) -> int:
        """Return the number of tokens, out of `seq_len`, that this rank holds between layers."""
        if self._cp_mesh is not None:
            num_ranks = self._cp_mesh.size()
            if seq_len % (2 * num_ranks):
                raise ValueError(
                    f"batch has {seq_len} tokens per row, but a pipeline over {num_ranks} context parallel ranks needs "
                    f"a multiple of {2 * num_ranks}. Pad the rows."
                )
            seq_len //= num_ranks
        if self._tp_mesh is not None and self._sequence_parallel:
            start, stop = shard_range(seq_len, self._tp_mesh.size(), self._tp_mesh.get_local_rank())
            seq_len = stop - start
        return seq_len

    # -- gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sync_gradients(self) -> None:
        if self._cp_mesh is not None and self.grad_sync:
            mesh = self._cp_mesh
            replicated_parameters = [
                p for p in self.parameters() if p.requires_grad and not has_distributed_experts(p, mesh)
            ]
            average_gradients(mesh, replicated_parameters, [p.grad is not None for p in replicated_parameters])
        self._add_tied_gradients()

    def _add_tied_gradients(self) -> None:
        """Sum the gradients of the parameter that the first and last stage share, in the same order on both."""
        last_stage = len(self.parts) - 1
        tied_parameters = self._tied_parameters()
        if not last_stage or not tied_parameters or not next(iter(tied_parameters.values())).requires_grad:
            return
        if len({id(p) for p in tied_parameters.values()}) < len(tied_parameters):
            return  # both stages are on this rank and share one parameter: autograd has summed both gradients
        grads = {
            stage_index: torch.zeros_like(p) if p.grad is None else p.grad for stage_index, p in tied_parameters.items()
        }
        if len(tied_parameters) == 1:
            ((stage_index, gradient),) = grads.items()
            peer_stage = last_stage - stage_index
            peer_gradient = torch.empty_like(_local_tensor(gradient), memory_format=torch.contiguous_format)
            peer = self._global_rank_of(peer_stage)
            operations = [
                dist.P2POp(dist.isend, _local_tensor(gradient).contiguous(), peer, group=self._group),
                dist.P2POp(dist.irecv, peer_gradient, peer, group=self._group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            total_gradient = _local_tensor(gradient).clone()
            total_gradient = total_gradient + peer_gradient if stage_index == 0 else peer_gradient + total_gradient
            _local_tensor(gradient).copy_(total_gradient)
        else:
            total_gradient = _local_tensor(grads[0]) + _local_tensor(grads[last_stage])
            for grad in grads.values():
                _local_tensor(grad).copy_(total_gradient)
        for stage_index, parameter in tied_parameters.items():
            parameter.grad = grads[stage_index]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients of all stages so that their total norm is at most `max_norm`; return the norm before that.

        All pipeline ranks must call it. A weight that two stages share counts once.
        `torch.nn.utils.clip_grad_norm_(parameters(), ...)` would scale each stage by its own norm.
        """
        unique_parameters = {id(p): p for name, p in self.named_parameters() if not self._is_second_copy(name)}
        squared_norm = grad_norm(unique_parameters.values()).square().to(self._pp_mesh.device_type)
        dist.all_reduce(squared_norm, group=self._group)
        total_norm = squared_norm.sqrt()
        clip_by_norm_(self.parameters(), max_norm, total_norm)
        return total_norm

    def _is_second_copy(self, name: str) -> bool:
        return self._tied_names is not None and len(self.parts) > 1 and name == self._tied_names[1]

    def recording(self) -> AbstractContextManager[list[Span]]:
        """Context manager that records the computations of this rank's stages with their times; see `draw`.

        Example:
            with pipe.recording() as spans:
                pipe.step(batch)
        """
        return self._recorder.recording()

    # -- methods of nn.Module -----------------------------------------------------------------------------------------

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages, by their names in the model.

        Args:
            remove_duplicate: yield a parameter of two names once, by its first name.
        """
        seen_ids = set[int]()
        for _, stage in sorted(self.stages.items()):
            for name, parameter in stage.model.named_parameters(remove_duplicate=remove_duplicate):
                if not remove_duplicate or id(parameter) not in seen_ids:
                    seen_ids.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages, by names in the model.

        Sharded tensors are DTensors, which torch.distributed.checkpoint can save, and load into any number of stages.
        """
        state: dict[str, Any] = {}
        for _, stage in sorted(self.stages.items()):
            state |= stage.model.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, or full tensors of the whole model, of which each rank keeps its shard.

        Raises:
            KeyError: a name is missing.
        """
        self._num_changes = None  # loading changes parameters, but is no step
        for _, stage in sorted(self.stages.items()):
            stage_state = stage.model.state_dict()
            missing_names = [name for name in stage_state if name not in state]
            if missing_names:
                raise KeyError(
                    f"state lacks {missing_names[:4]}{' ...' if len(missing_names) > 4 else ''}. Pass the state of the "
                    "whole model."
                )
            new_state = {name: state[name] for name in stage_state}
            if any(
                isinstance(stage_state[name], DTensor) and not isinstance(t, DTensor) for name, t in new_state.items()
            ):
                load_full_state_dict(stage.model, new_state)
            else:
                stage.model.load_state_dict(new_state)

    def save_pretrained(self, save_directory: Any, **keywords: Any) -> None:
        """Write the whole transformers model to a folder, for `from_pretrained` of transformers alone.

        All ranks of the mesh must call it; global rank 0 gathers the stages on the CPU one after the other, and writes.
        Before reading the folder on another rank, wait for rank 0 (torch.distributed.barrier()).

        Args:
            keywords: keywords of transformers' own `save_pretrained`, such as `max_shard_size`.

        Raises:
            TypeError: the model is not a transformers model.
        """
        if not self._is_hf:
            raise TypeError(
                f"{type(next(iter(self.stages.values())).model).__name__} is not a transformers model. Save "
                "state_dict() by torch.distributed.checkpoint."
            )
        state = self._gather_state()
        if dist.get_rank() == 0:
            model: Any = self.stages[min(self.stages)].model
            model.save_pretrained(save_directory, state_dict=state, **keywords)

    def _gather_state(self) -> dict[str, Tensor]:
        """Gather the whole model's state on the CPU of global rank 0; other ranks return {}."""
        global_ranks = dist.get_process_group_ranks(self._group)
        is_gathering = 0 in global_ranks  # this rank's pipeline ends at global rank 0
        stage_tensors: dict[int, dict[str, Tensor]] = {}
        for stage_index, stage in sorted(self.stages.items()):
            state = stage.model.state_dict(keep_vars=True)
            if stage_index and stage_index + 1 == len(self.parts) and self._tied_names is not None:
                del state[self._tied_names[1]]
            stage_tensors[stage_index] = gather_tensors(state, stage.model, keep_result=is_gathering, device="cpu")
        if not is_gathering:
            return {}
        descriptions = [
            [n, [(name, [*t.shape], str(t.dtype)) for name, t in stage_tensors[n].items()]] for n in stage_tensors
        ]
        group, device = resolve_group(self._group), self._pp_mesh.device_type
        rank_descriptions = exchange(group, "save_pretrained", descriptions)
        transport, collector_rank = torch_dist(group, device), global_ranks.index(0)
        full_state: dict[str, Tensor] = {}
        with transport.abort_scope("save_pretrained"):
            for stage_index, tensors in sorted(stage for rank in rank_descriptions for stage in rank):
                owner_rank = self._rank_by_stage[stage_index]
                for name, shape, dtype_name in tensors:
                    tensor = stage_tensors[stage_index].pop(name) if owner_rank == group.rank else None
                    if owner_rank != collector_rank:
                        dtype = getattr(torch, dtype_name.removeprefix("torch."))
                        tensor = _send_to_rank(transport, collector_rank, owner_rank, tensor, shape, dtype, device)
                    if tensor is not None:
                        full_state[name] = tensor
        if self._tied_names is not None and group.rank == collector_rank:
            full_state[self._tied_names[1]] = full_state[self._tied_names[0]]
        return full_state

    def train(self, mode: bool = True) -> Pipeline:
        """Set training mode on all stages, or eval mode."""
        for stage in self.stages.values():
            stage.train(mode)
        return self


def _send_to_rank(
    transport: TorchDist,
    destination_rank: int,
    owner_rank: int,
    tensor: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> Tensor | None:
    """Return `tensor` of rank `owner_rank` on the CPU of rank `destination_rank`; None on other ranks.

    Collective: if a rank fails, all others raise. dist.send and dist.recv would wait for the group's timeout.
    """
    rank, size = transport.rank, transport.world_size
    sent_bytes = torch.empty(0, dtype=torch.uint8, device=device)
    if tensor is not None:
        # As bytes, because gloo lacks some dtypes.
        sent_bytes = tensor.contiguous().view(-1).view(torch.uint8).to(device)
    send_sizes, recv_sizes = [0] * size, [0] * size
    send_sizes[destination_rank] = len(sent_bytes)
    recv_sizes[owner_rank] = math.prod(shape) * dtype.itemsize if rank == destination_rank else 0
    received_bytes = transport.all_to_all("save_pretrained", sent_bytes, send_sizes, recv_sizes).wait()
    return received_bytes.cpu().view(dtype).view(list(shape)) if rank == destination_rank else None


def _wait(work: dist.Work | None, peer: int, stage: str) -> None:
    """Wait for a message at most `FUSED_TP_TIMEOUT` seconds; the group's own timeout may be half an hour."""
    assert work is not None
    seconds = settings.timeout_seconds()
    try:
        work.wait(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise CollectiveTimeoutError(
            f"a message between stages was not exchanged with {stage} (global rank {peer}) within {seconds:g} s, or "
            f"that rank has failed: {str(error).splitlines()[0]} The pipeline's group is unusable now. Look for the "
            "first error in the logs of the other ranks, or raise FUSED_TP_TIMEOUT if they were only slow."
        ) from error


def reshards_after_forward(module: FSDPModule) -> bool:
    """True if FSDP2 frees the parameters of `module` between forward and backward; torch has no public attribute."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group._reshard_after_forward


def _concatenate(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]


def _local_tensor(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
