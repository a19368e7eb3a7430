"""Matmuls with float8=, forward and all gradients, against fp64 of the same quantized values; and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fused_tp
from fused_tp.backends.float8 import RECIPES
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.core.partition import shard_sizes
from fused_tp.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from fused_tp.nn.linear import column_forward
from fused_tp.nn.share_gather import share_gather
from tests.distributed.schedule_cases import ALGORITHMS, VARIANTS, run_variant
from tests.reference import assert_within_dtype_error, refuses, seeded
from tests.workers import device_mesh, on_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BATCH, TOKENS, K = 2, 7, 40  # 7 tokens are uneven shards, and 40 features no multiple of 16


def quantized(t: Tensor, dtype: torch.dtype, recipe: str, rows: bool) -> Tensor:
    """Values of `t` in float8, in fp64; with `rows`, one scale per row, else one."""
    limit = torch.finfo(dtype).max
    scale = (limit / (t.abs().amax(-1, keepdim=True) if rows else t.abs().max()).double()).float()
    if recipe != "tensorwise":
        scale = 2.0 ** scale.log2().floor()
    return (t.float() * scale).to(dtype).double() / scale.double()


def of_input(t: Tensor, recipe: str) -> Tensor:
    return quantized(t, E4M3, recipe, rows=recipe != "tensorwise")


def of_grad(t: Tensor, recipe: str) -> Tensor:
    is_tensorwise = recipe == "tensorwise"
    return quantized(t, E5M2 if is_tensorwise else E4M3, recipe, rows=not is_tensorwise)


def of_transposed_weight(w: Tensor, recipe: str) -> Tensor:
    return quantized(w.t(), E4M3, recipe, rows=recipe == "rowwise").t()


def weight_grad(d_output: Tensor, x: Tensor, d64: Tensor, x64: Tensor, recipe: str) -> Tensor:
    """dW in fp64. `d64`, `x64`: values that the other matmuls use, one scale per shard by "tensorwise"."""
    if recipe == "tensorwise":
        return d64.flatten(0, 1).t() @ x64.flatten(0, 1)
    d_rows, rows = d_output.flatten(0, 1), x.flatten(0, 1)
    if recipe == "rowwise":
        return of_grad(d_rows.t(), recipe) @ of_input(rows.t(), recipe).t()
    return d_rows.double().t() @ rows.double()


def column_case(group: Any, recipe: str, dtype: torch.dtype, gathers: bool, frozen: bool = False) -> None:
    """Two weights of this rank, the first with a bias; x is sharded by uneven numbers of tokens, or replicated."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = seeded(BATCH, TOKENS, K, dtype=dtype, seed=1) * torch.linspace(0.5, 3.0, TOKENS).view(-1, 1).to(dtype)
    weights = [[seeded(n, K, dtype=dtype, seed=10 * r + n) for n in (12, 5)] for r in range(size)]
    d_outputs = [[seeded(BATCH, TOKENS, n, dtype=dtype, seed=10 * r + n + 50) for n in (12, 5)] for r in range(size)]
    bias = seeded(12, dtype=dtype, seed=3).requires_grad_()
    sizes = shard_sizes(TOKENS, size) if gathers else [TOKENS]
    shards = x.split(sizes, 1)
    leaf = (shards[rank] if gathers else x).detach().clone().requires_grad_()
    own = [w.clone().requires_grad_(not frozen) for w in weights[rank]]
    options: dict[str, Any] = {"gather_dim": 1, "gather_size": TOKENS} if gathers else {}
    op: Any = fused_tp.all_gather_matmul if gathers else fused_tp.column_parallel_matmul
    outputs = op(leaf, own, [bias, None], group=group, float8=recipe, **options)
    leaves = [leaf, bias] if frozen else [leaf, bias, *own]
    d_x, d_bias, *d_weights = torch.autograd.grad(outputs, leaves, d_outputs[rank])

    x64 = torch.cat([of_input(shard, recipe) for shard in shards], 1)
    for i, y in enumerate(outputs):
        wanted = x64 @ of_input(weights[rank][i], recipe).t() + (bias.double() if i == 0 else 0.0)
        assert_within_dtype_error(y, wanted, dtype, reduced_over=K, roundings=2, name=f"y{i}")
    terms = [
        of_grad(d, recipe) @ of_transposed_weight(w, recipe)
        for r in range(size)
        for d, w in zip(d_outputs[r], weights[r], strict=True)
    ]
    wanted_dx = sum(terms).split(sizes, 1)[rank if gathers else 0]
    assert_within_dtype_error(d_x, wanted_dx, dtype, reduced_over=17 * size, roundings=size + 1, name="dx")
    assert_within_dtype_error(d_bias, d_outputs[rank][0].double().sum((0, 1)), dtype, reduced_over=14, name="db")
    for i, d_w in enumerate(d_weights):
        d = d_outputs[rank][i]
        d64 = of_grad(d, recipe)  # by "tensorwise" with one scale for the tokens of all shards
        wanted = weight_grad(d, x, d64, x64, recipe)
        assert_within_dtype_error(d_w, wanted, dtype, reduced_over=14, name=f"dw{i}")


