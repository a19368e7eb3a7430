"""Ranks an op runs over: one description for ProcessGroup, 1-D DeviceMesh and "the whole world".

Custom ops carry a group as its name (a string passes through `torch.compile`, a ProcessGroup does not); `group_by_name`
maps the name back. Both directions are one dict lookup, because every op call pays for them.
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

SINGLE_NAME = ""  # torch.distributed never gives a group the empty name


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share an op. Each module keeps its data of a group in its own `GroupSlot`.

    `process_group` is None if torch.distributed is not initialised (a world of one); `ranks` are the global ranks, by
    group rank; `owned` are groups made for this one, and destroyed after it; `process` is the pid of the process that
    made the description.
    """

    process_group: ProcessGroup | None
    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    owned: list[ProcessGroup] = field(default_factory=list, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)

    def check_process(self) -> None:
        """Raise FusedTPError in a forked child, which inherits its parent's state and would act as that rank."""
        if self.size > 1 and self.process != os.getpid():
            raise FusedTPError(
                "This process is a fork of rank {rank} of group {group!r}; only the rank itself can call the group's "
                "ops. Fork before init_process_group(), or start the process by spawn, and give it groups of its own.",
                group=self.name,
                rank=self.rank,
                size=self.size,
            )


class GroupSlot(dict[Group, T]):
    """One module's data for each group: made by `make` at the first `slot[group]`, or set by the module if there is no
    `make`; dropped once the group is destroyed.

    It subclasses dict instead of wrapping one: decode-sized calls look up several slots, and a Python frame costs more
    than a lookup (`ops.op` has the numbers).
    """

    def __init__(self, make: Callable[[Group], T] | None = None) -> None:
        super().__init__()
        self._make = make
        _slots.append(self)

    def __missing__(self, group: Group) -> T:
        if self._make is None:
            raise KeyError(group)
        value = self[group] = self._make(group)
        return value


_slots: list[GroupSlot[Any]] = []


def empty_dict(group: Group) -> dict[Any, Any]:
    """`make` of a slot that holds a dict for each group."""
    return {}


SINGLE = Group(process_group=None, name=SINGLE_NAME, rank=0, size=1, ranks=(0,))

# Keyed by process group and, for live groups, by name: destroy_process_group() and a second init reuse names.
_groups: dict[ProcessGroup | str | None, Group] = {}


def _describe(process_group: ProcessGroup) -> Group:
    known = _groups.get(process_group)
    if known is not None:
        return known
    name = process_group.group_name
    if process_group not in _pg_map:
        raise ValueError(f"group {name!r} has been destroyed; its ops cannot be called any more.")
    ranks = _world.pg_group_ranks[process_group] = _GroupRanks(_world.pg_group_ranks[process_group])
    process = 0 if process_group in _inherited else os.getpid()
    group = Group(process_group, name, process_group.rank(), process_group.size(), tuple(ranks), process=process)
    group.check_process()
    weakref.finalize(ranks, _leave, group).atexit = False
    _groups[process_group] = _groups[name] = group
    return group


# -- groups that end --------------------------------------------------------------------------------------------------


class _GroupRanks(dict[int, int]):
    """A group's ranks as torch stores them, in a dict that allows weak references: its end is that of the group.

    torch drops it within destroy_process_group, whoever calls that, and has no hook. Replacing that function would miss
    code that has imported torch's; a check at every op would miss a rank that calls no op again.
    """


_on_destroy: list[Callable[[Group], None]] = []


def on_destroy(leave: Callable[[Group], None]) -> Callable[[Group], None]:
    """Register `leave`: called with a group once torch has destroyed it, before the slots drop the group's data."""
    _on_destroy.append(leave)
    return leave


def _leave(group: Group) -> None:
    for key in (group.process_group, group.name):
        if _groups.get(key) is group:
            del _groups[key]
    own = group.process == os.getpid()
    for leave in _on_destroy if own else ():
        leave(group)
    for slot in _slots:
        slot.pop(group, None)
    for owned in group.owned if own else ():
        if owned in _pg_map:
            dist.destroy_process_group(owned)


_inherited: set[ProcessGroup] = set()  # process groups that a forked child inherited from its rank


def _forked() -> None:
    """Drop all descriptions in a forked child, so that every call there describes its group anew, and `check_process`
    refuses it. Calls in the rank itself then compare no pids."""
    _inherited.update(_pg_map)
    _groups.clear()


os.register_at_fork(after_in_child=_forked)


