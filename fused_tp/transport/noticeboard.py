"""What the ranks of a group tell each other through its store once a movement does not end: how far each has come.

torch.distributed does not say which ranks a wait was in vain for. So a rank that waits long, or fails, leaves a notice;
who raises reads the notices of all, and names the ranks that have left none or are at an earlier call. Nothing is
written while all goes well, since a round trip to the store costs more than many an op.

Asking the store can itself block for ever (its host may be stopped), so it is asked with a deadline (`bounded_store`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from fused_tp.transport.bounded_store import ANSWER_SECONDS, BoundedStore

T = TypeVar("T")

_POLL_SECONDS = 0.02
# A rank that had been in the call for less than this when it failed came only after the others had given up: its call
# ended at once, but a busy machine may have taken long to get there. Clocks of several hosts would compare no better.
_LATE_SECONDS = 0.5


@dataclass(frozen=True)
class Notice:
    """Where one rank is.

    Attributes:
        call: the last call that it has started.
        ops: the ops of the last calls it has started, up to that one.
        waited: seconds since it had started the call that it waits for, or that failed.
        failed: its part of the group has ended; else it only waits.
        error: the class of the error it raises, where it gave up by itself and not because of others.
        at: the call that error is about.
        sentence: what the error says.
    """

    call: int
    ops: Sequence[str]
    waited: float
    failed: bool = False
    error: str = ""
    at: int = 0
    sentence: str = ""

    def op(self, call: int) -> str | None:
        """The op it started as `call`; None where that is unknown."""
        back = self.call - call
        return self.ops[-1 - back] if 0 <= back < len(self.ops) else None


class Noticeboard:
    """The notices of one group. No method raises.

    Attributes:
        answers: the store has answered what it was asked last. Else nothing is known.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self._store = BoundedStore(store)
        self._rank = rank
        self._world_size = world_size
        self.answers = True
        self._prefix: str | None = None

        # A store may outlive its group and serve another of the same name: each rank counts its groups there.
        # Once: where it is not known whether that was counted, this board stays blank. Late is well.
        def join(store: dist.Store) -> None:
            self._prefix = f"{name}/{store.add(f'{name}/generation/{rank}', 1)}"

        self._ask(join, None)

    def post(self, notice: Notice) -> None:
        """Put up this rank's notice, in place of an earlier one."""
        text = json.dumps(asdict(notice))

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), text)
            if notice.error:
                store.set(self._key("given_up"), "")

        self._ask(write, None)

    def given_up(self) -> bool:
        """Whether some rank has given the group up."""
        return self._ask(lambda store: store.check([self._key("given_up")]), False)

    def read(self) -> dict[int, Notice]:
        """The notices there are, by rank."""
        return self._ask(self._read, {})

    def read_until(self, enough: Callable[[Mapping[int, Notice]], bool], seconds: float) -> dict[int, Notice]:
        """The notices once they are enough, or those there are after `seconds`."""
        deadline = time.perf_counter() + seconds
        while True:
            notices = self.read()
            if enough(notices) or time.perf_counter() > deadline or not self.answers:
                return notices
            time.sleep(_POLL_SECONDS)  # a store has no wait for whichever notice comes next

    def _read(self, store: dist.Store) -> dict[int, Notice]:
        found = {}
        for rank in range(self._world_size):
            key = self._key(f"rank/{rank}")
            if store.check([key]):
                found[rank] = Notice(**json.loads(store.get(key)))
        return found

    def _key(self, what: str) -> str:
        if self._prefix is None:
            raise RuntimeError("This rank does not know which of the store's groups of this name is its own.")
        return f"{self._prefix}/{what}"

    def _ask(self, question: Callable[[dist.Store], T], unknown: T) -> T:
        try:
            answer = self._store.ask(question, ANSWER_SECONDS)
        except Exception:  # most likely its host is stopped, or has died; no reason not to raise what is being told
            self.answers = False
            return unknown
        self.answers = True
        return answer


def who_gave_up(notices: Mapping[int, Notice]) -> tuple[int, Notice] | None:
    """The rank that ended the group by itself, and its notice; one that lost a peer before one that timed out."""
    causes = [(rank, notice) for rank, notice in notices.items() if notice.error]
    return min(causes, key=lambda cause: (cause[1].error != "PeerLostError", cause[0]), default=None)


def missing(notices: Mapping[int, Notice], ranks: Sequence[int], call: int, op: str) -> str:
    """Which of `ranks` were late for `call`, or what else they did: the rest of a sentence "... waited 3 s".

    Example:
        >>> missing({1: Notice(4, ["all_gather"], 9.0)}, [1, 2], 5, "all_reduce")
        ' for ranks 1 (last heard of at call 4, all_gather) and 2, which had not arrived.'
    """
    late, different = [], []
    for rank in ranks:
        notice = notices.get(rank)
        if notice is None or (notice.failed and notice.waited < _LATE_SECONDS):
            late.append(f"{rank}")
        elif notice.call < call:
            late.append(f"{rank} (last heard of at call {notice.call}, {notice.ops[-1]})")
        elif notice.op(call) not in (None, op):
            different.append(f"rank {rank}'s call {call} is {notice.op(call)}, not {op}")
    if late:
        said = f" for rank{'s' if len(late) > 1 else ''} {_listed(late)}, which had not arrived."
    elif different:
        said = ", though all ranks had arrived."
    else:
        said = ", though all ranks had arrived: the data did not come, or not all ranks agree on their shapes."
    if different:
        said += f" But {_listed(different)}: all ranks of a group must call the same ops in the same order."
    return said


def _listed(words: Sequence[Any]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
