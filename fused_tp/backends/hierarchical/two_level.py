"""Groups that span hosts: layout of ranks on hosts, subgroups inside and across hosts, and their common failures.

A rank that waits on one level may wait for a rank that has failed on the other level. So a failing rank publishes its
error in the full group, then leaves both levels, which aborts all waits for it. A rank that loses a peer on one level
reads the reason from the full group. Errors name the full group and its ranks, because users have not created the
subgroups.
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
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, join_words
from fused_tp.core.failure import ROOT_CAUSE_SECONDS, GroupCalls, StartedCall, first_failure, group_transports
from fused_tp.core.gloo import closed_peers
from fused_tp.core.group import Group, GroupSlot, resolve_group
from fused_tp.core.store import create_together, exchange, publish_failure

# -- hosts -------------------------------------------------------------------------------------------------------------


def host_id() -> str:
    """Return an identifier of this machine; equal in all its containers, which may share memory and GPUs.

    If the containers cannot share them, set a different `FUSED_TP_HOST` in each container.
    """
    setting = settings.host_name()
    if setting is not None:
        return setting
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


@dataclass(frozen=True)
class Hosts:
    """A group of `num_hosts` hosts with equally many ranks each: rank = host * ranks per host + local rank."""

    local_group: Group  # the ranks of this host, by local rank
    cross_group: Group  # the ranks with the same local rank, by host

    @property
    def num_hosts(self) -> int:
        return self.cross_group.size

    @property
    def host_index(self) -> int:
        """Return the index of this rank's host."""
        return self.cross_group.rank


_HOSTS_BY_GROUP: GroupSlot[Hosts | Availability | FusedTPError] = GroupSlot()


def group_hosts(group: Group) -> Hosts | Availability:
    """Return the hosts of `group`, or the reason why it has no two-level layout. The first call is collective.

    Raises:
        CollectiveTimeoutError: a rank did not call, or was absent when the subgroups were created.
    """
    return create_together(_HOSTS_BY_GROUP, group, _find_hosts)


def _find_hosts(group: Group) -> Hosts | Availability:
    if not (availability := _check_ascending(group)):
        return availability
    host_names = exchange(group, "hosts", host_id())
    num_ranks_per_host = count_ranks_per_host(host_names)
    if isinstance(num_ranks_per_host, Availability):
        return num_ranks_per_host
    subgroups = split_by_host(group, num_ranks_per_host)
    return subgroups if isinstance(subgroups, Availability) else Hosts(*subgroups)


def _check_ascending(group: Group) -> Availability:
    if list(group.ranks) != sorted(group.ranks):
        return unavailable(
            f"the group's ranks {list(group.ranks)} do not ascend, and torch would sort the ranks of its subgroups"
        )
    return AVAILABLE


def count_ranks_per_host(names: list[str]) -> int | Availability:
    """Return the number of ranks per host, from the ranks' host names; or the reason why there is no two-level layout.

    Example:
        >>> count_ranks_per_host(["a", "a", "b", "b"])
        2
    """
    num_hosts = len(set(names))
    if num_hosts == 1:
        return unavailable("all ranks of the group are on one host")
    if num_hosts == len(names):
        return unavailable("each rank of the group is on a different host")
    per_host = len(names) // num_hosts
    blocks = [set(names[first : first + per_host]) for first in range(0, len(names), per_host)]
    if len(names) % num_hosts or any(len(block) > 1 for block in blocks):
        return unavailable(
            f"the group's {len(names)} ranks are not in consecutive blocks of equal size on the {num_hosts} hosts"
        )
    return per_host


def split_by_host(group: Group, block_size: int) -> tuple[Group, Group] | Availability:
    """Create the two subgroups of this rank for blocks of `block_size` consecutive ranks. All ranks must call together.

    Returns:
        The subgroup of this rank's block, and the subgroup of the ranks at this rank's position in all blocks. Or the
        reason why torch cannot create them.

    Raises:
        CollectiveTimeoutError: a rank was absent when the subgroups were created.
    """
    if not (availability := _check_ascending(group)):
        return availability
    num_blocks = group.size // block_size
    block, position = divmod(group.rank, block_size)
    blocks = [group.ranks[i * block_size : (i + 1) * block_size] for i in range(num_blocks)]
    position_groups = [group.ranks[i::block_size] for i in range(block_size)]
    is_world = group.size == dist.get_world_size()
    subgroups: list[Group] = []
    final_group_count = _world.group_count + num_blocks + block_size
    for all_subgroup_ranks, own_ranks in ((blocks, blocks[block]), (position_groups, position_groups[position])):
        # If `group` is the world, all ranks must create all subgroups (new_group); else only a subgroup's members do.
        if not is_world and not (availability := _can_create_subgroups(group, own_ranks)):
            return availability
        for ranks in all_subgroup_ranks if is_world else [own_ranks]:
            try:
                process_group = _create_subgroup(group, ranks, is_world)
            except FusedTPError:
                if is_world:
                    # torch numbers new groups, and ranks must agree on the next number. Other ranks may have created
                    # all subgroups, so count as if this rank had created them too.
                    _world.group_count = final_group_count
                raise
            if ranks == own_ranks:
                group.owned_groups.append(process_group)
                subgroups.append(resolve_group(process_group))
    return subgroups[0], subgroups[1]


