"""Every public op with odd inputs: `make test` runs some, the other tier 500 of each, `make soak` 2,000 and more.

A legal call (odd strides and sizes, expanded and overlapping memory, negative bits, NaN, infinities, huge numbers) must
match the dense reference, and its gradients those of dense copies of its inputs. In other calls one argument is wrong,
on all ranks or on the last alone: the op must raise ValueError or TypeError before anything is sent, and that rank then
makes the legal call, in which its peers wait. After each call an all-reduce checks that the ranks are in step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_tp
from fused_tp.attention.layout import tokens_by_rank
from fused_tp.backends import gemm
from fused_tp.core.partition import shard_sizes
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import assert_within_dtype_error, rms_norm64
from tests.workers import device_mesh, error_of, run_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.uint8, torch.bool, torch.complex64)
Given = dict[str, Any]


class Problem(NamedTuple):
    """A call of one op.

    Attributes:
        given: arguments, by rank.
        dense: reference: each rank's results for such arguments with floating-point tensors in float64.
        same: arguments that are the same on all ranks.
        huge: inputs may hold the dtype's largest number, for which the op still matches float64.
        special: arguments that may hold NaN or inf, None for all; only q of attention, as its reference multiplies
            masked values.
    """

    given: list[Given]
    dense: Callable[[list[Given]], list[Any]]
    same: tuple[str, ...] = ()
    huge: bool = True
    special: tuple[str, ...] | None = None


class Source(random.Random):
    """Random numbers, sizes and tensors, the same on every rank."""

    ranks = 1

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(self.randrange(1 << 30)), dtype=torch.float64)
        return (made * 4).to(dtype)

    def size(self, *small: int) -> int:
        """One of `small`, or now and then a size of several tiles."""
        return self.choice((*small, self.randint(10, 300)))

    def features(self) -> int:
        return self.size(1, 2, 3, 8)

    def cut(self) -> tuple[int, list[int]]:
        """A length, which may be 0 or below the number of ranks, and the sizes of the ranks' shards."""
        length = self.size(0, 1, 2, 3, 4, 6, 9)
        return length, shard_sizes(length, self.ranks)


# -- problems ---------------------------------------------------------------------------------------------------------


def gathers(s: Source) -> Problem:
    length, sizes = s.cut()
    dim, dtype = s.randrange(-3, 3), s.choice(FLOATS)
    shape = [2, 3, 2]
    given = [
        {"x_shard": s.tensor(*replaced(shape, dim, n), dtype=dtype), "dim": dim, "gather_size": length} for n in sizes
    ]
    return Problem(given, lambda g: [torch.cat([one["x_shard"] for one in g], dim)] * s.ranks)


def sums(s: Source) -> Problem:
    shape = s.choice(((), (0,), (5,), (2, 3), (4, 1, 3)))
    dtype = s.choice(FLOATS)
    return Problem([{"x": s.tensor(*shape, dtype=dtype)} for _ in range(s.ranks)], lambda g: [total(g, "x")] * s.ranks)


def scatters(s: Source) -> Problem:
    length, sizes = s.cut()
    dim, dtype = s.randrange(-2, 2), s.choice(FLOATS)
    given = [{"x": s.tensor(*replaced([3, 2], dim, length), dtype=dtype), "dim": dim} for _ in sizes]
    return Problem(given, lambda g: list(total(g, "x").split(sizes, dim)))


def column(s: Source, gathered: bool) -> Problem:
    length, sizes = s.cut()
    k, dtype, dim = s.features(), s.choice(FLOATS), s.randrange(-3, -1)
    whole = s.tensor(*replaced([2, 3, k], dim, length), dtype=dtype)
    given: list[Given] = []
    gathered_too = s.random() < 0.3
    for n in sizes:
        weights = [s.tensor(s.size(0, 1, 5), k, dtype=dtype) for _ in range(s.choice((1, 2)))]
        biases = [s.choice((None, s.tensor(w.shape[0], dtype=dtype))) for w in weights]
        one: Given = {"weight": weights, "bias": biases}
        if gathered:
            shard = s.tensor(*replaced([2, 3, k], dim, n), dtype=dtype)
            one |= {"x_shard": shard, "gather_dim": dim, "gather_size": length, "return_gathered": gathered_too}
        else:
            one["x"] = whole
        given.append(one)

    def dense(g: list[Given]) -> list[Any]:
        x = torch.cat([one["x_shard"] for one in g], dim) if gathered else g[0]["x"]
        outputs = [[F.linear(x, w, b) for w, b in zip(one["weight"], one["bias"], strict=True)] for one in g]
        return [[y, x] if one.get("return_gathered") else y for one, y in zip(g, outputs, strict=True)]

    return Problem(given, dense, () if gathered else ("x",))


