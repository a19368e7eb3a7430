"""Find the sizes of a model: by a published name, or by counting what transformers creates from its config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fused_tp.core.errors import join_words
from fused_tp.planning.model_count import count_config
from fused_tp.planning.model_shape import SHAPES, ModelShape


def find_shape(model: str | Path | ModelShape | Any) -> ModelShape:
    """Return the ModelShape of `model`.

    Args:
        model: a ModelShape, which is returned unchanged; a name in SHAPES; a transformers config; a config.json or its
            folder; or a model type of transformers, which means its default config.

    Raises:
        ValueError: there is no such name, file or type, or the model cannot be counted; the message says why.

    Example:
        >>> find_shape("qwen3-8b").layers
        36
    """
    if isinstance(model, ModelShape):
        return model
    if hasattr(model, "get_text_config"):
        return count_config(model)
    if str(model).lower() in SHAPES:
        return SHAPES[str(model).lower()]
    model_types = _model_types()
    if not Path(model).exists() and str(model) not in model_types:
        similar_names = difflib.get_close_matches(str(model).lower(), (*SHAPES, *model_types), 1)
        raise ValueError(
            f"{str(model)!r} is not a known model name, a model type of transformers, or an existing file. "
            + (
                f"Did you mean {similar_names[0]!r}?"
                if similar_names
                else f"Pass one of {join_words(SHAPES)}, or a config.json."
            )
        )
    from transformers import AutoConfig

    if not Path(model).exists():
        return count_config(AutoConfig.for_model(str(model)))
    path = Path(model).resolve()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{model} does not contain a valid config of a transformers model: {error}") from error
    return replace(count_config(config), name=(path if path.is_dir() else path.parent).name)


def _model_types() -> Iterable[str]:
    """Return the model types of transformers; () if transformers is not installed."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return ()
    return list(CONFIG_MAPPING_NAMES)
