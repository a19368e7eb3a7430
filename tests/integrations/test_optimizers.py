"""Optimizer steps and gradient scalers of sharded models: equal on all ranks, or refused with the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fused_tp
from fused_tp.nn import clip_grad_norm_
from fused_tp.training.run import make_optimizer
from fused_tp.training.settings import OptimizerSettings
from tests.integrations.models import copy_of, full, make, make_tokens, mesh_of
from tests.integrations.sweep import make_model
from tests.integrations.test_sharding_check import log_lines
from tests.workers import error_of, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


class LayerwiseSGD(torch.optim.Optimizer):
    """SGD with a learning rate per tensor that depends on its norm, as in LARS."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], Any] = list) -> None:
    tokens = make_tokens(2, 12)
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    between()
    optimizer.step()


def part(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def assert_refused(fn: Callable[..., Any], *args: Any, says: str) -> None:
    error = error_of(fn, *args)
    assert type(error) is ValueError and says in str(error), error


@on_ranks(2)
def test_what_takes_a_part_for_the_whole_is_refused(group: dist.ProcessGroup) -> None:
    whole = make("llama", vocab_size=68)  # shards of equal length, as DistributedDataParallel requires

    def plain() -> Any:
        return fused_tp.parallelize(copy_of(whole), mesh_of(group, 1, 2), parameters="plain")

    model = plain()
    wrapped = DistributedDataParallel(model, process_group=group)
    assert_refused(step, wrapped, adamw(model), says="process_group=mesh['dp'].get_group()")
    model = plain()
    for p in model.parameters():
        dist.broadcast(p.data, dist.get_global_rank(group, 0), group=group)
    assert_refused(step, model, adamw(model), says="hold the same values")
    model = plain()
    assert_refused(
        lambda: step(model, adamw(model), lambda: [dist.all_reduce(p.grad, group=group) for p in model.parameters()]),
        says="equal gradients of different weight shards",
    )
    model = plain()
    assert_refused(
        lambda: step(model, adamw(model), lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)),
        says="fused_tp.nn.clip_grad_norm_",
    )
    model = plain()
    step(model, adamw(model), lambda: clip_grad_norm_(model, 1e-3))


@on_ranks(2)
def test_updates_that_are_not_elementwise(group: dist.ProcessGroup) -> None:
    mesh, whole = mesh_of(group, 1, 2), make("llama")
    for kind in (torch.optim.Adafactor, LayerwiseSGD):
        model = fused_tp.parallelize(copy_of(whole), mesh, parameters="plain")
        assert_refused(step, model, kind(model.parameters(), lr=1e-2), says="Use an elementwise optimizer")
    model = fused_tp.parallelize(copy_of(whole), mesh)
    assert_refused(step, model, torch.optim.Adafactor(model.parameters()), says="AdamW, Adam")
    step(model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.0))
    step(model, adamw(model))


@on_ranks(2)
def test_optimizers_made_before(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    for parameters in ("dtensor", "plain"):
        model = make("llama")
        optimizer = adamw(model)
        fused_tp.parallelize(model, mesh, parameters=parameters)
        assert_refused(step, model, optimizer, says="after parallelize")
    scaler, tokens = torch.amp.GradScaler("cpu"), make_tokens(2, 12)
    scaler.scale(model(input_ids=tokens, labels=tokens).loss).backward()
    assert_refused(scaler.step, optimizer, says="after parallelize")
    model = make("llama")
    optimizer = adamw(model)
    step(fused_tp.parallelize(model, mesh_of(group, 2, 1)), optimizer)  # it keeps the parameters


@on_ranks(2)
def test_states_of_unsharded_optimizers(group: dist.ProcessGroup) -> None:
    whole = make("llama").double()
    trained = adamw(whole)
    step(whole, trained)
    for parameters in ("dtensor", "plain"):
        model = fused_tp.parallelize(copy_of(whole), mesh_of(group, 1, 2), parameters=parameters)
        optimizer = adamw(model)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        assert_refused(step, model, optimizer, says="is a full tensor of shape")
    model = fused_tp.parallelize(copy_of(whole), mesh_of(group, 1, 2))
    optimizer = adamw(model)
    state = copy.deepcopy(get_optimizer_state_dict(whole, trained))
    with log_lines() as lines:
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    assert lines == []
    for one, other in ((whole, trained), (model, optimizer)):
        step(one, other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), whole.get_parameter(name))


@on_ranks(2)
def test_parameters_with_another_dim_are_named(group: dist.ProcessGroup) -> None:
    with log_lines() as lines:
        model = fused_tp.parallelize(make_model("phi3"), mesh_of(group, 1, 2))
    (weight,) = {p.shape for name, p in model.named_parameters() if name.endswith("layers.0.mlp.gate_up_proj.weight")}
    assert weight.numel() and len(weight) == 3
    decayed, undecayed = (group["params"] for group in make_optimizer(model, OptimizerSettings()).param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in undecayed} == {name for name in names.values() if "norm" in name} and decayed
    named = [line for line in lines if "have one more dim than in the unsharded Phi3ForCausalLM, such as" in line]
    assert len(named) == (group.rank() == 0), lines