def row(s: Source, scattered: bool) -> Problem:
    length, sizes = s.cut()
    n, dtype, dim = s.features(), s.choice(FLOATS), s.randrange(-3, -1)
    bias = s.choice((None, s.tensor(n, dtype=dtype)))
    given: list[Given] = []
    for k in shard_sizes(s.size(0, 1, 5, 8), s.ranks):
        x = s.tensor(*replaced([2, 3, k], dim, length), dtype=dtype)
        given.append({"x": x, "weight": s.tensor(n, k, dtype=dtype), "bias": bias})
        if scattered:
            given[-1]["scatter_dim"] = dim

    def dense(g: list[Given]) -> list[Any]:
        y: Any = sum(F.linear(one["x"], one["weight"]) for one in g) + (0 if g[0]["bias"] is None else g[0]["bias"])
        return list(y.split(sizes, dim)) if scattered else [y] * s.ranks

    return Problem(given, dense, ("bias",))


def routed(s: Source, tokens: int, experts: int) -> Given:
    """Random routing: some experts have no rows; the last token has a row, so that fewer tokens are always an error."""
    ends = sorted(s.randint(0, 12) for _ in range(experts))
    ends[-1] = max(1, ends[-1])
    rows = [s.randrange(tokens) for _ in range(ends[-1])]
    rows[s.randrange(len(rows))] = tokens - 1
    return {"tokens": torch.tensor(rows), "offsets": torch.tensor(ends, dtype=torch.int32)}


def expert_of(one: Given) -> Tensor:
    """Expert of each row, [rows]."""
    return torch.searchsorted(one["offsets"].long(), torch.arange(len(one["tokens"])), right=True)


def grouped_column(s: Source, gathered: bool) -> Problem:
    length, k, dtype, experts = s.choice((7, 9, 12)), s.features(), s.choice(FLOATS), s.choice((1, 2, 5))
    whole = s.tensor(length, k, dtype=dtype)
    given: list[Given] = []
    for shard in whole.split(shard_sizes(length, s.ranks)):
        one = {"weight": s.tensor(experts, s.size(0, 1, 5), k, dtype=dtype), **routed(s, length, experts)}
        own: Given = {"x_shard": shard.clone(), "gather_size": length} if gathered else {"x": whole}
        given.append(own | one)

    def dense(g: list[Given]) -> list[Any]:
        x = torch.cat([one["x_shard"] for one in g]) if gathered else g[0]["x"]
        return [torch.einsum("sk,snk->sn", x[one["tokens"]], one["weight"][expert_of(one)]) for one in g]

    return Problem(given, dense, () if gathered else ("x",))


def grouped_row(s: Source, scattered: bool) -> Problem:
    length, n, dtype, experts = s.choice((7, 9, 12)), s.features(), s.choice(FLOATS), s.choice((1, 2, 5))
    given: list[Given] = []
    has_scale = s.random() < 0.5
    for k in shard_sizes(s.size(0, 1, 5, 8), s.ranks):
        one = routed(s, length, experts)
        rows = len(one["tokens"])
        one |= {"x": s.tensor(rows, k, dtype=dtype), "weight": s.tensor(experts, n, k, dtype=dtype), "shape": (length,)}
        given.append(one | {"scale": s.tensor(rows, dtype=dtype) if has_scale else None})

    def dense(g: list[Given]) -> list[Any]:
        y = torch.zeros(length, n, dtype=torch.float64)
        for one in g:
            terms = torch.einsum("sk,snk->sn", one["x"], one["weight"][expert_of(one)])
            y.index_add_(0, one["tokens"], terms if one["scale"] is None else terms * one["scale"][:, None])
        return list(y.split(shard_sizes(length, s.ranks))) if scattered else [y] * s.ranks

    return Problem(given, dense, huge=False)