def _can_create_subgroups(group: Group, ranks: tuple[int, ...]) -> Availability:
    """Return whether torch can create a subgroup by calls of its members only; the same answer on all ranks."""
    own_answer: str | int
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        own_answer = (
            "the default group is bound to a device, so torch would split its communicator, which needs calls of all "
            "ranks"
        )
    elif _process_group_name(list(ranks), use_hashed_name=True) in _world.pg_names.values():
        own_answer = "another process group already has the name that torch would assign to a subgroup"
    else:
        # torch's group name also contains the number of groups of this process, which must be equal on all ranks.
        own_answer = len(_world.pg_names)
    answers = exchange(group, "the creation of subgroups", own_answer)
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            return unavailable(f"rank {rank}: {answer}")
    group_counts = sorted(set(answers))
    if len(group_counts) > 1:
        return unavailable(
            f"the group's ranks are members of different numbers of groups ({group_counts}), so torch cannot create "
            "subgroups of the group"
        )
    return AVAILABLE


def _create_subgroup(group: Group, ranks: tuple[int, ...], is_world: bool) -> dist.ProcessGroup:
    try:
        subgroup: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=settings.timeout_seconds()),
            backend=dist.get_backend_config(group.process_group),
            use_local_synchronization=not is_world,
        )
    except RuntimeError as error:  # torch's DistStoreError, or the error of a backend that cannot connect
        group_ranks = [group.ranks.index(rank) for rank in ranks]
        assert group.process_group is not None
        knows_closed_peers = "gloo" in dist.get_backend_config(group.process_group)
        missing = (
            [rank for rank in closed_peers(group.process_group) if rank in group_ranks] if knows_closed_peers else []
        )
        subject = "{missing}" if missing else f"some rank of {group_ranks}"
        raise CollectiveTimeoutError(
            f"Rank {{rank}} of group {{group!r}} could not create a subgroup of ranks {group_ranks}: {subject} did "
            f"not take part within {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT). Message of torch: {{reason}}",
            group=group.name,
            rank=group.rank,
            size=group.size,
            missing=dict.fromkeys(missing, ""),
            reason=str(error).splitlines()[0],
        ) from error
    return subgroup


# -- failures on two levels --------------------------------------------------------------------------------------------


