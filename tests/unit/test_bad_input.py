"""Bad input of every public op: the type of error, and a message with the argument and the requirement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fused_tp
from fused_tp.ops import collectives

X, W, B, R, NW = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5), torch.ones(3, 5), torch.ones(5)
LOGITS, TARGET = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)


Refusal = tuple[Callable[[], Any], type[Exception], str]


def with_defaults(op: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    """`op` on one rank, with these defaults; its first argument may be positional."""
    first = next(iter(defaults))

    def call(*given: Any, **named: Any) -> Any:
        return op(**{**defaults, "group": None, **dict.fromkeys([first][: len(given)], *given), **named})

    return call


ag = with_defaults(fused_tp.all_gather_matmul, x_shard=X, weight=W)
rs = with_defaults(fused_tp.matmul_reduce_scatter, x=X, weight=W)
ar = with_defaults(fused_tp.matmul_all_reduce, x=X, weight=W)
col = with_defaults(fused_tp.column_parallel_matmul, x=X, weight=W)
norm = with_defaults(fused_tp.all_reduce_rms_norm, partial=R, residual=R, norm_weight=NW, eps=1e-6)
mm_norm = with_defaults(fused_tp.matmul_all_reduce_rms_norm, x=X, weight=W, residual=R, norm_weight=NW, eps=1e-6)
lce = with_defaults(fused_tp.linear_cross_entropy, hidden=X, weight=W, target=TARGET)
ce = with_defaults(fused_tp.vocab_parallel_cross_entropy, logits_shard=LOGITS, target=TARGET)


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def escaped(x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    torch.vmap(lambda row: (seen.append(row), row)[1])(x)
    return seen[0]


def linear_cases(op: Callable[..., Any], x: str) -> list[Refusal]:
    """Refusals of every op with x, weight and bias."""
    return [
        (lambda: op([1.0]), TypeError, f"{x} must be a Tensor, not list."),
        (lambda: op(X.long()), TypeError, f"{x} has dtype torch.int64; the op supports float16, bfloat16"),
        (lambda: op(weight=None), TypeError, "weight must be a Tensor, not NoneType."),
        (lambda: op(weight=W.double()), TypeError, f"weight has dtype torch.float64, but {x} has torch.float32"),
        (lambda: op(weight=W.to("meta")), ValueError, f"weight is on meta, but {x} is on cpu; move one of them."),
        (
            lambda: op(weight=W.t()),
            ValueError,
            f"weight has shape (4, 5); it must be [out, 4], because {x} has shape (3, 4).",
        ),
        (lambda: op(weight=torch.ones(4)), ValueError, "weight has shape (4,); it must be [out, 4]"),
        (lambda: op(group="tp"), TypeError, "group must be a ProcessGroup, a 1-D DeviceMesh or None, got str."),
    ]


def float8_cases(op: Callable[..., Any], x: str) -> list[Refusal]:
    return [
        (lambda: op(float8="e4m3"), ValueError, "float8 is 'e4m3'; it must be one of 'tensorwise', 'rowwise'"),
        (lambda: op(float8=True), TypeError, "float8 must be the name of a recipe or None, not bool."),
        (
            lambda: op(X.double(), weight=W.double(), float8="rowwise"),
            TypeError,
            f"{x} has dtype float64; float8='rowwise' supports float16, bfloat16 and float32.",
        ),
    ]


def bias_cases(op: Callable[..., Any]) -> list[Refusal]:
    return [
        (lambda: op(bias=torch.ones(4)), ValueError, "bias has shape (4,); it must be (5,), one for each row of"),
        (lambda: op(bias=B.half()), TypeError, "bias has dtype torch.float16, but"),
        (lambda: op(bias=1.0), TypeError, "bias must be a Tensor, not float."),
    ]


def list_cases(op: Callable[..., Any]) -> list[Refusal]:
    return [
        (lambda: op(weight=[]), ValueError, "weight is an empty list; pass at least one weight."),
        (lambda: op(weight=[W, W.t()]), ValueError, "weight[1] has shape (4, 5); it must be [out, 4]"),
        (lambda: op(weight=[W, W], bias=[B]), ValueError, "bias is a list of 1, but weight is a list of 2"),
        (lambda: op(weight=[W, W], bias=B), ValueError, "bias is Tensor, but weight is a list of 2"),
        (lambda: op(bias=[B]), TypeError, "bias is a list, but weight is a single tensor"),
    ]


def dim_cases(op: Callable[..., Any], dim: str, x: str) -> list[Refusal]:
    return [
        (
            lambda: op(**{dim: 1}),
            ValueError,
            f"{dim}=1 is the last dim of {x}, the feature dim; pass a token dim, 0 to 0",
        ),
        (lambda: op(**{dim: -1}), ValueError, f"{dim}=1 is the last dim of {x}"),
        (lambda: op(**{dim: 2}), ValueError, f"{dim}=2 is out of range for {x} of shape (3, 4)."),
        (lambda: op(**{dim: "0"}), TypeError, f"{dim} must be an int, not str."),
        (lambda: op(**{dim: True}), TypeError, f"{dim} must be an int, not bool."),
        (lambda: op(torch.ones(4)), ValueError, f"{x} has shape (4,); it needs at least 2 dims."),
    ]


CASES: list[Refusal] = [
    *linear_cases(ag, "x_shard"),
    *bias_cases(ag),
    *list_cases(ag),
    *dim_cases(ag, "gather_dim", "x_shard"),
    (
        lambda: ag(gather_size=7),
        ValueError,
        "gather_size=7 sharded over 1 ranks by torch.chunk assigns 7 to rank 0, but",
    ),
    (lambda: ag(gather_size=-1), ValueError, "gather_size=-1 sharded over 1 ranks"),
    (lambda: ag(return_gathered=1), TypeError, "return_gathered must be a bool, not int."),
    (lambda: ce(ignore_index=2**63), ValueError, "ignore_index is 9223372036854775808; it must fit in 64 bits."),
    (lambda: ar(X.to_sparse()), TypeError, "x is a sparse_coo tensor; pass a dense tensor (x.to_dense(), or"),
    (lambda: ar(X.to_mkldnn()), TypeError, "x is a mkldnn tensor; pass a dense tensor"),
    (lambda: ar(weight=torch.nested.as_nested_tensor([W])), TypeError, "weight is a nested tensor; pass a dense"),
    (lambda: fused_tp.shard_sequence(quantized(X), 0, group=None), TypeError, "x is quantized; pass x.dequantize()."),
    (lambda: ar(weight=freed(W)), ValueError, "weight of shape (5, 4) has no memory: its storage was freed"),
    (lambda: ar(escaped(X)), TypeError, "x was created in a torch.func transform that has exited"),
    (lambda: ag(gather_size=3.0), TypeError, "gather_size must be an int, not float."),
    *linear_cases(rs, "x"),
    *bias_cases(rs),
    *dim_cases(rs, "scatter_dim", "x"),
    *linear_cases(ar, "x"),
    *bias_cases(ar),
    *linear_cases(col, "x"),
    *bias_cases(col),
    *list_cases(col),
    (lambda: norm(partial=None), TypeError, "partial must be a Tensor, not NoneType."),
    (lambda: norm(partial=R.int()), TypeError, "partial has dtype torch.int32"),
    (lambda: norm(residual=R.half()), TypeError, "residual has dtype torch.float16, but partial has torch.float32"),
    (lambda: norm(residual=R[:2]), ValueError, "residual has shape (2, 5); it must be (3, 5), the shape of the sum"),
    (lambda: norm(norm_weight=R), ValueError, "norm_weight has shape (3, 5); it must be (5,), one for each feature."),
    (lambda: norm(norm_weight=NW.double()), TypeError, "norm_weight has dtype torch.float64, but partial has torch"),
    (lambda: norm(eps=0.0), ValueError, "eps is 0.0; it must be positive"),
    (lambda: norm(eps=float("nan")), ValueError, "eps is nan; it must be positive"),
    (lambda: norm(eps="1e-6"), TypeError, "eps must be a float, not str."),
    (lambda: norm(group=0), TypeError, "group must be a ProcessGroup, a 1-D DeviceMesh or None, got int."),
    *float8_cases(ag, "x_shard"),
    *float8_cases(rs, "x"),
    *float8_cases(ar, "x"),
    *float8_cases(col, "x"),
    *dim_cases(partial(ag, float8="rowwise"), "gather_dim", "x_shard"),
    *dim_cases(partial(rs, float8="rowwise"), "scatter_dim", "x"),
    *linear_cases(partial(ar, float8="rowwise"), "x"),
    *list_cases(partial(col, float8="rowwise")),
    (lambda: ag(float8="rowwise", gather_dim=None), TypeError, "gather_dim must be an int, not NoneType."),
    (lambda: rs(float8="rowwise", scatter_dim=None), TypeError, "scatter_dim must be an int, not NoneType."),
    (
        lambda: ag(float8="rowwise", return_gathered=True),
        ValueError,
        "float8='rowwise' gathers x in float8, so return_gathered cannot return x. Omit one of the two.",
    ),
    *linear_cases(mm_norm, "x"),
    (lambda: mm_norm(residual=X), ValueError, "residual has shape (3, 4); it must be (3, 5), the shape of the sum"),
    (lambda: mm_norm(residual=R.half()), TypeError, "residual has dtype torch.float16, but x has torch.float32"),
    (
        lambda: mm_norm(norm_weight=NW[:4]),
        ValueError,
        "norm_weight has shape (4,); it must be (5,), one for each feature.",
    ),
    (lambda: mm_norm(eps=-1), ValueError, "eps is -1; it must be positive"),
    (lambda: ce(logits_shard=1.0), TypeError, "logits_shard must be a Tensor, not float."),
    (lambda: ce(logits_shard=LOGITS.long()), TypeError, "logits_shard has dtype torch.int64"),
    (lambda: ce(target=[0]), TypeError, "target must be a Tensor, not list."),
    (lambda: ce(target=TARGET.int()), TypeError, "target has dtype torch.int32; it must be int64 class indices"),
    (lambda: ce(target=LOGITS), TypeError, "target has dtype torch.float32; it must be int64 class indices"),
    (lambda: ce(target=TARGET[:2]), ValueError, "target has shape (2,); it must be (3,), one for each row of"),
    (lambda: ce(target=TARGET.to("meta")), ValueError, "target is on meta, but logits_shard is on cpu"),
    (lambda: ce(target=TARGET + 4), ValueError, "target holds 4; class indices are 0 to 3, or ignore_index=-100."),
    (lambda: ce(label_smoothing=1.5), ValueError, "label_smoothing is 1.5; it must be between 0 and 1."),
    (lambda: ce(label_smoothing=None), TypeError, "label_smoothing must be a float, not NoneType."),
    (lambda: ce(ignore_index=0.5), TypeError, "ignore_index must be an int, not float."),
    (lambda: ce(reduction="max"), ValueError, "reduction is 'max'; it must be one of mean, sum, none."),
    (lambda: lce(target=TARGET[:1]), ValueError, "target has shape (1,); it must be (3,), one for each row of hidden"),
    (lambda: lce(target=TARGET + 9), ValueError, "target holds 9; class indices are 0 to 4, or ignore_index=-100."),
    (lambda: lce(target=None), TypeError, "target must be a Tensor, not NoneType."),
    (lambda: lce(softcap=0.0), ValueError, "softcap is 0.0; it must be above 0 and finite."),
    (lambda: lce(z_loss=-1.0), ValueError, "z_loss is -1.0; it must be 0 or more, and finite."),
    (lambda: lce(logit_scale=float("nan")), ValueError, "logit_scale is nan; it must be finite."),
    (lambda: lce(num_targets=0), ValueError, "num_targets is 0; it must be above 0."),
    (lambda: lce(num_targets=X), ValueError, "num_targets is a tensor of shape"),
    (lambda: lce(num_targets=1, reduction="sum"), ValueError, 'num_targets is the divisor of reduction="mean"'),
    (lambda: lce(gather_dim=1), ValueError, "gather_dim=1 is the last dim of hidden, the feature dim"),
    (lambda: lce(hidden=X[0]), ValueError, "hidden has shape (4,); it needs at least 2 dims."),
    (lambda: ce(vocab_size=9), ValueError, "vocab_size=9 sharded over 1 ranks by torch.chunk assigns 9 to rank 0, but"),
]


def collective_cases(op: Callable[..., Any], x: str, *dim: int) -> list[Refusal]:
    """Refusals of a collective. `dim`: 0 if the op has one."""
    alone = partial(op, group=None)
    cases: list[Refusal] = [
        (lambda: alone(1, *dim), TypeError, f"{x} must be a Tensor, not int."),
        (lambda: alone(X.long(), *dim), TypeError, f"{x} has dtype torch.int64"),
        (lambda: alone(X.bool(), *dim), TypeError, f"{x} has dtype torch.bool"),
        (lambda: alone(X.to(torch.complex64), *dim), TypeError, f"{x} has dtype torch.complex64"),
        (lambda: op(X, *dim, group=1), TypeError, "group must be a ProcessGroup"),
        (lambda: op(X, *dim), TypeError, "missing 1 required keyword-only argument: 'group'"),
    ]
    of_dim: list[Refusal] = [
        (lambda: alone(X[0, 0], 0), ValueError, f"{x} has shape (); it needs at least 1 dims."),
        (lambda: alone(X, 2), ValueError, f"dim=2 is out of range for {x} of shape (3, 4)."),
        (lambda: alone(X, -3), ValueError, f"dim=-3 is out of range for {x} of shape (3, 4)."),
        (lambda: alone(X, None), TypeError, "dim must be an int, not NoneType."),
        (lambda: alone(X, 0.0), TypeError, "dim must be an int, not float."),
    ]
    return cases + of_dim if dim else cases


explain: Any = fused_tp.explain


for gather, scatter, reduce in (
    (fused_tp.all_gather, fused_tp.reduce_scatter, fused_tp.all_reduce),
    (collectives.gather, collectives.scatter, collectives.copy_to_group),
):
    CASES += [
        *collective_cases(gather, "x_shard", 0),
        *collective_cases(scatter, "x", 0),
        *collective_cases(reduce, "x"),
    ]
    CASES += [(partial(gather, X, 0, group=None, gather_size=4), ValueError, "gather_size=4 sharded over 1 ranks")]
CASES += [
    (lambda: explain("matmul"), ValueError, "op is 'matmul'; it must be one of all_gather, all_gather_grouped"),
    (lambda: explain("matmul_all_reduce", (1, 2)), ValueError, "matmul_all_reduce needs 2 shapes (x, weight)"),
    (lambda: explain("matmul_all_reduce", (1, 2), (3, 3)), ValueError, "weight has shape (3, 3); it must be"),
    (lambda: explain("all_gather", (2, 3), dim=2), ValueError, "dim=2 is out of range for x_shard of shape (2, 3)"),
    (lambda: explain("all_reduce", (2, 3), float8="rowwise"), ValueError, "is supported for all_gather_matmul, column"),
    (lambda: explain("matmul_all_reduce", (2, 3), (4, 3), float8="e4m3"), ValueError, "float8 is 'e4m3'; it must be"),
    (lambda: explain("all_reduce", (2, 3), dim=0), ValueError, "dim=0 is supported for all_gather, reduce_scatter"),
    (lambda: explain("ring_attention", (1, 4, 2, 8)), ValueError, "ring_attention needs 3 shapes (q, k, v), got 1."),
    (
        lambda: explain("ring_attention", (1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)),
        ValueError,
        "q has 3 heads; their number must be a multiple of the 2 heads of k.",
    ),
    (lambda: explain("all_reduce_rms_norm", 3), TypeError, "The shape of partial must be a sequence of ints"),
    (lambda: explain("all_reduce_rms_norm", (-1,)), ValueError, "The shape of partial is (-1,); it needs"),
    (lambda: explain("all_reduce_rms_norm", (2,), group=3), TypeError, "group must be a ProcessGroup"),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"), CASES, ids=[f"{i}-{case[2][:40]}" for i, case in enumerate(CASES)]
)
def test_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("op", "name", "more"),
    [
        (fused_tp.ring_attention, "first_head", {}),
        (fused_tp.ring_attention, "rank", {}),
        (fused_tp.ulysses_attention, "strided", {}),
        (fused_tp.context_parallel_decode, "tokens", {"cache_seqlens": TARGET[:1]}),
    ],
)
def test_keywords_of_inner_functions_are_unknown(op: Callable[..., Any], name: str, more: dict[str, Any]) -> None:
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(TypeError, match=f"^{op.__name__}\\(\\) got an unexpected keyword argument '{name}'"):
        op(q, q, q, group=None, **more, **{name: 1})


def test_one_dim_has_gradients() -> None:
    for op in (norm, mm_norm):
        given = [R[0].clone().requires_grad_(), NW.clone().requires_grad_()]
        args = {"partial": X[0, :1].expand(5)} if op is norm else {"x": X[0]}
        normed, _ = op(**args, residual=given[0], norm_weight=given[1])
        assert all(grad.shape == (5,) for grad in torch.autograd.grad(normed.sum(), given))


def test_mesh_of_two_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.__new__(DeviceMesh)
    monkeypatch.setattr(DeviceMesh, "ndim", 2)
    monkeypatch.setattr(DeviceMesh, "mesh_dim_names", ("dp", "tp"), raising=False)
    with pytest.raises(ValueError, match=r"must be a 1-D DeviceMesh, got .* such as mesh\['tp'\]"):
        fused_tp.all_reduce(X, group=mesh)


def test_one_of_several_processes_is_not_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, but .* Call torch\.distributed\.init_process_group"):
        fused_tp.all_reduce(X, group=None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torch.equal(fused_tp.all_reduce(X, group=None), X)


def test_functions_of_functions_are_refused() -> None:
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"fused_tp::matmul_all_reduce does not support torch\.func transforms"):
            transform(lambda x: fused_tp.matmul_all_reduce(x, W, group=None).sum())(X.clone())
    x = X.clone().requires_grad_()
    y = fused_tp.matmul_all_reduce(x, W, group=None)
    with pytest.raises(RuntimeError, match="does not support is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


def test_meta_tensors_have_shapes() -> None:
    q, x = torch.ones(1, 6, 2, 4, device="meta"), X.to("meta")
    assert fused_tp.ring_attention(q, q, q, group=None).shape == q.shape
    assert fused_tp.matmul_all_reduce(x, W.to("meta"), group=None).shape == (3, 5)


def test_not_a_member_of_the_group() -> None:
    outsider: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that it leaves out
    with pytest.raises(ValueError, match="group does not contain this rank"):
        fused_tp.all_reduce(X, group=outsider)
