"""Plans: how each module of a model is sharded, by name and style; checked in full before the first module is changed.

A plan maps names of modules, and of parameters of one dim, to styles. `*` in a name matches one part between dots
("model.layers.*.mlp.up_proj"), as in transformers' `tp_plan` and in `parallelize_module`. Styles are transformers'
names, or torch's `ParallelStyle` objects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fused_tp.nn.linear import MultiQueryLinear, features_of, is_conv1d
from fused_tp.parallelizing.expert_parallel import check_distributed
from fused_tp.parallelizing.experts import takes_routing
from fused_tp.parallelizing.families import Family, family_of, is_known

Style: TypeAlias = "str | ParallelStyle"


@dataclass(frozen=True)
class StyleSpec:
    """Effect of a style on a module.

    Attributes:
        needs: class of the modules that it applies to.
        convert: makes the parallel layer that replaces the module, called as convert(module, mesh=, memo=); None for
            modules that stay whole.
        shard_dim: sharded dim of the weight [out, in]; None: replicated.
        parts: number of consecutive parts along that dim, each sharded: 2 for gate and up, 3 n for q, k and v in n
            blocks.
        gathers_output: every rank gets all output features.
        splits_input: the module gets all input features, and with them the whole sequence.
        sums_gradient: the module sees only this rank's heads, so its gradient is one term of a sum over ranks.
        sums_output: the module holds a shard of its experts, and gets the same input on all ranks; its output is one
            term of a sum over ranks, and so are the gradients of its input.
        adds_once: the output of the module is added to such a sum, and equal on all ranks: only one rank adds it.
        shares_keys: the layer makes queries and one head of keys and values, which all ranks compute.
        shares_rotary: all heads read the last qk_rope_head_dim output features directly, not through the layer that is
            sharded by heads: each rank's gradient covers its own heads, and is summed.
    """

    needs: type[nn.Module] = nn.Module
    convert: Callable[..., nn.Module] | None = None
    shard_dim: int | None = None
    parts: int = 1
    gathers_output: bool = False
    splits_input: bool = False
    sums_gradient: bool = False
    sums_output: bool = False
    adds_once: bool = False
    shares_keys: bool = False
    shares_rotary: bool = False


def _packed(layer: type[ColumnParallelLinear | RowParallelLinear], shard_dim: int, parts: int) -> StyleSpec:
    return StyleSpec(nn.Linear, partial(layer.from_linear, parts=parts), shard_dim, parts)


WHOLE = StyleSpec()
_GATHERED = StyleSpec(nn.Linear, partial(ColumnParallelLinear.from_linear, gather_output=True), 0, gathers_output=True)
_SPLIT = StyleSpec(nn.Linear, partial(RowParallelLinear.from_linear, input_is_parallel=False), 1, splits_input=True)
STYLES = {
    "colwise": StyleSpec(nn.Linear, ColumnParallelLinear.from_linear, 0),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "embedding_rowwise": StyleSpec(nn.Embedding, VocabParallelEmbedding.from_embedding, 0),
    "ep_dispatch_experts": StyleSpec(sums_output=True),  # whole experts, distributed over the ranks of `ep_dim`
    "local_params": WHOLE,  # together with entries for the module's own parameters
    "mla_kv_a_proj": StyleSpec(nn.Linear, shares_rotary=True),
    "moe_identity_expert": StyleSpec(adds_once=True),
    "moe_tp_experts": StyleSpec(sums_output=True),  # together with entries for the module's own parameters
    "multi_query_colwise": StyleSpec(nn.Linear, MultiQueryLinear.from_linear, 0, shares_keys=True),
    "packed_colwise": _packed(ColumnParallelLinear, 0, 2),
    "packed_colwise_3": _packed(ColumnParallelLinear, 0, 3),
    "packed_colwise_12": _packed(ColumnParallelLinear, 0, 12),
    "packed_rowwise_4": _packed(RowParallelLinear, 1, 4),
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": StyleSpec(sums_gradient=True),
    "rowwise": StyleSpec(nn.Linear, RowParallelLinear.from_linear, 1),
    "rowwise_rep": _SPLIT,
    "rowwise_split_input": _SPLIT,
    "sequence_parallel": WHOLE,
}


@dataclass(frozen=True)
class ParameterSpec:
    """Effect of a style on a parameter: of experts [experts, out, in], or of one dim.

    Attributes:
        dim: sharded dim, counted from the end.
        parts: number of consecutive parts along it, each sharded (gate and up).
    """

    dim: int
    parts: int = 1

    def dim_of(self, parameter: Tensor) -> int:
        """`dim` counted from the front; 0 for a parameter of one dim."""
        return max(0, parameter.ndim + self.dim)


PARAMETER_STYLES = {
    "colwise": ParameterSpec(-2),
    "rowwise": ParameterSpec(-1),
    "packed_colwise": ParameterSpec(-2, parts=2),
    "packed_rowwise": ParameterSpec(-1, parts=2),
    "grouped_gemm": ParameterSpec(-3),  # whole experts of [experts, ...]
}
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


@dataclass(frozen=True)
class ShardingPlan:
    """A plan with concrete names.

    Attributes:
        modules: styles of modules.
        parameters: styles of parameters, for modules that no layer of fused_tp replaces.
        counts: attributes that count heads, of which a rank has some; by module name.
        per_head: arguments with one entry for each head, and their dim of heads; by module name.
        unread: names of parameters that no forward reads, although its source does.
        embeds: names of modules whose output covers the whole sequence, whatever their input.
        before: names of modules in front of the layers, which see the whole sequence even if ranks have shards of it.
        splits: arguments behind these modules that hold the whole sequence, of which a rank takes its shard; by module
            name.
        parts: arguments, besides the first, of blocks that run on the whole sequence, of which a rank has its shard; by
            module name.
        joins: name of the module whose output is gathered if ranks have shards of the sequence, "" for none.
        behind: names of the modules behind it, which get the whole sequence: those outside of the base model.
        flattens: layers get the tokens of all rows in one dim.
    """

    modules: dict[str, Style] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    per_head: dict[str, Mapping[str, int]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    embeds: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)
    splits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    joins: str = ""
    behind: tuple[str, ...] = ()
    flattens: bool = False

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)

    def __contains__(self, name: str) -> bool:
        return name in self.modules or name in self.parameters

    def parameters_of(self, name: str, module: nn.Module) -> dict[str, ParameterSpec]:
        """Specs of the planned parameters of `module`, called `name`, by their names in it."""
        if not self.parameters:
            return {}
        prefix = f"{name}." if name else ""
        known = [(key, self.parameters.get(prefix + key)) for key in module._parameters]
        return {key: PARAMETER_STYLES[style] for key, style in known if style is not None}


def spec_of(style: Style | None) -> StyleSpec:
    """Spec of a style; `WHOLE` for None and for a `ParallelStyle`."""
    return STYLES[style] if isinstance(style, str) else WHOLE


# Common names of projections whose output is split into heads, and (HEAD_COUNTS) of attributes with numbers of heads.
HEAD_PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value", "to_q", "to_k", "to_v"),
    *("Wq", "Wk", "Wv", "project_q", "project_k", "project_v"),
    *("query_key_value", "c_attn", "qkv_proj", "Wqkv"),  # all three in one
}
# Norms of the outputs of these projections, of which a rank has its own heads.
HEAD_NORMS = {
    *("q_norm", "k_norm", "query_norm", "key_norm"),
    *("q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
}
HEAD_COUNTS = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"),
    *("n_heads", "n_kv_heads", "n_head", "n_kv_head"),
)


def attention_of(name: str) -> str | None:
    """Name of the attention module for which layer `name` computes queries, keys or values, by itself or in a wrapper
    (`q_proj.linear`); None for other layers."""
    attention, _, leaf = name.removesuffix(".linear").rpartition(".")
    return attention if leaf in HEAD_PROJECTIONS else None


def _family(model: nn.Module) -> tuple[str, Family]:
    """Return (name prefix of a transformers model's base, its family); for an unknown family, those of the text model
    inside."""
    config: Any = getattr(model, "config", None)
    part: Any = model
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config and not is_known(config) and is_known(text):
        kinds = ((getattr(getattr(module, "config", None), "model_type", ""), module) for module in model.modules())
        part = next((module for kind, module in kinds if kind == text.model_type), part)
        config = text
    base = getattr(part, "base_model", part)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return prefix, family_of(config)


def _own_plan(model: Any) -> dict[str, Style]:
    """transformers' plan for a model, overridden by that of its family in FAMILIES, by the names in `model`."""
    prefix, family = _family(model)
    # Only newer versions of transformers have the property.
    plan: dict[str, Style] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    of_family = {(prefix + pattern).removesuffix("."): style for pattern, style in family.plan.items()}
    if family.shards_head is not None:
        head, style = model.get_output_embeddings(), "colwise_gather_output" if family.shards_head else None
        of_family |= {name: style for name, module in model.named_modules() if module is head}
    for name, style in of_family.items():
        plan.pop(name, None)
        if style is not None:
            plan[name] = style
    return plan


def unread_of(model: nn.Module) -> set[str]:
    """Names of parameters that no forward reads by itself, although its source does, under an option that is off."""
    prefix, family = _family(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return set(_matching(list(names), *(prefix + one for one in family.unread)))


def resolve_plan(model: nn.Module, plan: str | Mapping[str, Style]) -> ShardingPlan:
    """Resolve "auto" (the model's own `tp_plan`), or a dict of patterns, to concrete names and their styles.

    Raises:
        TypeError: `plan` is neither "auto" nor a dict, or a style is neither a string nor a `ParallelStyle`.
        ValueError: no plan found, a pattern that matches no module, an unknown style, or one that does not suit its
            module.
    """
    own_plan = _own_plan(model)
    patterns: Mapping[str, Style]
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"plan is {plan!r}; pass 'auto' or a dict from module names to styles.")
        patterns = own_plan
        if not patterns:
            raise ValueError(
                f"{type(model).__name__} has no tp_plan of its own, so plan='auto' has nothing to read; "
                + _instead_of_auto(model)
            )
    elif isinstance(plan, Mapping):
        patterns = plan
    else:
        raise TypeError(f"plan must be 'auto' or a dict from module names to styles, not {type(plan).__name__}.")

    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix, family = _family(model)
    resolved = ShardingPlan(flattens=family.flattens)
    if family.joins and prefix + family.joins in modules:
        behind = tuple(name for name, _ in model.named_children() if prefix and f"{name}." != prefix)
        resolved = replace(resolved, joins=prefix + family.joins, behind=behind)
    unserved: dict[str, Style] = {}
    for pattern, style in patterns.items():
        matching = _matching(modules, pattern)
        names = matching
        if style != "moe_identity_expert":
            names = [name for name in names if not isinstance(modules[name], nn.Identity)]
        sharded = _matching(parameters, pattern)
        # A model's own plan may name layers that only some of its configurations have; an entry of the caller's that
        # matches nothing is a mistake.
        known = own_plan.get(pattern) == style or bool(matching)
        if not (names or sharded or known):
            raise ValueError(f"plan names {pattern!r}, but {type(model).__name__} has no such module.")
        served = [_is_served(style, parameters[name], _own_styles(name, patterns)) for name in sharded]
        if False in served or (isinstance(style, str) and names and style not in STYLES):
            unserved[pattern] = style
            continue
        for name in names:
            check_style(name, modules[name], style)
        resolved.modules.update(dict.fromkeys(names, style))
        resolved.parameters.update({name: style for name in sharded if isinstance(style, str)})
    if unserved:
        raise ValueError(
            f"The plan has styles that fused_tp does not serve: {unserved}. Modules are served as "
            f"{', '.join(sorted(STYLES))}, parameters of one dim as 'colwise', those of modules that are "
            f"'moe_tp_experts' as {', '.join(sorted(PARAMETER_STYLES))}. Leave these names out of the plan, and what "
            "they stand for stays whole on every rank"
            + (
                f": plan={{name: style for name, style in model.tp_plan.items() if name not in {sorted(unserved)}}}."
                if own_plan
                else "."
            )
        )
    _shard_tied_embeddings(model, resolved)
    specs = {name: spec_of(style) for name, style in resolved.modules.items()}
    columns = {name for name, spec in specs.items() if spec.shard_dim == 0 and not spec.gathers_output}
    parents = dict.fromkeys(name.rpartition(".")[0] for name in columns)
    for pattern, attributes in family.counts.items():
        resolved.counts.update(dict.fromkeys(_matching(parents, prefix + pattern), attributes))
    for pattern, arguments in family.per_head.items():
        resolved.per_head.update(dict.fromkeys(_matching(parents, prefix + pattern), arguments))
    resolved.embeds.update(_matching(modules, *(prefix + one for one in family.embeds)))
    resolved.before.update(_matching(modules, *(prefix + one for one in family.before)))
    for taken, known_arguments in ((resolved.splits, family.splits), (resolved.parts, family.parts)):
        for pattern, arguments_of in known_arguments.items():
            for name in _matching(modules, prefix + pattern):
                taken[name] = (*taken.get(name, ()), *arguments_of)
    resolved.unread.update(unread_of(model))
    if not resolved:
        adapters = hasattr(model, "merge_and_unload")
        first = ", ".join(list(patterns)[:2])
        found = f"has {len(patterns)} entries ({first}, ...), of which {type(model).__name__} has none"
        raise ValueError(
            f"The plan {found if patterns else 'is empty'}, so nothing would be sharded. "
            + (
                "Give parallelize the PeftModel, or the model without adapters: see merge_and_unload()."
                if adapters
                else "Pass plan=."
            )
        )
    return resolved


def _instead_of_auto(model: nn.Module) -> str:
    """Advice for a model without a plan: to write one, if a plan can shard most of its parameters."""
    others, size = {}, sum(p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if own and not isinstance(module, nn.Linear | nn.Embedding) and not is_conv1d(module):
            others[name] = own
    if 2 * sum(others.values()) < size:
        return "pass plan={'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}."
    name = max(others, key=lambda one: others[one])
    return (
        f"{sum(others.values()) / size:.0%} of its parameters are in modules like {name!r} "
        f"({type(model.get_submodule(name)).__name__}), which are neither nn.Linear nor nn.Embedding. Use a cp_dim "
        "instead, or FSDP2."
    )


def plan_experts(
    model: nn.Module, plan: ShardingPlan, asked: str | Mapping[str, Style], ep_ranks: int, *, whole: bool
) -> list[str]:
    """Return the names of the modules of experts to distribute over `ep_ranks` ranks, and adapt `plan` to it.

    `whole`: experts are not also sharded over other, tensor parallel ranks.

    Raises:
        ValueError: there are no experts, or some that cannot be distributed.
    """
    patterns = {**_own_plan(model), **(getattr(model, "ep_plan", None) or {})} if isinstance(asked, str) else asked
    modules = dict(model.named_modules())
    found = _matching(modules, *(pattern for pattern, style in patterns.items() if style in EXPERTS))
    if not found:
        raise ValueError(
            f"ep_dim is given, and the plan of {type(model).__name__} names no experts, as 'moe_tp_experts' or "
            "'ep_dispatch_experts'. Leave ep_dim out, or name them in plan."
        )
    rows = _family(model)[1].expert_rows
    for name in found:
        check_distributed(name, modules[name], ep_ranks, supported=takes_routing(modules[name]) or rows)
        keys = [f"{name}.{key}" for key in modules[name]._parameters]
        if whole:
            plan.modules[name] = "ep_dispatch_experts"
            plan.parameters.update(dict.fromkeys(keys, "grouped_gemm"))
        else:
            plan.modules.setdefault(name, "ep_dispatch_experts")
            for key in keys:  # whole experts, distributed over another mesh dim
                if plan.parameters.get(key) == "grouped_gemm":
                    del plan.parameters[key]
    return found


def check_none_distributed(plan: ShardingPlan, ep_dim: str | None) -> None:
    """Refuse 'ep_dispatch_experts' without `ep_dim`; drop its entries if `ep_dim` has one rank."""
    dealt = [name for name, style in plan.modules.items() if style == "ep_dispatch_experts"]
    if dealt and ep_dim is None:
        raise ValueError(
            f"The plan gives {dealt[0]!r} the style 'ep_dispatch_experts', whole experts distributed over ranks; pass "
            "ep_dim=, the mesh dim of these ranks. Tensor parallel ranks hold parts of each expert as 'moe_tp_experts'."
        )
    for name in dealt:
        del plan.modules[name]
    for name in [name for name, style in plan.parameters.items() if style == "grouped_gemm"]:
        del plan.parameters[name]


def _shard_tied_embeddings(model: nn.Module, plan: ShardingPlan) -> None:
    """Shard an embedding that is tied to a sharded output layer like that layer, by vocabulary."""
    heads = [name for name, style in plan.modules.items() if spec_of(style).gathers_output]
    weights = {id(model.get_submodule(name).weight) for name in heads}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in weights:
            plan.modules.setdefault(name, "embedding_rowwise")


def _own_styles(name: str, patterns: Mapping[str, Style]) -> set[Style]:
    """Styles of the module that owns a parameter."""
    owner = name.rpartition(".")[0]
    return {style for pattern, style in patterns.items() if _matching([owner], pattern)}


def _is_served(style: Style, parameter: Tensor, own: set[Style]) -> bool:
    if parameter.ndim == 1:
        return style == "colwise"
    return style in PARAMETER_STYLES and not own.isdisjoint(EXPERTS)


def check_experts(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse experts of which a tensor parallel rank would compute more than its shard."""
    for name, style in plan.modules.items():
        if style == "moe_tp_experts":
            _check_experts(name, model.get_submodule(name), plan)


def _check_experts(name: str, module: nn.Module, plan: ShardingPlan) -> None:
    """Refuse experts of which a rank would compute more than its shard: the sum over ranks would count it again."""
    inside = {key for key, _ in module.named_parameters()} - {*plan.parameters_of(name, module)}
    inside -= {"down_proj_bias"} if takes_routing(module) else set()  # added after the sum
    inside |= {"post_expert_norm"} if getattr(module, "has_post_expert_norm", False) else set()
    inside |= {key for key, child in module.named_children() if isinstance(child, nn.Identity)}
    inside = {key for key in inside if f"{name}.{key}" not in plan}
    if inside or not module._parameters:
        what = f"has {sorted(inside)[0]!r}, which is not" if inside else "has no parameters of its own"
        raise ValueError(
            f"The plan gives {name!r} ({type(module).__name__}) the style 'moe_tp_experts', and it {what} in the plan: "
            "each rank must hold a part of every expert. Give its parameters 'packed_colwise' (gate and up), "
            f"'colwise' or 'rowwise', or leave {name!r} and what is in it out of the plan."
        )
    parts = 2 if getattr(module, "is_concatenated", True) else 1  # as transformers marks classes of experts
    for key, spec in plan.parameters_of(name, module).items():
        if key == "gate_up_proj" and hasattr(module, "is_concatenated") and spec.parts != parts:
            raise ValueError(
                f"The plan gives '{name}.{key}' the style {plan.parameters[f'{name}.{key}']!r}, and gate and up "
                + ("lie one after the other in it: 'packed_colwise'" if parts == 2 else "take turns in it: 'colwise'")
                + " (or row, where the experts are [in, out]) keeps what belongs together on one rank."
            )


def warn_of_small_share(model: nn.Module, plan: ShardingPlan) -> None:
    """Warn if the plan shards less than a quarter of the model: each TP rank would then compute most of it."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    if any(isinstance(style, ParallelStyle) for style in plan.modules.values()):
        return  # unknown which parameters it shards
    specs = {name: spec_of(style) for name, style in plan.modules.items()}
    named = (name for name, spec in specs.items() if spec.shard_dim is not None and not spec.shares_keys)
    layers = map(model.get_submodule, named)
    own = [p for layer in layers for p in layer.parameters(recurse=False)]
    sharded = {id(p): p.numel() for p in (*own, *map(model.get_parameter, plan.parameters))}
    share = sum(sharded.values()) / max(1, sum(sizes.values()))
    if share < 0.25:
        warnings.warn(
            f"The plan shards {len(sharded)} of the {len(sizes)} parameters of {type(model).__name__}, {share:.0%} of "
            "their elements; each tensor parallel rank holds and computes all of the others.",
            stacklevel=3,
        )


def _matching(names: Iterable[str], *patterns: str) -> list[str]:
    """Names that match one of `patterns`, part by part between dots."""
    wanted, found = [pattern.split(".") for pattern in patterns], []
    for name in names:
        parts = name.split(".")
        for one in wanted:
            if len(parts) == len(one) and all(map(fnmatchcase, parts, one)):
                found.append(name)
                break
    return found


def _check_not_by_head(name: str, module: nn.Module) -> None:
    """Refuse a module with a list of submodules for single heads, of which each rank would use the first ones."""
    if any(isinstance(child, nn.ModuleList) for child in module.children()):
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has modules in a list, perhaps one for each head; a tensor parallel "
            "rank would use the first of them for its own heads. Leave the layers near it out of the plan."
        )


SAME_AS_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)  # except for one extra rounding


def check_style(name: str, module: nn.Module, style: Style) -> None:
    """Refuse a style that does not suit `module`."""
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str):
        raise TypeError(f"The style of {name!r} must be a string or a ParallelStyle, not {type(style).__name__}.")
    if STYLES[style].sums_gradient:
        _check_not_by_head(name, module)
    kind = f"{type(module).__module__}.{type(module).__name__}"
    wanted = STYLES[style].needs
    # A subclass has its own forward (quantized, with adapters), which the replacement would silently drop.
    alike = {nn.Linear: is_conv1d(module) or kind in SAME_AS_LINEAR, nn.Embedding: embedding_scale(module) is not None}
    served = type(module) is wanted or alike.get(wanted, False)
    if wanted is not nn.Module and not served:
        raise ValueError(
            f"The plan gives {name!r} the style {style!r}, which needs a plain nn.{wanted.__name__}; it is a {kind}."
        )
    for key, parameter in module.named_parameters(recurse=False):
        if STYLES[style].shard_dim is not None and not parameter.is_floating_point():
            raise ValueError(
                f"{name}.{key} holds {parameter.dtype}; only layers of floating-point weights can be sharded. "
                f"Parallelize the model before it is quantized, or leave {name!r} out of the plan."
            )


