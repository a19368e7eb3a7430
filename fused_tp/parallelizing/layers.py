"""Replace a model's layers by fused_tp's according to a plan, and make every other parameter a replicated DTensor.

A replaced module keeps its name and the names of its parameters, so state_dict keys do not change. `check_layers`
raises for an unusable plan before the first module is replaced.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from fused_tp.core.group import GroupLike
from fused_tp.core.partition import shard_sizes
from fused_tp.core.subclass import reason_not_plain
from fused_tp.nn import ColumnParallelLinear, RowParallelLinear
from fused_tp.nn.feature_exchange import FeatureExchange
from fused_tp.nn.linear import check_parts, features_of, is_conv1d
from fused_tp.nn.norm import replicate_own_parameters
from fused_tp.nn.sharding import Memo, PartsShard, shard_rows
from fused_tp.nn.share_gather import share_gather
from fused_tp.ops.collectives import all_reduce, copy_to_group, scatter
from fused_tp.parallelizing.expert_parallel import ExpertDistribution, ExpertRanks
from fused_tp.parallelizing.experts import distribute_rows, takes_routing, use_grouped_matmuls
from fused_tp.parallelizing.forward_shard import LayerState, unsharded_state
from fused_tp.parallelizing.head_layout import NUM_GROUPS, HeadLayout, counts_kv_heads
from fused_tp.parallelizing.readers import find_read_parameters
from fused_tp.parallelizing.sequence_sharding import SequenceSharding
from fused_tp.parallelizing.shard_plan import (
    HEAD_PROJECTIONS,
    PARAMETER_STYLES,
    STYLES,
    UNSHARDED_STYLE,
    ParameterSpec,
    ShardingPlan,
    Style,
    StyleSpec,
    attention_of,
    embedding_scale,
    head_counts,
    is_within,
    spec_of,
)

HookArguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"  # a module's args and kwargs

GATED_PROJECTIONS = {"gate_proj", "up_proj", "w1", "w3", "gate", "up", "wi_0", "wi_1"}


@dataclass(frozen=True)
class Sharding:
    """Plan, meshes and options by which a model is sharded.

    Attributes:
        plan: plan with concrete names.
        mesh: mesh of the tensor parallel ranks; without tensor parallelism, of the ranks that experts are distributed
            over.
        meshes: meshes of all ranks that share the model, see `gather_over_meshes`.
        sequence: shards the sequence of each forward pass.
        config: the model's config, or None.
        expert_distribution: distribution of experts over the ranks of `ep_dim`, or None.
        has_plain_parameters: parameters are converted to plain tensors at the end, see `plain_parameters_`.
    """

    plan: ShardingPlan
    mesh: DeviceMesh
    meshes: Sequence[DeviceMesh]
    sequence: SequenceSharding
    config: Any = None
    expert_distribution: ExpertDistribution | None = None
    has_plain_parameters: bool = False


def check_layers(model: nn.Module, plan: ShardingPlan, num_ranks: int) -> None:
    """Raise for a plan that `shard_layers` cannot apply over `num_ranks` ranks, before any layer is replaced.

    Raises:
        TypeError: a parameter is a DTensor already.
        ValueError: the plan shards tied weights differently; a module other than its owner reads a sharded weight; a
            dim is not a multiple of `num_ranks`; hooks would be lost.
    """
    dims_by_parameter: dict[int, dict[str, int | None]] = defaultdict(dict)
    for name, module in model.named_modules():
        style = plan.modules.get(name)
        specs = plan.parameters_of(name, module)
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                raise TypeError(
                    f"parameter {f'{name}.{key}'!r} is a DTensor already. Call parallelize on the unsharded model, "
                    "before fully_shard or any other sharding."
                )
            if num_ranks > 1 and (reason := reason_not_plain(type(parameter))) is not None:
                raise ValueError(
                    f"{_path(name, key)!r} cannot be converted to a DTensor: {reason}. Call parallelize before "
                    "the model is quantized or its parameters are wrapped."
                )
            if num_ranks > 1 and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                raise ValueError(
                    f"{_path(name, key)!r} has gradient hooks, which would be lost: parallelize replaces the parameter "
                    "by a DTensor. Register the hooks after parallelize."
                )
            if not isinstance(style, ParallelStyle):
                dims_by_parameter[id(parameter)][name] = (
                    specs[key].dim_of(parameter) if key in specs else spec_of(style).shard_dim
                )
            if key in specs:
                _check_parameter_width(_path(name, key), module, parameter, specs[key], num_ranks)
        _check_packed_widths(name, module, spec_of(style), num_ranks)
        if spec_of(style).shards_groups:
            _check_groups(name, module, num_ranks)
        if num_ranks > 1:
            _check_nothing_lost(name, module, spec_of(style).convert is not None)
        if plan:
            _check_direct_reads(name, module, plan)
        if style is not None and spec_of(style).shares_rotary:
            _rotary_width(getattr(model, "config", None), module)
    for dim_by_module in dims_by_parameter.values():
        if len(set(dim_by_module.values())) > 1:
            first, second = list(dim_by_module)[:2]
            raise ValueError(
                f"{first!r} and {second!r} share a weight, but their styles in the plan, {plan.modules.get(first)!r} "
                f"and {plan.modules.get(second)!r}, shard it differently. Use styles that shard the same dim, such as "
                "'embedding_rowwise' and 'colwise_gather_output'."
            )


def _check_parameter_width(name: str, module: Any, parameter: Tensor, spec: ParameterSpec, num_ranks: int) -> None:
    """Check that every rank gets complete pairs of gate and up features, and equally many experts.

    Raises:
        ValueError: it does not.
    """
    dim = spec.dim_of(parameter)
    size, sizes = parameter.shape[dim] // spec.num_parts, shard_sizes(parameter.shape[dim] // spec.num_parts, num_ranks)
    # Experts of which the features of gate and up alternate.
    has_pairs = name.rpartition(".")[2].startswith("gate_up_proj") and not getattr(module, "is_concatenated", True)
    must_be_even = spec.dim == PARAMETER_STYLES["grouped_gemm"].dim and bool(size % num_ranks)
    if must_be_even or (has_pairs and sizes != [2 * pairs for pairs in shard_sizes(size // 2, num_ranks)]):
        reason = "experts must be distributed evenly" if must_be_even else "gate and up features alternate"
        raise ValueError(
            f"{name!r} {tuple(parameter.shape)} cannot be sharded over {num_ranks} tensor parallel ranks along dim "
            f"{dim}, in shards of {', '.join(map(str, sizes))}: {reason}. Use another tensor parallel size."
        )


def _check_packed_widths(name: str, module: Any, spec: StyleSpec, num_ranks: int) -> None:
    """Check the widths of a packed layer over `num_ranks` ranks, and of a multi-query layer.

    Raises:
        ValueError: the layer has other widths.
    """
    if spec.num_parts > 1 and spec.shard_dim is not None:
        dim = 1 - spec.shard_dim if is_conv1d(module) else spec.shard_dim
        check_parts(_path(name, "weight"), module.weight, PartsShard(dim, spec.num_parts), num_ranks)
    if spec.shares_keys:
        num_inputs, num_outputs = features_of(module)
        if is_conv1d(module) or num_outputs <= num_inputs:
            raise ValueError(
                f"{name!r} has {num_inputs} input and {num_outputs} output features. 'multi_query_colwise' needs an "
                "nn.Linear whose outputs are as many query features as inputs, then one head of keys and of values."
            )


def _check_groups(name: str, module: Any, num_ranks: int) -> None:
    """Raise ValueError if `module` is no linear layer of groups of heads that `num_ranks` ranks can share."""
    num_groups = getattr(module, "n_groups", None)
    if not isinstance(num_groups, int):
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has no n_groups. 'grouped_colwise' needs a layer of groups of "
            "heads, as in DeepSeek V4; use 'colwise'."
        )
    if num_groups % num_ranks:
        supported_sizes = [size for size in range(1, num_groups + 1) if num_groups % size == 0]
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has {num_groups} groups of heads, which {num_ranks} tensor parallel "
            f"ranks cannot share evenly. Use one of these TP sizes: {', '.join(map(str, supported_sizes))}."
        )


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _check_nothing_lost(name: str, module: nn.Module, is_replaced: bool) -> None:
    """Check that sharding or replacing a module loses neither hooks nor options.

    Raises:
        ValueError: the module to replace has hooks or a patched forward; or an embedding writes to its weight
            (max_norm) or has sparse gradients.
    """
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise ValueError(
            f"{name!r} is an nn.Embedding with max_norm or sparse=True, which tensor parallelism does not support. "
            f"Unset them or leave {name!r} out of the plan."
        )
    if is_replaced and (attribute_names := attachments(module)):
        raise ValueError(
            f"{name!r} has {', '.join(attribute_names)} set on the instance, which would be lost: parallelize replaces "
            f"the layer. Set them after parallelize, or remove {name!r} from the plan."
        )


def attachments(module: nn.Module) -> list[str]:
    """Names of the attributes of `module` that hold a patched forward or hooks."""
    return [key for key, value in vars(module).items() if (key == "forward" or key.endswith("_hooks")) and value]


def _check_direct_reads(name: str, module: nn.Module, plan: ShardingPlan) -> None:
    """Raise ValueError if the plan shards a submodule's parameter that the forward of `module` reads directly."""
    for parameter in find_read_parameters(module, forward_only=True):
        owner = _path(name, parameter.rpartition(".")[0])
        if (
            spec_of(plan.modules.get(owner)).shard_dim is not None
            and _path(name, parameter) not in plan.unread_parameters
        ):
            raise ValueError(
                f"The forward of {type(module).__name__} ({name!r}) reads {parameter!r} directly, but the plan shards "
                f"it: {owner!r} has the style {plan.modules[owner]!r}. Remove {owner!r}, and modules whose weights are "
                "tied to it, from the plan."
            )


