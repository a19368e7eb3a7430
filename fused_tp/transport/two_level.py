"""Which ranks of a group share a host, and the groups that this gives: one inside of a host, one across hosts."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_name, _world

from fused_tp.runtime import settings
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import Group, GroupSlot, resolve_group
from fused_tp.transport.failure import REASON_SECONDS, Call, GroupCalls, calls_of, who_gave_up
from fused_tp.transport.gloo import closed_peers
from fused_tp.transport.shm import ShmTransport, known_shm_transport
from fused_tp.transport.store import exchange, give_up


def own_host() -> str:
    """Names the running host, not its address: containers of one host may share memory and GPUs.

    Where they do not, `FUSED_TP_HOST` gives each a name of its own.
    """
    given = settings.host_name()
    if given is not None:
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


@dataclass(frozen=True)
class Hosts:
    """A group of `count` hosts with equally many ranks each, rank = host * ranks per host + place.

    Attributes:
        inside: the ranks of this rank's host, by place.
        across: the ranks of this rank's place, by host.
    """

    inside: Group
    across: Group

    @property
    def count(self) -> int:
        return self.across.size

    @property
    def own(self) -> int:
        """Number of this rank's host."""
        return self.across.rank


_HOSTS: GroupSlot[Hosts | str | FusedTPError] = GroupSlot()


def hosts_of(group: Group) -> Hosts | str:
    """The hosts of `group`, or why it does not consist of such. The first time, all ranks must ask together.

    Raises:
        CollectiveTimeoutError: some rank did not ask, or was not there when the parts of the group were made.
    """
    answer = _HOSTS.get(group)
    if answer is None:
        try:
            answer = _HOSTS[group] = _find(group)
        except FusedTPError as error:
            give_up(group, error)
            # The ranks no longer agree on how often they have asked: a second time they could only wait in vain.
            _HOSTS[group] = type(error)(
                f"Group {group.name!r} is unusable since its first call failed: {error} "
                "Destroy the process group and make a new one."
            )
            raise
    if isinstance(answer, FusedTPError):
        raise type(answer)(*answer.args)
    return answer


def _find(group: Group) -> Hosts | str:
    if list(group.ranks) != sorted(group.ranks):
        return f"its ranks {list(group.ranks)} do not ascend, and torch sorts the ranks of the parts it would need"
    names = [text.decode() for text in exchange(group, "hosts", own_host().encode())]
    per_host = ranks_per_host(names)
    return per_host if isinstance(per_host, str) else _make(group, per_host)


def ranks_per_host(names: list[str]) -> int | str:
    """How many ranks each host has, from the ranks' host names; or why they are not laid out host by host.

    Example:
        >>> ranks_per_host(["a", "a", "b", "b"])
        2
    """
    count = len(set(names))
    if count == 1:
        return "all of its ranks are on one host"
    if count == len(names):
        return "each of its ranks is on a host of its own"
    per_host = len(names) // count
    blocks = [set(names[first : first + per_host]) for first in range(0, len(names), per_host)]
    if len(names) % count or any(len(block) > 1 for block in blocks):
        return f"its {len(names)} ranks are not laid out host by host, equally many on each of {count} hosts"
    return per_host


def _make(group: Group, per_host: int) -> Hosts | str:
    count = group.size // per_host
    host, place = divmod(group.rank, per_host)
    inside = [group.ranks[host * per_host : (host + 1) * per_host] for host in range(count)]
    across = [group.ranks[place::per_host] for place in range(per_host)]
    whole_world = group.size == dist.get_world_size()
    made: list[Group] = []
    counted = _world.group_count + count + per_host
    for parts, own in ((inside, inside[host]), (across, across[place])):
        # Only members make a part of a part of the world.
        if not whole_world and (reason := _no_part(group, own)) is not None:
            return reason
        for ranks in parts if whole_world else [own]:
            try:
                process_group = _part(group, ranks, whole_world)
            except FusedTPError:
                if whole_world:
                    # torch numbers the world's groups, and waits for ranks that number the next one alike: as if all
                    # parts had been made, which some ranks may have done.
                    _world.group_count = counted
                raise
            if ranks == own:
                group.owned.append(process_group)
                made.append(resolve_group(process_group))
    return Hosts(*made)


