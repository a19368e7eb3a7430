"""transformers models over context parallel ranks: windows, soft caps, sinks, packed documents, dropout; and models
with attention code of their own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    LAYOUTS,
    assert_near,
    assert_same_calls,
    assert_trains_alike,
    assert_trains_checkpointed,
    copy_of,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
    pair,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.tiers import quick
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

DOCUMENTS = [7, 1, 11, 4]  # lengths in one row


def packed_positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


def packed_labels(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Labels without the first token of each document: no document's last token predicts it."""
    labels = tokens.clone()
    labels[:, [sum(lengths[:i]) for i in range(len(lengths))]] = -100
    return labels


WINDOWS: dict[str, Any] = {"mistral": {"sliding_window": 4}}
FAMILIES = ["mistral", "qwen2", "gemma2", "gpt_oss", "granite_swa"]
WITH_TP = "cp2_tp2_sp_lossparallel"


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *(("cp2", family) for family in FAMILIES),
        *((WITH_TP, "gemma2"), (WITH_TP, "llama"), ("tp2_sp", "gemma2")),
        *(("ulysses2", "gpt_oss"), ("ring2_ulysses2", "gemma2")),
        *(pytest.param("ulysses2", family, marks=pytest.mark.full) for family in [*FAMILIES[:3], "deepseek_v3"]),
        *(pytest.param("ring2_ulysses2", family, marks=pytest.mark.full) for family in ("gpt_oss", "deepseek_v3")),
        *(pytest.param("ulysses2_tp2", family, marks=pytest.mark.full) for family in ("gpt_oss", "gemma2")),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@on_ranks(lambda layout: LAYOUTS[layout][0] * LAYOUTS[layout][1])
def test_windows_caps_and_sinks(group: dist.ProcessGroup, layout: str, family: str, packed: bool) -> None:
    whole, parallel = pair(group, layout, family, **WINDOWS.get(family, {}))
    if packed:
        tokens = make_tokens(1, sum(DOCUMENTS))
        labels = packed_labels(tokens, DOCUMENTS)
        if family == "gpt_oss":
            # Its own masks ignore positions, unlike its flash attention: compare with each document alone.
            logits = parallel(tokens, position_ids=packed_positions(DOCUMENTS), use_cache=False).logits
            alone = [whole(document).logits for document in tokens.split(DOCUMENTS, 1)]
            assert_near(logits, torch.cat(alone, 1), "logits")
            return
        assert_same_calls(parallel, whole, tokens, labels, position_ids=packed_positions(DOCUMENTS), use_cache=False)
    else:
        tokens = make_tokens(2, 21)
        assert_same_calls(parallel, whole, tokens, tokens)


