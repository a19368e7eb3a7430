"""transformers models through `parallelize`: logits and every gradient are those of the whole model."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fused_tp
from fused_tp import RankMismatchError
from fused_tp.core import settings
from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict, save_full_model_in_save_pretrained
from tests.integrations.models import (
    LAYOUTS,
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
    on_layouts,
    pair,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses, seeded
from tests.workers import error_of, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

FAMILIES = ["llama", "qwen3", "mistral"]


def compare(group: dist.ProcessGroup, layout: str, family: str, seq: int, **changes: Any) -> None:
    whole, parallel = pair(group, layout, family, **changes)
    tokens = make_tokens(2, seq)
    labels = tokens.clone()
    labels[0, : seq // 2] = -100  # the CP ranks have unequal numbers of targets: a mean of means would show
    assert_same_calls(parallel, whole, tokens, labels)


@on_layouts("cp2_tp2_sp_lossparallel", "tp2_lossparallel", full=["tp2", "tp2_sp", "cp2", "cp2_tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients(group: dist.ProcessGroup, layout: str, family: str) -> None:
    compare(group, layout, family, 21)


@on_ranks(4)
@pytest.mark.parametrize("seq", [1, 3, pytest.param(2, marks=pytest.mark.full)])
def test_fewer_tokens_than_pieces_to_cut(group: dist.ProcessGroup, seq: int) -> None:
    whole, parallel = pair(group, "cp2_tp2_sp", "llama")
    tokens = make_tokens(2, seq)
    with torch.no_grad():
        assert_near(parallel(tokens).logits, whole(tokens).logits, "logits")
    # The caller's own loss, from whole logits on every rank.
    assert_trains_alike(parallel, whole, lambda model: model(tokens).logits.square().mean())


@on_ranks(2)
def test_logits_stay_cut_only_next_to_a_loss(group: dist.ProcessGroup) -> None:
    parallel = parallelize(make("llama"), mesh_of(group, 1, 2), loss_parallel=True)
    tokens = make_tokens(1, 4)
    assert parallel(tokens).logits.shape == (1, 4, 67)
    assert parallel(tokens, labels=tokens).logits.shape == (1, 4, 34 if group.rank() == 0 else 33)


@on_layouts("tp2_sp", full=["tp2", "cp2_tp2_sp_lossparallel"])
def test_biases_and_tied_embeddings_which_stay_one_parameter(group: dist.ProcessGroup, layout: str) -> None:
    compare(group, layout, "qwen3", 9, tied=True)
    compare(group, layout, "llama", 7, attention_bias=True, mlp_bias=True)
    _, parallel = pair(group, layout, "llama", tied=True)
    assert parallel.lm_head.weight is parallel.model.embed_tokens.weight


@on_layouts("cp2_tp2", full=["tp2_sp"])
def test_gradients_accumulate(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout, "llama")
    batches = make_tokens(4, 10).split(2)
    count = torch.tensor(sum(batch[:, 1:].numel() for batch in batches))
    for batch in batches:
        for model in (whole, parallel):
            model(batch, labels=batch, num_items_in_batch=count).loss.backward()
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_without_grad_sync_the_mean_over_cp_is_the_gradient(group: dist.ProcessGroup) -> None:
    whole = make("llama")
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1), grad_sync=False)
    tokens = make_tokens(2, 9)
    for model in (whole, parallel):
        (model(tokens, labels=tokens).loss + model(tokens).logits.square().mean()).backward()
    for parameter in parallel.parameters():
        dist.all_reduce(parameter.grad, group=group)
    assert_same_gradients(parallel, whole, factor=2)


@on_layouts("cp2_tp2", full=["tp2_sp"])
def test_a_meta_model_gets_memory_for_its_shards_and_then_its_weights(group: dist.ProcessGroup, layout: str) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    whole = make("llama", tied=True)
    with torch.device("meta"):
        parallel = make("llama", tied=True)
    parallelize(parallel, mesh_of(group, cp, tp), **keywords)
    assert parallel.model.layers[0].mlp.up_proj.weight.to_local().shape == (22, 32)
    load_full_state_dict(parallel, ((name, t) for name, t in whole.state_dict().items() if name != "lm_head.weight"))
    tokens = make_tokens(2, 9)
    assert_near(parallel(tokens).logits, whole(tokens).logits, "logits")
    part = {"model.embed_tokens.weight": whole.model.embed_tokens.weight}
    refuses(ValueError, r"lacks .*q_proj.weight", load_full_state_dict, parallel, part)
    more = {**whole.state_dict(), "nonsense": torch.zeros(1)}
    refuses(ValueError, r"unknown .*nonsense", load_full_state_dict, parallel, more)


@on_ranks(4)
def test_inputs_embeds_get_their_gradient(group: dist.ProcessGroup) -> None:
    whole, parallel = pair(group, "cp2_tp2_sp", "llama")
    xs = [seeded(2, 9, 32, seed=3).requires_grad_() for _ in range(2)]
    for model, x in zip((whole, parallel), xs, strict=True):
        model(inputs_embeds=x, labels=make_tokens(2, 9)).loss.backward()
    assert_near(xs[1].grad, xs[0].grad, "gradient of inputs_embeds")


@on_ranks(2)
@pytest.mark.parametrize("seq", [9, 1])
def test_inputs_embeds_from_the_models_own_embedding(group: dist.ProcessGroup, seq: int) -> None:
    whole, parallel = pair(group, "cp2", "llama")
    tokens = make_tokens(2, seq)
    gradients: list[Any] = []
    for model in (whole, parallel):
        embed = model.get_input_embeddings()
        model(inputs_embeds=embed(tokens) * 2).logits.square().mean().backward()
        if seq > 1:
            model(inputs_embeds=embed(tokens), labels=tokens).loss.backward()
        x = torch.randn(2, seq, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
        model(inputs_embeds=x * 2 + embed(tokens).detach()).logits.square().mean().backward()
        gradients.append(x.grad)
    assert_same_gradients(parallel, whole)
    assert_near(gradients[1], gradients[0], "gradient of what inputs_embeds was made from")
    refuses(ValueError, "Detach one of them", parallel, inputs_embeds=embed(tokens) + x)
    with torch.no_grad():
        embeds = embed(tokens) + x
        assert_near(parallel(inputs_embeds=embeds).logits, whole(inputs_embeds=embeds).logits, "logits")


@on_ranks(2)
@pytest.mark.parametrize("keywords", [{}, {"grad_sync": False}])
def test_what_all_cp_ranks_compute_alike_counts_once(group: dist.ProcessGroup, keywords: dict[str, Any]) -> None:
    whole = make("llama")
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1), **keywords)
    tokens = make_tokens(2, 9)
    for model in (whole, parallel):
        prefix = model(tokens[:, :5], use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=prefix.past_key_values, labels=tokens[:, 5:])
        (rest.loss + rest.logits.square().mean()).backward()
    assert_same_gradients(parallel, whole)


@on_ranks(4)
def test_save_pretrained_writes_the_whole_model(group: dist.ProcessGroup, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, parallel = pair(group, "cp2_tp2", "llama", tied=True)
    parallel.save_pretrained(tmp_path)
    dist.barrier(group)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.state_dict().keys() == whole.state_dict().keys()
    for name, t in read.state_dict().items():
        assert torch.equal(t, whole.state_dict()[name]), name
    tokens = make_tokens(2, 7)
    assert_near(read(tokens).logits, whole(tokens).logits, "logits")
    if dist.get_rank(group) == 1:  # with state_dict given, only this rank saves
        parallel.save_pretrained(f"{tmp_path}/own", state_dict={"model.norm.weight": torch.ones(3)})
    parallel.save_pretrained(f"{tmp_path}/none", is_main_process=False)
    if "distributed_checkpoint" in inspect.signature(type(parallel).save_pretrained).parameters:
        with pytest.raises(ValueError, match="distributed_checkpoint=True"):  # on all ranks
            parallel.save_pretrained(f"{tmp_path}/parts", distributed_checkpoint=True)
    replica = parallelize(copy_of(whole), mesh_of(group, 4, 1))  # all ranks hold the whole model; one writes
    with patch.object(type(replica), "save_pretrained") as written:
        replica.save_pretrained(tmp_path)
    assert written.call_count == (dist.get_rank(group) == 0)
    dist.barrier(group)
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "none").exists()


def test_what_saves_the_whole_model_is_pickled_with_it() -> None:
    model = torch.nn.Linear(2, 2)
    save_full_model_in_save_pretrained(model)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(model))
    assert again.save_pretrained.args[0] is again and copy.deepcopy(model).save_pretrained.args[0] is not model


def one_padded_row(right: bool) -> dict[str, Tensor]:
    tokens, mask = make_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    mask = mask if right else mask.flip(1)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@on_layouts("cp2", "tp2_sp")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding(group: dist.ProcessGroup, layout: str, family: str) -> None:
    """Padding on the right needs no mask over CP ranks; padding on the left needs ranks with the whole sequence."""
    changes: dict[str, Any] = {"sliding_window": 4} if family == "mistral" else {}
    whole, parallel = pair(group, layout, family, **changes)
    inputs = one_padded_row(right=layout == "cp2")
    assert_trains_alike(parallel, whole, lambda model: model(**inputs).loss)
    if layout == "cp2":
        refuses(
            ValueError, "labels at padding positions must be", parallel, **{**inputs, "labels": inputs["input_ids"]}
        )
        padded = one_padded_row(right=False)
        refuses(ValueError, "padding on the left", parallel, **padded)
        positions = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        refuses(ValueError, "padding on the left", parallel, **padded, position_ids=positions)  # no documents
        seen = torch.ones(2, 1, 9, 9)
        for mask in (seen, {"full_attention": seen}, torch.ones(2, 12), torch.ones(3, 9)):
            refuses(ValueError, r"must be \[batch, seq\], here \(2, 9\)", parallel, make_tokens(2, 9), mask)


@on_ranks(2)
def test_documents_under_sequence_parallelism_are_those_of_the_whole_model(group: dist.ProcessGroup) -> None:
    """use_cache decides if documents see each other, and is turned off inside: the caller must turn it off, too."""
    whole, parallel = pair(group, "tp2_sp", "llama")
    tokens, positions = make_tokens(1, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    refuses(ValueError, "Pass use_cache=False", parallel, tokens, position_ids=positions)
    mask = torch.ones_like(tokens)
    for given in ({"use_cache": False}, {"attention_mask": mask}):
        logits = [model(tokens, position_ids=positions, **given).logits for model in (whole, parallel)]
        assert_near(logits[1], logits[0], "logits")


@on_layouts("cp2_tp2", full=["tp2", "tp2_sp"])
def test_generate(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout, "llama")
    whole.eval(), parallel.eval()
    tokens, mask = make_tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    for how in ({}, {"cache_implementation": "static"}, {"use_cache": False, "attention_mask": None}):
        inputs = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "disable_compile": True, **how}
        expected = whole.generate(tokens, **inputs)
        assert torch.equal(parallel.generate(tokens, **inputs), expected), how
    # Training continues as before.
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


@on_ranks(4)
def test_clip_grad_norm(group: dist.ProcessGroup) -> None:
    whole, parallel = pair(group, "cp2_tp2_sp", "llama")
    tokens = make_tokens(2, 9)
    norms = []
    for model in (whole, parallel):
        model(tokens, labels=tokens).loss.backward()
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    assert_near(norms[1], norms[0], "gradient norm")
    assert_same_gradients(parallel, whole)


@on_ranks(4)
def test_base_model_returns_all_hidden_states(group: dist.ProcessGroup) -> None:
    whole = make("llama").model
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 2), sequence_parallel=True)
    tokens = make_tokens(2, 7)
    assert_trains_alike(parallel, whole, lambda model: model(tokens).last_hidden_state.square().mean())
    with torch.no_grad():
        assert_near(parallel(tokens).last_hidden_state, whole(tokens).last_hidden_state, "hidden states")


@on_ranks(2)
def test_a_class_of_ones_own_with_another_head(group: dist.ProcessGroup) -> None:
    from transformers import LlamaForCausalLM

    class Valued(LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
        pool = False

        def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids, labels=labels, **kwargs)
            out["values"] = out.logits[:, :, 0].mean(1) if self.pool else (out.logits[:, :, :1], None, 1)
            return out

    whole, parallel = make("llama"), make("llama")
    whole.__class__ = parallel.__class__ = Valued  # transformers has no loss for this class name
    tokens = make_tokens(2, 9)
    parallelize(parallel, mesh_of(group, 2, 1))
    assert_trains_alike(parallel, whole, lambda model: model(tokens)["values"][0].square().mean())
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)
    Valued.pool = True
    refuses(ValueError, r"must return tensors \[batch, seq.*got \(2,\)", parallel, tokens)
    # shift_labels without labels compute no loss, and the logits are whole.
    shifted = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    Valued.pool = False
    out = parallel(tokens, shift_labels=shifted)
    assert out.loss is None and out.logits.shape == (2, 9, 67)


ADVISED = "replicated_with_grad_allreduce"
_PAIR = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        "tp",
        {"hidden_size": 24, "num_attention_heads": 1, "num_key_value_heads": 1},
        {},
        ValueError,
        "these TP sizes: 1",
    ),
    ("tp", {"unpadded_vocab_size": 60}, {"loss_parallel": True}, ValueError, "config.unpadded_vocab_size"),
    ("tp", {}, {"plan": {"lm_head": "grouped_gemm"}}, ValueError, "'lm_head'.*'grouped_gemm'"),
    ("tp", {}, {"plan": {"model.layers.*.mlp.up_proj.weight": "colwise"}}, ValueError, "1-D parameters"),
    ("tp", {}, {"plan": {"model.norm": "mla_kv_a_proj"}}, ValueError, "plain nn.Linear"),
    ("tp", {}, {"plan": {"model.layers.*.mlp.up_proj": "mla_kv_a_proj"}}, ValueError, "needs qk_rope_head_dim"),
    ("tp", {}, {"plan": {"lm_heat": "colwise"}}, ValueError, "plan has the entry 'lm_heat'"),
    ("tp", {}, {"plan": {"model.norm": "colwise"}}, ValueError, "plain nn.Linear"),
    ("tp", {}, {"plan": "fastest"}, ValueError, "'auto'"),
    ("tp", {}, {"plan": 3}, TypeError, "plan must be"),
    ("tp", {}, {"tp_dim": "x", "cp_dim": "y"}, ValueError, "must have a dim 'x' or 'y'"),
    ("tp", {}, {"cp_dim": "tp"}, ValueError, "different dims"),
    ("cp", {}, {"sequence_parallel": True}, ValueError, "no dim 'tp'"),
    ("tp", {}, {"loss_parallel": True, "plan": _PAIR}, ValueError, "output layer"),
    (
        "tp",
        {"tied": True},
        {"plan": {"model.embed_tokens": "embedding_rowwise"}},
        ValueError,
        "Use styles that shard the same dim",
    ),
]


@on_ranks(2)
def test_padding_and_layers_with_a_state(group: dist.ProcessGroup) -> None:
    whole = make_model("qwen3_next")
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    tokens, mask = make_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    assert_near(parallel(tokens, attention_mask=mask).logits, whole(tokens).logits, "logits")
    mask[1, 6:] = 0
    refuses(ValueError, "has padding, which layers with linear_attention", parallel, tokens, attention_mask=mask)
    made = [model.eval().generate(tokens, max_new_tokens=3, do_sample=False) for model in (whole, parallel)]
    assert torch.equal(*made)


@on_ranks(2)
def test_norms_of_single_heads_are_refused(group: dist.ProcessGroup) -> None:
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 1}
    for norms in ("q_layernorm", "k_layernorm"):
        model = StableLmForCausalLM(
            StableLmConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, qk_layernorm=True)
        )
        refuses(ValueError, "one module per head", parallelize, model, mesh_of(group, 1, 2))
        plan = {"model.layers.*.self_attn.q_proj": "colwise", f"model.layers.*.self_attn.{norms}": ADVISED}
        refuses(ValueError, f"{norms}.*one module per head", parallelize, model, mesh_of(group, 1, 2), plan=plan)


@on_ranks(2)
def test_refused_with_a_sentence(group: dist.ProcessGroup) -> None:
    for dim, changes, keywords, error, says in REFUSED:
        model = make("llama", **changes)
        before = dict(model.named_parameters())
        mesh = mesh_of(group, 2, 1) if dim == "cp" else mesh_of(group, 1, 2)
        refuses(error, says, parallelize, model, mesh, **keywords)
        assert all(before[name] is p for name, p in model.named_parameters()), "the refused model was changed"


@on_ranks(2)
def test_refused_calls(group: Any) -> None:
    mesh = mesh_of(group, 2, 1)
    tokens = make_tokens(2, 8)
    model = parallelize(make("mistral", sliding_window=4), mesh)
    calls: dict[str, dict[str, Any]] = {
        "output_hidden_states": {"input_ids": tokens, "output_hidden_states": True},
        "start again inside rows": {"input_ids": tokens, "position_ids": torch.arange(4).repeat(2).view(1, 8)},
        "shape": {"input_ids": tokens, "attention_mask": torch.ones(2, 1, 8, 8)},
        "output_router_logits": {"input_ids": tokens, "output_router_logits": True},
        "full labels": {"input_ids": tokens, "labels": tokens[:, :4]},
        "token_weights": {"input_ids": tokens, "token_weights": torch.ones(2, 8)},
        r"\[batch, seq, ...\]": {"input_ids": tokens[0]},
    }
    for says, keywords in calls.items():
        refuses(ValueError, says, model, **keywords)
    refuses(TypeError, "parallel already", parallelize, model, mesh)
    refuses(TypeError, r"nn\.Module", parallelize, "model", mesh)
    refuses(TypeError, "DeviceMesh", parallelize, make("llama"), group)


def _bert(**keywords: Any) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 1}
    return BertModel(BertConfig(num_attention_heads=4, attn_implementation="sdpa", **sizes), **keywords).eval()


@on_ranks(2)
def test_attention_that_is_not_causal(group: dist.ProcessGroup) -> None:
    mesh, tokens = mesh_of(group, 2, 1), make_tokens(2, 8)
    whole = _bert(add_pooling_layer=False)
    parallel = parallelize(copy_of(whole), mesh)
    assert_near(parallel(tokens).last_hidden_state, whole(tokens).last_hidden_state, "hidden states")
    mask = torch.ones_like(tokens)
    mask[:, 6:] = 0  # every token would see this padding
    refuses(ValueError, "is not causal", parallel, tokens, attention_mask=mask)
    refuses(ValueError, "'pooler_output'", parallelize(_bert(), mesh), tokens)


@on_ranks(2)
def test_models_made_from_one_config_stay_apart(group: dist.ProcessGroup) -> None:
    mesh, tokens = mesh_of(group, 1, 2), make_tokens(1, 6)
    first = make("llama")
    second = type(first)(first.config)
    expected = second(tokens).logits
    parallelize(first, mesh, sequence_parallel=True)
    assert first.config is not second.config
    assert first.config._attn_implementation == second.config._attn_implementation == "sdpa"  # models read it
    assert_near(second(tokens).logits, expected, "logits of the whole model")
    third = type(first)(first.config)
    third.load_state_dict(second.state_dict())
    assert_near(parallelize(third, mesh, sequence_parallel=True)(tokens).logits, expected, "logits")


@on_ranks(2)
def test_what_only_attention_over_the_ring_could_mix(group: dist.ProcessGroup) -> None:
    import transformers

    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    state = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**sizes))
    refuses(ValueError, "other means than attention", parallelize, state, mesh_of(group, 2, 1))
    gemma = make("gemma2")
    said, plan = "style 'colwise' of .* needs a plain nn.Linear, got .*Gemma2", {"model.embed_tokens": "colwise"}
    refuses(ValueError, said, parallelize, gemma, mesh_of(group, 1, 2), plan=plan)
    # Phi's own plan lacks its norms of q and k.
    phi = transformers.PhiForCausalLM(transformers.PhiConfig(qk_layernorm=True, **sizes))
    said = r"q_layernorm'.* is not in the plan.*'replicated_with_grad_allreduce'"
    refuses(ValueError, said, parallelize, phi, mesh_of(group, 1, 2))


@on_ranks(4)
def test_fsdp2_over_the_cp_ranks(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 2)
    whole = make("llama")
    tokens = make_tokens(2, 9)
    whole(tokens, labels=tokens).loss.backward()
    parallel = parallelize(copy_of(whole), mesh, sequence_parallel=True, grad_sync=False)
    for layer in parallel.model.layers:
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(parallel, mesh=mesh["cp"])
    parallel(tokens, labels=tokens).loss.backward()
    assert_same_gradients(parallel, whole)

    summed = parallelize(make("llama"), mesh)
    fully_shard(summed, mesh=mesh["cp"])
    refuses(ValueError, "grad_sync=False", summed, tokens, labels=tokens)


class Wrapper(torch.nn.Module):
    """Wrapper like those of adapters: it exposes the plan, and its modules have other names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.tp_plan, self.config = model, model.tp_plan, model.config

    def merge_and_unload(self) -> Any:
        return self.base_model


