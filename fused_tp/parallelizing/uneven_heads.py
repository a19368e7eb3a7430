"""Plans for attention modules whose heads cannot be distributed evenly over the ranks.

Each rank gets complete heads, `fused_tp.core.heads.partition_heads`. Layers that compute queries, keys and values, or
read the output of attention, keep the shards of other layers, and exchange features with other ranks at their ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fused_tp.nn.linear import features_of
from fused_tp.parallelizing.head_layout import NUM_GROUPS, HeadLayout, counts_kv_heads
from fused_tp.parallelizing.shard_plan import (
    KEY_VALUE_PROJECTIONS,
    LATENT_HEAD_PROJECTIONS,
    PACKED_PROJECTIONS,
    ShardingPlan,
    Style,
    attention_of,
    enclosing_scopes,
    head_counts,
    head_style,
    is_kv_count,
    is_within,
    repeatable_heads,
    spec_of,
)

# Layers with all heads of queries, or of keys and values, that are not among HEAD_PROJECTIONS.
_OTHER_QUERY_PROJECTIONS = {"q", "q_lin"}
_OTHER_KEY_VALUE_PROJECTIONS = {"k", "v", "k_lin", "v_lin"}
_OTHER_PROJECTIONS = LATENT_HEAD_PROJECTIONS | _OTHER_QUERY_PROJECTIONS | _OTHER_KEY_VALUE_PROJECTIONS


class _UnevenHeadsError(Exception):
    """The heads of an attention module cannot be distributed unevenly; the message is the second half of a sentence."""


def share_uneven_heads(model: nn.Module, plan: ShardingPlan, num_ranks: int) -> ShardingPlan:
    """Return `plan`, in which attention heads that `num_ranks` does not divide are distributed unevenly.

    Raises:
        ValueError: an attention module does not support it; the message lists the TP sizes that divide its heads.
    """
    styles, uneven_heads = dict(plan.modules), dict(plan.uneven_heads)
    for attention, layer_names in _attention_layers(plan.modules).items():
        module = model.get_submodule(attention)
        counts = head_counts(module, getattr(module, "config", None), getattr(model, "config", None))
        specs = [spec_of(plan.modules[name]) for name in layer_names]
        is_latent = any(name.rpartition(".")[2] in LATENT_HEAD_PROJECTIONS for name in layer_names)
        if is_latent or any(spec.shares_keys or spec.repeats_heads for spec in specs):
            counts = {key: count for key, count in counts.items() if not is_kv_count(key)}
        num_blocks = max(1, *(spec.num_parts // 3 for spec in specs))  # blocks of q, k and v, each sharded
        if all(count % (num_blocks * num_ranks) == 0 for count in counts.values()):
            continue
        try:
            new_styles, new_heads = _uneven_styles(model, plan, attention, layer_names, num_ranks)
        except _UnevenHeadsError as error:
            sizes = {
                size
                for size in range(1, max(counts.values()) + 1)
                if all(count % (num_blocks * size) == 0 for count in counts.values())
            }
            if (heads := repeatable_heads(model, module)) is not None:
                sizes |= {size for size in range(1, heads[0] + 1) if heads[0] % size == 0 and size % heads[1] == 0}
            counts_text = " and ".join(f"{key}={count}" for key, count in counts.items())
            raise ValueError(
                f"{type(model).__name__} has {counts_text} ({layer_names[0]!r}), which {num_ranks} tensor parallel "
                f"ranks cannot share evenly, nor unevenly: {error}. Use one of these TP sizes: "
                f"{', '.join(map(str, sorted(sizes)))}."
            ) from None
        styles |= new_styles
        uneven_heads |= new_heads
    return replace(plan, modules=styles, uneven_heads=uneven_heads)


def _attention_layers(styles: Mapping[str, Style]) -> dict[str, list[str]]:
    """Return the names of the layers that compute the heads of each attention module, by its name."""
    layers: dict[str, list[str]] = {}
    for name, style in styles.items():
        parent, _, leaf = name.removesuffix(".linear").rpartition(".")
        spec = spec_of(style)
        has_heads = attention_of(name) is not None or leaf in _OTHER_PROJECTIONS
        if has_heads and spec.shard_dim == 0 and not spec.gathers_output:
            layers.setdefault(parent, []).append(name)
    return layers


def _uneven_styles(
    model: nn.Module, plan: ShardingPlan, attention: str, layer_names: list[str], num_ranks: int
) -> tuple[dict[str, str], dict[str, HeadLayout]]:
    """Return the styles of the layers of `attention`, and the heads of itself and of its parameters."""
    layout = _layout(model, plan, attention, layer_names, num_ranks)
    styles = {
        name: head_style(str(plan.modules[name]), layout._replace(kind=kind))
        for name, kind in _column_kinds(model, plan, attention, layout)
    }
    for name in _output_layers(plan.modules, attention):
        width = features_of(model.get_submodule(name))[0]
        if plan.modules[name] != "rowwise" or width % layout.num_heads:
            raise _UnevenHeadsError(f"{name!r} has the style {plan.modules[name]!r} and {width} input features")
        styles[name] = head_style("rowwise", layout)
    heads = {attention: layout}
    for name in plan.parameters:
        if is_within(name, attention):
            parameter = model.get_parameter(name)
            if parameter.ndim > 1 or parameter.numel() % layout.num_heads:
                raise _UnevenHeadsError(f"{name!r} {tuple(parameter.shape)} has another number of elements")
            heads[name] = layout
    return styles, heads


def _layout(model: nn.Module, plan: ShardingPlan, attention: str, layer_names: list[str], num_ranks: int) -> HeadLayout:
    module: Any = model.get_submodule(attention)
    # Layers may differ in their numbers of heads, so those of the module come first.
    sources = module, getattr(module, "config", None), getattr(model, "config", None)
    counts_of_sources = [head_counts(source) for source in sources]
    query_counts, kv_counts = (
        next(
            filter(
                None, ({n for key, n in counts.items() if is_kv_count(key) == is_kv} for counts in counts_of_sources)
            ),
            set(),
        )
        for is_kv in (False, True)
    )
    kv_counts = kv_counts or set(query_counts)
    if any(name.endswith(".kv_b_proj") for name in layer_names):
        kv_counts = set(query_counts)  # latent attention expands keys and values to all heads
    shares_keys = any(spec_of(plan.modules[name]).shares_keys for name in layer_names)
    if shares_keys:
        kv_counts = {1}
    if len(query_counts) != 1 or len(kv_counts) != 1:
        raise _UnevenHeadsError("these numbers differ")
    layout = HeadLayout("query", query_counts.pop(), kv_counts.pop())
    if layout.num_heads % layout.num_kv_heads:
        raise _UnevenHeadsError("the heads of keys and values do not divide those of queries")
    attributes = plan.head_attributes.get(attention, ())
    for key in attributes:
        value, total = getattr(module, key), layout.num_kv_heads if counts_kv_heads(key) else layout.num_heads
        if not isinstance(value, int) or value % total:
            raise _UnevenHeadsError(f"{key}={value!r} of {attention!r} is not a multiple of the heads")
    group_size = layout.num_heads // layout.num_kv_heads
    reads_group_size = getattr(module, NUM_GROUPS, None) == group_size or any(map(counts_kv_heads, attributes))
    reads_group_size |= shares_keys  # the only key is broadcast
    if num_ranks > layout.num_heads:
        raise _UnevenHeadsError("each rank needs a head")
    if reads_group_size or all(heads.group_size == group_size for heads in layout.partition(num_ranks)):
        return layout
    if num_ranks > layout.num_kv_heads:
        raise _UnevenHeadsError(
            f"{type(module).__name__} has no attribute {NUM_GROUPS} with the number of query heads that read a head of "
            "keys, so ranks cannot share one"
        )
    return layout._replace(keeps_groups=True)


def _column_kinds(
    model: nn.Module, plan: ShardingPlan, attention: str, layout: HeadLayout
) -> Iterator[tuple[str, str]]:
    """Yield the name of each column layer in `attention`, and the kind of its HeadLayout."""
    for name, style in plan.modules.items():
        spec = spec_of(style)
        if not is_within(name, attention) or (isinstance(style, str) and (spec.shard_dim != 0 or spec.gathers_output)):
            continue
        leaf = name.removesuffix(".linear").rpartition(".")[2]
        is_query = leaf in LATENT_HEAD_PROJECTIONS | _OTHER_QUERY_PROJECTIONS or attention_of(name) is not None
        if style == "multi_query_colwise":
            yield name, "multi_query"
            continue
        if style == "packed_colwise_3":
            kind = "packed"
        elif style != "colwise":
            raise _UnevenHeadsError(f"the style of {name!r} is {style!r}")
        elif leaf in PACKED_PROJECTIONS:
            kind = "grouped"
        elif leaf in KEY_VALUE_PROJECTIONS | _OTHER_KEY_VALUE_PROJECTIONS:
            kind = "kv"
        elif is_query or "gate" in leaf or leaf == "g_proj" or layout.num_heads == layout.num_kv_heads:
            kind = "query"
        else:
            raise _UnevenHeadsError(f"it is not known to which heads the features of {name!r} belong")
        width, num_blocks = features_of(model.get_submodule(name))[1], layout._replace(kind=kind).num_blocks
        if width % num_blocks:
            raise _UnevenHeadsError(f"{name!r} has {width} output features")
        yield name, kind


def _output_layers(styles: Mapping[str, Style], attention: str) -> list[str]:
    """Return the names of the row layers in `attention`, or in the innermost module around it that has any."""
    row_layers = [name for name, style in styles.items() if spec_of(style).shard_dim == 1]
    for scope in (attention, *enclosing_scopes(attention)):
        names = [name for name in row_layers if is_within(name, scope)]
        if names:
            if scope != attention and len(names) > 1:
                break
            return names
    raise _UnevenHeadsError(f"it is not known which layer reads the output of {attention!r}")