@on_ranks(2)
def test_training_on_packed_documents(group: dist.ProcessGroup) -> None:
    from transformers import DataCollatorWithFlattening

    generator = torch.Generator().manual_seed(2)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batches = []
    for lengths in ([5, 9, 3], [20, 2], [1, 1, 6, 8]):
        rows = [torch.randint(3, 67, (n,), generator=generator).tolist() for n in lengths]
        batches.append(collate([{"input_ids": row} for row in rows]))
    whole, parallel = pair(group, "cp2", "gemma2")
    losses = []
    for model in (whole, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for batch in batches:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][0] != losses[0][1] != losses[0][2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@on_ranks(2)
def test_documents_of_several_rows_and_by_their_bounds(group: dist.ProcessGroup) -> None:
    whole, parallel = pair(group, "cp2", "llama")
    tokens, positions = make_tokens(2, 23), packed_positions(DOCUMENTS)
    for rows in (positions, positions.expand(2, -1)):
        same_logits(whole, parallel, tokens, position_ids=rows, use_cache=False)
    # Positions may start anywhere, as those of an excerpt of a document do.
    same_logits(whole, parallel, tokens, position_ids=positions + 3, use_cache=False)
    bounds = torch.tensor([0, 7, 8, 8, 19, 23], dtype=torch.int32)
    by_bounds = parallel(tokens[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=11, max_length_k=11)
    # Rotary positions then continue across documents; attention depends on their differences only.
    expected = whole(tokens[:1], position_ids=positions, use_cache=False)
    assert_near(by_bounds.logits, expected.logits, "logits", 1e-4)

    mixed = torch.cat([positions, torch.arange(23).unsqueeze(0)])
    refused: dict[str, dict[str, Any]] = {
        "at different positions in different rows": {"position_ids": mixed},
        "omit attention_mask": {
            "position_ids": positions,
            "use_cache": False,
            "attention_mask": torch.ones_like(tokens),
        },
        "Pass use_cache=False": {"position_ids": positions},
        "the same documents": {"position_ids": positions, "cu_seq_lens_q": torch.tensor([0, 6, 23])},
        r"cu_seq_lens_q is \(0, 6\)": {"cu_seq_lens_q": torch.tensor([0, 6])},
        "cu_seq_lens_k must be equal": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds[[0, -1]]},
        r"positions \[batch, seq\]": {"position_ids": positions.expand(3, 2, -1)},
    }
    for says, keywords in refused.items():
        refuses(ValueError, says, parallel, tokens, **keywords)
    # The position numbers of padding do not matter.
    mask = torch.ones_like(tokens)
    mask[:, 19:] = 0
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = [model(tokens, position_ids=counted, attention_mask=mask).logits[:, :19] for model in (whole, parallel)]
    assert_near(logits[1], logits[0], "logits")


@on_ranks(4)
def test_documents_of_fewer_tokens_than_ranks(group: dist.ProcessGroup) -> None:
    """Each rank computes all tokens with the same result, and no rank collects a cache."""
    whole = make("llama")
    parallel = parallelize(copy_of(whole), mesh_of(group, 4, 1))
    tokens, positions, bounds = make_tokens(1, 3), torch.tensor([[0, 0, 1]]), torch.tensor([0, 1, 3])
    wanted = whole(tokens, position_ids=positions, use_cache=False).logits
    by_bounds: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for given in (
        {"position_ids": positions, "use_cache": False},
        by_bounds,
        {**by_bounds, "attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(3).unsqueeze(0)},
    ):
        output = parallel(tokens, **given)
        assert_near(output.logits, wanted, "logits")
        assert output.past_key_values is None
    with pytest.raises(ValueError, match="Pass use_cache=False"):
        parallel(tokens, position_ids=positions)
    assert_near(parallel(tokens).logits, whole(tokens).logits, "logits")


def same_logits(whole: Any, parallel: Any, tokens: Tensor, **keywords: Any) -> None:
    assert_near(parallel(tokens, **keywords).logits, whole(tokens, **keywords).logits, "logits")


@on_ranks(2)
def test_windows_that_are_not_causal(group: dist.ProcessGroup) -> None:
    whole, parallel = pair(group, "cp2", "mistral", sliding_window=3)
    tokens = make_tokens(2, 13)
    logits = [model(tokens, is_causal=False).logits for model in (whole, parallel)]
    assert_near(logits[1], logits[0], "logits")
    assert (logits[0] - whole(tokens).logits).abs().max() > 1e-2


def test_chunks_are_told_from_windows_and_refused() -> None:
    from transformers.masking_utils import (
        chunked_causal_mask_function,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )

    from fused_tp.parallelizing.hf.hf_attention import MaskWindow, _convert_window

    with pytest.raises(ValueError, match="chunks of 4 tokens"):
        _convert_window(chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)), 4)
    assert _convert_window(sliding_window_causal_mask_function(4), 4) == MaskWindow((3, 0))
    assert _convert_window(sliding_window_bidirectional_mask_function(4), 4) == MaskWindow((4, 4))


def _alone(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> tuple[Tensor, None]:
    """Attention with the dropout of ring attention, over one rank."""
    from fused_tp.ops.ring_attention import ring_attention_from_head

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    how: Any = {"causal": True, "scale": keywords["scaling"], "dropout_p": keywords["dropout"]}
    return ring_attention_from_head(q, k, v, None, is_unsharded=True, **how), None


@on_layouts("cp2", "ulysses2", full=["cp2_tp2", "ring2_ulysses2", "ulysses2_tp2"])
def test_attention_dropout_is_the_same_on_any_number_of_ranks(group: dist.ProcessGroup, layout: str) -> None:
    from transformers import AttentionInterface

    whole, parallel = pair(group, layout, "llama", attention_dropout=0.3)
    AttentionInterface.register("alone", _alone)
    whole.config._attn_implementation = "alone"
    tokens = make_tokens(2, 17)

    def loss_of(model: Any, seed: int = 5) -> Tensor:
        torch.manual_seed(seed)
        return model(tokens, labels=tokens).loss

    assert_trains_alike(parallel, whole, loss_of)
    assert abs(loss_of(whole, 6).item() - loss_of(whole).item()) > 1e-4


@on_ranks(2)
def test_ulysses_sizes_that_are_refused(group: dist.ProcessGroup) -> None:
    model, mesh = make("llama"), mesh_of(group, 2, 1)
    refuses(ValueError, r"must divide the 2 .* one of 1, 2\.", parallelize, model, mesh, ulysses_size=3)
    refuses(TypeError, "ulysses_size must be an int", parallelize, model, mesh, ulysses_size=True)
    odd = make("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    refuses(ValueError, r"num_attention_heads=3, .*ulysses_size: 1\.", parallelize, odd, mesh, ulysses_size=2)
    parallelize(odd, mesh)  # the refusal left it unchanged
    layers = make_model("laguna", num_attention_heads_per_layer=[4, 3], num_key_value_heads=1)
    refuses(ValueError, r"_per_layer=3, .*ulysses_size: 1\.", parallelize, layers, mesh, ulysses_size=2)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 22, "rope_theta": 1e4}
LENGTHS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "longrope": {"rope_parameters": {**LONG, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}},
}


