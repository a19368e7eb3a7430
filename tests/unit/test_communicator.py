"""NCCL communicators over the doubles, between processes: ops, deadlines, lost peers, graphs, and shutdown.

tests/distributed/test_nccl_pipeline.py tests the data that communicators move.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from tests.late import interrupted_after
from tests.native.doubles import libraries
from tests.workers import fresh_ranks, on_ranks

pytestmark = pytest.mark.full

_core = pytest.importorskip("fused_tp._core", reason="needs the native core")

DEFAULT_STREAM = 0
COUNT = 3001  # more bytes than a mailbox of the double holds


class Communicator:
    """A communicator of the core, with an all-gather of tensors."""

    def __init__(self, group: dist.ProcessGroup, timeout: float = 30) -> None:
        driver, library = libraries.load_doubles()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.core = _core.Communicator(library, driver, rank, shared_id(group), rank, size, timeout)
        self.driver, self.rank, self.size = driver, rank, size
        self.memory: list[Tensor] = []  # of ops in flight; last, so that the communicator is destroyed before it

    def all_gather(self, x: Tensor, out: Tensor, stream: int = DEFAULT_STREAM) -> Any:
        self.memory += [x, out]
        return self.core.all_gather(x.data_ptr(), out.data_ptr(), x.nbytes, stream)

    def wait(self, ticket: Any) -> None:
        """Wait on the host; raise the error that the communicator failed with."""
        while not self.core.has_ended(ticket):
            self.core.check()
            time.sleep(0.001)
        self.core.check()

    def synchronize(self, stream: int | None = None) -> None:
        assert self.driver.synchronize(0, self.core.stream if stream is None else stream, 10)

    def outputs(self) -> tuple[Tensor, Tensor]:
        return torch.full((COUNT,), self.rank + 1.0), torch.zeros(self.size * COUNT)

    def gathered(self) -> Tensor:
        return torch.arange(1.0, self.size + 1).repeat_interleave(COUNT)

    def check_works(self) -> None:
        x, out = self.outputs()
        self.core.wait(self.all_gather(x, out), DEFAULT_STREAM)
        assert torch.equal(out, self.gathered())


def shared_id(group: dist.ProcessGroup) -> bytes:
    ids = [libraries.load_doubles()[1].make_id() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(ids, group_src=0, group=group)
    assert ids[0] is not None
    return ids[0]


def seconds_until(error: type[BaseException], call: Callable[[], Any]) -> tuple[float, str]:
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    return time.monotonic() - begun, str(caught.value)


def names_left() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{libraries.NCCL_NAMES}*")]


# ---- ops -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_order_of_ops(group: dist.ProcessGroup) -> None:
    """An op begins only after the earlier work of its stream."""
    one = Communicator(group)
    stream, other, word = libraries.Stream(), libraries.Stream(), torch.zeros(1, dtype=torch.int64)
    (x, out), fives = one.outputs(), torch.full((COUNT,), 5.0)
    stream.wait_for(word)
    stream.copy(x, fives)
    ticket = one.all_gather(x, out, stream.handle)
    time.sleep(0.02)  # enough for an op that does not wait
    assert not one.core.has_ended(ticket) and out[0] == 0
    one.core.wait(ticket, other.handle)
    word.fill_(1)
    one.synchronize(other.handle)
    assert out.eq(5).all()


@on_ranks(2)
def test_bad_arguments(group: dist.ProcessGroup) -> None:
    driver, library = libraries.load_doubles()
    one = Communicator(group)
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="a peer is a rank from 0 to 1, not -1"):
        one.core.exchange([(-1, x.data_ptr(), 4)], [], 0)
    with pytest.raises(ValueError, match="not rank 2 of 2"):
        _core.Communicator(library, driver, 0, library.make_id(), 2, 2, 1)
    with pytest.raises(ValueError, match="a unique id has 128 bytes, not 3"):
        _core.Communicator(library, driver, 0, b"abc", 0, 1, 1)
    one.check_works()  # nothing was sent
    one.core.close()
    one.core.close()
    with pytest.raises(FusedTPError, match="is closed"):
        one.check_works()


# ---- failing ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_slow_computation(group: dist.ProcessGroup) -> None:
    """Time that an op spends behind this rank's own computation does not count."""
    one = Communicator(group, timeout=0.4)
    stream, word = libraries.Stream(), torch.zeros(1, dtype=torch.int64)
    stream.wait_for(word)
    x, out = one.outputs()
    tickets = [one.all_gather(x, out, stream.handle) for _ in range(3)]
    time.sleep(1.0)  # longer than the deadline
    one.core.check()
    word.fill_(1)
    one.wait(tickets[-1])
    assert torch.equal(out, one.gathered())


