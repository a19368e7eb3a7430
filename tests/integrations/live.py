"""Self-check of the small models that the sweep compares: fields of their configs and parameters that do nothing.

    python -m tests.integrations.live --out out/live [llama gpt_oss ...]

A mechanism that does nothing in a small model, such as a window longer than the sequence, is not tested by it. So the
value of each field is changed by as little as there is (a number by one, a flag, the kinds of two layers), and the
logits of the whole model, with the same parameters, must change. A field is live, too, where a change of it changes
names or shapes of parameters, or is refused by the config or the model. A parameter is live that has a gradient, or
that logits depend on (an indexer, which selects).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.planning.small_config import VOCABULARY, small_config
from tests.integrations.sweep import TOKENS, all_kinds, make_model

CHANGE = 1e-3  # of the largest logit: what is below that could be wrong and be taken for rounding
# Names of fields that are no mechanism of a forward pass of tokens.
OTHERS = (
    r".*_token_ids?|.*_token_index|.*_idx|.*_token_type.*|mask_token.*|.*layerdrop|.*dropout.*|.*pdrop.*|.*jitter.*",
    r"initializer.*|.*init_std|.*init_(scale|range|method).*|init_std|.*_init|.*time_step_.*|rescale.*|.*initializer.*",
    r".*eps|.*epsilon|use_cache|output_.*|return_dict|dtype|torch_dtype|model_type|architectures|_.*|transformers_.*",
    r"id2label|label2id|num_labels|problem_type|chunk_size_feed_forward|is_encoder_decoder|tokenizer_class|bad_words.*",
    r"summary_.*|.*aux_loss.*|.*loss_(coef|weight).*|pretraining_tp|.*use_.*kernels?|name_or_path|.*z_loss.*",
)
# Fields of single types that change nothing, and why.
INERT: dict[str, dict[str, str]] = {}
ACTIVATIONS = ("silu", "relu", "gelu")


def candidates(value: Any) -> Iterator[tuple[int, Any]]:
    """Other values for a field that has `value`, after the order in which they are tried: first by as little as there
    is, then, where none of these can be had, by more."""
    if isinstance(value, bool):
        yield 0, not value
    elif isinstance(value, int):
        yield from ((0, other) for other in (value - 1, value + 1) if other >= 0)
        yield from ((1, other) for other in (value * 2, value // 2) if other > 0)
    elif isinstance(value, float):
        yield from ((0, other) for other in ((value * 1.5, value * 0.6) if value else (0.5, 1.0)))
    elif isinstance(value, str) and value.removesuffix("_new") in (*ACTIVATIONS, "gelu_pytorch_tanh", "swish", "relu2"):
        yield from ((0, one) for one in ACTIVATIONS if one != value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not is_other(str(key)):
                yield from ((order, {**value, key: other}) for order, other in candidates(inner))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            others = [one for one in value if one != inner]
            if isinstance(inner, str) and others:
                yield 0, [*value[:i], others[0], *value[i + 1 :]]
            elif not isinstance(inner, str):
                yield from ((order, [*value[:i], other, *value[i + 1 :]]) for order, other in candidates(inner))


def is_other(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in OTHERS)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(input_ids=tokens).logits
    return made


def differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    return not bool((one - other).abs().max() <= CHANGE * other.abs().max())


def inert_fields(kind: str, whole: Any, tokens: Tensor, names: list[str] | None = None) -> list[str]:
    """Fields of the small config of that type that change nothing, with dots between those of configs in it."""
    from transformers import CONFIG_MAPPING

    expected, held = logits_of(whole, tokens), whole.state_dict()
    shapes = {name: t.shape for name, t in held.items()}

    def changes(path: tuple[str, ...], value: Any) -> bool:
        try:
            model = make_model(kind, **nested(CONFIG_MAPPING[kind], path, value))
            if {name: t.shape for name, t in model.state_dict().items()} != shapes:
                return True
            model.load_state_dict(held)
            return differ(logits_of(model, tokens), expected)
        finally:
            torch.manual_seed(0)

    found = []
    for path, value in fields(whole.config):
        name = ".".join(path)
        if names is not None and name not in names:
            continue
        ran = set()  # of which orders
        live = refused = False
        for order, other in candidates(value):
            if live or (order and 0 in ran):
                break
            try:
                live |= changes(path, other)
                ran.add(order)
            except Exception:
                refused = True
        if ran and not live:
            found.append(name)
        elif not ran and not refused:
            continue  # a name or None: nothing to change
    return found


def nested(kind: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {path[0]: value}
    part = kind.sub_configs[path[0]]
    return {path[0]: small_config(part, **nested(part, path[1:], value))}


def fields(config: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    from transformers import PreTrainedConfig

    text = config.get_text_config()
    for name in sorted(config.to_dict()):
        value = getattr(config, name, None)
        if isinstance(value, PreTrainedConfig):
            if value is text:
                yield from fields(value, (*before, name))
        elif not is_other(name):
            yield (*before, name), value


def inert_parameters(whole: Any, tokens: Tensor) -> list[str]:
    """Parameters, and buffers that checkpoints hold, that neither have a gradient nor change logits."""
    model = copy.deepcopy(whole)
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = logits_of(model, tokens)
    found = []
    for name, t in (*model.named_parameters(), *persistent_buffers(model)):
        if not t.is_floating_point() or (t.grad is not None and bool(t.grad.any())):
            continue
        held = t.detach().clone()
        live = False
        for seed in range(4):
            torch.manual_seed(seed)
            with torch.no_grad():
                t.copy_(torch.randn_like(t))
                live |= not torch.equal(logits_of(model, tokens), expected)
                t.copy_(held)
            if live:
                break
        if not live:
            found.append(name)
    return found


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    held = model.state_dict(keep_vars=True)
    return [(name, t) for name, t in model.named_buffers() if name in held]


def inert(kind: str, names: list[str] | None = None) -> dict[str, list[str]]:
    """Of the small model of that type: what of its config, and which of its parameters, do nothing."""
    torch.manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, TOKENS)
    try:
        whole = make_model(kind)
        logits_of(whole, tokens)
    except Exception as error:
        return {"alone": [f"{type(error).__name__}: {error}"[:200]]}
    return {"fields": inert_fields(kind, whole, tokens, names), "parameters": inert_parameters(whole, tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fields and parameters of the sweep's small models that do nothing.")
    parser.add_argument("kinds", nargs="*", help="model types, such as llama; all of them where none is given")
    parser.add_argument("--out", type=Path, required=True, help="folder for inert.json")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found = {}
    for kind in chosen.kinds or all_kinds():
        found[kind] = inert(kind)
        print(kind, json.dumps(found[kind]), flush=True)
        (chosen.out / "inert.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