@pytest.mark.parametrize("kind", LENGTHS)
@on_ranks(2)
def test_rotary_frequencies_that_depend_on_the_length(group: dist.ProcessGroup, kind: str) -> None:
    """Frequencies depend on the largest position; some rank holds neither it nor one beyond the threshold."""
    whole, parallel = pair(group, "cp2", "llama", max_position_embeddings=16, **LENGTHS[kind])
    for length in (24, 40, 12, 23):  # the frequencies are kept from call to call
        assert_same_calls(parallel, whole, *[make_tokens(2, length)] * 2)
        for model in (whole, parallel):
            model.zero_grad()
    tokens = make_tokens(1, sum(DOCUMENTS))
    same_logits(whole, parallel, tokens, position_ids=packed_positions(DOCUMENTS) + 9, use_cache=False)


# Types with attention code of their own.
LOCAL: dict[str, Any] = {"window_size": 4, "attention_types": [[["global", "local"], 1]]}
OWN: list[tuple[str, str, dict[str, Any]]] = [
    ("cp2", "xglm", {"max_position_embeddings": 8}),  # a table of positions that grows
    ("cp2_tp2", "bloom", {"n_head": 6, "hidden_size": 48}),  # ALiBi has another rule for 6 heads
    (WITH_TP, "gpt_neo", LOCAL),
]
OTHERS = [
    (WITH_TP, "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (WITH_TP, "mpt", {"n_heads": 6, "d_model": 48}),
    ("cp2", "gpt_neo", LOCAL),
    *(("ulysses2_tp2", "bloom", {}), ("ring2_ulysses2", "bloom", {"n_head": 6, "hidden_size": 48})),
    ("cp2_tp2", "falcon", {"multi_query": True}),
    ("cp2_tp2", "codegen", {}),
    (WITH_TP, "gptj", {}),
    (WITH_TP, "openai-gpt", {}),
    (WITH_TP, "gpt_neox_japanese", {}),
    (WITH_TP, "xglm", {}),
    (WITH_TP, "stablelm", {}),
    (WITH_TP, "biogpt", {}),
]


@pytest.mark.parametrize(("layout", "kind", "changes"), quick([*OWN, *OTHERS], *OWN))
@on_ranks(lambda layout: LAYOUTS[layout][0] * LAYOUTS[layout][1])
def test_attention_by_code_of_their_own(
    group: dist.ProcessGroup, layout: str, kind: str, changes: dict[str, Any]
) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    whole = make_model(kind, **changes)
    parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)
    tokens = make_tokens(2, 21)
    assert_same_calls(parallel, whole, tokens, tokens)
    for few in (make_tokens(2, 1), make_tokens(2, 3)):  # not sharded, or too few for all tensor parallel ranks
        same_logits(whole, parallel, few)
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    for model in (whole, parallel):
        model.zero_grad()
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=labels, attention_mask=mask).loss)
    # Here each rank computes everything, by their own code.
    same_logits(whole, parallel, tokens, attention_mask=mask.flip(1), use_cache=True)


@on_ranks(2)
def test_attention_by_code_of_their_own_that_runs_again_and_on_documents(group: dist.ProcessGroup) -> None:
    whole = make_model("gpt_neo", **LOCAL)
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    tokens = make_tokens(1, sum(DOCUMENTS))
    labels, positions = packed_labels(tokens, DOCUMENTS), packed_positions(DOCUMENTS)
    assert_same_calls(parallel, whole, tokens, labels, position_ids=positions, use_cache=False)
    for model in (whole, parallel):
        model.zero_grad()
    assert_trains_checkpointed(parallel, whole)
    again = copy_of(parallel)
    same_logits(whole, again, tokens)


