"""`grad_input` and `grad_weight` of an op: together equal to its backward bit for bit, without extra communication."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fused_tp
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.core.group import GroupName, resolve_group
from fused_tp.ops.all_gather_matmul import ALL_GATHER_MATMUL
from fused_tp.ops.column_parallel_matmul import COLUMN_PARALLEL_MATMUL
from fused_tp.ops.float8_column_matmul import FLOAT8_COLUMN_MATMUL
from fused_tp.ops.float8_row_matmul import FLOAT8_ROW_MATMUL
from fused_tp.ops.matmul_all_reduce import MATMUL_ALL_REDUCE
from fused_tp.ops.matmul_all_reduce_rms_norm import MATMUL_ALL_REDUCE_RMS_NORM
from fused_tp.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from fused_tp.ops.op import Op
from fused_tp.pipelining import dw_builder
from tests.reference import seeded
from tests.workers import error_of, on_ranks


class Context:
    """Fake context of autograd, as passed to `setup_context`."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def flattened(grads: dict[str, Any]) -> dict[str, list[Tensor]]:
    found = {
        name: [g for g in (grad if isinstance(grad, list) else [grad]) if g is not None] for name, grad in grads.items()
    }
    return {name: grads for name, grads in found.items() if grads}


@on_ranks(2, env={"FUSED_TP_SCHEDULE": "plain"})
def test_input_and_weight_gradients_apart_are_those_of_a_backward(group: dist.ProcessGroup) -> None:
    rank, name = dist.get_rank(group), GroupName(group.group_name)
    transport = torch_dist(resolve_group(group), "cpu")

    def leaf(*shape: int, seed: int) -> Tensor:
        return seeded(*shape, dtype=torch.float32, seed=10 * seed + rank).requires_grad_()

    x, w, b = leaf(6, 5, seed=1), leaf(7, 5, seed=2), leaf(7, seed=3)
    residual, norm = leaf(6, 7, seed=4), leaf(7, seed=5)
    size = 6 * dist.get_world_size(group)
    cases: list[tuple[Op[Any], tuple[Any, ...]]] = [
        (ALL_GATHER_MATMUL, (x, [w, w], [b], [False, True], 0, size, True)),
        (COLUMN_PARALLEL_MATMUL, (x, [w], [b], [True])),
        (MATMUL_REDUCE_SCATTER, (x, w, b, 0)),
        (MATMUL_ALL_REDUCE, (x, w, b)),
        (FLOAT8_COLUMN_MATMUL, (x, [w, w], [b], [False, True], 0, size, "tensorwise")),
        (FLOAT8_COLUMN_MATMUL, (x, [w], [b], [True], None, None, "rowwise")),
        (FLOAT8_ROW_MATMUL, (x, w, b, 0, "tensorwise")),
        (FLOAT8_ROW_MATMUL, (x, w, b, 0, "rowwise_with_gw_hp")),
        (FLOAT8_ROW_MATMUL, (x, w, b, None, "tensorwise")),
        (MATMUL_ALL_REDUCE_RMS_NORM, (x, w, residual, norm, 1e-5)),
    ]
    for op, values in cases:
        args = op.pack((*values, name))
        context = Context()
        with torch.no_grad():
            output = op.forward(op.select_schedule(args), args)
            op.setup_context(context, args, output)
            outputs = [output] if isinstance(output, Tensor) else list(output)
            grads: list[Any] = [seeded(*y.shape, dtype=y.dtype, seed=90 + i) for i, y in enumerate(outputs)]
            given = [grads] if op.returns_list else grads
            before = transport.calls
            assert op.backward is not None
            joint = flattened(op.backward(op.load_saved(context), *given))
            counted, before = transport.calls - before, transport.calls
            saved = op.load_saved(context)
            inputs, weights = flattened(op.grad_input(saved, *given)), flattened(op.grad_weight(saved, *given))
            assert transport.calls - before == counted, op.name
            alone = flattened(op.grad_weight(op.load_saved(context), *given))
        assert not inputs.keys() & weights.keys()
        for found in ({**inputs, **weights}, {**inputs, **alone}):
            assert found.keys() == joint.keys(), op.name
            for key, tensors in joint.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, found[key], strict=True)), (op.name, key)


