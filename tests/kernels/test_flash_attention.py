"""Flash attention in Triton, interpreted, against dense fp64 attention; test_ring_processes tests the steps of a ring.

Tiles are 16 x 16 by default, so that short sequences have several tiles, full ones and partial ones at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.attention.layout import TokenRanges
from fused_tp.attention.ring_plan import Step, make_step
from fused_tp.attention.softmax import SoftmaxState, compute_delta, compute_sink_gradient
from fused_tp.attention.spec import AttentionMask, Dropout, ScoreParameters
from tests.attention_reference import dense, dense_attention
from tests.kernels.ranks import interpreted_ranks
from tests.reference import assert_within_dtype_error, seeded

pytest.importorskip("triton")

DOCUMENTS = (0, 1, 1, 23, 24, 61, 61, 75)
MASKS = {
    "full": AttentionMask(37, 37),
    "causal": AttentionMask(70, 70, causal=True),
    "left window": AttentionMask(70, 70, causal=True, window=(19, -1)),
    "both windows": AttentionMask(70, 70, window=(3, 21)),
    "itself": AttentionMask(35, 35, window=(0, 0)),
    "documents": AttentionMask(75, 75, causal=True, cu_seqlens=DOCUMENTS),
    "many documents": AttentionMask(40, 40, cu_seqlens=tuple(range(41))),
    "more keys": AttentionMask(21, 50, causal=True),
    "more queries": AttentionMask(50, 21, causal=True),  # the first ones see nothing
    "cross documents": AttentionMask(
        40, 61, causal=True, cu_seqlens=(0, 0, 18, 18, 40), cu_seqlens_kv=(0, 20, 40, 41, 61)
    ),
}
SLOPES = torch.tensor([0.25, -0.1, 0.0, 0.01])
SCORES = {
    "plain": ScoreParameters(0.3),
    "softcap": ScoreParameters(0.3, softcap=2.0),
    "alibi": ScoreParameters(0.3, alibi_slopes=SLOPES),
    "dropout": ScoreParameters(0.3, dropout=Dropout(0.3, (5 << 40) + 2**31 + 77, first_head=3)),
    "all": ScoreParameters(0.3, 2.0, SLOPES, Dropout(0.6, 2**63 - 1)),
}


@dataclass
class Case:
    """Inputs of one call, with the expected outputs and gradients."""

    step: Step
    scores: ScoreParameters
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


def whole_step(mask: AttentionMask) -> Step:
    """A step of all queries and all keys, including queries that see no key and keys that no query sees."""
    queries, keys = np.arange(mask.seq_len), np.arange(mask.seq_len_kv)
    places, starts, stops = mask.visible_intervals(queries)
    return Step(
        0, len(queries), 0, len(keys), starts.astype(np.int32), stops.astype(np.int32), places, queries, keys, (), ()
    )


def case(
    mask: AttentionMask,
    scores: ScoreParameters = SCORES["plain"],
    *,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (16, 16),
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    sinks: bool = False,
) -> Case:
    shapes = {
        "q": (batch, mask.seq_len, heads[0], dims[0]),
        "k": (batch, mask.seq_len_kv, heads[1], dims[0]),
        "v": (batch, mask.seq_len_kv, heads[1], dims[1]),
    }
    leaves = {name: seeded(*shape, dtype=dtype, seed=1 + i) for i, (name, shape) in enumerate(shapes.items())}
    grad_out = seeded(batch, mask.seq_len, heads[0], dims[1], dtype=dtype, seed=4)
    if scores.alibi_slopes is not None:
        leaves["slopes"] = scores.alibi_slopes
    if sinks:
        leaves["sinks"] = seeded(heads[0], seed=5)
    q, k, v, *by_head = wide = [x.double().requires_grad_() for x in leaves.values()]
    given: Any = dict(zip([*leaves][3:], by_head, strict=True))
    out, lse = dense_attention(
        q, k, v, *dense(mask), scale=scores.scale, softcap=scores.softcap, dropout=scores.dropout,
        alibi_slopes=given.get("slopes"), sinks=given.get("sinks"),
    )  # fmt: skip
    gradients = torch.autograd.grad(out, wide, grad_out.double())
    tensors = (leaves[name] for name in "qkv")
    return Case(
        whole_step(mask), scores, *tensors, leaves.get("sinks"), grad_out, out.detach(), lse.detach(),
        dict(zip(leaves, gradients, strict=True)),
    )  # fmt: skip


def alone(fn: Callable[..., None], *args: Any) -> None:
    """Run `fn` on one rank that interprets kernels; the time limit allows for a busy machine."""
    interpreted_ranks(1, fn, *args, timeout=300)


def tile(rows: int = 16, block: int = 16, *, tma: bool = False) -> Any:
    from fused_tp.triton_kernels.attention.configs import AttentionConfig

    return AttentionConfig(rows, block, 4, 1, tma)


def terms(scores: ScoreParameters) -> Any:
    from fused_tp.attention.kernels.triton import to_kernel_terms

    return to_kernel_terms(scores)


def kernels() -> Any:
    from fused_tp.triton_kernels import attention

    return attention


def run(c: Case, config: Any, lse: Tensor | None = None) -> dict[str, Tensor]:
    """Return out, lse and all gradients; the backward uses the given lse, if any."""
    flash, own = kernels(), terms(c.scores)
    out, found = flash.flash_attention(c.q, c.k, c.v, c.step, own, sinks=c.sinks, config=config)
    lse = found if lse is None else lse
    sums = compute_delta(c.grad_out, c.out.to(c.q.dtype), None)
    results = {name: torch.zeros(x.shape) for name, x in (("q", c.q), ("k", c.k), ("v", c.v))}
    d_slopes = None if c.scores.alibi_slopes is None else torch.zeros(c.q.shape[2])
    flash.flash_backward(
        c.grad_out, c.q, c.k, c.v, lse, sums, results["q"], results["k"], results["v"], c.step, own,
        d_slopes=d_slopes, queries_config=config, keys_config=config,
    )  # fmt: skip
    if d_slopes is not None:
        results["slopes"] = d_slopes
    if c.sinks is not None:
        results["sinks"] = compute_sink_gradient(c.sinks, lse, sums)
    return {"out": out, "lse": found, **results}


def check(c: Case, config: Any = None, name: str = "", *, shipped: bool = False) -> dict[str, Tensor]:
    """Run a case, compare all results with its reference, and return them."""
    results, dtype = run(c, None if shipped else config or tile()), c.q.dtype
    # Two roundings: of p to the dtype of v, of which the average over keys keeps up to half a step, and of the output.
    reduced = c.step.num_keys + c.q.shape[3]
    assert_within_dtype_error(results["out"], c.out, dtype, reduced_over=reduced, roundings=2, name=f"{name} out")
    torch.testing.assert_close(results["lse"].double(), c.lse, rtol=4e-6, atol=4e-6)
    blind = torch.from_numpy(c.step.starts >= c.step.stops)
    assert not results["out"][:, blind].any() and not results["q"][:, blind].any()
    assert c.sinks is not None or bool((results["lse"][..., blind] == -torch.inf).all())
    reduced = (c.step.num_keys + c.step.num_rows) * c.q.shape[2]
    for leaf, gradient in c.gradients.items():
        rms = gradient.pow(2).mean().sqrt().clamp_min(0.1)  # the terms of a gradient may cancel
        error = ((results[leaf].double() - gradient).abs() / (gradient.abs() + rms)).max()
        # Gradients of slopes and sinks are long sums of terms that nearly cancel.
        bound = torch.finfo(dtype).eps * (4 if dtype != torch.float32 else 8 * reduced**0.5)
        assert error < bound, f"{name}: gradient of {leaf} is off by {error:.3g}, allowed are {bound:.3g}"
    return results


# -- numbers ----------------------------------------------------------------------------------------------------------

PACKED = AttentionMask(41, 41, causal=True, window=(17, -1), cu_seqlens=(0, 1, 1, 30, 41))
Given = tuple[AttentionMask, ScoreParameters, dict[str, Any], dict[str, Any]]  # and keywords of `case` and of `tile`
GQA = {"heads": (2, 1)}
CASES: dict[str, Given] = {
    **{
        f"{name} in blocks of {block}": (mask, SCORES["plain"], GQA, {"block": block})
        for name, mask in MASKS.items()
        for block in (16, 32)
    },
    "nothing but sinks": (MASKS["more queries"], SCORES["plain"], {"sinks": True}, {}),
    "every score": (PACKED, SCORES["all"], {"sinks": True}, {}),
    "every score, cross": (AttentionMask(20, 37), SCORES["all"], {"batch": 2}, {"rows": 32}),
}
MORE: dict[str, Given] = {name: (PACKED, SCORES[name], {"sinks": True}, {}) for name in ("softcap", "alibi", "dropout")}
for _dtype in (torch.bfloat16, torch.float16):
    for _tma in (False, True):
        _how = {"dtype": _dtype, **GQA}
        MORE[f"{_dtype} tma {_tma}"] = (MASKS["causal"], SCORES["softcap"], {**_how, "sinks": True}, {"tma": _tma})
        MORE[f"{_dtype} documents tma {_tma}"] = (MASKS["documents"], SCORES["plain"], _how, {"rows": 32, "tma": _tma})
for _dims in ((40, 40), (64, 128), (128, 40), (1, 3), (256, 256)):
    _scores = ScoreParameters(_dims[0] ** -0.5)
    _how = {"dims": _dims, **GQA}
    MORE[f"dims {_dims}"] = (AttentionMask(33, 33, causal=True), _scores, _how, {"rows": 32, "block": 32})
_how = {"dims": (40, 24), "dtype": torch.bfloat16}
MORE["padded, by TMA"] = (AttentionMask(50, 50), SCORES["plain"], _how, {"tma": True})


def check_cases(group: dist.ProcessGroup, names: Sequence[str]) -> None:
    """Check this rank's share of the cases."""
    for name in names[group.rank() :: group.size()]:
        mask, scores, shape, config = (CASES | MORE)[name]
        check(case(mask, scores, **shape), tile(**config), name)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.full)])
