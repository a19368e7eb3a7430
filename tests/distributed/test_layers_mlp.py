"""ParallelMLP and norms under sequence parallelism against unsharded modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from fused_tp.nn import ParallelMLP, gather_state_dict, plain_parameters_
from fused_tp.nn.norm import sequence_parallel_
from tests.distributed.layers import Gated, assert_same
from tests.reference import refuses, seeded
from tests.workers import device_mesh, on_ranks


class Plain(nn.Module):
    def __init__(self, up: str, down: str, act: nn.Module) -> None:
        super().__init__()
        self.add_module(up, nn.Linear(6, 10))
        self.add_module(down, nn.Linear(10, 6))
        self.activation = act
        self.names = (up, down)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (getattr(self, name) for name in self.names)
        return down(self.activation(up(x)))


def check(group: dist.ProcessGroup, full: nn.Module, sharded: nn.Module, sequence_parallel: bool, **given: Any) -> None:
    dim = 1 if sequence_parallel else None
    assert_same(group, full, sharded, (2, 7, 6), cut=dim, out_cut=dim, **given)


@on_ranks(1, 2, 3, 4)
def test_mlp_equals_the_unsharded(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        Gated(),
        Gated(F.relu, bias=True),
        Plain("fc1", "fc2", nn.GELU()),
        Plain("c_fc", "c_proj", nn.GELU(approximate="tanh")),
        Plain("up_proj", "down_proj", nn.ReLU()),
        Plain("fc1", "fc2", nn.Sequential(nn.PReLU(), nn.Tanh())),  # learnt from local features
    ]
    for module in modules:
        for sequence_parallel in (False, True):
            full = copy.deepcopy(module).double()
            sharded = ParallelMLP.from_module(full, mesh=mesh, sequence_parallel=sequence_parallel)
            check(group, full, sharded, sequence_parallel, seq_len=7 if sequence_parallel else None)
    for activation, function in {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}.items():
        torch.manual_seed(0)
        mlp = ParallelMLP(6, 13, mesh=mesh, activation=activation, gated=True, bias=False, dtype=torch.float64)
        full = Gated(function).double()
        full.load_state_dict({name: p.full_tensor() for name, p in mlp.state_dict().items()})
        check(group, full, mlp, False)
    tanh = ParallelMLP(6, 10, mesh=mesh, activation="gelu_tanh", dtype=torch.float64)
    full = Plain("up_proj", "down_proj", nn.GELU(approximate="tanh")).double()
    full.load_state_dict({name: p.full_tensor() for name, p in tanh.state_dict().items()})
    check(group, full, tanh, False)


@on_ranks(2)
def test_hooks_of_projections_run(group: dist.ProcessGroup) -> None:
    """The shared gather does not bypass hooks of a projection."""
    torch.manual_seed(0)
    full = Gated().double()
    sharded = ParallelMLP.from_module(full, mesh=device_mesh(group))
    seen = []
    sharded.up_proj.register_forward_hook(lambda *_: seen.append(1))
    check(group, full, sharded, False)
    assert seen == [1]


@on_ranks(1, 3)
def test_norms_under_sequence_parallelism(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for make in (nn.LayerNorm, nn.RMSNorm):
        full = make(6, dtype=torch.float64)
        with torch.no_grad():
            for parameter in full.parameters():
                parameter.copy_(seeded(6, dtype=torch.float64, seed=4))
        sharded = sequence_parallel_(copy.deepcopy(full), mesh)
        assert isinstance(sharded, make) and type(sharded).__name__ == make.__name__
        check(group, full, copy.deepcopy(sharded), True)
        again = copy.deepcopy(full)  # its patched forward calls the class's forward: gradients are reduced once
        again.forward = lambda x, norm=again: type(norm).forward(norm, x)
        check(group, full, sequence_parallel_(again, mesh), True)
    dropout = nn.Dropout()
    assert sequence_parallel_(dropout, mesh) is dropout
    refuses(ValueError, "has submodules", sequence_parallel_, nn.Sequential(nn.LayerNorm(6)), mesh)
    refuses(TypeError, "is a DTensor", sequence_parallel_, sharded, mesh)
    refuses(TypeError, "mesh must be", sequence_parallel_, nn.LayerNorm(6), group)


CHANGES: tuple[Callable[[Any], object], ...] = (
    lambda norm: prune.random_unstructured(norm, "weight", 0.5),
    lambda norm: prune.remove(prune.random_unstructured(norm, "bias", 0.5), "bias"),
    lambda norm: norm.register_parameter("bias", None),
    lambda norm: norm.register_buffer("weight", norm._parameters.pop("weight").detach() * 2),
)


@on_ranks(2)
def test_replicated_parameters_that_are_renamed_or_removed_later(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for change in CHANGES:
        full = nn.LayerNorm(6, dtype=torch.float64)
        sharded = sequence_parallel_(copy.deepcopy(full), mesh)
        for norm in (full, sharded):
            torch.manual_seed(3)
            change(norm)
        check(group, full, sharded, True)
    plain = plain_parameters_(sequence_parallel_(nn.LayerNorm(6), mesh))
    prune.random_unstructured(plain, "weight", 0.5)
    calls = (lambda: plain(torch.ones(2, 6)), lambda: gather_state_dict(plain), lambda: plain.apply(lambda _: None))
    for call in calls:
        refuses(ValueError, "removed or renamed after it was sharded", call)


@on_ranks(1)
def test_bad_modules_are_refused(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    refuses(ValueError, "activation must be one of gelu", ParallelMLP, 6, 8, mesh=mesh, activation="tanh")
    refuses(TypeError, "activation must be a name or a function", ParallelMLP, 6, 8, mesh=mesh, activation=3)
    refuses(ValueError, "intermediate_size must be a positive integer", ParallelMLP, 6, 0, mesh=mesh)
    refuses(TypeError, "mesh must be", ParallelMLP, 6, 8, mesh=group)
    refuses(ValueError, "has no set of layers", ParallelMLP.from_module, nn.Linear(3, 3), mesh=mesh)
    fc = {"fc1": nn.Linear(3, 3), "fc2": nn.Linear(3, 3)}
    conv = {"c_fc": nn.Conv1d(1, 1, 1), "c_proj": nn.Linear(3, 3), "act": nn.ReLU()}
    for children, kind, message in (
        (conv, TypeError, "c_fc must be an nn.Linear, got Conv1d"),
        (fc, ValueError, "Pass the activation function"),
        ({**fc, "norm": nn.LayerNorm(3)}, ValueError, "submodule norm"),
        ({**fc, "act": nn.PReLU(3)}, ValueError, r"weight of PReLU has shape \(3,\)"),
        ({**fc, "drop": nn.Dropout(0.5)}, ValueError, "submodule drop"),
        ({**fc, "act": nn.ReLU(), "scale": nn.Parameter(torch.ones(3))}, ValueError, r"has the parameters scale"),
    ):
        module = nn.Module()
        for name, child in children.items():
            setattr(module, name, child)
        refuses(kind, message, ParallelMLP.from_module, module, mesh=mesh)
    refuses(ValueError, "last dim of x must have size 6", ParallelMLP(6, 8, mesh=mesh), torch.ones(2, 5))
