"""A group in two levels, inside of hosts and across them: what fails on one level ends them all.

A rank that waits on one level may wait for a rank that has failed on another. So whoever fails says so in the whole
group, then leaves every level, which ends all waits for it; and those that lose it there look in the whole group for
the reason. Errors speak of the whole group and its rank numbers: nobody knows the levels' groups.
"""

from __future__ import annotations

import re
import time
from types import TracebackType

from fused_tp.runtime import settings
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import Group
from fused_tp.transport import shm
from fused_tp.transport.gloo_connections import closed_peers
from fused_tp.transport.hosts import Hosts
from fused_tp.transport.noticeboard import who_gave_up
from fused_tp.transport.torch_dist import TorchDist, _Call

_REASON_SECONDS = 0.5  # how long is looked for a reason other than the one at hand
_ENDED = "the group that it is a part of has been given up"
# "rank 2 of 4", "ranks 1 (last heard of at call 4, all_gather) and 2"
_LAST_HEARD = r"(?: \(last heard[^)]*\))?"
_RANKS = re.compile(rf"\b[Rr]anks? \d+(?: of \d+|{_LAST_HEARD}(?:(?:, | and )\d+{_LAST_HEARD})*)")


class Levels:
    """What the groups inside of a group of several hosts have in common with it: when one ends, all do.

    Args:
        hosts: of the group.
        flat: over all of the group.
    """

    def __init__(self, hosts: Hosts, flat: TorchDist) -> None:
        self._hosts = hosts
        self._flat = flat
        self._ended = False

    def call(self, op: str) -> Part:
        """One call of the group over these levels, to be entered around all of it, or around each part.

        Raises:
            FusedTPError: an earlier one has failed.
        """
        flat = self._flat
        if flat.broken is None and (found := self._broken()) is not None:
            flat.broken = found
        if flat.broken is not None:
            self._leave()
            raise flat._unusable()
        flat.calls += 1
        flat._ops.append(op)
        return Part(self, _Call(op, flat.calls, time.perf_counter()))

    def flat_call(self) -> Part:
        """A call that the flat transport runs, and counts, by itself."""
        return Part(self, None)

    def failed(self, call: _Call | None, error: FusedTPError) -> FusedTPError:
        """What to raise for an error on some level. From here on the group is unusable, and its peers know."""
        flat = self._flat
        if call is None or flat.broken is not None:
            if flat.broken is not None:
                self._leave()
            return error
        waited = time.perf_counter() - call.started
        by_itself = isinstance(error, CollectiveTimeoutError) and waited > 0.9 * settings.timeout_seconds()
        closed = set(self._closed())
        flat._post(call, failed=True)
        # Who was left alone by a peer that has given up fails too; that peer has said why before it left.
        notices = flat._board.read_until(
            lambda found: who_gave_up(found) is not None, 0.0 if by_itself else _REASON_SECONDS
        )
        if who_gave_up(notices) is not None:
            self._leave()
            return flat._followed(call)
        if isinstance(error, PeerLostError):
            closed.update(self._closed())
            dead = [rank for rank in sorted(closed) if rank not in notices or not notices[rank].failed]
            who = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}" if dead else "a peer"
            sentence = f"{flat._where(call)} lost {who}: died, or closed its connections."
            if not dead:
                sentence += f" What failed: {self._in_ranks_of_group(str(error))}"
        elif isinstance(error, CollectiveTimeoutError):
            deadline = settings.timeout_seconds()
            sentence = f"{flat._where(call)} waited " + (
                f"{deadline:g} s (FUSED_TP_TIMEOUT)" if by_itself else f"{waited:.1f} s"
            )
        else:
            sentence = f"{flat._where(call)} failed: {self._in_ranks_of_group(str(error))}"
        flat.broken = sentence
        flat._leave(call, error=type(error).__name__, at=call.number, sentence=sentence)
        self._leave()
        if isinstance(error, CollectiveTimeoutError):
            flat.broken = sentence + flat._missing(call.number, call.op)
        return type(error)(flat.broken)

    def _broken(self) -> str | None:
        """Why a level is unusable, though no call of the group has failed: what runs beside the host says so late."""
        for group in (self._hosts.inside, self._hosts.across):
            for transport in group.memo.values():
                if isinstance(transport, TorchDist) and transport.broken is not None:
                    return self._in_ranks_of_group(transport.broken, group)
        return None

    def _closed(self) -> list[int]:
        return closed_peers(self._flat._process_group) if self._flat.backend == "gloo" else []

    def _leave(self) -> None:
        """Leave the levels, which ends the waits of all who wait for this rank there."""
        if self._ended:
            return
        self._ended = True
        if self._hosts.inside.process_group is not None:
            shared = shm._transports.get(self._hosts.inside.process_group)
            if isinstance(shared, shm.ShmTransport):
                shared.core_group.close()
        for group in (self._hosts.inside, self._hosts.across):
            for transport in list(group.memo.values()):
                if isinstance(transport, TorchDist) and transport.broken is None:
                    transport._failure(_Call("a call", transport.calls, time.perf_counter()), RuntimeError(_ENDED))

    def _in_ranks_of_group(self, text: str, level: Group | None = None) -> str:
        """`text` of an error on a level, with the names and the rank numbers of the whole group."""
        group = self._flat.group
        if level is None:
            # Shared memory is that of the host, and does not name its group.
            level = self._hosts.across if repr(self._hosts.across.name) in text else self._hosts.inside
        return in_ranks_of_group(text.splitlines()[0], level, group)


class Part:
    """A context in which errors between ranks end the group; see `Levels.call`. It may be entered several times."""

    __slots__ = ("_call", "_levels")

    def __init__(self, levels: Levels, call: _Call | None) -> None:
        self._levels = levels
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, FusedTPError):
            raised = self._levels.failed(self._call, error)
            if raised is not error:
                raise raised from error


def in_ranks_of_group(text: str, level: Group, group: Group) -> str:
    """What an error on `level` says of its ranks, said of `group`, which they are a part of."""

    def translated(found: re.Match[str]) -> str:
        def number(digits: re.Match[str]) -> str:
            rank = int(digits[0])
            return str(group.ranks.index(level.ranks[rank])) if rank < level.size else digits[0]

        # Not the numbers in parentheses, nor how many ranks there are.
        kept = re.sub(r" of \d+$", f" of {group.size}", found[0])
        return re.sub(r"(?<!of )\b\d+\b(?![^(]*\))", number, kept)

    return _RANKS.sub(translated, text.replace(repr(level.name), repr(group.name)))
