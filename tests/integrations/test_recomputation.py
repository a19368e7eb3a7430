"""Layers find the forward pass that they run for: a checkpointed one, a nested one, or none of the model's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_tp.parallelizing.forward_shard import running_forward
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    LAYOUTS,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    copy_of,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
    pair,
)
from tests.workers import on_ranks

FULL = pytest.mark.full
TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
SMALLER = ("tp2_sp", "cp2")


def recompute_layers(model: Any, use_reentrant: bool, *, nested: bool = False) -> None:
    """Checkpoint every layer, as a user's own model would by calling torch.utils.checkpoint; `nested`: its MLP, too."""
    for layer in model.model.layers:
        if nested:
            layer.mlp.forward = partial(_checkpointed, layer.mlp.forward, use_reentrant)
        layer.forward = partial(_checkpointed, layer.forward, use_reentrant)


def _checkpointed(forward: Callable[..., Any], use_reentrant: bool, *args: Any, **keywords: Any) -> Any:
    return checkpoint(partial(forward, **keywords), *args, use_reentrant=use_reentrant)


@on_layouts("cp2_tp2_sp", full=SMALLER)
@pytest.mark.parametrize(
    "how",
    [
        "nested_reentrant",
        "nested_not_reentrant",
        *(pytest.param(how, marks=FULL) for how in ("reentrant", "not_reentrant")),
    ],
)
def test_forwards_of_different_lengths_before_one_backward(group: dist.ProcessGroup, layout: str, how: str) -> None:
    whole, parallel = pair(group, layout)
    recompute_layers(parallel, not how.endswith("not_reentrant"), nested=how.startswith("nested"))
    for model in (whole, parallel):
        # Of 9 and of 10 tokens rank 0 holds equally many. One token is not sharded over the CP ranks.
        losses = [model(tokens, labels=tokens).loss for tokens in (make_tokens(2, seq) for seq in (9, 10, 13))]
        losses.append(model(make_tokens(2, 1)).logits.square().mean())
        with torch.no_grad():
            model(make_tokens(1, 6))
        sum(losses).backward()
        losses[0] = model(make_tokens(2, 9), labels=make_tokens(2, 9)).loss  # one more step
        losses[0].backward()
    assert_same_gradients(parallel, whole)


@on_layouts("cp2_tp2_sp", full=SMALLER)
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_backward_in_another_thread(group: dist.ProcessGroup, layout: str, use_reentrant: bool) -> None:
    whole, parallel = pair(group, layout)
    recompute_layers(parallel, use_reentrant)
    with ThreadPoolExecutor(1) as backward:
        # Each thread numbers its autograd nodes: in the first step one thread is ahead, later perhaps the other one.
        # The last forward passes run in a third thread, which starts from 0.
        for forward in (_two_losses, _two_losses, _in_new_thread):
            for model in (whole, parallel):
                model.zero_grad()
                backward.submit(forward(model).backward).result()
            assert_same_gradients(parallel, whole)


def _two_losses(model: Any) -> Tensor:
    return sum(model(tokens, labels=tokens).loss for tokens in (make_tokens(2, 9), make_tokens(2, 10)))


def _in_new_thread(model: Any) -> Tensor:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_two_losses, model).result()


@on_layouts("cp2_tp2_sp", full=SMALLER)
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_whole_model_checkpointed_by_its_caller(group: dist.ProcessGroup, layout: str, use_reentrant: bool) -> None:
    whole, parallel = pair(group, layout)
    recompute_layers(parallel, False)
    anchor = torch.ones((), requires_grad=True)  # reentrant checkpoints need an input that requires grad

    def loss_of(model: Any, tokens: Tensor, anchor: Tensor) -> Tensor:
        return model(tokens, labels=tokens).loss * anchor

    def losses(model: Any) -> Tensor:
        both = [make_tokens(2, seq) for seq in (9, 12)]
        return sum(checkpoint(loss_of, model, tokens, anchor, use_reentrant=use_reentrant) for tokens in both)

    assert_trains_alike(parallel, whole, losses)


@on_layouts("cp2_tp2_sp", full=SMALLER)
@TRANSFORMERS
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_transformers_checkpointing(group: dist.ProcessGroup, layout: str, use_reentrant: bool) -> None:
    whole, parallel = pair(group, layout, "llama")
    parallel.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        parallel.enable_input_require_grads()
    assert_trains_alike(
        parallel,
        whole,
        lambda model: sum(model(tokens, labels=tokens).loss for tokens in (make_tokens(2, seq) for seq in (9, 10, 14))),
    )


