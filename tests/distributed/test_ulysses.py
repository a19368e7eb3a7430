"""Attention sharded by heads, alone and inside a ring, on real ranks: every mask and score against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fused_tp.attention.layout import TokenLayout
from fused_tp.ops.context_parallel_attention import context_parallel_attention
from fused_tp.ops.ring_attention import ring_attention
from fused_tp.ops.sequence import sequence_positions, shard_sequence
from fused_tp.ops.ulysses_attention import ulysses_attention
from tests.attention_cases import (
    DOCUMENTS,
    FEATURES,
    ROUTES,
    Case,
    Op,
    assert_same_bits,
    case,
    check_all,
    results_of,
    run,
    sent,
)
from tests.distributed.schedule_cases import run_variant
from tests.reference import refuses, seeded
from tests.workers import device_mesh, on_ranks, run_ranks

BOTH_ROUTES = pytest.mark.parametrize("route", ["one_sided", "pipelined"])
ALL = list(FEATURES.values())


# -- heads alone ------------------------------------------------------------------------------------------------------

HEADS: list[Case] = [
    {"heads": 3, "kv_heads": 1, "dtype": torch.bfloat16},  # one key head for all
    {"heads": 6, "kv_heads": 2, "cu_seqlens": DOCUMENTS, "layout": "balanced"},  # rank 1 of 3 reads a half of each
    {"heads": 12, "kv_heads": 4, "head_dim": 4, "v_head_dim": 6},  # rank 0 of 3 reads one and a third of another
    {"heads": 12, "kv_heads": 6, "dtype": torch.float64},
    {"heads": 3, "kv_heads": 3, "layout": "contiguous"},
    {"heads": 6, "kv_heads": 2, "alibi": True, "sinks": True, "dropout_p": 0.2, "grad_lse": True, "seq_len_kv": 17},
]
OVER_THREE = [case(37, causal=True, batch=2, **heads) for heads in HEADS]
# Fewer tokens than ranks, fewer than chunks, and primes.
SHORT = [case(n, causal=True, layout=one, heads=6) for n in (2, 3, 5, 13) for one in ("zigzag", "contiguous")]


@pytest.mark.parametrize(("world_size", "route"), [(2, "plain"), (2, "one_sided"), (4, "one_sided"), (4, "pipelined")])
def test_features(world_size: int, route: str) -> None:
    run(world_size, ALL, route, ulysses_attention)


def on_three_ranks(group: dist.ProcessGroup, most_pieces: int) -> list[list[Tensor | None]]:
    q = torch.zeros(2, 0, 3, 8, requires_grad=True)
    out, lse = ulysses_attention(q, q[:, :, :1], q[:, :, :1], group=group, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 3, 0)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_tp.attention.all_to_all._MAX_RANGES", most_pieces)
        return results_of(group, [*OVER_THREE, *SHORT], ulysses_attention)


@BOTH_ROUTES
@pytest.mark.parametrize("most_pieces", [1, 16])  # rows move by index, or piece by piece
def test_shared_key_heads_and_few_tokens(route: str, most_pieces: int) -> None:
    check_all([*OVER_THREE, *SHORT], run_ranks(3, on_three_ranks, most_pieces, env=ROUTES[route]))


def test_same_bits_on_every_route() -> None:
    cases = [FEATURES["all scores"], case(37, causal=True, heads=8, kv_heads=1, batch=2, dtype=torch.bfloat16)]
    first, other = (
        run_ranks(4, results_of, cases, ulysses_attention, env=ROUTES[name]) for name in ("one_sided", "pipelined")
    )
    assert_same_bits(first, other)


def sent_without_lse(group: dist.ProcessGroup, cases: list[Case]) -> list[list[int]]:
    def run(*tensors: Tensor, return_lse: bool, **keywords: Any) -> tuple[Tensor, Tensor]:
        out = ulysses_attention(*tensors, **keywords)
        return out, out.new_zeros(out.shape[0], out.shape[2], out.shape[1])

    return sent(group, cases, run)


def test_every_element_travels_once_to_who_needs_it() -> None:
    one = case(16, heads=4, kv_heads=2, head_dim=8, v_head_dim=8)
    head = 4 * 8 * 4  # of a rank's 4 tokens, in fp32
    # A rank has one query head, and half of the ranks read each key head.
    q, k, v, out = 3 * head, 3 * head, 3 * head, 3 * head
    wanted = [[q + k + v, out, out, q + k + v]]
    assert run_ranks(4, sent_without_lse, [one], env=ROUTES["pipelined"]) == [wanted] * 4


# -- under autograd and compilers -------------------------------------------------------------------------------------


def block(x: Tensor, weight: Tensor, run: Op, seq_len: int, how: dict[str, Any]) -> Tensor:
    """Attention block on a shard of the tokens, with positions."""
    positions = sequence_positions(seq_len, **{name: how[name] for name in ("group", "layout", "cu_seqlens")})
    x = x + positions.to(x.dtype)[None, :, None].sin()
    q, k, v = (x @ weight).unflatten(-1, (6, 8)).split([4, 1, 1], dim=2)
    out, lse = run(q, k, v, causal=True, seq_len=seq_len, return_lse=True, **how)
    return out + lse.transpose(1, 2).unsqueeze(-1).exp()


@pytest.mark.parametrize(
    ("op", "world_size", "lengths"),
    [
        (ring_attention, 2, (11, 12)),
        (ulysses_attention, 2, (11, 14)),
        pytest.param(context_parallel_attention, 4, (11,), marks=pytest.mark.full),
    ],
)
@on_ranks(lambda world_size: world_size, env=ROUTES["pipelined"])
def test_compile_and_activation_checkpointing(
    group: dist.ProcessGroup, op: Op, world_size: int, lengths: tuple[int, ...]
) -> None:
    """Compilation for the second length covers all further lengths."""
    torch._dynamo.reset()
    run = by_mesh(group) if op is context_parallel_attention else op
    fn = torch.compile(block, fullgraph=True, backend="aot_eager")
    weight = seeded(16, 48, seed=1, scale=0.25).requires_grad_()
    for seq_len in lengths:
        how = {"group": group, "layout": "balanced", "cu_seqlens": torch.tensor([0, 5, seq_len])}
        x = shard_sequence(seeded(2, seq_len, 16), 1, **how).requires_grad_()
        given = (x, weight, run, seq_len, how)
        wanted = block(*given)
        grads = torch.autograd.grad(wanted.sum(), (x, weight))
        for got in (fn(*given), checkpoint(block, *given, use_reentrant=False)):
            torch.testing.assert_close([got, *torch.autograd.grad(got.sum(), (x, weight))], [wanted, *grads])


# -- NCCL and the device kernel, in their CPU builds ------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "cases"),
    [
        (
            "nccl_pipeline",
            [case(13, causal=True, batch=2, kv_heads=1, dtype=torch.bfloat16, grad_lse=True), case(16)],
        ),
        (
            "two_shot",
            [
                case(16, causal=True, layout="contiguous", batch=2),
                case(16, causal=True, batch=2, grad_lse=True),  # must be sorted on arrival
                case(16, causal=True, kv_heads=1),  # a key head shared by two ranks is sent in messages
                case(15, causal=True, dtype=torch.float64),  # uneven shards are sent in messages
            ],
        ),
    ],
)
def test_same_bits_as_by_messages(schedule: str, cases: list[Case]) -> None:
    results = run_variant(schedule, 2, results_of, cases, ulysses_attention)
    assert_same_bits(results, run_ranks(2, results_of, cases, ulysses_attention, env=ROUTES["pipelined"]))


# -- a ring around it -------------------------------------------------------------------------------------------------


def by_mesh(group: dist.ProcessGroup, names: Sequence[str] = ("ring", "heads"), **dims: Any) -> Op:
    """context_parallel_attention over a 2 x 2 mesh with dims of these names, or over all of `group`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(names)) if names else device_mesh(group)

    def run(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup, **keywords: Any) -> Any:
        return context_parallel_attention(q, k, v, mesh=mesh, **dims, **keywords)

    return run