@on_ranks(2)
def test_plans_that_cut_nothing_or_little(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    refuses(
        ValueError,
        "The plan has 9 entries .*none of which.*merge_and_unload",
        parallelize,
        Wrapper(make("llama")),
        mesh,
    )
    plan = {"model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce", "lm_head": "colwise_gather_output"}
    with pytest.warns(UserWarning, match=r"shards 1 of the 25 parameters of Qwen3ForCausalLM, 11% of"):
        parallelize(make("qwen3"), mesh, plan=plan)
    quantized = make("llama")
    quantized.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(44, 32, dtype=torch.int8), False)
    before = dict(quantized.named_parameters())
    refuses(
        ValueError,
        r"model\.layers\.1\.mlp\.up_proj\.weight must have a floating-point dtype.* got torch\.int8",
        parallelize,
        quantized,
        mesh,
    )
    assert all(before[name] is p for name, p in quantized.named_parameters())


@on_ranks(2)
def test_removed_modules_stay_removed(group: dist.ProcessGroup) -> None:
    whole = make("llama")
    whole.model.layers[0].mlp.gate_proj = torch.nn.Identity()  # as pruned; activations are [.., hidden] then
    whole.model.layers[0].mlp.up_proj = whole.model.layers[0].mlp.down_proj = torch.nn.Identity()
    tokens = make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


