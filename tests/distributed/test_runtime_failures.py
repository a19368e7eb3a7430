"""What happens over torch.distributed when ranks disagree, do not come, or die: which error, saying what, on whom."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.registry import SCHEDULES
from fused_tp.transport import failure, shm
from fused_tp.transport import store as store_module
from fused_tp.transport.failure import RankStatus, StatusBoard, late_ranks
from fused_tp.transport.gloo import close_connections, closed_peers
from fused_tp.transport.store import exchange
from fused_tp.transport.torch_dist import TorchDist, torch_dist
from tests.beside import beside
from tests.distributed.shm_tools import with_store
from tests.late import give_up, wait_for_those_who_gave_up
from tests.workers import Outcome, fresh_ranks, run_ranks

PLAIN = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}


def disagree(group: Any, how: str) -> str:
    rank = dist.get_rank(group)
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    try:
        if how == "op":
            fused_tp.matmul_all_reduce(x, w, group=group) if rank else fused_tp.all_reduce(x, group=group)
        elif how == "shape":
            fused_tp.matmul_all_reduce(x[: 4 - rank], w, group=group)
        elif how == "dtype":
            dtype = torch.bfloat16 if rank else torch.float32
            fused_tp.matmul_reduce_scatter(x.to(dtype), w.to(dtype), group=group)
        elif how == "shards":
            fused_tp.all_gather_matmul(x[: 4 - rank], w, group=group)
        else:
            raise AssertionError(how)
    except fused_tp.RankMismatchError as error:
        # Nothing was sent: the group can go on.
        assert fused_tp.all_reduce(torch.ones(1), group=group).item() == dist.get_world_size(group)
        return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("op", "rank 0 calls all_reduce(dims=[4, 6], dtype=torch.float32), rank 1 calls matmul_all_reduce(dims=[4, 3]"),
        ("shape", "rank 0 calls matmul_all_reduce(dims=[4, 3], dtype=torch.float32), rank 1 calls matmul_all_reduce("),
        ("dtype", "dtype=torch.float32), rank 1 calls matmul_reduce_scatter(dims=[4, 3, 0], dtype=torch.bfloat16)."),
        ("shards", "(dims=[12, 6, 0], dtype=torch.float32), rank 1 calls all_gather"),
    ],
)
def test_checked_ranks_that_disagree(how: str, said: str, schedule: str) -> None:
    env = {"FUSED_TP_SCHEDULE": schedule, "FUSED_TP_SHM": "0", "FUSED_TP_CHECK": "1"}
    messages = run_ranks(3, disagree, how, env=env)
    assert len(set(messages)) == 1, "every rank must say the same"
    assert said in messages[0]


def over(schedule: str, timeout: str) -> dict[str, str]:
    return {**PLAIN, "FUSED_TP_SCHEDULE": schedule, "FUSED_TP_TIMEOUT": timeout}


def die(group: Any) -> tuple[str, float]:
    fused_tp.all_reduce(torch.ones(2), group=group)
    if dist.get_rank(group) == 1:
        os._exit(7)
    begun = time.perf_counter()
    with pytest.raises(fused_tp.PeerLostError) as error:
        fused_tp.matmul_all_reduce(torch.ones(4, 6), torch.ones(3, 6), group=group)
    return str(error.value), time.perf_counter() - begun


@beside(lambda: fresh_ranks(2, die, env=PLAIN, expect_deaths=True))
def test_a_rank_that_dies(outcome: list[Outcome]) -> None:
    survivor, dead = outcome
    assert dead.exit_code == 7
    message, seconds = survivor.unwrap()
    assert message.startswith("matmul_all_reduce (call 2 of group '0') on rank 0 of 2 lost rank 1:")
    assert seconds < 60.0  # the deadline is 600 s


def come_late(group: Any, how: str) -> tuple[str, str, float]:
    """Rank 2 does not come in time; and the others may call different ops."""
    rank = dist.get_rank(group)
    fused_tp.all_reduce(torch.ones(2), group=group)
    begun = time.perf_counter()
    try:
        if rank == 2:
            wait_for_those_who_gave_up("come_late", (0, 1))
        if how == "order" and rank == 1:
            fused_tp.all_reduce(torch.ones(4, 6), group=group)  # as many bytes: gloo aborts where sizes differ
        for _ in range(2):
            fused_tp.all_gather_matmul(torch.ones(4, 6), torch.ones(3, 6), group=group)
    except fused_tp.FusedTPError as error:
        give_up("come_late")
        return type(error).__name__, str(error), time.perf_counter() - begun
    return "", "no error", 0.0


@beside(lambda schedule, how: fresh_ranks(3, come_late, how, env=over(schedule, "2"), expect_deaths=True))
@pytest.mark.parametrize("how", ["alike", "order"])
@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
def test_a_timeout_names_who_was_late_and_only_those(outcome: list[Outcome], schedule: str, how: str) -> None:
    outcomes = [one.unwrap() for one in outcome]
    for rank, (error, message, seconds) in enumerate(outcomes):
        assert error == "CollectiveTimeoutError", outcomes
        assert "waited 2 s (FUSED_TP_TIMEOUT) for rank 2, which had not arrived." in message, outcomes
        assert f"on rank {rank} of 3" in message, outcomes
        # The deadline, 1 s in which rank 2 leaves no notice, and a busy machine's time; and not when rank 2 comes.
        assert rank == 2 or seconds < 2.0 + 4.0, outcomes
        if how == "order":
            assert "'s call 2 is all_" in message, outcomes
            assert "all ranks of a group must call the same ops in the same order" in message, outcomes


class StoppedStore(dist.Store):
    """One whose host has been stopped: it takes connections and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def _never(self, *args: Any) -> Any:
        self.asked += 1
        time.sleep(60)

    add = set = get = check = _never


