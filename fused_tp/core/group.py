"""Groups of ranks that run an op: `Group`, created from a ProcessGroup, a 1-D DeviceMesh or None (all ranks).

Custom ops receive a group by its name, because `torch.compile` traces strings, but not ProcessGroups. `group_by_name`
maps the name to the group. Both directions are one dict lookup, because every op call needs them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _pg_map, _resolve_process_group, _world

from fused_tp.core.errors import FusedTPError

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"
T = TypeVar("T")

SINGLE_GROUP_NAME = ""  # torch.distributed never assigns the empty name


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that run an op together. Modules keep their own data about a group in a `GroupSlot`.

    Attributes:
        process_group: None if torch.distributed is not initialised, so that the group is this process alone.
        ranks: global ranks, in the order of the group ranks.
        owned_groups: process groups that were created for this group; they are destroyed after it.
        creator_pid: pid of the process that created this object.
    """

    process_group: ProcessGroup | None
    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    owned_groups: list[ProcessGroup] = field(default_factory=list, repr=False)
    creator_pid: int = field(default_factory=os.getpid, repr=False)

    def check_process(self) -> None:
        """Raise FusedTPError in a forked child, which inherited its parent's state and would act as the same rank."""
        if self.size > 1 and self.creator_pid != os.getpid():
            raise FusedTPError(
                "This process is a fork of rank {rank} of group {group!r}, and a forked process cannot call the ops of "
                "an inherited group. Fork before init_process_group(), or spawn the process and create groups in it.",
                group=self.name,
                rank=self.rank,
                size=self.size,
            )


class GroupSlot(dict[Group, T]):
    """Map from groups to one module's data about them; a destroyed group is removed.

    The first `slot[group]` creates the data by `make(group)`. Without `make` the module assigns the data itself.
    It is a dict instead of a wrapper around one, because decode-sized calls look up several slots and a Python method
    call costs more than the lookup (`ops.op` has measurements).
    """

    def __init__(self, make: Callable[[Group], T] | None = None) -> None:
        super().__init__()
        self._make = make
        _group_slots.append(self)

    def __missing__(self, group: Group) -> T:
        if self._make is None:
            raise KeyError(group)
        value = self[group] = self._make(group)
        return value


_group_slots: list[GroupSlot[Any]] = []


def empty_dict(group: Group) -> dict[Any, Any]:
    """Return an empty dict; the `make` function of slots that hold a dict for each group."""
    return {}


SINGLE_GROUP = Group(process_group=None, name=SINGLE_GROUP_NAME, rank=0, size=1, ranks=(0,))

# Keyed by process group and, for live groups, by name: destroy_process_group() and a second init reuse names.
_known_groups: dict[ProcessGroup | str | None, Group] = {}


def _get_group(process_group: ProcessGroup) -> Group:
    known_group = _known_groups.get(process_group)
    if known_group is not None:
        return known_group
    name = process_group.group_name
    if process_group not in _pg_map:
        raise ValueError(
            f"Group {name!r} has been destroyed, so no op can be called on it. Create a new process group."
        )
    ranks = _world.pg_group_ranks[process_group] = _GroupRanks(_world.pg_group_ranks[process_group])
    creator_pid = 0 if process_group in _inherited_groups else os.getpid()
    group = Group(
        process_group, name, process_group.rank(), process_group.size(), tuple(ranks), creator_pid=creator_pid
    )
    group.check_process()
    weakref.finalize(ranks, _remove_group, group).atexit = False
    _known_groups[process_group] = _known_groups[name] = group
    return group


# -- destruction of groups --------------------------------------------------------------------------------------------


class _GroupRanks(dict[int, int]):
    """The dict of a group's ranks in torch's registry, replaced by a subclass that supports weak references.

    torch has no hook for the destruction of a group, but destroy_process_group always drops this dict, so the
    finalizer of a weak reference to it runs then. Rejected: wrapping destroy_process_group, which misses callers that
    imported the original; and checking at every op, which misses ranks that call no further op.
    """


_destroy_callbacks: list[Callable[[Group], None]] = []


def on_destroy(callback: Callable[[Group], None]) -> Callable[[Group], None]:
    """Register `callback(group)`, which is called after torch has destroyed a group and before slots drop its data."""
    _destroy_callbacks.append(callback)
    return callback


def _remove_group(group: Group) -> None:
    for key in (group.process_group, group.name):
        if _known_groups.get(key) is group:
            del _known_groups[key]
    is_member = group.creator_pid == os.getpid()  # False in a forked child, which must not act as the rank
    for callback in _destroy_callbacks if is_member else ():
        callback(group)
    for slot in _group_slots:
        slot.pop(group, None)
    for owned_group in group.owned_groups if is_member else ():
        if owned_group in _pg_map:
            dist.destroy_process_group(owned_group)


_inherited_groups: set[ProcessGroup] = set()  # in a forked child: the process groups of its parent


def _forget_groups_after_fork() -> None:
    """Drop all Group objects in a forked child, so that its calls create them again and `check_process` raises.

    Calls in the parent process, which find a cached Group, then need not compare pids.
    """
    _inherited_groups.update(_pg_map)
    _known_groups.clear()