@on_ranks(4)
def test_a_dim_of_one_rank_needs_no_plan(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(4, 1), mesh_dim_names=("cp", "tp"))
    whole, tokens = make("llama"), make_tokens(2, 9)
    whole._tp_plan = {"lm_head": "nothing_that_is_served"}
    parallel = parallelize(copy_of(whole), mesh, sequence_parallel=True, loss_parallel=True)
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


class Unpacking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(9, 9)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.linear(torch.as_tensor(batch["ids"]).float())


@on_ranks(4)
def test_batches_that_differ_between_ranks(group: dist.ProcessGroup) -> None:
    parallel = parallelize(make("llama"), mesh_of(group, 2, 2), verify=False)
    tokens = make_tokens(2, 9)
    own = (tokens + (dist.get_rank(group) == 2)) % 67
    says = r"ranks of 'tp' and 'cp' received different batches.*: input_ids and labels .*DistributedSampler"
    for _ in range(3):
        refuses(RankMismatchError, says, parallel, input_ids=own, labels=own, attention_mask=torch.ones(2, 9))
    parallel(own, labels=own)  # the fourth call is not compared
    with settings.override_environment({"FUSED_TP_CHECK_BATCH": "2"}):
        parallel(input_ids=own)
        refuses(RankMismatchError, "argument 0 differ", parallel, own)
    parallel.train(dist.get_rank(group) == 0)
    with settings.override_environment({"FUSED_TP_CHECK_BATCH": "1"}):
        refuses(RankMismatchError, "rank 0 is, and rank 1 is not.*model.eval", parallel, tokens)
    refuses(RankMismatchError, "sample tokens need equal random states", parallel.eval(), own)
    parallel.train()
    nested = parallelize(Unpacking(), mesh_of(group, 1, 4), plan={"linear": "colwise_gather_output"})
    for ids in (own, own.tolist()):
        refuses(RankMismatchError, r": argument 0\['ids'\]", nested, {"ids": ids})
    whole = make("llama")
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


