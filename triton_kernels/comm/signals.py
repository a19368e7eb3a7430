"""Signals between ranks inside a kernel, and the workspace that holds them.

A kernel begins a call, sets flags at other ranks, waits for flags that other ranks set here, and ends the call.

Every rank has a workspace of two halves, mapped by all ranks. Call number `epoch` uses half `epoch % 2`:

    word 0 .. W-1   begun: word s is set by rank s when it begins the call
    word W ..       flags: each has one writer and one reader per call, chosen by the kernel
    bytes           data, after the first 64th of the half, which is reserved for words in every launch

A flag is an int64 that holds the number of the last call that set it. It is set if `flag >= epoch`, so nothing is
zeroed between calls, and data may not be stored where a later launch may have a flag. (32 bits are too few: a flag
unused for 2^31 calls, 6 hours at 10 us each, would look set.) Calls are counted in device memory: every program reads
the number when it begins, and the last program to end advances it. So each replay of a CUDA graph continues the count.

Patterns, and the memory order of each:

    signal       1. all threads store a tile; 2. barrier of the threads; 3. one thread does st.release.sys on a flag at
                 the reader. The release is cumulative: a reader that sees the flag sees the tile, through NVLink as
                 well as in shared memory. signal_all: one thread per rank. The fence of a release waits until all
                 earlier stores have arrived, and the fences of these threads wait at the same time. Atomics are used
                 only on memory of their own GPU, so links need not support them.
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
no cycle: all programs first compute and signal, then sum, then copy. So a kernel ends if all its programs run at once,
in order on fewer SMs, or one after the other, as in the interpreter. All ranks must launch equally many programs.

Rules for kernels. Threads store and load the data: a completed wait for a TMA store means that the store has read
shared memory, not that it has written. No wait is in a loop that Triton pipelines (one with a dot), because pipelining
moves loads of later iterations ahead of their wait.

Failure. No wait is unbounded. One that lasts longer than `timeout_ns` writes an error record and returns False, and
all later waits of the workspace return at once: the kernel runs to its end, with wrong results, and the CUDA context
stays usable. A rank that gave up

    - signals `-epoch` instead of `epoch` for a result whose input did not arrive, so that no peer uses it;
    - in later calls (queued, or in a graph that is replayed) writes no data to peers, which may be calls behind and
      still reading: `begin` sets the begun words to `-epoch`, so that peers expect nothing, and the call writes all
      else to this rank's own memory.

So the data is right whenever a wait returns True. `Workspace.leave` ends the waits of peers in the same way, for a host
that makes no more calls. The record is in host memory, so that `Workspace.expired_wait` can read it while kernels run;
its first word is written last, after a release at system scope.

A CUDA graph may be captured if the workspace was created before, is large enough, and is used by one stream (or branch
of the graph) at a time; if an earlier call loaded the kernels; and if all ranks replay graphs with the same calls in
the same order. Calls outside of the graph may run in between.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..language import all_reached, now_ns, pause, store_release, store_release_all
from .streams import own_streams

# Keep these word indices in sync with csrc/cuda/protocol.h: Triton and CUDA kernels share workspaces.

# Words of a workspace's `state`, int64, in this rank's private memory.
EPOCH = tl.constexpr(0)  # number of calls that have ended; negative once this rank has given up
ENDED_PROGRAMS = tl.constexpr(1)  # number of programs of this call that have ended
CLOCK = tl.constexpr(2)  # latest time that a waiting program has read
EXPIRED = tl.constexpr(3)  # number of the call whose wait timed out; 0: none; HOST_ABORTED
UNREACHABLE_RANKS = tl.constexpr(4)  # bit s: the host knows that rank s will not arrive, so waits for it end at once
COUNTERS = tl.constexpr(16)  # first of the counters, one for each row of tiles; zero between calls

HOST_ABORTED = -1  # value of EXPIRED if the host has aborted this rank; less than the number of any call

# Words of the error record, int64. The host may read them once ERROR_SET is not 0.
ERROR_SET = tl.constexpr(0)
ERROR_OP = tl.constexpr(1)
ERROR_CALL = tl.constexpr(2)
ERROR_RANK = tl.constexpr(3)
ERROR_TILE = tl.constexpr(4)  # -1: the wait was for the call to begin, not for a tile
ERROR_SOURCE = tl.constexpr(5)  # the rank that was waited for
ERROR_ABSENT = tl.constexpr(6)  # bit s: rank s has not begun the call
ERROR_GAVE_UP = tl.constexpr(7)  # 1: the source has given up itself
ERROR_WORDS = 8

# A launch passes its index in this list to the kernel, so that an error can name the op.
OPS = (
    "barrier",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "all_gather_matmul",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_reduce_rms_norm",
    "ring_attention",
)
MAX_WORLD_SIZE = 63  # one bit for each rank in a word of the error record

BUFFER_ALIGNMENT = 64  # kernels assume that every rank's buffer has this alignment
DATA_ALIGNMENT = 128  # data begins at a multiple of it: whole cache lines (vector stores need only 16)
# The front of a half, one part in FLAG_SHARE, is reserved for flags: 8 bytes per 512 of data, the smallest tile.
FLAG_SHARE = 64
MAX_TILE_ROWS = 4096  # default number of counters of a workspace

POLLS_PER_CLOCK = tl.constexpr(32)


class WorkspaceArguments(NamedTuple):
    """The argument `ws` of kernels, which describes a workspace."""

    workspaces: Any  # int64 [W]: addresses of the ranks' workspaces
    state: Any  # int64, words EPOCH to COUNTERS and the counters
    error: Any  # int64, the error record in host memory
    half_bytes: Any
    timeout_ns: Any


class SignalledCall(NamedTuple):
    """One call in a kernel; made by `begin` or `current_call`."""

    ws: WorkspaceArguments
    rank: Any
    epoch: Any  # number of this call; negative if this rank gave up in an earlier call


@triton.jit
def half_at(call, rank):
    """Return the address of this call's half of `rank`'s workspace; of this rank's own if it gave up before."""
    target_rank = tl.where(call.epoch > 0, rank, call.rank)
    return tl.load(call.ws.workspaces + target_rank) + (call.epoch & 1) * call.ws.half_bytes


