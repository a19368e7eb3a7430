"""Run a tiny model of each causal language model type of transformers through `parallelize`.

    python -m tests.integrations.sweep --out out/sweep [llama gpt_oss ...]

Each model has random weights. A loss and all gradients of two ranks are compared with those of the whole model, for
each of MODES; "advised" removes from the plan the names that refusals say to leave out. Outcomes:

| outcome  | meaning                                                                                                |
|----------|--------------------------------------------------------------------------------------------------------|
| right    | the loss and every gradient are those of the whole model                                               |
| refused  | fused_tp raised ValueError, TypeError or NotImplementedError, and left the model unchanged             |
| late     | a refusal after `parallelize` changed the model, or while the model ran                                |
| wrong    | another loss, or another gradient                                                                      |
| crashed  | any other error                                                                                        |
| alone    | the whole model does not run on this machine, or its config cannot make it small enough                |

With `--dtype bfloat16`, rounding hides small errors from this comparison; the outcomes then show whether fused_tp's own
comparison with the whole model, which allows for rounding, refuses a model that is right in float32.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fused_tp
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.planning.small_config import VOCAB_SIZE, draw_values, small_config
from tests.integrations.models import full
from tests.workers import RanksFailed, run_ranks

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp", {}),
    "advised": ("tp", {}),
    "tp+sp": ("tp", {"sequence_parallel": True}),
    "cp": ("cp", {}),
}
TOKENS = (2, 24)
NOISE = 1e-4  # of the largest gradient: rounding error of one that should be 0, such as that of a key bias
MOST_PARAMETERS = 14_000_000
# Differences of the loss, of a gradient relative to its largest element, and of logits. In fp32 errors exceed 1e-2.
BOUNDS = {torch.float32: (2e-5, 2e-3, 2e-3), torch.bfloat16: (0.2, float("inf"), float("inf"))}


def make_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = small_config(CONFIG_MAPPING[kind], **changes)
    if kind == "gemma3n_text":  # its initialization reads this from the model around its base model
        transformers.Gemma3nForCausalLM.hidden_size = config.hidden_size
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    draw_values(model)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped matmul has no float64 on CPUs
    return model.to(dtype).train()


def changes_of(kind: str, mode: str) -> dict[str, Any]:
    """Changes of the small config for a mode that refuses chunks shorter than the sequence."""
    from transformers import CONFIG_MAPPING

    longer: dict[str, Any] = {"attention_chunk_size": 64}
    if mode != "cp" or kind not in ("llama4", "llama4_text"):
        return {}
    return longer if kind == "llama4_text" else {"text_config": small_config(CONFIG_MAPPING["llama4_text"], **longer)}


def outline(model: nn.Module) -> dict[str, object]:
    """Properties of a model that a refusal must leave unchanged."""
    seen: dict[str, object] = {f"parameter {name}": id(p) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        seen[f"module {name}"] = type(module), hooks, tuple(sorted(vars(module)))
    seen["attention"] = model.config._attn_implementation  # type: ignore[union-attr]  # of a transformers model
    return seen


def is_ours(error: BaseException) -> bool:
    """True if a line of fused_tp raised the error, with a type that it documents for refusals."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    inside = trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(fused_tp.__file__).parent))
    return inside and isinstance(error, ValueError | TypeError | NotImplementedError)


def advised_plan(whole: Any, mesh: DeviceMesh) -> dict[str, str]:
    """The plan of that model without the names that refusals ask to leave out."""
    plan = dict(whole.tp_plan or {})
    on_meta = copy.deepcopy(whole).to("meta")
    for _ in range(20):
        try:
            parallelize(copy.deepcopy(on_meta), mesh, plan=plan)
        except ValueError as error:
            listed, one = re.search(r"not in (\[.*?\])", str(error)), re.search(r"[Ll]eave ('.*?') out of", str(error))
            names = ast.literal_eval(listed[1]) if listed else [ast.literal_eval(one[1])] if one else []
            left = {name: style for name, style in plan.items() if not any(matches(out, name) for out in names)}
            if left != plan:
                plan = left
                continue
        break
    return plan


def matches(name: str, pattern: str) -> bool:
    return name == pattern or re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def compare(whole: Any, mesh: DeviceMesh, mode: str, expected: Any, tokens: Tensor) -> tuple[str, str]:
    """The outcome for one model and mode, and its details."""
    keywords = MODES[mode][1]
    if mode == "advised":
        keywords = {"plan": advised_plan(whole, mesh) or "auto"}
    model = copy.deepcopy(whole)
    before = outline(model)
    try:
        parallelize(model, mesh, **keywords)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not is_ours(error):
            return "crashed", said
        return "refused" if outline(model) == before else "late", said
    try:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    except Exception as error:
        return "late" if is_ours(error) else "crashed", f"{type(error).__name__}: {error}"
    whole_loss, gradients, generated = expected
    worst, where = 0.0, ""
    noise = NOISE * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        wanted = gradients.get(name)
        if parameter.grad is None or wanted is None:
            other = wanted if parameter.grad is None else full(parameter.grad)
            error = 0.0 if other is None or not bool(other.any()) else float("inf")
        else:
            scale = wanted.abs().max().clamp_min(noise)
            error = float((full(parameter.grad).view_as(wanted) - wanted).abs().max() / scale)
        if not error <= worst:
            worst, where = error, name
    off = abs(float(loss.detach()) - whole_loss)
    cut = sum(p.numel() for p in model.parameters() if any(x.is_shard() for x in getattr(p, "placements", ())))
    share = cut / sum(p.numel() for p in model.parameters())
    said = f"loss {off:.0e}, gradient {worst:.0e} {where}, {share:.0%} of the parameters cut"
    most, most_of_gradient, most_of_logits = BOUNDS[whole.dtype]
    if not (off < most and worst <= most_of_gradient):
        return "wrong", said
    return compare_generation(model, generated, tokens, most_of_logits, said)


