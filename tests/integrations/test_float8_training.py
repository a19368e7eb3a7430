"""Models of torchao's Float8Linear layers under `parallelize`, against torchao on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, gather_state_dict
from fused_tp.nn.float8 import is_float8_linear
from fused_tp.parallelizing.parallelize import parallelize
from tests.distributed.layers import part
from tests.integrations.models import assert_equal_states, copy_of, make, make_tokens, mesh_of
from tests.reference import refuses, seeded
from tests.workers import device_mesh, on_ranks

pytest.importorskip("torchao.float8", reason="torchao is not installed; pip install torchao")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def converted(model: Any, recipe: str = "tensorwise", head: bool = False) -> Any:
    """The model with torchao's linear layers, without the output layer unless `head`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: head or "lm_head" not in name
    )


def full_gradient(parameter: Any) -> Tensor:
    grad: Tensor = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return grad


def distance(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, 3, 4)
def test_layers_round_as_little_as_torchao(group: dist.ProcessGroup, recipe: str) -> None:
    """Errors are at most a tenth above those of torchao on one process: shards have scales of their own.

    A column-parallel layer with row scales has the very rows and scales of the whole, so its outputs are torchao's.
    """
    torch.manual_seed(0)
    mesh, x = device_mesh(group), seeded(2, 24, 96, seed=1) * torch.linspace(0.1, 4.0, 24).view(-1, 1)
    for sp in (False, True):
        for layer_class, x_cut, y_cut in (
            (ColumnParallelLinear, -2 if sp else None, -1),
            (RowParallelLinear, -1, -2 if sp else None),
        ):
            linear = nn.Linear(96, 48)
            exact = copy.deepcopy(linear)
            whole = converted(copy.deepcopy(linear), recipe)
            layer = layer_class.from_linear(whole, mesh=mesh, sequence_parallel=sp)
            assert layer.float8 == recipe
            d_output = seeded(2, 24, 48, seed=2) * torch.linspace(0.1, 4.0, 48)
            found: list[list[Tensor]] = []
            for model, cut in ((exact, False), (whole, False), (layer, True)):
                leaf = part(x, x_cut if cut else None, group).detach().clone().requires_grad_()
                y = model(leaf)
                y.backward(part(d_output, y_cut if cut else None, group).contiguous())
                dims = (y_cut, x_cut, None, None)
                results = [y.detach(), leaf.grad, full_gradient(model.weight), full_gradient(model.bias)]
                found.append([t if cut else part(t, dim, group) for t, dim in zip(results, dims, strict=True)])
            for name, true, theirs, ours in zip(("y", "dx", "dw", "db"), *found, strict=True):
                assert distance(ours, true) <= 1.1 * distance(theirs, true) + 1e-6, name
            if recipe != "tensorwise" and layer_class is ColumnParallelLinear:
                torch.testing.assert_close(found[2][0], found[1][0], rtol=0.01, atol=0.01)  # torchao rounds y to bf16


def losses_of(model: Any, tokens: Tensor, steps: int) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recipe", "keywords"),
    [
        ("tensorwise", {"sequence_parallel": True}),
        ("rowwise", {"sequence_parallel": True, "loss_parallel": True}),
        ("rowwise_with_gw_hp", {}),
    ],
)
@on_ranks(2, 4)
def test_a_small_llama_trains_like_in_bf16(group: dist.ProcessGroup, recipe: str, keywords: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    whole = make("llama", num_key_value_heads=4).bfloat16()
    tokens = make_tokens(2, 17)
    parallel = parallelize(converted(copy_of(whole), recipe), mesh_of(group, 1, dist.get_world_size(group)), **keywords)
    attention = parallel.model.layers[0].self_attn
    assert [p.float8 for p in (attention.q_proj, attention.o_proj, parallel.lm_head)] == [recipe, recipe, None]
    assert_equal_states(gather_state_dict(parallel), whole.state_dict())
    ours, theirs = (losses_of(model, tokens, 20) for model in (parallel, whole))
    assert theirs[-1] < 0.6 * theirs[0], theirs
    for step, (loss, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(loss - expected) < 0.05 * theirs[0], (step, loss, expected)


@on_ranks(2)
def test_output_layers_in_float8(group: dist.ProcessGroup) -> None:
    """Their logits are computed, because `linear_cross_entropy` would not quantize them."""
    pytest.importorskip("transformers")
    parallel = parallelize(converted(make("llama"), head=True), mesh_of(group, 1, 2), loss_parallel=True)
    assert parallel.lm_head.float8 == "tensorwise" and parallel.lm_head.defer_output is None
    tokens = make_tokens(2, 9)
    parallel(input_ids=tokens, labels=tokens).loss.backward()
    assert parallel.lm_head.weight.grad is not None


@on_ranks(2)
def test_other_configs_are_refused_before_anything_changes(group: dist.ProcessGroup) -> None:
    pytest.importorskip("transformers")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for options, says in (
        ({"emulate": True}, "'lm_head' cannot be sharded: .* differs from torchao's recipe 'tensorwise' in emulate"),
        (
            {"round_scales_to_power_of_2": True},
            "in round_scales_to_power_of_2. The recipes tensorwise, rowwise",
        ),
        ({"enable_fsdp_float8_all_gather": True}, "enable_fsdp_float8_all_gather=False"),
    ):
        model = make("llama")
        model = convert_to_float8_training(model, config=Float8LinearConfig(**options))
        modules = [type(module) for module in model.modules()]
        refuses(ValueError, says, parallelize, model, mesh_of(group, 1, 2))
        assert [type(module) for module in model.modules()] == modules
    padded = convert_to_float8_training(nn.Linear(8, 8), config=Float8LinearConfig(pad_inner_dim=True))
    assert ColumnParallelLinear.from_linear(padded, mesh=device_mesh(group)).float8 == "tensorwise"


@on_ranks(2)
def test_layers_that_are_not_sharded_stay_those_of_torchao(group: dist.ProcessGroup) -> None:
    pytest.importorskip("transformers")
    whole, tokens = converted(make("llama"), "rowwise"), make_tokens(2, 9)
    plan = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    mlp_only = parallelize(copy_of(whole), mesh_of(group, 1, 2), plan=plan)
    over_tokens = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    for parallel in (mlp_only, over_tokens):
        assert is_float8_linear(parallel.model.layers[0].self_attn.q_proj)
        ours, theirs = (losses_of(model, tokens, 3) for model in (parallel, copy_of(whole)))
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.0)