def row_case(group: Any, recipe: str, dtype: torch.dtype, scatters: bool, frozen: bool = False) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    xs = [seeded(BATCH, TOKENS, K, dtype=dtype, seed=20 + r, scale=r + 1.0) for r in range(size)]
    weights = [seeded(12, K, dtype=dtype, seed=30 + r) for r in range(size)]
    bias = seeded(12, dtype=dtype, seed=3).requires_grad_()
    d_output = seeded(BATCH, TOKENS, 12, dtype=dtype, seed=5) * torch.linspace(0.5, 3.0, TOKENS).view(-1, 1).to(dtype)
    sizes = shard_sizes(TOKENS, size) if scatters else [TOKENS]
    d_shards = d_output.split(sizes, 1)
    own = rank if scatters else 0
    leaf, weight = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_(not frozen)
    if scatters:
        y = fused_tp.matmul_reduce_scatter(leaf, weight, bias, group=group, scatter_dim=1, float8=recipe)
    else:
        y = fused_tp.matmul_all_reduce(leaf, weight, bias, group=group, float8=recipe)
    leaves = [leaf, bias] if frozen else [leaf, bias, weight]
    d_x, d_bias, *d_weight = torch.autograd.grad(y, leaves, d_shards[own])

    y64 = sum(of_input(xs[r], recipe) @ of_input(weights[r], recipe).t() for r in range(size)) + bias.double()
    assert_within_dtype_error(y, y64.split(sizes, 1)[own], dtype, reduced_over=K * size, roundings=size + 2, name="y")
    d64 = torch.cat([of_grad(d, recipe) for d in d_shards], 1)
    wanted_dx = d64 @ of_transposed_weight(weights[rank], recipe)
    assert_within_dtype_error(d_x, wanted_dx, dtype, reduced_over=12, name="dx")
    wanted_db = d_output.double().sum((0, 1))
    assert_within_dtype_error(d_bias, wanted_db, dtype, reduced_over=14, roundings=size + 1, name="db")
    for d_w in d_weight:
        wanted = weight_grad(d_output, xs[rank], d64, of_input(xs[rank], recipe), recipe)
        assert_within_dtype_error(d_w, wanted, dtype, reduced_over=14, name="dw")


def all_cases(group: Any, dtype: torch.dtype) -> None:
    for recipe in RECIPES:
        for communicates in (True, False):
            for frozen in (False, True):
                column_case(group, recipe, dtype, communicates, frozen)
                row_case(group, recipe, dtype, communicates, frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(1, 2, 3, 4)
def test_against_one_process(group: Any, dtype: torch.dtype) -> None:
    all_cases(group, dtype)


@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_schedule(variant: str, world_size: int) -> None:
    run_variant(variant, world_size, all_cases, torch.bfloat16)


def matmuls(group: Any, **keywords: Any) -> dict[str, Any]:
    """Calls of x and weight by name of the op."""
    return {
        "all_gather_matmul": lambda x, w: fused_tp.all_gather_matmul(x, w, group=group, gather_dim=1, **keywords),
        "column_parallel_matmul": lambda x, w: fused_tp.column_parallel_matmul(x, w, group=group, **keywords),
        "matmul_reduce_scatter": lambda x, w: fused_tp.matmul_reduce_scatter(
            x, w, group=group, scatter_dim=1, **keywords
        ),
        "matmul_all_reduce": lambda x, w: fused_tp.matmul_all_reduce(x, w, group=group, **keywords),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_layouts_of_memory_change_nothing(group: Any, recipe: str) -> None:
    """Strides, offsets and lazy negation give the same bits as contiguous copies."""
    x, w = seeded(2, 4, K, seed=dist.get_rank(group)), seeded(12, K, seed=9)
    odd_x, odd_w = torch._neg_view(-x.transpose(0, 2).contiguous().transpose(0, 2)), w.t().contiguous().t()
    for name, op in matmuls(group, float8=recipe).items():
        outcomes = []
        for leaves in ([x, w], [odd_x, odd_w]):
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            y = op(*leaves)
            d_output = torch.linspace(-1.0, 2.0, y.numel()).view(y.shape)
            outcomes.append([y, *torch.autograd.grad(y, leaves, d_output)])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outcomes, strict=True)), name


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(1, 2)
def test_special_numbers_and_empty_tensors(group: Any, recipe: str) -> None:
    for name, op in matmuls(group, float8=recipe).items():
        for shape, columns in (((2, 4, K), 12), ((2, 0, K), 12), ((0, 4, K), 12), ((2, 4, K), 0), ((2, 4, 0), 12)):
            x, w = torch.zeros(shape, requires_grad=True), torch.zeros(columns, shape[-1], requires_grad=True)
            y = op(x, w)
            assert not y.any() and y.shape[-1] == columns, name
            d_x, d_w = torch.autograd.grad(y, [x, w], torch.zeros_like(y))
            assert d_x.shape == x.shape and d_w.shape == w.shape and not d_x.any() and not d_w.any(), name
        for number in (torch.nan, torch.inf):
            x = torch.ones(2, 4, K)
            x[0, :, 0] = number
            assert op(x, torch.ones(12, K))[0, 0].isnan().all(), name  # an infinite scale leaves no other number