def generate(model: Any, tokens: Tensor) -> tuple[Tensor, ...] | None:
    """Logits of the tokens that a model generates from a prompt and then from its cache."""
    try:
        with torch.no_grad():
            made = model.eval().generate(
                tokens,
                max_new_tokens=3,
                do_sample=False,
                use_cache=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
    finally:
        model.train()
    logits: tuple[Tensor, ...] = made.logits
    return logits


def compare_generation(
    model: Any, wanted: tuple[Tensor, ...] | None, tokens: Tensor, bound: float, said: str
) -> tuple[str, str]:
    """The outcome of a model that trains correctly: its generated logits must match the whole model's."""
    if wanted is None:
        return "right", said
    try:
        made = generate(model, tokens)
    except Exception as error:
        return "late" if is_ours(error) else "crashed", f"generate: {type(error).__name__}: {error}"
    assert made is not None
    off = max(float((one - other).abs().max()) for one, other in zip(made, wanted, strict=True))
    said = f"{said}, generated logits {off:.0e}"
    return "right" if off <= bound else "wrong", said  # logits of order 1; another order of sums: below 1e-5


def sweep_rank(
    group: dist.ProcessGroup, kind: str, modes: Sequence[str], dtype: torch.dtype, changes: dict[str, Any]
) -> dict[str, tuple[str, str]]:
    """Outcomes by mode, on this rank."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    apart = {mode: changes_of(kind, mode) for mode in modes if not changes and changes_of(kind, mode)}
    if apart:
        rest = [mode for mode in modes if mode not in apart]
        found = sweep_rank(group, kind, rest, dtype, {}) if rest else {}
        for mode, changed in apart.items():
            found |= sweep_rank(group, kind, [mode], dtype, changed)
        return found
    torch.manual_seed(2)
    tokens = torch.randint(3, VOCAB_SIZE, TOKENS)
    try:
        whole = make_model(kind, dtype, **changes)
        model = copy.deepcopy(whole)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    except Exception as error:
        return dict.fromkeys(modes, ("alone", f"{type(error).__name__}: {error}"))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    try:
        generated = generate(model, tokens)  # the trained copy: Gemma 3n's forward writes to weights in training
    except Exception:  # the whole model cannot generate
        generated = None
    expected = float(loss.detach()), gradients, generated
    found = {}
    for mode in modes:
        if mode == "advised" and found.get("tp", ("",))[0] == "right":
            found[mode] = found["tp"]  # there was no advice to follow
            continue
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(MODES[mode][0],))
        found[mode] = compare(whole, mesh, mode, expected, tokens)
    return found


def sweep(
    kind: str, modes: Sequence[str] = tuple(MODES), dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, tuple[str, str]]:
    """The worst outcome over all ranks, by mode. `changes` apply to the small config."""
    order = ["alone", "right", "refused", "late", "wrong", "crashed"]
    try:
        results = run_ranks(2, sweep_rank, kind, modes, dtype, changes, timeout=120)
    except RanksFailed as error:  # also if one rank refused a model and another accepted it and waited
        return dict.fromkeys(modes, ("crashed", str(error)))
    return {mode: max((one[mode] for one in results), key=lambda one: order.index(one[0])) for mode in modes}


def all_kinds() -> list[str]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every causal language model of transformers through parallelize.")
    parser.add_argument("kinds", nargs="*", help="model types, such as llama; all of them where none is given")
    parser.add_argument("--out", type=Path, required=True, help="folder for outcomes.json")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, tuple[str, str]]] = {}
    for kind in chosen.kinds or all_kinds():
        outcomes[kind] = sweep(kind, dtype=getattr(torch, chosen.dtype))
        for mode, (outcome, said) in outcomes[kind].items():
            print(f"{kind:24} {mode:6} {outcome:8} {' '.join(said.split())[:200]}", flush=True)
        (chosen.out / "outcomes.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    counts = Counter((mode, outcome[0]) for modes in outcomes.values() for mode, outcome in modes.items())
    for (mode, outcome), count in sorted(counts.items()):
        print(f"{mode:6} {outcome:8} {count:4}")
    return int(any(outcome in ("late", "wrong", "crashed") for _, outcome in counts))


if __name__ == "__main__":
    from tests.integrations import sweep as importable  # ranks cannot import functions of __main__

    sys.exit(importable.main())
