"""Triton attention kernels in a ring of processes over CPU shared memory, interpreted: every mask and score.

Two ways: one kernel launch per step, which reads peers' memory in place; or one launch for all steps of a forward, with
keys pulled chunk by chunk, and a backward step by step over messages.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

import fused_tp
from fused_tp.core.errors import FusedTPError, PeerLostError, RankMismatchError
from fused_tp.core.group import resolve_group
from tests.attention_cases import DOCUMENTS, Case, case, check_all, results_of
from tests.faults import NOTICE_SECONDS
from tests.kernels.ranks import interpreted, interpreted_ranks
from tests.reference import seeded

WAYS = {
    "steps": {"FUSED_TP_ATTENTION": "triton", "FUSED_TP_SCHEDULE": "one_sided"},
    "one launch": {"FUSED_TP_SCHEDULE": "fused_kernel"},
}
FUSED = WAYS["one launch"]
SMALL = {"heads": 2, "kv_heads": 1}
SCORES = {"softcap": 3.0, "alibi": True, "sinks": True, "dropout_p": 0.2, "grad_lse": True}
BLIND = {"seq_len_kv": 9, "cu_seqlens": [0, 3, 7, 12], "cu_seqlens_kv": [0, 4, 4, 9]}
CASES: dict[str, Case] = {
    "every score": case(75, causal=True, window=(60, 0), **SCORES, **SMALL),
    "documents": case(37, causal=True, cu_seqlens=DOCUMENTS, layout="balanced", batch=2, heads=2),
    "queries that see nothing": case(12, **BLIND, heads=2),
    "empty steps": case(41, causal=True, window=(5, 0), layout="contiguous", **SMALL),
    "holes": case(24, window=(3, 2), **SMALL),
    "several tiles": case(140, causal=True, dtype=torch.bfloat16, head_dim=16, v_head_dim=12, **SMALL),
    "fewer tokens than ranks": case(2, heads=2, kv_heads=2),
}


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Split heads into as many groups, and keys into as many chunks, as if they were large."""
    from fused_tp.attention import ring_fused
    from fused_tp.triton_kernels.attention import ring_keys

    with mock.patch.object(ring_keys, "LEAST_GROUP_BYTES", 1), mock.patch.object(ring_fused, "_MAX_CHUNK_ROWS", 9):
        yield


def features(group: Any, way: str, names: list[str], small: bool) -> Any:
    with mock.patch.dict(os.environ, WAYS[way]), small_chunks() if small else contextlib.nullcontext():
        return results_of(group, [CASES[name] for name in names])


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "world_size", "names", "small"),
    [
        ("steps", 2, ["every score", "queries that see nothing", "several tiles"], False),
        ("steps", 3, ["documents"], False),
        ("steps", 4, ["empty steps"], False),
        ("one launch", 2, ["every score", "several tiles", "holes"], False),
        ("one launch", 3, ["every score", "documents", "queries that see nothing"], True),
        ("one launch", 4, ["empty steps", "documents", "fewer tokens than ranks"], True),
    ],
)
def test_features(way: str, world_size: int, names: list[str], small: bool) -> None:
    check_all([CASES[name] for name in names], interpreted_ranks(world_size, features, way, names, small, timeout=200))


# -- one launch -------------------------------------------------------------------------------------------------------


def ring_calls(group: Any, timeout_seconds: float) -> tuple[list[Any], Any]:
    """One call for each mask of the GPU tests, and a workspace for them."""
    from fused_tp.backends.symmetric_memory.symm_mem import allocate_cpu
    from fused_tp.selftest.kernel_calls import ring_call
    from fused_tp.triton_kernels.attention import ring_keys

    rank = SimpleNamespace(rank=group.rank(), world_size=group.size(), device=torch.device("cpu"), sms=5)
    calls = [ring_call(rank, "ring", (21 + seed % 3, 2, 8), torch.float32, seed) for seed in range(5)]
    buffer, handle = allocate_cpu(resolve_group(group), max(call.workspace_nbytes for call in calls))
    return calls, ring_keys.RingWorkspace(buffer, handle, timeout_seconds=timeout_seconds)