os.register_at_fork(after_in_child=_forget_groups_after_fork)


def _to_process_group(group: object) -> ProcessGroup | None:
    if group is None:
        if _world.default_pg is None:
            _check_single_process()
        return _world.default_pg
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names: tuple[object, ...] = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got one with dims {names}. Pass a 1-D mesh, such as "
                f"mesh[{names[-1]!r}]."
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this rank. Call the op only on ranks that are members of the group.")
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}.")


def _check_single_process() -> None:
    """Raise ValueError if a launcher started several processes, so that this process is not the whole world."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise ValueError(
            f"group=None means all ranks, and WORLD_SIZE is {world_size}, but torch.distributed is not initialised. "
            "Call torch.distributed.init_process_group() first."
        )


def resolve_group(group: GroupLike) -> Group:
    """Return the Group of `group`; None is all ranks, or this process alone if torch.distributed is not initialised.

    Raises:
        TypeError: `group` is neither a ProcessGroup, a DeviceMesh nor None.
        ValueError: `group` is a mesh with several dims, or does not contain this rank. Or `group` is None and torchrun
            started several processes, but torch.distributed is not initialised.

    Example:
        >>> resolve_group(None).size    # torch.distributed not initialised
        1
    """
    process_group = _to_process_group(group)
    return SINGLE_GROUP if process_group is None else _get_group(process_group)


class GroupName(str):
    """Group name that an op passes to an inner op call if it knows only the name. Not for public callers."""


def cached_group(group: GroupLike | GroupName) -> Group | None:
    """Fast path of `resolve_group`: return the Group of a live group that was resolved before, else None."""
    if isinstance(group, GroupName):
        known_group = _known_groups.get(group)
        return known_group if known_group is not None and known_group.process_group in _pg_map else None
    process_group = group if isinstance(group, ProcessGroup) else _to_process_group(group)
    if process_group is None:
        return SINGLE_GROUP
    return _known_groups.get(process_group) if process_group in _pg_map else None


def check_mesh_order(mesh: DeviceMesh, dims: tuple[int, ...], *, is_flattened: bool = False) -> bool:
    """Check that group ranks in the groups of `dims` of `mesh` equal mesh coordinates.

    torch numbers the ranks of a group in ascending order, regardless of their order in the mesh. So a group rank along
    one of `dims` may depend on the coordinates in the other dims, which this check rejects. With `is_flattened` it also
    checks that these group ranks, with the last dim fastest, yield the group rank in the flattened mesh.

    Returns:
        True if checked; False inside a torch dispatch mode, which may reject the mesh's tensor, made outside it.

    Raises:
        ValueError: a group rank differs from the mesh coordinate.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    ranks = np.array(mesh.mesh.tolist())
    group_ranks = [ranks.argsort(dim).argsort(dim) for dim in dims]
    is_aligned = all(
        np.array_equal(dim_ranks, np.broadcast_to(dim_ranks.take([0], other_dim), ranks.shape))
        for dim, dim_ranks in zip(dims, group_ranks, strict=True)
        for other_dim in dims
        if other_dim != dim
    )
    if is_flattened and is_aligned:
        sizes = tuple(ranks.shape[dim] for dim in dims)
        is_aligned = np.array_equal(np.ravel_multi_index(group_ranks, sizes).ravel(), ranks.ravel().argsort().argsort())
    if not is_aligned:
        raise ValueError(
            f"The ranks of mesh must ascend along every dim, got {ranks.tolist()}. torch numbers the ranks of a group "
            "in ascending order, so group ranks would differ from mesh coordinates."
        )
    return True


class GroupIdentity(NamedTuple):
    """Name and size of a group, and this process's rank in it."""

    name: str
    size: int
    rank: int


SINGLE_GROUP_IDENTITY = GroupIdentity(SINGLE_GROUP_NAME, 1, 0)


def group_identity(group: GroupLike | GroupName) -> GroupIdentity:
    """Return the identity of `group`; unlike `resolve_group`, which uses a cache, `torch.compile` can trace it."""
    if isinstance(group, GroupName):
        known_group = group_by_name(group)
        return GroupIdentity(known_group.name, known_group.size, known_group.rank)
    process_group = _to_process_group(group)
    if process_group is None:
        return SINGLE_GROUP_IDENTITY
    name: str = process_group.group_name
    if not is_dynamo_compiling() and process_group not in _pg_map:  # destroyed; a newer group may have the same name
        raise RuntimeError(_NO_SUCH_GROUP.format(name))
    return GroupIdentity(name, process_group.size(), process_group.rank())


_NO_SUCH_GROUP = "No process group is named {!r}; it may have been destroyed. Pass a group that exists."


def group_by_name(name: str) -> Group:
    """Return the group with this name; custom ops receive groups by name.

    Raises:
        RuntimeError: no group has this name, for example because the group was destroyed.
    """
    if name == SINGLE_GROUP_NAME:
        return SINGLE_GROUP
    try:
        process_group = _resolve_process_group(name)  # type: ignore[arg-type]  # GroupName is str, and not in torch 2.10
    except RuntimeError as error:
        raise RuntimeError(_NO_SUCH_GROUP.format(name)) from error
    return _get_group(process_group)
