"""Counts of CommDebugMode and FlopCounterMode for every op, as a Python call and as an op of torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor.debug  # an op counts only if this is imported by its first Python call
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

import fused_tp
from fused_tp.ops.op import all_ops
from tests.distributed.test_every_op import calls, outcome
from tests.workers import on_ranks

GATHER, SCATTER, SUM, SWAP = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"
# Op of test_every_op -> collectives, and flops in multiples of 2, of forward and backward together.
MATMUL = 4 * 8 * 6  # [4, 8] @ [8, 6]
GROUPED = 6 * 8 * 6  # rows of experts
RING = 2 * 4 * 8 * 8  # one matmul: heads, own queries, all keys, head_dim
EXPECTED: dict[str, tuple[dict[str, int], int]] = {
    "all_gather": ({GATHER: 1, SCATTER: 1}, 0),
    "all_gather_matmul": ({GATHER: 2, SCATTER: 1}, 3 * 2 * 2 * MATMUL),
    "all_gather_matmul float8": ({GATHER: 2, SCATTER: 1}, 3 * 2 * 2 * MATMUL),
    "column_parallel_matmul float8": ({SUM: 1}, 3 * MATMUL),
    "matmul_all_reduce float8": ({SUM: 1}, 3 * MATMUL),
    "matmul_reduce_scatter float8": ({SCATTER: 1, GATHER: 1, SUM: 1}, 3 * MATMUL),
    "all_gather_grouped_matmul": ({GATHER: 2, SCATTER: 1}, 3 * GROUPED),
    "column_parallel_grouped_matmul": ({SUM: 1}, 3 * GROUPED),
    "grouped_matmul_all_reduce": ({SUM: 1}, 3 * GROUPED),
    "grouped_matmul_reduce_scatter": ({SCATTER: 1, GATHER: 1}, 3 * GROUPED),
    "all_reduce": ({SUM: 1}, 0),
    "all_reduce_rms_norm": ({SUM: 1}, 0),
    "column_parallel_matmul": ({SUM: 1}, 3 * MATMUL),
    "context_parallel_attention": ({SWAP: 3}, 7 * RING),
    "context_parallel_decode": ({GATHER: 1}, 2 * 2 * 4 * 8),
    "copy_to_group": ({SUM: 1}, 0),
    "gather": ({GATHER: 1}, 0),
    "linear_cross_entropy": ({GATHER: 1, SUM: 1}, 4 * 4 * 8 * 5),
    "matmul_all_reduce": ({SUM: 1}, 3 * MATMUL),
    "matmul_all_reduce_rms_norm": ({SUM: 1}, 3 * MATMUL),
    "matmul_reduce_scatter": ({SCATTER: 1, GATHER: 1}, 3 * MATMUL),
    "reduce_scatter": ({SCATTER: 1, GATHER: 1}, 0),
    "ring_attention": ({SWAP: 3}, 7 * RING),
    "scatter": ({GATHER: 1}, 0),
    "shard_sequence": ({GATHER: 1}, 0),
    "ulysses_attention": ({SWAP: 4}, 7 * RING),
    "unshard_sequence": ({GATHER: 1}, 0),
    "vocab_parallel_cross_entropy": ({GATHER: 1}, 0),
}


@pytest.mark.parametrize("schedule", [None, "plain"])
@on_ranks(2, env=lambda schedule: {"FUSED_TP_SCHEDULE": schedule})
def test_modes_count_what_ops_send_and_compute(group: Any, schedule: str | None) -> None:
    for name, (fn, leaves) in calls(group).items():
        sends, flops = EXPECTED[name]
        with CommDebugMode() as comm:
            outcome(fn, leaves)
        found = {str(packet).rpartition(".")[2]: times for packet, times in comm.get_comm_counts().items()}
        assert found == sends, name
        with FlopCounterMode(display=False) as counter:
            outcome(fn, leaves)
        assert counter.get_total_flops() == 2 * flops, name


@on_ranks(2)
def test_modes_count_ops_of_the_library(group: Any) -> None:
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    name = fused_tp.core.group.resolve_group(group).name
    with CommDebugMode() as comm, FlopCounterMode(display=False) as counter:
        y = torch.ops.fused_tp.matmul_reduce_scatter(x, w, None, scatter_dim=0, group=name)
        y.sum().backward()
    functional = torch.ops.c10d_functional
    counted = {functional.reduce_scatter_tensor: 1, functional.all_gather_into_tensor: 1}
    assert comm.get_comm_counts() == counted
    assert counter.get_total_flops() == 3 * 2 * MATMUL
    assert set(comm.comm_module_counts["Global"]["backward"]) == {functional.all_gather_into_tensor}
    assert "matmul_reduce_scatter" in all_ops()