@triton.jit
def flag_at(call, rank, index):
    """Return the pointer to flag number `index` at `rank`."""
    return half_at(call, rank).to(tl.pointer_type(tl.int64)) + index


@triton.jit
def current_call(ws, rank):
    """Return the call that an earlier launch of this rank has begun; that launch has also advanced the call number."""
    return SignalledCall(ws, rank, tl.load(ws.state + EPOCH))


@triton.jit
def is_unbroken(call):
    """True if no wait of this workspace has expired so far."""
    return tl.atomic_add(call.ws.state + EXPIRED, 0, sem="relaxed", scope="gpu") == 0


@triton.jit
def read_flag(flag):
    """Acquire: return the flag's current value, the same for all threads."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def begin(ws, rank, WORLD: tl.constexpr):
    """Begin the call on this rank and notify all ranks; every program does this first."""
    epoch = tl.abs(tl.load(ws.state + EPOCH)) + 1
    expired_call = tl.load(ws.state + EXPIRED)
    # A wait of this call may expire before its last program begins, and all programs must decide the same.
    signed_epoch = tl.where((expired_call != 0) & (expired_call < epoch), -epoch, epoch)
    if tl.program_id(0) == 0:
        release_all(SignalledCall(ws, rank, epoch), rank, signed_epoch, WORLD)
    return SignalledCall(ws, rank, signed_epoch)


@triton.jit
def end(call, WORLD: tl.constexpr, OP: tl.constexpr):
    """End the call on this rank once all ranks have begun it; every program does this last."""
    if tl.program_id(0) == 0:
        wait_all(call, 0, -1, WORLD, OP)
    tl.debug_barrier()
    if tl.atomic_add(call.ws.state + ENDED_PROGRAMS, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(call.ws.state + ENDED_PROGRAMS, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(call.ws.state + EPOCH, call.epoch, sem="relaxed", scope="gpu")


@triton.jit
def signal(call, rank, index, is_valid):
    """Release: set flag `index` at `rank`. A program there that waits for the flag sees this program's earlier stores.

    `is_valid` False: the stores are invalid, because some of their input did not arrive.
    """
    tl.debug_barrier()
    store_release(flag_at(call, rank, index), flag_value(call, is_valid), True)


@triton.jit
def signal_local(call, index):
    """Set flag `index` at this rank itself, by an atomic: it takes fewer registers than `signal`, and uses no link."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_at(call, call.rank, index), call.epoch, sem="release", scope="sys")


