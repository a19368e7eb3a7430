"""Device side of an overlapped gather: programs take shards as copy engines deliver them, in one order for all.

Words in this rank's memory, int64, W each, all 0 when the kernel begins (the host's side: csrc/copy_engine/steps.h):

    arrived[s]  set to 1 by the copying stream once rank s's shard is in place
    order[p]    set by the first program that asks for shard number p: 1 + the rank of that shard
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
def next_shard(arrivals, position, taken, rank, WORLD: tl.constexpr):
    """Return the rank of shard number `position`, once it can be read; -1 if none arrives in time.

    `taken` has a bit for each rank whose shard was taken before.
    """
    chosen = read_flag(arrivals.order + position)
    if chosen == 0:
        chosen = claim_shard(arrivals, position, taken, rank, WORLD)
    source = tl.cast(chosen - 1, tl.int32)
    if source >= 0:
        read_flag(arrivals.arrived + source)
    tl.debug_barrier()
    return source


@triton.jit
def claim_shard(arrivals, position, taken, rank, WORLD: tl.constexpr):
    """Value of order[position] once it is set, by this program or another; 0 once the deadline has passed."""
    place = arrivals.order + position
    time = arrivals.order + WORLD - 1
    start = program_time(time)
    chosen = tl.cast(0, tl.int64)
    polls = 0
    waiting = True
    # Shards are tried in the order of distance, so that no two ranks try the same shard first.
    distance = tl.arange(0, triton.next_power_of_2(WORLD))
    source = (distance + rank) % WORLD
    others = (distance > 0) & (distance < WORLD)
    while waiting:
        here = tl.load(arrivals.arrived + source, mask=others, other=0, volatile=True)
        free = others & (here == 1) & ((taken >> tl.cast(source, tl.int64)) & 1 == 0)
        nearest = tl.min(tl.where(free, distance, WORLD), axis=0)
        found = tl.where(nearest < WORLD, (nearest + rank) % WORLD + 1, 0)
        # Threads may have found different ranks: the thread that swaps decides. Swapping in 0 changes nothing.
        tl.atomic_cas(place, tl.cast(0, tl.int64), tl.cast(found, tl.int64), sem="acq_rel", scope="gpu")
        chosen = read_flag(place)
        polls += 1
        waiting = chosen == 0
        if waiting:
            pause()
            if polls % POLLS_PER_CLOCK == 0:
                waiting = program_time(time) - start < arrivals.timeout_ns
    if chosen == 0:
        tl.store(arrivals.expired, 1)
    return chosen


fix_cache_keys(__name__)
