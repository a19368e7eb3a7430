"""Text from the trained model, through its KV cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from fused_tp.cli.demo_data import Tokenizer
from fused_tp.cli.demo_settings import DemoSettings


@dataclass(frozen=True)
class Sample:
    """`text` is what followed `prompt`: `tokens` new tokens, made in `seconds`."""

    prompt: str
    text: str
    tokens: int
    seconds: float


def generate_sample(model: Any, tokenizer: Tokenizer, settings: DemoSettings) -> Sample | None:
    """Continue settings.prompt; None where --sample-tokens is 0. Called by all ranks of a parallel model."""
    if settings.sample_tokens == 0:
        return None
    prompt = torch.tensor([tokenizer.encode(settings.prompt)], device=settings.device)
    torch.manual_seed(settings.seed)  # all ranks hold the same logits and must draw the same token from them
    started = time.perf_counter()
    if settings.hf is None:
        tokens = model.generate(prompt, settings.sample_tokens, temperature=settings.sample_temperature)
    else:
        draw: dict[str, Any] = {"do_sample": False}
        if settings.sample_temperature > 0:
            draw = {"do_sample": True, "temperature": settings.sample_temperature, "top_k": 0}
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings.sample_tokens,
            use_cache=True,
            pad_token_id=0,  # one row, so nothing is padded; without it every call warns
            **draw,
        )
    new = tokens[0, prompt.shape[1] :].tolist()
    return Sample(settings.prompt, tokenizer.decode(new), len(new), time.perf_counter() - started)
