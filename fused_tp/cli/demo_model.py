"""The model that the demo trains, whole: the example Llama with seeded weights, or a transformers checkpoint."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fused_tp.cli.demo_settings import DemoSettings

EXAMPLE = "fused_tp.examples.llama"


def example_module() -> ModuleType:
    """examples/llama.py: installed as `fused_tp.examples`, read by its path in a checkout that is not installed."""
    try:
        return importlib.import_module(EXAMPLE)
    except ModuleNotFoundError:
        path = Path(__file__).parents[2] / "examples" / "llama.py"
        spec = importlib.util.spec_from_file_location(EXAMPLE, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[EXAMPLE] = module  # before it runs: dataclasses look their module up by name
        spec.loader.exec_module(module)
        return module


def build_model(settings: DemoSettings) -> Any:
    """The unsharded model in fp32, the same weights in every process and every call.

    Any: it is an `nn.Module` of one of two families, which share `model(tokens, labels=tokens).loss`,
    `model.generate(tokens, max_new_tokens=...)` and `model.config.vocab_size`.
    """
    if settings.hf is not None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(settings.hf, dtype=torch.float32, local_files_only=True)
    else:
        llama = example_module()
        torch.manual_seed(settings.seed)
        model = llama.Llama(
            llama.LlamaConfig(
                vocab_size=256,
                hidden_size=settings.hidden,
                intermediate_size=settings.intermediate,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
                num_key_value_heads=settings.kv_heads,
            )
        )
    # Evaluation mode also while training: it turns dropout off, and runs that draw different noise cannot be compared.
    return model.to(settings.device).eval()


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
