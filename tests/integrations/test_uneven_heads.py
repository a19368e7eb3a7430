"""Tensor parallel ranks that do not divide the heads, and the columns, of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.hf.hf_pretrained import load_pretrained
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict
from tests.integrations.models import (
    assert_equal_states,
    assert_near,
    assert_same_calls,
    assert_same_gradients,
    assert_trains_alike,
    copy_of,
    full,
    make,
    make_tokens,
    mesh_of,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.workers import fresh_ranks, on_ranks, run_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

KEYWORDS: dict[str, dict[str, Any]] = {
    "tp": {},
    "tp_sp_lossparallel": {"sequence_parallel": True, "loss_parallel": True},
}


def long(*values: str) -> list[Any]:
    """Return parameters of cases that run in `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def generated(model: Any, **keywords: Any) -> torch.Tensor:
    with torch.no_grad():
        ids: torch.Tensor = model.eval().generate(make_tokens(2, 6), max_new_tokens=6, do_sample=False, **keywords)
    model.train()
    return ids


def compare(group: dist.ProcessGroup, family: str, keywords: dict[str, Any], changes: dict[str, Any]) -> None:
    """Compare calls, gradients and generation with one process."""
    whole = make(family, **changes)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, dist.get_world_size(group)), **keywords)
    tokens = make_tokens(2, 9)  # whose shards differ, too
    assert_same_calls(parallel, whole, tokens, tokens)
    assert torch.equal(generated(parallel), generated(whole))
    assert torch.equal(generated(parallel, cache_implementation="static"), generated(whole))


@pytest.mark.parametrize("layout", KEYWORDS)
@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", *long("qwen2", "qwen3", "gemma2", "qwen3_moe", "mixtral", "deepseek_v3")]
)
@on_ranks(3)
def test_training_and_generation(group: dist.ProcessGroup, layout: str, family: str) -> None:
    """Compare models of 8 query heads, 4 for each head of keys, of which a rank has 2 or 3."""
    changes = {"num_attention_heads": 8, **({"num_key_value_heads": 8} if family == "deepseek_v3" else {})}
    compare(group, family, KEYWORDS[layout], changes)


@pytest.mark.full
@pytest.mark.parametrize("size", [5, 6, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_more_ranks(size: int, family: str) -> None:
    # Gate and up features of gpt_oss alternate: shards of 84 features hold complete pairs for each of these sizes.
    changes = {"num_attention_heads": 8, **({"intermediate_size": 84} if family == "gpt_oss" else {})}
    for outcome in fresh_ranks(size, compare, family, KEYWORDS["tp_sp_lossparallel"], changes, timeout=300):
        outcome.unwrap()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(5, 5), (3, 1), (6, 3)])
@on_ranks(2)
def test_odd_heads_on_two_ranks(group: dist.ProcessGroup, num_heads: int, num_kv_heads: int) -> None:
    sizes = {"hidden_size": 8 * num_heads, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    whole = make("llama", **sizes, attention_bias=True)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    tokens = make_tokens(2, 9)
    assert_same_calls(parallel, whole, tokens, tokens)


# Model types that reshape heads by their own attributes, or pack q, k and v in one layer.
PACKED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "phi3": {},
    **{
        kind: {}
        for kind in ("bloom", "gpt_neox", "gpt_bigcode", "mpt", "opt", "persimmon", "gptj", "cpmant", "stablelm")
    },
}


@pytest.mark.parametrize("kind", [*list(PACKED)[:3], *long(*list(PACKED)[3:], "multi_query")])
@on_ranks(3)
def test_other_attention_code(group: dist.ProcessGroup, kind: str) -> None:
    whole = make_model("falcon" if kind == "multi_query" else kind, torch.float64, **PACKED.get(kind, {}))
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3))
    tokens = make_tokens(2, 9) % whole.config.get_text_config().vocab_size
    assert_trains_alike(parallel.eval(), whole.eval(), lambda model: model(input_ids=tokens, labels=tokens).loss)


@on_ranks(4)
def test_packed_layer_and_fewer_key_heads_than_ranks(group: dist.ProcessGroup) -> None:
    whole = make_model("falcon", new_decoder_architecture=True, num_kv_heads=2)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 4))
    tokens = make_tokens(2, 9)
    assert_trains_alike(parallel.eval(), whole.eval(), lambda model: model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.full
@on_ranks(3)
def test_encoder_with_decoder(group: dist.ProcessGroup) -> None:
    """Compare T5, whose bias of relative positions has one column per head, and whose keys have other names."""
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 44, "num_layers": 2, "num_heads": 4, "vocab_size": 67}
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3))
    tokens = make_tokens(2, 9)
    assert_trains_alike(parallel, whole, lambda model: model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("parameters", ["dtensor", "plain"])
@on_ranks(3)
def test_states_and_steps(group: dist.ProcessGroup, parameters: str, tmp_path: Path) -> None:
    """Gather, load and save states; take optimizer steps that clip gradients."""
    import transformers

    from fused_tp.nn import clip_grad_norm_

    whole, tokens = make("gpt_oss"), make_tokens(2, 9)
    state = whole.state_dict()
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3), parameters=parameters)
    assert_equal_states(gather_state_dict(parallel), state)
    changed = {name: t + 1 for name, t in state.items()}
    load_full_state_dict(parallel, changed)
    assert_equal_states(gather_state_dict(parallel), changed)
    load_full_state_dict(parallel, state)
    parallel.save_pretrained(tmp_path)
    dist.barrier(group)
    assert_equal_states(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), state)
    if parameters == "dtensor":
        with torch.device("meta"):
            blank = type(whole)(whole.config)
        blank = load_pretrained(parallelize(blank, mesh_of(group, 1, 3)), tmp_path)
        assert_equal_states(gather_state_dict(blank), state)
    for model in (whole, parallel):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(tokens, labels=tokens).loss.backward()
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for name, t in gather_state_dict(parallel).items():
        assert_near(t, whole.state_dict()[name], name)


def save_or_load(group: dist.ProcessGroup, folder: Path, loads: bool) -> dict[str, torch.Tensor]:
    """Save a model and its optimizer after a step, or load them into others. Return the model's state a step later."""
    model = parallelize(make("qwen3"), mesh_of(group, 1, dist.get_world_size(group)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = make_tokens(2, 9)

    def step(batch: torch.Tensor) -> None:
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(tokens.flip(1) if loads else tokens)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    (dcp.load if loads else dcp.save)(saved, checkpoint_id=folder, process_group=group)
    step(tokens)
    return gather_state_dict(model)


@pytest.mark.parametrize(("saves", "loads"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.full)])
def test_distributed_checkpoints_at_other_sizes(saves: int, loads: int, tmp_path: Path) -> None:
    saved, loaded = run_ranks(saves, save_or_load, tmp_path, False), run_ranks(loads, save_or_load, tmp_path, True)
    for name, t in loaded[0].items():
        assert_near(t, saved[0][name], name)


@pytest.mark.parametrize("is_added_before", [True, False])
@on_ranks(3)
def test_adapters(group: dist.ProcessGroup, is_added_before: bool, tmp_path: Path) -> None:
    """Train LoRA adapters added before and after `parallelize`, save them, and load them on one process."""
    peft = pytest.importorskip("peft", reason="peft is not installed; pip install peft")
    from fused_tp.parallelizing.peft import parallel_config

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=layers)
    base, mesh, tokens = make("llama").double(), mesh_of(group, 1, 3), make_tokens(2, 9)

    def draw(model: Any) -> Any:
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))).double()
                load_full_state_dict(model, {name: values}, strict=False)
        return model

    whole = draw(peft.get_peft_model(copy_of(base), config))
    if is_added_before:
        parallel = parallelize(copy_of(whole), mesh)
    else:
        model = parallelize(copy_of(base), mesh)
        torch.manual_seed(3)
        parallel = draw(peft.get_peft_model(model, parallel_config(model, config)))
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (parallel, whole)]
    assert_near(*losses, "loss")
    for loss in losses:
        loss.backward()
    expected = dict(whole.named_parameters())
    for name, parameter in parallel.named_parameters():
        if parameter.requires_grad:
            assert_near(full(parameter.grad), expected[name].grad, name)
    parallel.save_pretrained(tmp_path)
    dist.barrier(group)
    loaded = peft.PeftModel.from_pretrained(copy_of(base), tmp_path)
    with torch.no_grad():
        assert_near(loaded(tokens).logits, whole(tokens).logits, "logits of the saved adapters")
        parallel.merge_adapter()
        assert_near(parallel(tokens).logits, whole(tokens).logits, "logits of merged adapters")


@on_ranks(4)
def test_context_parallel_ranks(group: dist.ProcessGroup) -> None:
    """Compare two context parallel times two tensor parallel ranks, of which one has two heads and one has one."""
    whole = make("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 2), sequence_parallel=True)
    tokens = make_tokens(2, 13)
    assert_trains_alike(parallel, copy_of(whole), lambda model: model(tokens, labels=tokens).loss)


@on_ranks(3)
def test_attention_weights_and_recomputation(group: dist.ProcessGroup) -> None:
    whole, tokens = make("llama", attn_implementation="eager"), make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3))
    with torch.no_grad():
        weights, expected = (model(tokens, output_attentions=True).attentions for model in (parallel, whole))
    for one, other in zip(weights, expected, strict=True):
        assert_near(one, other, "attention weights")
    for model in (parallel, whole):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens, labels=tokens).loss.backward()
    assert_same_gradients(parallel, whole)
    refuses(ValueError, "paged cache with equally many heads", parallel.init_continuous_batching)


@on_ranks(3)
def test_sizes_that_are_refused(group: dist.ProcessGroup) -> None:
    """Refuse what cannot be distributed before the model changes."""
    mesh = mesh_of(group, 1, 3)
    for model, message in (
        (make("llama", hidden_size=16, num_attention_heads=2), r"unevenly: each rank needs a head\. .* sizes: 1, 2\."),
        (make_model("codegen", num_attention_heads=8, n_head=8), "the style of .*'packed_colwise_12'"),
        (make("gpt_oss", intermediate_size=22), "gate and up features alternate"),
    ):
        names = {name: type(module) for name, module in model.named_modules()}
        refuses(ValueError, message, parallelize, model, mesh)
        assert names == {name: type(module) for name, module in model.named_modules()}
