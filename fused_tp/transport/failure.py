"""The calls of one group, numbered, and how they fail: soon, on all ranks, and with one reason.

A rank that can no longer take part says why on the group's noticeboard and leaves: whoever waits for it, now or later,
raises what it has said. This is what all transports of messages have in common; how one leaves (`_depart`), and
what it knows of peers that are gone (`closed_peers`), is its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fused_tp.runtime import settings
from fused_tp.runtime.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    raised_half_way,
)
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.transport.noticeboard import Notice, Noticeboard, missing, who_gave_up

LOOK_SECONDS = 0.5  # how often a rank that waits looks whether a peer has given up
REASON_SECONDS = 0.5  # how long a rank that was left alone looks for a reason other than a peer's death


@dataclass(frozen=True)
class Call:
    """A movement that has been started: its op, its number in the group, and when (time.perf_counter)."""

    op: str
    number: int
    started: float


class GroupCalls:
    """What this rank has called in its group, and whether the group still works.

    Args:
        group: of the ranks; of torch.distributed.
        backend: what moves the bytes, as sentences name it.
        board: name of this group's notices in its store.

    Attributes:
        calls: how many have been started.
        broken: why the group is unusable, in a sentence; None while it is not.
    """

    def __init__(self, group: Group, backend: str, board: str) -> None:
        if group.process_group is None:
            raise ValueError("torch.distributed is not initialised: there is no group to communicate in.")
        self.group = group
        self.process_group = group.process_group
        self.rank = group.rank
        self.world_size = group.size
        self.backend = backend
        self.calls = 0
        self.broken: str | None = None
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = Noticeboard(store, board, group.rank, group.size)
        _CALLS[group].append(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, op: str) -> Call:
        """One more call.

        Raises:
            FusedTPError: the group is unusable.
        """
        if self.broken is not None:
            raise self.unusable()
        return self._count(op)

    def _count(self, op: str) -> Call:
        self.calls += 1
        self._ops.append(op)
        return Call(op, self.calls, time.perf_counter())

    @contextmanager
    def several(self, op: str) -> Iterator[None]:
        """Around all of an op that takes several exchanges: what is raised half-way gives the group up.

        Half-way is after the first exchange has been started. Peers have then had a part of the op, and cannot tell
        this rank's next call, or a second try, from what they wait for: they would take the one's data for the other's.
        So they are told at once and raise PeerLostError, which says what was raised here; here the error goes on as it
        is, and later calls say that the group is unusable. Before the first exchange nothing has happened: the error
        goes on, and the op may be called again. So it does with a RankMismatchError, which all ranks raise together.
        May be nested. On torch's own NCCL peers cannot be told: they raise at the deadline of its watchdog.

        Example:
            transport.check(op, dims, x.dtype, x.device)
            with transport.several(op):
                arriving = transport.shift(op, x, buffer, 1)
                partial = x @ w                                 # may raise, out of memory say
                return partial + arriving.wait() @ w
        """
        before, started = self._started(), time.perf_counter()
        try:
            yield
        except RankMismatchError:
            raise
        except BaseException as error:
            if self.broken is None and self._started() != before:
                self.raised_half_way(Call(op, self.calls, started), error)
            raise

    def _started(self) -> int:
        """Counts the exchanges that peers may have had a part of."""
        return self.calls

    # -- failing ------------------------------------------------------------------------------------------------------

    def raised_half_way(self, call: Call, error: BaseException) -> None:
        """Give the group up because of an error that is no peer's doing."""
        self.give_up(FusedTPError, call, f"{self.where(call)} {raised_half_way(error)}")

    def give_up(self, kind: type[FusedTPError], call: Call, sentence: str) -> FusedTPError:
        """The error to raise, and what peers are to raise too. From here on the group is unusable, and they know."""
        self.broken = sentence
        self.leave(call, error=kind.__name__, at=call.number, sentence=sentence)
        return kind(sentence)

    def end(self, why: str) -> None:
        """Leave the group for a reason outside of it. Without effect where it is broken."""
        if self.broken is None:
            call = Call("a call", self.calls, time.perf_counter())
            self.give_up(FusedTPError, call, f"{self.where(call)} failed: {why}")

    def followed(self, call: Call) -> FusedTPError:
        """What a peer has raised that gave the group up, as an error of this rank."""
        self.broken = f"{self.where(call)}: a peer has given the group up."
        self.leave(call)
        cause = who_gave_up(self.board.read())
        kind: type[FusedTPError] = PeerLostError
        if cause is not None:
            rank, notice = cause
            said = notice.sentence
            if notice.error == CollectiveTimeoutError.__name__:
                kind = CollectiveTimeoutError
                said += self.missing(notice.at, notice.op(notice.at) or "another op", rank)
            self.broken = f"{self.where(call)}: rank {rank} has given the group up. It said: {said}"
        return kind(self.broken)

    def said_by_peer(self) -> str | None:
        """What another rank has said that gave the group up, as a sentence; None where none has."""
        cause = who_gave_up(self.board.read())
        return (
            None
            if cause is None or cause[0] == self.rank
            else f"Rank {cause[0]} has given the group up. It said: {cause[1].sentence}"
        )

    def lost(self, call: Call, reason: str = "") -> FusedTPError:
        """A connection was closed: by a peer that died, or by one that gave up and says why, if not always before.

        Args:
            reason: what the backend says of it, if it does.
        """
        closed = self.closed_peers()  # before others close theirs too
        self.post(call, failed=True)
        notices = self.board.read_until(lambda found: who_gave_up(found) is not None, REASON_SECONDS)
        if who_gave_up(notices) is not None:
            return self.followed(call)
        dead = [rank for rank in closed if rank not in notices or not notices[rank].failed]
        who = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}" if dead else "a peer"
        sentence = f"{self.where(call)} lost {who}: died, or closed its connections.{self._says(reason)}"
        return self.give_up(PeerLostError, call, sentence)

    def timed_out(self, call: Call, reason: str = "") -> FusedTPError:
        """The deadline has passed. Names who was late, once the others have had the time to say where they are."""
        sentence = f"{self.where(call)} waited {self.how_long(call)}"
        failed = self.give_up(CollectiveTimeoutError, call, sentence)
        self.broken = f"{sentence}{self.missing(call.number, call.op)}{self._says(reason)}"
        return type(failed)(self.broken)

    def _says(self, reason: str) -> str:
        return reason and f" {self.backend} says: {reason}"

    def leave(self, call: Call, **how: Any) -> None:
        """Tell the peers that this rank's part of the group has ended, those too who cannot read its notice."""
        try:
            self.post(call, failed=True, **how)
        finally:
            self._depart()

    def post(self, call: Call, **how: Any) -> None:
        """Put up a notice of where this rank is."""
        waited = time.perf_counter() - call.started
        self.board.post(Notice(self.calls, list(self._ops), waited, **how))

    def missing(self, number: int, op: str, waiting: int | None = None) -> str:
        """Who was late for a call that rank `waiting`, by default this one, has waited for: the rest of a sentence."""
        ranks = [rank for rank in range(self.world_size) if rank != (self.rank if waiting is None else waiting)]
        # Who waits too is woken by the closed connections, or looks within LOOK_SECONDS, and then leaves its notice.
        notices = self.board.read_until(
            lambda found: all(rank in found and found[rank].failed for rank in ranks), 2 * LOOK_SECONDS
        )
        if not self.board.answers:
            return ", and some rank had not arrived; the group's store, which would tell which, does not answer."
        return missing(notices, ranks, number, op)

    def where(self, call: Call) -> str:
        return f"{call.op} (call {call.number} of group {self.group.name!r}) on rank {self.rank} of {self.world_size}"

    def how_long(self, call: Call) -> str:
        """The call's time, as the deadline where it was that."""
        waited, deadline = time.perf_counter() - call.started, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if waited > 0.9 * deadline else f"{waited:.1f} s"

    def unusable(self) -> FusedTPError:
        return FusedTPError(
            f"Group {self.group.name!r} is unusable since an earlier failure: {self.broken} "
            "Destroy the process group and make a new one."
        )

    # -- of the transport ---------------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """End all that is under way in the group, here and at the peers."""

    def closed_peers(self) -> list[int]:
        """Ranks known to have died, or to have left. Never waits."""
        return []


def calls_of(group: Group) -> list[GroupCalls]:
    """The transports that count their calls of `group`."""
    return list(_CALLS[group])


_CALLS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])
