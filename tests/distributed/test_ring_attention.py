"""Ring attention on real ranks: every mask, score, layout and dtype against dense fp64, and its contracts.

Contracts that hold for ulysses_attention, too, are tested for both here; test_ulysses tests the rest of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_tp import ring_attention, shard_sequence, ulysses_attention, unshard_sequence
from fused_tp.attention.ring import RingBackward
from fused_tp.attention.ring_plan import ring_plan
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import AttentionArguments
from fused_tp.backends.shared_memory.shm import ShmTransport
from fused_tp.core.errors import RankMismatchError
from fused_tp.ops.attention_arguments import checked_arguments
from fused_tp.ops.ring_attention import RING_ATTENTION, RING_ATTENTION_BACKWARD
from tests.attention_cases import (
    FEATURES,
    ROUTES,
    Case,
    Op,
    any_case,
    assert_same_bits,
    case,
    check_all,
    inputs,
    keywords,
    of_route,
    reference,
    results_of,
    run,
    sent,
    whole,
)
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import refuses, seeded
from tests.workers import on_ranks, run_ranks

ON_EVERY_ROUTE = pytest.mark.parametrize("route", list(ROUTES))
OPS = (ring_attention, ulysses_attention)
ANYWHERE: list[tuple[Op, int, str]] = [
    (ring_attention, 2, "one_sided"),
    (ring_attention, 3, "pipelined"),
    (ulysses_attention, 2, "one_sided"),
    (ulysses_attention, 4, "plain"),
]
SHAPES: list[Case] = [
    # Single tokens, fewer tokens than ranks or chunks, primes, and multiples of everything.
    *(case(n, causal=n % 2 == 1, layout=layout) for n in (2, 3, 5, 7, 24) for layout in ("zigzag", "contiguous")),
    case(37, causal=True, heads=6, kv_heads=2, batch=2, dtype=torch.float16),
    case(37, heads=3, kv_heads=3, batch=3, dtype=torch.bfloat16),
    case(37, causal=True, heads=4, kv_heads=1, head_dim=5, v_head_dim=12, dtype=torch.float64),
    case(37, head_dim=16, dtype=torch.float64),
    case(11, causal=True, batch=2, strided=True),
]


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "route"), [(1, "one_sided"), *itertools.product((2, 3, 4), ROUTES)])
def test_features(world_size: int, route: str) -> None:
    run(world_size, [*FEATURES.values(), *SHAPES], route)


@contextmanager
def small_chunks(rows: int, most: int) -> Iterator[pytest.MonkeyPatch]:
    """Make a backward run in chunks, like that of long shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_tp.attention.ring_plan._MIN_CHUNK_ROWS", rows)
        patch.setattr("fused_tp.attention.ring_plan._MAX_CHUNKS", most)
        forget_plans()
        yield patch
    forget_plans()


def forget_plans() -> None:
    ring_plan.cache_clear()
    import_module("fused_tp.ops.ring_attention")._call_cache.clear()


def results_in_chunks(group: dist.ProcessGroup, cases: list[Case]) -> list[list[Tensor | None]]:
    with small_chunks(2, 5):
        return results_of(group, cases)


@pytest.mark.parametrize(
    ("world_size", "route"), [(2, "one_sided"), (2, "pipelined"), (3, "one_sided"), (4, "pipelined")]
)
def test_backward_in_chunks(world_size: int, route: str) -> None:
    cases = [one for name, one in FEATURES.items() if "documents" in name or "window" in name or "cross" in name]
    check_all(cases, run_ranks(world_size, results_in_chunks, cases, env=ROUTES[route]))


@pytest.mark.full
@settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases=st.lists(any_case(), min_size=6, max_size=6), where=st.sampled_from(ANYWHERE))
def test_any_mask(cases: list[Case], where: tuple[Op, int, str]) -> None:
    op, world_size, route = where
    run(world_size, cases, route, op)


@ON_EVERY_ROUTE
def test_same_bits_in_every_run(route: str) -> None:
    cases = [case(43, causal=True), FEATURES["all scores"]]
    first, again = (run_ranks(3, results_of, cases, env=ROUTES[route]) for _ in range(2))
    assert_same_bits(first, again)


