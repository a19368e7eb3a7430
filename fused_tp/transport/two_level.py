"""Which ranks of a group share a host, and the groups that this gives: one inside of a host, one across hosts."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_name, _world

from fused_tp.runtime import settings
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError
from fused_tp.runtime.group import Group, GroupSlot, resolve_group
from fused_tp.transport.gloo_connections import closed_peers
from fused_tp.transport.store_exchange import exchange, give_up


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