def _rotary_width(config: Any, layer: nn.Module) -> int:
    config = getattr(layer, "config", None) or config
    width = getattr(config.get_text_config(), "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise ValueError("The style 'mla_kv_a_proj' needs qk_rope_head_dim in the model's config. Set it.")
    return width


def shard_layers(model: nn.Module, sharding: Sharding, memo: Memo) -> None:
    """Replace every planned linear layer and embedding of `model` by its parallel counterpart."""
    plan, mesh, sequence = sharding.plan, sharding.mesh, sharding.sequence
    # (parent, key) by id of the module: a model may contain one several times.
    references: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for key, child in parent._modules.items():
            references[id(child)].append((parent, key))
    for name, style in plan.modules.items():
        # `check_style` has checked the type of the module. Keep no other reference to it: its full weight must be freed
        # before the next layer is sharded.
        module: Any = model.get_submodule(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style)
            continue
        if spec_of(style).sums_output:
            is_sharded, distribution = style == "moe_tp_experts", sharding.expert_distribution
            expert_ranks = (
                distribution.expert_ranks(is_sharded=is_sharded)
                if distribution and name in distribution.names
                else ExpertRanks(mesh)
            )
            _parallelize_experts(module, expert_ranks, sequence.state_function_of(name))
        if spec_of(style).adds_once:
            module.register_forward_hook(partial(_keep_on_one_rank, mesh))
        layer = shard_layer(name, module, style, sharding, memo)
        if layer is not module:
            references[id(layer)] = references.pop(id(module))
            _replace_module(module, layer, references[id(layer)])
    attention_names = {
        name
        for name in map(attention_of, plan.modules)
        if name is not None and not sequence.runs_on_full_sequence(name)
    }
    for name in sorted(attention_names):
        model.get_submodule(name).register_forward_pre_hook(partial(_pass_stand_in, sequence), with_kwargs=True)
        unsharded_layers = [
            inner
            for inner, style in plan.modules.items()
            if is_within(inner, name) and spec_of(style) is UNSHARDED_STYLE
        ]
        for layer in map(model.get_submodule, unsharded_layers):
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(_replace_stand_ins)
    _share_gathers(model, plan.modules)
    for name, dims_by_argument in plan.per_head_arguments.items():
        attention: Any = model.get_submodule(name)
        num_heads = max(head_counts(attention).values())  # number of query heads
        argument_names = list(inspect.signature(attention.forward).parameters)
        attention.register_forward_pre_hook(
            partial(
                _narrow_heads,
                _local_heads(num_heads, plan.uneven_heads.get(name), mesh),
                num_heads,
                dims_by_argument,
                argument_names,
            ),
            with_kwargs=True,
        )
    for name, num_groups in plan.query_groups.items():
        attention = model.get_submodule(name)
        attention.num_key_value_groups = num_groups
    for name, attributes in plan.head_attributes.items():
        attention = model.get_submodule(name)
        for attribute in attributes:
            value = getattr(attention, attribute)
            setattr(attention, attribute, _local_count(attribute, value, plan.uneven_heads.get(name), mesh))
    for name, layout in plan.uneven_heads.items():
        if name not in plan.parameters and hasattr(attention := model.get_submodule(name), NUM_GROUPS):
            setattr(attention, NUM_GROUPS, layout.partition(mesh.size())[mesh.get_local_rank()].group_size)


def _local_count(attribute: str, value: int, layout: HeadLayout | None, mesh: DeviceMesh) -> int:
    """Return the value on this rank of an attribute of an attention module that is proportional to its heads."""
    if layout is None:
        return value // mesh.size()
    heads = layout.partition(mesh.size())[mesh.get_local_rank()]
    if counts_kv_heads(attribute):
        return value * len(heads.kv_heads) // layout.num_kv_heads
    return value * heads.num_heads // layout.num_heads


def _local_heads(num_heads: int, layout: HeadLayout | None, mesh: DeviceMesh) -> tuple[int, int]:
    """Return (start, stop) of this rank's query heads."""
    if layout is None:
        return shard_rows(num_heads, mesh)
    heads = layout.partition(mesh.size())[mesh.get_local_rank()]
    return heads.start, heads.stop


def _narrow_heads(
    local_heads: tuple[int, int],
    num_heads: int,
    dims_by_argument: Mapping[str, int],
    argument_names: list[str],
    attention: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments:
    """Narrow per-head arguments of an attention module to this rank's heads.

    `dims_by_argument` maps the names of these arguments to their dim of size heads or batch * heads.
    """
    start, stop = local_heads

    def narrow(name: str, t: Any) -> Any:
        if name not in dims_by_argument or not isinstance(t, Tensor) or t.shape[dims_by_argument[name]] == 1:
            return t
        dim = dims_by_argument[name]
        return t.unflatten(dim, (-1, num_heads)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)

    return tuple(map(narrow, argument_names, args)), {name: narrow(name, t) for name, t in kwargs.items()}


def shard_layer(name: str, module: Any, style: str, sharding: Sharding, memo: Memo) -> nn.Module:
    """Return the parallel counterpart of `module`, which is called `name`, with hooks for its input and output.

    Returns `module` itself if `style` does not shard it.
    """
    spec, mesh, sequence = STYLES[style], sharding.mesh, sharding.sequence
    if spec.shares_rotary:
        module.register_forward_hook(partial(_sum_rotary_gradient, mesh, _rotary_width(sharding.config, module)))
    if spec.shares_output:
        module.register_forward_hook(partial(_sum_output_gradient, mesh))
    if spec.shards_groups:
        module.n_groups //= mesh.size()
        module.register_forward_pre_hook(_group_features)
    if spec.narrows_output:
        num_heads = module.embedding_dim
        local_heads = _local_heads(num_heads, HeadLayout("query", num_heads, num_heads), mesh)
        module.register_forward_hook(partial(_narrow_output, local_heads))
    if spec.convert is None:
        return module
    layer = spec.convert(module, mesh=mesh, memo=memo)
    if spec.heads is not None and not spec.shares_keys:
        _exchange_features(layer, spec.heads, mesh, is_output=spec.shard_dim == 0)
    # Keep other attributes, such as the flag by which transformers recognizes initialized layers.
    vars(layer).update((key, value) for key, value in vars(module).items() if key not in vars(layer))
    scale = embedding_scale(module)
    if scale is not None:
        if isinstance(scale, Tensor):
            layer.register_buffer("embed_scale", scale, persistent=False)
        layer.register_forward_hook(_scale_output)
    if (
        (sharding.plan.flattens_tokens or sequence.may_get_flat_tokens(name))
        and isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        and not sequence.runs_on_full_sequence(name)
    ):
        layer.register_forward_pre_hook(partial(_pass_batch_size, sequence), with_kwargs=True)
    if isinstance(layer, ColumnParallelLinear) and not sequence.runs_on_full_sequence(name):
        hook = partial(_replace_stand_in_by_shard, sequence, name if attention_of(name) is not None else "")
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    return layer


def _exchange_features(layer: Any, layout: HeadLayout, mesh: DeviceMesh, *, is_output: bool) -> None:
    """Hook a layer so that code outside of it sees the features of this rank's heads instead of those of its shard."""
    if is_output:
        exchange = layout.output_exchange(layer.out_features, mesh.size())
        layer.register_forward_hook(partial(_exchange_output, mesh, exchange))
    else:
        exchange = layout.input_exchange(layer.in_features, mesh.size())
        layer.register_forward_pre_hook(partial(_exchange_input, mesh, exchange))


def _exchange_output(
    mesh: DeviceMesh, exchange: FeatureExchange, layer: nn.Module, args: Any, output: Tensor
) -> Tensor:
    return exchange(output, mesh)


def _exchange_input(
    mesh: DeviceMesh, exchange: FeatureExchange, layer: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return exchange(args[0], mesh), *args[1:]


def _narrow_output(local_heads: tuple[int, int], embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
    start, stop = local_heads
    return output.narrow(-1, start, stop - start)


def _scale_output(embedding: Any, args: Any, output: Tensor) -> Tensor:
    scale = embedding.embed_scale  # a tensor is rounded to the dtype of the model, a number is not
    return output * (scale.to(output.dtype) if isinstance(scale, Tensor) else scale)


def _sum_rotary_gradient(mesh: DeviceMesh, width: int, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    latent, rotary = output.split([output.shape[-1] - width, width], dim=-1)
    return torch.cat([latent, copy_to_group(rotary, group=mesh)], dim=-1)


def _sum_output_gradient(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    def share(value: Any) -> Any:
        return copy_to_group(value, group=mesh) if isinstance(value, Tensor) and value.requires_grad else value

    return share(output) if isinstance(output, Tensor) else tuple(map(share, output))


def _group_features(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Split the features of this rank's heads into its groups; the caller splits them into the groups of all ranks."""
    return (args[0].flatten(-2).unflatten(-1, (layer.n_groups, -1)), *args[1:])


def distribute_experts(model: nn.Module, distribution: ExpertDistribution) -> None:
    """Distribute the experts of a model without tensor parallel ranks."""
    for name in sorted(distribution.names):
        _parallelize_experts(model.get_submodule(name), distribution.expert_ranks(is_sharded=False), unsharded_state)


def _parallelize_experts(experts: Any, expert_ranks: ExpertRanks, current_state: Callable[[], LayerState]) -> None:
    if takes_routing(experts):
        use_grouped_matmuls(experts, expert_ranks, current_state)
        return
    share_input, sum_output = (
        partial(_share_input, expert_ranks.shard_ranks),
        partial(_sum_output, expert_ranks.shard_ranks),
    )
    if expert_ranks.expert_mesh is not None:
        distribute_rows(experts, expert_ranks, share_input=share_input, sum_output=sum_output)
    else:
        experts.register_forward_pre_hook(share_input, with_kwargs=True)
        experts.register_forward_hook(sum_output)


def _share_input(mesh: GroupLike, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookArguments:
    """Make backward sum the gradients of the experts' floating-point inputs over the ranks."""

    def share(value: Any) -> Any:
        return copy_to_group(value, group=mesh) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(share, args)), {name: share(value) for name, value in kwargs.items()}


def _sum_output(mesh: GroupLike, experts: nn.Module, args: Any, output: Tensor) -> Tensor:
    return all_reduce(output, group=mesh)


def _keep_on_one_rank(mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    # Multiply by 0 instead of returning new zeros: the backward of every rank must run the all-reduce of
    # `_share_input`.
    return output if mesh.get_local_rank() == 0 else 0 * output


def holds_sharded_heads(attention: nn.Module) -> bool:
    """True if the TP ranks hold different heads of the attention module."""
    return any(isinstance(m, ColumnParallelLinear) and not m.gather_output for m in attention.modules())


def shards_key_value_heads(model: nn.Module) -> bool:
    """True if an attention module of `model` computes the keys of this rank's heads only."""
    return any(
        isinstance(module, ColumnParallelLinear)
        and not module.gather_output
        and name.rpartition(".")[2] in HEAD_PROJECTIONS
        for name, module in model.named_modules()
    )


def _replace_module(old_module: nn.Module, new_module: nn.Module, references: Sequence[tuple[nn.Module, str]]) -> None:
    """Replace `old_module` by `new_module` in each (parent, key) of `references`, and move its parameters to "meta".

    This frees the full weight before the next layer is sharded. Code that still computes with `old_module` then fails.
    """
    for parent, key in references:
        parent._modules[key] = new_module
    for key, parameter in old_module._parameters.items():
        if parameter is not None:
            old_module._parameters[key] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )


def _pass_batch_size(
    sequence: SequenceSharding, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HookArguments | None:
    """Pass the batch size to a layer whose input is [batch * seq, n], so that it gathers or scatters each sequence."""
    state = sequence.current_state()
    return (args, {"batch": state.batch_size, **kwargs}) if state.is_tp_sharded and args[0].ndim == 2 else None


_SHARD_ATTRIBUTE = "_fused_tp_part"  # attribute of a stand-in: the shard of the sequence that it replaces


def _pass_stand_in(
    sequence: SequenceSharding, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HookArguments | None:
    """Replace the input of an attention module by a stand-in of the whole sequence's shape that refers to the shard.

    Attention modules reshape the output of q_proj, which covers the full sequence, by the shape of their own input,
    which is a shard. Rejected: gathering that input here, because the projections gather it fused with their matmuls.
    The stand-in is one NaN, expanded: a module that computes with it, instead of passing it to a projection, returns
    NaN everywhere.
    """
    state = sequence.current_state()
    if not state.is_tp_sharded:
        return None
    x = args[0] if args else next(iter(kwargs.values()))
    stand_in = x.new_full((), float("nan")).expand(*x.shape[:-2], state.local_len, x.shape[-1])
    setattr(stand_in, _SHARD_ATTRIBUTE, x)

    def replace(value: Any) -> Any:  # some modules pass the same tensor again, for keys and values
        return stand_in if value is x else value

    return tuple(map(replace, args)), {name: replace(value) for name, value in kwargs.items()}


def resolve_stand_in(x: Tensor) -> Tensor:
    """Return the shard that the stand-in `x` replaces (see `_pass_stand_in`); `x` itself if it is not a stand-in."""
    shard: Tensor = getattr(x, _SHARD_ATTRIBUTE, x)
    return shard


def _replace_stand_ins(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass the shard to an unsharded layer, instead of the stand-in of the attention module around it."""
    return tuple(map(resolve_stand_in, args))


def _replace_stand_in_by_shard(
    sequence: SequenceSharding,
    attention_projection: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments | None:
    state = sequence.current_state()
    if not state.is_tp_sharded:
        return None
    x = args[0]
    # Layers that are not attention projections, such as gates, may get a stand-in, too.
    shard = getattr(x, _SHARD_ATTRIBUTE, None)
    if shard is None and attention_projection:
        raise ValueError(
            "sequence_parallel=True needs attention modules that pass their first argument unchanged to their "
            f"projections; {attention_projection!r} received another tensor. Pass sequence_parallel=False."
        )
    x = x if shard is None else shard
    # The layer cannot derive the length of the full sequence from its shard: the last rank's shard may be shorter.
    return (x, *args[1:]), {"gather_size": state.local_len, **kwargs}


def _share_gathers(model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Make q, k and v, and gate and up, gather their common input in one op."""
    layer_groups: dict[tuple[Any, ...], list[ColumnParallelLinear]] = defaultdict(list)
    modules = dict(model.named_modules())
    for name in plan:
        parent, _, layer_name = name.rpartition(".")
        layer, attention = modules.get(name), attention_of(name)
        # In cross-attention q reads another tensor than k and v do.
        is_cross_attention = "cross" in parent or "encoder_attn" in parent
        scope = attention if attention is not None else parent if layer_name in GATED_PROJECTIONS else None
        if isinstance(layer, ColumnParallelLinear) and scope is not None and not is_cross_attention:
            layer_groups[scope, attention is not None, layer.in_features, layer.weight.dtype].append(layer)
    for layers in layer_groups.values():
        if len(layers) > 1:
            share_gather(layers)


def replicate_parameters(model: nn.Module, sharding: Sharding, memo: Memo) -> None:
    """Make every unsharded parameter a replicated DTensor, with a complete gradient on every rank.

    FSDP2, clip_grad_norm_ and checkpoints need all parameters of a model on the same mesh. The forward of a module
    still computes on plain tensors, including parameters that it reads from submodules. If a rank's gradient covers
    only its heads (style "replicated_with_grad_allreduce") or its shard of the sequence, backward sums it over ranks.
    """
    modules = dict(model.named_modules())
    plan = sharding.plan
    embeddings = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]

    def make_predicate(name: str) -> Callable[[], bool]:
        is_embedding = any(is_within(name, embedding) for embedding in embeddings)
        return _gradient_predicate(name, spec_of(plan.modules.get(name)), sharding.sequence, is_embedding=is_embedding)

    for name, module in modules.items():
        specs = plan.parameters_of(name, module).items()
        shards = {key: PartsShard(spec.dim_of(module.get_parameter(key)), spec.num_parts) for key, spec in specs}
        owners = {p: _path(name, p.rpartition(".")[0]) for p in find_read_parameters(module)}
        # Do not convert sharded parameters that the code reads: it would treat a plain shard as the full parameter.
        # Left as DTensors, torch raises an error.
        read_predicates = {
            p: make_predicate(owner)
            for p, owner in owners.items()
            if spec_of(plan.modules.get(owner)).shard_dim is None
        }
        distribution = sharding.expert_distribution
        mesh = distribution.parameter_mesh if distribution and name in distribution.names else None
        has_parameters = replicate_own_parameters(
            module,
            sharding.mesh,
            memo,
            sums_gradients=make_predicate(name),
            shards=shards,
            read_parameters=read_predicates,
            parameter_mesh=mesh,
            exchanges=_parameter_exchanges(name, module, sharding),
        )
        scatters_output = (
            has_parameters and isinstance(module, nn.Embedding) and not sharding.sequence.runs_on_full_sequence(name)
        )
        if name in plan.position_modules or scatters_output:
            module.register_forward_hook(partial(_scatter_embeddings, sharding.sequence, sharding.mesh))


def _parameter_exchanges(name: str, module: nn.Module, sharding: Sharding) -> dict[str, FeatureExchange]:
    """Return the exchanges for 1-D parameters of `module` with elements of heads, by name."""
    layouts = {key: sharding.plan.uneven_heads.get(_path(name, key)) for key in module._parameters}
    return {
        key: layout.output_exchange(module.get_parameter(key).numel(), sharding.mesh.size())
        for key, layout in layouts.items()
        if layout is not None
    }


def replicate_module(name: str, module: nn.Module, spec: StyleSpec, sharding: Sharding, memo: Memo) -> None:
    """Apply `replicate_own_parameters` to `module` alone, named `name` in the model, without its submodules."""
    is_embedding = isinstance(module, nn.Embedding)
    predicate = _gradient_predicate(name, spec, sharding.sequence, is_embedding=is_embedding)
    if replicate_own_parameters(module, sharding.mesh, memo, sums_gradients=predicate) and is_embedding:
        module.register_forward_hook(partial(_scatter_embeddings, sharding.sequence, sharding.mesh))


def _gradient_predicate(
    name: str, spec: StyleSpec, sequence: SequenceSharding, *, is_embedding: bool
) -> Callable[[], bool]:
    """Return a function that is true while backward must sum the gradients of the module called `name` over ranks."""
    # An embedding and its submodules run on the full sequence, because every rank has all token ids. So their gradients
    # are complete; the rank takes its shard of the output.
    return partial(_sums_gradient, sequence, spec.sums_gradient, is_embedding or sequence.runs_on_full_sequence(name))


def _sums_gradient(sequence: SequenceSharding, always_sums: bool, has_full_sequence: bool) -> bool:
    return always_sums or (not has_full_sequence and sequence.current_state().is_tp_sharded)


def _scatter_embeddings(
    sequence: SequenceSharding, mesh: DeviceMesh, embedding: nn.Module, args: Any, output: Tensor
) -> Tensor:
    return scatter(output, -2, group=mesh) if sequence.current_state().is_tp_sharded else output
