"""Ring attention at its edges: long shards, nothing to attend to, any scale, and what compilers are told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fused_tp import ring_attention, shard_sequence
from fused_tp.attention.ring import Backward, Forward
from fused_tp.ops.attention_arguments import checked_arguments
from fused_tp.ops.ring_attention import (
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    _forward_fake,
    _grad_input_fake,
    attention_over,
)
from fused_tp.runtime.errors import FusedTPError
from fused_tp.runtime.group import SINGLE_NAME
from fused_tp.transport.shm import ShmTransport
from tests.attention_cases import FEATURES, ROUTES, inputs, keywords
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import seeded
from tests.workers import fresh_ranks, run_ranks

ON_EVERY_ROUTE = pytest.mark.parametrize("route", list(ROUTES))
ALONE: dict[str, Any] = {
    **dict.fromkeys(
        ["scale", "window", "alibi_slopes", "sinks", "cu_seqlens", "cu_seqlens_kv", "seq_len", "seq_len_kv"]
    ),
    "causal": True,
    "layout": "zigzag",
    "softcap": 0.0,
    "dropout_p": 0.0,
}


def long_backward(group: dist.ProcessGroup, seq_len: int) -> float:
    """By how much dk and dv of this rank are off from those of one rank, where a shard goes in several parts."""
    whole_of = [seeded(1, seq_len, 1, 8, seed=seed) for seed in range(4)]
    leaves = [t.clone().requires_grad_() for t in whole_of[:3]]
    alone, _ = attention_over(leaves[0], leaves[1], leaves[2], SINGLE_NAME, 1, 0, **ALONE)
    wanted = torch.autograd.grad(alone, leaves, whole_of[3])
    q, k, v, grad = (shard_sequence(t, 1, group=group) for t in whole_of)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = ring_attention(q, k, v, group=group, causal=True)
    if dist.get_rank(group) == 1:
        time.sleep(0.2)  # the other, which has more parts to find, is ahead as far as it may
    got = torch.autograd.grad(out, (q, k, v), grad)
    return max(
        float((one - shard_sequence(other, 1, group=group)).abs().max()) for one, other in zip(got, wanted, strict=True)
    )


def with_a_late_reader(group: dist.ProcessGroup, late: int) -> float:
    """By how much this rank's gradients are off, where a rank adds what others found for it after all others."""
    seq_len, window = 64, (3, 0)
    patch = pytest.MonkeyPatch()
    patch.setattr("fused_tp.attention.ring._FEWEST_ROWS_OF_A_CHUNK", 8)
    patch.setattr("fused_tp.attention.ring._MOST_CHUNKS", 2)
    attend = Backward.attend

    def slowly(self: Backward, t: int, *tensors: Any) -> None:
        attend(self, t, *tensors)
        time.sleep(0.3)  # its keys are there for the others to go on with

    whole_of = [seeded(1, seq_len, 1, 8, seed=seed) for seed in range(4)]
    leaves = [t.clone().requires_grad_() for t in whole_of[:3]]
    alone, _ = attention_over(leaves[0], leaves[1], leaves[2], SINGLE_NAME, 1, 0, **{**ALONE, "window": window})
    wanted = torch.autograd.grad(alone, leaves, whole_of[3])
    q, k, v, grad = (shard_sequence(t, 1, group=group) for t in whole_of)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = ring_attention(q, k, v, group=group, causal=True, window=window)
    if dist.get_rank(group) == late:
        patch.setattr(Backward, "attend", slowly)
    try:
        got = torch.autograd.grad(out, (q, k, v), grad)
    finally:
        patch.undo()
    shards = (shard_sequence(other, 1, group=group) for other in wanted)
    return max(float((one - other).abs().max()) for one, other in zip(got, shards, strict=True))


@pytest.mark.parametrize("late", range(4))
def test_a_slot_is_kept_for_its_reader_over_rounds_that_find_nothing(late: int) -> None:
    """In zigzag with a window a rank looks at both neighbours' keys, in the first step and the last."""
    assert max(run_ranks(4, with_a_late_reader, late, env=ROUTES["one_sided"])) < 1e-4


def early_and_late(group: dist.ProcessGroup) -> list[bool]:
    """Whether results have the same bits where peers seem to be in the call before, and step 0 comes first."""
    found = []
    for settled in (True, False):
        patch = pytest.MonkeyPatch()
        patch.setattr(ShmTransport, "settled", settled)
        q, k, v, grad = (seeded(2, 30, 2, 8, seed=10 * dist.get_rank(group) + seed) for seed in range(4))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        try:
            out = ring_attention(q, k, v, group=group, causal=True)
            found.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
        finally:
            patch.undo()
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_step_0_may_come_before_the_call() -> None:
    for same in run_ranks(3, early_and_late, env=ROUTES["one_sided"]):
        assert all(same)