def _longer_vocabulary(model: Any, rank: int) -> None:
    model.resize_token_embeddings(5000, mean_resizing=False)
    torch.nn.init.zeros_(model.model.embed_tokens.weight[67:])
    torch.nn.init.constant_(model.model.embed_tokens.weight[4999:], rank)  # one row of many


def _one_row(model: Any, rank: int) -> None:
    model.wide = torch.nn.Parameter(torch.zeros(1000, 50))
    torch.nn.init.constant_(model.wide[998], rank)


def _custom_parameter(model: Any, rank: int) -> None:
    model.custom = type("Custom", (torch.nn.Parameter,), {})(torch.full((2,), float(rank)))


@on_ranks(4)
def test_models_that_differ_between_ranks(group: dist.ProcessGroup) -> None:
    rank, mesh = dist.get_rank(group), mesh_of(group, 2, 2)
    drawn, longer = make("llama"), make("llama")
    norm = type(drawn.model.norm)
    if rank == 2:
        torch.nn.init.normal_(drawn.model.norm.weight)
    if rank == 1:
        longer.more = torch.nn.Linear(2, 2, bias=False)
    says = r"'tp' and 'cp' have built different models: {}\.weight' of rank {} of 4.*torch\.manual_seed"
    for model, text in ((drawn, says.format("'model\\.norm", 2)), (longer, says.format("'more", 0))):
        refuses(RankMismatchError, text, parallelize, model, mesh)
        assert type(model.model.norm) is norm and type(model.lm_head) is torch.nn.Linear  # nothing is replaced
    for change in (_longer_vocabulary, _custom_parameter, _one_row):
        changed = make("llama")
        change(changed, rank)
        refuses(RankMismatchError, "built different models", parallelize, changed, mesh)
    frozen, odd = make("llama"), make("llama")
    frozen.requires_grad_(rank != 3)
    refuses(
        RankMismatchError,
        "of rank 3 of 4 differ from another rank's in shape, dtype, req",
        parallelize,
        frozen,
        mesh,
    )
    odd.custom = type("Custom", (torch.nn.Parameter,), {})(torch.ones(2))
    odd.register_buffer("cache", torch.full((3,), rank), persistent=False)
    odd.register_buffer("sparse", torch.eye(2).to_sparse())
    odd.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    odd.register_buffer("expanded", torch.ones(1).expand(2, 3).t())
    parallelize(odd, mesh)
    parallelize(make("llama").to("meta" if rank else "cpu"), mesh)  # as if one rank loads and broadcasts
    crossed = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("cp", "tp"))
    refuses(ValueError, "must ascend along every dim", parallelize, make("llama"), crossed)
    q = torch.ones(1, 2, 2, 8)
    refuses(ValueError, "must ascend", fused_tp.context_parallel_attention, q, q, q, mesh=crossed, seq_len=8)