def _no_part(group: Group, ranks: tuple[int, ...]) -> str | None:
    """Why torch cannot make groups of some ranks of `group` without the rest of the world, as all its ranks see it."""
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        mine = "the default group is bound to a device, and torch would split its communicator, which takes all ranks"
    elif _process_group_name(list(ranks), use_hashed_name=True) in _world.pg_names.values():
        mine = "torch has given the name of a part that it would need to another group"
    else:
        # That name also says how many groups this process is in already.
        mine = str(len(_world.pg_names))
    answers = [text.decode() for text in exchange(group, "parts of it", mine.encode())]
    for rank, answer in enumerate(answers):
        if not answer.isdecimal():
            return f"rank {rank}: {answer}"
    numbers = sorted({int(answer) for answer in answers})
    if len(numbers) > 1:
        return f"its ranks are in unequally many groups ({numbers}), and torch cannot make parts of it then"
    return None


def _part(group: Group, ranks: tuple[int, ...], whole_world: bool) -> dist.ProcessGroup:
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=settings.timeout_seconds()),
            backend=dist.get_backend_config(group.process_group),
            use_local_synchronization=not whole_world,
        )
    except RuntimeError as error:  # torch's DistStoreError, or what a backend says that cannot connect
        numbers = [group.ranks.index(rank) for rank in ranks]
        gone = [rank for rank in _closed(group) if rank in numbers]
        who = f"rank {', '.join(map(str, gone))}" if gone else f"some rank of {numbers}"
        raise CollectiveTimeoutError(
            f"Rank {group.rank} of group {group.name!r} could not make a group of its ranks {numbers}: {who} did not "
            f"take part within {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT). "
            f"torch says: {str(error).splitlines()[0]}"
        ) from error
    return made


def _closed(group: Group) -> list[int]:
    """Group ranks that have died, as far as that is known."""
    assert group.process_group is not None
    backends = str(dist.get_backend_config(group.process_group))
    return closed_peers(group.process_group) if "gloo" in backends else []


