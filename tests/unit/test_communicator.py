"""NCCL communicators over the doubles, between processes: ops, deadlines, lost peers, graphs, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.transport.peer_watch import PeerWatch
from tests.native.doubles import libraries
from tests.workers import Outcome, fresh_ranks, on_ranks, run_ranks

pytestmark = pytest.mark.full

_core = pytest.importorskip("fused_tp._core", reason="needs the native core")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 7, torch.int64: 8}
SUM, MAX, MIN = 0, 1, 2
DEFAULT_STREAM = 0
COUNT = 3001  # more bytes than a mailbox of the double holds


def join(group: dist.ProcessGroup, timeout: float = 30, missing: int | None = None) -> Any:
    driver, library = libraries.load_doubles()
    ids = [library.make_id() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(ids, group_src=0, group=group)
    if dist.get_rank(group) == missing:
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return _core.Communicator(library, driver, rank, ids[0], rank, size, timeout)


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-64, 64, (count,), generator=generator).to(dtype)  # whose sums are exact in every dtype


def all_reduce(communicator: Any, x: Tensor, out: Tensor, op: int = SUM, **after: int) -> Any:
    return communicator.all_reduce(x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], op, **after)


def check_works(communicator: Any) -> None:
    x = torch.full((COUNT,), communicator.rank + 1.0)
    out = torch.zeros(COUNT)
    communicator.wait(all_reduce(communicator, x, out, after_stream=DEFAULT_STREAM), DEFAULT_STREAM)
    assert torch.equal(out, torch.full((COUNT,), communicator.size * (communicator.size + 1) / 2))


def seconds_until(error: type[BaseException], call: Callable[[], Any]) -> tuple[float, str]:
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    return time.monotonic() - begun, str(caught.value)


def names_left() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{libraries.NCCL_NAMES}*")]


# ---- ops -------------------------------------------------------------------------------------------------------


def some_op(communicator: Any, chance: random.Random, seed: int) -> Callable[[], None]:
    """Enqueues an op that all ranks choose alike. What is returned checks its result, once all has ended."""
    rank, size = communicator.rank, communicator.size
    dtype = chance.choice(list(DTYPES))
    count = chance.choice([1, 7, 100, COUNT])
    kind = chance.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange"])
    after = chance.choice([{}, {"after_stream": DEFAULT_STREAM}])
    op = chance.choice([SUM, MAX, MIN])
    in_place = chance.random() < 0.5
    root = chance.randrange(size)
    everyone = [values(r, size * count, dtype, seed) for r in range(size)]
    if op == SUM:
        reduced = torch.stack(everyone).sum(0).to(dtype)
    else:
        reduced = torch.stack(everyone).amax(0) if op == MAX else torch.stack(everyone).amin(0)
    x = everyone[rank].clone()
    bytes_per_rank = count * x.element_size()
    if kind == "all_gather":
        wanted = torch.cat([one[:count] for one in everyone])
        out = torch.zeros_like(wanted)
        source = out[rank * count : (rank + 1) * count] if in_place else x
        source[:count] = x[:count]
        ticket = communicator.all_gather(source.data_ptr(), out.data_ptr(), bytes_per_rank, **after)
    elif kind == "reduce_scatter":
        wanted = reduced[rank * count : (rank + 1) * count]
        out = x[rank * count : (rank + 1) * count] if in_place else torch.zeros_like(wanted)
        ticket = communicator.reduce_scatter(x.data_ptr(), out.data_ptr(), count, DTYPES[dtype], op, **after)
    elif kind == "all_reduce":
        wanted = reduced
        out = x if in_place else torch.zeros_like(x)
        ticket = all_reduce(communicator, x, out, op, **after)
    elif kind == "broadcast":
        wanted = everyone[root]
        out = x if in_place else torch.zeros_like(x)
        ticket = communicator.broadcast(x.data_ptr(), out.data_ptr(), size * bytes_per_rank, root, **after)
    else:  # what is for rank r stands at place r; lengths differ, and some are 0
        lengths = [(source + root) % 3 * count // 2 * x.element_size() for source in range(size)]
        out = torch.zeros_like(x)
        wanted = torch.zeros_like(x)
        for source in range(size):
            n = lengths[source] // x.element_size()
            wanted[source * count : source * count + n] = everyone[source][rank * count : rank * count + n]
        sends = [(peer, x.data_ptr() + peer * bytes_per_rank, lengths[rank]) for peer in range(size)]
        receives = [(peer, out.data_ptr() + peer * bytes_per_rank, lengths[peer]) for peer in reversed(range(size))]
        ticket = communicator.exchange(sends, receives, **after)

    def check() -> None:
        assert ticket.op == kind and not ticket.captured
        assert torch.equal(out, wanted), (kind, dtype, count, op, in_place, ticket.number)
        assert x is not None  # kept until here

    return check


def random_ops(group: dist.ProcessGroup, rounds: int, seed: int) -> None:
    communicator = join(group)
    chance = random.Random(seed)
    done = 0
    while done < rounds:
        batch = [some_op(communicator, chance, done + i) for i in range(chance.randint(1, 6))]
        ticket = communicator.exchange([], [])  # behind all of them
        if chance.random() < 0.5:
            communicator.wait(ticket, DEFAULT_STREAM)
        else:
            communicator.wait(ticket)
        for check in batch:
            check()
        done += len(batch)
    assert communicator.calls >= rounds and communicator.failure == ""
    communicator.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_ops(world_size: int) -> None:
    run_ranks(world_size, random_ops, 200 if world_size == 3 else 60, world_size)


@on_ranks(3)
def test_two_communicators_at_once(group: dist.ProcessGroup) -> None:
    """In opposite orders on every other rank: they do not wait for each other."""
    pair = [join(group), join(group)]
    order = pair if dist.get_rank(group) % 2 == 0 else pair[::-1]
    x = [torch.full((COUNT,), float(dist.get_rank(group) + i)) for i in range(2)]
    outs = [torch.zeros(COUNT) for _ in pair]
    for _ in range(20):
        tickets = {c: all_reduce(c, x[pair.index(c)], outs[pair.index(c)]) for c in order}
        for communicator in pair:
            communicator.wait(tickets[communicator])
    size = dist.get_world_size(group)
    for i, out in enumerate(outs):
        assert torch.equal(out, torch.full((COUNT,), float(sum(r + i for r in range(size)))))
    pair[1].close()
    check_works(pair[0])
    pair[0].close()


@on_ranks(4)
def test_split(group: dist.ProcessGroup) -> None:
    communicator = join(group)
    rank = communicator.rank
    part = communicator.split(rank % 2, -rank)  # the highest rank comes first
    alone = communicator.split(0 if rank == 3 else -1, 0)
    assert (part.rank, part.size) == ((3 - rank) // 2, 2)
    assert (alone is None) == (rank != 3)
    check_works(part)
    check_works(communicator)
    communicator.close()
    check_works(part)
    if alone is not None:
        assert alone.size == 1
        check_works(alone)


def orders(group: dist.ProcessGroup) -> None:
    """An op begins after what its stream or event stands for, and not before."""
    driver, _ = libraries.load_doubles()
    communicator = join(group)
    stream, event = _core.DriverStream(driver, 0), _core.DriverEvent(driver, 0)
    words = _core.PinnedMemory(driver, 0, 16)
    gate = memoryview(words).cast("Q")
    x, out = torch.zeros(COUNT), torch.zeros(COUNT)
    for i, after in enumerate(({"after_stream": stream.handle}, {"after_event": event.handle})):
        driver.wait_value(0, stream.handle, words.device_address + 8 * i, 1)
        driver.fill(0, x.data_ptr(), 0, 4 * COUNT, stream.handle)
        driver.record(0, event.handle, stream.handle)
        x.fill_(5)  # the stream will put 0 there
        out.fill_(-1)
        ticket = all_reduce(communicator, x, out, **after)
        time.sleep(0.02)  # enough for an op that does not wait
        assert not driver.done(0, ticket.event) and out[0] == -1
        other = _core.DriverStream(driver, 0)
        communicator.wait(ticket, other.handle)
        gate[i] = 1
        assert driver.synchronize(0, other.handle, 10)
        assert torch.equal(out, torch.zeros(COUNT))


def test_ops_are_ordered_after_streams_and_events() -> None:
    run_ranks(2, orders)


def memory(group: dist.ProcessGroup) -> None:
    communicator = join(group)
    assert communicator.registers and not communicator.zero_cta
    data = communicator.allocate(4 * COUNT)
    communicator.register_window(data, 4 * COUNT)
    x = torch.frombuffer((ctypes.c_char * (4 * COUNT)).from_address(data), dtype=torch.float32)
    x.fill_(1)
    communicator.wait(all_reduce(communicator, x, x))
    assert torch.equal(x, torch.full((COUNT,), float(communicator.size)))
    communicator.deregister_window(data)
    communicator.free(data)
    other = communicator.allocate(100)
    communicator.register_window(other, 100)
    communicator.free(other)  # deregisters it
    communicator.close()


def test_memory_and_windows() -> None:
    run_ranks(2, memory)


@on_ranks(2)
def test_bad_arguments_and_a_closed_communicator(group: dist.ProcessGroup) -> None:
    driver, library = libraries.load_doubles()
    communicator = join(group)
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="NCCL does not reduce int16"):
        communicator.all_reduce(x.data_ptr(), x.data_ptr(), 4, 6)
    with pytest.raises(ValueError, match="root is a rank from 0 to 1, not 2"):
        communicator.broadcast(x.data_ptr(), x.data_ptr(), 4, 2)
    with pytest.raises(ValueError, match="a peer is a rank from 0 to 1, not -1"):
        communicator.exchange([(-1, x.data_ptr(), 4)], [])
    with pytest.raises(ValueError, match="after a stream or after an event, not both"):
        all_reduce(communicator, x, x, after_stream=0, after_event=0)
    with pytest.raises(ValueError, match="not rank 2 of 2"):
        _core.Communicator(library, driver, 0, library.make_id(), 2, 2, 1)
    with pytest.raises(ValueError, match="a unique id has 128 bytes, not 3"):
        _core.Communicator(library, driver, 0, b"abc", 0, 1, 1)
    check_works(communicator)  # nothing was sent
    communicator.close()
    communicator.close()
    with pytest.raises(FusedTPError, match="is closed"):
        communicator.exchange([], [])


# ---- failing ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_stalled_rank(group: dist.ProcessGroup) -> None:
    """Rank 0 does not come. The others raise in time, and all go on with a new communicator."""
    communicator = join(group, timeout=0.5)
    check_works(communicator)
    if communicator.rank != 0:
        x, out = torch.zeros(COUNT), torch.zeros(COUNT)
        ticket = all_reduce(communicator, x, out)
        took, sentence = seconds_until(CollectiveTimeoutError, lambda: communicator.wait(ticket))
        assert 0.3 < took < 1.3, took
        size = dist.get_world_size(group)
        assert sentence.startswith(f"all_reduce (call 2) on rank {communicator.rank} of {size} has waited ")
        assert communicator.failure == sentence
        for call in (
            lambda: communicator.exchange([], []),
            lambda: communicator.wait(ticket, DEFAULT_STREAM),
            lambda: communicator.split(0, 0),
            communicator.check,
        ):
            took, again = seconds_until(CollectiveTimeoutError, call)
            assert again == sentence and took < 0.5
        assert out.isnan().all()
        driver, _ = libraries.load_doubles()
        assert driver.synchronize(0, communicator.stream, 10)  # it goes on
    dist.barrier(group)
    communicator.abort("the others have")  # where it has not failed yet; where it has, this changes nothing
    communicator.close()
    check_works(join(group))
    dist.barrier(group)
    assert names_left() == []


@on_ranks(2)
def test_a_wait_on_the_stream_of_the_caller_ends(group: dist.ProcessGroup) -> None:
    """On the default stream of the double the caller itself waits, and must come back with the error."""
    communicator = join(group, timeout=0.5)
    if communicator.rank == 0:
        x = torch.zeros(COUNT)
        ticket = all_reduce(communicator, x, x, after_stream=DEFAULT_STREAM)
        took, _ = seconds_until(CollectiveTimeoutError, lambda: communicator.wait(ticket, DEFAULT_STREAM))
        assert took < 1.5
    dist.barrier(group)


@on_ranks(2)
def test_only_waiting_for_peers_counts(group: dist.ProcessGroup) -> None:
    """Time that an op spends behind this rank's own computation does not count."""
    driver, _ = libraries.load_doubles()
    communicator = join(group, timeout=0.4)
    stream, word = _core.DriverStream(driver, 0), _core.PinnedMemory(driver, 0, 8)
    driver.wait_value(0, stream.handle, word.device_address, 1)
    x = torch.ones(COUNT)
    tickets = [all_reduce(communicator, x, x, after_stream=stream.handle) for _ in range(3)]
    time.sleep(1.0)  # longer than the deadline
    communicator.check()
    memoryview(word).cast("Q")[0] = 1
    communicator.wait(tickets[-1])
    assert x[0] == communicator.size**3