@pytest.mark.full
@pytest.mark.parametrize(
    ("op", "world_size", "route", "kv_heads"),
    [
        (ring_attention, 2, "one_sided", 4),
        *((ring_attention, 4, route, 4) for route in ("one_sided", "pipelined")),
        *((ulysses_attention, 4, "one_sided", kv_heads) for kv_heads in (4, 1)),
    ],
)
def test_error_does_not_grow_with_the_group(op: Op, world_size: int, route: str, kv_heads: int) -> None:
    """Each sum is rounded once: errors stay within 1.05x of one rank's; the margin is for other summation orders."""
    sizes = {"head_dim": 64, "v_head_dim": 64, "kv_heads": kv_heads}
    one, errors = case(1024, causal=True, dtype=torch.bfloat16, **sizes), []
    wanted = reference(one)
    for size in (1, world_size):
        found = whole(one, [rank[0] for rank in run_ranks(size, results_of, [one], op, env=ROUTES[route])])
        pairs = [(found[i], wanted[i]) for i in (0, 2, 3, 4)]  # without the log-sum-exp
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    assert all(together <= 1.05 * alone for alone, together in zip(*errors, strict=True)), errors


UNWRITTEN = [FEATURES[name] for name in ("softcap", "cross, causal, more queries", "cross, documents without keys")]


def with_unwritten_states(group: dist.ProcessGroup, kernel: str) -> list[list[Tensor | None]]:
    """Results with NaN in uninitialized states, where the first step writes all rows of a state, some, or none."""
    made = SoftmaxState.uninitialized.__func__  # type: ignore[attr-defined]

    def filled(cls: type[SoftmaxState], q: Tensor, v_head_dim: int) -> SoftmaxState:
        state: SoftmaxState = made(cls, q, v_head_dim)
        for x in (state.acc, state.row_max, state.row_sum):
            x.fill_(torch.nan)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftmaxState, "uninitialized", classmethod(filled))
        patch.setenv("FUSED_TP_ATTENTION", kernel)
        return results_of(group, UNWRITTEN)


@pytest.mark.parametrize("kernel", ["native-cpu", "torch-blocks"])
def test_no_state_is_read_before_it_was_written(kernel: str) -> None:
    check_all(UNWRITTEN, run_ranks(2, with_unwritten_states, kernel, env=ROUTES["one_sided"]))


# -- bytes ------------------------------------------------------------------------------------------------------------

_ROW = 2 * 8 * 4  # K and V of one token, one head, in fp32; gradients are as large


def in_all(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [[sum(moved) for moved in cases] for cases in ranks]


def test_what_a_mask_hides_does_not_travel() -> None:
    window = case(64, causal=True, window=(3, 0), layout="contiguous", kv_heads=1)
    documents = case(64, causal=True, cu_seqlens=[0, 16, 32, 48, 64], layout="contiguous")
    # Each rank but the last sends its last three tokens to the next one, forward and backward, and each but the first
    # returns three gradients.
    wanted = [[6 * _ROW, 0], [9 * _ROW, 0], [9 * _ROW, 0], [3 * _ROW, 0]]
    assert in_all(run_ranks(4, sent, [window, documents], env=ROUTES["pipelined"])) == wanted
    # In zigzag each rank needs eight of its neighbour's tokens, around two boundaries of shards. Keys are sent in
    # forward and in backward, gradients in backward.
    both_sides = case(64, window=(5, 3), kv_heads=1)
    assert in_all(run_ranks(2, sent, [both_sides], env=ROUTES["pipelined"])) == [[3 * 8 * _ROW]] * 2
    for route in ("pipelined", "one_sided"):
        run(2, [both_sides], route)


@pytest.mark.parametrize("how", ["wide", "input"])
def test_gradients_travel_wide_or_in_the_dtype_of_the_keys(how: str) -> None:
    one = case(64, kv_heads=1, dtype=torch.bfloat16, layout="contiguous")
    env = {**ROUTES["pipelined"], "FUSED_TP_RING_GRADIENTS": how}
    keys = 2 * 8 * 32  # elements of K and V of 32 tokens; they travel forward and backward
    wanted = keys * (2 + 2 + (4 if how == "wide" else 2))
    assert in_all(run_ranks(2, sent, [one], env=env)) == [[wanted]] * 2
    check_all([one], run_ranks(2, results_of, [one], env=env))


# -- autograd and compilers -------------------------------------------------------------------------------------------


@ON_EVERY_ROUTE
@pytest.mark.parametrize("op", OPS)
@on_ranks(3, env=of_route)
def test_frozen_inputs_two_uses_and_autocast(group: dist.ProcessGroup, op: Op, route: str) -> None:
    full = [seeded(1, 9, 3, 8, seed=i) for i in range(4)]
    # Only some ranks, or some inputs, need a gradient, but messages must still match.
    q, k, v, grad = (shard_sequence(t, 1, group=group) for t in full)
    q.requires_grad_()
    v.requires_grad_(dist.get_rank(group) == 0)
    op(q, k, v, group=group, seq_len=9).backward(grad)
    reference = [t.double().requires_grad_() for t in full[:3]]
    dense_attention(*reference, *dense_mask(9, 9))[0].backward(full[3].double())
    assert reference[0].grad is not None and q.grad is not None and k.grad is None
    wanted = shard_sequence(reference[0].grad, 1, group=group)
    torch.testing.assert_close(q.grad.double(), wanted, atol=1e-5, rtol=1e-5)
    # Two calls on the same K/V, then both backwards in the opposite order.
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    first, second = (op(q, k, v, group=group, causal=True, seq_len=9) for _ in range(2))
    alone = torch.autograd.grad(second, (k, v), grad, retain_graph=True)
    with torch.no_grad():  # memory of finished calls must not be read again
        op(q + 1, k + 1, v + 1, group=group, causal=True, seq_len=9)
    both = torch.autograd.grad((first, second), (k, v), (grad, grad))
    torch.testing.assert_close([2 * one for one in alone], list(both))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = op(q, k.bfloat16(), v, group=group, return_lse=True, seq_len=9)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32) and out.is_contiguous() and lse.is_contiguous()
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (q, k, v))