def launches(group: Any) -> list[str]:
    """Kernels that a repeated forward runs, after another op of the group."""
    from fused_tp.triton_kernels.comm import gather

    ran: list[str] = []
    run = gather.run_kernel

    def noted(launch: Any) -> None:
        ran.append(launch[0].fn.__name__)
        run(launch)

    q, k, v = (seeded(1, 9, heads, 8, dtype=torch.float32) for heads in (4, 2, 2))
    with mock.patch.dict(os.environ, FUSED):
        first = fused_tp.ring_attention(q, k, v, group=group, causal=True)
        fused_tp.all_gather_matmul(seeded(4, 8), seeded(3, 8), group=group)
        with mock.patch.object(gather, "run_kernel", noted):
            again = fused_tp.ring_attention(q, k, v, group=group, causal=True)
    assert torch.equal(first, again)
    return ran


@pytest.mark.full
def test_all_steps_are_one_launch() -> None:
    for ran in interpreted_ranks(3, launches):
        assert ran.count("ring_kernel") == 1 and ran[0] == "stage_kernel" and ran[-1] == "ring_kernel"


def untold(group: Any) -> tuple[str, bool]:
    """Error of a launch whose second chunk is never announced, and whether its results are all NaN."""
    from fused_tp.triton_kernels.attention import ring_keys

    calls, workspace = ring_calls(group, 1.0)
    relay = ring_keys.KeysPuller.relay_launch

    def silent(self: Any, before: Any, behind: Any) -> Any:
        return relay(self, None if before is not None and before.chunk == 1 else before, behind)

    dist.barrier(group)
    with mock.patch.object(ring_keys.KeysPuller, "relay_launch", silent):
        out, lse = calls[2].launch(workspace)
    return str(workspace.expired_wait()), bool(out.isnan().all() and lse.isnan().all())


@pytest.mark.full
def test_what_has_not_arrived_is_not_computed_with() -> None:
    for rank, (text, all_nan) in enumerate(interpreted_ranks(3, untold)):
        assert f"waited for tile 2 of rank {(rank - 2) % 3}" in text and all_nan


@interpreted(1)
def test_a_workspace_that_is_too_small_is_refused(group: Any) -> None:
    from benchmarks.local_ranks import LocalGroup
    from fused_tp.triton_kernels.attention import ring_keys

    small = ring_keys.RingWorkspace(*LocalGroup(1).rank(0).allocate(5000), timeout_seconds=1)
    with pytest.raises(ValueError, match="Create a larger one"):
        ring_calls(group, 1.0)[0][0].launch(small)


def explained(group: Any) -> list[str]:
    shapes = ((1, 8, 4, 16), (1, 8, 2, 16), (1, 8, 2, 16))
    wide = tuple((*shape[:3], 300) for shape in shapes)
    with mock.patch.dict(os.environ, FUSED):
        said = [str(fused_tp.explain("ring_attention", *these, group=group)) for these in (shapes, wide)]
        said.append(str(fused_tp.explain("ring_attention", *shapes, dtype=torch.float64, group=group)))
        q = torch.ones(1, 2, 1, 300)
        out = fused_tp.ring_attention(q, q, q, group=group)  # over messages, as `explain` says
        torch.testing.assert_close(out, q)
    with mock.patch.dict(os.environ, FUSED | {"FUSED_TP_ATTENTION": "torch-blocks"}):
        said.append(str(fused_tp.explain("ring_attention", *shapes, group=group)))
    return said


@pytest.mark.full
def test_explain_says_what_is_one_launch_and_what_goes_by_messages() -> None:
    for fits, wide, double, forced in interpreted_ranks(2, explained):
        assert "forward: fused_kernel over symmetric memory, because FUSED_TP_SCHEDULE=fused_kernel" in fits
        assert "backward: pipelined over gloo" in fits and "its backward runs step by step" in fits
        assert "each step: triton, because one launch of its kernel computes all steps" in fits
        assert "forward: pipelined over gloo" in wide and "head dims must be from 1 to 256" in wide
        assert "forward: one_sided over shm" in double
        assert "forward: pipelined over gloo" in forced and "torch-blocks selects other kernels" in forced


