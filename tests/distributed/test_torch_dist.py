"""Messages over torch.distributed: waits for survivors, works that end late, another default device."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends.messages.torch_dist import TorchDist, torch_dist
from fused_tp.core.errors import FusedTPError, PeerLostError
from fused_tp.core.gloo import close_connections, closed_peers, copy_to_host
from fused_tp.core.group import resolve_group
from tests.beside import beside
from tests.workers import Outcome, fresh_ranks, run_ranks


class LateWork:
    """Work that ends just after a slice of the wait has timed out, successfully or with `error`."""

    def __init__(self, error: str = "") -> None:
        self._ends = iter(["Operation timed out!", error])

    def wait(self, timeout: timedelta) -> None:
        if error := next(self._ends):
            raise RuntimeError(error)

    def is_completed(self) -> bool:
        return True


def end_after_a_slice(group: Any) -> None:
    transport = TorchDist(resolve_group(group), "cpu")
    transport._start_transfer("late", LateWork).wait()
    assert transport.fatal_error is None
    with pytest.raises(FusedTPError, match=r"late .* failed: its own error"):
        transport._start_transfer("late", lambda: LateWork("its own error")).wait()


def test_what_ends_just_after_a_slice_has_not_failed() -> None:
    run_ranks(1, end_after_a_slice)


def move_with_another_default_device(group: Any) -> int:
    torch.set_default_device("meta")
    transport = torch_dist(resolve_group(group), "cpu")
    x = torch.ones(4, device="cpu")
    transport.check("all_gather", (4,), x.dtype, x.device)
    assert transport.all_gather("all_gather", x).wait().sum().item() == 8.0
    lost = closed_peers(group)
    assert lost == [], lost
    transport.all_gather("all_gather", x).wait()
    if dist.get_rank(group) == 0:
        close_connections(group)
        return -1
    deadline = time.perf_counter() + 10.0
    while not (lost := closed_peers(group)) and time.perf_counter() < deadline:
        time.sleep(0.02)
    return lost[0]


@beside(lambda: fresh_ranks(2, move_with_another_default_device, env={"FUSED_TP_CHECK": "1"}))
def test_the_default_device_is_of_no_matter(outcome: list[Outcome]) -> None:
    assert outcome[1].unwrap() == 0


def shift_between_two_of_three(group: Any) -> list[int]:
    """Sizes of the groups that create a communicator before a shift over torch's NCCL, here emulated by gloo."""
    with mock.patch("fused_tp.backends.messages.torch_dist.backend_for_device", lambda group, device_type: "nccl"):
        transport, rank = TorchDist(resolve_group(group), "cpu"), dist.get_rank(group)
    met, real = [], dist.all_reduce

    def all_reduce(x: Tensor, **keywords: Any) -> Any:
        met.append(dist.get_world_size(keywords["group"]))
        return real(x, **keywords)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        for _ in range(2):
            x, out = torch.full((3 if rank == 0 else 0,), 7.0), torch.empty(3 if rank == 1 else 0)
            assert transport.shift("shift", x, out, 1).wait().eq(7.0).all()
    return met


def test_all_ranks_make_the_communicator_of_nccl_before_some_of_them_use_it() -> None:
    assert run_ranks(3, shift_between_two_of_three) == [[3]] * 3


def shift_by_way_of_the_host(group: Any) -> None:
    """Messages of GPU tensors, which gloo cannot send; here CPU tensors take the same copies through the host."""
    transport = TorchDist(resolve_group(group), "cuda", "gloo")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    assert transport._stages_on_host and not TorchDist(resolve_group(group), "cpu")._stages_on_host

    def of(source: int, number: int, dtype: torch.dtype) -> Tensor:
        return (torch.arange(6) + 10 * (source % world) + 100 * number).to(dtype).view(3, 2)

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        # Two messages in flight, in both directions: each sends the values at the call, and arrives at the wait.
        sent = [of(rank, number, dtype) for number in range(2)]
        outs = [torch.full((3, 2), -1.0).to(dtype) for _ in range(2)]
        untouched = outs[0].clone()
        moving = [transport.shift("shift", x, out, step) for x, out, step in zip(sent, outs, (1, -1), strict=True)]
        for x in sent:
            x.zero_()
        dist.barrier(group)
        time.sleep(0.05)
        assert torch.equal(outs[0], untouched) and torch.equal(outs[1], untouched)
        for number, step in ((1, -1), (0, 1)):
            assert moving[number].wait() is outs[number]
            assert torch.equal(outs[number], of(rank - step, number, dtype))
    # In place, and with empty tensors on some ranks.
    x = of(rank, 0, torch.float32)
    assert torch.equal(transport.shift("shift", x, x, 1).wait(), of(rank - 1, 0, torch.float32))
    x, out = torch.full((3 if rank == 0 else 0,), 7.0), torch.empty(3 if rank == 1 else 0)
    assert transport.shift("shift", x, out, 1).wait().eq(7.0).all()


@pytest.mark.parametrize("world", [2, 3])
def test_messages_of_a_gpu_over_gloo_go_by_way_of_the_host(world: int) -> None:
    run_ranks(world, shift_by_way_of_the_host)


