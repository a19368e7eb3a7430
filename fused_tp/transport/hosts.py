"""Which ranks of a group share a host, and the groups that this gives: one inside of a host, one across hosts."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from fused_tp.runtime import settings
from fused_tp.runtime.group import Group, resolve_group
from fused_tp.transport.store_exchange import exchange


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


def hosts_of(group: Group) -> Hosts | str:
    """The hosts of `group`, or why it does not consist of such. The first time, all ranks must ask together.

    Raises:
        CollectiveTimeoutError: some rank did not ask.
    """
    if "hosts" not in group.memo:
        names = [text.decode() for text in exchange(group, "hosts", own_host().encode())]
        per_host = ranks_per_host(names)
        group.memo["hosts"] = per_host if isinstance(per_host, str) else _make(group, per_host)
    answer: Hosts | str = group.memo["hosts"]
    return answer


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
    inside = [group.ranks[host * per_host : (host + 1) * per_host] for host in range(count)]
    across = [group.ranks[place::per_host] for place in range(per_host)]
    whole_world = group.size == dist.get_world_size()
    if not whole_world:
        # Then only members make a group, which torch names after how many groups each of them is in already.
        numbers = {int(text) for text in exchange(group, "number of groups", str(len(_world.pg_names)).encode())}
        if len(numbers) > 1:
            return f"its ranks are in unequally many groups ({sorted(numbers)}), and torch cannot make parts of it then"
    made = {ranks: _subgroup(group, ranks, whole_world) for ranks in (*inside, *across)}
    host, place = divmod(group.rank, per_host)
    return Hosts(resolve_group(made[inside[host]]), resolve_group(made[across[place]]))


def _subgroup(group: Group, ranks: tuple[int, ...], whole_world: bool) -> dist.ProcessGroup | None:
    if not whole_world and group.ranks[group.rank] not in ranks:
        return None
    made: dist.ProcessGroup | None = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=settings.timeout_seconds()),
        backend=dist.get_backend_config(group.process_group),
        use_local_synchronization=not whole_world,
    )
    return made
