"""Device side of an overlapped gather: programs take shards as copy engines deliver them, in one order for all.

Words in this rank's memory, int64, W each, all 0 when the kernel begins (the host's side: csrc/copy_engine/steps.h):

    arrived[s]  set to 1 by the copying stream once rank s's shard is in place
    order[p]    set by the first program that asks for the p-th shard to arrive: 1 + the rank of that shard
    order[W-1]  written by all programs: the time, so that every thread of a program reads the same one

Memory order: the stream writes `arrived` after the copy, at system scope. A program that finds order[p] empty reads all
of `arrived` (relaxed) and claims a shard that has arrived and is not taken (compare and swap, acq_rel.gpu). Then every
program reads order[p] (acquire) and `arrived` of that rank (acquire.sys), which is 1 by then, and passes a barrier: no
thread loads the shard before it. TMA loads use another proxy, so a fence follows (`language.async_fence`).

Deadlines: the host's watchdog ends the waits of streams and sets `arrived` of shards that do not arrive; results of
these are overwritten with NaN after the kernel. The kernel's own deadline passes only if the streams do not run at all.
The kernel then sets `expired`, a word of the host, and writes NaN itself.

Any program may claim any shard, so a late rank delays only the results of its own shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from ..language import pause
from .signals import POLLS_PER_CLOCK, program_time, read_flag


class Arrivals(NamedTuple):
    """Kernel arguments that describe the gather that the kernel waits for."""

    arrived: Any  # int64 [W]
    order: Any  # int64 [W]
    expired: Any  # int64 [1] in host memory
    timeout_ns: Any


@triton.jit
def next_shard(arrivals, position, taken_ranks, rank, WORLD: tl.constexpr):
    """Return the rank of the shard at `position` of the order, once it can be read; -1 if none arrives in time.

    `taken_ranks` has a bit for each rank whose shard was taken before.
    """
    chosen = read_flag(arrivals.order + position)
    if chosen == 0:
        chosen = claim_shard(arrivals, position, taken_ranks, rank, WORLD)
    source = tl.cast(chosen - 1, tl.int32)
    if source >= 0:
        read_flag(arrivals.arrived + source)
    tl.debug_barrier()
    return source


@triton.jit
def claim_shard(arrivals, position, taken_ranks, rank, WORLD: tl.constexpr):
    """Return order[position] once it is set, by this program or another; 0 once the deadline has passed."""
    order_slot = arrivals.order + position
    clock = arrivals.order + WORLD - 1
    start = program_time(clock)
    chosen = tl.cast(0, tl.int64)
    polls = 0
    is_waiting = True
    # Shards are tried in the order of distance, so that no two ranks try the same shard first.
    distance = tl.arange(0, triton.next_power_of_2(WORLD))
    source = (distance + rank) % WORLD
    is_other_rank = (distance > 0) & (distance < WORLD)
    while is_waiting:
        arrival_flags = tl.load(arrivals.arrived + source, mask=is_other_rank, other=0, volatile=True)
        is_free = is_other_rank & (arrival_flags == 1) & ((taken_ranks >> tl.cast(source, tl.int64)) & 1 == 0)
        nearest = tl.min(tl.where(is_free, distance, WORLD), axis=0)
        candidate = tl.where(nearest < WORLD, (nearest + rank) % WORLD + 1, 0)
        # Threads may have different candidates: the thread that swaps decides. Swapping in 0 changes nothing.
        tl.atomic_cas(order_slot, tl.cast(0, tl.int64), tl.cast(candidate, tl.int64), sem="acq_rel", scope="gpu")
        chosen = read_flag(order_slot)
        polls += 1
        is_waiting = chosen == 0
        if is_waiting:
            pause()
            if polls % POLLS_PER_CLOCK == 0:
                is_waiting = program_time(clock) - start < arrivals.timeout_ns
    if chosen == 0:
        tl.store(arrivals.expired, 1)
    return chosen


fix_cache_keys(__name__)
