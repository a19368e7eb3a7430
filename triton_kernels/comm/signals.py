"""Signals between ranks inside of a kernel: put a flag, wait for one, begin and end a call.

Every rank has a workspace that all ranks map, of two halves. Call number `epoch` uses half `epoch % 2`:

    word 0 .. W-1   begun: word s is put by rank s when it begins the call
    word W ..       flags: each has one writer and one reader per call; which is which is the kernel's to say
    bytes           data, behind a 64th of the half that is kept for words, whatever is launched

A flag is an int64 that holds the number of the last call that set it: set means `flag >= epoch`, so nothing is zeroed
between calls; no byte of data may lie where a later launch may have a flag. (32 bits would not do: a flag unused for
2^31 calls, 6 hours at 10 us each, would look set.) Calls are counted in device memory: every program reads the number
when it begins and the last to end advances it, so a captured CUDA graph counts on at each replay.

Patterns, and what each orders:

    put          1. all threads store a tile; 2. barrier of the threads; 3. one thread does st.release.sys on a flag at
                 the reader. The release is cumulative: a reader that sees the flag sees the tile, through NVLink as
                 well as in shared memory. put_all: as many threads as ranks; the fence of a release waits for all
                 stores before it to arrive, and those of all these threads wait at once. Atomic operations are on
                 memory of the GPU that does them, so links need not carry any.
    wait         1. one thread polls its own flag with acquire.sys (adding 0 to it, which Triton makes a load);
                 2. Triton hands the value to the other threads through a barrier; 3. one more barrier: no load of the
                 tile by any thread can run ahead of it. Polls stay on this GPU, because a flag lies at its reader. All
                 threads see one value, so they leave the loop together (with ld.volatile each would see its own, and
                 they could part where a barrier is to come). wait_all: a thread for each of W flags in a row, and
                 one barrier for all of this; only where a flag is missing are they waited for one by one.
    begin, end   call e+1 of a rank begins after its call e ended (one stream per workspace), and end waits until all
                 ranks have begun. So a rank that begins call e+2 knows that all have ended e, and may write its half
                 again. That is the only barrier between calls; it is free where data came from all ranks anyway.
    count        programs of one rank meet at a counter (atom.acq_rel.gpu); the last one goes on alone. None waits.

Progress. Programs wait only for programs of the same number (`tl.program_id(0)`) on other ranks, and these waits form
no cycle: all programs first compute and put, then sum, then copy. So a kernel ends if all its programs run at once, in
order on fewer SMs, or one after the other, as interpreted. The ranks must launch equally many.

Rules for kernels. Data is stored and loaded by the threads: a TMA store that has been waited for has read shared
memory, and need not have written. No wait is in a loop that Triton pipelines (one with a dot in it), which moves loads
of later iterations ahead of their wait.

Failure. No wait is unbounded. One that lasts longer than `timeout_ns` writes an error record and returns False, and
from then on no wait of the workspace waits: the kernel runs to its end, with wrong results, and leaves the CUDA context
usable. A rank that gave up

    - puts `-epoch` where it would have put a result made of what did not arrive, so that it is not taken for one;
    - in calls that it has yet to make (queued, or in a graph that replays) touches no peer, which may be calls behind
      and still reading: `begin` puts `-epoch` as begun, which tells peers that nothing will come, and all else that the
      call writes goes to its own memory.

So a wait that returned True has the right data, always. `workspace.Workspace.leave` ends the waits of peers in the same
way, for a host that makes no more calls. The record lies in host memory, where `workspace.Workspace.expired` reads it
while kernels run; its first word is written last, behind a release for the system.

A CUDA graph may be captured if the workspace was made before, is large enough, and is used by one stream (or branch of
the graph) at a time; if kernels were loaded by a call before; and if all ranks replay graphs with the same calls in the
same order. Calls outside of the graph may run in between.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from . import protocol
from .ptx import all_reached, now_ns, pause, store_release, store_release_all

# The words that this file uses, as the compiler wants them.
EPOCH = tl.constexpr(protocol.EPOCH)
ENDED = tl.constexpr(protocol.ENDED)
CLOCK = tl.constexpr(protocol.CLOCK)
EXPIRED = tl.constexpr(protocol.EXPIRED)
STOP = tl.constexpr(protocol.STOP)
COUNTERS = tl.constexpr(protocol.COUNTERS)
ERROR_SET = tl.constexpr(protocol.ERROR_SET)
ERROR_OP = tl.constexpr(protocol.ERROR_OP)
ERROR_CALL = tl.constexpr(protocol.ERROR_CALL)
ERROR_RANK = tl.constexpr(protocol.ERROR_RANK)
ERROR_TILE = tl.constexpr(protocol.ERROR_TILE)
ERROR_SOURCE = tl.constexpr(protocol.ERROR_SOURCE)
ERROR_ABSENT = tl.constexpr(protocol.ERROR_ABSENT)
ERROR_GAVE_UP = tl.constexpr(protocol.ERROR_GAVE_UP)

POLLS_PER_CLOCK = tl.constexpr(32)


class Call(NamedTuple):
    """One call as its kernel sees it; made by `begin`."""

    ws: Any  # workspace.WorkspaceArguments
    rank: Any
    epoch: Any  # number of this call; negative if this rank has given up in an earlier one


@triton.jit
def half_at(call, rank):
    """Address of the half of `rank`'s workspace that this call uses; of this rank's own if it has given up before."""
    place = tl.where(call.epoch > 0, rank, call.rank)
    return tl.load(call.ws.workspaces + place) + (call.epoch & 1) * call.ws.half_bytes


@triton.jit
def flag_at(call, rank, index):
    """Pointer to flag number `index` at `rank`."""
    return half_at(call, rank).to(tl.pointer_type(tl.int64)) + index


@triton.jit
def join(ws, rank):
    """The call that an earlier launch of this rank has begun, and advanced the number to."""
    return Call(ws, rank, tl.load(ws.state + EPOCH))


@triton.jit
def unbroken(call):
    """Whether no wait of this workspace has expired so far."""
    return tl.atomic_add(call.ws.state + EXPIRED, 0, sem="relaxed", scope="gpu") == 0


@triton.jit
def look(flag):
    """Acquire: the flag's value now, the same for all threads."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def begin(ws, rank, WORLD: tl.constexpr):
    """Starts the call on this rank and tells all ranks so; every program does this first."""
    epoch = tl.abs(tl.load(ws.state + EPOCH)) + 1
    expired = tl.load(ws.state + EXPIRED)
    # A wait of this very call may expire before its last program begins: all programs must decide the same.
    number = tl.where((expired != 0) & (expired < epoch), -epoch, epoch)
    if tl.program_id(0) == 0:
        release_all(Call(ws, rank, epoch), rank, number, WORLD)
    return Call(ws, rank, number)