def normed(s: Source, multiplied: bool) -> Problem:
    n, k, dtype, rows = s.features(), s.features(), s.choice(FLOATS), s.choice(((), (0,), (3,), (2, 3)))
    both: Given = {"residual": s.tensor(*rows, n, dtype=dtype) + 50, "eps": s.choice((1e-5, 1.0))}  # nothing cancels
    both["norm_weight"] = s.tensor(n, dtype=dtype)
    given = [
        both | {"x": s.tensor(*rows, k, dtype=dtype) / 4, "weight": s.tensor(n, k, dtype=dtype) / (4 * k**0.5)}
        if multiplied
        else both | {"partial": s.tensor(*rows, n, dtype=dtype)}
        for _ in range(s.ranks)
    ]

    def dense(g: list[Given]) -> list[Any]:
        h = sum(F.linear(one["x"], one["weight"]) if multiplied else one["partial"] for one in g) + g[0]["residual"]
        return [[rms_norm64(h, g[0]["norm_weight"], both["eps"]), h]] * s.ranks

    return Problem(given, dense, ("residual", "norm_weight"), huge=False)


def entropy(s: Source) -> Problem:
    rows, dtype = s.choice(((), (0,), (3,), (2, 2))), s.choice(FLOATS)
    vocab = s.choice((1, 2, 5, 8))
    labels = [s.choice((-100, s.randrange(vocab))) for _ in range(prod(rows))]
    target = torch.tensor(labels, dtype=torch.int64).view(rows)
    if s.random() < 0.3:
        target = torch.stack([target, target], -1)[..., 1]
    how = {"label_smoothing": s.choice((0.0, 0.1)), "reduction": s.choice(("mean", "sum", "none")), "vocab_size": vocab}
    parts = shard_sizes(vocab, s.ranks)
    given = [{"logits_shard": s.tensor(*rows, v, dtype=dtype), "target": target, **how} for v in parts]

    def dense(g: list[Given]) -> list[Any]:
        logits = torch.cat([one["logits_shard"] for one in g], -1)
        plain: Any = {name: how[name] for name in ("label_smoothing", "reduction")}
        losses = F.cross_entropy(logits.reshape(-1, vocab), target.reshape(-1), **plain)
        return [losses.view(rows) if how["reduction"] == "none" else losses] * s.ranks

    return Problem(given, dense, ("target",), huge=False)


def linear_entropy(s: Source) -> Problem:
    # No dtypes of 16 bits, in which the logits are rounded before their loss, which has 32.
    rows, dtype, depth = s.choice(((0,), (3,), (2, 2))), s.choice(FLOATS[:2]), s.choice((1, 5))
    vocab = s.choice((1, 2, 5, 8))
    labels = [s.choice((-100, s.randrange(vocab))) for _ in range(prod(rows))]
    target = torch.tensor(labels, dtype=torch.int64).view(rows)
    how = {"label_smoothing": s.choice((0.0, 0.1)), "reduction": s.choice(("mean", "sum", "none")), "vocab_size": vocab}
    hidden = s.tensor(*rows, depth, dtype=dtype)
    given = [
        {"hidden": hidden, "weight": s.tensor(v, depth, dtype=dtype), "target": target, **how}
        for v in shard_sizes(vocab, s.ranks)
    ]

    def dense(g: list[Given]) -> list[Any]:
        logits = F.linear(g[0]["hidden"], torch.cat([one["weight"] for one in g]))
        plain: Any = {name: how[name] for name in ("label_smoothing", "reduction")}
        losses = F.cross_entropy(logits.reshape(-1, vocab), target.reshape(-1), **plain)
        return [losses.view(rows) if how["reduction"] == "none" else losses] * s.ranks

    return Problem(given, dense, ("hidden", "target"), huge=False)


