"""Conversion of torchao's float8 linear layers, which `torchao.float8.convert_to_float8_training` makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import nn

from fused_tp.backends.float8 import RECIPES
from fused_tp.core.subclass import reason_not_plain

FLOAT8_LINEAR = "torchao.float8.float8_linear.Float8Linear"


def is_float8_linear(module: nn.Module) -> bool:
    """True if `module` is torchao's linear layer that multiplies in float8. torchao need not be installed."""
    return f"{type(module).__module__}.{type(module).__name__}" == FLOAT8_LINEAR


def float8_recipe(module: nn.Module) -> str | None:
    """Return the recipe of torchao's Float8Linear, for `float8=` of a parallel layer; None for other layers.

    Raises:
        ValueError: the layer's config is none of torchao's recipes, or its weight is not a plain tensor.
    """
    if not is_float8_linear(module):
        return None
    from torchao.float8.config import Float8LinearConfig

    config: Any = module.config
    if (reason := reason_not_plain(type(module.weight))) is not None:
        raise ValueError(
            f"the weight of a Float8Linear cannot be sharded: {reason}. Convert the model with "
            "enable_fsdp_float8_all_gather=False."
        )
    # Options without effect here: operands are always padded.
    config = replace(config, pad_inner_dim=False, force_recompute_fp8_weight_in_bwd=False)
    differences_by_recipe = {}
    for name in RECIPES:
        recipe = Float8LinearConfig.from_recipe_name(name)
        differences = [f.name for f in fields(config) if getattr(config, f.name) != getattr(recipe, f.name)]
        if config.cast_config_input.target_dtype is not torch.float8_e4m3fn:  # AMD's float8_e4m3fnuz
            differences.append("the float8 dtypes")
        if not differences:
            return name
        differences_by_recipe[name] = differences
    name, differences = min(differences_by_recipe.items(), key=lambda item: len(item[1]))
    raise ValueError(
        f"the config of a Float8Linear differs from torchao's recipe {name!r} in {', '.join(differences)}. The recipes "
        f"{', '.join(RECIPES)} are supported: convert the model with Float8LinearConfig.from_recipe_name(...)."
    )


@contextmanager
def without_float8(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which linear layers of `models` multiply in their weights' dtype, to compare models."""
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    parallel_layers: list[tuple[Any, str]] = []
    for module in modules:
        if hasattr(module, "_weight_placement") and isinstance(recipe := vars(module).get("float8"), str):
            parallel_layers.append((module, recipe))
    torchao_layers: list[tuple[Any, Any]] = [(m, cast(Any, m).config) for m in modules if is_float8_linear(m)]
    for layer, _ in parallel_layers:
        layer.float8 = None
    if torchao_layers:
        from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingType

        disabled = CastConfig(scaling_type=ScalingType.DISABLED)
        for layer, _ in torchao_layers:
            layer.config = Float8LinearConfig(disabled, cast_config_weight=disabled, cast_config_grad_output=disabled)
    try:
        yield
    finally:
        for layer, recipe in parallel_layers:
            layer.float8 = recipe
        for layer, config in torchao_layers:
            layer.config = config
