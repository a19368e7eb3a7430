"""Signals between ranks inside a kernel: put a flag, wait for one, begin and end a call.

Every rank has a workspace of two halves, mapped by all ranks. Call number `epoch` uses half `epoch % 2`:

    word 0 .. W-1   begun: word s is put by rank s when it begins the call
    word W ..       flags: each has one writer and one reader per call, chosen by the kernel
    bytes           data, after the first 64th of the half, which is reserved for words in every launch

A flag is an int64 that holds the number of the last call that set it. It is set if `flag >= epoch`, so nothing is
zeroed between calls, and data may not be stored where a later launch may have a flag. (32 bits are too few: a flag
unused for 2^31 calls, 6 hours at 10 us each, would look set.) Calls are counted in device memory: every program reads
the number when it begins and the last to end advances it, so each replay of a CUDA graph continues the count.

Patterns, and the memory order of each:

    put          1. all threads store a tile; 2. barrier of the threads; 3. one thread does st.release.sys on a flag at
                 the reader. The release is cumulative: a reader that sees the flag sees the tile, through NVLink as
                 well as in shared memory. put_all: one thread per rank; the fence of a release waits until all earlier
                 stores have arrived, and the fences of these threads wait at the same time. Atomics are used only on
                 memory of their own GPU, so links need not support them.
    wait         1. one thread polls a flag of its own rank with acquire.sys (adding 0, which Triton compiles to a
                 load); 2. Triton broadcasts the value to the other threads through a barrier; 3. one more barrier keeps
                 the loads of the tile by all threads behind it. Polls stay on this GPU, because a flag is stored at its
                 reader. All threads see one value, so they leave the loop together (with ld.volatile each would see its
                 own value, and they could diverge before a barrier). wait_all: one thread for each of W consecutive
                 flags, and one barrier for all; flags are waited for one by one only if one is missing.
    begin, end   call e+1 of a rank begins after its call e ended (one stream per workspace), and end waits until all
                 ranks have begun. So a rank that begins call e+2 knows that all ranks have ended e, and may write its
                 half again. This is the only barrier between calls; it is free if data arrived from all ranks anyway.
    count        programs of one rank increment a counter (atom.acq_rel.gpu); the last one continues. None waits.

Progress. Programs wait only for programs of the same number (`tl.program_id(0)`) on other ranks, and these waits form
no cycle: all programs first compute and put, then sum, then copy. So a kernel ends if all its programs run at once, in
order on fewer SMs, or one after the other, as in the interpreter. All ranks must launch the same number of programs.

Rules for kernels. Threads store and load the data: a completed wait for a TMA store means that the store has read
shared memory, not that it has written. No wait is in a loop that Triton pipelines (one with a dot), because pipelining
moves loads of later iterations ahead of their wait.

Failure. No wait is unbounded. One that lasts longer than `timeout_ns` writes an error record and returns False, and
all later waits of the workspace return at once: the kernel runs to its end, with wrong results, and the CUDA context
stays usable. A rank that gave up

    - puts `-epoch` instead of `epoch` for a result whose input did not arrive, so that no peer uses it;
    - in later calls (queued, or in a graph that is replayed) writes no data to peers, which may be calls behind and
      still reading: `begin` puts `-epoch` as begun, so that peers expect nothing, and the call writes all else to this
      rank's own memory.

So the data is right whenever a wait returns True. `workspace.Workspace.leave` ends the waits of peers in the same way,
for a host that makes no more calls. The record is in host memory, where `workspace.Workspace.expired` reads it while
kernels run; its first word is written last, after a release at system scope.

A CUDA graph may be captured if the workspace was created before, is large enough, and is used by one stream (or branch
of the graph) at a time; if an earlier call loaded the kernels; and if all ranks replay graphs with the same calls in
the same order. Calls outside of the graph may run in between.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from . import protocol
from .ptx import all_reached, now_ns, pause, store_release, store_release_all

# The words that this file uses, as constexpr: kernels cannot read other globals.
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


class SignalledCall(NamedTuple):
    """One call in a kernel; made by `begin` or `join`."""

    ws: Any  # workspace.WorkspaceArguments
    rank: Any
    epoch: Any  # number of this call; negative if this rank gave up in an earlier call


@triton.jit
def half_at(call, rank):
    """Address of this call's half of `rank`'s workspace; of this rank's own workspace if it gave up before."""
    place = tl.where(call.epoch > 0, rank, call.rank)
    return tl.load(call.ws.workspaces + place) + (call.epoch & 1) * call.ws.half_bytes


@triton.jit
def flag_at(call, rank, index):
    """Pointer to flag number `index` at `rank`."""
    return half_at(call, rank).to(tl.pointer_type(tl.int64)) + index


@triton.jit
def join(ws, rank):
    """The call that an earlier launch of this rank has begun; that launch has also advanced the call number."""
    return SignalledCall(ws, rank, tl.load(ws.state + EPOCH))


@triton.jit
def unbroken(call):
    """True if no wait of this workspace has expired so far."""
    return tl.atomic_add(call.ws.state + EXPIRED, 0, sem="relaxed", scope="gpu") == 0