@on_ranks(3)
def test_init_with_a_missing_rank(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    if rank == 1:
        join(group, missing=1)
    else:
        took, sentence = seconds_until(CollectiveTimeoutError, lambda: join(group, timeout=0.5))
        assert "joining the communicator on rank" in sentence and "some rank did not take part" in sentence
        assert took < 2
    dist.barrier(group)
    check_works(join(group))
    assert names_left() == []


@on_ranks(2)
def test_ctrl_c_ends_init(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    if rank == 0:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            took, _ = seconds_until(KeyboardInterrupt, lambda: join(group))
            assert took < 3
        finally:
            signal.signal(signal.SIGALRM, before)
    else:
        join(group, missing=rank)
    dist.barrier(group)


@on_ranks(2)
@pytest.mark.parametrize(("code", "error"), [(6, PeerLostError), (2, PeerLostError), (3, FusedTPError)])
def test_errors_that_nccl_reports(group: dist.ProcessGroup, code: int, error: type[Exception]) -> None:
    """NCCL says in the background that something is wrong, while an op waits."""
    communicator = join(group, timeout=30)
    if communicator.rank == 0:
        dist.barrier(group)
    else:
        x = torch.zeros(COUNT)
        ticket = all_reduce(communicator, x, x)
        libraries.nccl_knobs().nccl_double_inject(code)
        try:
            took, sentence = seconds_until(error, lambda: communicator.wait(ticket))
        finally:
            libraries.nccl_knobs().nccl_double_inject(0)
        assert took < 2 and "NCCL says: " in sentence
        dist.barrier(group)


@on_ranks(2)
def test_a_launch_that_gets_stuck(group: dist.ProcessGroup) -> None:
    """NCCL gets no further than ncclInProgress, as when it cannot connect."""
    communicator = join(group, timeout=0.5)
    libraries.nccl_knobs().nccl_double_stall_launches(1)
    x = torch.zeros(COUNT)
    try:
        took, sentence = seconds_until(CollectiveTimeoutError, lambda: all_reduce(communicator, x, x))
    finally:
        libraries.nccl_knobs().nccl_double_stall_launches(0)
    assert 0.4 < took < 2 and "all_reduce (call 1)" in sentence
    dist.barrier(group)


@on_ranks(2)
def test_an_error_of_the_driver_ends_the_communicator(group: dist.ProcessGroup) -> None:
    communicator = join(group)
    libraries.cuda_knobs().cuda_double_fail(b"cuEventRecord", 700, 0)
    x = torch.zeros(4)
    _, sentence = seconds_until(FusedTPError, lambda: all_reduce(communicator, x, x, after_stream=0))
    assert "all_reduce (call 1) on rank" in sentence and "CUDA_ERROR_ILLEGAL_ADDRESS" in sentence
    broken = join(group)
    ticket = all_reduce(broken, x, x) if broken.rank == 0 else None  # the other one does not come
    if ticket is not None:
        libraries.cuda_knobs().cuda_double_fail(b"cuEventQuery", 700, 0)  # the next to ask is the watchdog
        while not broken.failure:
            time.sleep(0.01)
        assert "the device on rank 0 of 2 is broken: cuEventQuery failed" in broken.failure
    dist.barrier(group)


def aborted(group: dist.ProcessGroup) -> None:
    communicator = join(group)
    x, ticket = torch.zeros(COUNT), None
    if communicator.rank == 0:
        ticket = all_reduce(communicator, x, x)
        threading.Timer(0.1, communicator.abort, ("no longer wanted",)).start()
        _, sentence = seconds_until(FusedTPError, lambda: communicator.wait(ticket))
        assert sentence == "this communicator on rank 0 of 2 was aborted: no longer wanted"
    communicator.abort("again")
    communicator.abort("and again")
    seconds_until(FusedTPError, communicator.check)
    communicator = ticket = None
    dist.barrier(group)
    deadline = time.monotonic() + 10
    while libraries.nccl_knobs().nccl_double_live_communicators() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert libraries.nccl_knobs().nccl_double_live_communicators() == 0


class Survivor:
    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator

    def lost(self, rank: int) -> None:
        self.communicator.lose(rank, "its process ended")


def killed(group: dist.ProcessGroup) -> tuple[float, str]:
    """The last rank is killed while the others wait for it; what watches its process tells the communicator."""
    communicator = join(group, timeout=60)
    check_works(communicator)
    victim = communicator.size - 1
    pids: list[int] = [0] * communicator.size
    dist.all_gather_object(pids, os.getpid(), group=group)
    survivors = dist.new_group(list(range(victim)))
    if communicator.rank == victim:
        time.sleep(0.3)  # the others are waiting for it, most likely
        os.kill(os.getpid(), signal.SIGKILL)
    survivor = Survivor(communicator)
    watch = PeerWatch(survivor, {victim: pids[victim]}, Survivor.lost, lambda _: None)
    x = torch.zeros(COUNT)
    found = seconds_until(PeerLostError, lambda: communicator.wait(all_reduce(communicator, x, x)))
    assert watch is not None
    assert x.isnan().all()
    again = join(survivors)
    check_works(again)
    return found


def test_a_killed_rank() -> None:
    outcomes: list[Outcome] = fresh_ranks(3, killed, expect_deaths=True)
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        took, sentence = outcome.unwrap()
        assert took < 3 and "lost rank 2: its process ended" in sentence
    assert names_left() == []


def left_open(group: dist.ProcessGroup) -> None:
    """Aborts many times over. Then nobody closes these: one idle, one failed, one with an op whose peer is late."""
    aborted(group)
    global idle, failed, busy, x
    idle, failed, busy = join(group), join(group), join(group)
    check_works(idle)
    failed.abort("a test")
    x = torch.ones(COUNT)
    if busy.rank == 1:
        time.sleep(0.3)  # the other's op waits for it
    ticket = all_reduce(busy, x, x)
    if busy.rank == 1:
        busy.wait(ticket)


def test_aborts_and_an_interpreter_that_ends_with_communicators_open() -> None:
    for outcome in fresh_ranks(2, left_open):
        outcome.unwrap()
    assert names_left() == []


def forked(group: dist.ProcessGroup) -> None:
    """A forked child refuses, and its end takes nothing away from its parent."""
    communicator = join(group)
    check_works(communicator)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                communicator.exchange([], [])
            except FusedTPError as error:
                code = 0 if "belongs to the process that forked this one" in str(error) else 2
            del communicator
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check_works(communicator)
    communicator.close()


def test_a_forked_child_leaves_it_alone() -> None:
    run_ranks(2, forked)


@on_ranks(2)
def test_a_failure_leaves_alone_what_has_not_begun(group: dist.ProcessGroup) -> None:
    """Behind a computation that still reads what their outputs' memory has held before: it is left alone."""
    driver, _ = libraries.load_doubles()
    communicator = join(group)
    if communicator.rank == 0:
        stream, word = _core.DriverStream(driver, 0), _core.PinnedMemory(driver, 0, 8)
        gradients, parameters, first = torch.full((COUNT,), 5.0), torch.zeros(COUNT), torch.ones(COUNT)
        all_reduce(communicator, first, first)  # waits for its peer
        driver.wait_value(0, stream.handle, word.device_address, 1)
        driver.copy(0, parameters.data_ptr(), gradients.data_ptr(), 4 * COUNT, stream.handle)
        all_reduce(communicator, torch.ones(COUNT), gradients, after_stream=stream.handle)
        time.sleep(0.1)  # the first op is waiting for its peer, most likely
        communicator.lose(1, "a test")
        assert first.isnan().all() and not gradients.isnan().any()
        memoryview(word).cast("Q")[0] = 1
        assert driver.synchronize(0, stream.handle, 10)
        assert parameters.eq(5).all()
    dist.barrier(group)


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@on_ranks(2)
def test_ctrl_c_ends_waits(group: dist.ProcessGroup) -> None:
    driver, _ = libraries.load_doubles()
    communicator = join(group)
    if communicator.rank == 0:
        x = torch.zeros(COUNT)
        all_reduce(communicator, x, x)  # its peer never comes
        with interrupted_after(0.2):
            took, _ = seconds_until(KeyboardInterrupt, lambda: driver.synchronize(0, communicator.stream, 30))
        assert took < 3
        with interrupted_after(0.2):
            took, _ = seconds_until(KeyboardInterrupt, communicator.close)
        assert took < 3 and "was interrupted" in communicator.failure
    dist.barrier(group)


@on_ranks(2)
def test_destruction_waits_a_few_seconds_only(group: dist.ProcessGroup) -> None:
    """An op whose peer never comes does not keep who lets go of the communicator for its whole deadline."""
    communicator = join(group, timeout=120)
    if communicator.rank == 0:
        x = torch.zeros(COUNT)
        all_reduce(communicator, x, x)
        begun = time.monotonic()
        communicator = None
        assert time.monotonic() - begun < 15
    dist.barrier(group)


@on_ranks(2)
def test_an_open_group_is_refused(group: dist.ProcessGroup) -> None:
    """Between somebody else's ncclGroupStart and ncclGroupEnd NCCL launches nothing."""
    communicator = join(group)
    check_works(communicator)
    library = libraries.nccl_knobs()
    x = torch.zeros(COUNT)
    library.ncclGroupStart()
    try:
        _, sentence = seconds_until(FusedTPError, lambda: all_reduce(communicator, x, x))
    finally:
        library.ncclGroupEnd()
    assert "all_reduce (call 2) on rank" in sentence and "inside of an open ncclGroupStart" in sentence
    dist.barrier(group)


# ---- graphs ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured(stream: int, joined: int) -> Iterator[list[Any]]:
    """Captures `stream`, and `joined` with it; the list gets the graph."""
    knobs, graph = libraries.cuda_knobs(), []
    knobs.cuda_double_begin_capture(stream)
    yield graph
    graph.append(ctypes.c_void_p(knobs.cuda_double_end_capture(stream, joined)))


@on_ranks(2)
def test_ops_in_a_graph_have_deadlines_too(group: dist.ProcessGroup) -> None:
    driver, _ = libraries.load_doubles()
    knobs = libraries.cuda_knobs()
    communicator = join(group, timeout=0.5)
    check_works(communicator)
    stream = _core.DriverStream(driver, 0)
    x, out = torch.ones(COUNT), torch.zeros(COUNT)
    with captured(stream.handle, communicator.stream) as graph:
        first = all_reduce(communicator, x, out, after_stream=stream.handle)
        second = communicator.broadcast(out.data_ptr(), x.data_ptr(), 4 * COUNT, 0)
        communicator.wait(second, stream.handle)
    assert first.captured and out[0] == 0
    with pytest.raises(ValueError, match="all_reduce is part of a CUDA graph"):
        communicator.wait(first)
    for _ in range(60):  # longer than the deadline, the same values of the word again and again
        x.fill_(1)
        knobs.cuda_double_replay(graph[0], stream.handle)
        assert driver.synchronize(0, stream.handle, 10)
        assert torch.equal(x, torch.full((COUNT,), float(communicator.size)))
        time.sleep(0.01)
    time.sleep(0.7)  # longer than the deadline: a graph that is not replayed waits for nobody
    communicator.check()
    check_works(communicator)  # ops outside of graphs go on
    if communicator.rank == 0:
        dist.barrier(group)  # the other has given up
        communicator.close()  # raises nothing, though the graph is there still
    else:
        knobs.cuda_double_replay(graph[0], stream.handle)
        begun = time.monotonic()
        assert driver.synchronize(0, stream.handle, 10) and time.monotonic() - begun < 1.4
        _, sentence = seconds_until(CollectiveTimeoutError, communicator.check)
        assert sentence.startswith("all_reduce (call 2) in a CUDA graph on rank 1 of 2 has waited ")
        dist.barrier(group)
        communicator = None
        knobs.cuda_double_replay(graph[0], stream.handle)  # it outlives the communicator
        assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)


@on_ranks(2)
def test_ops_beside_a_capture_are_refused(group: dist.ProcessGroup) -> None:
    """While one thread captures the communicator's ops another cannot run any, and the capture goes on."""
    driver, _ = libraries.load_doubles()
    communicator = join(group)
    check_works(communicator)
    stream, other = _core.DriverStream(driver, 0), _core.DriverStream(driver, 0)
    x, out = torch.ones(COUNT), torch.zeros(COUNT)
    with captured(stream.handle, communicator.stream) as graph:
        ticket = all_reduce(communicator, x, out, after_stream=stream.handle)
        with pytest.raises(ValueError, match="another thread is capturing this communicator's ops"):
            all_reduce(communicator, x, x, after_stream=other.handle)
        communicator.wait(ticket, stream.handle)
    libraries.cuda_knobs().cuda_double_replay(graph[0], stream.handle)
    assert driver.synchronize(0, stream.handle, 10)
    assert out.eq(communicator.size).all()
    check_works(communicator)
    dist.barrier(group)
