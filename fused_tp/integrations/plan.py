"""Which module of a model is cut how: names and styles, checked in full before the first module is touched.

A plan maps module names to styles. `*` in a name matches one part between dots ("model.layers.*.mlp.up_proj"), as in
transformers' `tp_plan` and in `parallelize_module`. Styles are transformers' words, or torch's `ParallelStyle` objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

Style: TypeAlias = "str | ParallelStyle"


@dataclass(frozen=True)
class StyleSpec:
    """What a style does with a module.

    Attributes:
        needs: the kind of module that it takes.
        convert: makes the parallel layer that replaces the module, called as convert(module, mesh=, memo=); None for
            modules that stay whole.
        shard_dim: of the weight [out, in]; None: replicated.
        gathers_output: every rank gets all output features.
        splits_input: the module is given all input features, and with them the whole sequence.
        sums_gradient: the module sees a part of the heads, so that a rank's gradient is one term of a sum.
    """

    needs: type[nn.Module] = nn.Module
    convert: Callable[..., nn.Module] | None = None
    shard_dim: int | None = None
    gathers_output: bool = False
    splits_input: bool = False
    sums_gradient: bool = False


WHOLE = StyleSpec()
_GATHERED = StyleSpec(nn.Linear, partial(ColumnParallelLinear.from_linear, gather_output=True), 0, gathers_output=True)
_SPLIT = StyleSpec(nn.Linear, partial(RowParallelLinear.from_linear, input_is_parallel=False), 1, splits_input=True)
STYLES = {
    "colwise": StyleSpec(nn.Linear, ColumnParallelLinear.from_linear, 0),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "embedding_rowwise": StyleSpec(nn.Embedding, VocabParallelEmbedding.from_embedding, 0),
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": StyleSpec(sums_gradient=True),
    "rowwise": StyleSpec(nn.Linear, RowParallelLinear.from_linear, 1),
    "rowwise_rep": _SPLIT,
    "rowwise_split_input": _SPLIT,
    "sequence_parallel": WHOLE,
}


def spec_of(style: Style | None) -> StyleSpec:
    """The entry of a style; that of a module that stays whole for none and for a `ParallelStyle`."""
    return STYLES[style] if isinstance(style, str) else WHOLE


# What people call the projections whose output is split into heads, and the attributes that say how many heads.
HEAD_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value", "to_q", "to_k", "to_v"}
# Norms of what these projections return, of which a rank has its heads.
HEAD_NORMS = {
    *("q_norm", "k_norm", "query_norm", "key_norm"),
    *("q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
}
HEAD_COUNTS = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"),
    *("n_heads", "n_kv_heads", "n_head", "n_kv_head"),
)


def resolve_plan(model: nn.Module, plan: str | Mapping[str, Style]) -> dict[str, Style]:
    """Concrete module names and their styles, from "auto" (the model's own `tp_plan`) or from a dict of patterns.

    Raises:
        TypeError: `plan` is neither "auto" nor a dict, or a style is neither a string nor a `ParallelStyle`.
        ValueError: no plan to be found, a pattern that no module has, an unknown style, or one that does not suit its
            module.
    """
    own = isinstance(plan, str)
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"plan is {plan!r}; pass 'auto' or a dict from module names to styles.")
        # The property is newer than the attribute.
        patterns = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not patterns:
            raise ValueError(
                f"{type(model).__name__} has no tp_plan of its own, so plan='auto' has nothing to read; pass "
                "plan={'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}."
            )
    elif isinstance(plan, Mapping):
        patterns = plan
    else:
        raise TypeError(f"plan must be 'auto' or a dict from module names to styles, not {type(plan).__name__}.")

    modules = dict(model.named_modules())
    resolved: dict[str, Style] = {}
    for pattern, style in patterns.items():
        names = [name for name in modules if _matches(name, pattern)]
        # A model's own plan may name layers that only some of its configurations have; a plan that somebody wrote
        # for this call and that matches nothing is a mistake.
        if not names and any(_matches(name, pattern) for name, _ in model.named_parameters()):
            raise ValueError(
                f"The plan gives the parameter {pattern!r} the style {style!r}; only whole modules can be cut. "
                "Leave it out of the plan."
            )
        if not names and not own:
            raise ValueError(f"plan names {pattern!r}, but {type(model).__name__} has no such module.")
        for name in names:
            check_style(name, modules[name], style)
            resolved[name] = style
    return resolved


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def check_style(name: str, module: nn.Module, style: Style) -> None:
    """Refuse a style that is unknown, or that `module` cannot take, with a sentence."""
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str):
        raise TypeError(f"The style of {name!r} must be a string or a ParallelStyle, not {type(style).__name__}.")
    kind = type(module).__name__
    if style not in STYLES:
        raise ValueError(
            f"The plan gives {name!r} ({kind}) the style {style!r}, which fused_tp does not serve. It serves "
            f"{', '.join(sorted(STYLES))}; leave {name!r} out of the plan to keep it whole on every rank."
        )
    wanted = STYLES[style].needs
    # A subclass has a forward of its own (quantized, with adapters), which the replacement would drop unseen.
    served = type(module) is wanted or (wanted is nn.Embedding and embedding_scale(module) is not None)
    if wanted is not nn.Module and not served:
        raise ValueError(
            f"The plan gives {name!r} the style {style!r}, which needs a plain nn.{wanted.__name__}; it is a {kind}."
        )


def embedding_scale(module: nn.Module) -> float | None:
    """What an embedding of transformers' Gemma family and its like multiplies its rows by; None for other modules."""
    if not (isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding")):
        return None
    scale: Any = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return None if scale is None else float(scale)


def check_head_counts(model: nn.Module, plan: Mapping[str, Style], world_size: int) -> None:
    """Refuse a TP size that would cut through an attention head, and say which sizes work.

    Head counts are read off the attention module, its `config` or the model's `config`, the first that has them counts.
    """
    for name, style in plan.items():
        parent_name, _, leaf = name.rpartition(".")
        spec = spec_of(style)
        if spec.shard_dim != 0 or spec.gathers_output or leaf not in HEAD_PROJECTIONS:
            continue
        parent = model.get_submodule(parent_name)
        for norm, child in parent.named_children():
            path = f"{parent_name}.{norm}".lstrip(".")
            if norm in HEAD_NORMS and path not in plan and next(child.parameters(), None) is not None:
                raise ValueError(
                    f"{path!r} is not in the plan, and its parent's {leaf} is cut by heads: each rank would find the "
                    "gradient of its own heads only. Add it to the plan as 'replicated_with_grad_allreduce'."
                )
        counts = _head_counts(parent, getattr(parent, "config", None), getattr(model, "config", None))
        if any(count % world_size for count in counts.values()):
            sizes = [w for w in range(1, min(counts.values()) + 1) if all(c % w == 0 for c in counts.values())]
            heads = " and ".join(f"{key}={count}" for key, count in counts.items())
            raise ValueError(
                f"{type(model).__name__} has {heads}, which {world_size} tensor-parallel ranks cannot share evenly "
                f"({name!r}). TP sizes that work: {', '.join(map(str, sizes))}."
            )


def _head_counts(*sources: object) -> dict[str, int]:
    counts: dict[str, int] = {}
    for source in sources:
        text = getattr(source, "get_text_config", None)
        source = text() if callable(text) else source
        found = {key: getattr(source, key, None) for key in HEAD_COUNTS}
        counts = {key: n for key, n in found.items() if isinstance(n, int) and n > 0} | counts
    return counts