class Net(nn.Module):
    """Module that applies all ops with weights, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        for i, name in enumerate(("up", "gate", "down", "joint", "out", "last", "norm")):
            shape = (6,) if name == "norm" else (6, 6)
            self.register_parameter(name, nn.Parameter(seeded(*shape, dtype=torch.float64, seed=10 * i + rank)))
        # Two biases: torch (2.13) computes wrong groups if nodes with parameters of their own share another one.
        self.bias, self.shift = (nn.Parameter(seeded(6, dtype=torch.float64, seed=seed)) for seed in (5, 6))
        experts = seeded(2, 6, 6, dtype=torch.float64, seed=70 + rank)
        self.experts, self.back = nn.Parameter(experts), nn.Parameter(experts.transpose(1, 2).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        (up, gate), whole = fused_tp.all_gather_matmul(
            x, [self.up, self.gate], [None, self.bias], group=group, return_gathered=True
        )
        x = fused_tp.matmul_reduce_scatter(up * gate + whole, self.down, group=group)
        x = fused_tp.column_parallel_matmul(x, self.joint, self.shift, group=group)
        residual = x
        x = fused_tp.matmul_all_reduce(x, self.out, group=group)
        normed, x = fused_tp.matmul_all_reduce_rms_norm(x, self.last, residual, self.norm, 1e-5, group=group)
        tokens = torch.arange(len(x)).repeat(2)
        offsets = torch.tensor([len(x), 2 * len(x)], dtype=torch.int32)
        rows = fused_tp.column_parallel_grouped_matmul(normed, self.experts, tokens, offsets, group=group)
        y = fused_tp.grouped_matmul_all_reduce(rows, self.back, tokens, offsets, shape=[len(x)], group=group)
        return y + x


def grads_of(net: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def assert_equal(found: list[Tensor | None], wanted: list[Tensor | None], what: str) -> None:
    assert len(found) == len(wanted), what
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None), what
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13, msg=lambda m: f"{what}: {m}")


@on_ranks(1, 2, 3, env={"FUSED_TP_SCHEDULE": "plain"})
def test_autograd_runs_the_half_that_is_asked_for_and_communicates_once(group: dist.ProcessGroup) -> None:
    net = Net(group)
    x = seeded(4, 6, dtype=torch.float64, seed=90 + dist.get_rank(group)).requires_grad_()
    transport = torch_dist(resolve_group(group), "cpu")

    def counted(run: Callable[[], Any]) -> tuple[Any, int]:
        before = transport.calls
        return run(), transport.calls - before

    def joint() -> list[Tensor | None]:
        x.grad = None
        net(x).sin().sum().backward()
        return [x.grad, *grads_of(net)]

    def in_halves() -> list[Tensor | None]:
        """Run backward in two halves, like a zero-bubble schedule."""
        y, weights = net(x).sin().sum(), list(net.parameters())
        x.grad = None
        (_, groups), of_inputs = counted(lambda: stage_backward_input([y], None, [x], iter(weights)))
        assert all(p.grad is None for p in weights)
        _, of_weights = counted(lambda: stage_backward_weight(iter(weights), groups))
        halves.append((of_inputs, of_weights))
        return [x.grad, *grads_of(net)]

    def deferred() -> list[Tensor | None]:
        x.grad = None
        net(x).sin().sum().backward()
        assert all(p.grad is None for p in net.parameters())
        build()()
        return [x.grad, *grads_of(net)]

    halves: list[tuple[int, int]] = []
    wanted, calls = counted(joint)
    with fused_tp.split_backward():
        for run in (joint, in_halves):
            found, times = counted(run)
            assert_equal(found, wanted, run.__name__)
            assert times == calls, (run.__name__, times, calls)
    assert group.size() == 1 or all(halves[0]), halves
    found, times = counted(joint)
    assert_equal(found, wanted, "after the context")
    with fused_tp.split_backward():
        y = net(x).sum()
    x.grad = None
    torch.autograd.grad(y, [x], 2 * torch.ones(()), retain_graph=True)
    # The half for inputs has kept values for other gradients, which must not be used.
    of_weights = torch.autograd.grad(y, list(net.parameters()))
    assert_equal(list(of_weights), list(torch.autograd.grad(net(x).sum(), list(net.parameters()))), "other gradients")
    build = dw_builder(net)
    found, times = counted(deferred)
    assert_equal(found, wanted, "deferred")
    assert times == calls


@on_ranks(2)
def test_halves_with_frozen_weights_checkpoints_and_modes(group: dist.ProcessGroup) -> None:
    x = seeded(4, 6, dtype=torch.float64, seed=dist.get_rank(group)).requires_grad_()
    for frozen in ((), ("up", "norm"), tuple(name for name, _ in Net(group).named_parameters())):
        net = Net(group)
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
        for given in (x, x.detach()):
            if len(frozen) > 2 and not given.requires_grad:
                continue
            net(given).sum().backward()
            wanted = grads_of(net)
            with fused_tp.split_backward():
                for reentrant in (None, False, True):
                    y = net(given) if reentrant is None else checkpoint(net, given, use_reentrant=reentrant)
                    if reentrant is True and not given.requires_grad:
                        continue  # torch's reentrant checkpoints have no gradient then
                    y.sum().backward()
                    assert_equal(grads_of(net), wanted, f"{frozen}, {reentrant}")
                with CommDebugMode() as mode:
                    net(given).sum().backward()
                of_split = mode.get_comm_counts()
                assert_equal(grads_of(net), wanted, "under a dispatch mode")
            with CommDebugMode() as mode:
                net(given).sum().backward()
            assert mode.get_comm_counts() == of_split
            net.zero_grad()
    refused = error_of(torch.autograd.grad, split_output(Net(group), x).sum(), [x], create_graph=True)
    assert isinstance(refused, RuntimeError) and "only once" in str(refused)


def split_output(net: nn.Module, x: Tensor) -> Tensor:
    with fused_tp.split_backward():
        y: Tensor = net(x)
    return y


@on_ranks(1)
def test_halves_let_go_of_their_tensors(group: dist.ProcessGroup) -> None:
    net = Net(group)
    gone = []
    for run in (False, True):
        x = seeded(4, 6, dtype=torch.float64, seed=3).requires_grad_()
        y = split_output(net, x)
        gone += [weakref.ref(x), weakref.ref(y)]
        if run:
            y.sum().backward()
        del x, y
    assert [one() for one in gone] == [None] * 4  # freed by reference counts alone


@on_ranks(1)
def test_a_deferring_module_leaves_others_alone(group: dist.ProcessGroup) -> None:
    """Other modules run normally, even if the deferring module's backward raised or its weight gradients never ran."""
    one, other = Net(group), Net(group)
    x = seeded(4, 6, dtype=torch.float64, seed=3).requires_grad_()
    other(x).sum().backward()
    wanted = grads_of(other)
    build = dw_builder(one)

    def fail(grad: Tensor) -> None:
        raise ValueError("no")

    for raises in (False, True):
        y = one(x)
        if raises:
            x.register_hook(fail)
        error = error_of(y.sum().backward)
        assert isinstance(error, ValueError) == raises
        other(x.detach().requires_grad_()).sum().backward()
        assert_equal(grads_of(other), wanted, f"raises: {raises}")
    build()
