"""Model checker of mutually waiting kernels: enumerates every order in which GPUs can schedule their blocks.

A few ranks, each a GPU of a few multiprocessors (SMs), run the same kernels. A GPU places blocks of the runnable kernel
with the highest priority, and among equals of the one that became runnable first; while a block of it does not fit, no
other kernel's block is placed ("leftover" policy: Amert et al., "GPU Scheduling on the NVIDIA TX2: Hidden Details
Revealed", RTSS 2017; Olmedo et al., "Dissecting the CUDA scheduling hierarchy", RTAS 2020). A cluster is placed whole
or not at all. A block is resident until all its waits are met. NVIDIA documents none of this, so a stuck state is a
hazard and not an observation.

    state of a rank     runnable kernels in order of arrival; number of placed blocks of each; blocks on each SM
    steps               a kernel becomes runnable (all before it ended); a block is placed or passes a wait; a copy ends

`stuck` returns a state without a next step in which some kernel has not ended, or None if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOM = 8  # capacity of an SM


class Placed(NamedTuple):
    """Wait until the same block of a kernel has been placed on all other ranks."""

    kernel: str


class Passed(NamedTuple):
    """Wait until all blocks of a kernel have passed `times` waits: on this rank, or on all others."""

    kernel: str
    times: int = 1
    here: bool = False


Need = Placed | Passed


@dataclass(frozen=True)
class Kernel:
    """One kernel; with zero blocks, an operation that needs no SM: a copy, or a stream's wait.

    Attributes:
        name: "x", by which other kernels refer to this one.
        stream: kernels of a stream run one after the other.
        blocks: number of blocks.
        room: share of an SM's ROOM that a block takes.
        priority: priority of its stream; the highest is placed first.
        cluster: all blocks are placed at the same time, each on a separate SM.
        waits: waits of each block, in order; the block ends after the last one.
        behind: kernels of other streams that must have ended before (events).
    """

    name: str
    stream: str
    blocks: int = 1
    room: int = 1
    priority: int = 0
    cluster: bool = False
    waits: tuple[Need, ...] = ()
    behind: tuple[str, ...] = ()


class Block(NamedTuple):
    kernel: int
    number: int
    passed: int  # number of waits passed


class Rank(NamedTuple):
    """State of one GPU."""

    queue: tuple[int, ...] = ()  # runnable kernels, in order of arrival
    placed: tuple[int, ...] = ()  # number of placed blocks of each kernel
    sms: tuple[tuple[Block, ...], ...] = ()  # blocks on each SM, sorted: SMs are interchangeable
    ended: tuple[bool, ...] = ()


State = tuple[Rank, ...]


class Model:
    """Ranks of `sms` multiprocessors that run the same kernels, each stream's in the order given."""

    def __init__(self, kernels: Sequence[Kernel], *, ranks: int = 2, sms: int = 2) -> None:
        self.kernels = tuple(kernels)
        self.number = {kernel.name: number for number, kernel in enumerate(self.kernels)}
        count = len(self.kernels)
        self.before = [
            [
                other
                for other, candidate in enumerate(self.kernels)
                if (candidate.stream == kernel.stream and other < number) or candidate.name in kernel.behind
            ]
            for number, kernel in enumerate(self.kernels)
        ]
        self.start: State = (Rank((), (0,) * count, ((),) * sms, (False,) * count),) * ranks

    def stuck(self) -> tuple[State | None, int, int]:
        """(a stuck state or None, number of stuck states, number of states)."""
        seen, todo = {self.start}, [self.start]
        example, count = None, 0
        while todo:
            state = todo.pop()
            following = set(self.steps(state))
            if not following and not all(all(rank.ended) for rank in state):
                example, count = example or state, count + 1
            todo.extend(following - seen)
            seen |= following
        return example, count, len(seen)

    def steps(self, state: State) -> Iterator[State]:
        for number, rank in enumerate(state):
            for after in (*self._come(state, number), *self._place(rank), *self._go_on(state, number)):
                # All ranks run the same kernels, so they are interchangeable: sorting halves the states.
                yield tuple(sorted((*state[:number], after, *state[number + 1 :])))

    def _come(self, state: State, here: int) -> Iterator[Rank]:
        rank = state[here]
        for number, kernel in enumerate(self.kernels):
            if number in rank.queue or rank.ended[number] or not all(rank.ended[one] for one in self.before[number]):
                continue
            if kernel.blocks:
                yield rank._replace(queue=(*rank.queue, number))
            elif all(self._met(state, here, need, None) for need in kernel.waits):
                yield self._end(rank, number)

    def _place(self, rank: Rank) -> Iterator[Rank]:
        waiting = [number for number in rank.queue if rank.placed[number] < self.kernels[number].blocks]
        if not waiting:
            return
        number = max(waiting, key=lambda one: (self.kernels[one].priority, -rank.queue.index(one)))
        kernel = self.kernels[number]
        free = [index for index, sm in enumerate(rank.sms) if self._taken(sm) + kernel.room <= ROOM]
        at_once = kernel.blocks if kernel.cluster else 1
        if len(free) < at_once:
            return
        first = rank.placed[number]
        sms = list(rank.sms)
        for offset in range(at_once):
            sms[free[offset]] = tuple(sorted((*sms[free[offset]], Block(number, first + offset, 0))))
        placed = (*rank.placed[:number], first + at_once, *rank.placed[number + 1 :])
        yield rank._replace(placed=placed, sms=tuple(sorted(sms)))

    def _go_on(self, state: State, here: int) -> Iterator[Rank]:
        rank = state[here]
        for index, sm in enumerate(rank.sms):
            for block in sm:
                waits = self.kernels[block.kernel].waits
                if block.passed < len(waits) and not self._met(state, here, waits[block.passed], block.number):
                    continue
                rest = [one for one in sm if one != block]
                if block.passed + 1 < len(waits):
                    rest.append(block._replace(passed=block.passed + 1))
                sms = tuple(sorted((*rank.sms[:index], tuple(sorted(rest)), *rank.sms[index + 1 :])))
                after = rank._replace(sms=sms)
                all_placed = rank.placed[block.kernel] == self.kernels[block.kernel].blocks
                if all_placed and not any(one.kernel == block.kernel for blocks in sms for one in blocks):
                    after = self._end(after, block.kernel)
                yield after

    def _end(self, rank: Rank, number: int) -> Rank:
        queue = tuple(one for one in rank.queue if one != number)
        return rank._replace(queue=queue, ended=(*rank.ended[:number], True, *rank.ended[number + 1 :]))

    def _taken(self, sm: tuple[Block, ...]) -> int:
        return sum(self.kernels[block.kernel].room for block in sm)

    def _met(self, state: State, here: int, need: Need, block: int | None) -> bool:
        number = self.number[need.kernel]
        if isinstance(need, Placed):
            assert block is not None
            return all(rank.placed[number] > block for other, rank in enumerate(state) if other != here)
        where = [state[here]] if need.here else [rank for other, rank in enumerate(state) if other != here]
        return all(self._has_passed(rank, number, need.times) for rank in where)

    def _has_passed(self, rank: Rank, number: int, times: int) -> bool:
        if rank.ended[number]:
            return True
        running = [block for sm in rank.sms for block in sm if block.kernel == number]
        return (
            times < max(len(self.kernels[number].waits), 1)
            and rank.placed[number] == self.kernels[number].blocks
            and all(block.passed >= times for block in running)
        )

    def told(self, state: State) -> str:
        """Describe `state` in words, one line per rank."""
        names = [kernel.name for kernel in self.kernels]
        return "\n".join(
            f"rank {number}: may run {[names[one] for one in rank.queue]}, "
            f"running {[names[block.kernel] for sm in rank.sms for block in sm]}, "
            f"ended {[name for name, ended in zip(names, rank.ended, strict=True) if ended]}"
            for number, rank in enumerate(state)
        )