def test_is_dense_attention(cases: dict[str, Given]) -> None:
    interpreted_ranks(2, check_cases, list(cases), timeout=300)


def vectors_of_heads(_group: dist.ProcessGroup) -> None:
    """Slopes and sinks may have another dtype, be strided or expanded, or be leaves of autograd."""
    c = case(AttentionMask(20, 20), SCORES["alibi"], sinks=True)
    assert c.sinks is not None
    sinks = c.sinks.bfloat16()

    def out(slopes: Tensor, sinks: Tensor) -> Tensor:
        own = terms(replace(c.scores, alibi_slopes=slopes))
        found: Tensor = kernels().flash_attention(c.q, c.k, c.v, c.step, own, sinks=sinks, config=tile())[0]
        return found

    wanted = out(SLOPES, sinks.float())
    assert torch.equal(wanted, out(SLOPES.double(), sinks))
    strided = torch.stack((SLOPES, SLOPES + 1), 1)[:, 0].requires_grad_()
    assert torch.equal(wanted, out(strided, torch.stack((sinks, sinks + 1), 1)[:, 0]))
    even = torch.full((4,), 0.1)
    assert torch.equal(out(even, even), out(even[:1].expand(4), even[:1].expand(4)))


def dropout_bits(_group: dist.ProcessGroup) -> None:
    """Equal probabilities and one-hot v make out show which keys were kept."""
    indices = np.concatenate((np.arange(5, 30), np.arange(41, 62)))
    tokens = TokenRanges((range(5, 30), range(41, 62)))
    step = make_step(AttentionMask(62, 62), tokens, tokens)
    for drop in (Dropout(0.5, 2**63 - 1), Dropout(0.1, 1 << 31, 2**20)):
        q, k = torch.zeros(2, 46, 2, 16), torch.zeros(2, 46, 1, 16)
        v = torch.eye(46)[None, :, None].expand(2, -1, 1, -1).contiguous()
        out, _ = kernels().flash_attention(q, k, v, step, terms(ScoreParameters(1.0, dropout=drop)), config=tile())
        wanted = drop.keep_mask(2, 2, *[torch.from_numpy(indices)] * 2)
        assert torch.equal(out.transpose(1, 2) != 0, wanted)


