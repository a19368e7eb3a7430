"""Ring attention on real ranks: forward and gradients against fp64 attention over the whole sequence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.ops import attention_arguments
from fused_tp.ops.ring_attention import RING_ATTENTION_BACKWARD, ring_attention
from fused_tp.ops.sequence import shard_sequence, unshard_sequence
from fused_tp.runtime.errors import CollectiveTimeoutError, RankMismatchError
from tests.reference import assert_within_dtype_error, attention64, seeded
from tests.workers import fresh_ranks, on_ranks, run_ranks

ROUTES = {
    "one_sided": {"FUSED_TP_SHM": "1", "FUSED_TP_SCHEDULE": "one_sided"},
    "pipelined": {"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": "pipelined"},
    "plain": {"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": "plain"},
}
ON_EVERY_ROUTE = pytest.mark.parametrize("route", list(ROUTES))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

Case = dict[str, Any]


def case(seq_len: int, causal: bool, layout: str = "zigzag", **more: Any) -> Case:
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "dtype": torch.float32}
    return {"seq_len": seq_len, "causal": causal, "layout": layout, **shape, **more}


def inputs(case: Case) -> list[Tensor]:
    batch, seq_len, dtype = case["batch"], case["seq_len"], case["dtype"]
    heads = [
        (case["heads"], case["head_dim"]),
        (case["kv_heads"], case["head_dim"]),
        (case["kv_heads"], case["v_head_dim"]),
        (case["heads"], case["v_head_dim"]),
    ]
    return [seeded(batch, seq_len, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(heads)]


def whole_by_ring(group: dist.ProcessGroup, case: Case, strided: bool = False) -> list[Tensor]:
    """[out, dq, dk, dv] of the whole sequence and lse, put together from all ranks."""
    layout, seq_len = case["layout"], case["seq_len"]
    shards = [shard_sequence(t, 1, group=group, layout=layout) for t in inputs(case)]
    if strided:  # other strides in every dim; the last one is not dense in the first tensor
        shards = [shards[0].mT.contiguous().mT, *(t.transpose(0, 2).contiguous().transpose(0, 2) for t in shards[1:])]
    q, k, v = (t.requires_grad_() for t in shards[:3])
    out, lse = ring_attention(
        q, k, v, group=group, causal=case["causal"], layout=layout, return_lse=True, seq_len=seq_len
    )
    grads = torch.autograd.grad(out, (q, k, v), shards[3])
    parts = [(out.detach(), 1), (lse.detach(), 2), *((g, 1) for g in grads)]
    return [unshard_sequence(t, dim, group=group, layout=layout, seq_len=seq_len) for t, dim in parts]


def whole_by_reference(case: Case) -> list[Tensor]:
    q, k, v, grad = inputs(case)
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    out, lse = attention64(q, k, v, causal=case["causal"])
    grads = torch.autograd.grad(out, (q, k, v), grad.double())
    return [out.detach(), lse.detach(), *grads]


def check(got: list[Tensor], case: Case) -> None:
    dtype, seq_len = case["dtype"], case["seq_len"]
    for name, one, wanted in zip(("out", "lse", "dq", "dk", "dv"), got, whole_by_reference(case), strict=True):
        if name == "lse":
            assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(one.double(), wanted, atol=1e-5, rtol=1e-5)
        elif name in ("dq", "dk") and seq_len == 1:  # softmax over one key is constant, its gradient 0 by cancellation
            assert one.abs().max() <= 16 * torch.finfo(dtype).eps
        else:
            # In bf16 torch's own kernel needs 4.3 for the dq of a whole sequence: it rounds probabilities, their
            # gradient and out (whose product with grad_out is subtracted again) to the dtype. Three steps need up to 7.
            reduced_over = seq_len * case["head_dim"]
            assert_within_dtype_error(
                one, wanted, dtype, reduced_over=reduced_over, roundings=12, name=f"{name} {case}"
            )


def run_cases(group: dist.ProcessGroup, cases: list[Case], strided: bool = False) -> None:
    for one in cases:
        check(whole_by_ring(group, one, strided), one)


@ON_EVERY_ROUTE
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lengths_masks_layouts(world_size: int, route: str) -> None:
    """Single tokens, fewer tokens than ranks or chunks, primes, and multiples of everything."""
    lengths = (1, 2, 3, 5, 7, 13, 24, 61)
    cases = [case(*one, heads=4) for one in itertools.product(lengths, (True, False), ("zigzag", "contiguous"))]
    run_ranks(world_size, run_cases, cases, env=ROUTES[route])


@ON_EVERY_ROUTE
def test_heads_and_dtypes(route: str) -> None:
    grouped: list[Case] = [
        {"heads": 6, "kv_heads": 2},
        {"heads": 4, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3, "batch": 3},
    ]
    widths: list[Case] = [{"head_dim": 16, "v_head_dim": 8}, {"head_dim": 5, "v_head_dim": 12}]
    cases = [
        case(37, causal, dtype=dtype, **{"batch": 2, **shape})
        for causal, dtype, shape in itertools.product((True, False), DTYPES, grouped + widths)
    ]
    run_ranks(3, run_cases, cases, env=ROUTES[route])


def test_one_rank() -> None:
    cases = [case(*one, kv_heads=1) for one in itertools.product((1, 7), (True, False), ("zigzag", "contiguous"))]
    run_ranks(1, run_cases, cases)


@ON_EVERY_ROUTE
def test_inputs_that_are_not_contiguous(route: str) -> None:
    run_ranks(
        2, run_cases, [case(11, True, batch=2, heads=4), case(11, False, batch=2, heads=4)], True, env=ROUTES[route]
    )


def bits(group: dist.ProcessGroup, one: Case) -> list[Tensor]:
    return whole_by_ring(group, one)


@ON_EVERY_ROUTE
def test_same_bits_in_every_run(route: str) -> None:
    one = case(43, True, heads=4)
    runs = [run_ranks(4, bits, one, env=ROUTES[route]) for _ in range(2)]
    first = runs[0][0]
    for ranks in runs:
        for got in ranks:
            assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


def in_flight(group: dist.ProcessGroup, one: Case) -> None:
    """Two calls on the same K/V before either backward, which then run in the other order."""
    q, k, v, grad = (shard_sequence(t, 1, group=group).requires_grad_(i < 3) for i, t in enumerate(inputs(one)))
    arguments = {"group": group, "causal": True, "seq_len": one["seq_len"]}
    first = ring_attention(q, k, v, **arguments)
    second = ring_attention(q, k, v, **arguments)
    alone = torch.autograd.grad(second, (k, v), grad, retain_graph=True)
    with torch.no_grad():  # memory of finished calls must not be read again
        ring_attention(q + 1, k + 1, v + 1, **arguments)
    both = torch.autograd.grad((first, second), (k, v), (grad, grad))
    for one_grad, sum_of_two in zip(alone, both, strict=True):
        torch.testing.assert_close(2 * one_grad, sum_of_two)


@ON_EVERY_ROUTE
def test_the_same_keys_used_twice(route: str) -> None:
    run_ranks(3, in_flight, case(29, True), env=ROUTES[route])


def many_calls(group: dist.ProcessGroup, rounds: int) -> float:
    rank = dist.get_rank(group)
    total = 0.0
    for i in range(rounds):
        if i % 4 == rank:  # ranks drift apart
            torch.randn(150, 150) @ torch.randn(150, 150)
        q = seeded(1, 6, 2, 8, seed=i).requires_grad_()
        out = ring_attention(q, q, q, group=group, causal=i % 2 == 0)
        out.sum().backward()
        total += out.sum().item()
    return total


@ON_EVERY_ROUTE
def test_many_calls_in_a_row(route: str) -> None:
    results = run_ranks(4, many_calls, 40, env=ROUTES[route])
    assert len(results) == 4


DISAGREEMENTS = {  # a keyword, and two values that cannot both be right
    "causal": (True, False),
    "layout": ("zigzag", "contiguous"),
    "scale": (0.125, 0.25),
    "softcap": (0.0, 30.0),
}


def mismatched(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said, in forward and in backward, where the ranks differ in one keyword only."""
    rank = dist.get_rank(group)
    q = torch.zeros(1, 4, 2, 8)
    lse = torch.zeros(1, 2, 4)
    said = {}
    for name, values in DISAGREEMENTS.items():
        chosen = {"causal": False, "scale": 1.0, "layout": "zigzag", "softcap": 0.0, name: values[rank]}
        with pytest.raises(RankMismatchError) as error:
            ring_attention(q, q, q, group=group, **chosen)
        said[name] = str(error.value)
        arguments = attention_arguments.checked_arguments(q, q, q, 2, rank, **chosen)
        with pytest.raises(RankMismatchError) as error:
            RING_ATTENTION_BACKWARD(q, None, q, q, q, q, lse, *arguments, group.group_name)
        said[f"{name} backward"] = str(error.value)
    ring_attention(q, q, q, group=group)  # the ranks are in step again
    return said