def ring_by_way_of_the_host(group: Any, by_host: bool) -> list[Tensor]:
    """Run ring attention by messages, forward and backward; return out and gradients."""
    transport = torch_dist(resolve_group(group), "cpu")
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    q, k, v = (torch.randn(2, 6, 4, 8, requires_grad=True) for _ in range(3))
    moved: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        moved.append(x)
        return copy_to_host(x)

    with (
        mock.patch.object(transport, "_stages_on_host", by_host),
        mock.patch("fused_tp.backends.messages.torch_dist.copy_to_host", note),
        mock.patch.dict("os.environ", {"FUSED_TP_SCHEDULE": "pipelined"}),
    ):
        out = fused_tp.ring_attention(q, k, v, group=group, causal=True)
        forward = len(moved)
        out.backward(torch.ones_like(out))
    assert (forward > 0) == (len(moved) > forward) == by_host
    return [t.detach() for t in (out, q.grad, k.grad, v.grad) if t is not None]


def test_rings_of_a_gpu_over_gloo_go_by_way_of_the_host() -> None:
    for staged, direct in zip(
        *(run_ranks(3, ring_by_way_of_the_host, by_host) for by_host in (True, False)), strict=True
    ):
        assert all(map(torch.equal, staged, direct))


def wait_for_a_survivor(group: Any) -> tuple[str, float]:
    """Rank 0 waits for a message of rank 2, which dies; rank 1 waits for rank 0, which is alive and gives up."""
    rank = dist.get_rank(group)
    transport = torch_dist(resolve_group(group), "cpu")
    x, out = torch.ones(4), torch.empty(4)
    transport.shift("shift", x, out, 1).wait()
    assert closed_peers(group) == []
    begun = time.perf_counter()
    if rank == 2:
        time.sleep(0.3)  # the others are waiting for it, most likely
        os._exit(7)
    with pytest.raises(PeerLostError) as error:
        transport.shift("shift", x[:0], out, 1).wait()
    seconds = time.perf_counter() - begun
    # Rank 0 itself has closed its connection to rank 1, which does not mean that rank 1 has died.
    assert closed_peers(group) == ([2] if rank == 0 else [0, 2])
    return str(error.value), seconds  # this process must outlive the answers of all, as its end would notify peers, too


@beside(lambda: fresh_ranks(3, wait_for_a_survivor, expect_deaths=True))
def test_a_wait_for_a_message_of_a_survivor_ends_too(outcome: list[Outcome]) -> None:
    first, second = (one.unwrap() for one in outcome[:2])
    for message, seconds in (first, second):
        assert seconds < 4.0 and "on rank 0 of 3 lost rank 2, which died" in message, message  # the deadline is 60 s
    assert second[0].startswith("shift (call 2 of group '0') on rank 1 of 3: rank 0 has aborted the group. Its error: ")


# ---- killed in the middle of a message, which gloo does not notice ---------------------------------------------------

ELEMENTS = 32 * 1024 * 1024
NOTICE_SECONDS = 12.0  # usually 2 to 6 s; longer if many processes share a core; the deadline is 60 s
OPS: dict[str, Callable[[TorchDist, Tensor], Any]] = {
    "shift": lambda transport, x: transport.shift("shift", x, torch.zeros_like(x), 1),
    "all_gather": lambda transport, x: transport.all_gather("all_gather", x),
    "all_to_all": lambda transport, x: transport.all_to_all(
        "all_to_all", x, *[[len(x) // transport.world_size] * transport.world_size] * 2
    ),
}


def lose(_: Any, op: str) -> tuple[str, float, float]:
    """Error of a survivor, its delay after the victim's death, and the time that destroying the group takes."""
    transport = TorchDist(resolve_group(None), "cpu")
    last = transport.world_size - 1
    pids: list[Any] = [None] * transport.world_size
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(ELEMENTS, dtype=torch.uint8)
    x = x[: len(x) // transport.world_size * transport.world_size]
    died = [0.0]

    def kill() -> None:
        time.sleep(0.02)  # about in the middle of the message; otherwise the case is easier
        died[0] = time.time()
        os.kill(pids[last], signal.SIGKILL)

    dist.barrier()
    begun = time.time()
    if transport.rank == 0:
        threading.Thread(target=kill).start()
    with pytest.raises(PeerLostError) as caught:
        for _ in range(1000):
            OPS[op](transport, x).wait()
    raised = time.time()
    message = str(caught.value)
    begun = died[0] or begun
    del transport, caught
    dist.destroy_process_group()
    return message, raised - begun, time.time() - raised


@pytest.mark.skipif(sys.platform != "linux", reason="kills ranks")
@beside(lambda op, world_size: fresh_ranks(world_size, lose, op, env={"FUSED_TP_TIMEOUT": "60"}, expect_deaths=True))
@pytest.mark.parametrize(("op", "world_size"), [("shift", 2), ("shift", 3), ("all_gather", 3), ("all_to_all", 2)])
def test_a_rank_killed_in_the_middle_of_a_message_is_noticed(outcome: list[Any], op: str, world_size: int) -> None:
    for rank in range(world_size - 1):
        message, seconds, end = outcome[rank].unwrap()
        assert f"lost rank {world_size - 1}, which died or closed its connections" in message
        assert seconds < NOTICE_SECONDS and end < 2.0, (seconds, end)
