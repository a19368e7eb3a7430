"""Groups of several hosts: the layout of ranks on hosts, the groups inside and across hosts, and common failures.

A rank that waits on one level may wait for a rank that has failed on the other. So a rank that fails publishes its
error in the whole group, then leaves every level, which ends all waits for it. Ranks that lose it on a level look for
the reason in the whole group. Errors name the whole group and its ranks, because users do not know the levels' groups.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_name, _world

from fused_tp.backends.shared_memory.shm import known_shm_transport
from fused_tp.core import settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, listed
from fused_tp.core.failure import REASON_SECONDS, GroupCalls, StartedCall, calls_of, first_failure
from fused_tp.core.gloo import closed_peers
from fused_tp.core.group import Group, GroupSlot, resolve_group
from fused_tp.core.store import exchange, made_together, publish_failure

# -- hosts -------------------------------------------------------------------------------------------------------------


def own_host() -> str:
    """Name of the running host, not its address: containers of one host may share memory and GPUs.

    If they do not, `FUSED_TP_HOST` must name each container differently.
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
    """A group of `count` hosts with equally many ranks each: rank = host * ranks per host + place."""

    inside: Group  # the ranks of this rank's host, by place
    across: Group  # the ranks of this rank's place, by host

    @property
    def count(self) -> int:
        return self.across.size

    @property
    def own(self) -> int:
        """Index of this rank's host."""
        return self.across.rank


_HOSTS: GroupSlot[Hosts | Availability | FusedTPError] = GroupSlot()


def hosts_of(group: Group) -> Hosts | Availability:
    """The hosts of `group`, or the reason why it is not laid out in hosts. All ranks make the first call together.

    Raises:
        CollectiveTimeoutError: some rank did not call, or was absent when the parts of the group were made.
    """
    return made_together(_HOSTS, group, _find)


def _find(group: Group) -> Hosts | Availability:
    if not (possible := _sorted(group)):
        return possible
    names = exchange(group, "hosts", own_host())
    per_host = ranks_per_host(names)
    if isinstance(per_host, Availability):
        return per_host
    levels = split(group, per_host)
    return levels if isinstance(levels, Availability) else Hosts(*levels)


def _sorted(group: Group) -> Availability:
    if list(group.ranks) != sorted(group.ranks):
        return unavailable(
            f"its ranks {list(group.ranks)} do not ascend, and torch sorts the ranks of the parts it would need"
        )
    return AVAILABLE


def ranks_per_host(names: list[str]) -> int | Availability:
    """Number of ranks on each host, from the ranks' host names; or the reason why they are not laid out host by host.

    Example:
        >>> ranks_per_host(["a", "a", "b", "b"])
        2
    """
    count = len(set(names))
    if count == 1:
        return unavailable("all of its ranks are on one host")
    if count == len(names):
        return unavailable("each of its ranks is on a host of its own")
    per_host = len(names) // count
    blocks = [set(names[first : first + per_host]) for first in range(0, len(names), per_host)]
    if len(names) % count or any(len(block) > 1 for block in blocks):
        return unavailable(
            f"its {len(names)} ranks are not laid out host by host, equally many on each of {count} hosts"
        )
    return per_host


def split(group: Group, size: int) -> tuple[Group, Group] | Availability:
    """Return (the block of `size` consecutive ranks with this rank, the ranks at its place in all blocks) as groups; or
    the reason why torch cannot make them. All ranks must call together.

    Raises:
        CollectiveTimeoutError: some rank was absent when the parts of the group were made.
    """
    if not (possible := _sorted(group)):
        return possible
    count = group.size // size
    part, place = divmod(group.rank, size)
    inside = [group.ranks[i * size : (i + 1) * size] for i in range(count)]
    across = [group.ranks[i::size] for i in range(size)]
    whole_world = group.size == dist.get_world_size()
    made: list[Group] = []
    counted = _world.group_count + count + size
    for parts, own in ((inside, inside[part]), (across, across[place])):
        # If `group` is not the whole world, only the members of a part make it.
        if not whole_world and not (possible := _parts_possible(group, own)):
            return possible
        for ranks in parts if whole_world else [own]:
            try:
                process_group = _part(group, ranks, whole_world)
            except FusedTPError:
                if whole_world:
                    # torch numbers the world's groups, and waits for ranks that give the next one the same number.
                    # Count as if all parts had been made, because some ranks may have made them.
                    _world.group_count = counted
                raise
            if ranks == own:
                group.owned.append(process_group)
                made.append(resolve_group(process_group))
    return made[0], made[1]


