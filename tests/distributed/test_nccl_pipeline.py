"""Pipelines over NCCL: every op and gradient, equal bits, real overlap. The libraries are doubles, the ranks real."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.runtime.errors import RankMismatchError
from fused_tp.runtime.group import resolve_group
from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules import nccl_pipeline, registry
from fused_tp.schedules.base import GatherMatmul
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.transport.base import sum_in_rank_order
from fused_tp.transport.nccl import gather_plan, scatter_plan
from tests.distributed.nccl_tools import nccl_ranks, public_ops_use, transport_of
from tests.distributed.test_tp_ops import all_cases, check, own_part
from tests.native.doubles.libraries import Stream, cuda_knobs, load_doubles
from tests.reference import assert_within_dtype_error, matmul64, seeded

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
]


# -- the public ops ----------------------------------------------------------------------------------------------------


def public_ops_case(group: Any, dtype_name: str, chunks: int | None, one_shot_bytes: int) -> None:
    with public_ops_use(group, chunks, one_shot_bytes):
        assert isinstance(_selected(group), NcclPipeline)
        all_cases(group, dtype_name, strided=dtype_name != "float64")


def _selected(group: Any) -> Any:
    described = resolve_group(group)
    return registry.select_schedule("matmul_all_reduce", described, torch.float32, torch.device("cpu"), 4, None, 4)


@pytest.mark.parametrize(
    ("world_size", "dtype_name", "chunks", "one_shot_bytes"),
    [
        (2, "float64", 1, 0),
        (2, "bfloat16", 3, 0),
        (3, "float64", 2, 0),
        (3, "float32", 5, 0),
        (4, "float64", None, 128 * 1024),
        (4, "bfloat16", 4, 0),
        (4, "float16", 2, 0),
    ],
)
def test_forward_and_gradients(world_size: int, dtype_name: str, chunks: int | None, one_shot_bytes: int) -> None:
    nccl_ranks(world_size, public_ops_case, dtype_name, chunks, one_shot_bytes)


def ring_attention_case(group: Any) -> None:
    """The ring by messages, over this transport."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = shard_sizes(14, world_size)
    q, k, v = (seeded(1, 14, 2, 8, dtype=torch.float64, seed=i) for i in (1, 2, 3))
    wanted = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    d = seeded(1, 14, 2, 8, dtype=torch.float64, seed=4)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves)).transpose(1, 2)
    whole.backward(d)
    start = sum(sizes[:rank])

    def own(t: Tensor) -> Tensor:
        return t[:, start : start + sizes[rank]]

    calls = transport_of(group).calls
    with public_ops_use(group, None):
        shards = [own(t.detach()).clone().requires_grad_() for t in (q, k, v)]
        out = fused_tp.ring_attention(*shards, group=group, layout="contiguous", seq_len=14)
        out.backward(own(d))
    assert transport_of(group).calls > calls
    torch.testing.assert_close(out, own(wanted))
    for shard, leaf in zip(shards, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(shard.grad, own(leaf.grad))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_attention(world_size: int) -> None:
    nccl_ranks(world_size, ring_attention_case)


# -- the schedule ------------------------------------------------------------------------------------------------------


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def schedule_case(group: Any) -> None:
    """What the public ops do not reach: any number of chunks, sizes that make empty shards and empty pieces, K = 0."""
    transport = transport_of(group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    for chunks in (1, 2, 3, 4, 5, 16):
        schedule = NcclPipeline(transport, chunks)
        for rows, k, n in ((0, 3, 2), (1, 3, 2), (world_size + 1, 0, 3), (5, 4, 0), (11, 3, 5), (8 * world_size, 2, 3)):
            x = seeded(rows, world_size * k, dtype=torch.float64, seed=rows)
            w = seeded(n, world_size * k, dtype=torch.float64, seed=n)
            b = seeded(n, dtype=torch.float64, seed=3)
            x_part, w_part = (own_part(t, 1, group).contiguous() for t in (x, w))
            name = f"chunks={chunks} {[rows, k, n]}"
            wanted = matmul64(x, w) + b
            done: list[int] = []
            y = schedule.matmul_all_reduce([(x_part, w_part)], b, meanwhile=lambda: done.append(1))
            check(f"all_reduce {name}", y, wanted, torch.float64, world_size * k)
            y = schedule.matmul_reduce_scatter(
                [(x_part, w_part), (2 * x_part, w_part)],
                b,
                scatter_dim=0,
                meanwhile=lambda: done.append(2),
            )
            check(f"reduce_scatter {name}", y, own_part(3 * wanted - 2 * b, 0, group), torch.float64, world_size * k)
            assert done == [1, 2]
            outs, gathered = schedule.all_gather_matmul(
                GatherMatmul(own_part(x, 0, group), [w, w[:1]], [b, None], 0, rows, return_gathered=True)
            )
            assert gathered is not None and torch.equal(gathered, x)
            check(f"gather {name}", outs[0], wanted, torch.float64, world_size * k)
            check(f"gather {name}, second weight", outs[1], matmul64(x, w[:1]), torch.float64, world_size * k)
    assert rank == transport.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_number_of_chunks(world_size: int) -> None:
    nccl_ranks(world_size, schedule_case)


def test_chunks_suit_the_size() -> None:
    transport = mock.Mock(rank=0, world_size=2)
    assert [NcclPipeline(transport)._chunks(n << 20) for n in (0, 1, 4, 9, 1000)] == [1, 1, 1, 2, 8]
    assert NcclPipeline(transport, 3)._chunks(1 << 30) == 3
    with pytest.raises(ValueError, match="chunks is 0"):
        NcclPipeline(transport, 0)


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def equal_bits_case(group: Any, dtype_name: str) -> list[Tensor]:
    """Sums in rank order, rounded once, whatever the schedule cuts; the same bits everywhere."""
    dtype = getattr(torch, dtype_name)
    transport = transport_of(group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    terms = torch.stack([seeded(7, 9, dtype=dtype, seed=100 + r) for r in range(world_size)])
    bias = seeded(9, dtype=dtype, seed=5)
    eye = torch.eye(9, dtype=dtype)
    results = []
    for chunks in (1, 2, 7):
        schedule = NcclPipeline(transport, chunks)
        y = schedule.matmul_all_reduce([(terms[rank], eye)], bias)
        assert torch.equal(y, sum_in_rank_order(terms, bias))
        shard = schedule.matmul_reduce_scatter([(terms[rank], eye)], bias, scatter_dim=0)
        assert torch.equal(shard, own_part(sum_in_rank_order(terms, bias), 0, group))
        results.append(y)
    assert torch.equal(schedule.all_reduce(terms[rank]), sum_in_rank_order(terms))
    for dim in (0, 1):
        assert torch.equal(
            schedule.reduce_scatter(terms[rank], scatter_dim=dim), own_part(sum_in_rank_order(terms), dim, group)
        )
        gathered = schedule.all_gather(own_part(terms[0], dim, group), gather_dim=dim, gather_size=terms.shape[dim + 1])
        assert torch.equal(gathered.wait(), terms[0])
    return results


@pytest.mark.parametrize(("world_size", "dtype_name"), [(2, "float32"), (3, "bfloat16"), (4, "float16")])
def test_equal_bits_on_all_ranks(world_size: int, dtype_name: str) -> None:
    first, *others = nccl_ranks(world_size, equal_bits_case, dtype_name)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def many_calls_case(group: Any) -> None:
    """Ops of every kind, one after the other without a pause, on ranks that dawdle here and there."""
    transport = transport_of(group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    chance, common = random.Random(rank), random.Random(7)
    product = nccl_pipeline.sum_of_products

    def dawdling(*args: Any, **keywords: Any) -> Tensor:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)
        return product(*args, **keywords)

    with mock.patch.object(nccl_pipeline, "sum_of_products", dawdling):
        for call in range(50):
            schedule = NcclPipeline(transport, common.randint(1, 5))
            rows, k, n = common.randint(1, 20), common.randint(1, 6), common.randint(1, 40)
            x = seeded(rows, world_size * k, dtype=torch.float64, seed=call)
            w = seeded(n, world_size * k, dtype=torch.float64, seed=call + 1)
            x_part, w_part = own_part(x, 1, group).contiguous(), own_part(w, 1, group).contiguous()
            kind = common.choice(["gather", "scatter", "reduce"])
            if kind == "gather":
                (y,), _ = schedule.all_gather_matmul(GatherMatmul(own_part(x, 0, group), [w], [None], 0, rows))
                wanted = matmul64(x, w)
            elif kind == "scatter":
                y = schedule.matmul_reduce_scatter([(x_part, w_part)], None, scatter_dim=0)
                wanted = own_part(matmul64(x, w), 0, group)
            else:
                y, wanted = schedule.matmul_all_reduce([(x_part, w_part)], None), matmul64(x, w)
            assert_within_dtype_error(y, wanted, torch.float64, reduced_over=world_size * k, name=f"{kind} {call}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_calls_in_a_row(world_size: int) -> None:
    nccl_ranks(world_size, many_calls_case)


def two_groups_case(group: Any) -> None:
    """All ranks as one group and as two pairs: ops of both are under way at once, and finished the other way round."""
    rank = dist.get_rank(group)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    whole, half = NcclPipeline(transport_of(group), 2), NcclPipeline(transport_of(pair), 3)
    for call in range(5):
        terms = [seeded(6, 8, dtype=torch.float64, seed=10 * call + r) for r in range(4)]
        first = whole.all_gather(terms[rank], gather_dim=0, gather_size=None)
        second = half.all_gather(terms[rank], gather_dim=1, gather_size=None)
        y = half.matmul_all_reduce([(terms[rank], torch.eye(8, dtype=torch.float64))], None)
        mine = [terms[r] for r in ((0, 1), (2, 3))[rank // 2]]
        assert torch.equal(second.wait(), torch.cat(mine, 1))
        assert torch.equal(first.wait(), torch.cat(terms, 0))
        torch.testing.assert_close(y, mine[0] + mine[1])


def test_two_groups_at_once() -> None:
    nccl_ranks(4, two_groups_case)


def movements_case(group: Any) -> None:
    """What a transport has besides: shift, all_to_all with sizes that differ, the maximum."""
    transport = transport_of(group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    blocks = [[seeded((3 * s + 2 * d) % 5, 3, seed=10 * s + d) for d in range(world_size)] for s in range(world_size)]
    sizes = [[len(block) for block in row] for row in blocks]
    moved = transport.all_to_all(
        "all_to_all", torch.cat(blocks[rank]), sizes[rank], [sizes[s][rank] for s in range(world_size)]
    )
    assert torch.equal(moved.wait(), torch.cat([blocks[s][rank] for s in range(world_size)]))
    for step in range(1, world_size):
        out = torch.empty(rank, 2)
        source = (rank - step) % world_size
        target = (rank + step) % world_size
        arriving = transport.shift("shift", torch.full((target, 2), float(rank)), out, step)
        assert torch.equal(arriving.wait(), torch.full((rank, 2), float(source)))
    assert transport.all_reduce_max("max", torch.tensor([float(rank), -float(rank)])).tolist() == [world_size - 1, 0.0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_movements(world_size: int) -> None:
    nccl_ranks(world_size, movements_case)


def mismatch_case(group: Any) -> str:
    schedule = NcclPipeline(transport_of(group), 2)
    with pytest.raises(RankMismatchError) as raised:
        schedule.matmul_all_reduce([(torch.ones(2 + dist.get_rank(group), 3), torch.ones(4, 3))], None)
    return str(raised.value)


def test_ranks_that_disagree_are_told() -> None:
    first, second = nccl_ranks(2, mismatch_case, env={"FUSED_TP_CHECK": "1"})
    assert first == second and "[2, 4]" in first and "[3, 4]" in first


# -- overlap -----------------------------------------------------------------------------------------------------------


@contextmanager
def stalled_until(multiplied: int) -> Iterator[None]:
    """Nothing moves before that many matmuls have run: whoever waits for a movement before them waits in vain."""
    streams, product, done = cuda_knobs(), nccl_pipeline.sum_of_products, 0

    def counting(*args: Any, **keywords: Any) -> Tensor:
        nonlocal done
        y = product(*args, **keywords)
        done += 1
        if done == multiplied:
            streams.cuda_double_stall(0)
        return y

    streams.cuda_double_stall(1)
    try:
        with mock.patch.object(nccl_pipeline, "sum_of_products", counting):
            yield
    finally:
        streams.cuda_double_stall(0)
    assert done >= multiplied


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def overlap_case(group: Any) -> None:
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    transport = transport_of(group)
    schedule = NcclPipeline(transport, world_size - 1)
    x, w = seeded(12, 4, seed=1), seeded(5, 4, seed=2)
    with stalled_until(1):  # the own shard
        (y,), _ = schedule.all_gather_matmul(GatherMatmul(own_part(x, 0, group), [w], [None], 0, 12))
    torch.testing.assert_close(y, x @ w.t())
    with stalled_until(world_size):  # the blocks of all owners
        done: list[bool] = []
        y = schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0, meanwhile=lambda: done.append(True))
    torch.testing.assert_close(y, own_part(world_size * (x @ w.t()), 0, group))
    with stalled_until(2):  # the chunk after the first
        y = NcclPipeline(transport, 2).matmul_all_reduce([(x, w)], None)
    torch.testing.assert_close(y, world_size * (x @ w.t()))
    assert rank == transport.rank and done == [True]


@pytest.mark.parametrize("world_size", [2, 4])
def test_matmuls_run_while_nothing_moves(world_size: int) -> None:
    nccl_ranks(world_size, overlap_case, env={"FUSED_TP_TIMEOUT": "5"})


def graph_case(group: Any) -> None:
    """What a CUDA graph of a GPU would hold: replayed, it moves what is there by then."""
    transport, (driver, _), knobs = transport_of(group), load_doubles(), cuda_knobs()
    core, communicator = importlib.import_module("fused_tp._core"), transport.communicator
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts, columns = (3, 2, 0, 4)[:world_size], 5
    own, gathered = torch.zeros(counts[rank], columns), torch.zeros(sum(counts), columns)
    partial, terms = torch.zeros(sum(counts), columns), torch.zeros(world_size, counts[rank], columns)
    stream = Stream()
    knobs.cuda_double_begin_capture(stream.handle)
    plan = gather_plan(counts, rank, 4)
    gather = core.GatherPipeline(
        communicator, plan.native, counts, 4 * columns, own.data_ptr(), gathered.data_ptr(), stream.handle
    )
    for i in range(len(gather)):
        gather.wait(i, stream.handle)
    plan = scatter_plan(counts, rank, 4)
    scatter = core.ScatterPipeline(
        communicator, plan.native, counts, 4 * columns, partial.data_ptr(), False, terms.data_ptr()
    )
    for i in range(len(plan.ranges)):
        scatter.send(stream.handle)
        scatter.wait(i, stream.handle)
    graph = knobs.cuda_double_end_capture(stream.handle, communicator.stream)
    assert gathered.abs().max() == 0 and gather.ended() and scatter.ended()
    for replay in range(1, 4):
        own.fill_(10.0 * replay + rank)
        partial.fill_(100.0 * replay + rank)
        knobs.cuda_double_replay(graph, stream.handle)
        assert driver.synchronize(communicator.device, stream.handle, 10)
        for peer in range(world_size):
            rows = gathered[sum(counts[:peer]) :][: counts[peer]]
            assert peer == rank or torch.equal(rows, torch.full_like(rows, 10.0 * replay + peer))
            assert peer == rank or torch.equal(terms[peer], torch.full_like(terms[peer], 100.0 * replay + peer))
    knobs.cuda_double_free_graph(graph)
    torch.testing.assert_close(NcclPipeline(transport).all_reduce(torch.ones(3)), torch.full((3,), float(world_size)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_pipelines_can_be_captured(world_size: int) -> None:
    nccl_ranks(world_size, graph_case)


def spans_case(group: Any) -> list[str]:
    schedule = NcclPipeline(transport_of(group), 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        schedule.matmul_reduce_scatter([(torch.ones(8, 3), torch.ones(4, 3))], None, scatter_dim=0)
    return [str(event.name) for event in profile.events()]


def test_chunks_have_ranges_for_profilers() -> None:
    for names in nccl_ranks(2, spans_case):
        assert {f"chunk {i} of 4" in name for i in (1, 4) for name in names} == {True, False}
        assert any(name.startswith("own rows [4, 4]") and "nccl_pipeline" in name for name in names)