@ON_EVERY_ROUTE
def test_ranks_that_disagree_about_a_keyword(route: str) -> None:
    # Shared memory compares always, torch.distributed where it is asked to.
    check = {"FUSED_TP_CHECK": None if route == "one_sided" else "1"}
    found = run_ranks(2, mismatched, env={**ROUTES[route], **check})
    for rank, said in enumerate(found):
        assert set(said) == {*DISAGREEMENTS, *(f"{name} backward" for name in DISAGREEMENTS)}
        for name, values in DISAGREEMENTS.items():
            for sentence in (said[name], said[f"{name} backward"]):
                assert "rank 0 call" in sentence and "rank 1 call" in sentence and "ring_attention" in sentence
                assert f". The last number of a ring_attention is a checksum; on rank {rank} it stands for" in sentence
                assert f"{name}={values[rank]!r}" in sentence


def test_a_peer_that_does_not_come() -> None:
    outcomes = fresh_ranks(2, late_rank, env={**ROUTES["pipelined"], "FUSED_TP_TIMEOUT": "2"})
    assert isinstance(outcomes[0].error, CollectiveTimeoutError), outcomes[0]
    assert "ring_attention K/V" in str(outcomes[0].error)


def late_rank(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        return  # its process lives until all have answered
    q = torch.zeros(1, 4, 2, 8)
    ring_attention(q, q, q, group=group)


@on_ranks(2, env=ROUTES["pipelined"])
def test_lengths_that_are_not_those_of_the_layout(group: dist.ProcessGroup) -> None:
    q = torch.zeros(1, 4, 2, 8)
    for seq_len in (6, 10, -1):
        with pytest.raises(ValueError, match=f"seq_len={seq_len} in layout 'zigzag' gives rank"):
            ring_attention(q, q, q, group=group, seq_len=seq_len)


@on_ranks(2)
def test_unequal_lengths_need_seq_len(group: dist.ProcessGroup) -> None:
    """The ranks hold 3 and 2 tokens, and each takes twice its own for the whole."""
    q = shard_sequence(torch.zeros(1, 5, 2, 8), 1, group=group)
    with pytest.raises(RankMismatchError, match="unequally many tokens need seq_len"):
        ring_attention(q, q, q, group=group)
    with pytest.raises(RankMismatchError, match=r"an unshard_sequence, of .* unequally many tokens, pass seq_len"):
        unshard_sequence(q, 1, group=group)
    assert unshard_sequence(ring_attention(q, q, q, group=group, seq_len=5), 1, group=group, seq_len=5).shape[1] == 5