@on_ranks(2)
def test_second_derivatives_are_refused(group: Any) -> None:
    for op in matmuls(group, float8="tensorwise").values():
        x, w = torch.ones(2, 4, K, requires_grad=True), torch.ones(12, K, requires_grad=True)
        for leaf in (x, w):
            with pytest.raises(RuntimeError, match="differentiated only once"):
                torch.autograd.grad(op(x, w).pow(2).sum(), leaf, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(3, env={"FUSED_TP_SCHEDULE": "plain"})
def test_bytes_sent(group: Any, dtype: torch.dtype) -> None:
    """Gathers send one byte per element, and 16 per row: for 256 features in bf16, 53 % of the bytes."""
    sent: list[int] = []
    gather = TorchDist.all_gather

    def counted(self: TorchDist, op: str, x: Tensor) -> Any:
        sent.append(x.nbytes)
        return gather(self, op, x)

    def count(op: Any, weight_needs_grad: bool) -> tuple[list[int], list[int]]:
        """Bytes that forward and backward give to gathers."""
        x, w = torch.ones(1, 6, 256, dtype=dtype, requires_grad=True), torch.ones(256, 256, dtype=dtype)
        sent.clear()
        y = op(x, w.requires_grad_(weight_needs_grad))
        forward = sent.copy()
        sent.clear()
        y.sum().backward()
        return forward, sent.copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDist, "all_gather", counted)
        full = dtype.itemsize * 256
        for recipe in (None, *RECIPES):
            float8_row = full if recipe is None else 256 + 16
            weight_row = float8_row if recipe == "tensorwise" else full
            ops = matmuls(group, float8=recipe)
            assert count(ops["all_gather_matmul"], True) == ([6 * float8_row], [6 * weight_row])
            assert count(ops["all_gather_matmul"], False) == ([6 * float8_row], [])
            assert count(ops["matmul_reduce_scatter"], True) == ([], [2 * weight_row])
            assert count(ops["matmul_reduce_scatter"], False) == ([], [2 * float8_row])


@on_ranks(2)
def test_compile_with_dynamic_shapes(group: Any) -> None:
    torch._dynamo.reset()

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        ops = matmuls(group, float8="tensorwise")
        y: Tensor = ops["matmul_reduce_scatter"](torch.relu(ops["all_gather_matmul"](x, w)), v)
        return y

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 7):
        leaves = [seeded(*shape, seed=length).requires_grad_() for shape in ((2, length, 16), (24, 16), (16, 24))]
        outcomes = []
        for run in (fn, compiled):
            y = run(*leaves)
            outcomes.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        torch.testing.assert_close(*outcomes)


@on_ranks(2)
def test_layers(group: Any) -> None:
    """Layers compute what the ops compute; those that share a gather share it only if they agree on float8."""
    mesh, linear = device_mesh(group), nn.Linear(32, 24)
    x = seeded(2, 3, 32, seed=dist.get_rank(group))
    options: dict[str, Any] = {"mesh": mesh, "sequence_parallel": True}
    q, k, plain = (ColumnParallelLinear.from_linear(linear, **options, float8=f) for f in ("rowwise", "rowwise", None))
    outputs = column_forward([q, k, plain], x)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    wanted = fused_tp.all_gather_matmul(x, *q.local_parameters(), group=group, gather_dim=1, float8="rowwise")
    assert torch.equal(q(x), wanted) and torch.equal(outputs[0], wanted)
    share_gather([q, plain])
    assert torch.equal(q(x), wanted) and torch.equal(plain(x), outputs[2])
    assert "float8='rowwise'" in repr(q) and "float8" not in repr(plain)
    mlp = ParallelMLP(32, 64, **options, float8="tensorwise")
    (up, up_bias), (down, down_bias) = mlp.up_proj.local_parameters(), mlp.down_proj.local_parameters()
    how: dict[str, Any] = {"group": group, "float8": "tensorwise"}
    hidden = nn.functional.gelu(fused_tp.all_gather_matmul(x, up, up_bias, gather_dim=1, **how))
    assert torch.equal(mlp(x), fused_tp.matmul_reduce_scatter(hidden, down, down_bias, scatter_dim=1, **how))
    refuses(
        ValueError, "float8 is 'fp8'; it must be one of 'tensorwise'", RowParallelLinear, 8, 8, mesh=mesh, float8="fp8"
    )