def _process_group(group: object) -> ProcessGroup | None:
    if group is None:
        if _world.default_pg is None:
            _check_alone()
        return _world.default_pg
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names: tuple[object, ...] = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"group is a DeviceMesh with {group.ndim} dims {names}; pass a 1-D mesh, such as mesh[{names[-1]!r}]."
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this rank; only its members may call the op.")
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, not {type(group).__name__}.")


def _check_alone() -> None:
    """Raise ValueError if a launcher started several processes, each of which would take itself for the world."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ValueError(
            f"group is None, which means all ranks, and WORLD_SIZE says that there are {launched}, but "
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first."
        )


def resolve_group(group: GroupLike) -> Group:
    """Describe `group`; None is the whole world, or this one process where torch.distributed is not initialised.

    Raises:
        TypeError: `group` is none of ProcessGroup, DeviceMesh, None.
        ValueError: a mesh of more than one dim, or a group that this rank is not in; None in one of several processes
            that torchrun started, where torch.distributed is not initialised.

    Example:
        >>> resolve_group(None).size    # torch.distributed not initialised
        1
    """
    process_group = _process_group(group)
    return SINGLE if process_group is None else _describe(process_group)


class GroupName(str):
    """A group's name in place of a group, for ops that call ops and know only the name. Callers may not pass one."""


def known_group(group: GroupLike | GroupName) -> Group | None:
    """`resolve_group` in few steps for a live group that was resolved before; None for any other."""
    if isinstance(group, GroupName):
        known = _groups.get(group)
        return known if known is not None and known.process_group in _pg_map else None
    process_group = group if isinstance(group, ProcessGroup) else _process_group(group)
    return _groups.get(process_group) if process_group in _pg_map else None


def check_mesh_order(mesh: DeviceMesh, dims: tuple[int, ...], *, flattened: bool = False) -> bool:
    """Check that a rank's number in the groups of each of `dims` of `mesh` does not depend on its other coordinates;
    with `flattened`, also that these numbers, the last dim fastest, give its number in the group of the whole mesh.

    torch numbers the ranks of every group in ascending order, whatever the order of the mesh.

    Returns:
        True if it was checked; False inside a dispatch mode, which may not accept outside tensors such as a mesh's.

    Raises:
        ValueError: ranks that belong together have different numbers.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    ranks = np.array(mesh.mesh.tolist())
    numbers = [ranks.argsort(dim).argsort(dim) for dim in dims]
    aligned = all(
        np.array_equal(number, np.broadcast_to(number.take([0], other), ranks.shape))
        for dim, number in zip(dims, numbers, strict=True)
        for other in dims
        if other != dim
    )
    if flattened and aligned:
        sizes = tuple(ranks.shape[dim] for dim in dims)
        aligned = np.array_equal(np.ravel_multi_index(numbers, sizes).ravel(), ranks.ravel().argsort().argsort())
    if not aligned:
        raise ValueError(
            f"mesh has the ranks {ranks.tolist()}; they must ascend along every dim. torch numbers the ranks of a "
            "group in ascending order, and those that belong together would have different numbers."
        )
    return True


class GroupIdentity(NamedTuple):
    """Name, size and own rank of a group: all that ops need."""

    name: str
    size: int
    rank: int


ALONE = GroupIdentity(SINGLE_NAME, 1, 0)


def group_identity(group: GroupLike | GroupName) -> GroupIdentity:
    """Identity of `group`, by calls that `torch.compile` can trace (it cannot trace the cache of `resolve_group`)."""
    if isinstance(group, GroupName):
        known = group_by_name(group)
        return GroupIdentity(known.name, known.size, known.rank)
    process_group = _process_group(group)
    if process_group is None:
        return ALONE
    name: str = process_group.group_name
    if not is_dynamo_compiling() and process_group not in _pg_map:  # another group may have its name by now
        raise RuntimeError(_GONE.format(name))
    return GroupIdentity(name, process_group.size(), process_group.rank())


_GONE = "There is no process group named {!r} any more; was it destroyed?"


def group_by_name(name: str) -> Group:
    """The group that a custom op's name argument names.

    Raises:
        RuntimeError: there is no such group (any more).
    """
    if name == SINGLE_NAME:
        return SINGLE
    try:
        process_group = _resolve_process_group(name)  # type: ignore[arg-type]  # GroupName is str, and not in torch 2.10
    except RuntimeError as error:
        raise RuntimeError(_GONE.format(name)) from error
    return _describe(process_group)