def states(_group: dist.ProcessGroup) -> None:
    """A fresh state is not read; states from elsewhere may hold any maximum; storing and reloading keeps all bits."""
    c = case(AttentionMask(37, 37), heads=(2, 2))
    flash, own = kernels(), terms(c.scores)

    def fold(state: SoftmaxState, keys: slice, fresh: bool = False) -> SoftmaxState:
        step = make_step(AttentionMask(37, 37), TokenRanges((range(37),)), TokenRanges((range(keys.start, keys.stop),)))
        sums = (state.acc, state.row_max, state.row_sum)
        flash.flash_forward(c.q, c.k[:, keys], c.v[:, keys], step, own, sums, is_uninitialized=fresh, config=tile())
        return state

    def filled(value: float) -> SoftmaxState:
        per_row = torch.full((1, 2, 37), value)
        return SoftmaxState(torch.full((1, 37, 2, 16), value), per_row, per_row.clone())

    whole = fold(SoftmaxState.empty(c.q, 16), slice(0, 37))
    for fresh in (fold(filled(torch.nan), slice(0, 37), True),):
        assert all(torch.equal(getattr(whole, n), getattr(fresh, n)) for n in ("acc", "row_max", "row_sum"))
    # Blocks of 16 keys in one launch or in three: rescaling does not round, so the bits are the same.
    parts = SoftmaxState.empty(c.q, 16)
    for keys in (slice(0, 16), slice(16, 32), slice(32, 37)):
        fold(parts, keys)
    assert all(torch.equal(getattr(whole, n), getattr(parts, n)) for n in ("acc", "row_max", "row_sum"))
    other = SoftmaxState.empty(c.q, 16)
    fold(other, slice(0, 16))
    other = SoftmaxState(other.acc * 0.3, other.row_max - torch.tensor(0.3).log(), other.row_sum * 0.3)
    out, lse = fold(other, slice(16, 37)).finalize(torch.float32)
    torch.testing.assert_close((out, lse), whole.finalize(torch.float32), rtol=2e-6, atol=2e-6)