@ON_EVERY_ROUTE
@on_ranks(2, env=of_route)
def test_results_lie_as_compilers_are_told(group: dist.ProcessGroup, route: str) -> None:
    q, k = (seeded(2, 6, heads, 8, dtype=torch.bfloat16, seed=heads) for heads in (4, 2))
    more: dict[str, Any] = {
        "alibi_slopes": torch.rand(4, dtype=torch.bfloat16),
        "sinks": torch.rand(4, dtype=torch.bfloat16),
    }
    given = checked_arguments(AttentionArguments(**more), q, k, k, 2, dist.get_rank(group))
    rest = (*given, group.group_name)
    out, lse = RING_ATTENTION.call_prepared(q, k, k, *rest)
    arguments = (out, None, q, k, k, out, lse, *rest)
    forward, backward = RING_ATTENTION, RING_ATTENTION_BACKWARD
    real, fakes = backward.call_prepared(*arguments), backward.fake(backward.pack(arguments))
    for one, fake in zip([out, lse, *real], [*forward.fake(forward.pack((q, k, k, *rest))), *fakes], strict=True):
        assert (one.dtype, one.shape, one.stride()) == (fake.dtype, fake.shape, fake.stride())
    assert len({one.untyped_storage().data_ptr() for one in real}) == len(real)


# -- nothing to attend to, and other edges ----------------------------------------------------------------------------


@ON_EVERY_ROUTE
@on_ranks(2, env=of_route)
def test_no_keys_at_all(group: dist.ProcessGroup, route: str) -> None:
    q, k = (torch.ones(1, n, 2, 8, requires_grad=True) for n in (2, 0))
    out = ring_attention(q, k, k, group=group, seq_len_kv=0)
    assert not bool(out.any())
    out.sum().backward()