@triton.jit
def signal_all(call, index, is_valid, WORLD: tl.constexpr):
    """Set flag `index` at all ranks, including this one, as `signal`."""
    tl.debug_barrier()
    release_all(call, index, flag_value(call, is_valid), WORLD)


@triton.jit
def flag_value(call, is_valid):
    """Return the value of a flag: the call number, negative if not `is_valid` or if this rank gave up before."""
    return tl.where(is_valid, call.epoch, -tl.abs(call.epoch))


@triton.jit
def release_all(call, index, value, WORLD: tl.constexpr):
    """Set flag `index` at all ranks to `value`; at none if this rank gave up before."""
    if call.epoch > 0:
        offset = (call.epoch & 1) * call.ws.half_bytes + tl.cast(index, tl.int64) * 8
        store_release_all(call.ws.workspaces, offset, value, WORLD)


@triton.jit
def wait(call, index, source, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """Acquire: True once `source` has set flag `index` of this rank; False, with an error record, if it will not.

    `tile` is written to the record.
    """
    value = read_flag(flag_at(call, call.rank, index))
    if value < call.epoch:
        value = poll(call, index, source, value)
        if value < call.epoch:
            record_expired_wait(call, source, tile, value < 0, WORLD, OP)
    tl.debug_barrier()
    return (value >= call.epoch) & (call.epoch > 0)


@triton.jit
def wait_all(call, first_flag, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """Acquire: True once every rank s has set flag `first_flag` + s of this rank; False if one of them will not."""
    is_valid = all_reached(flag_at(call, call.rank, first_flag), call.epoch, -1, WORLD) & (call.epoch > 0)
    if not is_valid:
        is_valid = True
        # Not unrolled, here and elsewhere: each copy would inline the whole timeout path of wait().
        for source in tl.range(0, WORLD):
            is_valid = wait(call, first_flag + source, source, tile, WORLD, OP) & is_valid
    return is_valid


@triton.jit
def poll(call, index, source, value):
    """Return the value of flag `index` once it is set or the deadline has passed; negative if `source` has given up.

    All threads take the same branches, since each condition is on a value read by an atomic.
    """
    flag = flag_at(call, call.rank, index)
    clock = call.ws.state + CLOCK
    start = program_time(clock)
    polls = 0
    is_waiting = (value >= 0) & ~cannot_arrive(call, source)
    while is_waiting:
        pause()
        value = read_flag(flag)
        polls += 1
        is_waiting = (value < call.epoch) & (value >= 0)
        if is_waiting & (polls % POLLS_PER_CLOCK == 0):
            if read_flag(flag_at(call, call.rank, source)) < 0:
                # `source` has given up. All flags that it set before, in this call too, are visible by now.
                value = read_flag(flag)
                value = tl.where(value < call.epoch, -call.epoch, value)
                is_waiting = False
            else:
                is_waiting = (program_time(clock) - start < call.ws.timeout_ns) & ~cannot_arrive(call, source)
    return value


@triton.jit
def cannot_arrive(call, source):
    """True if a wait has expired already, or the host has ended the waits for `source`."""
    unreachable_bits = tl.atomic_add(call.ws.state + UNREACHABLE_RANKS, 0, sem="relaxed", scope="gpu")
    return ~is_unbroken(call) | ((unreachable_bits >> tl.cast(source, tl.int64)) & 1 != 0)


@triton.jit
def program_time(word):
    """Return the time in ns, the same for all threads of the program since it is read by an atomic on `word`."""
    tl.atomic_max(word, now_ns(), sem="relaxed", scope="gpu")
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu")


@triton.jit
def record_expired_wait(call, source, tile, gave_up, WORLD: tl.constexpr, OP: tl.constexpr):
    """Write the error record unless there is one: only the first wait to expire is reported."""
    zero = tl.cast(0, tl.int64)
    if tl.atomic_cas(call.ws.state + EXPIRED, zero, call.epoch, sem="relaxed", scope="gpu") == 0:
        absent_ranks = zero
        for peer in tl.range(0, WORLD):
            begun_call = read_flag(flag_at(call, call.rank, peer))
            is_late = (begun_call >= 0) & (begun_call < call.epoch)
            absent_ranks += is_late.to(tl.int64) << tl.cast(peer, tl.int64)
        tl.store(call.ws.error + ERROR_OP, OP)
        tl.store(call.ws.error + ERROR_CALL, call.epoch)
        tl.store(call.ws.error + ERROR_RANK, call.rank)
        tl.store(call.ws.error + ERROR_TILE, tile)
        tl.store(call.ws.error + ERROR_SOURCE, source)
        tl.store(call.ws.error + ERROR_ABSENT, absent_ranks)
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
    previous_count = tl.atomic_add(call.ws.state + COUNTERS + counter, 1, sem="acq_rel", scope="gpu")
    is_last_arrival = previous_count == count - 1
    if is_last_arrival:
        tl.atomic_xchg(call.ws.state + COUNTERS + counter, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return is_last_arrival


@triton.jit(do_not_specialize=["rank"])
def begin_kernel(ws, rank, WORLD: tl.constexpr):
    """Begin a call and do nothing else, for a rank that gives up in it."""
    begin(ws, rank, WORLD)


# -- host side ---------------------------------------------------------------------------------------------------------


def align_up(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of DATA_ALIGNMENT."""
    return -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT


def flag_bytes(half_bytes: int) -> int:
    """Return the number of bytes at the front of a half that are reserved for begun words and flags, in every launch.

    If a launch with fewer flags stored data there, its bytes would look like set flags to a later launch with more
    flags: about half of all numbers are >= any epoch.
    """
    return half_bytes // (FLAG_SHARE * DATA_ALIGNMENT) * DATA_ALIGNMENT


def needed_bytes(world_size: int, slot_bytes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of the smallest workspace (both halves) in which `slot_offsets(slot_bytes)` fit."""
    flags = align_up(8 * (world_size + sum(count for count, _ in slot_bytes)))
    data = sum(align_up(count * nbytes) for count, nbytes in slot_bytes)
    return 2 * max(FLAG_SHARE * flags, align_up(-(-data * FLAG_SHARE // (FLAG_SHARE - 1))))


class Handle(Protocol):
    """The interface of a symmetric memory handle, from torch or from fused_tp, that a workspace uses."""

    rank: int
    world_size: int
    buffer_ptrs: list[int]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0
    ) -> Tensor: ...


@dataclass(frozen=True)
class ExpiredWait:
    """A wait that lasted longer than the deadline."""

    op: str
    call: int
    rank: int  # the rank that waited
    tile: int | None  # None: it waited for `source` to begin the call
    source: int  # the rank that it waited for
    absent_ranks: tuple[int, ...]  # ranks that had not begun the call
    gave_up: bool  # `source` gave up, because it waited for another rank in vain or raised an error

    def __str__(self) -> str:
        awaited = "its beginning" if self.tile is None else f"tile {self.tile}"
        if self.gave_up:
            reason = f"rank {self.source} gave up: it raised an error or waited for a rank that did not arrive in time"
        elif not self.absent_ranks:
            reason = f"rank {self.source} began the call but did not deliver in time"
        else:
            reason = ""
        if self.absent_ranks:
            ranks = f"rank{'s' * (len(self.absent_ranks) > 1)} {', '.join(str(rank) for rank in self.absent_ranks)}"
            reason += f"{' and ' * bool(reason)}{ranks} had not begun the call"
        return f"{self.op}, call {self.call}: rank {self.rank} waited for {awaited} of rank {self.source}; {reason}"


class Workspace:
    """Memory for one rank's calls on one stream: two halves of `buffer`, private state, and an error record.

    Args:
        buffer: this rank's symmetric memory, any dtype, the same size on all ranks; it is zeroed here, on the current
            stream, and all launches must be ordered after that.
        handle: maps the peers' buffers. All ranks create their workspaces at the same time (there is a barrier).
        timeout_seconds: longest wait for a peer.
        counters: largest number of rows of tiles in a launch that counts them.
        rescue_stream: GPU stream in which no work waits, so that copies in it can end the waits of kernels. Workspaces
            may share it. None: create one for this workspace.

    Attributes:
        half_count: 2: calls alternate between the halves of the buffer; 1: all calls use the same memory.
        multicast_address: address at which one store writes `buffer` of all ranks; 0 without NVLink SHARP.

    CUDA graphs may use it: create it before the capture, with room for the largest call (`needed_bytes`); `signals`
    lists the other conditions. Per call, the host allocates nothing, copies nothing and waits for nothing.

    Raises:
        ValueError: `buffer` is not the memory of `handle`, or does not begin at a multiple of 64 bytes on every rank.
    """

    half_count = 2

    def __init__(
        self,
        buffer: Tensor,
        handle: Handle,
        *,
        timeout_seconds: float,
        counters: int = MAX_TILE_ROWS,
        rescue_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.rank = handle.rank
        self.world_size = handle.world_size
        offset = _checked_offset(buffer, handle)
        addresses = [address + offset for address in handle.buffer_ptrs]
        multicast = getattr(handle, "multicast_ptr", 0) or 0
        self.multicast_address: int = multicast and multicast + offset
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.half_bytes = buffer.nbytes // 2 // DATA_ALIGNMENT * DATA_ALIGNMENT if self.half_count == 2 else 0
        self.counters = counters
        device = buffer.device
        self.buffer, self._handle = buffer, handle  # also keeps the peers' memory alive if ranks are threads
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(COUNTERS.value + counters, dtype=torch.int64, device=device)
        # Host memory that the GPU maps, so that reading it waits for no kernel.
        self.error = torch.zeros(ERROR_WORDS, dtype=torch.int64, device="cpu", pin_memory=buffer.is_cuda)
        self._error_flag = ctypes.c_int64.from_address(self.error.data_ptr() + 8 * ERROR_SET.value)
        self._unreachable_bits = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=buffer.is_cuda)
        if rescue_stream is None and buffer.is_cuda:
            rescue_stream = own_streams(self, device, 1, has_high_priority=True)[0]
        self._rescue_stream = rescue_stream
        # Loads the kernel that `leave` needs. Loading waits for running kernels, one of which might wait for `leave`.
        self._set_expired(0)
        if buffer.is_cuda:
            self._load_begin_kernel()
        buffer.zero_()
        handle.barrier(0, int(timeout_seconds * 1000))

    def arguments(self, timeout_ns: int | None = None) -> dict[str, Any]:
        """Return the arguments `ws` and `rank` of a kernel; `timeout_ns` overrides the workspace's deadline."""
        timeout_ns = self.timeout_ns if timeout_ns is None else timeout_ns
        ws = WorkspaceArguments(self.addresses, self.state, self.error, self.half_bytes, timeout_ns)
        return {"ws": ws, "rank": self.rank}

    def slot_offsets(self, slot_bytes: Sequence[tuple[int, int]], counters: int = 0) -> list[int]:
        """Return the byte offset of each run of slots in a half of the workspace.

        Args:
            slot_bytes: (number of slots, bytes per slot) of each run.
            counters: number of counters that the launch uses.

        Raises:
            ValueError: the workspace has too few bytes or counters; the message states the number that is needed.
        """
        needed = needed_bytes(self.world_size, slot_bytes)
        if needed > 2 * self.half_bytes:
            raise ValueError(
                f"The workspace has {2 * self.half_bytes} bytes; this call needs {needed}. Create a larger one."
            )
        if counters > self.counters:
            raise ValueError(
                f"The workspace has {self.counters} counters of tile rows; this call needs {counters}. Create it with "
                f"counters={counters} or more."
            )
        offsets = []
        offset = flag_bytes(self.half_bytes)
        for count, nbytes in slot_bytes:
            offsets.append(offset)
            offset += align_up(count * nbytes)
        return offsets

    def leave(self, ended_ranks: Sequence[int] = ()) -> None:
        """End all waits of peers for this rank, now and later, for a host that will launch nothing more.

        This launches one more call, queued behind the earlier ones, in which this rank gives up at once. It does
        not access the memory of `ended_ranks`, which may be unmapped.
        """
        self._set_expired(HOST_ABORTED)
        for rank in ended_ranks:  # in place, because native kernels and graphs hold the address of the table
            self.addresses[rank : rank + 1].copy_(self.addresses[self.rank : self.rank + 1])
        self._launch_begin()

    def _set_expired(self, value: int) -> None:
        self.state[EXPIRED.value : EXPIRED.value + 1].fill_(value)

    def _launch_begin(self) -> None:
        begin_kernel[(1,)](**self._begin_arguments())

    def _load_begin_kernel(self) -> None:
        with torch.cuda.device(self.buffer.device):
            begin_kernel.warmup(**self._begin_arguments(), grid=(1,))[1, 1, 1]

    def _begin_arguments(self) -> dict[str, Any]:
        # The kernel waits for nothing, so any deadline would do; a constant one avoids recompiling the kernel, because
        # Triton compiles one variant per kind of integer.
        return self.arguments(timeout_ns=0) | {"WORLD": self.world_size}

    def stop_waiting(self, rank: int | None = None) -> None:
        """End every wait of this rank's kernels for `rank` (None: all), now and later, as if its deadline had passed.

        Use it if the host knows that a peer's process has exited. Any thread may call it, not only the launching one.
        """
        self._unreachable_bits |= -1 if rank is None else 1 << rank
        word = self.state[UNREACHABLE_RANKS.value : UNREACHABLE_RANKS.value + 1]
        if self._rescue_stream is None:
            word.copy_(self._unreachable_bits)
        else:
            # A copy from host memory, not a kernel: waiting kernels may leave no SM free.
            with torch.cuda.stream(self._rescue_stream):
                word.copy_(self._unreachable_bits, non_blocking=True)

    def expired_wait(self) -> ExpiredWait | None:
        """Return the first wait to expire, or None. Never blocks, even while kernels run.

        Once a wait has expired, calls of this workspace return wrong results on some ranks: do not use it again.
        """
        # Read through ctypes: this runs in every call, and indexing a tensor takes microseconds.
        if not self._error_flag.value:
            return None
        words = [int(word) for word in self.error.tolist()]  # complete: the word above was written last
        tile = words[ERROR_TILE.value]
        absent_bits = words[ERROR_ABSENT.value]
        return ExpiredWait(
            op=OPS[words[ERROR_OP.value]],
            call=words[ERROR_CALL.value],
            rank=words[ERROR_RANK.value],
            tile=None if tile < 0 else tile,
            source=words[ERROR_SOURCE.value],
            absent_ranks=tuple(rank for rank in range(self.world_size) if absent_bits >> rank & 1),
            gave_up=bool(words[ERROR_GAVE_UP.value]),
        )


def _checked_offset(buffer: Tensor, handle: Handle) -> int:
    """Return the byte offset of `buffer` in `handle`'s memory, the same on all ranks; raise as `Workspace`."""
    # torch's handle holds the address of an allocation; tensors of a memory pool begin at an offset in it.
    offset = buffer.data_ptr() - handle.buffer_ptrs[handle.rank]
    if offset not in (0, getattr(handle, "offset", 0)):
        raise ValueError(
            f"buffer must be the memory that handle reaches, at {handle.buffer_ptrs[handle.rank]:#x} on this rank; "
            f"it is at {buffer.data_ptr():#x}."
        )
    for rank, address in enumerate(handle.buffer_ptrs):
        if (address + offset) % BUFFER_ALIGNMENT:
            raise ValueError(
                f"buffer must begin at a multiple of {BUFFER_ALIGNMENT} bytes on every rank; on rank {rank} it is at "
                f"{address + offset:#x}."
            )
    return offset


fix_cache_keys(__name__)
