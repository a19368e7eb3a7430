"""generate() with a cache sharded over context parallel ranks returns the tokens of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.parallelizing.families import FAMILIES, Family
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.model_families import FAMILIES as MADE
from tests.integrations.models import assert_near, copy_of, make, make_tokens, mesh_of
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.tiers import quick
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

PROMPT = 9


@contextmanager
def blocks_of(tokens: int) -> Iterator[None]:
    """Set a small block size, so that short texts are sharded over several ranks."""
    from fused_tp.parallelizing.hf import hf_cache

    before, hf_cache.CACHE_BLOCK = hf_cache.CACHE_BLOCK, tokens
    try:
        yield
    finally:
        hf_cache.CACHE_BLOCK = before


def generated(model: Any, tokens: Tensor, **keywords: Any) -> Any:
    how = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True, "disable_compile": True}
    return model.generate(tokens, **{**how, **keywords})


def held(cache: Any) -> list[list[int]]:
    """Number of tokens of each text and layer on this rank."""
    return [[layer.cache._layout.count_before(n) for n in layer.cache.lengths] for layer in cache.layers]


WINDOWS: dict[str, Any] = {
    "mistral": {"sliding_window": 4},
    "gpt_neo": {"window_size": 4, "attention_types": [[["global", "local"], 1]]},
}


@pytest.mark.parametrize(
    ("family", "tp"),
    quick(
        [
            *(("llama", 1), ("mistral", 1), ("gemma2", 1), ("gpt_oss", 1), ("gemma2", 2)),
            # Attention code of their own.
            *(("gpt_neo", 1), ("bloom", 2), ("codegen", 1), ("falcon", 1), ("mpt", 1), ("xglm", 1)),
        ],
        *(("gpt_oss", 1), ("gemma2", 2), ("bloom", 2)),
    ),
)
@on_ranks(lambda tp: 2 * tp)
def test_same_tokens(group: dist.ProcessGroup, family: str, tp: int) -> None:
    changes = WINDOWS.get(family, {})
    whole = (make(family, **changes) if family in MADE else make_model(family, use_cache=True, **changes)).eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, tp)).eval()
    tokens, mask = make_tokens(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    mask[1, :5] = 0
    with blocks_of(3):
        for how in ({}, {"attention_mask": mask}, {"num_beams": 2, "attention_mask": mask}):
            expected, actual = generated(whole, tokens, **how), generated(parallel, tokens, **how)
            assert torch.equal(actual.sequences, expected.sequences), how
            first = held(actual.past_key_values)[0]
            assert 0 < first[0] < PROMPT + 6, first
        # Continue from the generated text and its cache.
        told = [generated(model, tokens) for model in (whole, parallel)]
        more = torch.cat([told[0].sequences, make_tokens(3, 4)], 1)
        further = [
            # transformers would take tokens with the number of the padding for padding.
            generated(model, more, past_key_values=before.past_key_values, attention_mask=torch.ones_like(more))
            for model, before in zip((whole, parallel), told, strict=True)
        ]
        assert torch.equal(further[1].sequences, further[0].sequences)


@on_ranks(2)
def test_a_cache_of_what_keys_are_made_of(group: dist.ProcessGroup) -> None:
    """Latent attention caches latents and attends to keys and values made of them: such a cache is not sharded."""
    whole = make("deepseek_v3").eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1)).eval()
    assert torch.equal(generated(parallel, make_tokens(3, 9)).sequences, generated(whole, make_tokens(3, 9)).sequences)


@on_ranks(2)
def test_reading_keys_of_a_sharded_cache_is_refused(group: dist.ProcessGroup) -> None:
    parallel = parallelize(make("llama"), mesh_of(group, 2, 1)).eval()
    cache = generated(parallel, make_tokens(3, 9), use_cache=True).past_key_values
    refuses(AttributeError, "keys of this cache are sharded", getattr, cache.layers[0], "keys")
    refuses(AttributeError, "keys of this cache are sharded", list, cache)


@on_ranks(2)
def test_keys_that_are_not_in_the_cache_are_refused(group: dist.ProcessGroup) -> None:
    """JetMoE repeats keys behind the cache."""
    with mock.patch.dict(FAMILIES, jetmoe=Family()):
        parallel = parallelize(make_model("jetmoe"), mesh_of(group, 2, 1)).eval()
        refuses(ValueError, "passes keys .* to attention", generated, parallel, make_tokens(2, 9), use_cache=True)


@on_ranks(2)
def test_sampled_tokens(group: dist.ProcessGroup) -> None:
    whole = make("llama").eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1)).eval()
    how: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "min_new_tokens": 7}
    with blocks_of(3):
        texts = []
        for model in (whole, parallel):
            torch.manual_seed(5)
            texts.append(generated(model, make_tokens(3, PROMPT), **how).sequences)
        assert torch.equal(texts[0], texts[1])
        torch.manual_seed(group.rank())
        with pytest.raises(
            fused_tp.RankMismatchError, match=r"different tokens.*torch\.manual_seed\(seed\) with the same seed"
        ):
            generated(parallel, make_tokens(3, PROMPT), **how)


@on_ranks(2)
def test_forward_passes_with_a_cache(group: dist.ProcessGroup) -> None:
    whole = make("mistral", sliding_window=4).eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1)).eval()
    tokens = make_tokens(2, 14)
    with blocks_of(2), torch.no_grad():
        caches: list[Any] = [None, None]
        for chunk in tokens.split([8, 1, 5], 1):
            outputs = [
                model(chunk, past_key_values=cache, use_cache=True)
                for model, cache in zip((whole, parallel), caches, strict=True)
            ]
            assert_near(outputs[1].logits, outputs[0].logits, "logits")
            caches = [output.past_key_values for output in outputs]
        cache = caches[1]
        assert held(cache)[0] == [[8, 6][group.rank()]] * 2 and cache.get_seq_length() == 14
        cache.crop(-3)
        again = parallel(tokens[:, 11:], past_key_values=cache).logits
        assert_near(again, whole(tokens).logits[:, 11:], "logits")
        hidden = torch.ones(2, 15, dtype=torch.long)
        hidden[0, :2] = 0
        given: dict[str, Any] = {"past_key_values": cache}
        new = tokens[:, :1]
        refuses(ValueError, "pass the same mask as in earlier", parallel, new, attention_mask=hidden, **given)
        refuses(ValueError, "with padding only on the left", parallel, new, attention_mask=hidden[:, :9], **given)
        refuses(ValueError, "passed to another module", parallel.model, new, **given)
        said = "output_attentions=True is not supported with a cache that is sharded over context"
        refuses(ValueError, said, parallel, new, output_attentions=True, **given)
        refuses(ValueError, r"does not support training\. Call model\.eval\(\)", parallel.train(), new, **given)
        parallel.eval()
        # A cache that cannot be sharded is whole on every rank.
        padded = torch.ones(2, 6, dtype=torch.long)
        padded[0, 4:] = 0
        outputs = [model(tokens[:, :6], attention_mask=padded, use_cache=True) for model in (whole, parallel)]
        assert_near(outputs[1].logits, outputs[0].logits, "logits")
        assert outputs[1].past_key_values.layers[0].keys.shape[2] in (3, 6)
    recorded = parallel(tokens, use_cache=True)
    assert recorded.past_key_values.layers[0].keys.requires_grad


@on_ranks(2)
def test_a_cache_that_forgets_what_masks_show_is_refused(group: dist.ProcessGroup) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicSlidingWindowLayer

    model = parallelize(make("llama").eval(), mesh_of(group, 2, 1))
    forgets: Any = DynamicCache()
    forgets.layers = [DynamicSlidingWindowLayer(sliding_window=4) for _ in range(model.config.num_hidden_layers)]
    said = "would hold the last 4 of 9 tokens"
    with torch.no_grad():
        refuses(ValueError, said, model, make_tokens(1, PROMPT), past_key_values=forgets)