@on_layouts("tp2_sp", "cp2", full=["cp2_tp2_sp"])
@pytest.mark.parametrize("family", ["plain", pytest.param("llama", marks=TRANSFORMERS)])
def test_modules_inside_called_by_themselves(group: dist.ProcessGroup, layout: str, family: str) -> None:
    whole, parallel = pair(group, layout, family)
    tokens = make_tokens(2, 9)
    with torch.no_grad():
        for _ in range(2):  # before any forward pass of the model, and after one
            expected, hidden = whole.model(tokens), parallel.model(tokens)
            if family == "llama":
                expected, hidden = expected.last_hidden_state, hidden.last_hidden_state
            assert_near(hidden, expected, "hidden states")
            assert_near(parallel.lm_head(hidden), whole.lm_head(expected), "logits")
            assert_near(parallel(tokens).logits, whole(tokens).logits, "logits")
    if layout != "tp2_sp":
        with pytest.raises(ValueError, match="Call that model"):
            parallel.model(tokens)
    else:
        for model in (whole, parallel):
            hidden = model.model(tokens)
            model.lm_head(hidden if family == "plain" else hidden.last_hidden_state).square().mean().backward()
        assert_same_gradients(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_loss_inside_of_a_checkpoint_is_refused(group: dist.ProcessGroup, use_reentrant: bool) -> None:
    parallel = parallelize(make("plain"), mesh_of(group, 2, 1))
    parallel.loss_function = partial(_checkpointed, parallel.loss_function, use_reentrant)
    tokens = make_tokens(2, 9)
    loss = parallel(tokens, labels=tokens).loss
    with pytest.raises(ValueError, match="outside of the checkpoint"):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_checkpointed_modules_inside_called_by_themselves(group: dist.ProcessGroup, use_reentrant: bool) -> None:
    whole, parallel = pair(group, "tp2_sp")
    recompute_layers(parallel, use_reentrant)
    tokens = make_tokens(2, 9)
    for model in (whole, parallel):
        hidden = model.model(tokens)
        with torch.no_grad():
            model(make_tokens(2, 6))  # a sharded pass, before the next call of a module
        losses = [model.lm_head(hidden).square().mean(), model.lm_head(model.model(tokens)).square().mean()]
        sum(losses).backward()
    assert_same_gradients(parallel, whole)


@on_layouts("tp2_lossparallel", "tp2_sp_lossparallel")
def test_a_head_gathers_when_it_is_called_by_itself(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout)
    tokens, hidden = make_tokens(2, 9), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        parallel(tokens, labels=tokens).loss.backward()  # the logits stay sharded
        whole(tokens, labels=tokens).loss.backward()
        assert_near(parallel.lm_head(hidden), whole.lm_head(hidden), "logits")
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_an_interrupted_forward_is_forgotten_by_the_next_one(group: dist.ProcessGroup) -> None:
    parallel, tokens = parallelize(make("plain"), mesh_of(group, 2, 1)), make_tokens(2, 9)
    handle = parallel.model.norm.register_forward_hook(_interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            parallel(tokens)
    handle.remove()
    parallel(tokens)
    assert running_forward() is None


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Distilled(nn.Module):
    """A model whose forward runs another model, on another length."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student = student
        self.teacher = [teacher]  # not a submodule

    def forward(self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Any:
        hidden = self.student.model(tokens, positions)
        with torch.no_grad():
            wanted = self.teacher[0](make_tokens(2, 6)).logits.mean()
        logits = self.student.lm_head(hidden) + wanted
        return self.loss_function(logits, labels, 67) if labels is not None else logits

    def loss_function(self, logits: Tensor, labels: Tensor | None, vocab_size: int) -> Tensor:
        return self.student.loss_function(logits, labels, vocab_size)


PLAN = {f"student.{name}": style for name, style in make("plain").tp_plan.items()}


@on_layouts("cp2_tp2_sp", full=SMALLER)
def test_a_parallel_model_inside_of_another(group: dist.ProcessGroup, layout: str) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    mesh, tokens = mesh_of(group, cp, tp), make_tokens(2, 13)
    whole = Distilled(make("plain"), make("plain"))
    outer = Distilled(copy_of(whole.student), parallelize(make("plain"), mesh, **keywords))
    parallelize(outer, mesh, plan=PLAN, **keywords)
    assert_trains_alike(outer, whole, lambda model: model(tokens, labels=tokens))
    with pytest.raises(ValueError, match="tokens"):  # a refused call leaves the enclosing call unchanged
        outer.teacher[0](torch.zeros(3))
    assert_near(outer(tokens), whole(tokens), "logits")


@on_ranks(2)
def test_checkpointing_that_was_turned_on_before(group: dist.ProcessGroup) -> None:
    """Hooks of checkpointing on embeddings move to the embeddings that replace them."""
    tokens = make_tokens(2, 12)
    for keywords in ({}, {"sequence_parallel": True}):
        whole = make("llama").train()
        parallel = copy_of(whole)
        parallel.gradient_checkpointing_enable()
        parallelize(parallel, mesh_of(group, 1, 2), **keywords)
        for model in (whole, parallel):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert_same_gradients(parallel, whole)
        parallel.zero_grad()
        for parameter in parallel.parameters():
            parameter.requires_grad_(False)
        assert parallel(input_ids=tokens, use_cache=False).logits.requires_grad  # by the hook alone
