"""`parallelize(model, mesh)`: make an unmodified model tensor, sequence and context parallel in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn.optimizers import call_before_steps, record_replaced_parameters, watch_model
from fused_tp.nn.sharding import packed_dims, plain_parameters_
from fused_tp.ops.arguments import check_bool
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE, SHARDING_ATTRIBUTE
from fused_tp.parallelizing.checks.batch_check import BatchCheck
from fused_tp.parallelizing.checks.cache_reads import watch_cache_reads
from fused_tp.parallelizing.checks.gradient_check import GradientCheck
from fused_tp.parallelizing.checks.loss_check import LossCheck
from fused_tp.parallelizing.checks.model_check import (
    ModuleCheck,
    allow_warnings,
    check_equal_models,
    is_parallelized,
    remember_code,
    warn_once,
)
from fused_tp.parallelizing.checks.shard_check import ShardCheck
from fused_tp.parallelizing.checks.sharding_check import check_verify, compare_sharding
from fused_tp.parallelizing.checks.step_check import StepCheck
from fused_tp.parallelizing.checks.unsharded import UnshardedModel
from fused_tp.parallelizing.expert_parallel import ExpertDistribution
from fused_tp.parallelizing.grad_sync import GRADIENT_SYNCS_ATTRIBUTE, GradientSync, no_sync
from fused_tp.parallelizing.head_layout import HeadLayout
from fused_tp.parallelizing.hf.hf_model import (
    TransformersSequenceSharding,
    check_transformers_model,
    is_transformers_model,
    without_input_hooks,
)
from fused_tp.parallelizing.layers import Sharding, check_layers, distribute_experts, replicate_parameters, shard_layers
from fused_tp.parallelizing.mesh_dims import check_ulysses, expert_tp_mesh, find_dim_meshes, split_for_ulysses
from fused_tp.parallelizing.plain_model import PlainSequenceSharding, check_plain_model
from fused_tp.parallelizing.sequence_sharding import Parallelism, SequenceSharding, restore_hook_order
from fused_tp.parallelizing.shard_plan import (
    ShardingPlan,
    Style,
    check_experts,
    check_experts_not_distributed,
    choose_intermediate_styles,
    plan_experts,
    repeat_key_value_heads,
    resolve_plan,
    warn_of_small_sharded_share,
)
from fused_tp.parallelizing.state_dict import check_buffers, materialize
from fused_tp.parallelizing.uneven_heads import share_uneven_heads
from fused_tp.parallelizing.whole_blocks import (
    find_blocks,
    gather_output_after,
    run_on_full_sequence,
    split_arguments_before,
)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParallelizeKeywords:
    """Keyword arguments of `parallelize`, as passed; see its docstring."""

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
class _CheckedArguments:
    """Arguments of `parallelize` that `_check_arguments` has accepted.

    Attributes:
        keywords: the arguments.
        mesh: mesh of the caller.
        parallelism: TP and CP meshes, and the options that forward passes read.
        ep_mesh: mesh over which unsharded experts are distributed: `parallelism.tp_mesh`, `parallelism.cp_mesh` or the
            mesh of a separate dim; None without distribution.
        is_from_meta: the model has parameters on the meta device.
    """

    keywords: ParallelizeKeywords
    mesh: DeviceMesh
    parallelism: Parallelism
    ep_mesh: DeviceMesh | None
    is_from_meta: bool

    @property
    def meshes(self) -> list[DeviceMesh]:
        """TP and CP meshes, whose ranks share one batch."""
        return [mesh for mesh in (self.parallelism.tp_mesh, self.parallelism.cp_mesh) if mesh is not None]

    @property
    def separate_ep_mesh(self) -> DeviceMesh | None:
        """Mesh of a separate expert parallel dim, whose ranks have different batches, or None."""
        return None if any(self.ep_mesh is mesh for mesh in self.meshes) else self.ep_mesh

    @property
    def model_meshes(self) -> list[DeviceMesh]:
        """Meshes whose ranks share the model: TP, CP and a separate expert parallel dim."""
        return [*([] if self.separate_ep_mesh is None else [self.separate_ep_mesh]), *self.meshes]


@dataclass
class _ModelPlan:
    """Complete plan for one model, made before the model is changed.

    Attributes:
        sharding_plan: style of each module and parameter.
        expert_distribution: experts to distribute, or None.
        sequence: sharding of each forward pass.
        adapters: LoRA adapters in the model, None without PEFT.
    """

    sharding_plan: ShardingPlan
    expert_distribution: ExpertDistribution | None
    sequence: SequenceSharding
    adapters: Any

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Context manager in which LoRA wrappers are removed, so that modules have the names in the plan."""
        return self.adapters.without_wrappers() if self.adapters else nullcontext()


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
    """Shard `model` over the ranks of `mesh`, in place; code that calls the model need not change.

    Every rank calls the model with the same full batch and full labels. The ranks compare these at the first calls and
    periodically (`FUSED_TP_CHECK_BATCH`; not under torch.compile), and RankMismatchError names any difference.
    `tp_dim` shards linear layers and heads (Megatron-LM, arXiv:1909.08053), `sequence_parallel` shards the activations
    between them along the sequence over the same ranks (arXiv:2205.05198), and `cp_dim` shards the tokens, with ring
    attention (arXiv:2310.01889) between the ranks.
    `ep_dim` distributes experts over ranks and sends tokens to them.
    The loss is the mean over all tokens, the same value on every rank. Its gradients equal those of the unsharded
    model.

    A call returns (tokens [batch, seq]):

    - without labels: logits [batch, seq, vocab] of the full sequence on every rank. They are differentiable: if all
      ranks compute the same loss from them, the gradients are correct.
    - with labels: the global loss. With `cp_dim`, the logits that are returned with it cover this rank's tokens, in the
      order of `sequence_positions(seq, group=cp)`, for packed documents
      `(seq, group=cp, layout="balanced", cu_seqlens=...)`. With `loss_parallel` they cover this rank's shard of the
      vocabulary. If they are more than 32 MiB and a gradient is needed, the loss is computed without them
      (`linear_cross_entropy`), and they are computed when they are read, which must be before the optimizer's step.
    - with a KV cache (transformers: past_key_values or use_cache=True, as in `generate()`; other models: see
      `fused_tp.parallelizing.plain_model`), or with fewer tokens than CP ranks: only `tp_dim` shards, and every CP rank
      computes the same. Exception: an empty transformers `DynamicCache`, passed in eval mode under torch.no_grad(), is
      sharded over the CP ranks, which then also share the work of attention.

    Packed documents (transformers) are delimited by `cu_seq_lens_q`, or by `position_ids` [1 or batch, seq] that do not
    increase by one everywhere, with use_cache=False and no attention_mask. Documents do not attend to each other.

    Parameters become DTensors on mesh[tp_dim] under their old names, sharded from their current values, which the ranks
    compare. They move to the mesh's device. For a model on the meta device, memory is allocated for the shards only and
    filled with NaN. Then call `load_full_state_dict`, torch.distributed.checkpoint or, with equal random states on all
    ranks, `init_weights()` or `apply(init)`, which set the same values as in one process. Tied weights stay one
    parameter. `gather_state_dict(model)` returns the unsharded model's state. `save_pretrained(folder)` of a
    transformers model writes the unsharded model's files on global rank 0; all ranks must call it.

    Gradients: over the TP ranks they are always complete after backward. After the first backward passes and
    periodically (`FUSED_TP_CHECK_BATCH`) the TP ranks compare the gradients of replicated parameters, and ValueError
    names any difference. On each CP rank, gradients come from the rank's own tokens. `grad_sync=True` SUMS them over
    the CP ranks in backward; so divide loss terms that do not depend on tokens, such as a penalty on parameters, by the
    CP size. `grad_sync=False` multiplies them by the CP size and leaves the reduction to FSDP2 or DDP over a mesh that
    includes the CP ranks, which takes the MEAN.

    With `grad_sync` backward sums a gradient as soon as it is computed, before DistributedDataParallel, optimizers and
    hooks registered after `parallelize` see it. The CP ranks compare which parameters they have used, at the same
    forward passes at which they compare batches, or at every forward pass if a module's name contains "expert".
    Gradients of parameters that only some ranks used are summed at the end of backward, in this and all later steps;
    under DistributedDataParallel, or with hooks on them, ValueError is raised. When backward ends, the ranks compare
    which gradients they have summed (RankMismatchError).

    Dropout and noise on activations that all TP ranks hold (the residual stream without `sequence_parallel`, routers)
    must be the same on all TP ranks: seed them equally. Activation checkpointing supports forward passes of different
    lengths before one backward. Submodules may be called directly; with `cp_dim` only under torch.no_grad().

    A PeftModel, or a model with LoRA adapters of PEFT, keeps its adapters. See `fused_tp.parallelizing.peft`, also for
    adding adapters to a model that is parallel already.

    `torch.compile(model)` traces a plain model as one graph if it could do so before `parallelize`. With `cp_dim` and
    `grad_sync`, sharding of inputs and gathering of outputs run eagerly, outside of the graph.

    Args:
        model: a transformers model, a PeftModel of LoRA adapters, or any nn.Module that keeps the contract of
            `fused_tp.parallelizing.plain_model`. Layers of torchao's `convert_to_float8_training` keep their recipe.
        mesh: DeviceMesh with named dims, at least one of `tp_dim`, `cp_dim` and `ep_dim`. Other dims, such as "dp", are
            not used.
        tp_dim, cp_dim: names of the dims; a dim that the mesh does not have counts as size 1. A dim of size 1 shards
            nothing and needs no plan.
        ep_dim: dim over which unsharded experts are distributed: `tp_dim`, `cp_dim`, or another dim along which ranks
            have different batches, such as a data parallel dim. None: tensor parallel ranks hold a shard of each
            expert.
        ulysses_size: number of consecutive ranks of `cp_dim` that share the heads of a TP rank (DeepSpeed Ulysses,
            arXiv:2309.14509). These groups form a ring. The size of `cp_dim`: no ring; 1: a ring of all ranks.
        plan: "auto" reads the model's `tp_plan`; else a dict {module name: style}, where `*` matches one component of a
            name. A style is one of transformers' names ("colwise", "rowwise", "colwise_gather_output",
            "embedding_rowwise", "replicated_with_grad_allreduce", ...) or a torch `ParallelStyle`. Use
            "replicated_with_grad_allreduce" for an unsharded module that sees only this rank's heads (a norm of q and
            k), "colwise" for a 1-D parameter (attention sinks), "moe_tp_experts" for a module of experts with
            "packed_colwise", "colwise" or "rowwise" for its parameters, and "packed_colwise" or "packed_colwise_3" for
            layers that pack two or three projections one after the other (gate and up; q, k and v).
        sequence_parallel: also shard the residual stream and the norms, which saves memory. Any sequence length is
            supported. Blocks that need the full sequence, or may need it (state spaces, latent attention, experts of
            classes outside transformers), get the tokens of all TP ranks and return this rank's.
        loss_parallel: leave the logits sharded by vocabulary and compute the loss over the ranks.
        grad_sync: see above.
        parameters: "dtensor" as above; "plain": each is a plain tensor with this rank's shard, for code that does not
            support DTensors (DeepSpeed, Megatron-Core, DistributedDataParallel). See `fused_tp.nn.plain_parameters_`.
            A gradient norm must then be summed over the TP ranks: use `fused_tp.nn.clip_grad_norm_`. Optimizers must be
            elementwise, and DistributedDataParallel must be over the data parallel ranks only; else ValueError is
            raised before the first step. Not detected: a loss term with norms of weights, which covers each rank's
            shard only.
        verify: compare the sharded model with the unsharded one, in two ways. First, both compute a few pseudo-random
            tokens without gradients, in the model's current mode, or without dropout or in eval mode if the model draws
            random numbers. Second, the first 2, 10th, 100th, ... calls with gradients are compared on their own
            arguments, and so are calls with or without gradients after a change: of arguments, sizes, modes, flags and
            numbers in modules, hooks, functions. Each rank temporarily gathers the weights, and computes outputs and
            gradients as before sharding, with later changes of the model, which costs about one step of the unsharded
            model. Both compare 16-bit models of up to 32 million parameters once more in fp32, and leave random states,
            modes, buffers, gradients and variables of the caller's code unchanged. "auto": make the first comparison if
            the unsharded model has values, accepts such tokens, and computes them within two seconds. If a comparison
            is skipped, a log line states the reason. True: raise if the first comparison is not possible. A dict:
            keyword arguments of forward for the first comparison. False: skip both.

    Raises:
        TypeError: an argument has the wrong type; the model is sharded already.
        RankMismatchError: the ranks have created different models, or initialised them from different random states.
        ValueError: an unsupported argument, before anything is changed: a mesh without these dims, more TP ranks than
            heads, an unsupported style or module in the plan, sequence sharding that the model does not
            support. Or the sharded model differs from the unsharded one (`verify`), also in the first calls with
            gradients; do not use the model then.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "tp"))
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16)
        >>> parallelize(model, mesh, sequence_parallel=True, loss_parallel=True)
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    keywords = ParallelizeKeywords(
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
    peft = _peft_module()
    # A PeftModel wraps the model that has the layers and their adapters.
    base: nn.Module = peft.base_model(model) if peft and isinstance(model, peft.PeftModel) else model
    options = _check_arguments(base, mesh, keywords)
    tp_mesh, cp_mesh = options.parallelism.tp_mesh, options.parallelism.cp_mesh
    model_plan = _make_plan(base, options)
    with compare_sharding(base, verify, options.model_meshes, tp=tp_mesh, cp=cp_mesh) as outcome:
        # Along a separate expert parallel dim ranks have different batches, so no rank can compute the full step alone.
        can_replay = verify is not False and options.meshes and options.separate_ep_mesh is None
        unsharded_model = UnshardedModel(base) if can_replay else None
        sharding = _apply_plan(base, options, model_plan)
        _add_hooks(base, options, model_plan.sequence, sharding, unsharded_model)
    remember_code(base)
    sequence = model_plan.sequence
    sequence.min_attention_calls = (
        sequence.attention_calls if outcome.is_equal else sequence.count_attention_layers(base)
    )
    if peft and base is not model:
        untyped_model: Any = model
        untyped_model.save_pretrained = partial(peft.save_pretrained, model)
    return model


def _check_arguments(model: nn.Module, mesh: DeviceMesh, keywords: ParallelizeKeywords) -> _CheckedArguments:
    """Check the arguments of `parallelize` without changing anything; `_make_plan` checks those that refer to names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    requested_options = {key: getattr(keywords, key) for key in ("sequence_parallel", "loss_parallel")}
    check_bool(**requested_options, grad_sync=keywords.grad_sync)
    if keywords.parameters not in ("dtensor", "plain"):
        raise ValueError(f"parameters must be 'dtensor' or 'plain', got {keywords.parameters!r}.")
    check_verify(keywords.verify)
    tp_mesh, cp_mesh, ep_mesh = find_dim_meshes(mesh, keywords.tp_dim, keywords.cp_dim, keywords.ep_dim)
    if keywords.parameters == "plain" and ep_mesh is not None and ep_mesh is not tp_mesh:
        raise ValueError(
            f"parameters='plain' is not supported with experts distributed over ep_dim={keywords.ep_dim!r}: a wrapper "
            "that averages gradients over these ranks would average those of different experts. Use "
            f"ep_dim={keywords.tp_dim!r}, or parameters='dtensor'."
        )
    is_from_meta = any(parameter.is_meta for parameter in model.parameters())
    parallelism = Parallelism(tp_mesh, cp_mesh, False, False, keywords.grad_sync)
    options = _CheckedArguments(keywords, mesh, parallelism, ep_mesh, is_from_meta)
    allow_warnings()
    check_equal_models(model, options.model_meshes)  # first, as later checks may raise on some ranks only
    if tp_mesh is None and any(requested_options.values()):
        if keywords.tp_dim not in (mesh.mesh_dim_names or ()):
            first_option = next(key for key, value in requested_options.items() if value)
            raise ValueError(
                f"{first_option}=True needs tensor parallel ranks, but mesh has no dim {keywords.tp_dim!r}. Add it, or "
                "pass its name as tp_dim."
            )
        requested_options = dict.fromkeys(requested_options, False)  # nothing to shard over one rank
    _check_unwrapped(model)
    size = keywords.ulysses_size
    check_ulysses(model, size, *(1 if dim_mesh is None else dim_mesh.size() for dim_mesh in (cp_mesh, tp_mesh)))
    ulysses_meshes = None if cp_mesh is None or size == 1 else split_for_ulysses(cp_mesh, size)
    return replace(options, parallelism=replace(parallelism, **requested_options, ulysses_meshes=ulysses_meshes))