def _parts_possible(group: Group, ranks: tuple[int, ...]) -> Availability:
    """Availability of subgroups of `group` without the rest of the world in torch; the same answer on all ranks."""
    mine: str | int
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        mine = "the default group is bound to a device, and torch would split its communicator, which takes all ranks"
    elif _process_group_name(list(ranks), use_hashed_name=True) in _world.pg_names.values():
        mine = "torch has given the name of a part that it would need to another group"
    else:
        # That name also contains the number of groups that this process is in.
        mine = len(_world.pg_names)
    answers = exchange(group, "parts of it", mine)
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            return unavailable(f"rank {rank}: {answer}")
    numbers = sorted(set(answers))
    if len(numbers) > 1:
        return unavailable(
            f"its ranks are in unequally many groups ({numbers}), and torch cannot make parts of it then"
        )
    return AVAILABLE


def _part(group: Group, ranks: tuple[int, ...], whole_world: bool) -> dist.ProcessGroup:
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=settings.timeout_seconds()),
            backend=dist.get_backend_config(group.process_group),
            use_local_synchronization=not whole_world,
        )
    except RuntimeError as error:  # torch's DistStoreError, or the error of a backend that cannot connect
        numbers = [group.ranks.index(rank) for rank in ranks]
        assert group.process_group is not None
        told = "gloo" in dist.get_backend_config(group.process_group)
        gone = [rank for rank in closed_peers(group.process_group) if rank in numbers] if told else []
        who = "{missing}" if gone else f"some rank of {numbers}"
        raise CollectiveTimeoutError(
            f"Rank {{rank}} of group {{group!r}} could not make a group of its ranks {numbers}: {who} did not take "
            f"part within {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT). torch says: {{reason}}",
            group=group.name,
            rank=group.rank,
            size=group.size,
            missing=dict.fromkeys(gone, ""),
            reason=str(error).splitlines()[0],
        ) from error
    return made


# -- failures on two levels --------------------------------------------------------------------------------------------


