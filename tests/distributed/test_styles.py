"""The fused ParallelStyles against torch's own: same parameters, outputs and gradients, on a small transformer."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from fused_tp.integrations.dtensor import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel
from tests.reference import refuses, seeded
from tests.workers import device_mesh, on_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 24) for _ in range(3))
        self.out = nn.Linear(24, 8)
        self.mlp_norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(-2))
        return x + self.down(self.up(self.mlp_norm(x)).relu())


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) or parameter.grad is not None, name
        grad = parameter.grad
        assert grad is not None, name
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grads


@on_ranks(2, 3)
def test_every_layout(group: dist.ProcessGroup) -> None:
    """One linear layer or embedding under all pairs of layouts, against torch's style of the same name."""
    mesh = device_mesh(group)
    layouts = [None, Replicate(), Shard(0), Shard(1), Shard(-1)]
    for fused, original in ((FusedColwiseParallel, ColwiseParallel), (FusedRowwiseParallel, RowwiseParallel)):
        for kind in (nn.Linear, nn.Embedding):
            torch.manual_seed(0)
            module = kind(12, 7, **({"padding_idx": 3} if kind is nn.Embedding else {}), dtype=torch.float64)
            for number, (given, wanted) in enumerate(itertools.product(layouts, layouts)):
                options = {"input_layouts": given, "output_layouts": wanted, "use_local_output": number % 2 == 0}
                one_layout(group, mesh, module, fused, original, options)


def one_layout(group: Any, mesh: Any, module: nn.Module, fused: Any, original: Any, options: dict[str, Any]) -> None:
    shape = (2 * group.size(), 4 * group.size(), 12)
    results = []
    for style in (original, fused):
        model = parallelize_module(copy.deepcopy(module), mesh, style(**options))
        layout = style(**options).input_layouts[0]
        if isinstance(module, nn.Embedding):
            x = torch.randint(12, shape[:2], generator=torch.Generator().manual_seed(1))
        else:
            x = seeded(*shape, dtype=torch.float64)
        local = distribute_tensor(x, mesh, [layout], src_data_rank=None).to_local()
        if local.is_floating_point():
            local = local.clone().requires_grad_()
        y = model(local)
        assert isinstance(y, DTensor) != options["use_local_output"]
        placements = y.placements if isinstance(y, DTensor) else None
        y = y.to_local() if isinstance(y, DTensor) else y
        y.backward(torch.sin(y.detach()))
        assert isinstance(model, type(module))
        placements = [placements, [p.placements for p in model.parameters()]]
        results.append((placements, y, local.grad, full_grads(model)))
    (their_place, their_y, their_dx, their_grads), (place, y, dx, grads) = results
    assert place == their_place, options
    torch.testing.assert_close(y, their_y, msg=lambda m: f"{options}: {m}", **EXACT)
    if dx is not None:
        torch.testing.assert_close(dx, their_dx, msg=lambda m: f"{options}: {m}", **EXACT)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, their_grads[name], msg=lambda m, at=(name, options): f"{at}: {m}", **EXACT)


@on_ranks(1, 2, 3, 4)
def test_dtensors_in_and_out(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    full = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.RMSNorm(6)).double()
    model = parallelize_module(
        copy.deepcopy(full),
        mesh,
        {
            "0": FusedSequenceParallel(),
            "1": FusedColwiseParallel(use_local_output=False),
            "3": FusedRowwiseParallel(output_layouts=Shard(1)),
            "4": FusedSequenceParallel(),
        },
    )
    assert all(p.placements == (Replicate(),) for p in (*model[0].parameters(), *model[4].parameters()))
    # 4 tokens per rank; torch's own modules in between take DTensors
    x_full = seeded(2, 4 * group.size(), 6, dtype=torch.float64).requires_grad_()
    x = distribute_tensor(x_full.detach(), mesh, [Replicate()]).requires_grad_()
    y_full, y = full(x_full), model(x)
    assert isinstance(y, DTensor) and y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), y_full, **EXACT)
    y_full.square().sum().backward()
    y.square().sum().backward()
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(x.grad.full_tensor(), x_full.grad, **EXACT)
    norm = model[4].weight.grad
    assert isinstance(norm, DTensor) and norm.placements == (Replicate(),)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, full.get_parameter(name).grad, **EXACT)
    x_full = seeded(2, 4 * group.size() + 1, 6, dtype=torch.float64)  # not divisible by the ranks
    y = model[0](distribute_tensor(x_full, mesh, [Shard(1)]))
    torch.testing.assert_close(y.full_tensor(), full[0](x_full), **EXACT)


@on_ranks(2)
def test_a_plan_with_both_kinds(group: dist.ProcessGroup) -> None:
    """One plan with fused and torch's styles, after torch's PrepareModuleInput."""
    mesh = device_mesh(group)
    full = Block().double()
    model = parallelize_module(
        copy.deepcopy(full),
        mesh,
        {
            "q": FusedColwiseParallel(),
            "k": ColwiseParallel(),
            "v": FusedColwiseParallel(),
            "out": FusedRowwiseParallel(),
            "up": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
            ),
            "down": RowwiseParallel(input_layouts=Replicate()),
        },
    )
    x = seeded(2, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), full(x), **EXACT)