def on_mesh(group: dist.ProcessGroup, cases: list[Case], names: Sequence[str], dims: dict[str, Any]) -> Any:
    return results_of(group, cases, by_mesh(group, names, **dims))


CROSS = [one for name, one in FEATURES.items() if "cross" in name or "documents" in name or "all" in name]
CROSS.append(case(37, causal=True, kv_heads=1, dtype=torch.bfloat16))
FLAT = [FEATURES["all scores"]]


@pytest.mark.parametrize(
    ("world_size", "cases", "route", "names", "dims"),
    [
        (4, ALL, "one_sided", ("ring", "heads"), {}),
        (4, CROSS, "plain", ("heads", "ring"), {"ulysses_dim": "heads"}),
        (2, FLAT, "one_sided", (), {"ulysses_dim": -1}),
        (2, FLAT, "one_sided", (), {}),
    ],
    ids=["2x2", "heads first", "flat heads", "flat ring"],
)
def test_features_over_a_mesh(world_size: int, cases: list[Case], route: str, names: Any, dims: Any) -> None:
    check_all(cases, run_ranks(world_size, on_mesh, cases, names, dims, env=ROUTES[route]))


@pytest.mark.parametrize("strided", [False, True])
def test_causal_work_is_as_equal_as_that_of_zigzag_over_the_ring_alone(strided: bool) -> None:
    work = [int((tokens.indices + 1).sum()) for tokens in TokenLayout("zigzag", 4, strided).tokens(800, 3)]
    assert max(work) <= 1.01 * sum(work) / 3