def attention(s: Source) -> Problem:
    layout, dtype, heads = s.choice(("zigzag", "contiguous")), s.choice(FLOATS), s.choice((1, 2)) * s.ranks
    length, kv_heads = s.size(0, 1, 2, 5, 8, 13), s.choice((1, heads))
    bounds = torch.tensor([0, length // 3, length]) if s.random() < 0.3 else None
    if bounds is not None and s.random() < 0.5:
        layout = "balanced"
    own = tokens_of_ranks(s, length, layout, bounds)
    scores: Given = {"scale": s.choice((None, 0.3, -0.2)), "softcap": s.choice((0.0, 2.0))}
    how: Given = {**scores, "causal": s.random() < 0.5, "layout": layout, "cu_seqlens": bounds, "seq_len": length}
    how |= {"window": s.choice((None, (1, 2), (0, -1))), "return_lse": s.random() < 0.5}
    by_head = {name: s.choice((None, s.tensor(heads, dtype=dtype).abs())) for name in ("alibi_slopes", "sinks")}
    given = []
    for held in own:
        kv = {name: s.tensor(2, len(held), kv_heads, 4, dtype=dtype) for name in "kv"}
        given.append({"q": s.tensor(2, len(held), heads, 4, dtype=dtype), **kv, **how, **by_head})

    def dense(g: list[Given]) -> list[Any]:
        at = torch.cat(own).argsort()
        q, k, v = (torch.cat([one[name] for one in g], 1)[:, at] for name in "qkv")
        documents = None if bounds is None else bounds.tolist()
        seen, far = dense_mask(length, length, causal=how["causal"], window=how["window"], cu_seqlens=documents)
        out, lse = dense_attention(q, k, v, seen, far, **scores, **{name: g[0][name] for name in by_head})
        return [[out[:, i], lse[:, :, i]] if how["return_lse"] else out[:, i] for i in own]

    return Problem(given, dense, tuple(by_head), huge=False, special=("q",))


def decoding(s: Source) -> Problem:
    dtype, block, batch, new = s.choice(FLOATS), s.choice((1, 2, 4)), s.choice((1, 2)), s.choice((0, 1, 3))
    lengths = [s.choice((0, 1, 4, 7)) for _ in range(batch)]
    how: Given = {"block": block, "cache_seqlens": torch.tensor(lengths), "return_lse": s.random() < 0.5}
    how |= {"causal": s.random() < 0.5, "softcap": s.choice((0.0, 2.0)), "window": s.choice((None, (1, 2)))}
    q = s.tensor(batch, new, 2, 4, dtype=dtype)
    given = [
        {"q": q, **how, **{name: s.tensor(batch, 8, 1, 4, dtype=dtype) for name in ("k_cache_shard", "v_cache_shard")}}
        for _ in range(s.ranks)
    ]

    def dense(g: list[Given]) -> list[Any]:
        outs, lses = [], []
        for b, length in enumerate(lengths):
            places = [(i // block % s.ranks, i // (block * s.ranks) * block + i % block) for i in range(length)]
            k, v = (
                torch.stack([g[r][name][b, i] for r, i in places] or [g[0][name][b, 0]])[None, :length]
                for name in ("k_cache_shard", "v_cache_shard")
            )
            seen, distance = dense_mask(max(new, length), length, causal=how["causal"], window=how["window"])
            seen[: max(0, new - length)] = False
            own = slice(max(0, length - new), None)
            out, lse = dense_attention(g[0]["q"][b : b + 1], k, v, seen[own], distance[own], softcap=how["softcap"])
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        return [[out, lse] if how["return_lse"] else out] * s.ranks

    return Problem(given, dense, ("q",), huge=False, special=("q",))


def sequences(s: Source, whole: bool) -> Problem:
    layout, dtype, dim = (
        s.choice(("zigzag", "contiguous", "balanced")),
        s.choice((*FLOATS, *OTHERS)),
        s.randrange(-2, 2),
    )
    length = s.choice((0, 1, 2, 5, 9))
    bounds = torch.tensor([0, length // 2, length]) if layout == "balanced" else None
    own, x = tokens_of_ranks(s, length, layout, bounds), s.tensor(*replaced([2, 3], dim, length), dtype=dtype)
    how: Given = {"dim": dim, "layout": layout, "cu_seqlens": bounds}
    if whole:
        return Problem([{"x": x, **how}] * s.ranks, lambda g: [g[0]["x"].index_select(dim, i) for i in own], ("x",))
    given = [{"x_shard": x.index_select(dim, i), "seq_len": length, **how} for i in own]
    at = torch.cat(own).argsort()
    return Problem(given, lambda g: [torch.cat([one["x_shard"] for one in g], dim).index_select(dim, at)] * s.ranks)


def positions(s: Source) -> Problem:
    length, layout = s.choice((0, 1, 5, 9)), s.choice(("zigzag", "contiguous"))
    own = tokens_of_ranks(s, length, layout, None)
    return Problem([{"seq_len": length, "layout": layout}] * s.ranks, lambda g: own)


PROBLEMS: dict[str, Callable[[Source], Problem]] = {
    "all_gather": gathers,
    "all_reduce": sums,
    "reduce_scatter": scatters,
    "all_gather_matmul": partial(column, gathered=True),
    "column_parallel_matmul": partial(column, gathered=False),
    "matmul_reduce_scatter": partial(row, scattered=True),
    "matmul_all_reduce": partial(row, scattered=False),
    "all_gather_grouped_matmul": partial(grouped_column, gathered=True),
    "column_parallel_grouped_matmul": partial(grouped_column, gathered=False),
    "grouped_matmul_reduce_scatter": partial(grouped_row, scattered=True),
    "grouped_matmul_all_reduce": partial(grouped_row, scattered=False),
    "all_reduce_rms_norm": partial(normed, multiplied=False),
    "matmul_all_reduce_rms_norm": partial(normed, multiplied=True),
    "vocab_parallel_cross_entropy": entropy,
    "linear_cross_entropy": linear_entropy,
    "ring_attention": attention,
    "ulysses_attention": attention,
    "context_parallel_attention": attention,
    "context_parallel_decode": decoding,
    "shard_sequence": partial(sequences, whole=True),
    "unshard_sequence": partial(sequences, whole=False),
    "sequence_positions": positions,
}


def tokens_of_ranks(s: Source, length: int, layout: str, bounds: Tensor | None) -> list[Tensor]:
    held = tokens_by_rank(length, s.ranks, layout, () if bounds is None else tuple(bounds.tolist()))
    return [torch.from_numpy(tokens.indices.copy()) for tokens in held]


def replaced(shape: list[int], dim: int, size: int) -> list[int]:
    shape[dim] = size
    return shape


def total(g: list[Given], name: str) -> Tensor:
    return torch.stack([one[name] for one in g]).sum(0)


# -- odd inputs -------------------------------------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim else t


def every_second(t: Tensor) -> Tensor:
    return torch.stack([t, torch.zeros_like(t)], -1).flatten(-2)[..., ::2] if t.ndim else t


def at_an_offset(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def expanded(t: Tensor) -> Tensor:
    return t.narrow(0, 0, 1).expand(t.shape) if t.ndim and t.shape[0] else t


def overlapping(t: Tensor) -> Tensor:
    return t.flatten().contiguous().as_strided(t.shape, [1] * t.ndim) if t.numel() > 1 else t


def negative(t: Tensor) -> Tensor:
    """`t` with the negative bit: memory holds -t, which torch negates on reading."""
    return torch._neg_view(-t) if t.is_floating_point() else t


def absent(t: Tensor) -> Tensor:
    """Zeros without storage, as autograd creates them."""
    return torch._efficientzerotensor(t.shape, dtype=t.dtype) if t.is_floating_point() else t


def conjugate(t: Tensor) -> Tensor:
    return t.conj() if t.is_complex() else t


ODD = (transposed, every_second, at_an_offset, expanded, overlapping, negative, absent, conjugate, nn.Parameter)


def odd_numbers(s: Source, t: Tensor, huge: bool) -> Tensor:
    numbers = [float("nan"), float("inf"), -float("inf"), *([torch.finfo(t.dtype).max] if huge else [])]
    if t.numel():
        t = t.clone(memory_format=torch.contiguous_format)
        t.view(-1)[s.randrange(t.numel())] = s.choice(numbers)
    return t


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


WRONG_TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.to_sparse(),
    lambda t: t.float().to_mkldnn() if t.numel() and t.ndim else t.to_sparse(),
    lambda t: torch.nested.as_nested_tensor([t.reshape(-1)] * 2),
    lambda t: torch.nested.as_nested_tensor([t.reshape(-1)] * 2, layout=torch.jagged),
    lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8),
    freed,
    lambda t: t.tolist(),
    lambda t: "tensor",
    lambda t: 3,
)
WRONG_DTYPES = (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
WRONG: dict[type, tuple[Any, ...]] = {
    bool: (1, 0, None, "False", 1.0),
    int: ("1", 1.5, True, 2**70, -(2**70), torch.ones(2), []),
    float: ("1", True, float("nan"), 10**400, [], torch.ones(2)),
    str: (1, "diagonal", b"mean", ["sum"]),
}


def wrong(s: Source, name: str, value: Any, any_dtype: bool) -> Any:
    """A replacement of `value` that no op accepts; `any_dtype`: the op accepts tensors of all dtypes."""
    if name == "group":
        return s.choice(("tp", 3, [0, 1]))
    if isinstance(value, list):
        if not value or s.random() < 0.3:
            return s.choice(([], {}, (None,), "xy")) if name == "weight" else s.choice(([1], "xy", 1, [None] * 9))
        return [wrong(s, name, value[0] if value[0] is not None else 1.0, any_dtype), *value[1:]]
    if isinstance(value, Tensor):
        if value.is_floating_point() and s.random() < 0.3 and not any_dtype:
            return value.to(s.choice(WRONG_DTYPES))
        makers = [make for make in WRONG_TENSORS if value.numel() or make is not freed]
        return s.choice(makers)(value.detach().clone())  # the clone has storage, which some makers need
    if value is None:
        return s.choice(("none", object(), {}))
    if isinstance(value, tuple):
        return s.choice(((1,), (1, 2, 3), (1.5, 2), (-2, 0), (2**70, 0), "ab", 3, (True, 1)))
    return s.choice(WRONG[type(value)])


def described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    return f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else repr(value)[:60]


# -- calls ------------------------------------------------------------------------------------------------------------


def upcast(value: Any) -> Any:
    if isinstance(value, list):
        return [upcast(one) for one in value]
    if isinstance(value, Tensor):
        value = value.detach().resolve_neg().resolve_conj().clone()  # clone gives storage to zeros without it
        return value.double() if value.is_floating_point() else value
    return value


def flat(found: Any) -> list[Tensor]:
    """Flatten nested lists to their tensors."""
    if not isinstance(found, (list, tuple)):
        return [found] if isinstance(found, Tensor) else []
    return [t for one in found for t in flat(one)]


def compare(found: Any, dense: Any, name: str) -> None:
    """Assert equal numbers where the reference is finite and a sum of a few such numbers cannot overflow the dtype."""
    got, wanted = flat(found), flat(dense)
    assert len(got) == len(wanted), f"{len(got)} results, {len(wanted)} in the reference"
    for i, (one, ref) in enumerate(zip(got, wanted, strict=True)):
        assert one.shape == ref.shape, f"result {i} has shape {one.shape}, in the reference {ref.shape}"
        if not one.is_floating_point():
            assert one.equal(ref), f"result {i}"
            continue
        small = ref.abs() < torch.finfo(one.dtype).max / 64
        assert bool((small | ~one.isfinite() | ref.isfinite()).all()), f"result {i} is finite where it must not be"
        one, ref = one[small], ref[small]
        if name in EXACT:
            assert one.double().equal(ref), f"result {i}"
        if name.endswith("cross_entropy"):  # a difference of logits of about 8: the error is relative to these
            one, ref = one + 8, ref + 8
        if i == 1 and name.endswith(("attention", "decode")):  # a log-sum-exp near 0 is the logarithm of a sum near 1
            one, ref = one + 1, ref + 1
        assert_within_dtype_error(one, ref, one.dtype, reduced_over=1024, roundings=4, name=f"result {i}")


EXACT = ("all_gather", "shard_sequence", "unshard_sequence", "sequence_positions")


def gradients(op: Callable[..., Any], given: Given, copied: bool, zeros: bool) -> list[Tensor]:
    """Gradients of all floating-point arguments, for gradients of the results that are odd tensors or `zeros`.

    With `copied`, arguments and gradients are dense copies.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, list):
            return [leaf(one) for one in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        like = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()) if copied else value.detach()
        return like.requires_grad_()

    given = {name: leaf(value) for name, value in given.items()}
    leaves = [t for t in flat(list(given.values())) if t.is_floating_point()]
    results = [t for t in flat(op(**given)) if t.requires_grad]
    if not results:
        return []
    some = [torch.arange(t.numel()).sin().view(t.shape).to(t) * (not zeros) for t in results]
    if not copied:
        some = [absent(t) if zeros else negative(t) for t in some]
    found = torch.autograd.grad(results, leaves, some, allow_unused=True)
    return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, found, strict=True)]


def compare_gradients(odd: list[Tensor], dense: list[Tensor]) -> None:
    for i, (one, other) in enumerate(zip(odd, dense, strict=True)):
        if bool((other.abs() < torch.finfo(other.dtype).max / 64).all()):
            wanted, dtype = other.double(), other.dtype
            assert_within_dtype_error(one, wanted, dtype, reduced_over=1024, roundings=4, name=f"gradient {i}")


def make_odd(s: Source, problem: Problem) -> None:
    """Give some arguments odd memory layouts or numbers; ranks share one tensor for an argument in `problem.same`."""
    special = s.random() < 0.2
    for name, value in list(problem.given[0].items()):
        if not isinstance(value, Tensor) or value.dtype in (*OTHERS[:3], torch.int32) or s.random() < 0.5:
            continue
        how = s.choice([make for make in ODD if make is not nn.Parameter or value.is_floating_point()])
        numbers = special and value.is_floating_point() and s.random() < 0.5
        numbers = numbers and (problem.special is None or name in problem.special)
        for one in problem.given:
            if name in problem.same and one is not problem.given[0]:
                one[name] = problem.given[0][name]
            else:
                one[name] = how(odd_numbers(s, one[name], problem.huge) if numbers else one[name])


@mock.patch.object(gemm, "_MIN_NATIVE_ELEMENTS", 0)  # small inputs use the native core, too
def fuzz_rank(group: Any, name: str, seed: int, calls: int) -> list[str]:
    """Make random calls of an op; return a description of each failure."""
    rank, size, failures = group.rank(), group.size(), []
    where: Given = {"mesh": device_mesh(group)} if name == "context_parallel_attention" else {"group": group}
    op = partial(getattr(fused_tp, name), **where)
    for number in range(calls):
        s = Source(f"{name} {seed} {number} {size}")
        s.ranks = size
        problem = PROBLEMS[name](s)
        make_odd(s, problem)
        kind, given = s.choice(("legal", "legal", "wrong", "wrong on one")), problem.given[rank]
        with_gradients = kind == "legal" and name != "context_parallel_decode" and s.random() < 0.5
        zeros = s.random() < 0.2
        argument = s.choice([*given, *where])  # from here on the ranks' random numbers may differ
        bad = (
            3
            if argument == "mesh"
            else wrong(s, argument, {**given, **where}[argument], name in ("shard_sequence", "unshard_sequence"))
        )
        said = f"{name} seed {seed} call {number} ({kind}, {argument} {described(bad)})"
        try:
            with torch.no_grad():
                if kind == "wrong" or (kind == "wrong on one" and rank == size - 1):
                    error = error_of(op, **{**given, argument: bad})
                    assert isinstance(error, (ValueError, TypeError)), f"{type(error).__name__}: {error}"
                found = None if kind == "wrong" else op(**given)
            # Communication precedes every check that may fail on one rank only.
            both = [gradients(op, given, copied, zeros) for copied in (False, True)] if with_gradients else []
            with torch.no_grad():
                if kind != "wrong":
                    exact = [{name: upcast(value) for name, value in one.items()} for one in problem.given]
                    compare(found, problem.dense(exact)[rank], name)
            if both:
                compare_gradients(*both)
        except Exception as error:
            failures.append(f"{said}: {type(error).__name__}: {str(error)[:300]}")
            if isinstance(error, fused_tp.FusedTPError):
                return failures
        try:
            total_of_ranks = fused_tp.all_reduce(torch.full((2,), rank + 1.0), group=group)
            assert total_of_ranks.eq(size * (size + 1) / 2).all(), total_of_ranks
        except Exception as error:
            return [*failures, f"{said}: out of step: {error}"]
    return failures


def fuzz(name: str, seed: int, calls: int, world_size: int, schedule: str | None = None) -> list[str]:
    env = {"FUSED_TP_SCHEDULE": schedule, "FUSED_TP_TIMEOUT": "20"}
    found = run_ranks(world_size, fuzz_rank, name, seed, calls, timeout=600, env=env)
    return sorted(set(itertools.chain(*found)))
