"""Shards that copy engines bring while a kernel runs: which is there, in an order that is the same for all programs.

Words of this rank's memory, int64, W each; all are 0 when the kernel begins (csrc/copy_engine/steps.h has the rest):

    arrived[s]  the stream that copies: rank s's shard is in its place, 1
    order[p]    the first program to ask for shard number p: 1 + the rank whose shard that is
    order[W-1]  all programs: the time, which every thread of a program must see alike

Orders: the stream writes arrived behind the copy, for the whole system. A program that finds no order[p] looks at all
of arrived (relaxed) and claims one that is there and not taken (compare and swap, acq_rel.gpu); every program then
reads order[p] (acquire) and arrived of that rank (acquire.sys), which holds 1 by then, and meets a barrier: no load of
the shard by any thread can run ahead of it. Loads by TMA are of another proxy, so a fence follows (`ptx.async_fence`).

Deadlines: the host's watchdog ends the waits of streams, and sets arrived of what does not come; what the kernel makes
of that becomes NaN behind it. Only where streams do not run at all does the kernel's own deadline pass. It sets
`expired` then, a word of the host, and writes NaN itself.

Any program may claim, so that a rank that is late holds up nothing but what is made of its own shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from .ptx import pause
from .signals import POLLS_PER_CLOCK, look, time_at


class Arrivals(NamedTuple):
    """What a kernel is given of a gather that it waits for."""

    arrived: Any  # int64 [W]
    order: Any  # int64 [W]
    expired: Any  # address of an int64
    timeout_ns: Any


@triton.jit
def next_shard(come, position, taken, rank, WORLD: tl.constexpr):
    """The rank whose shard is number `position` to be taken and can be read now; -1 where none has come in time.

    Bits of `taken` are ranks whose shards have come before.
    """
    chosen = look(come.order + position)
    if chosen == 0:
        chosen = claim(come, position, taken, rank, WORLD)
    source = tl.cast(chosen - 1, tl.int32)
    if source >= 0:
        look(come.arrived + source)
    tl.debug_barrier()
    return source


@triton.jit
def claim(come, position, taken, rank, WORLD: tl.constexpr):
    """What order[position] holds once it is set, or 0 when the deadline has passed."""
    place = come.order + position
    time = come.order + WORLD - 1
    start = time_at(time)
    chosen = tl.cast(0, tl.int64)
    polls = 0
    waiting = True
    # By distance, so that no two ranks look for the same shard first.
    distance = tl.arange(0, triton.next_power_of_2(WORLD))
    source = (distance + rank) % WORLD
    others = (distance > 0) & (distance < WORLD)
    while waiting:
        here = tl.load(come.arrived + source, mask=others, other=0, volatile=True)
        free = others & (here == 1) & ((taken >> tl.cast(source, tl.int64)) & 1 == 0)
        nearest = tl.min(tl.where(free, distance, WORLD), axis=0)
        found = tl.where(nearest < WORLD, (nearest + rank) % WORLD + 1, 0)
        # Threads may have found different ones: that of the thread that swaps counts. With 0 nothing changes.
        tl.atomic_cas(place, tl.cast(0, tl.int64), tl.cast(found, tl.int64), sem="acq_rel", scope="gpu")
        chosen = look(place)
        polls += 1
        waiting = chosen == 0
        if waiting:
            pause()
            if polls % POLLS_PER_CLOCK == 0:
                waiting = time_at(time) - start < come.timeout_ns
    if chosen == 0:
        tl.store(come.expired.to(tl.pointer_type(tl.int64)), 1)
    return chosen


fix_cache_keys(__name__)