class TwoLevelGroup:
    """Failure handling of a group that spans hosts: if the group or one of its subgroups fails, all are aborted.

    `flat_transport` is the transport of the full group; leaving it also leaves the subgroups.
    """

    def __init__(self, hosts: Hosts, flat_transport: GroupCalls) -> None:
        self._hosts = hosts
        self._flat_transport = flat_transport
        self._has_left = False
        flat_transport.depart_dependents = self._leave

    def begin_call(self, op: str) -> LevelScope:
        """Begin a call; the returned scope must be entered around the call, or around each part of it.

        Raises:
            FusedTPError: an earlier call has failed.
        """
        flat_transport = self._flat_transport
        if flat_transport.fatal_error is None:
            # Asynchronous work reports errors late, so a subgroup may be broken before a call of the group has failed.
            flat_transport.fatal_error = next(
                (
                    self._to_group_error(calls.fatal_error)
                    for calls in self._subgroup_calls()
                    if calls.fatal_error is not None
                ),
                None,
            )
        if flat_transport.fatal_error is not None:
            self._leave()
        return LevelScope(self, flat_transport.begin(op), self.count_started())

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Context manager like `GroupCalls.abort_scope`, for the group and its subgroups."""
        flat_transport, count_before = self._flat_transport, self._count_all_started()
        call = flat_transport.call_for_error(op)
        try:
            yield
        except FusedTPError:  # a call inside raised it, and has notified the peers
            raise
        except BaseException as error:
            if flat_transport.fatal_error is None and (
                count_before is None or self._count_all_started() != count_before
            ):
                flat_transport.abort_midway(call, error)
            raise

    def abort(self, call: StartedCall, error: BaseException) -> BaseException:
        """Make the group unusable because of `error` on one level, notify peers, and return the error to raise."""
        flat_transport = self._flat_transport
        if flat_transport.fatal_error is not None:
            return error
        if not isinstance(error, FusedTPError):
            flat_transport.abort_midway(call, error)  # not caused by a peer
            return error
        cause = self._to_group_error(error)
        if isinstance(error, PeerLostError):
            return flat_transport.abort_peer_lost(call, cause=cause)
        is_timeout = isinstance(error, CollectiveTimeoutError)
        is_own_timeout = is_timeout and time.perf_counter() - call.start_time > 0.9 * settings.timeout_seconds()
        try:
            flat_transport.post_status(call, has_failed=True)
            # The cause may be a failed peer, which has published its error before it left.
            if (
                first_failure(flat_transport.read_statuses_within(0.0 if is_own_timeout else ROOT_CAUSE_SECONDS))
                is not None
            ):
                return flat_transport.abort_following_peer(call)
        except BaseException:  # most likely Ctrl-C; leave, so that peers do not wait for this rank
            self._leave()
            raise
        if is_timeout:
            return flat_transport.abort_timed_out(call)
        return flat_transport.abort(call, flat_transport.error(type(error), call, " failed: {cause}", cause=cause))

    def count_started(self) -> int | None:
        """Return the number of exchanges of the subgroups that peers may have joined; None if unknown."""
        shm_transport = known_shm_transport(self._hosts.local_group)
        return (
            None
            if shm_transport is None
            else sum(level.calls for level in self._subgroup_calls()) + int(shm_transport.core_group.calls)
        )

    def _count_all_started(self) -> int | None:
        """Return `count_started()` plus the number of calls of the flat transport; None if unknown."""
        started = self.count_started()
        return None if started is None else started + self._flat_transport.calls

    def _leave(self) -> None:
        """Leave the subgroups, which aborts all waits for this rank there."""
        if self._has_left:
            return
        self._has_left = True
        if (shm_transport := known_shm_transport(self._hosts.local_group)) is not None:
            shm_transport.core_group.close()
        for level in self._subgroup_calls():
            level.abort_because("the group that contains it was aborted")

    def _subgroup_calls(self) -> list[GroupCalls]:
        return [*group_transports(self._hosts.local_group), *group_transports(self._hosts.cross_group)]

    def _to_group_error(self, error: FusedTPError) -> FusedTPError:
        # Errors of shared memory do not name their group; they are errors of the subgroup inside the host.
        level = self._hosts.cross_group if error.group == self._hosts.cross_group.name else self._hosts.local_group
        return to_group_error(error, level, self._flat_transport.group)


class LevelScope:
    """Context manager in which errors abort the group; see `TwoLevelGroup.begin_call`. May be entered several times."""

    __slots__ = ("_call", "_count_before", "_levels")

    def __init__(self, levels: TwoLevelGroup, call: StartedCall, count_before: int | None) -> None:
        self._levels = levels
        self._call = call
        self._count_before = count_before

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None:
            return
        if (
            not isinstance(error, FusedTPError)
            and self._count_before is not None
            and self._levels.count_started() == self._count_before
        ):
            return  # no exchange has started
        group_error = self._levels.abort(self._call, error)
        if group_error is not error:
            raise group_error from error


@contextmanager
def raise_as_group_errors(group: Group, level: Group) -> Iterator[None]:
    """Context manager that raises errors of the subgroup `level` as errors of `group`, and publishes them there."""
    try:
        yield
    except FusedTPError as error:
        group_error = to_group_error(error, level, group)
        publish_failure(group, group_error)
        raise group_error from error


def to_group_error(error: FusedTPError, level: Group, group: Group) -> FusedTPError:
    """Convert an error of the subgroup `level` to an error of `group`."""
    ranks = [group.ranks.index(rank) for rank in level.ranks]
    if error.group:
        return error.in_parent_group(group.name, group.size, ranks)
    # Errors without a group: kernels set the field `missing`, and native shared memory names ranks in its message.
    message = f"{{reason}} (Its ranks are ranks {join_words(map(str, ranks))} of group {{group!r}}.)"
    missing = {ranks[rank]: last_state for rank, last_state in error.missing.items()}
    return type(error)(message, group=group.name, rank=group.rank, size=group.size, missing=missing, reason=str(error))
