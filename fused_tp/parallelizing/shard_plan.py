"""Plans, which map the names of modules to styles of sharding. They are checked before the first module is changed.

A plan also maps names of 1-D parameters, and of parameters of experts, to styles. `*` in a name matches one component
between dots ("model.layers.*.mlp.up_proj"), as in transformers' `tp_plan` and in `parallelize_module`. Styles are
transformers' names, or torch's `ParallelStyle` objects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fused_tp.nn.float8 import float8_recipe
from fused_tp.nn.linear import MultiQueryLinear, RepeatedColumnLinear, features_of, is_conv1d
from fused_tp.parallelizing.expert_parallel import check_distributable
from fused_tp.parallelizing.experts import takes_routing
from fused_tp.parallelizing.families import Family, find_family, has_family
from fused_tp.parallelizing.head_layout import HeadLayout

Style: TypeAlias = "str | ParallelStyle"


@dataclass(frozen=True)
class StyleSpec:
    """Effect of a style on a module.

    Attributes:
        module_class: class of the modules that the style applies to.
        convert: function that returns the parallel layer to replace the module, called as
            convert(module, mesh=, memo=); None if the module is not replaced.
        shard_dim: sharded dim of the weight [out, in]; None: replicated.
        num_parts: consecutive chunks along that dim, each of which is sharded: 2 for gate and up, 3 n for q, k
            and v in n blocks.
        gathers_output: every rank gets all output features.
        splits_input: the module gets all input features, and therefore the full sequence.
        sums_gradient: the module sees only this rank's heads, so its gradient is summed over ranks.
        sums_output: the module holds a shard of its experts, and gets the same input on all ranks. Its output, and the
            gradients of its input, are summed over ranks.
        adds_once: the output of the module is equal on all ranks and is added to a sum over ranks, so only one rank
            adds it.
        shares_keys: the layer computes queries, which are sharded, and one head of keys and values, which all ranks
            compute.
        shares_rotary: all heads read the last qk_rope_head_dim output features directly, not through the layer that is
            sharded by heads. Each rank's gradient of these features covers its own heads, so it is summed over ranks.
        shares_output: all heads read the output directly, not through a layer that is sharded by heads. Each rank's
            gradient of it covers its own heads, so it is summed over ranks.
        shards_groups: a linear layer per group of heads (`n_groups`), of which each rank computes its own. Used with
            entries for its parameters.
        narrows_output: the last dim of the module's output has one entry per head, of which each rank gets its own.
        repeats_heads: neighboring ranks compute the same head, because there are fewer heads than ranks.
        heads: the layer's features belong to attention heads, whose number the ranks do not divide. The parameters are
            sharded like those of other layers, and the ranks exchange features at the ends of the shards.
    """

    module_class: type[nn.Module] = nn.Module
    convert: Callable[..., nn.Module] | None = None
    shard_dim: int | None = None
    num_parts: int = 1
    gathers_output: bool = False
    splits_input: bool = False
    sums_gradient: bool = False
    sums_output: bool = False
    adds_once: bool = False
    shares_keys: bool = False
    shares_rotary: bool = False
    shares_output: bool = False
    shards_groups: bool = False
    repeats_heads: bool = False
    narrows_output: bool = False
    heads: HeadLayout | None = None


def _packed_style(layer: type[ColumnParallelLinear | RowParallelLinear], shard_dim: int, num_parts: int) -> StyleSpec:
    return StyleSpec(nn.Linear, partial(layer.from_linear, parts=num_parts), shard_dim, num_parts)


UNSHARDED_STYLE = StyleSpec()
_GATHERED_COLUMNS = StyleSpec(
    nn.Linear, partial(ColumnParallelLinear.from_linear, gather_output=True), 0, gathers_output=True
)
_SPLIT_ROWS = StyleSpec(
    nn.Linear, partial(RowParallelLinear.from_linear, input_is_parallel=False), 1, splits_input=True
)
_REPEATED_COLWISE = "repeated_colwise_"  # followed by the number of heads, fewer than ranks: `repeat_key_value_heads`


@cache
def _repeated_spec(num_heads: int) -> StyleSpec:
    convert = partial(RepeatedColumnLinear.from_linear, num_blocks=num_heads)
    return StyleSpec(nn.Linear, convert, 0, repeats_heads=True)


# Styles of layers in attention modules whose heads the ranks do not divide: `share_uneven_heads`. They are followed by
# the fields of a HeadLayout.
_HEAD_STYLES = ("colwise_by_head", "rowwise_by_head", "multi_query_by_head")


def head_style(base_style: str, heads: HeadLayout) -> str:
    """Return the style, one of `_HEAD_STYLES` with a layout, of a layer that has `base_style` for even heads."""
    prefix = {"rowwise": "rowwise", "multi_query_colwise": "multi_query"}.get(base_style, "colwise")
    kind, num_heads, num_kv_heads, keeps_groups = heads
    return f"{prefix}_by_head:{kind}:{num_heads}:{num_kv_heads}:{int(keeps_groups)}"


@cache
def _head_spec(style: str) -> StyleSpec:
    prefix, kind, *numbers = style.split(":")
    num_heads, num_kv_heads, keeps_groups = map(int, numbers)
    heads = HeadLayout(kind, num_heads, num_kv_heads, bool(keeps_groups))
    if prefix == "multi_query_by_head":
        convert: Any = partial(MultiQueryLinear.from_linear, num_heads=num_heads)
        return StyleSpec(nn.Linear, convert, 0, shares_keys=True, heads=heads)
    layer, dim = (RowParallelLinear, 1) if prefix == "rowwise_by_head" else (ColumnParallelLinear, 0)
    return StyleSpec(nn.Linear, layer.from_linear, dim, heads=heads)


class _Styles(dict[str, StyleSpec]):
    """Specs by style. Those that only this package chooses, for some numbers of heads and ranks, are not keys."""

    def __missing__(self, style: str) -> StyleSpec:
        if style.startswith(_REPEATED_COLWISE):
            return _repeated_spec(int(style.removeprefix(_REPEATED_COLWISE)))
        if style.partition(":")[0] in _HEAD_STYLES:
            return _head_spec(style)
        raise KeyError(style)


STYLES = _Styles(
    {
        "colwise": StyleSpec(nn.Linear, ColumnParallelLinear.from_linear, 0),
        "colwise_gather_output": _GATHERED_COLUMNS,
        "colwise_rep": _GATHERED_COLUMNS,
        "embedding_rowwise": StyleSpec(nn.Embedding, VocabParallelEmbedding.from_embedding, 0),
        "ep_dispatch_experts": StyleSpec(sums_output=True),  # unsharded experts, distributed over the ranks of `ep_dim`
        "grouped_colwise": StyleSpec(shards_groups=True),
        "head_bias": StyleSpec(nn.Embedding, sums_gradient=True, narrows_output=True),
        "local_params": UNSHARDED_STYLE,  # used with entries for the module's own parameters
        "mla_kv_a_proj": StyleSpec(nn.Linear, shares_rotary=True),
        "moe_identity_expert": StyleSpec(adds_once=True),
        "moe_tp_experts": StyleSpec(sums_output=True),  # used with entries for the module's own parameters
        "multi_query_colwise": StyleSpec(nn.Linear, MultiQueryLinear.from_linear, 0, shares_keys=True),
        "packed_colwise": _packed_style(ColumnParallelLinear, 0, 2),
        "packed_colwise_3": _packed_style(ColumnParallelLinear, 0, 3),
        "packed_colwise_12": _packed_style(ColumnParallelLinear, 0, 12),
        "packed_rowwise_4": _packed_style(RowParallelLinear, 1, 4),
        "replicate": UNSHARDED_STYLE,
        "replicated_with_grad_allreduce": StyleSpec(sums_gradient=True),
        "rowwise": StyleSpec(nn.Linear, RowParallelLinear.from_linear, 1),
        "rowwise_rep": _SPLIT_ROWS,
        "rowwise_split_input": _SPLIT_ROWS,
        "sequence_parallel": UNSHARDED_STYLE,
        "shared_output": StyleSpec(shares_output=True),
    }
)


@dataclass(frozen=True)
class ParameterSpec:
    """Effect of a style on a 1-D parameter, or on a parameter of experts [experts, out, in] or of a convolution.

    Attributes:
        dim: sharded dim, counted from the end.
        num_parts: number of consecutive chunks along it, each of which is sharded (gate and up).
    """

    dim: int
    num_parts: int = 1

    def dim_of(self, parameter: Tensor) -> int:
        """Return `dim` counted from the front; 0 for a 1-D parameter."""
        return max(0, parameter.ndim + self.dim)


PARAMETER_STYLES = {
    "colwise": ParameterSpec(-2),
    "rowwise": ParameterSpec(-1),
    "packed_colwise": ParameterSpec(-2, num_parts=2),
    "packed_rowwise": ParameterSpec(-1, num_parts=2),
    "grouped_gemm": ParameterSpec(-3),  # sharded along the dim of experts: each rank holds some experts
    "depthwise": ParameterSpec(-3),  # of a depthwise convolution [channels, 1, width]: each rank holds some channels
    "packed_depthwise_3": ParameterSpec(-3, num_parts=3),
}
EXPERT_STYLES = ("moe_tp_experts", "ep_dispatch_experts")
# Styles of modules whose parameters of any shape may have entries.
PARAMETER_OWNER_STYLES = {*EXPERT_STYLES, "local_params", "grouped_colwise"}


@dataclass(frozen=True)
class ShardingPlan:
    """A plan with concrete names.

    Attributes:
        modules: styles of modules.
        parameters: styles of parameters of modules that are not replaced.
        head_attributes: attributes that count heads, and are divided by the number of ranks; by module name.
        per_head_arguments: arguments with one entry per head, and their dim of heads; by module name.
        unread_parameters: names of parameters that the source of a forward reads only under an option that is off.
        position_modules: names of modules whose output covers the full sequence, even if their input is a shard.
        modules_before_layers: names of modules before the layers, which see the full sequence even under sequence
            parallelism.
        full_arguments: arguments that hold the full sequence because of `modules_before_layers`, and are sharded when a
            layer receives them; by module name.
        sharded_arguments: arguments, besides the first, of blocks that run on the full sequence (`whole_blocks`) that
            hold a shard of it; by module name.
        gather_after: name of the module whose output is gathered under sequence parallelism, "" for none.
        modules_after_layers: names of the modules after `gather_after`, outside of the base model, which get the full
            sequence.
        flattens_tokens: layers get the tokens of all rows in one dim.
        query_groups: number of query heads of a rank that share its one head of keys and values, by the name of the
            attention module, where neighboring ranks compute the same head.
        uneven_heads: heads of attention modules whose heads the ranks do not divide; of 1-D parameters of these modules
            with an element (or several) per head, by their names.
    """

    modules: dict[str, Style] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    head_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    per_head_arguments: dict[str, Mapping[str, int]] = field(default_factory=dict)
    unread_parameters: set[str] = field(default_factory=set)
    position_modules: set[str] = field(default_factory=set)
    modules_before_layers: set[str] = field(default_factory=set)
    full_arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sharded_arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gather_after: str = ""
    modules_after_layers: tuple[str, ...] = ()
    flattens_tokens: bool = False
    query_groups: dict[str, int] = field(default_factory=dict)
    uneven_heads: dict[str, HeadLayout] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)

    def __contains__(self, name: str) -> bool:
        return name in self.modules or name in self.parameters

    def parameters_of(self, name: str, module: nn.Module) -> dict[str, ParameterSpec]:
        """Return the specs of the planned parameters of `module`, called `name`, by the names of the parameters."""
        if not self.parameters:
            return {}
        prefix = f"{name}." if name else ""
        styles_by_key = [(key, self.parameters.get(prefix + key)) for key in module._parameters]
        return {key: PARAMETER_STYLES[style] for key, style in styles_by_key if style is not None}


def spec_of(style: Style | None) -> StyleSpec:
    """Return the spec of a style; `UNSHARDED_STYLE` for None and for a `ParallelStyle`."""
    return STYLES[style] if isinstance(style, str) else UNSHARDED_STYLE


PACKED_PROJECTIONS = {"query_key_value", "c_attn", "qkv_proj", "Wqkv"}  # q, k and v in one layer
# Common names of projections whose output is split into heads.
HEAD_PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value", "to_q", "to_k", "to_v"),
    *("Wq", "Wk", "Wv", "project_q", "project_k", "project_v"),
    *PACKED_PROJECTIONS,
}
KEY_VALUE_PROJECTIONS = {
    *("k_proj", "v_proj", "wk", "wv", "key", "value", "to_k", "to_v", "Wk", "Wv", "project_k", "project_v"),
}
# Names of projections from a latent vector to heads, each from its own latent; all heads share one head of latents.
LATENT_HEAD_PROJECTIONS = {"q_b_proj", "q_gate_proj", "kv_b_proj"}
# Common names of norms of the outputs of HEAD_PROJECTIONS; they see this rank's heads only.
HEAD_NORMS = {
    *("q_norm", "k_norm", "query_norm", "key_norm"),
    *("q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
}
# Common names of attributes with numbers of heads.
HEAD_COUNT_NAMES = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"),
    *("n_heads", "n_kv_heads", "n_head", "n_kv_head"),
)


def attention_of(name: str) -> str | None:
    """Return the name of the attention module for which layer `name` computes queries, keys or values.

    The layer may be inside a wrapper (`q_proj.linear`). Returns None for other layers.
    """
    attention, _, leaf = name.removesuffix(".linear").rpartition(".")
    return attention if leaf in HEAD_PROJECTIONS else None


def _find_family_of_model(model: nn.Module) -> tuple[str, Family]:
    """Return (name prefix of a transformers model's base model, its family).

    For an unknown family with a known text model inside, returns the prefix and family of the text model.
    """
    config: Any = getattr(model, "config", None)
    text_model: Any = model
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text_config is not config and not has_family(config) and has_family(text_config):
        model_types = (
            (getattr(getattr(module, "config", None), "model_type", ""), module) for module in model.modules()
        )
        text_model = next(
            (module for model_type, module in model_types if model_type == text_config.model_type), text_model
        )
        config = text_config
    base = getattr(text_model, "base_model", text_model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return prefix, find_family(config)


def _model_plan(model: Any) -> dict[str, Style]:
    """Return transformers' plan for `model`, overridden by the plan of its family in FAMILIES."""
    prefix, family = _find_family_of_model(model)
    # Older versions of transformers have `_tp_plan` instead of the property `tp_plan`.
    plan: dict[str, Style] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    overrides = {(prefix + pattern).removesuffix("."): style for pattern, style in family.plan.items()}
    if family.shards_head is not None:
        head, style = model.get_output_embeddings(), "colwise_gather_output" if family.shards_head else None
        overrides |= {name: style for name, module in model.named_modules() if module is head}
    for name, style in overrides.items():
        plan.pop(name, None)
        if style is not None:
            plan[name] = style
    return plan


def find_unread_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters that the source of a forward reads only under an option that is off."""
    prefix, family = _find_family_of_model(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return set(_find_matches(list(names), *(prefix + pattern for pattern in family.unread_parameters)))


def resolve_plan(model: nn.Module, plan: str | Mapping[str, Style]) -> ShardingPlan:
    """Resolve "auto" (the model's own `tp_plan`), or a dict of patterns, to concrete names and their styles.

    Raises:
        TypeError: `plan` is neither "auto" nor a dict, or a style is neither a string nor a `ParallelStyle`.
        ValueError: no plan is found, a pattern matches no module, or a style is unknown or does not apply to its
            module.
    """
    model_plan = _model_plan(model)
    patterns: Mapping[str, Style]
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"plan must be 'auto' or a dict from module names to styles, got {plan!r}.")
        patterns = model_plan
        if not patterns:
            raise ValueError(f"{type(model).__name__} has no tp_plan, which plan='auto' needs; " + _suggest_plan(model))
    elif isinstance(plan, Mapping):
        patterns = plan
    else:
        raise TypeError(f"plan must be 'auto' or a dict from module names to styles, got {type(plan).__name__}.")

    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix, family = _find_family_of_model(model)
    resolved_plan = ShardingPlan(flattens_tokens=family.flattens_tokens)
    if family.gather_after and prefix + family.gather_after in modules:
        later_modules = tuple(name for name, _ in model.named_children() if prefix and f"{name}." != prefix)
        resolved_plan = replace(
            resolved_plan, gather_after=prefix + family.gather_after, modules_after_layers=later_modules
        )
    unsupported_styles: dict[str, Style] = {}
    for pattern, style in patterns.items():
        matching_modules = _find_matches(modules, pattern)
        names = matching_modules
        if style != "moe_identity_expert":
            names = [name for name in names if not isinstance(modules[name], nn.Identity)]
        matching_parameters = _find_matches(parameters, pattern)
        # The model's own plan may name layers that only some configurations have. An entry of the caller's plan that
        # matches nothing is a mistake.
        is_known = model_plan.get(pattern) == style or bool(matching_modules)
        if not (names or matching_parameters or is_known):
            raise ValueError(
                f"plan has the entry {pattern!r}, but {type(model).__name__} has no such module. Remove the entry."
            )
        are_supported = [
            _is_supported(style, parameters[name], _owner_styles(name, patterns)) for name in matching_parameters
        ]
        if False in are_supported or (isinstance(style, str) and names and style not in STYLES):
            unsupported_styles[pattern] = style
            continue
        for name in names:
            check_style(name, modules[name], style)
        resolved_plan.modules.update(dict.fromkeys(names, style))
        resolved_plan.parameters.update({name: style for name in matching_parameters if isinstance(style, str)})
    if unsupported_styles:
        raise ValueError(
            f"Unsupported styles in the plan: {unsupported_styles}. Supported for modules: "
            f"{', '.join(sorted(STYLES))}; for 1-D parameters: 'colwise'; for parameters of modules with the styles "
            f"{', '.join(sorted(PARAMETER_OWNER_STYLES))}: {', '.join(sorted(PARAMETER_STYLES))}. Remove these "
            "entries to replicate their modules on every rank"
            + (
                ": plan={name: style for name, style in model.tp_plan.items() if name not in "
                f"{sorted(unsupported_styles)}}}."
                if model_plan
                else "."
            )
        )
    _shard_tied_embeddings(model, resolved_plan)
    specs = {name: spec_of(style) for name, style in resolved_plan.modules.items()}
    column_layers = {name for name, spec in specs.items() if spec.shard_dim == 0 and not spec.gathers_output}
    parents = dict.fromkeys(name.rpartition(".")[0] for name in column_layers)
    for pattern, attributes in family.head_attributes.items():
        for name in _find_matches(parents, prefix + pattern):  # layers of several kinds may have the same name
            resolved_plan.head_attributes[name] = tuple(key for key in attributes if hasattr(modules[name], key))
    for pattern, arguments in family.per_head_arguments.items():
        resolved_plan.per_head_arguments.update(dict.fromkeys(_find_matches(parents, prefix + pattern), arguments))
    resolved_plan.position_modules.update(
        _find_matches(modules, *(prefix + pattern for pattern in family.position_modules))
    )
    resolved_plan.modules_before_layers.update(
        _find_matches(modules, *(prefix + pattern for pattern in family.modules_before_layers))
    )
    for arguments_by_module, family_arguments in (
        (resolved_plan.full_arguments, family.full_arguments),
        (resolved_plan.sharded_arguments, family.sharded_arguments),
    ):
        for pattern, argument_names in family_arguments.items():
            for name in _find_matches(modules, prefix + pattern):
                arguments_by_module[name] = (*arguments_by_module.get(name, ()), *argument_names)
    resolved_plan.unread_parameters.update(find_unread_parameters(model))
    if not resolved_plan:
        has_adapters = hasattr(model, "merge_and_unload")
        first_entries = ", ".join(list(patterns)[:2])
        description = f"has {len(patterns)} entries ({first_entries}, ...), none of which {type(model).__name__} has"
        raise ValueError(
            f"The plan {description if patterns else 'is empty'}, so nothing would be sharded. "
            + (
                "Pass the PeftModel to parallelize, or the model without adapters (use merge_and_unload())."
                if has_adapters
                else "Pass a plan."
            )
        )
    return resolved_plan


def _suggest_plan(model: nn.Module) -> str:
    """Return advice for a model without a plan: to write a plan, if one can shard most of the model's parameters."""
    numel_by_module, total_numel = {}, sum(p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        own_numel = sum(p.numel() for p in module.parameters(recurse=False))
        if own_numel and not isinstance(module, nn.Linear | nn.Embedding) and not is_conv1d(module):
            numel_by_module[name] = own_numel
    if 2 * sum(numel_by_module.values()) < total_numel:
        return "pass plan={'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}."
    name = max(numel_by_module, key=lambda name: numel_by_module[name])
    return (
        f"{sum(numel_by_module.values()) / total_numel:.0%} of its parameters are in modules like {name!r} "
        f"({type(model.get_submodule(name)).__name__}), which are neither nn.Linear nor nn.Embedding and cannot be "
        "sharded by a plan. Use a cp_dim instead, or FSDP2."
    )


def plan_experts(
    model: nn.Module,
    plan: ShardingPlan,
    requested_plan: str | Mapping[str, Style],
    num_ep_ranks: int,
    *,
    are_experts_unsharded: bool,
) -> list[str]:
    """Return the names of the modules of experts to distribute over `num_ep_ranks` ranks, and adapt `plan` to it.

    `are_experts_unsharded`: experts are not also sharded over tensor parallel ranks of another dim.

    Raises:
        ValueError: there are no experts, or a module of experts cannot be distributed.
    """
    patterns = (
        {**_model_plan(model), **(getattr(model, "ep_plan", None) or {})}
        if isinstance(requested_plan, str)
        else requested_plan
    )
    modules = dict(model.named_modules())
    names = _find_matches(modules, *(pattern for pattern, style in patterns.items() if style in EXPERT_STYLES))
    if not names:
        raise ValueError(
            f"ep_dim needs experts, but the plan of {type(model).__name__} has no module with the style "
            "'moe_tp_experts' or 'ep_dispatch_experts'. Omit ep_dim, or add the modules of experts to plan."
        )
    takes_rows = _find_family_of_model(model)[1].takes_expert_rows
    for name in names:
        check_distributable(name, modules[name], num_ep_ranks, is_supported=takes_routing(modules[name]) or takes_rows)
        keys = [f"{name}.{key}" for key in modules[name]._parameters]
        if are_experts_unsharded:
            plan.modules[name] = "ep_dispatch_experts"
            plan.parameters.update(dict.fromkeys(keys, "grouped_gemm"))
        else:
            plan.modules.setdefault(name, "ep_dispatch_experts")
            for key in keys:  # the mesh dim of experts is not the one that `plan` applies to
                if plan.parameters.get(key) == "grouped_gemm":
                    del plan.parameters[key]
    return names


def check_experts_not_distributed(plan: ShardingPlan, ep_dim: str | None) -> None:
    """Remove entries for distributed experts from `plan`, because `ep_dim` has one rank.

    Raises:
        ValueError: `plan` has 'ep_dispatch_experts', but `ep_dim` is None.
    """
    distributed_names = [name for name, style in plan.modules.items() if style == "ep_dispatch_experts"]
    if distributed_names and ep_dim is None:
        raise ValueError(
            f"{distributed_names[0]!r} has the style 'ep_dispatch_experts' in the plan, which needs ep_dim. Pass "
            "ep_dim=, the mesh dim to distribute experts over; or use 'moe_tp_experts' to shard each expert over "
            "tensor parallel ranks."
        )
    for name in distributed_names:
        del plan.modules[name]
    for name in [name for name, style in plan.parameters.items() if style == "grouped_gemm"]:
        del plan.parameters[name]


def _shard_tied_embeddings(model: nn.Module, plan: ShardingPlan) -> None:
    """Add embeddings that are tied to a sharded output layer to `plan`, sharded by vocabulary like that layer."""
    output_layer_names = [name for name, style in plan.modules.items() if spec_of(style).gathers_output]
    weight_ids = {id(model.get_submodule(name).weight) for name in output_layer_names}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in weight_ids:
            plan.modules.setdefault(name, "embedding_rowwise")


def _owner_styles(name: str, patterns: Mapping[str, Style]) -> set[Style]:
    """Return the styles that `patterns` give to the module that owns the parameter `name`."""
    owner = name.rpartition(".")[0]
    return {style for pattern, style in patterns.items() if _find_matches([owner], pattern)}


def _is_supported(style: Style, parameter: Tensor, owner_styles: set[Style]) -> bool:
    if parameter.ndim == 1:
        return style == "colwise"
    return style in PARAMETER_STYLES and not owner_styles.isdisjoint(PARAMETER_OWNER_STYLES)


def check_experts(model: nn.Module, plan: ShardingPlan) -> None:
    """Check that each tensor parallel rank computes only its shard of the 'moe_tp_experts' modules.

    Raises:
        ValueError: a parameter of such a module is not in the plan, so that all ranks would compute it.
    """
    for name, style in plan.modules.items():
        if style == "moe_tp_experts":
            _check_expert_module(name, model.get_submodule(name), plan)


def _check_expert_module(name: str, module: nn.Module, plan: ShardingPlan) -> None:
    """Apply `check_experts` to one module: the sum over ranks would count an unsharded parameter several times."""
    unsharded_names = {key for key, _ in module.named_parameters()} - {*plan.parameters_of(name, module)}
    unsharded_names -= {"down_proj_bias"} if takes_routing(module) else set()  # added after the sum
    unsharded_names |= {"post_expert_norm"} if getattr(module, "has_post_expert_norm", False) else set()
    unsharded_names |= {key for key, child in module.named_children() if isinstance(child, nn.Identity)}
    unsharded_names = {key for key in unsharded_names if f"{name}.{key}" not in plan}
    if unsharded_names or not module._parameters:
        problem = (
            f"its {sorted(unsharded_names)[0]!r} is not in the plan"
            if unsharded_names
            else "it has no direct parameters"
        )
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has the style 'moe_tp_experts' in the plan, but {problem}: each rank "
            "must hold a shard of every expert. Add its parameters to the plan as 'packed_colwise' (gate and up), "
            f"'colwise' or 'rowwise', or remove {name!r} and the names inside it from the plan."
        )
    # transformers sets `is_concatenated` on classes of experts: False if the columns of gate and up alternate.
    expected_num_parts = 2 if getattr(module, "is_concatenated", True) else 1
    for key, spec in plan.parameters_of(name, module).items():
        if key == "gate_up_proj" and hasattr(module, "is_concatenated") and spec.num_parts != expected_num_parts:
            raise ValueError(
                f"'{name}.{key}' has the style {plan.parameters[f'{name}.{key}']!r} in the plan, which would separate "
                "gate and up features: "
                + (
                    "gate and up are concatenated. Use 'packed_colwise' ('packed_rowwise'"
                    if expected_num_parts == 2
                    else "gate and up features alternate. Use 'colwise' ('rowwise'"
                )
                + " for experts [in, out])."
            )


def warn_of_small_sharded_share(model: nn.Module, plan: ShardingPlan) -> None:
    """Warn if the plan shards less than a quarter of the model: each TP rank would then compute most of it."""
    numel_by_id = {id(p): p.numel() for p in model.parameters()}
    if any(isinstance(style, ParallelStyle) for style in plan.modules.values()):
        return  # a ParallelStyle does not show which parameters it shards
    specs = {name: spec_of(style) for name, style in plan.modules.items()}
    sharded_layers = (name for name, spec in specs.items() if spec.shard_dim is not None and not spec.shares_keys)
    layers = map(model.get_submodule, sharded_layers)
    layer_parameters = [p for layer in layers for p in layer.parameters(recurse=False)]
    sharded_numel_by_id = {id(p): p.numel() for p in (*layer_parameters, *map(model.get_parameter, plan.parameters))}
    sharded_share = sum(sharded_numel_by_id.values()) / max(1, sum(numel_by_id.values()))
    if sharded_share < 0.25:
        warnings.warn(
            f"The plan shards {len(sharded_numel_by_id)} of the {len(numel_by_id)} parameters of "
            f"{type(model).__name__}, {sharded_share:.0%} of their elements. The other parameters are replicated: each "
            "tensor parallel rank holds them and computes "
            "with them.",
            stacklevel=3,
        )


def _find_matches(names: Iterable[str], *patterns: str) -> list[str]:
    """Return the names that match one of `patterns`, compared component by component between dots."""
    split_patterns, matches = [pattern.split(".") for pattern in patterns], []
    for name in names:
        components = name.split(".")
        for pattern_components in split_patterns:
            if len(components) == len(pattern_components) and all(map(fnmatchcase, components, pattern_components)):
                matches.append(name)
                break
    return matches


def _check_not_by_head(name: str, module: nn.Module) -> None:
    """Raise ValueError if a module has a list of submodules, perhaps one per head: ranks would use the first ones."""
    if any(isinstance(child, nn.ModuleList) for child in module.children()):
        raise ValueError(
            f"{name!r} ({type(module).__name__}) contains an nn.ModuleList, perhaps with one module per head, which is "
            "not supported: every tensor parallel rank would use the first modules for its heads. Remove the layers "
            "next to it from the plan."
        )


# Subclasses of nn.Linear that can be replaced. FalconLinear differs by one extra rounding only.
LINEAR_LIKE_CLASSES = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def check_style(name: str, module: nn.Module, style: Style) -> None:
    """Check that `style` can be applied to `module`.

    Raises:
        TypeError: `style` is neither a string nor a ParallelStyle.
        ValueError: the class or the weights of `module` are not supported.
    """
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str):
        raise TypeError(f"The style of {name!r} must be a string or a ParallelStyle, got {type(style).__name__}.")
    if STYLES[style].sums_gradient:
        _check_not_by_head(name, module)
    class_path = f"{type(module).__module__}.{type(module).__name__}"
    expected_class = STYLES[style].module_class
    try:
        is_float8 = float8_recipe(module) is not None
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be sharded: {error}") from None
    # Exact types: a subclass may have another forward (quantized, with adapters), which the replacement would drop.
    are_alternatives_supported = {
        nn.Linear: is_conv1d(module) or is_float8 or class_path in LINEAR_LIKE_CLASSES,
        nn.Embedding: embedding_scale(module) is not None,
    }
    is_supported = type(module) is expected_class or are_alternatives_supported.get(expected_class, False)
    if expected_class is not nn.Module and not is_supported:
        raise ValueError(
            f"The style {style!r} of {name!r} needs a plain nn.{expected_class.__name__}, got {class_path}. Remove "
            f"{name!r} from the plan, or replace the module by a plain one."
        )
    for key, parameter in module.named_parameters(recurse=False):
        if STYLES[style].shard_dim is not None and not parameter.is_floating_point():
            raise ValueError(
                f"{name}.{key} must have a floating-point dtype to be sharded, got {parameter.dtype}. Call parallelize "
                f"before the model is quantized, or remove {name!r} from the plan."
            )


def embedding_scale(module: nn.Module) -> Tensor | float | None:
    """Return the factor by which a scaled embedding of transformers (Gemma) multiplies its rows; None for others."""
    if not (isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding")):
        return None
    scale: Any = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor) and scale.is_meta:  # transformers would initialize it
        return torch.tensor(module.scalar_embed_scale, dtype=torch.float32, device="cpu")
    return scale


def repeat_key_value_heads(model: nn.Module, plan: ShardingPlan, num_ranks: int) -> ShardingPlan:
    """Return `plan`, in which neighboring ranks compute the same head of keys and values if there are fewer than ranks.

    Only in attention modules with separate projections of keys and values, of which all code reads the number of query
    heads per head of keys from `num_key_value_groups`, as in transformers. The others are left to `share_uneven_heads`.
    """
    styles, query_groups = dict(plan.modules), dict(plan.query_groups)
    for name, style in plan.modules.items():
        attention = attention_of(name)
        is_key_or_value = name.removesuffix(".linear").rpartition(".")[2] in KEY_VALUE_PROJECTIONS
        if attention is None or style != "colwise" or not is_key_or_value:
            continue
        parent: Any = model.get_submodule(attention)
        num_heads, num_kv_heads = repeatable_heads(model, parent) or (0, 0)
        if any(is_kv_count(key) for key in plan.head_attributes.get(attention, ())):
            continue  # they would be divided by the number of ranks
        if num_kv_heads and num_kv_heads % num_ranks and not num_ranks % num_kv_heads and not num_heads % num_ranks:
            styles[name] = f"{_REPEATED_COLWISE}{num_kv_heads}"
            query_groups[attention] = num_heads // num_ranks
    return replace(plan, modules=styles, query_groups=query_groups)


def repeatable_heads(model: nn.Module, attention: nn.Module) -> tuple[int, int] | None:
    """Return (query heads, heads of keys and values) of an attention module that can repeat the latter; else None."""
    counts = head_counts(attention, getattr(attention, "config", None), getattr(model, "config", None))
    kv_counts = {count for key, count in counts.items() if is_kv_count(key)}
    query_counts = {count for key, count in counts.items() if not is_kv_count(key)}
    if len(kv_counts) != 1 or len(query_counts) != 1:
        return None
    num_heads, num_kv_heads = query_counts.pop(), kv_counts.pop()
    is_read = getattr(attention, "num_key_value_groups", None) == num_heads / num_kv_heads
    return (num_heads, num_kv_heads) if is_read else None


def is_kv_count(attribute: str) -> bool:
    """True if the attribute `attribute`, a name in HEAD_COUNT_NAMES, is the number of heads of keys and values."""
    return "kv" in attribute or "key_value" in attribute


def config_value(config: object, name: str) -> Any:
    """Return the attribute `name` of a module or of a transformers config.

    Returns None if it is missing, or if transformers raises because it differs between layers.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return None


def head_counts(*sources: object) -> dict[str, int]:
    """Return the numbers of heads by attribute name, each from the first of `sources` that has the attribute."""
    counts: dict[str, int] = {}
    for source in sources:
        get_text_config = getattr(source, "get_text_config", None)
        source = get_text_config() if callable(get_text_config) else source
        values = {key: config_value(source, key) for key in HEAD_COUNT_NAMES}
        counts = {key: n for key, n in values.items() if isinstance(n, int) and n > 0} | counts
    return counts


# ---- modules that see a shard of the features -----------------------------------------------------------------------
#
# A column layer's backward sums the gradient of its input over ranks, so modules before it get complete gradients. A
# module after it sees this rank's features only, so its gradient must be summed over ranks. Whether a module is before
# or after is inferred from the widths of its parameters.

ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


def choose_intermediate_styles(model: nn.Module, plan: ShardingPlan, *, shards_logits: bool = False) -> ShardingPlan:
    """Return `plan` with styles added for modules with parameters that are between sharded layers.

    `shards_logits`: the output layer leaves its features sharded, too.

    Raises:
        ValueError: a module is not in the plan, and its widths do not show whether it sees sharded features.
    """
    completed_plan = replace(plan, modules=dict(plan.modules))
    modules = dict(model.named_modules())
    head = _output_layer(model, plan.modules) if shards_logits else None
    names = [*plan.modules, *plan.parameters]
    for name, (column_layers, full_widths) in _find_sharded_scopes(modules, plan.modules, head).items():
        parent, prefix = modules[name], f"{name}." if name else ""
        if name not in plan.modules:
            for key, parameter in parent.named_parameters(recurse=False):
                if prefix + key not in plan and (parameter.ndim == 0 or parameter.shape[-1] not in full_widths):
                    raise ValueError(
                        f"{prefix + key!r} {tuple(parameter.shape)} is not in the plan, but {column_layers[0]!r} is "
                        "sharded: it is unknown whether a rank uses all of the parameter. Add it to the plan as "
                        f"'colwise' if each rank must hold a shard; or add {name!r} as "
                        "'replicated_with_grad_allreduce' if its gradient must be summed over ranks, or as 'replicate' "
                        "if its gradient is equal on all ranks."
                    )
        for leaf, child in parent.named_children():
            path = prefix + leaf
            is_planned = any(planned_name == path or planned_name.startswith(f"{path}.") for planned_name in names)
            if (
                is_planned
                or next(child.parameters(), None) is None
                or _has_full_features(child, full_widths, leaf, column_layers)
            ):
                continue
            if type(child).__module__ in ACTIVATION_MODULES and all(p.numel() == 1 for p in child.parameters()):
                completed_plan.modules[path] = "replicated_with_grad_allreduce"
                continue
            _check_not_by_head(path, child)
            style = "mla_kv_a_proj" if leaf == LATENT_PROJECTION else "replicated_with_grad_allreduce"
            raise ValueError(
                f"{path!r} ({type(child).__name__}) is not in the plan, but {column_layers[0]!r} next to it is "
                "sharded: if it sees only this rank's features, its gradient must be summed over ranks. Add it to the "
                f"plan as {style!r} in this case, or as 'replicate' if its input is equal on all ranks."
            )
    return completed_plan


def _find_sharded_scopes(
    modules: Mapping[str, Any], plan: Mapping[str, Style], head: nn.Module | None
) -> dict[str, tuple[list[str], set[int]]]:
    """Find the modules whose code may see sharded features.

    These are the parent of each column layer and, if the parent contains no row layer, the modules around it up to the
    first one that does; and from there down to the parents of row layers. `head` leaves its features sharded, whatever
    its style.

    Returns:
        By module name: (the column layers whose features it may see, the widths of features that all ranks have).
    """
    row_layers_of_scope: dict[str, list[str]] = {}  # names of row layers, by the name of each module that contains them
    for name, style in plan.items():
        if spec_of(style).shard_dim == 1:
            for scope in enclosing_scopes(name):
                row_layers_of_scope.setdefault(scope, []).append(name)
    scopes_by_name: dict[str, tuple[list[str], set[int]]] = {}
    for name, style in plan.items():
        spec = spec_of(style)
        is_column_layer = spec.module_class is nn.Linear and spec.shard_dim == 0
        if not is_column_layer or (spec.gathers_output and modules[name] is not head):
            continue
        scopes = enclosing_scopes(name)
        outermost = (
            scopes[0]
            if spec.gathers_output
            else next((scope for scope in scopes if scope in row_layers_of_scope), scopes[0])
        )
        row_layers = [] if spec.gathers_output else row_layers_of_scope.get(outermost, [])
        widths = {features_of(modules[name])[0], *(features_of(modules[row_layer])[1] for row_layer in row_layers)}
        for scope in dict.fromkeys(
            scope for layer in (name, *row_layers) for scope in enclosing_scopes(layer) if is_within(scope, outermost)
        ):
            column_layers, full_widths = scopes_by_name.setdefault(scope, ([], set()))
            column_layers.append(name)
            full_widths |= widths
    return scopes_by_name


def _output_layer(model: nn.Module, plan: Mapping[str, Style]) -> nn.Module | None:
    """Return the layer that computes the logits: the output embeddings, or the only layer that gathers its output."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    if callable(get_head):
        head: nn.Module | None = get_head()
        return head
    names = [name for name, style in plan.items() if spec_of(style).gathers_output]
    return model.get_submodule(names[0]) if len(names) == 1 else None


def enclosing_scopes(name: str) -> list[str]:
    """Return the names of the modules that contain `name`, from its parent to the model itself, ""."""
    components = name.split(".")
    return [".".join(components[:n]) for n in range(len(components) - 1, -1, -1)]


def is_within(scope: str, top: str) -> bool:
    """True if the module `scope` is the module `top`, or is inside it."""
    return not top or scope == top or scope.startswith(f"{top}.")


LATENT_PROJECTION = "kv_a_proj_with_mqa"


def _has_full_features(module: nn.Module, full_widths: set[int], leaf: str, column_layers: list[str]) -> bool:
    """True if the widths of the parameters in `module` show that it sees unsharded features."""
    leaves = {name.rpartition(".")[2] for name in column_layers}
    if leaf == LATENT_PROJECTION or (leaf in HEAD_NORMS and not HEAD_PROJECTIONS.isdisjoint(leaves)):
        return False
    submodules = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    linears = [m for m in submodules if isinstance(m, nn.Linear) or is_conv1d(m)]
    if linears:  # check these only: other modules inside `module` see their outputs
        return any(features_of(m)[0] in full_widths for m in linears)
    return all(
        isinstance(m, nn.Embedding)
        or all(p.ndim == 1 and p.numel() in full_widths for p in m.parameters(recurse=False))
        for m in submodules
    )