def own_group() -> Any:
    """Make a group of all of the pool's ranks, which the test may make unusable."""
    return dist.new_group(list(range(dist.get_world_size())))


def half_way(_: Any, place: str) -> list[str]:
    """Rank 0 raises while it prepares the launch, or between its first and last launches. Returns the kernels that it
    ran in that call, and the message of its next call."""
    from fused_tp.triton_kernels.attention import ring_forward
    from fused_tp.triton_kernels.comm import gather

    group = own_group()
    q, ran, run, launch = torch.ones(1, 4, 1, 8), [], gather.run_kernel, ring_forward._make_launch

    def failing(*args: Any) -> Any:
        if place == "arguments":
            raise MemoryError("no memory for 12 bytes")
        return launch(*args)

    def noted(one: Any) -> None:
        ran.append(one[0].fn.__name__)
        if ran[-1] == "ring_kernel":
            raise MemoryError("no memory for 12 bytes")
        run(one)

    with mock.patch.dict(os.environ, FUSED):
        fused_tp.ring_attention(q, q, q, group=group)
        if group.rank() == 0:
            with (
                mock.patch.object(ring_forward, "_make_launch", failing),
                mock.patch.object(gather, "run_kernel", noted),
                pytest.raises(MemoryError),
            ):
                fused_tp.ring_attention(q, q, q, group=group)
            with pytest.raises(FusedTPError) as raised:
                fused_tp.ring_attention(q, q, q, group=group)
            ran.append(str(raised.value))
        else:
            if place == "kernel":  # this call only waits for data that rank 0 has already sent
                fused_tp.ring_attention(q, q, q, group=group)
            begun = time.perf_counter()
            with pytest.raises(PeerLostError, match=r"waited for .* gave up: .*Rank 0 has aborted.*MemoryError"):
                fused_tp.ring_attention(q, q, q, group=group)
            assert time.perf_counter() - begun < NOTICE_SECONDS
    dist.barrier()
    dist.destroy_process_group(group)
    return ran


@pytest.mark.full
def test_a_rank_that_raises_half_way_gives_the_group_up() -> None:
    for place, launched in (("arguments", []), ("kernel", ["stage_kernel", "ring_kernel"])):
        *ran, said = interpreted_ranks(4, half_way, place)[0]
        assert [name for name in ran if name != "relay_kernel"] == launched, (
            "all that may raise comes before a launch that peers count on"
        )
        assert "unusable because an earlier call failed: ring_attention" in said and "MemoryError" in said


def of_two_minds(group: Any) -> tuple[str, str]:
    """Explanation if one rank asks for another provider, and error of FUSED_TP_CHECK=1 if ranks use different rings."""
    from fused_tp.attention.ring_messages import MessageRing

    q, other = torch.ones(1, 4, 1, 8), own_group()
    forced = {"FUSED_TP_ATTENTION": "torch-blocks"} if group.rank() == 1 else {}
    with mock.patch.dict(os.environ, FUSED | forced):
        torch.testing.assert_close(fused_tp.ring_attention(q, q, q, group=other), q)
        said = str(fused_tp.explain("ring_attention", *[q.shape] * 3, dtype=torch.float32, group=other))
    dist.destroy_process_group(other)

    module = import_module("fused_tp.ops.ring_attention")  # the module; the op has the same name
    real = module._select_ring

    def by_messages(*args: Any) -> Any:
        ring = real(*args)
        return MessageRing(ring._schedule.messages) if group.rank() == 1 else ring

    checked = FUSED | {"FUSED_TP_CHECK": "1"}
    with (
        mock.patch.dict(os.environ, checked),
        mock.patch.object(module, "_select_ring", by_messages),
        pytest.raises(RankMismatchError) as raised,
    ):
        fused_tp.ring_attention(q, q, q, group=group)
    return said, str(raised.value)


@pytest.mark.full
def test_ranks_take_the_same_ring() -> None:
    for rank, (said, mismatch) in enumerate(interpreted_ranks(4, of_two_minds)):
        assert "forward: pipelined over gloo" in said
        assert "rank 1: FUSED_TP_ATTENTION=torch-blocks selects other kernels" in said
        assert f"ring {'pipelined' if rank == 1 else 'fused_kernel'}" in mismatch