def _check_unwrapped(model: nn.Module) -> None:
    """Raise TypeError if `model` is wrapped by DistributedDataParallel or torch.compile, or parallel already."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # if it was never imported, nothing has been compiled
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "model is wrapped by DistributedDataParallel, which holds the parameters that parallelize replaces. "
                "Call parallelize on the model inside, then wrap the result."
            )
        if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
            raise TypeError(
                "model is, or contains, a module returned by torch.compile, whose names differ from those in the plan. "
                "Call parallelize before torch.compile: torch.compile(parallelize(model, mesh))."
            )
    if is_parallelized(model):
        raise TypeError("model, or a submodule of it, is parallel already. Pass an unsharded model.")


def _make_plan(model: nn.Module, options: _CheckedArguments) -> _ModelPlan:
    """Plan the sharding of `model`, and check the plan completely, before the first module is changed."""
    parallelism, requested_plan = options.parallelism, options.keywords.plan
    tp_mesh = parallelism.tp_mesh
    peft = _peft_module()
    adapters = peft.Adapters(model) if peft else None
    is_hf = is_transformers_model(model)
    # Without TP ranks, the plan is only used to locate the attention modules of a plain model; a transformers model
    # does not need it.
    has_plan = requested_plan != "auto" or (bool(getattr(model, "tp_plan", None)) and not is_hf)
    num_ranks = 1 if tp_mesh is None else tp_mesh.size()
    sequence: SequenceSharding
    with adapters.without_wrappers() if adapters else nullcontext():
        plan = resolve_plan(model, requested_plan) if tp_mesh is not None or has_plan else ShardingPlan()
        expert_distribution = _plan_experts(model, options, plan)
        if tp_mesh is not None:
            plan = repeat_key_value_heads(model, plan, num_ranks)
            plan = share_uneven_heads(model, plan, num_ranks)
            plan = choose_intermediate_styles(model, plan, shards_logits=parallelism.loss_parallel)
            check_experts(model, plan)
        with without_input_hooks(model):
            check_layers(model, plan, num_ranks)
        check_buffers(model, is_hf=is_hf)
        _check_embeddings(model, parallelism)
        if is_hf:  # before `find_blocks`, whose message may request a style for a model that is not supported at all
            check_transformers_model(model, plan.modules, parallelism)
        exchanges_rows = expert_distribution is not None and expert_distribution.mesh is not tp_mesh
        block_names = (
            find_blocks(model, plan, exchanges_expert_rows=exchanges_rows)
            if parallelism.sequence_parallel
            else ([], [])
        )
        if is_hf:
            sequence = TransformersSequenceSharding(model, parallelism)
        else:
            check_plain_model(model, plan.modules, parallelism)
            sequence = PlainSequenceSharding(model, parallelism, plan.modules)
        sequence.whole_blocks, sequence.expert_blocks = block_names
        sequence.uneven_heads = plan.uneven_heads
        if adapters:
            adapters.check(sequence.whole_blocks)
    if adapters:
        check_layers(model, adapters.make_plan(plan), num_ranks)
    if parallelism.sequence_parallel:
        sequence.modules_before_layers, sequence.has_full_arguments = (
            frozenset(plan.modules_before_layers),
            bool(plan.full_arguments),
        )
        sequence.gather_after, sequence.modules_after_layers = plan.gather_after, plan.modules_after_layers
    return _ModelPlan(plan, expert_distribution, sequence, adapters)


def _check_embeddings(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise ValueError for an embedding whose weight or gradient depends on the tokens of all ranks."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        path = f"{name!r} ({type(module).__name__})"
        if module.sparse:
            raise ValueError(
                f"{path} has sparse=True, but parallelize and its comparison support dense gradients only. Set "
                f"model.get_submodule({name!r}).sparse = False, and use an optimizer for dense gradients."
            )
        if parallelism.shards_sequence and module.max_norm is not None:
            raise ValueError(
                f"{path} has max_norm={module.max_norm:g}: its forward scales the rows of its tokens in place, and "
                "ranks with other tokens would scale other rows. Set max_norm to None, and scale the weight after each "
                "optimizer step."
            )
        if parallelism.shards_sequence and module.scale_grad_by_freq:
            raise ValueError(
                f"{path} has scale_grad_by_freq=True: it would count the tokens of one rank instead of all. Set "
                "scale_grad_by_freq to False."
            )


def _plan_experts(model: nn.Module, options: _CheckedArguments, plan: ShardingPlan) -> ExpertDistribution | None:
    """Return the distribution of experts over `ep_mesh`, and adapt `plan` to it; None without an `ep_mesh`."""
    ep_dim, ep_mesh, tp_mesh = options.keywords.ep_dim, options.ep_mesh, options.parallelism.tp_mesh
    if ep_mesh is None:
        if ep_dim is None or tp_mesh is not None:
            check_experts_not_distributed(plan, ep_dim)
        return None
    is_over_tp = ep_mesh is tp_mesh
    names = plan_experts(
        model, plan, options.keywords.plan, ep_mesh.size(), are_experts_unsharded=is_over_tp or tp_mesh is None
    )
    parameter_mesh = None if is_over_tp or tp_mesh is None else expert_tp_mesh(options.mesh, str(ep_dim), tp_mesh)
    grad_factor = 1.0 if is_over_tp else 1 / ep_mesh.size()
    return ExpertDistribution(frozenset(names), ep_mesh, tp_mesh, parameter_mesh, grad_factor)


def _apply_plan(model: nn.Module, options: _CheckedArguments, model_plan: _ModelPlan) -> Sharding | None:
    """Replace layers and parameters as planned. Return the sharding over TP ranks, or None without TP ranks."""
    plan, expert_distribution, sequence, adapters = (
        model_plan.sharding_plan,
        model_plan.expert_distribution,
        model_plan.sequence,
        model_plan.adapters,
    )
    tp_mesh, has_plain_parameters = options.parallelism.tp_mesh, options.keywords.parameters == "plain"
    sequence.prepare(model)
    sharding: Sharding | None = None
    names_by_parameter = WeakIdKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
    input_hooks = ExitStack()
    input_hooks.enter_context(without_input_hooks(model))
    if tp_mesh is not None:
        memo = WeakIdKeyDictionary()
        config = getattr(model, "config", None)
        sharding = Sharding(
            plan,
            tp_mesh,
            options.meshes,
            sequence,
            config,
            expert_distribution,
            has_plain_parameters=has_plain_parameters,
        )
        with model_plan.without_adapters():
            warn_of_small_sharded_share(model, plan)
            shard_layers(model, sharding, memo)
            replicate_parameters(model, sharding, memo)
            for name in sequence.whole_blocks:
                run_on_full_sequence(
                    model.get_submodule(name), tp_mesh, sequence, sharded_arguments=plan.sharded_arguments.get(name, ())
                )
            for name, arguments in plan.full_arguments.items() if options.parallelism.sequence_parallel else ():
                split_arguments_before(model.get_submodule(name), arguments, tp_mesh, sequence)
            if sequence.gather_after:
                gather_output_after(model.get_submodule(sequence.gather_after), tp_mesh, sequence)
        if adapters:
            adapters.shard(sharding, memo)
    elif expert_distribution is not None:
        distribute_experts(model, expert_distribution)
        # Clipping and optimizers do not accept a mix of DTensors and plain tensors, so convert all parameters, the
        # experts first. Exception: with grad_sync=False, FSDP2 shards the other parameters over these ranks itself, and
        # needs plain tensors. `plan` is not used here: its entries apply to tensor parallel ranks.
        for name in expert_distribution.names:
            module = model.get_submodule(name)
            expert_plan = ShardingPlan(parameters=dict.fromkeys(module._parameters, "grouped_gemm"))
            expert_sharding = Sharding(expert_plan, expert_distribution.mesh, options.meshes, sequence)
            replicate_parameters(module, expert_sharding, WeakIdKeyDictionary())
        if options.parallelism.grad_sync:
            expert_sharding = Sharding(ShardingPlan(), expert_distribution.mesh, options.meshes, sequence)
            replicate_parameters(model, expert_sharding, WeakIdKeyDictionary())
    record_replaced_parameters(names_by_parameter, model)
    materialize(model, options.mesh.device_type, is_hf=is_transformers_model(model))
    if has_plain_parameters:
        plain_parameters_(model)
    sequence.adapt(model)
    input_hooks.close()
    _warn_of_packed_parameters(model, options.meshes)
    if tp_mesh is not None and plan.uneven_heads:
        _warn_of_uneven_heads(model, options.meshes, plan.uneven_heads, tp_mesh.size())
    return sharding


def _warn_of_uneven_heads(
    model: nn.Module, meshes: Sequence[DeviceMesh], layouts: Mapping[str, HeadLayout], num_ranks: int
) -> None:
    """Log how many heads each rank has, where they differ: the rank with the most heads sets the pace of attention."""
    for layout in dict.fromkeys(layout for layout in layouts.values()):
        partition = layout.partition(num_ranks)
        query_counts = [heads.num_heads for heads in partition]
        warn_once(
            meshes,
            f"uneven heads of {type(model).__name__} {layout}",
            "%d tensor parallel ranks share %d query and %d key/value heads of %s unevenly: they compute %s query "
            "heads, and their caches hold %s key/value heads. Attention takes as long as on the rank with the most "
            "heads, %.2f times an even share.",
            num_ranks,
            layout.num_heads,
            layout.num_kv_heads,
            type(model).__name__,
            ", ".join(map(str, query_counts)),
            ", ".join(str(len(heads.kv_heads)) for heads in partition),
            max(query_counts) * num_ranks / layout.num_heads,
        )


def _warn_of_packed_parameters(model: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Log which parameters have one more dim than before sharding: callers may select parameters by ndim or shape."""
    dims = packed_dims(model)
    packed_parameters = {name: (p.shape, dims[id(p)]) for name, p in model.named_parameters() if id(p) in dims}
    if packed_parameters:
        name, (shape, dim) = next(iter(packed_parameters.items()))
        warn_once(
            meshes,
            f"packed parameters of {type(model).__name__}",
            "%d parameters have one more dim than in the unsharded %s, such as %r: %s instead of %s. Code that "
            "reads ndim or shape of parameters (weight decay by ndim, Muon's matrices, learning rates by fan-in) sees "
            "it: select these parameters by name.",
            len(packed_parameters),
            type(model).__name__,
            name,
            list(shape),
            [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]],
        )


