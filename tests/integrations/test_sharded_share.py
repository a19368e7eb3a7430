"""Share of a block's elements that plan="auto" shards, and blocks that transformers' plans leave whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict
from fused_tp.planning.model_count import count_sharded_share
from fused_tp.planning.small_config import VOCAB_SIZE
from tests.integrations.models import assert_equal_states, copy_of, full, mesh_of
from tests.integrations.sweep import generate, make_model
from tests.reference import refuses
from tests.tiers import quick
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from docs import tables

DOCUMENTED: dict[str, list[float]] = json.loads(
    (Path(tables.__file__).parent / "sharded_shares.json").read_text(encoding="utf-8")
)
PUBLISHED = list(tables.PUBLISHED_WHOLE_PARTS)
# Models in float64 compute routers, rotations, indexers and recurrent states in fp32. A sum over ranks changes their
# inputs in the last bit, and so the fp32 result. Relative to the largest element of a tensor.
TOLERANCE = 2e-5
# Types whose blocks transformers' plan leaves whole, and the mechanism that ours shards.
TYPES = [
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # latent attention with an indexer
    "deepseek_v4",  # one head of keys with compressors, grouped output projections
    "kimi_linear",  # delta attention and latent attention
    "glm4_moe",
    "glm4_moe_lite",  # shared experts
    "bailing_hybrid",  # delta attention with gates of another shape
    "inkling_text",  # convolutions of keys and values
    "lfm2",  # convolutions
    "minimax_m3_vl_text",  # packed shared experts
    "afmoe",  # a gate of the output of attention
]
# (cp, tp, keywords); together 4 ranks, or 2.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2_sp": (1, 2, {"sequence_parallel": True}),
    "tp4": (1, 4, {}),
    "cp2_tp2": (2, 2, {"sequence_parallel": True, "loss_parallel": True}),
}
REFUSED_OVER_CP = ("deepseek_v32", "deepseek_v4", "inkling_text", "minimax_m3_vl_text")
REFUSED = {*(("cp2_tp2", kind) for kind in REFUSED_OVER_CP), ("tp4", "inkling_text")}  # it has 2 heads of keys
CASES = [(layout, kind) for layout in LAYOUTS for kind in TYPES if (layout, kind) not in REFUSED]
IN_TEST = [("tp4", "deepseek_v3"), ("tp4", "deepseek_v4"), ("tp4", "kimi_linear"), ("cp2_tp2", "kimi_linear")]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_share_at_published_sizes(kind: str) -> None:
    share = count_sharded_share(tables.published_config(kind), num_ranks=2)
    assert share.total >= 0.95
    assert [share.total, share.outside_experts] == pytest.approx(DOCUMENTED[kind], abs=1e-4)


def test_share_of_repeated_heads() -> None:
    config = tables.published_config("llama")
    config.num_key_value_heads = 2
    assert count_sharded_share(config, 2).total > 0.999 > count_sharded_share(config, 4).total


def test_types_with_small_shares_have_reasons() -> None:
    assert {kind for kind, (total, _) in DOCUMENTED.items() if total < 0.9} == tables.WHOLE_PARTS.keys()
    assert "| `bamba` | 88.0% |" in tables.sharded_shares()


@pytest.mark.long
def test_shares_of_all_types_are_documented() -> None:
    assert json.loads(tables.sharded_shares_file(tables.documented_types())) == DOCUMENTED


def make_ids() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(3, VOCAB_SIZE, (2, 24))


def assert_close(made: Tensor, expected: Tensor, name: str, scale: float = 0.0) -> None:
    scale = max(scale, float(expected.abs().max()))
    error = float((made - expected).abs().max()) / scale
    assert error <= TOLERANCE, f"{name}: {error:.1e}"


def assert_trains_alike(parallel: Any, whole: Any) -> None:
    ids = make_ids()
    losses = [model(input_ids=ids, labels=ids).loss for model in (parallel, whole)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, "loss")
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    noise = 1e-4 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in parallel.named_parameters():
        if name in gradients:
            assert_close(full(parameter.grad).view_as(gradients[name]), gradients[name], name, noise)


@pytest.mark.parametrize(("layout", "kind"), quick(CASES, *IN_TEST))
@on_ranks(lambda layout: LAYOUTS[layout][0] * LAYOUTS[layout][1])
def test_training_and_generation(group: dist.ProcessGroup, layout: str, kind: str) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    whole = make_model(kind, torch.float64)
    parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)
    assert_trains_alike(parallel, whole)
    expected, made = generate(whole, make_ids()), generate(parallel, make_ids())
    assert expected is not None and made is not None
    for expected_logits, logits in zip(expected, made, strict=True):
        assert_close(logits, expected_logits, "logits")


@pytest.mark.parametrize("kind", quick(("deepseek_v3", "deepseek_v4", "kimi_linear"), "kimi_linear"))
@on_ranks(2)
def test_states_and_static_caches(group: dist.ProcessGroup, kind: str, tmp_path: Path) -> None:
    import transformers

    whole = make_model(kind, torch.float64)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    state = whole.state_dict()
    assert_equal_states(gather_state_dict(parallel), state)
    changed = {name: t + 1 if t.is_floating_point() else t for name, t in state.items()}
    load_full_state_dict(parallel, changed)
    assert_equal_states(gather_state_dict(parallel), changed)
    load_full_state_dict(parallel, state)
    parallel.save_pretrained(tmp_path / "saved")
    dist.barrier(group)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert_equal_states(loaded.state_dict(), state)
    if kind == "deepseek_v4":
        return  # transformers has no static cache for it
    with torch.no_grad():
        keywords = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "use_cache": True}
        made, expected = (model.eval().generate(make_ids(), **keywords) for model in (parallel, whole))
    assert torch.equal(made, expected)


@on_ranks(2)
def test_heads_that_ranks_cannot_share(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    one_group = make_model("deepseek_v4", o_groups=1)
    refuses(ValueError, "has 1 groups of heads, which 2 tensor", parallelize, one_group, mesh)
    plan = {"model.layers.*.self_attn.o_proj": "grouped_colwise"}
    refuses(ValueError, "has no n_groups", parallelize, make_model("deepseek_v3"), mesh, plan=plan)