@triton.jit
def end(call, WORLD: tl.constexpr, OP: tl.constexpr):
    """Ends the call on this rank, once all ranks have begun it; every program does this last."""
    if tl.program_id(0) == 0:
        wait_all(call, 0, -1, WORLD, OP)
    tl.debug_barrier()
    if tl.atomic_add(call.ws.state + ENDED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(call.ws.state + ENDED, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(call.ws.state + EPOCH, call.epoch, sem="relaxed", scope="gpu")


@triton.jit
def put(call, rank, index, good):
    """Release: what this program has stored is visible to `rank` once it has waited for flag `index`.

    `good` False says that it was made of something that did not arrive.
    """
    tl.debug_barrier()
    store_release(flag_at(call, rank, index), value_of(call, good), True)


@triton.jit
def put_here(call, index):
    """`put` of flag `index` at this rank itself. Atomic operations need no link here, and take fewer registers."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_at(call, call.rank, index), call.epoch, sem="release", scope="sys")


@triton.jit
def put_all(call, index, good, WORLD: tl.constexpr):
    """`put` of flag `index` at all ranks, this one too."""
    tl.debug_barrier()
    release_all(call, index, value_of(call, good), WORLD)


@triton.jit
def value_of(call, good):
    """What a flag is put to."""
    return tl.where(good, call.epoch, -tl.abs(call.epoch))


@triton.jit
def release_all(call, index, value, WORLD: tl.constexpr):
    """Sets flag `index` at all ranks to `value`; at none if this rank has given up before."""
    if call.epoch > 0:
        offset = (call.epoch & 1) * call.ws.half_bytes + tl.cast(index, tl.int64) * 8
        store_release_all(call.ws.workspaces, offset, value, WORLD)


@triton.jit
def wait(call, index, source, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """Acquire: True once `source` has put flag `index` of this rank; False when it will not, which is then on record.

    `tile` is for the record.
    """
    seen = look(flag_at(call, call.rank, index))
    if seen < call.epoch:
        seen = poll(call, index, source, seen)
        if seen < call.epoch:
            record(call, source, tile, seen < 0, WORLD, OP)
    tl.debug_barrier()
    return (seen >= call.epoch) & (call.epoch > 0)


@triton.jit
def wait_all(call, first, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """Acquire: True once every rank s has put flag `first` + s of this rank; False when one of them will not."""
    good = all_reached(flag_at(call, call.rank, first), call.epoch, -1, WORLD) & (call.epoch > 0)
    if not good:
        good = True
        # Not unrolled, here and elsewhere: each copy would inline the whole timeout path of wait().
        for source in tl.range(0, WORLD):
            good = wait(call, first + source, source, tile, WORLD, OP) & good
    return good


@triton.jit
def poll(call, index, source, seen):
    """What flag `index` holds once it is set or the deadline has passed; something negative if `source` has given up.

    The branches are the same for all threads, since each is on what came through an atomic.
    """
    flag = flag_at(call, call.rank, index)
    clock = call.ws.state + CLOCK
    start = time_at(clock)
    polls = 0
    waiting = (seen >= 0) & ~hopeless(call, source)
    while waiting:
        pause()
        seen = look(flag)
        polls += 1
        waiting = (seen < call.epoch) & (seen >= 0)
        if waiting & (polls % POLLS_PER_CLOCK == 0):
            if look(flag_at(call, call.rank, source)) < 0:
                # It has given up. What it did before, in this call too, can be seen by now.
                seen = look(flag)
                seen = tl.where(seen < call.epoch, -call.epoch, seen)
                waiting = False
            else:
                waiting = (time_at(clock) - start < call.ws.timeout_ns) & ~hopeless(call, source)
    return seen


@triton.jit
def hopeless(call, source):
    """Whether a wait has expired already, or the host has ended those for `source`."""
    stopped = tl.atomic_add(call.ws.state + STOP, 0, sem="relaxed", scope="gpu")
    return ~unbroken(call) | ((stopped >> tl.cast(source, tl.int64)) & 1 != 0)


@triton.jit
def time_at(word):
    """The time in ns, the same for all threads of the program: it has been through an atomic, at `word`."""
    tl.atomic_max(word, now_ns(), sem="relaxed", scope="gpu")
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu")


@triton.jit
def record(call, source, tile, gave_up, WORLD: tl.constexpr, OP: tl.constexpr):
    """Writes the error record, unless there is one: the first wait to expire is the one to tell of."""
    none = tl.cast(0, tl.int64)
    if tl.atomic_cas(call.ws.state + EXPIRED, none, call.epoch, sem="relaxed", scope="gpu") == 0:
        absent = none
        for peer in tl.range(0, WORLD):
            begun = look(flag_at(call, call.rank, peer))
            late = (begun >= 0) & (begun < call.epoch)
            absent += late.to(tl.int64) << tl.cast(peer, tl.int64)
        tl.store(call.ws.error + ERROR_OP, OP)
        tl.store(call.ws.error + ERROR_CALL, call.epoch)
        tl.store(call.ws.error + ERROR_RANK, call.rank)
        tl.store(call.ws.error + ERROR_TILE, tile)
        tl.store(call.ws.error + ERROR_SOURCE, source)
        tl.store(call.ws.error + ERROR_ABSENT, absent)
        tl.store(call.ws.error + ERROR_GAVE_UP, gave_up.to(tl.int64))
        tl.debug_barrier()
        # A fence for the system, on a word of this GPU: not every host takes atomics of a GPU in its own memory.
        tl.atomic_xchg(call.ws.state + EXPIRED, call.epoch, sem="acq_rel", scope="sys")
        tl.store(call.ws.error + ERROR_SET, 1)


@triton.jit
def is_last(call, counter, count):
    """True for the last of `count` programs that arrive at this counter: it sees what all have stored before.

    Leaves the counter at zero, for the next call.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(call.ws.state + COUNTERS + counter, 1, sem="acq_rel", scope="gpu")
    last = arrived == count - 1
    if last:
        tl.atomic_xchg(call.ws.state + COUNTERS + counter, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return last


@triton.jit(do_not_specialize=["rank"])
def begin_kernel(ws, rank, WORLD: tl.constexpr):
    """Begins a call, and no more: for a rank that gives up in it."""
    begin(ws, rank, WORLD)


fix_cache_keys(__name__)
