"""`parallelize(model, mesh)`: make an unmodified model tensor, sequence and context parallel in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn.optimizers import note_replaced, watch
from fused_tp.nn.sharding import plain_parameters_
from fused_tp.ops.arguments import check_bool
from fused_tp.parallelizing.checks.batch_check import BatchCheck
from fused_tp.parallelizing.checks.gradient_check import GradientCheck
from fused_tp.parallelizing.checks.loss_check import LossCheck
from fused_tp.parallelizing.checks.model_check import (
    ModuleCheck,
    check_equal_models,
    is_parallelized,
    remember_code,
)
from fused_tp.parallelizing.checks.parts_check import PartsCheck
from fused_tp.parallelizing.checks.sharding_check import check_verify, compared
from fused_tp.parallelizing.checks.step_check import StepCheck
from fused_tp.parallelizing.checks.unsharded import UnshardedModel
from fused_tp.parallelizing.expert_parallel import ExpertDistribution
from fused_tp.parallelizing.grad_sync import GRADIENT_SYNCS, GradientSync, no_sync
from fused_tp.parallelizing.hf.hf_model import (
    TransformersSequence,
    check_transformers_model,
    is_transformers_model,
    without_input_hooks,
)
from fused_tp.parallelizing.layers import Sharding, check_layers, distribute_experts, replicate_parameters, shard_layers
from fused_tp.parallelizing.marks import MARK, SHARDING
from fused_tp.parallelizing.mesh_dims import check_ulysses, find_dims, mesh_of_both, split_for_ulysses
from fused_tp.parallelizing.plain_model import PlainSequence, check_plain_model
from fused_tp.parallelizing.sequence_sharding import Parallelism, SequenceSharding, in_one_order
from fused_tp.parallelizing.shard_plan import (
    ShardingPlan,
    Style,
    check_experts,
    check_head_counts,
    check_none_distributed,
    plan_experts,
    resolve_plan,
    settle_between,
    warn_of_small_share,
)
from fused_tp.parallelizing.state_dict import check_buffers, materialize
from fused_tp.parallelizing.whole_blocks import find_blocks, join_behind, run_whole, split_before

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Keywords:
    """Keywords of `parallelize`, which documents them and has their defaults."""

    tp_dim: str
    cp_dim: str
    ep_dim: str | None
    ulysses_size: int
    plan: str | Mapping[str, Style]
    sequence_parallel: bool
    loss_parallel: bool
    grad_sync: bool
    parameters: str
    verify: str | bool | Mapping[str, Any]


@dataclass(frozen=True)
class _Options:
    """Request that `_check` has accepted.

    Attributes:
        mesh: mesh of the caller.
        parallelism: its TP and CP dims, and the options that forward passes read.
        ep_mesh: the dim over which whole experts are distributed: one of the TP and CP meshes, or a dim of its own.
        from_meta: the model has parameters on the meta device.
    """

    keywords: Keywords
    mesh: DeviceMesh
    parallelism: Parallelism
    ep_mesh: DeviceMesh | None
    from_meta: bool

    @property
    def meshes(self) -> list[DeviceMesh]:
        """TP and CP meshes: their ranks share one batch."""
        return [mesh for mesh in (self.parallelism.tp_mesh, self.parallelism.cp_mesh) if mesh is not None]

    @property
    def own_ep_mesh(self) -> DeviceMesh | None:
        """Mesh of expert parallel ranks with different batches."""
        return None if any(self.ep_mesh is one for one in self.meshes) else self.ep_mesh

    @property
    def sharing(self) -> list[DeviceMesh]:
        """Meshes whose ranks share the model."""
        return [*([] if self.own_ep_mesh is None else [self.own_ep_mesh]), *self.meshes]


@dataclass
class _Planned:
    """Plan of one model, made without changing it.

    Attributes:
        modules: style of each module and parameter.
        experts: experts to distribute, None for none.
        sequence: sharding of each forward pass.
        adapters: LoRA adapters in the model, None without PEFT.
    """

    modules: ShardingPlan
    experts: ExpertDistribution | None
    sequence: SequenceSharding
    adapters: Any

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Context manager in which modules have the names that the plan contains."""
        return self.adapters.taken_out() if self.adapters else nullcontext()


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    tp_dim: str = "tp",
    cp_dim: str = "cp",
    ep_dim: str | None = None,
    ulysses_size: int = 1,
    plan: str | Mapping[str, Style] = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    grad_sync: bool = True,
    parameters: str = "dtensor",
    verify: str | bool | Mapping[str, Any] = "auto",
) -> Model:
    """Shard `model` over the ranks of `mesh`, in place; its callers need not change.

    Every rank calls the model with the same full batch and full labels. The ranks compare these at the first calls and
    periodically (`FUSED_TP_CHECK_BATCH`; not under torch.compile), and RankMismatchError names any difference.
    `tp_dim` shards linear layers and heads (Megatron-LM, arXiv:1909.08053), `sequence_parallel` shards the activations
    between them along the sequence over the same ranks (arXiv:2205.05198), and `cp_dim` shards the tokens, with ring
    attention (arXiv:2310.01889) between the ranks.
    `ep_dim` distributes whole experts over ranks, to which tokens are sent.
    The loss is the mean over all tokens, the same value on every rank, and its gradients are those of the whole model.

    A call returns (tokens [batch, seq]):

    - without labels: logits [batch, seq, vocab] of the whole sequence on every rank, differentiable: if all ranks
      compute the same loss from them, its gradients are right.
    - with labels: the global loss. Under `cp_dim` the logits beside it cover this rank's tokens, in the order of
      `sequence_positions(seq, group=cp)`, for packed documents `(seq, group=cp, layout="balanced", cu_seqlens=...)`;
      under `loss_parallel` they cover this rank's shard of the vocabulary.
    - with a KV cache (transformers: past_key_values or use_cache=True, so `generate()`; others: see
      `fused_tp.parallelizing.plain_model`), or with fewer tokens than CP ranks: only `tp_dim` shards, and every CP rank
      computes the same. Exception: an empty transformers `DynamicCache`, passed in eval mode under torch.no_grad(), is
      sharded over the CP ranks, which share the attention over it.

    Packed documents (transformers): `position_ids` [1 or batch, seq] that do not count up by one, with use_cache=False
    and no attention_mask, or `cu_seq_lens_q`, delimit documents that do not see each other.

    Parameters become DTensors on mesh[tp_dim] under their old names, sharded from their current values, which the ranks
    compare. They move to the mesh's device. A model on the meta device gets memory for its shards only, filled with
    NaN: then call `load_full_state_dict`, torch.distributed.checkpoint or, with equal random states on all ranks,
    `init_weights()` or `apply(init)`, which set the same values as in one process. Tied weights stay one parameter.
    `gather_state_dict(model)` returns the original's state. `save_pretrained(folder)` of a transformers model, which
    all ranks must call, writes the original's files on global rank 0.

    Gradients: over the TP ranks they are always complete after backward. After the first backward passes and
    periodically (`FUSED_TP_CHECK_BATCH`) the TP ranks compare the gradients of replicated parameters, and ValueError
    names any difference. Over the CP ranks each rank's gradients are its own tokens' share of the global loss.
    `grad_sync=True` SUMS the shares in backward; so divide loss terms that do not depend on tokens, such as a penalty
    on parameters, by the CP size. `grad_sync=False` leaves the shares, each times the CP size, to FSDP2 or DDP over a
    mesh that includes the CP ranks, which takes the MEAN.

    With `grad_sync` backward sums a gradient as soon as it is computed, before DistributedDataParallel, optimizers and
    hooks registered after the first forward see it. The CP ranks compare which parameters they have used, at the same
    forward passes as above, and at every one of a model that has modules named "expert". Gradients of parameters that
    only some ranks used are summed at the end of backward, in this and all later steps; under DistributedDataParallel
    and with hooks on them this is refused. When backward ends, the ranks compare which gradients they have summed
    (RankMismatchError).

    Dropout and noise on activations that all TP ranks hold (the residual stream without `sequence_parallel`, routers)
    must be the same on them: seed the TP ranks equally. Activation checkpointing supports forward passes of different
    lengths before one backward. Submodules may be called by themselves; under `cp_dim` only in torch.no_grad().

    A PeftModel, or a model with LoRA adapters of PEFT, keeps its adapters: see `fused_tp.parallelizing.peft`, also for
    adding adapters to a model that is parallel already.

    `torch.compile(model)` traces a plain model as one graph if the model before `parallelize` is one. With `cp_dim` and
    `grad_sync`, sharding of inputs and gathering of outputs run eagerly, outside of the graph.

    Args:
        model: a transformers model, a PeftModel of LoRA adapters, or any nn.Module that keeps the contract of
            `fused_tp.parallelizing.plain_model`.
        mesh: DeviceMesh with named dims, at least one of `tp_dim`, `cp_dim` and `ep_dim`. Other dims, such as "dp", are
            not used.
        tp_dim, cp_dim: names of the dims; one that the mesh does not have counts as size 1. A dim of size 1 shards
            nothing and needs no plan.
        ep_dim: the dim over whose ranks whole experts are distributed: `tp_dim`, `cp_dim`, or another one, along which
            ranks have different batches, such as a data parallel dim. None: tensor parallel ranks hold a shard of each
            expert.
        ulysses_size: number of consecutive ranks of `cp_dim` that share the heads of a TP rank (DeepSpeed Ulysses,
            arXiv:2309.14509). These groups form a ring. The size of `cp_dim`: no ring; 1: a ring of all ranks.
        plan: "auto" reads the model's `tp_plan`; else a dict {module name: style}, where `*` matches one part of a
            name. A style is one of transformers' names ("colwise", "rowwise", "colwise_gather_output",
            "embedding_rowwise", "replicated_with_grad_allreduce", ...) or a torch `ParallelStyle`. A module that stays
            whole and sees only this rank's heads (a norm of q and k) needs "replicated_with_grad_allreduce". A
            parameter of one dim (attention sinks) takes "colwise"; parameters of experts take "packed_colwise",
            "colwise" or "rowwise", with "moe_tp_experts" for their module. Packed layers of two or three consecutive
            parts (gate and up; q, k and v) take "packed_colwise" and "packed_colwise_3".
        sequence_parallel: also shard the residual stream and the norms, which saves their memory; any sequence length.
            Blocks that need the whole sequence, or may need it (state spaces, latent attention, experts that are not
            transformers' own), get the tokens of all TP ranks and return this rank's.
        loss_parallel: leave the logits sharded by vocabulary and compute the loss over the ranks.
        grad_sync: see above.
        parameters: "dtensor" as above; "plain": each is a plain tensor with this rank's shard, for code that does not
            support DTensors (DeepSpeed, Megatron-Core, DistributedDataParallel). See `fused_tp.nn.plain_parameters_`.
            Sum a norm over all gradients over the TP ranks then: see `fused_tp.nn.clip_grad_norm_`. Optimizers must be
            elementwise, and DistributedDataParallel must be over the data parallel ranks only; else ValueError is
            raised before the first step. A penalty on norms of weights covers each rank's shard only, undetected.
        verify: compare the sharded model with the whole one: both compute a few pseudo-random tokens without gradients,
            in the model's current mode, or without dropout or in eval mode if it draws random numbers. "auto": if the
            whole model has values, accepts such tokens, and computes them within two seconds; else a log line gives the
            reason. True: raise if it cannot be compared. A dict: keyword arguments of forward to compare on. Then
            the first calls with gradients are compared, on their own arguments: each rank gathers the weights
            temporarily, and computes outputs and gradients as before sharding, with later changes of the model. This
            costs about a step of the whole model; a log line gives the reason if it is left out. Both comparisons leave
            random states, modes, buffers and gradients unchanged. False: compare neither.

    Raises:
        TypeError: an argument has the wrong type; the model is sharded already.
        RankMismatchError: the ranks have made different models, or initialised them from different random states.
        ValueError: an unsupported request, before anything is changed: a mesh without these dims, TP sizes that do not
            divide the heads, a style or module that the plan cannot contain, sequence sharding that the model does not
            support. Or the sharded model differs from the whole one (`verify`), also in the first calls with
            gradients; do not use it then.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "tp"))
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16)
        >>> parallelize(model, mesh, sequence_parallel=True, loss_parallel=True)
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    keywords = Keywords(
        tp_dim=tp_dim,
        cp_dim=cp_dim,
        ep_dim=ep_dim,
        ulysses_size=ulysses_size,
        plan=plan,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        grad_sync=grad_sync,
        parameters=parameters,
        verify=verify,
    )
    peft = _peft()
    # The layers of a PeftModel, with their adapters, are in the model inside.
    base: nn.Module = peft.base_model(model) if peft and isinstance(model, peft.PeftModel) else model
    options = _check(base, mesh, keywords)
    tp_mesh, cp_mesh = options.parallelism.tp_mesh, options.parallelism.cp_mesh
    with compared(base, verify, options.sharing, tp=tp_mesh, cp=cp_mesh) as outcome:
        # Expert parallel ranks of their own have other batches, so that no rank can compute the whole step.
        can_replay = verify is not False and options.meshes and options.own_ep_mesh is None
        unsharded = UnshardedModel(base) if can_replay else None
        planned = _plan(base, options)
        sharding = _apply(base, options, planned)
        _add_hooks(base, options, planned.sequence, sharding, unsharded)
    remember_code(base)
    sequence = planned.sequence
    sequence.attends = sequence.attended if outcome.right else sequence.attention_layers(base)
    if peft and base is not model:
        users: Any = model
        users.save_pretrained = partial(peft.save_pretrained, model)
    return model


def _check(model: nn.Module, mesh: DeviceMesh, keywords: Keywords) -> _Options:
    """Check the request without changing anything, except what depends on names in the model (`_plan`)."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    asked = {key: getattr(keywords, key) for key in ("sequence_parallel", "loss_parallel")}
    check_bool(**asked, grad_sync=keywords.grad_sync)
    if keywords.parameters not in ("dtensor", "plain"):
        raise ValueError(f"parameters is {keywords.parameters!r}; it must be 'dtensor' or 'plain'.")
    check_verify(keywords.verify)
    tp_mesh, cp_mesh, ep_mesh = find_dims(mesh, keywords.tp_dim, keywords.cp_dim, keywords.ep_dim)
    if keywords.parameters == "plain" and ep_mesh is not None and ep_mesh is not tp_mesh:
        raise ValueError(
            f"parameters='plain' with experts distributed over ep_dim={keywords.ep_dim!r}: what averages gradients "
            "over these ranks would average those of different experts. Distribute them over tensor parallel ranks, or "
            "have DTensors."
        )
    from_meta = any(parameter.is_meta for parameter in model.parameters())
    parallelism = Parallelism(tp_mesh, cp_mesh, False, False, keywords.grad_sync)
    options = _Options(keywords, mesh, parallelism, ep_mesh, from_meta)
    check_equal_models(model, options.sharing)  # first, as later checks may raise on some ranks only
    if tp_mesh is None and any(asked.values()):
        if keywords.tp_dim not in (mesh.mesh_dim_names or ()):
            first = next(key for key, value in asked.items() if value)
            raise ValueError(f"{first}=True needs tensor parallel ranks, and mesh has no dim {keywords.tp_dim!r}.")
        asked = dict.fromkeys(asked, False)  # nothing to shard over one rank
    _check_unwrapped(model)
    size = keywords.ulysses_size
    check_ulysses(model, size, *(1 if one is None else one.size() for one in (cp_mesh, tp_mesh)))
    ulysses = None if cp_mesh is None or size == 1 else split_for_ulysses(cp_mesh, size)
    return replace(options, parallelism=replace(parallelism, **asked, ulysses=ulysses))


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that wrappers hold, or that is parallel already."""
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # before its import nothing has been compiled
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "model is in a DistributedDataParallel, which holds the parameters that parallelize replaces; "
                "parallelize the model inside, and wrap that."
            )
        if compiled is not None and isinstance(module, compiled.OptimizedModule):
            raise TypeError(
                "model is, or holds, what torch.compile has returned, in which names differ from the plan's. "
                "Parallelize the model first, and compile it after: torch.compile(parallelize(model, mesh))."
            )
    if is_parallelized(model):
        raise TypeError("model, or a part of it, has been parallelized already; start from the whole model.")


def _plan(model: nn.Module, options: _Options) -> _Planned:
    """Plan the sharding of `model`, and check the plan in full, before the first module is changed."""
    parallelism, asked = options.parallelism, options.keywords.plan
    tp_mesh = parallelism.tp_mesh
    peft = _peft()
    adapters = peft.Adapters(model) if peft else None
    hf = is_transformers_model(model)
    # Without TP ranks the model's own plan is used to locate the attention of a plain model; a transformers model does
    # not need it.
    has_plan = asked != "auto" or (bool(getattr(model, "tp_plan", None)) and not hf)
    ranks = 1 if tp_mesh is None else tp_mesh.size()
    sequence: SequenceSharding
    with adapters.taken_out() if adapters else nullcontext():
        plan = resolve_plan(model, asked) if tp_mesh is not None or has_plan else ShardingPlan()
        experts = _plan_experts(model, options, plan)
        if tp_mesh is not None:
            plan = settle_between(model, plan, shards_logits=parallelism.loss_parallel)
            check_head_counts(model, plan.modules, tp_mesh.size())
            check_experts(model, plan)
        with without_input_hooks(model):
            check_layers(model, plan, ranks)
        check_buffers(model, hf=hf)
        if hf:  # before `find_blocks`, which may ask for a style that would not help
            check_transformers_model(model, plan.modules, parallelism)
        rows_travel = experts is not None and experts.mesh is not tp_mesh
        blocks = find_blocks(model, plan, rows_travel=rows_travel) if parallelism.sequence_parallel else ([], [])
        if hf:
            sequence = TransformersSequence(model, parallelism)
        else:
            check_plain_model(model, plan.modules, parallelism)
            sequence = PlainSequence(model, parallelism, plan.modules)
        sequence.whole_blocks, sequence.expert_blocks = blocks
        if adapters:
            adapters.check(sequence.whole_blocks)
    if adapters:
        check_layers(model, adapters.plan(plan), ranks)
    if parallelism.sequence_parallel:
        sequence.in_front, sequence.splits = frozenset(plan.before), bool(plan.splits)
        sequence.joins, sequence.behind = plan.joins, plan.behind
    return _Planned(plan, experts, sequence, adapters)


def _plan_experts(model: nn.Module, options: _Options, plan: ShardingPlan) -> ExpertDistribution | None:
    """Distribution of whole experts over `ep_mesh`, for which `plan` is adapted; None without these ranks."""
    ep_dim, ep_mesh, tp_mesh = options.keywords.ep_dim, options.ep_mesh, options.parallelism.tp_mesh
    if ep_mesh is None:
        if ep_dim is None or tp_mesh is not None:
            check_none_distributed(plan, ep_dim)
        return None
    over_tp = ep_mesh is tp_mesh
    names = plan_experts(model, plan, options.keywords.plan, ep_mesh.size(), whole=over_tp or tp_mesh is None)
    both = None if over_tp or tp_mesh is None else mesh_of_both(options.mesh, str(ep_dim), tp_mesh)
    factor = 1.0 if over_tp else 1 / ep_mesh.size()
    return ExpertDistribution(frozenset(names), ep_mesh, tp_mesh, both, factor)


def _apply(model: nn.Module, options: _Options, planned: _Planned) -> Sharding | None:
    """Replace layers and parameters as planned. Return the sharding over TP ranks, None without such ranks."""
    plan, experts, sequence, adapters = planned.modules, planned.experts, planned.sequence, planned.adapters
    tp_mesh, plain = options.parallelism.tp_mesh, options.keywords.parameters == "plain"
    sequence.prepare(model)
    sharding: Sharding | None = None
    before = WeakIdKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
    input_hooks = ExitStack()
    input_hooks.enter_context(without_input_hooks(model))
    if tp_mesh is not None:
        memo = WeakIdKeyDictionary()
        config = getattr(model, "config", None)
        sharding = Sharding(plan, tp_mesh, options.meshes, sequence, config, experts, plain=plain)
        with planned.without_adapters():
            warn_of_small_share(model, plan)
            shard_layers(model, sharding, memo)
            replicate_parameters(model, sharding, memo)
            for name in sequence.whole_blocks:
                run_whole(model.get_submodule(name), tp_mesh, sequence, parts=plan.parts.get(name, ()))
            for name, arguments in plan.splits.items() if options.parallelism.sequence_parallel else ():
                split_before(model.get_submodule(name), arguments, tp_mesh, sequence)
            if sequence.joins:
                join_behind(model.get_submodule(sequence.joins), tp_mesh, sequence)
        if adapters:
            adapters.shard(sharding, memo)
    elif experts is not None:
        distribute_experts(model, experts)
        # Make all parameters DTensors on one mesh: clipping and optimizers do not accept two kinds at once. But with
        # grad_sync=False, FSDP2 shards the other parameters over these ranks itself, and needs plain ones.
        # Plan entries of other modules apply to tensor parallel ranks only.
        for name in experts.names:
            module = model.get_submodule(name)
            whole = ShardingPlan(parameters=dict.fromkeys(module._parameters, "grouped_gemm"))
            own = Sharding(whole, experts.mesh, options.meshes, sequence)
            replicate_parameters(module, own, WeakIdKeyDictionary())
        if options.parallelism.grad_sync:
            own = Sharding(ShardingPlan(), experts.mesh, options.meshes, sequence)
            replicate_parameters(model, own, WeakIdKeyDictionary())
    note_replaced(before, model)
    materialize(model, options.mesh.device_type, hf=is_transformers_model(model))
    if plain:
        plain_parameters_(model)
    sequence.adapt(model)
    input_hooks.close()
    return sharding


def _add_hooks(
    model: nn.Module,
    options: _Options,
    sequence: SequenceSharding,
    sharding: Sharding | None,
    unsharded: UnshardedModel | None,
) -> None:
    """Register the hooks that shard each forward pass, check it, and sum gradients.

    Hooks that are registered later with `prepend` run earlier: changed parameters are refused first, then batches are
    compared, then steps replayed, then the sequence is sharded.
    """
    parallelism, meshes = options.parallelism, options.meshes
    if parallelism.shards_sequence or parallelism.computes_loss:
        sequence.install(model)
    if unsharded is not None:
        step = StepCheck(sequence, meshes, unsharded)
        loss = LossCheck(step)
        model.register_forward_pre_hook(loss.before, with_kwargs=True, prepend=True)
        model.register_forward_pre_hook(step, with_kwargs=True, prepend=True)
        model.register_forward_hook(loss.after, with_kwargs=True)
    if meshes:
        changes = ModuleCheck(parallelism, model, from_meta=options.from_meta)
        model.register_forward_pre_hook(changes.refuse, prepend=True)
        model.register_forward_pre_hook(BatchCheck(meshes), with_kwargs=True, prepend=True)
        in_one_order(model._forward_pre_hooks)
        model.register_forward_pre_hook(changes.name_changes)
    shared_over = [*meshes, *([] if options.own_ep_mesh is None else [options.own_ep_mesh])]
    if shared_over:
        watch(model, shared_over)
        model.register_forward_pre_hook(PartsCheck(shared_over, parallelism.tp_mesh), prepend=True)
        in_one_order(model._forward_pre_hooks)
    if parallelism.tp_mesh is not None:
        model.register_forward_hook(GradientCheck(parallelism.tp_mesh))
    syncs = [] if sequence.sync is None else [sequence.sync]
    if options.own_ep_mesh is not None and parallelism.grad_sync:
        syncs.append(GradientSync(options.own_ep_mesh, mean=True))
        model.register_forward_pre_hook(_Watch(syncs[-1]))
    setattr(model, GRADIENT_SYNCS, syncs)
    users: Any = model
    users.no_sync = partial(no_sync, model)
    for module in model.modules():
        if next(module.parameters(), None) is not None:  # models may share others, such as OpenAI GPT's activations
            setattr(module, MARK, parallelism)
    setattr(model, SHARDING, sharding)
    if unsharded is not None:
        unsharded.note_sharded(model)


def _peft() -> ModuleType | None:
    """The integration of PEFT, or None if PEFT has not been imported: then no model has adapters."""
    if "peft" not in sys.modules:
        return None
    from fused_tp.parallelizing import peft

    return peft


class _Watch:
    """Forward pre-hook that makes backward average gradients over expert parallel ranks with different batches."""

    def __init__(self, sync: GradientSync) -> None:
        self.sync = sync

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            self.sync.watch(model)