def embedding_scale(module: nn.Module) -> float | None:
    """Factor by which a scaled embedding of transformers (Gemma family) multiplies its rows; None for other modules."""
    if not (isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding")):
        return None
    scale: Any = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return None if scale is None else float(scale)


def check_head_counts(model: nn.Module, plan: Mapping[str, Style], world_size: int) -> None:
    """Refuse a TP size that would split an attention head, and name the sizes that work.

    Head counts are read from the attention module, its `config` or the model's `config`; the first one found is used.
    """
    checked: set[tuple[str, StyleSpec]] = set()  # q_proj, k_proj and v_proj share their module's counts
    for name, style in plan.items():
        attention = attention_of(name)
        spec = spec_of(style)
        if spec.shard_dim != 0 or spec.gathers_output or attention is None or (attention, spec) in checked:
            continue
        checked.add((attention, spec))
        parent = model.get_submodule(attention)
        counts = head_counts(parent, getattr(parent, "config", None), getattr(model, "config", None))
        if spec.shares_keys:
            counts = {key: count for key, count in counts.items() if not is_of_keys(key)}
        blocks = max(1, spec.parts // 3)  # blocks of q, k and v, each sharded
        if any(count % (blocks * world_size) for count in counts.values()):
            smallest = min(counts.values())
            sizes = [w for w in range(1, smallest + 1) if all(c % (blocks * w) == 0 for c in counts.values())]
            heads = " and ".join(f"{key}={count}" for key, count in counts.items())
            raise ValueError(
                f"{type(model).__name__} has {heads}, which {world_size} tensor-parallel ranks cannot share evenly "
                f"({name!r}). TP sizes that work: {', '.join(map(str, sizes))}."
            )


def is_of_keys(count: str) -> bool:
    """True if `count`, a name in HEAD_COUNTS, counts heads of keys and values."""
    return "kv" in count or "key_value" in count


def value_of(config: object, name: str) -> Any:
    """Attribute of a module or of a transformers config; None if it is missing, or if transformers raises because it
    differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return None


def head_counts(*sources: object) -> dict[str, int]:
    """Numbers of heads by attribute name, each from the first of `sources` that has the attribute."""
    counts: dict[str, int] = {}
    for source in sources:
        text = getattr(source, "get_text_config", None)
        source = text() if callable(text) else source
        found = {key: value_of(source, key) for key in HEAD_COUNTS}
        counts = {key: n for key, n in found.items() if isinstance(n, int) and n > 0} | counts
    return counts


# ---- modules that see a shard of the features -----------------------------------------------------------------------
#
# A column layer's backward sums the gradient of its input, so modules before it get complete gradients. A module behind
# it sees this rank's features, and gets one term of a sum. The widths of a module's parameters show its place.

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def settle_between(model: nn.Module, plan: ShardingPlan, *, shards_logits: bool = False) -> ShardingPlan:
    """Return `plan`, with a style for each module that has parameters and must be between two sharded ones.

    `shards_logits`: the output layer leaves its features sharded, too.

    Raises:
        ValueError: a module is not in the plan, and its widths do not show its place.
    """
    settled = replace(plan, modules=dict(plan.modules))
    modules = dict(model.named_modules())
    head = _output_layer(model, plan.modules) if shards_logits else None
    names = [*plan.modules, *plan.parameters]
    for name, (column, whole) in _around_parts(modules, plan.modules, head).items():
        parent, prefix = modules[name], f"{name}." if name else ""
        if name not in plan.modules:
            for key, parameter in parent.named_parameters(recurse=False):
                if prefix + key not in plan and (parameter.ndim == 0 or parameter.shape[-1] not in whole):
                    raise ValueError(
                        f"{prefix + key!r} {tuple(parameter.shape)} is not in the plan, and {column[0]!r} is sharded: "
                        "whether a rank uses all of it is not known. Add it to the plan as 'colwise' if each rank is "
                        f"to have its part; or {name!r} as 'replicated_with_grad_allreduce' if each rank adds one term "
                        "to its gradient, or as 'replicate' if all ranks find the same."
                    )
        for leaf, child in parent.named_children():
            path = prefix + leaf
            planned = any(one == path or one.startswith(f"{path}.") for one in names)
            if planned or next(child.parameters(), None) is None or _sees_all(child, whole, leaf, column):
                continue
            if type(child).__module__ in ACTIVATIONS and all(p.numel() == 1 for p in child.parameters()):
                settled.modules[path] = "replicated_with_grad_allreduce"
                continue
            _check_not_by_head(path, child)
            style = "mla_kv_a_proj" if leaf == LATENT else "replicated_with_grad_allreduce"
            raise ValueError(
                f"{path!r} ({type(child).__name__}) is not in the plan, and {column[0]!r} near it is sharded: if it "
                "sees this rank's features, each rank would find the gradient of these only. Add it to the plan as "
                f"{style!r}, or as 'replicate' if it sees what all ranks have."
            )
    return settled


def _around_parts(
    modules: Mapping[str, Any], plan: Mapping[str, Style], head: nn.Module | None
) -> dict[str, tuple[list[str], set[int]]]:
    """Modules whose own code may see a rank's features: by name, the column layers that compute these, and the widths
    of features that all ranks have.

    These are the parent of a column layer and, if it contains no row layer, the modules around it up to the first one
    that does; and from there down to the parents of row layers. `head` leaves its features sharded, whatever its style.
    """
    rows: dict[str, list[str]] = {}  # row layers by each module around them
    for name, style in plan.items():
        if spec_of(style).shard_dim == 1:
            for scope in _scopes(name):
                rows.setdefault(scope, []).append(name)
    found: dict[str, tuple[list[str], set[int]]] = {}
    for name, style in plan.items():
        spec = spec_of(style)
        column_layer = spec.needs is nn.Linear and spec.shard_dim == 0
        if not column_layer or (spec.gathers_output and modules[name] is not head):
            continue
        scopes = _scopes(name)
        top = scopes[0] if spec.gathers_output else next((scope for scope in scopes if scope in rows), scopes[0])
        ends = [] if spec.gathers_output else rows.get(top, [])
        widths = {features_of(modules[name])[0], *(features_of(modules[end])[1] for end in ends)}
        for scope in dict.fromkeys(scope for one in (name, *ends) for scope in _scopes(one) if within(scope, top)):
            column, whole = found.setdefault(scope, ([], set()))
            column.append(name)
            whole |= widths
    return found


def _output_layer(model: nn.Module, plan: Mapping[str, Style]) -> nn.Module | None:
    """Layer that computes the logits: transformers' models name it; in others it is the only one of its style."""
    known: Any = getattr(model, "get_output_embeddings", None)
    if callable(known):
        head: nn.Module | None = known()
        return head
    names = [name for name, style in plan.items() if spec_of(style).gathers_output]
    return model.get_submodule(names[0]) if len(names) == 1 else None


def _scopes(name: str) -> list[str]:
    """Names of the modules around `name`, from its parent to the model itself, ""."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)]


def within(scope: str, top: str) -> bool:
    """True if the module `scope` is the module `top`, or is inside it."""
    return not top or scope == top or scope.startswith(f"{top}.")


LATENT = "kv_a_proj_with_mqa"


def _sees_all(module: nn.Module, whole: set[int], leaf: str, column: list[str]) -> bool:
    """True if the widths of the parameters in `module` are those of features that all ranks have."""
    leaves = {name.rpartition(".")[2] for name in column}
    if leaf == LATENT or (leaf in HEAD_NORMS and not HEAD_PROJECTIONS.isdisjoint(leaves)):
        return False
    inside = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    linears = [m for m in inside if isinstance(m, nn.Linear) or is_conv1d(m)]
    if linears:  # other modules inside see their outputs
        return any(features_of(m)[0] in whole for m in linears)
    return all(
        isinstance(m, nn.Embedding) or all(p.ndim == 1 and p.numel() in whole for p in m.parameters(recurse=False))
        for m in inside
    )