class HiccupStore(dist.Store):
    """`store`, which does not answer for a while from when `stop` is called."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._goes_on = threading.Event()
        self._goes_on.set()

    def stop(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def _later(self, call: str) -> Any:
        def ask(*args: Any) -> Any:
            assert self._goes_on.wait(60)
            return getattr(self._store, call)(*args)

        return ask

    def __getattribute__(self, name: str) -> Any:
        return self._later(name) if name in ("add", "set", "get", "check") else super().__getattribute__(name)


def test_a_store_that_hesitates_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "ANSWER_SECONDS", 0.1)
    shared = dist.HashStore()
    other = StatusBoard(shared, "name", 1, 2)
    store = HiccupStore(shared)
    store.stop()
    board = StatusBoard(store, "name", 0, 2)
    board.post(RankStatus(1, ["all_reduce"], 0.5))
    assert board.read() == {} and not board.answers, "it does not know which group it belongs to"
    store.go_on()
    other.post(RankStatus(1, ["all_reduce"], 0.5, failed=True, error=PeerLostError()))
    assert set(until_it_answers(board)) == {1} and board.has_failure()
    store.stop()
    board.post(RankStatus(1, ["all_reduce"], 0.6))
    assert not board.answers
    store.go_on()
    assert set(until_it_answers(board)) == {0, 1}
    assert set(other.read()) == {0, 1}, "both are on the board of the same group"


def until_it_answers(board: StatusBoard) -> dict[int, RankStatus]:
    deadline = time.perf_counter() + 10.0
    while time.perf_counter() < deadline:
        statuses = board.read()
        if board.answers:
            return statuses
        time.sleep(0.01)
    raise AssertionError("the store answers, the board does not")


def test_a_board_without_a_number_stays_blank() -> None:
    """Its add failed and may have been counted: a number of its own could be that of another group."""

    class FailingStore(dist.Store):
        def add(self, *args: Any) -> int:
            raise RuntimeError("connection reset")

        set = get = check = None  # must not be called

    board = StatusBoard(FailingStore(), "name", 0, 2)
    board.post(RankStatus(1, ["all_reduce"], 0.5))
    assert board.read() == {} and not board.has_failure() and not board.answers


def test_no_thread_for_a_question_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    board = StatusBoard(dist.HashStore(), "name", 0, 2)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        board.post(RankStatus(1, ["all_reduce"], 0.5))
        assert not board.has_failure() and board.read() == {} and not board.answers
    board.post(RankStatus(2, ["all_reduce"], 0.5))
    assert board.read()[0].call == 2 and board.answers


class LateWork:
    """One that ends just after a slice of the wait has timed out: well, or with `error`."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._waits = 0

    def wait(self, timeout: timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def end_after_a_slice(group: Any) -> None:
    transport = TorchDist(resolve_group(group), "cpu")
    transport._start("late", LateWork).wait()
    assert transport.broken is None
    with pytest.raises(fused_tp.FusedTPError, match=r"late .* failed: its own error"):
        transport._start("late", lambda: LateWork("its own error")).wait()


def test_what_ends_just_after_a_slice_has_not_failed() -> None:
    fresh_ranks(1, end_after_a_slice, env=PLAIN)[0].unwrap()


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


@beside(lambda: fresh_ranks(2, move_with_another_default_device, env={**PLAIN, "FUSED_TP_CHECK": "1"}))
def test_the_default_device_is_of_no_matter(outcome: list[Outcome]) -> None:
    assert outcome[1].unwrap() == 0


def test_a_store_that_does_not_answer_is_asked_once_and_left() -> None:
    store = StoppedStore()
    begun = time.perf_counter()
    board = StatusBoard(store, "name", 0, 2)
    board.post(RankStatus(1, ["all_reduce"], 0.5, failed=True, error=PeerLostError()))
    assert not board.has_failure() and board.read() == {}
    assert board.read_until(bool, 5.0) == {}
    assert store.asked == 1 and time.perf_counter() - begun < 4.0 and not board.answers


def shift_between_two_of_three(group: Any) -> list[int]:
    """On torch's NCCL, for which gloo stands here: how many ranks have made its communicator by then."""
    with mock.patch("fused_tp.transport.torch_dist.backend_of", lambda group, device_type: "nccl"):
        transport, rank = TorchDist(resolve_group(group), "cpu"), dist.get_rank(group)
    met, real = [], dist.all_reduce

    def all_reduce(x: torch.Tensor, **keywords: Any) -> Any:
        met.append(dist.get_world_size(keywords["group"]))
        return real(x, **keywords)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        for _ in range(2):
            x, out = torch.full((3 if rank == 0 else 0,), 7.0), torch.empty(3 if rank == 1 else 0)
            assert transport.shift("shift", x, out, 1).wait().eq(7.0).all()
    return met


def test_all_ranks_make_the_communicator_of_nccl_before_some_of_them_use_it() -> None:
    assert run_ranks(3, shift_between_two_of_three) == [[3]] * 3


def meet_where_the_store_is_stopped(group: Any) -> list[str]:
    store, said = HiccupStore(dist.HashStore()), []
    store.stop()
    with mock.patch.object(store_module, "ANSWER_SECONDS", 0.1):
        for meet in (lambda described: exchange(described, "names", "mine"), shm._rendezvous):
            described = with_store(resolve_group(group), store)
            begun = time.perf_counter()
            with pytest.raises(CollectiveTimeoutError) as caught:
                meet(described)
            assert time.perf_counter() - begun < 4.0
            said.append(str(caught.value))
    with pytest.raises(FusedTPError, match="unusable since its ranks failed to agree"):
        exchange(described, "names", "mine")
    store.go_on()
    return said


def test_no_rank_waits_past_its_deadline_for_a_store_whose_host_is_stopped() -> None:
    (said,) = run_ranks(1, meet_where_the_store_is_stopped, env={"FUSED_TP_TIMEOUT": "0.3"})
    for sentence in said:
        assert "answer" in sentence and "within 0.3 s (FUSED_TP_TIMEOUT)" in sentence, sentence


def test_notices_of_an_earlier_group_of_the_name_are_not_read() -> None:
    store = dist.HashStore()
    first = StatusBoard(store, "name", 0, 2)
    first.post(RankStatus(1, ["all_reduce"], 0.5, failed=True, error=PeerLostError()))
    assert first.has_failure() and first.read()[0].op(1) == "all_reduce"
    second = StatusBoard(store, "name", 0, 2)
    assert not second.has_failure() and second.read() == {}


def test_late_ranks_in_a_sentence() -> None:
    waiting = RankStatus(5, ["all_gather", "all_reduce"], 9.0, failed=True)
    behind = RankStatus(4, ["all_gather"], 3.0)
    only_now = RankStatus(5, ["all_reduce"], 0.3, failed=True)  # on a busy machine

    def said(statuses: dict[int, RankStatus], ranks: list[int], op: str) -> str:
        late, rest = late_ranks(statuses, ranks, 5, op)
        return str(CollectiveTimeoutError("{op}" + rest, op="op", missing=late)).removeprefix("op")

    assert said({1: waiting, 2: only_now}, [1, 2], "all_reduce") == " for rank 2, which had not arrived."
    assert said({1: waiting, 2: behind}, [1, 2, 3], "all_reduce") == (
        " for ranks 2 (last heard of at call 4, all_gather) and 3, which had not arrived."
    )
    assert said({1: waiting}, [1], "broadcast").startswith(
        ", though all ranks had arrived. But rank 1's call 5 is all_reduce, not broadcast: all ranks"
    )
    assert "the data did not come" in said({1: waiting}, [1], "all_reduce")


def wait_for_a_survivor(group: Any) -> tuple[str, float]:
    """Rank 0 waits for a message of rank 2, which dies; rank 1 only for one of rank 0, which lives and gives up."""
    rank = dist.get_rank(group)
    transport = torch_dist(resolve_group(group), "cpu")
    x, out = torch.ones(4), torch.empty(4)
    transport.shift("shift", x, out, 1).wait()
    assert closed_peers(group) == []
    begun = time.perf_counter()
    if rank == 2:
        time.sleep(0.3)  # the others are waiting for it, most likely
        os._exit(7)
    with pytest.raises(fused_tp.PeerLostError) as error:
        transport.shift("shift", x[:0], out, 1).wait()
    seconds = time.perf_counter() - begun
    # Rank 0 has closed its connection to rank 1 itself, which tells nothing of rank 1.
    assert closed_peers(group) == ([2] if rank == 0 else [0, 2])
    return str(error.value), seconds  # this process lives until all have answered: its end would tell the others too


@beside(lambda: fresh_ranks(3, wait_for_a_survivor, env=PLAIN, expect_deaths=True))
def test_a_wait_for_a_message_of_a_survivor_ends_too(outcome: list[Outcome]) -> None:
    for one in outcome[:2]:
        message, seconds = one.unwrap()
        assert seconds < 4.0 and "on rank 0 of 3 lost rank 2:" in message, message  # the deadline is 600 s
    assert (
        outcome[1]
        .unwrap()[0]
        .startswith(
            "shift (call 2 of group '0') on rank 1 of 3: rank 0 has given the group up. It said: shift (call 2 of group"
        )
    )


def join_shared_memory(group: Any) -> str:
    if dist.get_rank(group) != 0:
        return "away"
    with pytest.raises(fused_tp.CollectiveTimeoutError) as error:
        fused_tp.all_reduce(torch.ones(2), group=group)
    return str(error.value)


ONE_SIDED = {"FUSED_TP_SCHEDULE": "one_sided", "FUSED_TP_TIMEOUT": "20"}


@beside(lambda: fresh_ranks(3, join_shared_memory, env={**ONE_SIDED, "FUSED_TP_TIMEOUT": "1.5"}, expect_deaths=True))
def test_ranks_that_do_not_join_the_rendezvous_are_named(outcome: list[Outcome]) -> None:
    """They live, so that only the deadline can tell."""
    said = (
        "Ranks 1 and 2 did not take part in the shared-memory rendezvous of group '0' within 1.5 s (FUSED_TP_TIMEOUT)"
    )
    assert said in outcome[0].unwrap()


def join_late(group: Any) -> float:
    if dist.get_rank(group) == 1:
        time.sleep(1.7)  # the others look for its death three times
    total = fused_tp.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(total, group=group)
    dist.barrier(group)
    return total[0].item()


@beside(lambda: fresh_ranks(3, join_late, env=ONE_SIDED))
def test_a_rank_that_joins_the_rendezvous_late_is_waited_for(outcome: list[Outcome]) -> None:
    """And the receives that looked for its death harm nothing."""
    assert [one.unwrap() for one in outcome] == [9.0] * 3


def join_after_a_receive_that_timed_out(group: Any) -> float:
    """That closes gloo's connections, on both sides; nobody has died, and two ranks come late."""
    rank = dist.get_rank(group)
    if rank == 0:
        receive = dist.irecv(torch.empty(1), group=group, group_src=1)
        assert receive is not None
        with pytest.raises(RuntimeError, match="Timed out"):
            receive.wait(timedelta(milliseconds=50))
        time.sleep(0.9)  # the other side sees it, and nobody has begun to join
    elif rank == 1:
        time.sleep(3.0)  # later than rank 0 would wait for a peer that has closed its connection
    else:
        time.sleep(2.5)  # rank 0 waits for two that have not come
    return fused_tp.all_reduce(torch.ones(2), group=group)[0].item()


@beside(lambda: fresh_ranks(3, join_after_a_receive_that_timed_out, env=ONE_SIDED))
def test_closed_connections_are_no_dead_ranks(outcome: list[Outcome]) -> None:
    assert [one.unwrap() for one in outcome] == [3.0] * 3


def join_late_with_lazy_connections(group: Any) -> float:
    if dist.get_rank(group) == 1:
        time.sleep(1.2)  # the other looks for its death twice
    begun = time.perf_counter()
    assert closed_peers(group) == [] and time.perf_counter() - begun < 0.1
    fused_tp.all_reduce(torch.ones(2), group=group)
    return time.perf_counter() - begun


@beside(lambda: fresh_ranks(2, join_late_with_lazy_connections, env={**ONE_SIDED, "TORCH_GLOO_LAZY_INIT": "1"}))
def test_lazy_connections_are_not_probed(outcome: list[Outcome]) -> None:
    assert outcome[0].unwrap() < 10.0


def forced(group: Any) -> str:
    with pytest.raises(ValueError) as error:
        fused_tp.all_reduce(torch.ones(2), group=group)
    return str(error.value)


def test_forced_schedules_that_cannot_serve() -> None:
    for message in run_ranks(2, forced, env={"FUSED_TP_SCHEDULE": "fastest"}):
        names = ", ".join(SCHEDULES)
        assert message == f"FUSED_TP_SCHEDULE names schedule 'fastest'; there are {names}."
    for message in run_ranks(2, forced, env={"FUSED_TP_SCHEDULE": "one_sided", "FUSED_TP_SHM": "0"}):
        assert message == "Schedule 'one_sided' cannot serve this group: FUSED_TP_SHM=0 turns it off."


def explained(group: Any) -> str:
    shapes = ((512, 1024), (2048, 1024))
    return str(fused_tp.explain("matmul_reduce_scatter", *shapes, dtype=torch.float32, group=group))


def test_explain_says_what_runs_and_why() -> None:
    plain = run_ranks(2, explained, env={"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": None})
    assert plain[0] == plain[1]
    assert plain[0].splitlines()[0] == (
        "matmul_reduce_scatter(x [512, 1024], weight [2048, 1024]), float32 on cpu, 2 ranks"
    )
    assert "forward: pipelined over gloo, because dispatch table as shipped, rule cpu/default" in plain[0]
    assert "no shared memory: FUSED_TP_SHM=0 turns it off" in plain[0]
    forced_plain = run_ranks(2, explained, env={"FUSED_TP_SCHEDULE": "plain"})[0]
    assert "backward: plain over gloo, because FUSED_TP_SCHEDULE=plain forces it" in forced_plain