@on_ranks(2)
def test_a_loss_that_is_not_replaced_is_an_error(group: dist.ProcessGroup) -> None:
    from transformers import LlamaForCausalLM

    class Handing(LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Own(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.pop("labels")
            out = LlamaForCausalLM.forward(self, *args, **kwargs)
            out.loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            return out

    class Adding(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = out.loss + 1e-4 * out.logits.logsumexp(-1).square().mean()  # of this rank's tokens
            return out

    class AddingInPlace(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss += 1e-4 * out.logits.logsumexp(-1).square().mean()
            return out

    class WithParts(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            return {"loss": out.loss + out.logits.square().mean(), "cross entropy": out.loss.detach()}

    class BeforeTheLoss(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.pop("labels")
            out = super().forward(*args, **kwargs)
            own = out.logits.square().mean()  # the loss receives other logits, computed from these
            return {"parts": [{"loss": self.loss_function(1.0 * out.logits, labels, 67) + own}]}

    class OfHidden(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **{**kwargs, "output_hidden_states": True})
            out.loss += 0.01 * out.hidden_states[-1].square().mean()  # as Mixtral adds its router loss
            out.loss = out.loss + 0.01 * out.hidden_states[0].square().mean()
            return out

    class Copying(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **{**kwargs, "labels": kwargs["labels"].int()})
            out.loss = out.loss.bfloat16()
            return out

    class Other(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **{**kwargs, "labels": kwargs["labels"].clamp_max(5)})

    class Masking(Handing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["labels"][kwargs["labels"] % 3 == 0] = -100
            return super().forward(*args, **kwargs)

    mesh, tokens = mesh_of(group, 2, 1), make_tokens(2, 9)
    whole, parallel = make("llama"), make("llama")
    added, other = "did not return the loss that loss_function", "labels that differ from those passed"
    by_loss: tuple[Any, ...] = (mesh_of(group, 1, 2), {"loss_parallel": True})
    for kind, says, further_mesh, keywords in (
        (Adding, added, *by_loss),
        (AddingInPlace, added, mesh, {}),
        (WithParts, added, *by_loss),
        (BeforeTheLoss, added, mesh, {}),
        (Other, other, *by_loss),
        (Masking, other, mesh, {}),
    ):
        further = make("llama", num_hidden_layers=1)
        further.__class__ = kind
        further = parallelize(further, further_mesh, **keywords)
        refuses(ValueError, says, further, input_ids=tokens, labels=tokens.clone())
        if kind is AddingInPlace:
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    refuses(ValueError, says, further, input_ids=tokens, labels=tokens.clone())
    # With only the vocabulary sharded, a term of hidden states is of whole tokens.
    of_hidden, its_parts = make("llama"), make("llama")
    of_hidden.__class__ = its_parts.__class__ = OfHidden
    parallelize(its_parts, mesh_of(group, 1, 2), loss_parallel=True)
    assert_trains_alike(its_parts, of_hidden, lambda model: model(input_ids=tokens, labels=tokens).loss)
    copying = make("llama")
    copying.__class__ = Copying
    parallelize(copying, mesh)(input_ids=tokens, labels=tokens)
    with torch.no_grad():
        copying.lm_head.weight.fill_(torch.nan)
    assert copying(input_ids=tokens, labels=tokens).loss.isnan()
    parallel.__class__ = Handing
    parallelize(parallel, mesh)
    assert_trains_alike(parallel, whole, lambda model: model(input_ids=tokens, labels=tokens).loss)
    own, patched = make("llama"), make("llama")
    own.__class__ = Own
    refuses(ValueError, "does not compute its loss by self.loss_function", parallelize, own, mesh)
    patched.forward = partial(Own.forward, patched)  # as kernel libraries replace it
    parallelize(patched, mesh)
    refuses(ValueError, "did not call the model's loss_function", patched, input_ids=tokens, labels=tokens)


@on_ranks(2)
def test_loss_function_replaced_later(group: dist.ProcessGroup) -> None:
    """Logits of a shard of the vocabulary once gave an IndexError inside the caller's function."""

    def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, **keywords: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    mesh, tokens = mesh_of(group, 1, 2), make_tokens(2, 9)
    own, wrapped = (parallelize(make("llama"), mesh, loss_parallel=True) for _ in range(2))
    own.loss_function = cross_entropy
    refuses(ValueError, "replaced after parallelize", own, input_ids=tokens, labels=torch.full_like(tokens, 66))
    wrapped.loss_function = partial(lambda inner, *args, **kwargs: inner(*args, **kwargs), wrapped.loss_function)
    for _ in range(2):
        loss = wrapped(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, make("llama")(input_ids=tokens, labels=tokens).loss)


@on_ranks(2)
def test_buffers_that_nothing_fills(group: dist.ProcessGroup) -> None:
    """Refuse a meta model with a buffer that is in no checkpoint and that transformers does not compute."""
    with torch.device("meta"):
        model = make_model("falcon_h1")
    refused = error_of(parallelize, model, mesh_of(group, 1, 2))
    assert isinstance(refused, ValueError) and "mup_vector is not in checkpoints" in str(refused), refused


def fused_loss(self: Any, input_ids: Tensor, labels: Tensor | None = None, **keywords: Any) -> Any:
    """Forward like Liger's, which replaces that of a class and reads the weight of the output layer."""
    hidden = self.model(input_ids=input_ids).last_hidden_state
    return torch.nn.functional.linear(hidden, self.lm_head.weight)


@on_ranks(2)
def test_a_patch_that_reads_a_weight(group: dist.ProcessGroup) -> None:
    """Refuse it in the forward of the class and in one set on the model."""
    whole = make("llama")
    kind = type(whole)
    with (
        patch.object(kind, "forward", fused_loss),
        pytest.raises(ValueError, match=r"reads 'lm_head.weight' directly"),
    ):
        parallelize(copy_of(whole), mesh_of(group, 1, 2))
    patched = copy_of(whole)
    patched.forward = MethodType(fused_loss, patched)
    with pytest.raises(ValueError, match=r"reads 'lm_head.weight' directly"):
        parallelize(patched, mesh_of(group, 1, 2))
    parallelize(copy_of(whole), mesh_of(group, 1, 2))


@on_ranks(2)
def test_ids_that_one_rank_would_refuse(group: dist.ProcessGroup) -> None:
    parallel, tokens = parallelize(make("llama"), mesh_of(group, 2, 1)), make_tokens(2, 8)
    for name, place in (("input_ids", 0), ("labels", 1)):
        given = {"input_ids": tokens.clone(), "labels": tokens.clone()}
        given[name][0, place] = 67
        with pytest.raises(ValueError, match=rf"{name} contains 67; ids must be 0 to 66"):
            parallel(**given)
    parallel.resize_token_embeddings(80, mean_resizing=False)  # equal on all ranks, because their random states are
    assert bool(parallel(input_ids=given["input_ids"], labels=given["labels"]).loss.isfinite())


@on_ranks(2)
def test_labels_of_kept_tokens(group: dist.ProcessGroup) -> None:
    whole, tokens = make("llama"), make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    assert_trains_alike(parallel, whole, lambda m: m(tokens, labels=tokens[:, -4:], logits_to_keep=4).loss)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 5\).*logits_to_keep=4"):
        parallel(tokens, labels=tokens[:, -5:], logits_to_keep=4)


@on_ranks(2)
def test_a_scaled_embedding_reads_its_scale(group: dist.ProcessGroup) -> None:
    """The scale may be rounded, by a model that was in 16 bits, or changed by the caller."""
    whole, tokens = make("gemma2"), make_tokens(2, 9)
    whole.model.embed_tokens.embed_scale.mul_(1.01)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    assert_trains_alike(parallel, whole, lambda m: m(input_ids=tokens, labels=tokens).loss)


@on_ranks(2)
def test_attention_weights_of_all_heads(group: dist.ProcessGroup) -> None:
    whole, tokens = make("llama", attn_implementation="eager"), make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))

    def loss_of(model: Any) -> Tensor:
        output = model(input_ids=tokens, labels=tokens, output_attentions=True)
        assert all(weights.shape == (2, model.config.num_attention_heads, 9, 9) for weights in output.attentions)
        return output.loss + sum(weights.square().mean() for weights in output.attentions)

    assert_trains_alike(parallel, whole, loss_of)


@pytest.mark.parametrize("from_rank0", [True, pytest.param(False, marks=pytest.mark.full)])
@on_ranks(4)  # torch broadcasts over all ranks of the default group
def test_full_state_of_packed_parameters(group: dist.ProcessGroup, from_rank0: bool) -> None:
    whole = make("qwen3_moe")
    state = whole.state_dict()
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 2))
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    given = {name: t.clone() for name, t in state.items()} if group.rank() == 0 or not from_rank0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    set_model_state_dict(parallel, given, options=options)
    assert_equal_states(gather_state_dict(parallel), state)