# -- rejected arguments -----------------------------------------------------------------------------------------------


@on_ranks(4, env=ROUTES["one_sided"])
def test_bad_arguments(group: dist.ProcessGroup) -> None:
    q = torch.zeros(1, 4, 6, 8)
    k = torch.zeros(1, 4, 2, 8)
    said = "q has 6 heads, which must be a multiple of the 4 ranks. Use 1, 2, 3, 6 ranks"
    refuses(ValueError, said, ulysses_attention, q, k, k, group=group)
    q, k = q[:, :, :4], k[:, :, :2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    given = {"q": q, "k": k, "v": k}
    for op, where in ((ulysses_attention, {"group": group}), (context_parallel_attention, {"mesh": mesh})):
        for wrong, message in (
            ({"cu_seqlens": torch.tensor([0, 3])}, "must end with 16, the number of tokens"),
            ({"sinks": torch.zeros(1)}, r"sinks has shape \(1,\); it must be \[4\]"),
        ):
            refuses(ValueError, message, op, **given, **where, **wrong)
    bad_dims: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"ulysses_dim": "cp"}, ValueError, r"ulysses_dim is 'cp'; the dims of mesh are \('ring', 'heads'\)"),
        ({"ring_dim": 2}, ValueError, "ring_dim=2 is out of range"),
        ({"ulysses_dim": 0, "ring_dim": "ring"}, ValueError, "are the same dim"),
        ({"ring_dim": 1.0}, TypeError, "ring_dim must be the name or index"),
        ({"mesh": group}, TypeError, "mesh must be a DeviceMesh, not ProcessGroup; use ring_att"),
        ({"mesh": init_device_mesh("cpu", (1, 2, 2))}, ValueError, "mesh has 3 dims"),
    ]
    for arguments, kind, message in bad_dims:
        refuses(kind, message, context_parallel_attention, **given, **{"mesh": mesh, **arguments})
    assert ulysses_attention(q, k, k, group=group).shape == q.shape  # nothing was sent before, so the ranks are in step