def leaks(_group: dist.ProcessGroup) -> None:
    """A masked key changes no bit of a query's output and gradient, and a query no bit of a masked key's gradients."""
    mask = MASKS["documents"]
    c = case(mask, SCORES["softcap"], heads=(2, 1))
    before = check(c)
    for token, change in ((40, 1e4), (61, -7.0)):
        k, v = c.k.clone(), c.v.clone()
        k[:, token] += change
        v[:, token] -= change
        after = run(replace(c, k=k, v=v), tile(), before["lse"])
        blind = torch.from_numpy((c.step.starts > token) | (c.step.stops <= token))
        for name in ("out", "q"):
            assert torch.equal(before[name][:, blind], after[name][:, blind]), (name, token)
        q, grad_out = c.q.clone(), c.grad_out.clone()
        q[:, token] += change
        grad_out[:, token] *= change
        after = run(replace(c, q=q, grad_out=grad_out), tile(), before["lse"])
        first, last = c.step.queries_per_key
        unseen = torch.from_numpy((first > token) | (last <= token))
        for name in "kv":
            assert torch.equal(before[name][:, unseen], after[name][:, unseen]), (name, token)
    # Not even NaN and inf leak from another long document, or from keys that no query sees.
    k, v = c.k.clone(), c.v.clone()
    k[:, 61:], v[:, 61:] = torch.nan, torch.inf
    after = run(replace(c, k=k, v=v), tile(), before["lse"])
    for name in ("out", "q"):
        assert torch.equal(before[name][:, :61], after[name][:, :61]), name
    for name in "kv":
        assert torch.equal(before[name][:, :61], after[name][:, :61]), name
    c = case(MASKS["cross documents"], heads=(1, 1))
    before = check(c)
    k, v = c.k.clone(), c.v.clone()
    k[:, :20], v[:, :20], k[:, 40], v[:, 40] = torch.nan, torch.nan, torch.inf, torch.nan
    after = run(replace(c, k=k, v=v), tile(), before["lse"])
    assert torch.equal(before["out"], after["out"]) and torch.equal(before["q"], after["q"])