def test_nothing_to_attend_to() -> None:
    """A document without keys, with a sink of weight 0 and a gradient of lse."""
    one = FEATURES["cross, documents without keys"]
    q, k, v, grad, _ = inputs(one)
    sinks = torch.tensor([-torch.inf, 0.0, 0.0, 0.0], requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ring_attention(*leaves, group=None, sinks=sinks, return_lse=True, **keywords(one))
    grad_lse = torch.where(lse == -torch.inf, torch.nan, 1.0)  # the gradient of logaddexp(lse, another -inf)
    grads = torch.autograd.grad((out, lse), (*leaves, sinks), (grad, grad_lse))
    assert all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("kernel", ["native-cpu", "torch-cpu", "torch-blocks"])
def test_any_sign_of_the_scale(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_ATTENTION", kernel)
    q = seeded(1, 70, 2, 8)
    for scale in (-0.4, 0.0):
        if kernel == "torch-cpu":
            with pytest.raises(ValueError, match="scale must be above 0"):
                ring_attention(q, q, q, group=None, causal=True, scale=scale)
            continue
        wanted, _ = dense_attention(q, q, q, *dense_mask(70, 70, causal=True), scale=scale)
        got = ring_attention(q, q, q, group=None, causal=True, scale=scale)
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


# -- shared memory: late ranks and errors -----------------------------------------------------------------------------


def with_a_late_reader(group: dist.ProcessGroup) -> list[list[Tensor | None]]:
    """Results with one late rank at a time, which adds the terms from its peers after all others."""
    one, found = case(64, causal=True, window=(3, 0), heads=1, kv_heads=1), []
    attend = RingBackward.attend

    def slowly(self: RingBackward, t: int, *tensors: Any) -> None:
        attend(self, t, *tensors)
        time.sleep(0.1)  # its keys are ready, so that the others continue

    for late in range(dist.get_world_size(group)):
        with small_chunks(8, 2) as patch:
            if dist.get_rank(group) == late:
                patch.setattr(RingBackward, "attend", slowly)
            found += results_of(group, [one])
    return found


def test_a_slot_is_kept_for_its_reader_over_chunks_that_find_nothing() -> None:
    """Ring in zigzag with a window, where a rank reads both neighbours' keys, in the first step and the last."""
    one = case(64, causal=True, window=(3, 0), heads=1, kv_heads=1)
    check_all([one] * 4, run_ranks(4, with_a_late_reader, env=ROUTES["one_sided"]))


def early_and_late(group: dist.ProcessGroup) -> None:
    """Results have equal bits if peers seem to be still in the previous call, so that step 0 runs first."""
    found = []
    for settled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShmTransport, "is_settled", settled)
            found.append(results_of(group, [case(30, causal=True, batch=2)]))
    assert_same_bits(found[:1], found[1:])


def test_step_0_may_come_before_the_call() -> None:
    run_ranks(3, early_and_late, env=ROUTES["one_sided"])


# -- rejected calls ---------------------------------------------------------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Any, Any]] = {  # a keyword, and two values that cannot both be right
    "causal": (True, False),
    "layout": ("zigzag", "contiguous"),
    "scale": (0.125, 0.25),
    "softcap": (0.0, 30.0),
    "seq_len_kv": (8, 12),
    "return_lse": (True, False),  # ulysses_attention sends it
}


def mismatched(group: dist.ProcessGroup, op: Op) -> list[tuple[str, str]]:
    """(keyword, message) for ranks that differ in one keyword, in forward and in the ring's backward; and calls with
    different lengths."""
    rank, said = dist.get_rank(group), []
    q, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    for name, values in DISAGREEMENTS.items():
        if op is ring_attention and name == "return_lse":
            continue
        chosen: dict[str, Any] = {"scale": 1.0, name: values[rank]}
        k = torch.zeros(1, 6, 2, 8) if name == "seq_len_kv" and rank else q
        with pytest.raises(RankMismatchError) as error:
            op(q, k, k, group=group, **chosen)
        said.append((name, str(error.value)))
        if op is ring_attention:
            rest = (*checked_arguments(AttentionArguments(**chosen), q, k, k, 2, rank), group.group_name)
            with pytest.raises(RankMismatchError) as error:
                RING_ATTENTION_BACKWARD.call_prepared(q, None, q, k, k, q, lse, *rest)
            said.append((name, str(error.value)))
    x = shard_sequence(torch.zeros(1, 5, 2, 8), 1, group=group)  # 3 and 2 tokens; each rank assumes equal shards
    with pytest.raises(RankMismatchError, match="different numbers of tokens, pass seq_len"):
        op(x, x, x, group=group)
    with pytest.raises(RankMismatchError, match=r"an unshard_sequence, with .* numbers of tokens, pass seq_len"):
        unshard_sequence(x, 1, group=group)
    for seq_len, wrong in ((6, "=6 in layout 'zigzag' assigns"), (10, "=10 in layout"), (-1, " is -1; it must be")):
        with pytest.raises(ValueError, match=f"seq_len{wrong}"):
            op(q, q, q, group=group, seq_len=seq_len)
    op(x, x, x, group=group, seq_len=5)  # the ranks are in step again
    return said


@ON_EVERY_ROUTE
@pytest.mark.parametrize("op", OPS)
def test_ranks_that_disagree(op: Op, route: str) -> None:
    # Shared memory always compares, torch.distributed only with FUSED_TP_CHECK.
    check = {"FUSED_TP_CHECK": None if route == "one_sided" else "1"}
    for rank, said in enumerate(run_ranks(2, mismatched, op, env={**ROUTES[route], **check})):
        for name, sentence in said:
            assert "rank 0 call" in sentence and "rank 1 call" in sentence
            assert (
                f". The last number of a {op.__name__} is a checksum of its arguments; on rank {rank} the" in sentence
            )
            assert f"{name}={DISAGREEMENTS[name][rank]!r}" in sentence