@pytest.mark.parametrize(("kind", "changes"), [("gptj", {"attn_pdrop": 0.3}), ("xglm", {"attention_dropout": 0.3})])
@on_ranks(2)
def test_dropout_of_attention_by_code_of_their_own(
    group: dist.ProcessGroup, kind: str, changes: dict[str, float]
) -> None:
    parallel = parallelize(make_model(kind, **changes), mesh_of(group, 2, 1))
    tokens = make_tokens(2, 17)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(parallel(tokens, labels=tokens).loss.detach())

    assert loss(5) == loss(5) != loss(6)
    parallel.eval()
    assert loss(5) == loss(6)


@on_ranks(2)
def test_other_code_of_their_own_is_refused(group: dist.ProcessGroup) -> None:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    mesh = mesh_of(group, 2, 1)
    said = r"'transformer.h.0.self_attention' \(FalconAttention\) is not known .*Omit cp_dim\.$"
    refuses(ValueError, said, parallelize, make_model("falcon", alibi=True), mesh)
    model = make_model("bloom", pretraining_tp=2, slow_but_exact=True)  # leaves a bias out
    refuses(ValueError, r"\(BloomAttention\) is not known", parallelize, model, mesh)
    model = make_model("gptj")
    model.config.is_causal = False
    refuses(ValueError, r"\(GPTJAttention\) is not known", parallelize, model, mesh)

    def other(self: Any, query: Tensor, key: Tensor, mask: Tensor) -> None: ...

    with mock.patch.object(GPTJAttention, "_attn", other):  # as in another version of transformers
        refuses(ValueError, r"\(GPTJAttention\) is not known", parallelize, make_model("gptj"), mesh)


@on_ranks(2)
def test_a_model_that_answers_questions_is_no_base_model(group: dist.ProcessGroup) -> None:
    from transformers import GPTJForQuestionAnswering

    model = GPTJForQuestionAnswering(make_model("gptj").config)
    state = dict(model.named_parameters())
    refuses(ValueError, "neither a causal language model nor a base model", parallelize, model, mesh_of(group, 2, 1))
    assert all(state[name] is parameter for name, parameter in model.named_parameters())


@on_ranks(2)
def test_layers_left_out_at_random_are_refused(group: dist.ProcessGroup) -> None:
    said = r"'model' has layerdrop=0\.5.* Set model\.get_submodule\('model'\)\.layerdrop = 0\.0"
    model = make_model("xglm", layerdrop=0.5)
    refuses(ValueError, said, parallelize, model, mesh_of(group, 2, 1))
    refuses(ValueError, said, parallelize, model, mesh_of(group, 1, 2), sequence_parallel=True)
    parallelize(copy_of(model), mesh_of(group, 1, 2))  # these ranks draw the same numbers
    model.get_submodule("model").layerdrop = 0.0
    parallelize(model, mesh_of(group, 2, 1))


@on_layouts("cp2", "tp2_sp")
def test_attention_that_is_chosen_too_late_is_refused(group: dist.ProcessGroup, layout: str) -> None:
    """Refuse attention set after parallelize: it would see only the rank's own tokens."""
    whole, parallel = pair(group, layout, "llama")
    tokens, ours = make_tokens(2, 9), parallel.config._attn_implementation
    for model in (parallel, copy_of(parallel)):
        model.set_attn_implementation("eager")
        refuses(ValueError, "set to 'eager' after parallelize, .* or set it back", model, tokens)
        model.set_attn_implementation(ours)
        same_logits(whole, model, tokens)
    if layout == "cp2":
        parallel.eval().set_attn_implementation("eager")
        with torch.no_grad():
            refuses(ValueError, "set to 'eager' after parallelize", parallel, tokens, use_cache=True)


@on_ranks(2)
def test_attention_that_asks_for_its_name_or_for_more_is_refused(group: dist.ProcessGroup) -> None:
    """Sparse attention passes the selected tokens to some implementations as a mask and to others as indices."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Selecting(LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            selected = torch.ones(hidden_states.shape[1], dtype=torch.bool).tril().diff()
            if self.config._attn_implementation in ("eager", "sdpa"):
                attention_mask = selected
            return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)

    class Indexed(LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, *args, indices=torch.arange(hidden_states.shape[1]), **kwargs)

    mesh = mesh_of(group, 2, 1)
    for kind in (Selecting, Indexed):
        model: Any = make("llama")
        model.model.layers[-1].self_attn.__class__ = kind
        if kind is Selecting:
            refuses(
                ValueError,
                r"self_attn' \(Selecting\) runs special code if .* 'sdpa'",
                parallelize,
                model,
                mesh,
            )
        else:
            refuses(
                ValueError,
                "Indexed passes the tensor 'indices' to its attention",
                parallelize(model, mesh),
                make_tokens(1, 6),
            )