def strides(_group: dist.ProcessGroup) -> None:
    """Strided views are read and written in place, memory between is not touched, and every run has the same bits."""
    slopes = replace(SCORES["alibi"], alibi_slopes=SLOPES[:2])
    c = case(AttentionMask(39, 39, causal=True), slopes, batch=2, heads=(2, 2))
    packed = torch.stack((c.q, c.k, c.v), 2)
    q, k, v = packed.unbind(2)
    first = check(c)
    second = check(replace(c, q=q, k=k, v=v, grad_out=c.grad_out.transpose(0, 1).contiguous().transpose(0, 1)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    heads_first = replace(c, q=c.q.transpose(1, 2).contiguous().transpose(1, 2), k=k, v=v)
    assert all(torch.equal(first[name], x) for name, x in run(heads_first, tile()).items())
    # Memory between the rows of a state and of gradients is not touched.
    wide = [torch.full((2, 41, 2, 17), 7.0) for _ in range(4)]
    log = [torch.full((2, 2, 41), 7.0) for _ in range(2)]
    weighted, dq, dk, dv = (x[:, 1:-1, :, :16] for x in wide)
    highest, total = (x[..., 1:-1] for x in log)
    flash, own = kernels(), terms(c.scores)
    flash.flash_forward(q, k, v, c.step, own, (weighted, highest, total), is_uninitialized=True, config=tile())
    out, _ = SoftmaxState(weighted.clone(), highest, total).finalize(torch.float32)
    torch.testing.assert_close(out, first["out"], rtol=1e-6, atol=1e-6)
    sums = compute_delta(c.grad_out, c.out.float(), None)
    for x in (dq, dk, dv):
        x.zero_()
    flash.flash_backward(
        c.grad_out, q, k, v, first["lse"], sums, dq, dk, dv, c.step, own, queries_config=tile(), keys_config=tile()
    )
    assert all(torch.equal(x, first[name]) for x, name in ((dq, "q"), (dk, "k"), (dv, "v")))
    for x in (weighted, dq, dk, dv, highest, total):
        x.fill_(7.0)
    assert all(bool((x == 7).all()) for x in (*wide, *log))


def errors(_group: dist.ProcessGroup) -> None:
    c = case(AttentionMask(20, 20))
    far = torch.empty(2, dtype=torch.bfloat16, device="meta").as_strided((1, 20, 4, 16), (0, 2**23, 16, 1))
    from fused_tp.triton_kernels.attention.launch import check_row_strides

    check_row_strides(q=c.q)
    with pytest.raises(ValueError, match="rows of q are 8388608 elements apart"):
        check_row_strides(k=c.k, q=far)
    from fused_tp.attention.kernels.base import KernelRequest
    from fused_tp.attention.kernels.triton import triton_availability

    cpu = torch.device("cpu")
    assert triton_availability(KernelRequest(cpu, torch.bfloat16, 64, 256))
    assert "head dims must be from 1 to 256" in triton_availability(KernelRequest(cpu, torch.bfloat16, 64, 320)).reason


CONTRACTS = (vectors_of_heads, dropout_bits, states, leaks, strides)


@pytest.mark.parametrize("of", [errors, *(pytest.param(of, marks=pytest.mark.full) for of in CONTRACTS)])
def test_contracts(of: Callable[..., None]) -> None:
    alone(of)


def test_kernels_are_launched_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors' GPU is used even if the current GPU is another one."""
    from fused_tp.triton_kernels.device import on_device

    entered: list[torch.device] = []

    def enter(device: torch.device) -> contextlib.AbstractContextManager[None]:
        entered.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    with on_device(torch.empty(1)):
        assert not entered
    there = cast(Tensor, SimpleNamespace(device=torch.device("cuda:3")))
    with on_device(there):
        assert entered == [torch.device("cuda:3")]


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with 99 KB use smaller tiles where those of sm_80 do not fit; with less, the obstacle is described."""
    from fused_tp.triton_kernels.attention import launch as attention_launch
    from fused_tp.triton_kernels.attention.configs import attention_config

    assert attention_config("keys", 80, "tf32", 256, shared_bytes=99 << 10).rows == 16
    assert attention_config("keys", 80, "tf32", 256) == attention_config("keys", 90, "tf32", 256)
    monkeypatch.setattr(attention_launch, "arch_of", lambda _: 80)
    monkeypatch.setattr(attention_launch, "INTERPRETED", SimpleNamespace(value=False))
    for kb, why in ((99, None), (64, "need 101376 bytes of shared memory")):
        monkeypatch.setattr(attention_launch, "shared_bytes_of", lambda _, kb=kb: kb << 10)
        said = attention_launch.obstacle(torch.bfloat16, 64, 64, torch.device("cuda:0"))
        assert said is None if why is None else why in str(said)


@pytest.mark.parametrize("seed", range(4))
def test_tiles_cover_what_is_seen(seed: int) -> None:
    """Tiles of random intervals partition the rows and hold all keys these see; all rows see their full blocks."""
    from fused_tp.triton_kernels.attention.tiles import tiles_of

    draw = np.random.default_rng(seed)
    for _ in range(50):
        rows, keys = int(draw.integers(1, 90)), int(draw.integers(1, 90))
        starts = np.sort(draw.integers(0, keys + 1, rows))
        stops = np.maximum(starts, np.sort(draw.integers(0, keys + 1, rows)))
        breaks = tuple(np.unique(draw.integers(1, rows + 1, int(draw.integers(0, 3)))).tolist())
        height, block = (int(n) for n in 1 << draw.integers(0, 6, 2))
        tiles = tiles_of(starts, stops, breaks, height, block)
        order = tiles[np.argsort(tiles[:, 0])]
        assert order[0, 0] == 0 and order[-1, 1] == rows and (order[1:, 0] == order[:-1, 1]).all()
        for row, row_end, begin, end, full_begin, full_end in tiles.tolist():
            assert 0 < row_end - row <= height and not any(row < b < row_end for b in breaks)
            assert begin <= full_begin <= full_end <= max(end, begin)
            assert (full_begin - begin) % block == 0 == (full_end - full_begin) % block
            some = starts[row:row_end] < stops[row:row_end]
            if some.any():
                assert (starts[row:row_end][some] >= begin).all() and (stops[row:row_end][some] <= end).all()
            seen = np.zeros(keys, dtype=bool)
            for i in range(row, row_end):
                seen[starts[i] : stops[i]] = True
            assert seen[begin:end].all(), "keys that no row sees are not visited"
            if full_end > full_begin:
                assert (starts[row:row_end] <= full_begin).all() and (stops[row:row_end] >= full_end).all()
        looked = tiles[:, 3] - tiles[:, 2]
        assert (looked[1:] <= looked[:-1]).all(), "most work first"