@on_ranks(2)
def test_assigned_data_of_dtensors(group: dist.ProcessGroup) -> None:
    model, tokens = fused_tp.parallelize(make("llama"), mesh_of(group, 1, 2)), make_tokens(1, 8)
    model(input_ids=tokens)
    model.to(torch.float64)(input_ids=tokens)
    for weight in (model.model.norm.weight, model.model.layers[0].mlp.down_proj.weight):
        expected = weight.full_tensor() * 2
        weight.data = weight.data * 2
        assert torch.equal(weight.full_tensor(), expected)
        weight.grad = weight.detach() * 1
        weight.grad.data = weight.grad.data.clamp(-0.1, 0.1)
        assert torch.equal(weight.grad.full_tensor(), expected.clamp(-0.1, 0.1))
        weight.data = weight.data.float()
        assert weight.dtype == weight.to_local().dtype == torch.float32
        assert_refused(setattr, weight, "data", torch.zeros(1, 3), says="a tensor of shape (1, 3) was assigned")


def skips_alike(group: dist.ProcessGroup, model: Any, optimizer: torch.optim.Optimizer, poisoned: Tensor) -> bool:
    """True if all ranks skip a step because of one rank's gradient, and lower their scales."""
    tokens, scaler = make_tokens(2, 12), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [part(p).detach().clone() for p in model.parameters()]
    scaler.scale(model(input_ids=tokens, labels=tokens).loss).backward()
    if dist.get_rank(group) == 1:
        assert poisoned.grad is not None
        part(poisoned.grad).fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(one, part(p)) for one, p in zip(before, model.parameters(), strict=True))
    return same and scaler.get_scale() == 2.0


@on_ranks(2)
def test_gradient_scalers_agree(group: dist.ProcessGroup) -> None:
    tp, cp = mesh_of(group, 1, 2), mesh_of(group, 2, 1)
    model = fused_tp.parallelize(make("llama"), tp, parameters="plain")
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    assert skips_alike(group, model, fused, model.model.layers[1].mlp.down_proj.weight)
    model = fused_tp.parallelize(make("llama"), tp)
    whole_first = sorted(model.parameters(), key=lambda p: p.placements[0].is_shard())
    optimizer = torch.optim.SGD(whole_first, lr=0.1)
    assert skips_alike(group, model, optimizer, model.model.layers[1].mlp.down_proj.weight)
    model = fused_tp.parallelize(make("qwen3_moe"), cp, ep_dim="cp")
    assert skips_alike(group, model, adamw(model), model.model.layers[1].mlp.experts.down_proj)


@on_ranks(2)
def test_a_rank_that_skips_steps(group: dist.ProcessGroup) -> None:
    for parameters in ("dtensor", "plain"):
        model = fused_tp.parallelize(make("llama"), mesh_of(group, 1, 2), parameters=parameters)
        optimizer, tokens = adamw(model), make_tokens(2, 12)

        def steps(model: Any = model, optimizer: Any = optimizer, tokens: Tensor = tokens) -> None:
            for number in range(3):
                model(input_ids=tokens, labels=tokens).loss.backward()
                if number != 1 or dist.get_rank(group) == 0:
                    optimizer.step()

        error = error_of(steps)
        assert isinstance(error, fused_tp.RankMismatchError) and "GradScaler" in str(error), error


@on_ranks(4)
def test_clipping_over_several_meshes(group: dist.ProcessGroup) -> None:
    whole, tokens = make("qwen3_moe"), make_tokens(2, 12)
    model = fused_tp.parallelize(copy_of(whole), mesh_of(group, 2, 2), ep_dim="cp")
    for one in (whole, model):
        one(input_ids=tokens, labels=tokens).loss.backward()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model, 0.1).float(), wanted)
    torch.testing.assert_close(float(clip_grad_norm_(model, 1.0)), 0.1, rtol=1e-4, atol=0)


@on_ranks(4)
def test_pipelines_clip_and_skip_alike(group: dist.ProcessGroup) -> None:
    mesh, tokens = fused_tp.make_mesh("cpu", pp=2, cp=2), make_tokens(2, 12)
    pipe = fused_tp.pipeline(make("qwen3_moe"), mesh, microbatches=2, ep_dim="cp")
    optimizer, scaler = adamw(pipe), torch.amp.GradScaler("cpu", init_scale=1.0)  # type: ignore[arg-type]
    assert len(make_optimizer(pipe, OptimizerSettings()).param_groups) == 2
    scaler.scale(torch.zeros(1))
    pipe.step({"input_ids": tokens, "labels": tokens})
    pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(float(pipe.clip_grad_norm_(1.0)), 0.1, rtol=1e-4, atol=0)
    before = [part(p).detach().clone() for p in pipe.parameters()]
    if dist.get_rank(group) == 3:
        part(next(p for p in pipe.parameters() if p.grad is not None).grad).fill_(float("nan"))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(one, part(p)) for one, p in zip(before, pipe.parameters(), strict=True))
    assert scaler.get_scale() == 0.5