Q = torch.zeros(2, 4, 4, 8)
BOUNDS = torch.tensor([0, 4])
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(4, 4, 8)}, ValueError, r"q has shape \(4, 4, 8\); it must be \[batch, seq_local"),
    ({"q": Q.long()}, TypeError, "q has dtype torch.int64"),
    ({"q": "q"}, TypeError, "q must be a Tensor"),
    ({"q": Q[..., :0], "k": Q[..., :0]}, ValueError, "only seq_local may be 0"),
    ({"q": torch.nested.nested_tensor([Q[0]])}, TypeError, "q is a nested tensor; .* pass cu_seqlens"),
    ({"k": Q.half()}, TypeError, "k has dtype torch.float16, but q has"),
    ({"k": Q.to("meta")}, ValueError, "k is on meta"),
    ({"k": Q[:1], "v": Q[:1]}, ValueError, "k has a batch of 1, but q has 2"),
    ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, r"k has 3 tokens on rank 0, but q has 4 \(dim 1 of \[batch, seq"),
    ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "For cross-attention, pass seq_len_kv"),
    ({"k": Q[..., :4]}, ValueError, "k has head_dim 4"),
    ({"k": Q[:, :, :3], "v": Q[:, :, :3]}, ValueError, "multiple of the 3 heads of k"),
    ({"v": Q[:, :, :2]}, ValueError, "v has shape .* only head_dim may differ"),
    ({"group": 3}, TypeError, "group must be"),
    ({"scale": torch.ones(1)}, TypeError, "scale must be a float"),
    ({"scale": float("nan")}, ValueError, "scale is nan"),
    ({"causal": "False"}, TypeError, "causal must be a bool, not str"),
    ({"window": 3}, TypeError, "window must be"),
    ({"window": (4, None)}, TypeError, r"window is \(4, None\); each side must be an int, or -1 for no limit"),
    ({"window": (True, 0)}, TypeError, r"window is \(True, 0\); each side must be an int"),
    ({"window": (1, -2)}, ValueError, "each side must be at least 0, or -1"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be finite and positive"),
    ({"softcap": "1"}, TypeError, "softcap must be a float"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p is 1.0; it must be in \[0, 1\)"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\); it must be \[4\]"),
    ({"sinks": [0.0, 0.0]}, TypeError, "sinks must be a Tensor"),
    ({"alibi_slopes": torch.zeros(1)}, ValueError, r"alibi_slopes has shape \(1,\)"),
    (
        {"cu_seqlens": [0, 4]},
        TypeError,
        r"cu_seqlens must be a Tensor, not list; pass torch.tensor\(\[0, ..., seq_len\]\)",
    ),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "must end with 4, the number of tokens on all ranks"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, ValueError, "must not decrease"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "it must be int32 or int64"),
    ({"cu_seqlens_kv": BOUNDS}, ValueError, "passed without cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0, 2, 4]), "cu_seqlens_kv": BOUNDS}, ValueError, "2 documents, but"),
    (
        {"cu_seqlens": BOUNDS, "k": Q[:, :3], "v": Q[:, :3], "seq_len_kv": 3},
        ValueError,
        "covers the 4 queries, but there are 3 keys. Pass cu_seqlens_kv",
    ),
    ({"layout": "balanced"}, ValueError, "needs their cu_seqlens"),
    ({"layout": "spiral"}, ValueError, "it must be one of"),
    ({"seq_len": 5}, ValueError, "seq_len=5 in layout 'zigzag' assigns 5 tokens to rank 0 of 1, but q holds 4"),
    ({"seq_len_kv": 5}, ValueError, "seq_len_kv=5 in layout 'zigzag' assigns 5 tokens to rank 0 of 1, but k holds 4"),
]


@on_ranks(2)
def test_nested_tensors_are_refused_by_a_group_in_use(group: dist.ProcessGroup) -> None:
    ring_attention(Q, Q, Q, group=group)
    refuses(TypeError, "q is a nested tensor", ring_attention, torch.nested.nested_tensor([Q[0]]), Q, Q, group=group)


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments(op: Op) -> None:
    for replaced, kind, message in BAD:
        arguments: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "group": None, **replaced}
        tensors = [arguments.pop(name) for name in "qkv"]
        refuses(kind, message, op, *tensors, **arguments)