def fails_in_step_0(group: dist.ProcessGroup) -> float:
    """Seconds until this rank has an error, where step 0 comes first and raises on rank 0 alone."""
    q = torch.ones(1, 16, 1, 8)
    ring_attention(q, q, q, group=group)  # a rendezvous
    patch = pytest.MonkeyPatch()
    patch.setattr(ShmTransport, "settled", False)
    if dist.get_rank(group) == 0:
        patch.setattr(Forward, "attend", lambda *_: 1 / 0)
    begin = time.perf_counter()
    with pytest.raises(ZeroDivisionError if dist.get_rank(group) == 0 else FusedTPError):
        ring_attention(q, q, q, group=group)
    return time.perf_counter() - begin


def test_peers_hear_of_an_error_in_step_0() -> None:
    for outcome in fresh_ranks(2, fails_in_step_0, env=ROUTES["one_sided"]):
        assert outcome.unwrap() < 10


@pytest.mark.parametrize("route", ["one_sided", "pipelined"])
def test_shards_that_go_in_several_parts(route: str) -> None:
    assert max(run_ranks(2, long_backward, 8192, env=ROUTES[route])) < 1e-4


def test_nothing_to_attend_to() -> None:
    """A sink of no weight, and a gradient of lse, where a document has no keys."""
    one = FEATURES["cross, documents without keys"]
    q, k, v, grad, _ = inputs(one)
    sinks = torch.tensor([-torch.inf, 0.0, 0.0, 0.0], requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ring_attention(*leaves, group=None, sinks=sinks, return_lse=True, **keywords(one))
    grad_lse = torch.where(lse == -torch.inf, torch.nan, 1.0)  # as logaddexp(lse, another -inf) gives it
    grads = torch.autograd.grad((out, lse), (*leaves, sinks), (grad, grad_lse))
    assert all(bool(torch.isfinite(g).all()) for g in grads)


def no_keys(group: dist.ProcessGroup) -> None:
    q = torch.ones(1, 2, 2, 8, requires_grad=True)
    k = torch.ones(1, 0, 2, 8, requires_grad=True)
    out = ring_attention(q, k, k, group=group, seq_len_kv=0)
    assert not bool(out.any())
    out.sum().backward()


@ON_EVERY_ROUTE
def test_no_keys_at_all(route: str) -> None:
    run_ranks(2, no_keys, env=ROUTES[route])


@pytest.mark.parametrize("provider", ["native-cpu", "torch-cpu", "torch-blocks"])
def test_any_sign_of_the_scale(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_ATTENTION", provider)
    for scale in (-0.4, 0.0):
        q = seeded(1, 70, 2, 8)
        if provider == "torch-cpu":
            with pytest.raises(ValueError, match="takes a scale above 0"):
                ring_attention(q, q, q, group=None, causal=True, scale=scale)
            continue
        seen, distance = dense_mask(70, 70, causal=True)
        wanted, _ = dense_attention(q, q, q, seen, distance, scale=scale)
        got = ring_attention(q, q, q, group=None, causal=True, scale=scale)
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def ops_are_as_their_fakes(group: dist.ProcessGroup) -> None:
    q, k = (seeded(2, 6, heads, 8, dtype=torch.bfloat16, seed=heads) for heads in (4, 2))
    more = {"alibi_slopes": torch.rand(4, dtype=torch.bfloat16), "sinks": torch.rand(4, dtype=torch.bfloat16)}
    rest = (*checked_arguments(q, k, k, 2, dist.get_rank(group), **more), group.group_name)
    out, lse = RING_ATTENTION(q, k, k, *rest)
    arguments = (out, None, q, k, k, out, lse, *rest)
    real = RING_ATTENTION_BACKWARD(*arguments)
    fakes = _grad_input_fake(*arguments)
    for one, fake in zip([out, lse, *real], [*_forward_fake(q, k, k, *rest), *fakes], strict=True):
        assert (one.dtype, one.shape, one.stride()) == (fake.dtype, fake.shape, fake.stride())
    assert len({one.untyped_storage().data_ptr() for one in real}) == len(real)


@ON_EVERY_ROUTE
def test_results_lie_as_compilers_are_told(route: str) -> None:
    run_ranks(2, ops_are_as_their_fakes, env=ROUTES[route])
