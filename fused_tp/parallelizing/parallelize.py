"""`parallelize(model, mesh)`: make an unmodified model tensor, sequence and context parallel in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.backends.hierarchical.two_level import split
from fused_tp.core.availability import Availability
from fused_tp.core.group import check_mesh_order, resolve_group
from fused_tp.nn.optimizers import note_replaced, watch
from fused_tp.nn.sharding import plain_parameters_
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.parallelizing.checks.batch_check import BatchCheck
from fused_tp.parallelizing.checks.gradient_check import GradientCheck
from fused_tp.parallelizing.checks.loss_check import LossCheck
from fused_tp.parallelizing.checks.model_check import (
    MARK,
    SHARDING,
    ModuleCheck,
    check_equal_models,
    is_parallelized,
    remember_code,
)
from fused_tp.parallelizing.checks.parts_check import PartsCheck
from fused_tp.parallelizing.checks.sharding_check import check_verify, compared
from fused_tp.parallelizing.checks.step_check import StepCheck
from fused_tp.parallelizing.checks.unsharded import UncutModel
from fused_tp.parallelizing.expert_parallel import Dealing
from fused_tp.parallelizing.grad_sync import GRADIENT_SYNCS, GradientSync, no_sync
from fused_tp.parallelizing.hf.hf_model import (
    TransformersSequence,
    check_transformers_model,
    is_transformers_model,
    without_input_hooks,
)
from fused_tp.parallelizing.layers import Sharding, check_layers, deal_experts, replicate_parameters, shard_layers
from fused_tp.parallelizing.plain_model import PlainSequence, check_plain_model
from fused_tp.parallelizing.sequence_sharding import Parallelism, SequenceSharding, in_one_order
from fused_tp.parallelizing.shard_plan import (
    ShardingPlan,
    Style,
    check_experts,
    check_head_counts,
    check_nothing_dealt,
    deal_experts_in,
    head_counts,
    is_of_keys,
    resolve_plan,
    settle_between,
    warn_of_small_share,
)
from fused_tp.parallelizing.state_dict import check_buffers, materialize
from fused_tp.parallelizing.whole_blocks import find_blocks, join_behind, run_whole, split_before

Model = TypeVar("Model", bound=nn.Module)
_HEADS_OF_LAYERS = "num_attention_heads_per_layer"  # in configs whose layers have different numbers of heads


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    check_bool(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel, grad_sync=grad_sync)
    if parameters not in ("dtensor", "plain"):
        raise ValueError(f"parameters is {parameters!r}; it must be 'dtensor' or 'plain'.")
    check_verify(verify)
    peft = _peft()
    if peft and isinstance(model, peft.PeftModel):
        keywords: dict[str, Any] = {"tp_dim": tp_dim, "cp_dim": cp_dim, "ep_dim": ep_dim, "plan": plan}
        keywords["ulysses_size"] = ulysses_size
        keywords |= {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel, "grad_sync": grad_sync}
        keywords |= {"parameters": parameters, "verify": verify}
        parallelize(peft.base_model(model), mesh, **keywords)
        model.save_pretrained = partial(peft.save_pretrained, model)
        return model
    tp_mesh, cp_mesh, ep_mesh = _find_dims(mesh, tp_dim, cp_dim, ep_dim)
    meshes = [mesh for mesh in (tp_mesh, cp_mesh) if mesh is not None]
    if parameters == "plain" and ep_mesh is not None and ep_mesh is not tp_mesh:
        raise ValueError(
            f"parameters='plain' with experts dealt out over ep_dim={ep_dim!r}: what averages gradients over these "
            "ranks would average those of different experts. Deal them out over tensor parallel ranks, or have "
            "DTensors."
        )
    own_dim = [] if ep_mesh is None or ep_mesh is tp_mesh or ep_mesh is cp_mesh else [ep_mesh]
    sharing = [*own_dim, *meshes]
    check_equal_models(model, sharing)  # first, as later checks may raise on some ranks only
    if tp_mesh is None and (sequence_parallel or loss_parallel):
        asked = "sequence_parallel" if sequence_parallel else "loss_parallel"
        if tp_dim not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"{asked}=True needs tensor parallel ranks, and mesh has no dim {tp_dim!r}.")
        sequence_parallel = loss_parallel = False  # nothing to shard over one rank
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is in a DistributedDataParallel, which holds the parameters that parallelize replaces; parallelize "
            "the model inside, and wrap that."
        )
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # before its import nothing has been compiled
    if compiled is not None and any(isinstance(module, compiled.OptimizedModule) for module in model.modules()):
        raise TypeError(
            "model is, or holds, what torch.compile has returned, in which names differ from the plan's. Parallelize "
            "the model first, and compile it after: torch.compile(parallelize(model, mesh))."
        )
    if is_parallelized(model):
        raise TypeError("model, or a part of it, has been parallelized already; start from the whole model.")
    _check_ulysses(
        model, ulysses_size, 1 if cp_mesh is None else cp_mesh.size(), 1 if tp_mesh is None else tp_mesh.size()
    )
    ulysses = None if cp_mesh is None or ulysses_size == 1 else _split(cp_mesh, ulysses_size)
    parallelism = Parallelism(tp_mesh, cp_mesh, sequence_parallel, loss_parallel, grad_sync, ulysses)

    with compared(model, verify, sharing, tp=tp_mesh, cp=cp_mesh) as outcome:
        # Experts distributed over a separate dim see batches of other ranks, which this rank does not have.
        uncut = UncutModel(model) if verify is not False and len(sharing) == len(meshes) > 0 else None
        sequence = _cut(
            model, mesh, parallelism, uncut, plan=plan, ep_dim=ep_dim, ep_mesh=ep_mesh, plain=parameters == "plain"
        )
    remember_code(model)
    sequence.attends = sequence.attended if outcome.right else sequence.attention_layers(model)
    return model


def _cut(
    model: nn.Module,
    mesh: DeviceMesh,
    parallelism: Parallelism,
    uncut: UncutModel | None,
    *,
    plan: str | Mapping[str, Style],
    ep_dim: str | None,
    ep_mesh: DeviceMesh | None,
    plain: bool,
) -> SequenceSharding:
    """Shard `model` over the ranks of `parallelism` and `ep_mesh`, after the checks of `parallelize`."""
    tp_mesh, cp_mesh, sequence_parallel = parallelism.tp_mesh, parallelism.cp_mesh, parallelism.sequence_parallel
    meshes = [one for one in (tp_mesh, cp_mesh) if one is not None]
    peft = _peft()
    from_meta = any(parameter.is_meta for parameter in model.parameters())
    adapters = peft.Adapters(model) if peft else None
    hf = is_transformers_model(model)
    # Without TP ranks the model's own plan is used to locate the attention of a plain model; a transformers model does
    # not need it.
    has_plan = plan != "auto" or (bool(getattr(model, "tp_plan", None)) and not hf)
    ranks = 1 if tp_mesh is None else tp_mesh.size()
    sequence: SequenceSharding
    with adapters.taken_out() if adapters else nullcontext():
        resolved = resolve_plan(model, plan) if tp_mesh is not None or has_plan else ShardingPlan()
        dealing = None
        if ep_mesh is not None:
            over_tp = ep_mesh is tp_mesh
            names = deal_experts_in(model, resolved, plan, ep_mesh.size(), whole=over_tp or tp_mesh is None)
            both = None if over_tp or tp_mesh is None else _mesh_of_both(mesh, str(ep_dim), tp_mesh)
            factor = 1.0 if over_tp else 1 / ep_mesh.size()
            dealing = Dealing(frozenset(names), ep_mesh, tp_mesh, both, factor)
        elif ep_dim is None or tp_mesh is not None:
            check_nothing_dealt(resolved, ep_dim)
        if tp_mesh is not None:
            resolved = settle_between(model, resolved, cuts_logits=parallelism.loss_parallel)
            check_head_counts(model, resolved.modules, tp_mesh.size())
            check_experts(model, resolved)
        with without_input_hooks(model):
            check_layers(model, resolved, ranks)
        check_buffers(model, hf=hf)
        if hf:  # before `find_blocks`, which may ask for a style that would not help
            check_transformers_model(model, resolved.modules, parallelism)
        rows_travel = dealing is not None and dealing.mesh is not tp_mesh
        blocks = find_blocks(model, resolved, rows_travel=rows_travel) if sequence_parallel else ([], [])
        whole_blocks, expert_blocks = blocks
        if hf:
            sequence = TransformersSequence(model, parallelism)
        else:
            check_plain_model(model, resolved.modules, parallelism)
            sequence = PlainSequence(model, parallelism, resolved.modules)
        if adapters:
            adapters.check(whole_blocks)
    if adapters:
        check_layers(model, adapters.plan(resolved), ranks)

    sequence.whole_blocks, sequence.expert_blocks = whole_blocks, expert_blocks
    sequence.prepare(model)
    if sequence_parallel:
        sequence.in_front, sequence.splits = frozenset(resolved.before), bool(resolved.splits)
        sequence.joins, sequence.behind = resolved.joins, resolved.behind
    sharding: Sharding | None = None
    before = WeakIdKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
    input_hooks = ExitStack()
    input_hooks.enter_context(without_input_hooks(model))
    if tp_mesh is not None:
        memo = WeakIdKeyDictionary()
        config = getattr(model, "config", None)
        sharding = Sharding(resolved, tp_mesh, meshes, sequence, config, dealing, plain=plain)
        with adapters.taken_out() if adapters else nullcontext():
            warn_of_small_share(model, resolved)
            shard_layers(model, sharding, memo)
            replicate_parameters(model, sharding, memo)
            for name in whole_blocks:
                run_whole(model.get_submodule(name), tp_mesh, sequence, parts=resolved.parts.get(name, ()))
            for name, arguments in resolved.splits.items() if sequence_parallel else ():
                split_before(model.get_submodule(name), arguments, tp_mesh, sequence)
            if sequence.joins:
                join_behind(model.get_submodule(sequence.joins), tp_mesh, sequence)
        if adapters:
            adapters.shard(sharding, memo)
    elif dealing is not None:
        deal_experts(model, dealing)
        # Make all parameters DTensors on one mesh: clipping and optimizers do not accept two kinds at once. But with
        # grad_sync=False, FSDP2 shards the other parameters over these ranks itself, and needs plain ones.
        # Plan entries of other modules apply to tensor parallel ranks only.
        for name in dealing.names:
            experts = model.get_submodule(name)
            whole = ShardingPlan(parameters=dict.fromkeys(experts._parameters, "grouped_gemm"))
            replicate_parameters(experts, Sharding(whole, dealing.mesh, meshes, sequence), WeakIdKeyDictionary())
        if parallelism.grad_sync:
            replicate_parameters(model, Sharding(ShardingPlan(), dealing.mesh, meshes, sequence), WeakIdKeyDictionary())
    note_replaced(before, model)
    materialize(model, mesh.device_type, hf=hf)
    if plain:
        plain_parameters_(model)
    sequence.adapt(model)
    input_hooks.close()
    if parallelism.shards_sequence or parallelism.computes_loss:
        sequence.install(model)
    if uncut is not None:
        step = StepCheck(sequence, meshes, uncut)
        loss = LossCheck(step)
        model.register_forward_pre_hook(loss.before, with_kwargs=True, prepend=True)
        model.register_forward_pre_hook(step, with_kwargs=True, prepend=True)
        model.register_forward_hook(loss.after, with_kwargs=True)
    if meshes:
        changes = ModuleCheck(parallelism, model, from_meta=from_meta)
        model.register_forward_pre_hook(changes.refuse, prepend=True)
        model.register_forward_pre_hook(BatchCheck(meshes), with_kwargs=True, prepend=True)
        in_one_order(model._forward_pre_hooks)
        model.register_forward_pre_hook(changes.name_changes)
    own_dim = [ep_mesh] if ep_mesh not in (None, tp_mesh, cp_mesh) else []
    if shared_over := [*meshes, *own_dim]:
        watch(model, shared_over)
        model.register_forward_pre_hook(PartsCheck(shared_over, tp_mesh), prepend=True)
        in_one_order(model._forward_pre_hooks)
    if tp_mesh is not None:
        model.register_forward_hook(GradientCheck(tp_mesh))
    syncs = [] if sequence.sync is None else [sequence.sync]
    if ep_mesh not in (None, tp_mesh, cp_mesh) and parallelism.grad_sync:
        syncs.append(GradientSync(ep_mesh, mean=True))
        model.register_forward_pre_hook(_Watch(syncs[-1]))
    setattr(model, GRADIENT_SYNCS, syncs)
    users: Any = model
    users.no_sync = partial(no_sync, model)
    for module in model.modules():
        if next(module.parameters(), None) is not None:  # models may share others, such as OpenAI GPT's activations
            setattr(module, MARK, parallelism)
    setattr(model, SHARDING, sharding)
    if uncut is not None:
        uncut.note_cut(model)
    return sequence


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


def _find_dims(
    mesh: DeviceMesh, tp_dim: str, cp_dim: str, ep_dim: str | None
) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """1-D meshes of these dims; None for a dim that is missing or has one rank. The mesh of `ep_dim` is one of the
    others if it names the same dim."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, not {type(mesh).__name__}; see torch.distributed.init_device_mesh."
        )
    names = mesh.mesh_dim_names or ()
    if tp_dim == cp_dim:
        raise ValueError(f"tp_dim and cp_dim are both {tp_dim!r}; they must be different dims of the mesh.")
    if ep_dim is not None and ep_dim not in names:
        raise ValueError(f"ep_dim is {ep_dim!r}, and mesh has the dims {names or 'without names'}; name one of them.")
    if tp_dim not in names and cp_dim not in names and ep_dim is None:
        raise ValueError(
            f"mesh has the dims {names or 'without names'}, and neither {tp_dim!r} nor {cp_dim!r} is one of them; make "
            f"it with init_device_mesh(device_type, sizes, mesh_dim_names=({cp_dim!r}, {tp_dim!r})) or pass tp_dim= "
            "and cp_dim=."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh does not contain this rank; only its members can hold a part of the model.")
    dims = dict.fromkeys(dim for dim in (ep_dim, cp_dim, tp_dim) if dim in names)
    check_mesh_order(mesh, tuple(names.index(dim) for dim in dims if dim is not None))
    meshes = {dim: mesh[dim] for dim in dims if dim is not None and mesh[dim].size() > 1}
    if ep_dim in meshes and ep_dim not in (cp_dim, tp_dim) and cp_dim in meshes:
        raise ValueError(
            f"ep_dim={ep_dim!r} next to context parallel ranks is not served; deal experts out over these, "
            f"ep_dim={cp_dim!r}, or over the tensor parallel ones."
        )
    return meshes.get(tp_dim), meshes.get(cp_dim), None if ep_dim is None else meshes.get(ep_dim)


def _check_ulysses(model: nn.Module, size: int, cp_size: int, tp_size: int) -> None:
    check_int("ulysses_size", size, 1)
    if cp_size % size:
        sizes = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
        raise ValueError(
            f"ulysses_size is {size}, which does not divide the {cp_size} context parallel ranks. Sizes that work: "
            f"{', '.join(map(str, sizes))}."
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = [(name, heads) for name, heads in head_counts(config).items() if not is_of_keys(name)]
    counts += [(_HEADS_OF_LAYERS, heads) for heads in sorted({*(getattr(text, _HEADS_OF_LAYERS, None) or ())})]
    uneven = next((f"{name}={heads}" for name, heads in counts if heads % (size * tp_size)), None)
    if size > 1 and uneven is not None:
        shares = (n for n in range(2, cp_size + 1) if cp_size % n == 0)
        shared = [n for n in shares if all(heads % (n * tp_size) == 0 for _, heads in counts)]
        sizes = [1, *shared]  # a ring takes any number of heads
        raise ValueError(
            f"{type(model).__name__} has {uneven}, which {tp_size} tensor parallel ranks times ulysses_size={size} "
            f"cannot share evenly. Values of ulysses_size that work: {', '.join(map(str, sizes))}."
        )


def _split(mesh: DeviceMesh, ulysses_size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Split a 1-D mesh: return this rank's group of `ulysses_size` consecutive ranks, and the ring of ranks at the same
    place in each group, None for one group. These are meshes, which can be copied with the model."""
    if ulysses_size == mesh.size():
        return mesh, None
    groups = split(resolve_group(mesh), ulysses_size)
    if isinstance(groups, Availability):
        raise ValueError(
            f"ulysses_size={ulysses_size} needs parts of the group of {mesh.size()} context parallel ranks, and "
            f"{groups.reason}. Pass ulysses_size={mesh.size()} or 1."
        )
    inner, ring = (
        DeviceMesh.from_group(group.process_group, mesh.device_type, mesh_dim_names=(name,))
        for name, group in zip(("ulysses", "ring"), groups, strict=True)
        if group.process_group is not None
    )
    return inner, ring


def _mesh_of_both(mesh: DeviceMesh, ep_dim: str, tp_mesh: DeviceMesh) -> DeviceMesh:
    names, (tp_dim,) = mesh.mesh_dim_names or (), tp_mesh.mesh_dim_names or ("",)
    if names.index(ep_dim) > names.index(tp_dim):
        raise ValueError(
            f"mesh has the dims {names}; put {ep_dim!r} before {tp_dim!r}, whose ranks hold parts of the same experts."
        )
    return mesh[ep_dim, tp_dim]
