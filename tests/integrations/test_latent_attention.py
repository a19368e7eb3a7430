"""Latent attention over context parallel ranks, dense and with an indexer, in float64 against one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fused_tp.ops.sequence import sequence_positions
from fused_tp.parallelizing import latent_attention
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import LAYOUTS, assert_near, copy_of, full, mesh_of, on_layouts
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

EXACT = 1e-9
# Types whose own code computes in fp32: softmax of eager attention, linear attention, routers, norms of gated heads.
ROUNDED = dict.fromkeys(("hy_v4", "kimi_linear", "deepseek_v2", "longcat_flash", "dots3_note_text"), 2e-5)
TWO_DENSE_LAYERS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}
SELECTED = {**TWO_DENSE_LAYERS, "layer_types": ["indexed_attention", "indexed_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": SELECTED,
    "glm_moe_dsa": {**SELECTED, "indexer_types": ["full", "shared"]},
    "axk2": SELECTED,
    "dots3_note_text": {**TWO_DENSE_LAYERS, "layer_types": ["indexed_attention", "sliding_attention"]},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "glm4_moe_lite": TWO_DENSE_LAYERS,
    "axk1": TWO_DENSE_LAYERS,
}
FULL = pytest.mark.full
# The selections of these types (index_topk of 8) are far smaller than the sequence.
SELECTING = ["deepseek_v32", "glm_moe_dsa"]
OTHER_SELECTING = [pytest.param(kind, marks=FULL) for kind in ("axk2", "dots3_note_text", "hy_v4")]
DENSE = ["deepseek_v3", "kimi_linear"]
OTHER_DENSE = [
    pytest.param(kind, marks=FULL)
    for kind in ("deepseek_v2", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "axk1")
]
LENGTH = 37


def tokens_of(length: int = LENGTH, rows: int = 2) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(5))


def pair(group: dist.ProcessGroup, layout: str, kind: str, **changes: Any) -> tuple[Any, Any]:
    cp, tp, keywords = (group.size(), 1, {}) if layout == "cp" else LAYOUTS[layout]
    whole = make_model(kind, torch.float64, **{**CHANGES.get(kind, {}), **changes})
    whole.set_experts_implementation("eager")  # torch's grouped matmul does not compute in float64
    return whole, parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)


def assert_exact(whole: Any, parallel: Any, tokens: Tensor, **keywords: Any) -> None:
    """Compare the cross entropy, computed from the logits in float64, and all gradients."""
    losses, tolerance = [], ROUNDED.get(whole.config.model_type, EXACT)
    for model in (whole, parallel):
        model.zero_grad()
        logits = model(tokens, **keywords).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss)
    assert_near(losses[1], losses[0], "loss", tolerance)
    expected = dict(whole.named_parameters())
    largest = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
    for name, parameter in parallel.named_parameters():
        gradient = expected[name].grad
        if gradient is None or not gradient.any():
            assert parameter.grad is None or not full(parameter.grad).any(), name
            continue
        assert parameter.grad is not None, name
        assert_near(full(parameter.grad).view_as(gradient), gradient, name, tolerance, least=1e-3 * largest)


def selections(model: Any, tokens: Tensor) -> list[Tensor]:
    """Return the indices that each indexer of `model` selects for `tokens`."""
    found: list[Tensor] = []
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    handles = [module.register_forward_hook(lambda m, args, indices: found.append(indices)) for module in indexers]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    assert indexers and len(found) == len(indexers)
    return found


class Sent(TorchDispatchMode):
    """Bytes that collectives of fused_tp send from this rank, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_tp":
            tensors = [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
            self.bytes[func._opname] += tensors[0].nbytes if tensors else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*SELECTING, *OTHER_SELECTING])
@on_layouts("cp2", "cp2_tp2", full=["ring2_ulysses2", "cp2_tp2_sp_lossparallel"])
def test_selected_keys(group: dist.ProcessGroup, layout: str, kind: str) -> None:
    whole, parallel = pair(group, layout, kind)
    tokens, mesh = tokens_of(), mesh_of(group, *LAYOUTS[layout][:2])
    positions = sequence_positions(LENGTH, group=mesh["cp"])
    for wanted, found in zip(selections(whole, tokens), selections(parallel, tokens), strict=True):
        assert torch.equal(found, wanted[:, positions])
    assert_exact(whole, parallel, tokens)


@pytest.mark.parametrize("kind", [*DENSE, *OTHER_DENSE])
@on_layouts("cp2", "cp2_tp2", full=["ring2_ulysses2", "cp2_tp2_sp_lossparallel"])
def test_all_keys(group: dist.ProcessGroup, layout: str, kind: str) -> None:
    whole, parallel = pair(group, layout, kind)
    assert_exact(whole, parallel, tokens_of())


