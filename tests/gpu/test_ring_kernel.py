"""Ring attention in one launch, W ranks as threads on one GPU, each with its share of the SMs, against fp64.

Calls of a test follow each other without a reset or a barrier, with masks for which ranks look at different keys, at
times at none of others; ranks are late at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from benchmarks.gpu_ranks import prepare
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.attention.layout import TokenLayout
from fused_tp.attention.plan import ring_plan
from fused_tp.attention.ring_fused import keys_layout, kv_chunks
from fused_tp.attention.spec import AttentionMask
from fused_tp.triton_kernels.attention import ring_forward, ring_keys
from fused_tp.triton_kernels.attention.launch import Terms
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import assert_within_dtype_error, seeded

MILLISECOND = 2_000_000  # clock cycles of `torch.cuda._sleep`, about


@dataclass
class Call:
    """One call of one rank: how to launch it in a workspace, and what must come out."""

    launch: Callable[[Any], tuple[Tensor, Tensor]]
    wanted: tuple[Tensor, Tensor]  # fp64
    nbytes: int
    keys: int

    def check(self, results: tuple[Tensor, Tensor], name: str) -> None:
        (out, lse), (wanted_out, wanted_lse) = results, self.wanted
        # Probabilities are rounded to dtype, and the result once.
        assert_within_dtype_error(out, wanted_out, out.dtype, reduced_over=self.keys, roundings=3, name=name)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse.cpu(), atol=1e-3, rtol=1e-3)


def make_call(
    rank: int, world: int, number: int, seq: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Call:
    """Call number `number` of `rank`, which holds its part of a sequence of about `seq` tokens."""
    seq += number % 3
    how: dict[str, Any] = (
        {"causal": True},
        {"causal": True, "window": (seq // (4 * world), 0), "layout": "contiguous"},  # neighbours' keys only
        {},
        {"causal": True, "cu_seqlens": (0, seq // 3, seq // 3, seq), "layout": "contiguous"},
        {"causal": True, "window": (0, 0)},  # nobody's keys but its own
    )[number % 5]
    layout = how.pop("layout", "zigzag")
    plan = ring_plan(AttentionMask(seq, seq, **how), world, TokenLayout(layout))
    q, k, v = (
        seeded(2, seq, count, head_dim, dtype=dtype, seed=10 * number + i) for i, count in enumerate((heads, 2, 2))
    )
    seen, distance = dense_mask(seq, seq, **how)
    mine = torch.from_numpy(plan.queries[rank].indices)
    out, lse = dense_attention(q[:, mine].double(), k, v, seen[mine], distance[mine])
    here = [x[:, mine].to(device) for x in (q, k, v)]
    keys = keys_layout(plan, rank, *here[1:])
    terms = Terms(head_dim**-0.5)
    programs = 3
    if device.type == "cuda":
        # Two relays of each rank may take an SM each, as they come while others are still free.
        programs = max(1, torch.cuda.get_device_properties(device).multi_processor_count // world - 2)

    def launch(workspace: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = ring_forward.ring_forward(
            *here, kv_chunks(plan, rank), terms, keys, workspace=workspace, programs=programs
        )
        return result

    return Call(launch, (out, lse), keys.nbytes(world), seq)


def run_calls(calls: list[Call], workspace: Any, late: Callable[[], None], repeat: int = 1) -> list[Tensor]:
    """The results of all calls, of which every repetition must give the same bits; checked at the end."""
    rounds = []
    for _ in range(repeat):
        results = []
        for call in calls:
            late()
            results.append(call.launch(workspace))
        rounds.append(results)
    for number, (call, result) in enumerate(zip(calls, rounds[0], strict=True)):
        call.check(result, f"call {number}")
        for other in rounds[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, other[number], strict=True)), number
    assert workspace.expired() is None
    return [out for out, _ in rounds[0]]


def on_gpu(rank: LocalRank, dtype: torch.dtype, in_graph: bool) -> None:
    where = rank.rank, rank.world_size
    calls = [make_call(*where, number, 900, 8, 64, dtype, rank.device) for number in range(5)]
    draw = random.Random(rank.rank)
    repeat = 3

    def rehearse(workspace: Any) -> None:
        torch.cuda._sleep(1)  # a kernel too, and loaded when first launched
        kept = [call.launch(workspace) for _ in range(repeat) for call in calls]  # memory for all results
        rank.synchronize()
        del kept

    kind = ring_keys.RingWorkspace
    memory = prepare(rank, max(call.nbytes for call in calls), rehearse, kind=kind)

    def late() -> None:
        torch.cuda._sleep(int(draw.random() * 2 * MILLISECOND))

    plain = run_calls(calls, memory.workspace, late, repeat)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with rank.in_turn():
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                captured = [call.launch(memory.workspace)[0] for call in calls]
        for _ in range(3):
            late()
            graph.replay()
        rank.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
    assert memory.workspace.expired() is None


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float16)])
@pytest.mark.parametrize("groups", [1, 4])
def test_ranks_as_threads(monkeypatch: pytest.MonkeyPatch, world_size: int, dtype: torch.dtype, groups: int) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "400")  # of the whole test: kernels are compiled in it, and have their own
    monkeypatch.setattr(ring_keys, "LEAST_GROUP_BYTES", 1 if groups > 1 else 1 << 30)
    run_local(world_size, on_gpu, dtype, groups == 4, device="cuda")


def without_last(rank: LocalRank) -> str:
    """What the ranks say of one that does not come: a sentence, and NaN."""
    call = make_call(rank.rank, rank.world_size, 2, 900, 8, 64, torch.bfloat16, rank.device)
    kind = ring_keys.RingWorkspace
    memory = prepare(rank, call.nbytes, call.launch, timeout_seconds=0.5, kind=kind)
    if rank.rank == rank.world_size - 1:
        return ""
    out, lse = call.launch(memory.workspace)
    rank.synchronize()
    assert bool(out.isnan().all()) and bool(lse.isnan().all())
    return str(memory.workspace.expired())


@pytest.mark.gpu
def test_a_rank_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "400")
    said = run_local(3, without_last, device="cuda")
    assert all("ring_attention, call 1" in text and "rank 2 had not begun the call" in text for text in said[:2]), said