# ---------------------------------------------------------------------------------------------------------------------
# A group in two levels, inside of hosts and across them: what fails on one level ends them all.
#
# A rank that waits on one level may wait for a rank that has failed on another. So whoever fails says so in the whole
# group, then leaves every level, which ends all waits for it; and those that lose it there look in the whole group for
# the reason. Errors speak of the whole group and its rank numbers: nobody knows the levels' groups.

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

    def __init__(self, hosts: Hosts, flat: GroupCalls) -> None:
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
        return Part(self, flat.begin(op), self.started())

    def flat_call(self) -> Part:
        """A call that the flat transport runs, and counts, by itself."""
        return Part(self)

    @contextmanager
    def several(self, op: str) -> Iterator[None]:
        """Around several calls: as `GroupCalls.several`, on all levels."""
        flat, before = self._flat, self._all_started()
        call = Call(op, flat.calls, time.perf_counter())
        try:
            yield
        except FusedTPError:  # of one of the calls, which has told the peers what there is to tell
            raise
        except BaseException as error:
            if flat.broken is None and (before is None or self._all_started() != before):
                self.failed(call, error)
            raise

    def failed(self, call: Call | None, error: BaseException) -> BaseException:
        """What to raise for an error on some level. From here on the group is unusable, and its peers know."""
        flat = self._flat
        if call is None or flat.broken is not None:
            if flat.broken is not None:
                self._leave()
            return error
        if not isinstance(error, FusedTPError):  # no peer's doing
            flat.raised_half_way(call, error)
            self._leave()
            return error
        waited = time.perf_counter() - call.started
        by_itself = isinstance(error, CollectiveTimeoutError) and waited > 0.9 * settings.timeout_seconds()
        closed = set(flat.closed_peers())
        flat.post(call, failed=True)
        # Who was left alone by a peer that has given up fails too; that peer has said why before it left.
        notices = flat.board.read_until(
            lambda found: who_gave_up(found) is not None, 0.0 if by_itself else REASON_SECONDS
        )
        if who_gave_up(notices) is not None:
            self._leave()
            return flat.followed(call)
        if isinstance(error, PeerLostError):
            closed.update(flat.closed_peers())
            dead = [rank for rank in sorted(closed) if rank not in notices or not notices[rank].failed]
            who = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}" if dead else "a peer"
            sentence = f"{flat.where(call)} lost {who}: died, or closed its connections."
            if not dead:
                sentence += f" What failed: {self._in_ranks_of_group(str(error))}"
        elif isinstance(error, CollectiveTimeoutError):
            sentence = f"{flat.where(call)} waited {flat.how_long(call)}"
        else:
            sentence = f"{flat.where(call)} failed: {self._in_ranks_of_group(str(error))}"
        flat.give_up(type(error), call, sentence)
        self._leave()
        if isinstance(error, CollectiveTimeoutError):
            flat.broken = sentence + flat.missing(call.number, call.op)
        return type(error)(flat.broken)

    def _broken(self) -> str | None:
        """Why a level is unusable, though no call of the group has failed: what runs beside the host says so late."""
        for group in (self._hosts.inside, self._hosts.across):
            for level in calls_of(group):
                if level.broken is not None:
                    return self._in_ranks_of_group(level.broken, group)
        return None

    def started(self) -> int | None:
        """Counts the exchanges, on any level, that peers may have had a part of; None where that is not known."""
        shared = self._shared_memory()
        if shared is None:
            return None
        levels = (level for group in (self._hosts.inside, self._hosts.across) for level in calls_of(group))
        return sum(level.calls for level in levels) + int(shared.core_group.calls)

    def _all_started(self) -> int | None:
        """Counts those of the flat transport too."""
        started = self.started()
        return None if started is None else started + self._flat.calls

    def _leave(self) -> None:
        """Leave the levels, which ends the waits of all who wait for this rank there."""
        if self._ended:
            return
        self._ended = True
        if (shared := self._shared_memory()) is not None:
            shared.core_group.close()
        for group in (self._hosts.inside, self._hosts.across):
            for level in calls_of(group):
                level.end(_ENDED)

    def _shared_memory(self) -> ShmTransport | None:
        return known_shm_transport(self._hosts.inside)

    def _in_ranks_of_group(self, text: str, level: Group | None = None) -> str:
        """`text` of an error on a level, with the names and the rank numbers of the whole group."""
        group = self._flat.group
        if level is None:
            # Shared memory is that of the host, and does not name its group.
            level = self._hosts.across if repr(self._hosts.across.name) in text else self._hosts.inside
        return in_ranks_of_group(text.splitlines()[0], level, group)


class Part:
    """A context in which errors between ranks end the group; see `Levels.call`. It may be entered several times."""

    __slots__ = ("_before", "_call", "_levels")

    def __init__(self, levels: Levels, call: Call | None = None, before: int | None = None) -> None:
        self._levels = levels
        self._call = call
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            return
        if not isinstance(error, FusedTPError) and self._before is not None and self._levels.started() == self._before:
            return  # nothing has happened yet
        raised = self._levels.failed(self._call, error)
        if raised is not error:
            raise raised from error


@contextmanager
def speaking_of(group: Group, level: Group) -> Iterator[None]:
    """Errors on `level`, which nobody else knows, as errors of `group`. Its other ranks need not wait for this one."""
    try:
        yield
    except FusedTPError as error:
        raised = type(error)(in_ranks_of_group(str(error), level, group))
        give_up(group, raised)
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