def _add_hooks(
    model: nn.Module,
    options: _CheckedArguments,
    sequence: SequenceSharding,
    sharding: Sharding | None,
    unsharded_model: UnshardedModel | None,
) -> None:
    """Register the hooks that shard each forward pass, check it, and sum gradients.

    Hooks that are registered later with `prepend` run earlier. So the order in a forward pass is: check the shards of
    plain parameters, compare batches, check for changed parameters, replay the step on the unsharded model, shard the
    sequence.
    """
    parallelism, meshes = options.parallelism, options.meshes
    if parallelism.shards_sequence or parallelism.computes_loss:
        sequence.install(model)
    if unsharded_model is not None:
        step_check = StepCheck(sequence, meshes, unsharded_model, was_training=model.training)
        loss_check = LossCheck(step_check)
        call_before_steps(model, step_check.before_step)
        model.register_forward_pre_hook(loss_check.before_forward, with_kwargs=True, prepend=True)
        model.register_forward_pre_hook(step_check, with_kwargs=True, prepend=True)
        model.register_forward_pre_hook(loss_check.end_last_call, prepend=True)
        model.register_forward_hook(loss_check.after_forward, with_kwargs=True)
    if meshes:
        module_check = ModuleCheck(parallelism, model, is_from_meta=options.is_from_meta)
        model.register_forward_pre_hook(module_check.check_parameters, prepend=True)
        model.register_forward_pre_hook(BatchCheck(meshes), with_kwargs=True, prepend=True)
        restore_hook_order(model._forward_pre_hooks)
        model.register_forward_pre_hook(module_check.log_changes)
        model.register_forward_hook(module_check.record_values)
    model_meshes = [*meshes, *([] if options.separate_ep_mesh is None else [options.separate_ep_mesh])]
    if model_meshes:
        watch_model(model, model_meshes)
        model.register_forward_pre_hook(ShardCheck(model_meshes, parallelism.tp_mesh), prepend=True)
        restore_hook_order(model._forward_pre_hooks)
    if parallelism.tp_mesh is not None:
        model.register_forward_hook(GradientCheck(parallelism.tp_mesh))
        watch_cache_reads(model, parallelism.tp_mesh)
    syncs = [] if sequence.gradient_sync is None else [sequence.gradient_sync]
    if options.separate_ep_mesh is not None and parallelism.grad_sync:
        syncs.append(GradientSync(options.separate_ep_mesh, takes_mean=True))
        model.register_forward_pre_hook(_WatchHook(syncs[-1]))
    setattr(model, GRADIENT_SYNCS_ATTRIBUTE, syncs)
    if not any(getattr(parameter, "main_grad", None) is not None for parameter in model.parameters()):
        for sync in syncs:
            sync.watch(model)  # now, so that hooks registered from now on see the sums
    untyped_model: Any = model
    untyped_model.no_sync = partial(no_sync, model)
    for module in model.modules():
        # Do not mark modules without parameters: several models may share one, such as OpenAI GPT's activation.
        if next(module.parameters(), None) is not None:
            setattr(module, PARALLELISM_ATTRIBUTE, parallelism)
    setattr(model, SHARDING_ATTRIBUTE, sharding)
    if unsharded_model is not None:
        unsharded_model.record_sharded(model)


def _peft_module() -> ModuleType | None:
    """Return our module for PEFT, or None if PEFT has not been imported, so that no model has adapters."""
    if "peft" not in sys.modules:
        return None
    from fused_tp.parallelizing import peft

    return peft


class _WatchHook:
    """Forward pre-hook that makes backward average gradients over expert parallel ranks with different batches."""

    def __init__(self, sync: GradientSync) -> None:
        self.sync = sync

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            self.sync.watch(model)