@pytest.mark.parametrize("kind", [*SELECTING, "deepseek_v3", *OTHER_SELECTING, *OTHER_DENSE])
@on_ranks(3, 4)
def test_more_ranks(group: dist.ProcessGroup, kind: str) -> None:
    whole, parallel = pair(group, "cp", kind)
    for length in (LENGTH, group.size()):
        assert_exact(whole, parallel, tokens_of(length))


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v3"])
@on_ranks(2)
def test_packed_and_padded_rows(group: dist.ProcessGroup, kind: str) -> None:
    whole, parallel = pair(group, "cp", kind)
    positions = torch.cat([torch.arange(n) for n in (11, 3, 23)]).unsqueeze(0)
    assert_exact(whole, parallel, tokens_of(rows=1), position_ids=positions, use_cache=False)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 30:] = 0
    tokens = tokens_of()
    for model in (whole, parallel):
        model.zero_grad()
        logits = model(tokens, attention_mask=mask).logits
        (logits.square() * mask.unsqueeze(-1)).mean().backward()
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            assert_near(parallel.get_parameter(name).grad, parameter.grad, name, EXACT)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v3"])
@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=FULL)])
@on_ranks(2)
def test_checkpointed_in_blocks(group: dist.ProcessGroup, kind: str, use_reentrant: bool) -> None:
    """Compare training with activation checkpointing, where all blocks of queries have a single row."""
    whole, parallel = pair(group, "cp", kind)
    most, latent_attention.MAX_BLOCK_SCORES = latent_attention.MAX_BLOCK_SCORES, 1
    try:
        for model in (whole, parallel):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert_exact(whole, parallel, tokens_of(13), use_cache=False)
    finally:
        latent_attention.MAX_BLOCK_SCORES = most


@on_ranks(2)
@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v3"])
def test_adapters_on_the_expansion(group: dist.ProcessGroup, kind: str) -> None:
    """Train adapters of kv_b_proj, without and with dropout: a frozen weight has no gradient, and gradients of random
    numbers agree with finite differences."""
    peft = pytest.importorskip("peft", reason="peft is not installed; pip install peft")
    tokens = tokens_of(19)

    def adapted(dropout: float) -> tuple[Any, Any]:
        torch.manual_seed(4)
        config = peft.LoraConfig(
            r=4, target_modules=["kv_b_proj", "q_b_proj"], lora_dropout=dropout, init_lora_weights=False
        )
        whole = make_model(kind, torch.float64, **CHANGES[kind])
        whole.set_experts_implementation("eager")
        whole = peft.get_peft_model(whole, config).double()
        return whole, parallelize(copy_of(whole), mesh_of(group, 2, 1))

    assert_exact(*adapted(0.0), tokens, use_cache=False)
    model = adapted(0.5)[1].train()
    # Of the last layer: it changes no selection.
    weight = [p for name, p in model.named_parameters() if "kv_b_proj.lora_A" in name][-1]

    def loss(step: float) -> Tensor:
        torch.manual_seed(6)
        with torch.no_grad():
            weight[0, 0] += step
        result: Tensor = model(tokens, use_cache=False).logits.square().mean()
        return result

    loss(0.0).backward()
    assert weight.grad is not None
    analytic, step = weight.grad[0, 0].item(), 1e-2  # norms compute in fp32: smaller steps measure rounding
    numeric = ((loss(step) - loss(-2 * step)) / (2 * step)).item()
    assert abs(numeric - analytic) < 0.02 * weight.grad.abs().max().item()


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"])
@on_ranks(2)
def test_generate(group: dist.ProcessGroup, kind: str) -> None:
    """Generate from a cache: every rank computes everything, and selects tokens."""
    whole, parallel = pair(group, "cp", kind)
    with torch.no_grad():
        made = [m.eval().generate(tokens_of(19), max_new_tokens=4, do_sample=False) for m in (whole, parallel)]
    assert torch.equal(*made)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v3"])
@on_ranks(2)
def test_only_latents_are_sent(group: dist.ProcessGroup, kind: str) -> None:
    """Count the bytes that a rank sends for attention: latents twice, their gradients once, and the indexer's keys."""
    base = make_model(kind, torch.float64, **CHANGES[kind]).model
    parallel = parallelize(base, mesh_of(group, 2, 1))
    config, length, size = parallel.config, 32, 8
    hidden = torch.randn(2, length, config.hidden_size, dtype=torch.float64)
    for _ in range(3):  # the first calls also compare the model with one process
        with Sent() as sent:
            parallel(inputs_embeds=hidden).last_hidden_state.square().mean().backward()
    assert not any("attention" in name for name in sent.bytes), sent.bytes
    latent = 2 * (length // 2) * (config.kv_lora_rank + config.qk_rope_head_dim) * size
    keys = 2 * (length // 2) * getattr(config, "index_head_dim", 0) * size
    layers = config.num_hidden_layers
    output = hidden.nbytes // 2
    assert sent.bytes["unshard_sequence"] == layers * (2 * latent + keys) + output, sent.bytes
    assert sent.bytes["reduce_scatter"] == layers * 2 * latent, sent.bytes  # one share stays on this rank


@on_ranks(2)
def test_short_documents_send_keys(group: dist.ProcessGroup) -> None:
    """Exchange the keys instead of the latents if few keys are visible on other ranks."""
    whole, parallel = pair(group, "cp", "deepseek_v3")
    positions = torch.arange(4).repeat(10)[:LENGTH].unsqueeze(0)
    with Sent() as sent:
        assert_exact(whole, parallel, tokens_of(rows=1), position_ids=positions, use_cache=False)
    assert "ring_attention" in sent.bytes


@on_ranks(2)
def test_dropout_of_selected_keys_is_refused(group: dist.ProcessGroup) -> None:
    whole = make_model("deepseek_v32", **CHANGES["deepseek_v32"], attention_dropout=0.1)
    refuses(ValueError, "attention_dropout", parallelize, whole, mesh_of(group, 2, 1))