@triton.jit
def look(flag):
    """Acquire: the flag's current value, the same for all threads."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def begin(ws, rank, WORLD: tl.constexpr):
    """Begin the call on this rank and notify all ranks; every program does this first."""
    epoch = tl.abs(tl.load(ws.state + EPOCH)) + 1
    expired = tl.load(ws.state + EXPIRED)
    # A wait of this call may expire before its last program begins, and all programs must decide the same.
    number = tl.where((expired != 0) & (expired < epoch), -epoch, epoch)
    if tl.program_id(0) == 0:
        release_all(SignalledCall(ws, rank, epoch), rank, number, WORLD)
    return SignalledCall(ws, rank, number)


@triton.jit
def end(call, WORLD: tl.constexpr, OP: tl.constexpr):
    """End the call on this rank once all ranks have begun it; every program does this last."""
    if tl.program_id(0) == 0:
        wait_all(call, 0, -1, WORLD, OP)
    tl.debug_barrier()
    if tl.atomic_add(call.ws.state + ENDED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(call.ws.state + ENDED, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(call.ws.state + EPOCH, call.epoch, sem="relaxed", scope="gpu")


@triton.jit
def put(call, rank, index, good):
    """Release: set flag `index` at `rank`. A program there that waits for the flag sees this program's earlier stores.

    `good` False: the stores are invalid, because some of their input did not arrive.
    """
    tl.debug_barrier()
    store_release(flag_at(call, rank, index), value_of(call, good), True)


@triton.jit
def put_here(call, index):
    """`put` of flag `index` at this rank itself, by an atomic: no link is involved, and it takes fewer registers."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_at(call, call.rank, index), call.epoch, sem="release", scope="sys")


@triton.jit
def put_all(call, index, good, WORLD: tl.constexpr):
    """`put` of flag `index` at all ranks, including this one."""
    tl.debug_barrier()
    release_all(call, index, value_of(call, good), WORLD)


@triton.jit
def value_of(call, good):
    """Value of a flag: the call number, negative if not `good` or if this rank gave up before."""
    return tl.where(good, call.epoch, -tl.abs(call.epoch))


@triton.jit
def release_all(call, index, value, WORLD: tl.constexpr):
    """Set flag `index` at all ranks to `value`; at none if this rank gave up before."""
    if call.epoch > 0:
        offset = (call.epoch & 1) * call.ws.half_bytes + tl.cast(index, tl.int64) * 8
        store_release_all(call.ws.workspaces, offset, value, WORLD)


@triton.jit
def wait(call, index, source, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """Acquire: True once `source` has put flag `index` of this rank; False, with an error record, if it will not.

    `tile` is written to the record.
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
    """Acquire: True once every rank s has put flag `first` + s of this rank; False if one of them will not."""
    good = all_reached(flag_at(call, call.rank, first), call.epoch, -1, WORLD) & (call.epoch > 0)
    if not good:
        good = True
        # Not unrolled, here and elsewhere: each copy would inline the whole timeout path of wait().
        for source in tl.range(0, WORLD):
            good = wait(call, first + source, source, tile, WORLD, OP) & good
    return good


@triton.jit
def poll(call, index, source, seen):
    """Value of flag `index` once it is set or the deadline has passed; negative if `source` has given up.

    All threads take the same branches, since each condition is on a value read by an atomic.
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
                # `source` has given up. All that it put before, in this call too, is visible by now.
                seen = look(flag)
                seen = tl.where(seen < call.epoch, -call.epoch, seen)
                waiting = False
            else:
                waiting = (time_at(clock) - start < call.ws.timeout_ns) & ~hopeless(call, source)
    return seen


@triton.jit
def hopeless(call, source):
    """True if a wait has expired already, or the host has ended the waits for `source`."""
    stopped = tl.atomic_add(call.ws.state + STOP, 0, sem="relaxed", scope="gpu")
    return ~unbroken(call) | ((stopped >> tl.cast(source, tl.int64)) & 1 != 0)


@triton.jit
def time_at(word):
    """Time in ns, the same for all threads of the program since it is read by an atomic on `word`."""
    tl.atomic_max(word, now_ns(), sem="relaxed", scope="gpu")
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu")


@triton.jit
def record(call, source, tile, gave_up, WORLD: tl.constexpr, OP: tl.constexpr):
    """Write the error record unless there is one: only the first wait to expire is reported."""
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
        # A fence at system scope, on a word of this GPU: not every host supports GPU atomics on its memory.
        tl.atomic_xchg(call.ws.state + EXPIRED, call.epoch, sem="acq_rel", scope="sys")
        tl.store(call.ws.error + ERROR_SET, 1)


@triton.jit
def is_last(call, counter, count):
    """True for the last of `count` programs that arrive at this counter: it sees the earlier stores of all of them.

    The counter is reset to zero for the next call.
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
    """Begin a call and do nothing else, for a rank that gives up in it."""
    begin(ws, rank, WORLD)


fix_cache_keys(__name__)