@on_ranks(2, 3)
def test_what_is_sent(group: dist.ProcessGroup) -> None:
    """Compare the collectives of forward and backward with those of torch's own styles in the same plan."""
    mesh = device_mesh(group)
    tokens = 2 * group.size()
    gathers = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    gathers_features = {"input_layouts": Shard(-1)}
    by_features = {"input_layouts": Replicate(), "output_layouts": Shard(-1)}
    x = seeded(2, tokens, 12, dtype=torch.float64)
    ids = torch.arange(tokens).expand(2, -1)
    sent = []
    for column, row in ((ColwiseParallel, RowwiseParallel), (FusedColwiseParallel, FusedRowwiseParallel)):
        torch.manual_seed(0)
        plan = {"": gathers, **dict.fromkeys(("q", "k", "v"), column()), "out": row(output_layouts=Shard(1))}
        attention = parallelize_module(_Projections().double(), mesh, plan)
        up = parallelize_module(nn.Linear(12, 8).double(), mesh, column(**gathers_features))
        table = parallelize_module(nn.Embedding(12, 12).double(), mesh, row(**by_features))
        results: list[Any] = []
        for model, given, cut in ((attention, x, Shard(1)), (up, x, Shard(2)), (table, ids, Replicate())):
            local = distribute_tensor(given, mesh, [cut], src_data_rank=None).to_local().clone()
            local.requires_grad_(local.is_floating_point())
            with CommDebugMode() as counted:
                y = model(local)
                y.square().sum().backward()
            results += [dict(counted.get_comm_counts()), y, local.grad, *full_grads(model).values()]
        sent.append(results)
    for theirs, ours in zip(*sent, strict=True):
        if isinstance(theirs, dict):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs, **EXACT)


class _Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x) + self.v(x))
        return y


@on_ranks(2)
def test_whose_weights(group: dist.ProcessGroup) -> None:
    """Weights come from rank 0, or with src_data_rank=None from each rank's own copy, like with torch's styles."""
    mesh = device_mesh(group)
    for source in (0, None):
        torch.manual_seed(group.rank())
        linear = nn.Linear(4, 6)
        mine = linear.weight.detach().clone()
        linear.bias.requires_grad_(False)
        parallelize_module(linear, mesh, FusedColwiseParallel(), src_data_rank=source)
        torch.manual_seed(0)
        wanted = nn.Linear(4, 6).weight if source == 0 else mine
        assert isinstance(linear.weight, DTensor)
        assert torch.equal(linear.weight.to_local(), wanted.chunk(group.size())[group.rank()])
        assert not linear.bias.requires_grad


@on_ranks(2)
def test_bad_inputs_are_refused(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for style in (FusedColwiseParallel, FusedRowwiseParallel):
        refuses(TypeError, "input_layouts must be a Placement", style, input_layouts="replicate")
        refuses(ValueError, "Partial\\(\\) is not supported", style, output_layouts=Partial())
        said = r"nn\.Linear and nn\.Embedding, got LayerNorm"
        refuses(TypeError, said, parallelize_module, nn.LayerNorm(4), mesh, style())
        refuses(ValueError, "with a custom forward", parallelize_module, _Doubled(4, 4), mesh, style())
        refuses(ValueError, "max_norm", parallelize_module, nn.Embedding(4, 4, max_norm=1.0), mesh, style())
        linear = parallelize_module(nn.Linear(4, 4), mesh, style())
        refuses(ValueError, "DTensor already", parallelize_module, linear, mesh, style())
        refuses(TypeError, "must be a Tensor", linear, [1.0])
        refuses(TypeError, "floating point", linear, torch.ones(2, 4, dtype=torch.int64))
        refuses(ValueError, "the last dim of x must have", linear, torch.ones(2, 5))
        embedding = parallelize_module(nn.Embedding(4, 4), mesh, style(input_layouts=Replicate()))
        refuses(TypeError, "ids must be a Tensor of dtype int64", embedding, torch.ones(2))
        assert style.__name__ in repr(style())
    refuses(IndexError, "got ids from 4 to 4", embedding, torch.tensor([4]))
    refuses(
        ValueError, "has submodules", parallelize_module, nn.Sequential(nn.LayerNorm(4)), mesh, FusedSequenceParallel()
    )
    norm = parallelize_module(nn.LayerNorm(4), mesh, FusedSequenceParallel())
    refuses(TypeError, "must be a Tensor, got list", norm, [1.0])
    refuses(TypeError, "is a DTensor", parallelize_module, norm, mesh, FusedSequenceParallel())
    assert repr(FusedSequenceParallel()) == "FusedSequenceParallel(sequence_dim=1, use_local_output=False)"


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)