@on_ranks(3)
def test_missing_at_init(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        shared_id(group)
    else:
        took, sentence = seconds_until(CollectiveTimeoutError, lambda: Communicator(group, timeout=0.5))
        assert "joining the communicator on rank" in sentence and "some rank did not take part" in sentence
        assert took < 2
    dist.barrier(group)
    Communicator(group).check_works()
    assert names_left() == []


@on_ranks(2)
def test_interrupted(group: dist.ProcessGroup) -> None:
    """Ctrl-C ends joining, synchronizing and closing."""
    if dist.get_rank(group) == 1:
        shared_id(group)
        Communicator(group)
    else:
        with interrupted_after(0.3):
            took, _ = seconds_until(KeyboardInterrupt, lambda: Communicator(group))
        assert took < 3
        one = Communicator(group)
        ticket = one.all_gather(*one.outputs(), libraries.Stream().handle)  # its peer never takes part
        for wait in (lambda: one.driver.synchronize(0, one.core.stream, 30), one.core.close):
            with interrupted_after(0.2):
                took, _ = seconds_until(KeyboardInterrupt, wait)
            assert took < 3
        assert "was interrupted" in one.core.failure and ticket is not None
    dist.barrier(group)


@on_ranks(2)
def test_reported_errors(group: dist.ProcessGroup) -> None:
    """NCCL reports an error in the background while an op waits."""
    for code, error in ((6, PeerLostError), (2, PeerLostError), (3, FusedTPError)):
        one = Communicator(group)
        if one.rank == 1:
            ticket = one.all_gather(*one.outputs(), libraries.Stream().handle)
            libraries.double_knobs().nccl_double_inject(code)
            try:
                took, sentence = seconds_until(error, functools.partial(one.wait, ticket))
            finally:
                libraries.double_knobs().nccl_double_inject(0)
            assert took < 2 and "NCCL says: " in sentence
        dist.barrier(group)


@on_ranks(2)
def test_stuck_launch(group: dist.ProcessGroup) -> None:
    """NCCL stays at ncclInProgress, as when it cannot connect."""
    one = Communicator(group, timeout=0.5)
    libraries.double_knobs().nccl_double_stall_launches(1)
    try:
        took, sentence = seconds_until(CollectiveTimeoutError, one.check_works)
    finally:
        libraries.double_knobs().nccl_double_stall_launches(0)
    assert 0.4 < took < 2 and "all_gather (call 1)" in sentence
    dist.barrier(group)


@on_ranks(2)
def test_driver_failure(group: dist.ProcessGroup) -> None:
    one = Communicator(group)
    libraries.double_knobs().cuda_double_fail(b"cuEventRecord", 700)
    _, sentence = seconds_until(FusedTPError, one.check_works)
    assert "all_gather (call 1) on rank" in sentence and "CUDA_ERROR_ILLEGAL_ADDRESS" in sentence
    broken = Communicator(group)
    if broken.rank == 0:  # the other rank does not take part
        ticket = broken.all_gather(*broken.outputs(), libraries.Stream().handle)
        libraries.double_knobs().cuda_double_fail(b"cuEventQuery", 700)  # the watchdog is the next to call it
        while not broken.core.failure:
            time.sleep(0.01)
        assert "the device on rank 0 of 2 is broken: cuEventQuery failed" in broken.core.failure and ticket
    dist.barrier(group)


@on_ranks(2)
def test_unbegun_op(group: dist.ProcessGroup) -> None:
    """A failure does not write the output of an op behind a computation, which may still read that memory."""
    one = Communicator(group)
    if one.rank == 0:
        stream, word = libraries.Stream(), torch.zeros(1, dtype=torch.int64)
        (x, first), gradients, parameters = one.outputs(), torch.full((2 * COUNT,), 5.0), torch.zeros(2 * COUNT)
        tickets = [one.all_gather(x, first, libraries.Stream().handle)]  # waits for its peer
        stream.wait_for(word)
        stream.copy(parameters, gradients)
        tickets.append(one.all_gather(x, gradients, stream.handle))
        time.sleep(0.1)  # the first op is waiting for its peer, most likely
        one.core.lose(1, "a test")
        assert first.isnan().all() and not gradients.isnan().any()
        word.fill_(1)
        one.synchronize(stream.handle)
        assert parameters.eq(5).all()
    dist.barrier(group)


@on_ranks(2)
def test_left_to_itself(group: dist.ProcessGroup) -> None:
    """Destroying a communicator during an op with an absent peer does not wait for the whole deadline."""
    one = Communicator(group, timeout=120)
    if one.rank == 0:
        ticket = one.all_gather(*one.outputs(), libraries.Stream().handle)
        begun = time.monotonic()
        del ticket, one
        assert time.monotonic() - begun < 15
    dist.barrier(group)


@on_ranks(2)
def test_open_nccl_group(group: dist.ProcessGroup) -> None:
    """NCCL launches nothing between ncclGroupStart and ncclGroupEnd of other code."""
    one = Communicator(group)
    one.check_works()
    libraries.double_knobs().ncclGroupStart()
    try:
        _, sentence = seconds_until(FusedTPError, one.check_works)
    finally:
        libraries.double_knobs().ncclGroupEnd()
    assert "all_gather (call 2) on rank" in sentence and "inside of an open ncclGroupStart" in sentence
    dist.barrier(group)


def aborted(group: dist.ProcessGroup) -> None:
    one = Communicator(group)
    ticket = None
    if one.rank == 0:
        ticket = one.all_gather(*one.outputs(), libraries.Stream().handle)
        threading.Timer(0.1, one.core.abort, ("no longer wanted",)).start()
        _, sentence = seconds_until(FusedTPError, functools.partial(one.wait, ticket))
        assert sentence == "this communicator on rank 0 of 2 was aborted: no longer wanted"
    one.core.abort("again")
    one.core.abort("and again")
    seconds_until(FusedTPError, one.core.check)
    del one, ticket
    dist.barrier(group)
    deadline = time.monotonic() + 10
    while libraries.double_knobs().nccl_double_live_communicators() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert libraries.double_knobs().nccl_double_live_communicators() == 0


def left_open(group: dist.ProcessGroup) -> None:
    """Abort repeatedly, then leave communicators open: one idle, one failed, one with an op whose peer is late."""
    aborted(group)
    global idle, failed, busy
    idle, failed, busy = Communicator(group), Communicator(group), Communicator(group)
    idle.check_works()
    failed.core.abort("a test")
    if busy.rank == 1:
        time.sleep(0.3)  # the other's op waits for it
    ticket = busy.all_gather(*busy.outputs(), libraries.Stream().handle)
    if busy.rank == 1:
        busy.wait(ticket)


def test_aborts_and_an_interpreter_that_ends_with_communicators_open() -> None:
    for outcome in fresh_ranks(2, left_open):
        outcome.unwrap()
    assert names_left() == []


# ---- graphs ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured(stream: int) -> Iterator[list[Any]]:
    """Capture `stream`; the yielded list receives the graph."""
    knobs, graph = libraries.double_knobs(), []
    knobs.cuda_double_begin_capture(stream)
    yield graph
    graph.append(ctypes.c_void_p(knobs.cuda_double_end_capture(stream)))


@on_ranks(2)
def test_graph_of_ops(group: dist.ProcessGroup) -> None:
    """Ops in a graph have deadlines too."""
    knobs = libraries.double_knobs()
    one = Communicator(group, timeout=0.5)
    one.check_works()
    stream, (x, out) = libraries.Stream(), one.outputs()
    with captured(stream.handle) as graph:
        ticket = one.all_gather(x, out, stream.handle)
        one.core.wait(ticket, stream.handle)
    assert ticket.captured and out[0] == 0
    for _ in range(60):  # longer than the deadline, the same values of the word again and again
        out.fill_(0)
        knobs.cuda_double_replay(graph[0], stream.handle)
        one.synchronize(stream.handle)
        assert torch.equal(out, one.gathered())
        time.sleep(0.01)
    time.sleep(0.7)  # longer than the deadline: a graph that is not replayed does not wait
    one.core.check()
    one.check_works()  # ops outside of graphs still run
    if one.rank == 0:
        dist.barrier(group)  # the other has given up
        one.core.close()  # raises nothing, although the graph still exists
    else:
        knobs.cuda_double_replay(graph[0], stream.handle)
        begun = time.monotonic()
        one.synchronize(stream.handle)
        assert time.monotonic() - begun < 1.4
        _, sentence = seconds_until(CollectiveTimeoutError, one.core.check)
        assert sentence.startswith("all_gather (call 2) in a CUDA graph on rank 1 of 2 has waited ")
        dist.barrier(group)
        driver = one.driver
        del one, ticket
        knobs.cuda_double_replay(graph[0], stream.handle)  # it outlives the communicator
        assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)


@on_ranks(2)
def test_capture_of_another_thread(group: dist.ProcessGroup) -> None:
    """While one thread captures the communicator's ops another cannot run any, and the capture continues."""
    one = Communicator(group)
    one.check_works()
    stream, (x, out) = libraries.Stream(), one.outputs()
    with captured(stream.handle) as graph:
        ticket = one.all_gather(x, out, stream.handle)
        with pytest.raises(ValueError, match="another thread is capturing this communicator's ops"):
            one.all_gather(x, out, libraries.Stream().handle)
        one.core.wait(ticket, stream.handle)
    libraries.double_knobs().cuda_double_replay(graph[0], stream.handle)
    one.synchronize(stream.handle)
    assert torch.equal(out, one.gathered())
    one.check_works()
    dist.barrier(group)