class TwoLevelGroup:
    """Failures of a group of several hosts and of the groups of its levels: if one fails, all fail. `flat` spans the
    whole group; leaving it leaves the levels too."""

    def __init__(self, hosts: Hosts, flat: GroupCalls) -> None:
        self._hosts = hosts
        self._flat = flat
        self._left = False
        flat.also_depart = self._leave

    def call(self, op: str) -> LevelScope:
        """Begin one call of the group over its levels; enter the result around all of the call, or around each part.

        Raises:
            FusedTPError: an earlier call has failed.
        """
        flat = self._flat
        if flat.broken is None:
            # A level may be broken although no call of the group has failed: asynchronous work reports errors late.
            flat.broken = next((self._of_group(one.broken) for one in self._calls() if one.broken is not None), None)
        if flat.broken is not None:
            self._leave()
        return LevelScope(self, flat.begin(op), self.started())

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """`GroupCalls.abort_scope` for all levels."""
        flat, before = self._flat, self._all_started()
        call = flat.last_call(op)
        try:
            yield
        except FusedTPError:  # from one of the calls, which has notified the peers
            raise
        except BaseException as error:
            if flat.broken is None and (before is None or self._all_started() != before):
                flat.abort_midway(call, error)
            raise

    def abort(self, call: StartedCall, error: BaseException) -> BaseException:
        """Return the error to raise for an error on some level. The group becomes unusable, and peers are notified."""
        flat = self._flat
        if flat.broken is not None:
            return error
        if not isinstance(error, FusedTPError):
            flat.abort_midway(call, error)  # not caused by a peer
            return error
        cause = self._of_group(error)
        if isinstance(error, PeerLostError):
            return flat.abort_peer_lost(call, cause=cause)
        late = isinstance(error, CollectiveTimeoutError)
        by_itself = late and time.perf_counter() - call.started > 0.9 * settings.timeout_seconds()
        try:
            flat.post_status(call, failed=True)
            # A rank that a failed peer has left fails too; that peer published its error before it left.
            if first_failure(flat.statuses_within(0.0 if by_itself else REASON_SECONDS)) is not None:
                return flat.abort_following_peer(call)
        except BaseException:  # most likely Ctrl-C: peers must not wait for this rank
            self._leave()
            raise
        if late:
            return flat.abort_timed_out(call)
        return flat.abort(call, flat.error(type(error), call, " failed: {cause}", cause=cause))

    def started(self) -> int | None:
        """Number of exchanges, on any level, in which peers may have taken part; None if unknown."""
        shared = known_shm_transport(self._hosts.inside)
        return None if shared is None else sum(level.calls for level in self._calls()) + int(shared.core_group.calls)

    def _all_started(self) -> int | None:
        """`started`, including the exchanges of the flat transport."""
        started = self.started()
        return None if started is None else started + self._flat.calls

    def _leave(self) -> None:
        """Leave the levels, which ends all waits for this rank there."""
        if self._left:
            return
        self._left = True
        if (shared := known_shm_transport(self._hosts.inside)) is not None:
            shared.core_group.close()
        for level in self._calls():
            level.abort_because("the group that it is a part of has been given up")

    def _calls(self) -> list[GroupCalls]:
        return [*calls_of(self._hosts.inside), *calls_of(self._hosts.across)]

    def _of_group(self, error: FusedTPError) -> FusedTPError:
        # An error of shared memory comes from the level inside the host, and does not name its group.
        level = self._hosts.across if error.group == self._hosts.across.name else self._hosts.inside
        return error_of_group(error, level, self._flat.group)


class LevelScope:
    """Scope in which errors between ranks abort the group; see `TwoLevelGroup.call`. May be entered several times."""

    __slots__ = ("_before", "_call", "_levels")

    def __init__(self, levels: TwoLevelGroup, call: StartedCall, before: int | None) -> None:
        self._levels = levels
        self._call = call
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            return
        if not isinstance(error, FusedTPError) and self._before is not None and self._levels.started() == self._before:
            return  # no exchange has started
        raised = self._levels.abort(self._call, error)
        if raised is not error:
            raise raised from error


@contextmanager
def errors_of_group(group: Group, level: Group) -> Iterator[None]:
    """Scope in which errors on `level`, which users do not know, are raised as errors of `group`, whose other ranks are
    notified so that they do not wait for this one."""
    try:
        yield
    except FusedTPError as error:
        raised = error_of_group(error, level, group)
        publish_failure(group, raised)
        raise raised from error


def error_of_group(error: FusedTPError, level: Group, group: Group) -> FusedTPError:
    """Restate an error on `level` for `group`, which contains the level."""
    ranks = [group.ranks.index(rank) for rank in level.ranks]
    if error.group:
        return error.in_ranks_of(group.name, group.size, ranks)
    # Errors without a group: of kernels, which have ranks in fields, or of native shared memory, which are sentences.
    sentence = f"{{reason}} (Its ranks are ranks {listed(map(str, ranks))} of group {{group!r}}.)"
    missing = {ranks[rank]: heard for rank, heard in error.missing.items()}
    return type(error)(sentence, group=group.name, rank=group.rank, size=group.size, missing=missing, reason=str(error))
