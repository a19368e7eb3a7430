"""Workspaces of fused kernels: growth, memory kept for CUDA graphs, and the order in which failures are reported.

Kernels run in tests/kernels and tests/gpu; here a workspace is a mock.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.backends.symmetric_memory import symm_mem
from fused_tp.backends.symmetric_memory.group_kernels import Workspaces
from fused_tp.backends.symmetric_memory.symm_mem import SymmMemRankInfo, sms_per_rank
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError

pytestmark = pytest.mark.full


class Memory:
    rank, world_size, arch, sms = 0, 2, 0, 1
    device = serialized_by = torch.device("cpu")
    rescue_stream = object()  # a stream

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> tuple[Tensor, Any]:
        self.asked.append(nbytes)
        return torch.empty(0), None


class Said(str):
    """Report of an expired wait."""

    gave_up = False


class GaveUp(Said):
    gave_up = True


def workspace_of(buffer: Tensor, handle: Any, *, timeout_seconds: float, rescue_stream: Any) -> mock.Mock:
    assert rescue_stream is Memory.rescue_stream or rescue_stream is None  # None: of ranks that are threads on a CPU
    return mock.Mock(state=buffer, expired_wait=mock.Mock(return_value=None))


def made(messages: Any = None) -> tuple[Workspaces, Memory]:
    memory = Memory()
    return Workspaces(memory, {"sum": workspace_of, "gather": workspace_of}, messages), memory


def both() -> tuple[Workspaces, list[Any]]:
    """Two workspaces, one of each kind."""
    workspaces, _ = made()
    with workspaces.use("sum", 1, "op") as first, workspaces.use("gather", 1, "op") as second:
        assert first is not second
    return workspaces, [first, second]


MIB = 1 << 20


def test_it_grows_by_powers_of_two_and_then_by_64_MiB() -> None:
    workspaces, memory = made()
    for nbytes in (10, MIB, MIB + 1, 3 * MIB // 2, 63 * MIB, 65 * MIB, 100 * MIB, 129 * MIB):
        with workspaces.use("sum", nbytes, "op"):
            pass
    assert memory.asked == [MIB, 2 * MIB, 64 * MIB, 128 * MIB, 192 * MIB]


def test_what_a_graph_may_use_outlives_growing_and_is_still_looked_at() -> None:
    workspaces, _ = made()
    with workspaces.use("sum", 1, "op") as captured:
        pass
    workspaces._slots["sum"].is_captured = True
    with workspaces.use("sum", 2 * MIB, "op") as larger:
        assert larger is not captured
    captured.expired_wait.return_value = Said("a replay has expired")
    with pytest.raises(CollectiveTimeoutError, match="a replay has expired"), workspaces.use("sum", 1, "op"):
        pass


@pytest.mark.parametrize(
    ("heard", "left", "kind", "sentence"),
    [
        (None, Said("who and why"), CollectiveTimeoutError, "who and why, in 7 s (FUSED_TP_TIMEOUT)."),
        ("Rank 1 has said why.", GaveUp("it gave up"), PeerLostError, "it gave up. Rank 1 has said why."),
        (None, GaveUp("it gave up"), CollectiveTimeoutError, "it gave up."),  # it did not wait for the deadline
    ],
)
def test_an_expired_wait_is_told_once_and_then_the_group_is_unusable(
    heard: str | None, left: Said, kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "7")
    workspaces, _ = made(mock.Mock(fatal_error=None, peer_failure_message=lambda: heard))
    with pytest.raises(kind) as raised, workspaces.use("sum", 1, "op") as workspace:
        workspace.expired_wait.return_value = left
    assert str(raised.value) == sentence and workspace.leave.called, "a peer that comes later waits in vain"
    with pytest.raises(FusedTPError, match="unusable because an earlier call failed: "):
        workspaces.raise_if_failed()


def test_one_that_gives_up_tells_its_peers_in_all_workspaces() -> None:
    workspaces, of_kinds = both()
    workspaces.abort("why")
    assert all(one.leave.called for one in of_kinds)
    with pytest.raises(FusedTPError, match="unusable because an earlier call failed: why"):
        workspaces.use("sum", 1, "op")


def test_a_lost_peer_ends_all_waits_and_is_the_cause_that_is_told() -> None:
    workspaces, of_kinds = both()
    workspaces._on_peer_lost(1)
    for one in of_kinds:
        one.stop_waiting.assert_called_once_with(1)
    of_kinds[0].expired_wait.return_value = Said("a wait that was ended")
    with pytest.raises(PeerLostError, match="Rank 0 of 2 lost rank 1"):
        workspaces.raise_if_failed()


def test_a_workspace_may_be_made_while_the_watch_looks_at_the_others() -> None:
    workspaces, _ = made()
    with workspaces.use("sum", 1, "op") as first:
        pass

    # Simulates the calling thread, which may run at any time.
    first.expired_wait = lambda: workspaces._slot("gather", 1, "op") and None
    assert workspaces._expired_wait() is None


def test_a_failure_while_growing_makes_the_group_unusable() -> None:
    told: list[str] = []
    workspaces, memory = made(mock.Mock(fatal_error=None, abort_because=told.append))
    memory.allocate = mock.Mock(side_effect=MemoryError("none left"))
    with pytest.raises(MemoryError), workspaces.use("sum", 5, "op"):
        pass
    match = "Creating a workspace of 1048576 bytes for op failed"
    with pytest.raises(FusedTPError, match=match), workspaces.use("sum", 5, "op"):
        pass
    assert len(told) == 1 and match in told[0]


def test_a_peer_that_is_lost_meanwhile() -> None:
    """A workspace made meanwhile does not wait for the peer; the current call succeeds, the next one raises."""
    workspaces, memory = made()
    allocate = memory.allocate

    def lost_meanwhile(nbytes: int) -> tuple[Tensor, Any]:
        workspaces._on_peer_lost(1)
        return allocate(nbytes)

    memory.allocate = lost_meanwhile
    with workspaces.use("sum", 1, "op") as workspace:
        workspace.stop_waiting.assert_called_once_with(1)
    with pytest.raises(PeerLostError), workspaces.use("sum", 1, "op"):
        pass


def test_nothing_is_made_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces, memory = made()
    workspaces.reserve("sum", 5, "op")
    workspaces.reserve("sum", MIB, "op")
    monkeypatch.setattr(symm_mem, "is_capturing", lambda device: True)
    with workspaces.use("sum", MIB, "op"):
        assert memory.asked == [MIB]
    match = r"op needs a workspace of 5 bytes, and the group has none yet.*once before the capture"
    with pytest.raises(RuntimeError, match=match), workspaces.use("gather", 5, "op"):
        pass


def test_a_deadline_beyond_what_kernels_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces, _ = made()
    for seconds in ("1e300", "9.3e9"):
        monkeypatch.setenv("FUSED_TP_TIMEOUT", seconds)
        with workspaces.use("sum", 1, "op") as workspace:
            assert workspace.timeout_ns == 3 * 10**18  # a century; kernels can count up to three


def test_ranks_of_one_gpu_have_a_share_of_it_each() -> None:
    def facts(*gpus: tuple[str, int]) -> list[SymmMemRankInfo]:
        return [SymmMemRankInfo("host", ("pids", number), gpu, 90, sms) for number, (gpu, sms) in enumerate(gpus)]

    assert sms_per_rank(facts(("a", 132), ("b", 132))) == 132
    assert sms_per_rank(facts(("a", 132), ("a", 132))) == 66
    assert sms_per_rank(facts(("a", 132), ("b", 60), ("a", 132))) == 60
    assert sms_per_rank(facts(*[("a", 2)] * 3)) == 1
    assert sms_per_rank([SymmMemRankInfo("host", ("pids", number), sms=3) for number in range(2)]) == 3


def test_ops_of_one_local_rank_take_turns_with_each_other_only() -> None:
    def turns(rank: LocalRank) -> tuple[Any, Any]:
        first, second = (Workspaces(rank, {"sum": workspace_of}) for _ in range(2))
        return first._turn, second._turn

    (first, second), (other, _) = run_local(2, turns)
    assert first is second and first is not other
