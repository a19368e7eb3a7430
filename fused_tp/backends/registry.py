"""Registry of schedules, and the selection for an op: `FUSED_TP_SCHEDULE` where set, else the dispatch table.

Modules of schedules are imported at their first use, because a group uses one or two of eleven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fused_tp.backends.local import LOCAL_SCHEDULE
from fused_tp.backends.messages.torch_dist import backend_for_device, torch_dist
from fused_tp.backends.schedule import Schedule
from fused_tp.backends.shared_memory.shm import MAX_RANKS as SHM_RANKS
from fused_tp.backends.shared_memory.shm import ShmTransport, shm_availability, shm_transport
from fused_tp.core import dispatch, settings
from fused_tp.core.availability import AVAILABLE, Availability, has_triton, is_triton_interpreted, unavailable
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.errors import FusedTPError, RankMismatchError, join_words
from fused_tp.core.group import Group, GroupSlot, empty_dict
from fused_tp.core.store import agree_on_availability, create_together, exchange

if TYPE_CHECKING:
    from fused_tp.backends.copy_engine.copy_engine import CopyEngine
    from fused_tp.backends.cuda.device_collectives import DeviceCollectives
    from fused_tp.backends.messages.plain import Plain
    from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory

T = TypeVar("T")
RING = "ring_attention"
ALL_TO_ALL = "all_to_all"
SYMM_MEM_RANKS = 16  # limit of torch's kernels: 24 blocks signal each rank in 2048 bytes
MAX_RANKS = 63  # limit of kernels that write into peers' memory: their error record has one bit per rank
_MAX_REMEMBERED = 4096
_DIFFERING: GroupSlot[str | FusedTPError] = GroupSlot()  # differing settings of the ranks; "": compared and equal
_SELECTED: GroupSlot[dict[object, Schedule]] = GroupSlot(empty_dict)  # by schedule key and routing settings
_MADE: GroupSlot[dict[object, Schedule]] = GroupSlot(empty_dict)  # by name, device and chunks
_ARCHS: GroupSlot[dict[str, str]] = GroupSlot(empty_dict)  # by device type
_COLLECTIVES: GroupSlot[dict[torch.device, DeviceCollectives]] = GroupSlot(empty_dict)
_ENGINES: GroupSlot[dict[torch.device, CopyEngine]] = GroupSlot(empty_dict)


@dataclass(frozen=True)
class ScheduleSpec:
    """Entry of a schedule in the registry.

    Attributes:
        name: name of the schedule in `FUSED_TP_SCHEDULE` and the dispatch table.
        supports: returns whether the schedule implements an op in a dtype, for any group.
        available: returns whether a group can use it on a device. All ranks must make the first call together.
        make: creates the schedule from (group, device, number of chunks); None: the schedule computes the number.
        transport: name of its transport in `explain`; None: the group's torch.distributed backend.
        devices: supported device types; empty: all that torch.distributed supports.
        max_ranks: largest group; None: no limit.
        caveat: guarantee that this schedule lacks compared to the others, as a clause, for `explain`.
    """

    name: str
    supports: Callable[[str, torch.dtype], Availability]
    available: Callable[[Group, torch.device], Availability]
    make: Callable[[Group, torch.device, int | None], Schedule]
    transport: str | None = None
    devices: tuple[str, ...] = ()
    max_ranks: int | None = None
    caveat: str = ""


@dataclass(frozen=True)
class Decision:
    """Selected schedule, its transport, and the reason."""

    schedule: str
    transport: str
    reason: str


ALONE = Decision("local", "none", "the group has one rank, so nothing moves")


# -- selection --------------------------------------------------------------------------------------------------------


def select_schedule(key: ScheduleKey, group: Group) -> Schedule:
    """Return the schedule for one call.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that does not support this group, or the group has no backend
            for tensors on the key's device.
        RankMismatchError: in the first call, if ranks differ in settings that must be equal.
    """
    if group.size == 1:
        return LOCAL_SCHEDULE
    # A repeated call costs one lookup; the code below takes several times as long.
    schedules = _SELECTED[group]
    call = key, settings.routing_values()
    selected = schedules.get(call)
    if selected is None:
        if len(schedules) >= _MAX_REMEMBERED:  # reached if sequence lengths keep changing
            schedules.clear()
        selected = schedules[call] = _select(key, group)
    return selected


def _differing_settings(group: Group) -> str:
    """Describe the settings that differ between ranks but must be equal, with the ranks' values; empty if none differ.

    With different settings, ranks could wait for each other in different calls, or misread each other's data.
    """
    mine = {**settings.must_match_values(), "the dispatch table (FUSED_TP_TABLE)": dispatch.table_checksum()}
    everyone = exchange(group, "the first call", mine)
    said = []
    for name in mine:
        ranks: dict[str, list[str]] = {}
        for rank, theirs in enumerate(everyone):
            ranks.setdefault(theirs.get(name, "unknown"), []).append(str(rank))
        if len(ranks) > 1:
            values = join_words(f"{value} on rank{'s'[len(of) < 2 :]} {join_words(of)}" for value, of in ranks.items())
            said.append(f"{name} is {values}")
    return "; ".join(said)


def _select(key: ScheduleKey, group: Group) -> Schedule:
    if _DIFFERING.get(group) != "" and (differing := create_together(_DIFFERING, group, _differing_settings)):
        del _DIFFERING[group]  # so that the ranks compare again in their next call
        raise RankMismatchError(
            f"Ranks of group {group.name!r} differ in settings that must be the same on all of them: {differing}."
        )
    device = key.device
    name, chunks = forced_schedule(), None
    # Calls that the forced schedule does not implement fall back to the table.
    if name is None or not _forced_serves(name, key, group):
        choice = _choose(key, group)
        name, chunks = choice.schedule, choice.chunks
    return schedule_named(name, group, device, chunks)


def schedule_named(name: str, group: Group, device: torch.device, chunks: int | None = None) -> Schedule:
    """Return the schedule `name` of `group`. The first call creates it, and all ranks must make it together.

    Raises:
        ValueError: the schedule does not support this group.
    """
    made, what = _MADE[group], (name, device, chunks)
    schedule = made.get(what)
    # FUSED_TP_SHM may have been turned off since the schedule was made.
    if schedule is None or (name == "one_sided" and not settings.shared_memory_allowed()):
        available = SCHEDULES[name].available(group, device)
        if not available:
            raise ValueError(f"Schedule {name!r} does not support this group: {available.reason}.")
        schedule = made[what] = SCHEDULES[name].make(group, device, chunks)
    return schedule


def forced_schedule() -> str | None:
    """Return the name in `FUSED_TP_SCHEDULE`; None if it is not set.

    Raises:
        ValueError: the named schedule does not exist.
    """
    name = settings.forced_schedule()
    if name is not None and name not in SCHEDULES:
        raise ValueError(f"FUSED_TP_SCHEDULE is {name!r}; it must be one of {', '.join(SCHEDULES)}.")
    return name


def _forced_serves(name: str, key: ScheduleKey, group: Group) -> Availability:
    """Return whether a call uses the forced schedule: whether the schedule implements the op.

    If the group cannot use the schedule, its creation raises later. Only for `hierarchical` this returns false instead,
    because some groups of a mesh are inside one host.
    """
    supported = SCHEDULES[name].supports(key.op, key.dtype)
    return SCHEDULES[name].available(group, key.device) if supported and name == "hierarchical" else supported


def _choose(key: ScheduleKey, group: Group) -> dispatch.TableChoice:
    """Return the first rule of the table whose schedule supports the call.

    With the shipped table, CPU ranks of several hosts use `hierarchical`, because messages between hosts are by far the
    slowest part.
    """
    device = key.device
    transport = transport_key(group, device)
    may_span_hosts = device.type == "cpu" and transport != "shm" and settings.shared_memory_allowed()
    if may_span_hosts and settings.table_path() is None and _forced_serves("hierarchical", key, group):
        return dispatch.TableChoice("hierarchical", "CPU ranks of several hosts use the two-level schedule")

    def usable(spec: ScheduleSpec) -> Availability:
        supported = spec.supports(key.op, key.dtype)
        made = spec.name != "one_sided" and (spec.name, device, None) in _MADE[group]
        return spec.available(group, device) if supported and not made else supported

    return choose_by_table(key, group.size, transport, group_arch(group, device), usable)


def transport_key(group: Group, device: torch.device) -> str:
    """Return the key of the transport in the dispatch table. All ranks call together.

    It is "shm", "nvlink" or the name of the torch.distributed backend.

    "nvlink" is NCCL between GPUs that write into each other's memory. This cannot be determined if a group's first call
    is captured in a CUDA graph.
    """
    if _shared_memory_available(group, device):
        return "shm"
    backend = backend_for_device(group, device.type)
    if backend != "nccl":
        return backend
    from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory, group_memory, is_capturing, knows_group_memory

    if is_capturing(device) and not knows_group_memory(group, device):
        return backend
    return "nvlink" if isinstance(group_memory(group, device), GroupMemory) else backend


def choose_by_table(
    key: ScheduleKey, size: int, transport: str, arch: str, usable: Callable[[ScheduleSpec], Availability]
) -> dispatch.TableChoice:
    """Return the first rule of the table whose schedule is usable, with the reasons why earlier rules are not.

    Raises:
        ValueError: the table names a schedule that does not exist, or has no rule for the call.
    """
    reasons: dict[str, str] = {}
    while True:
        choice = dispatch.choose_schedule(key, size, transport, arch, tuple(reasons))
        if choice.schedule not in SCHEDULES:
            names = ", ".join(SCHEDULES)
            raise ValueError(
                f"Dispatch table {settings.table_path() or 'as shipped'}, rule {choice.rule}, names schedule "
                f"{choice.schedule!r}; it must be one of {names}."
            )
        # Rules are checked one by one and only as needed, because `usable` may be a collective call.
        if found := usable(SCHEDULES[choice.schedule]):
            notes = "".join(f"; no {name}: {why}" for name, why in reasons.items())
            return dispatch.TableChoice(choice.schedule, choice.rule + notes, choice.chunks)
        reasons[choice.schedule] = found.reason


def group_arch(group: Group, device: torch.device) -> str:
    """Return the architecture that all ranks of `group` use for the dispatch table. The first call is collective.

    If GPUs differ it is the lowest architecture, because all ranks wait for the slowest one.

    Raises:
        CollectiveTimeoutError: a rank did not call within `FUSED_TP_TIMEOUT` seconds.
    """
    own = dispatch.device_arch(device)
    if device.type != "cuda":
        return own
    archs = _ARCHS[group]
    if device.type not in archs:
        found = exchange(group, "the architecture of GPUs", own)
        archs[device.type] = min(found, key=lambda arch: int(arch.removeprefix("sm_")))  # sm_100 is not below sm_90
    return archs[device.type]


def decide(key: ScheduleKey, group: Group) -> Decision:
    """Describe the result of `select_schedule`, with its reason."""
    if group.size == 1:
        return ALONE
    if key.device == torch.device("cuda"):  # tensors report cuda:N, so add the index
        key = key._replace(device=torch.device("cuda", torch.cuda.current_device()))
    device = key.device
    name = select_schedule(key, group).name
    transport = SCHEDULES[name].transport or backend_for_device(group, device.type)
    forced = settings.forced_schedule()
    if forced == name:
        return Decision(name, transport, f"FUSED_TP_SCHEDULE={forced} forces it{caveat_of(name)}")
    rule = _choose(key, group).rule
    reason = f"dispatch table {settings.table_path() or 'as shipped'}, rule {rule}"
    if forced is not None:
        reason = f"FUSED_TP_SCHEDULE={forced}, but {_forced_serves(forced, key, group).reason}; {reason}"
    if device.type == "cpu" and "no one_sided" not in rule and not (shared := _shared_memory_available(group, device)):
        reason += f"; no shared memory: {shared.reason}"
    return Decision(name, transport, reason + caveat_of(name))


def caveat_of(name: str) -> str:
    """Return a schedule's caveat as the end of a reason; empty if it has none."""
    caveat = SCHEDULES[name].caveat
    return f"; note that {caveat}" if caveat else ""


# -- support and availability of schedules ----------------------------------------------------------------------------


def _always(*_: object) -> Availability:
    return AVAILABLE


def _lacks(text: str, *ops: str) -> Callable[[str, torch.dtype], Availability]:
    """Return a `supports` function for all ops except `ops`; `text` is the reason for these."""
    return lambda op, dtype: unavailable(text.format(op=op)) if op in ops else AVAILABLE


def _shared_memory_available(group: Group, device: torch.device) -> Availability:
    if device.type != "cpu":
        return unavailable(f"it supports CPU tensors only, not {device.type}")
    if not settings.shared_memory_allowed():
        return unavailable("FUSED_TP_SHM=0 turns it off")
    return AVAILABLE if shm_transport(group) is not None else shm_availability(group)


def _fused_kernel_supports(op: str, dtype: torch.dtype) -> Availability:
    from fused_tp.backends.triton import fused_kernel

    if op not in fused_kernel.OPS:
        return unavailable(f"there is no fused kernel of {op}")
    if dtype not in fused_kernel.DTYPES:
        return unavailable(f"fused kernels take float16, bfloat16 and float32, not {_name(dtype)}")
    return AVAILABLE


def fused_kernels_on(device: torch.device) -> Availability:
    """True if fused kernels can run on `device`, for any group."""
    if not has_triton():
        return unavailable("Triton is not installed (pip install triton)")
    if device.type != "cuda" and not (device.type == "cpu" and is_triton_interpreted()):
        return unavailable(
            f"kernels run on NVIDIA GPUs, and on the CPU only where TRITON_INTERPRET=1 is set; this is {device.type}"
        )
    if device.type == "cuda" and is_triton_interpreted():
        return unavailable("TRITON_INTERPRET is set, so kernels run on the CPU only")
    try:
        from fused_tp.backends.triton.fused_kernel import FusedKernel

        FusedKernel.load()
    except Exception as error:  # a broken Triton may raise anything
        return unavailable(f"the kernels cannot be loaded ({type(error).__name__}: {error})")
    return AVAILABLE


_SYMM_MEM_SUMS = frozenset(
    {"all_reduce", "all_reduce_rms_norm", "matmul_all_reduce", "matmul_all_reduce_rms_norm"}  # sums on every rank
)
_SYMM_MEM_OPS = _SYMM_MEM_SUMS | {"all_gather", "all_gather_matmul", "matmul_reduce_scatter", "reduce_scatter"}


def _symm_mem_supports(op: str, dtype: torch.dtype) -> Availability:
    from fused_tp.backends.torch_symm_mem.torch_symm_mem_schedule import SUMMED_DTYPES

    if op not in _SYMM_MEM_OPS:
        return unavailable(f"torch has no symm_mem op for {op}")
    if op in _SYMM_MEM_SUMS and dtype not in SUMMED_DTYPES:
        return unavailable(f"torch's symm_mem ops sum bfloat16 and float32, not {_name(dtype)}")
    return AVAILABLE


def _device_kernels_support(op: str, dtype: torch.dtype) -> Availability:
    from fused_tp.backends.cuda.device_plans import SUMMED_DTYPES

    if op == RING:
        return unavailable(f"there is no device kernel of {RING}")
    if dtype not in SUMMED_DTYPES and op != ALL_TO_ALL:
        return unavailable(f"device kernels take float16, bfloat16 and float32, not {_name(dtype)}")
    return AVAILABLE


def device_kernels_on(device: torch.device) -> Availability:
    """True if the device kernels can run on `device`, for any group."""
    from fused_tp.backends.cuda import native_kernels

    if not has_triton():
        return unavailable("Triton, which their workspaces use, is not installed (pip install triton)")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return native_kernels.native_kernels_available(10 * major + minor)
    if device.type in native_kernels.KERNEL_DEVICES:
        return native_kernels.native_kernels_available()
    return unavailable(f"device kernels run on NVIDIA GPUs; this is {device.type}")


def _copy_engine_on(device: torch.device) -> Availability:
    from fused_tp.backends.copy_engine.copy_engine import copy_engine_available

    return copy_engine_available(device)


def _torch_ops_on(device: torch.device) -> Availability:
    from fused_tp.backends.torch_symm_mem.torch_symm_mem import torch_ops_availability

    return torch_ops_availability(device)


def _in_symmetric_memory(
    what: str,
    on_device: Callable[[torch.device], Availability],
    *,
    multicast: bool = False,
    max_ranks: int = MAX_RANKS,
) -> Callable[[Group, torch.device], Availability]:
    """Availability of a schedule to groups with symmetric memory, if `on_device` holds on every rank."""

    def available(group: Group, device: torch.device) -> Availability:
        if group.size > max_ranks:
            return unavailable(f"a kernel's slots serve up to {max_ranks} ranks, and the group has {group.size}")
        on_all = agree_on_availability(group, f"{what} on {device.type}", lambda: on_device(device))
        if not on_all:
            return on_all
        from fused_tp.backends.symmetric_memory.symm_mem import group_memory

        memory = group_memory(group, device)
        if isinstance(memory, Availability):
            return memory
        if multicast and not memory.multicast:
            return unavailable("its GPUs have no multicast memory, which needs NVSwitch with SHARP (Hopper or later)")
        return AVAILABLE

    return available


def _nccl_available(group: Group, device: torch.device) -> Availability:
    from fused_tp.backends.nccl.nccl import nccl_dist

    transport = nccl_dist(group, device)
    return transport if isinstance(transport, Availability) else AVAILABLE


# Schedules inside a host, of which the first available one is used. Without any, two levels have no advantage.
INSIDE = ("one_sided", "fused_kernel", "two_shot")


def _two_levels_available(group: Group, device: torch.device) -> Availability:
    from fused_tp.backends.hierarchical.two_level import group_hosts, raise_as_group_errors

    hosts = group_hosts(group)
    if isinstance(hosts, Availability):
        return hosts
    with raise_as_group_errors(group, hosts.local_group):
        found = {name: SCHEDULES[name].available(hosts.local_group, device) for name in INSIDE}
    reasons = "; ".join(f"{name}: {one.reason}" for name, one in found.items())
    mine = unavailable(f"its ranks have no fast links inside of a host ({reasons})")
    what = f"fast links inside of hosts on {device.type}"
    return agree_on_availability(group, what, lambda: AVAILABLE if any(found.values()) else mine)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- creation of schedules -------------------------------------------------------------------------------------------


def _plain(group: Group, device: torch.device, chunks: int | None = None) -> Plain:
    from fused_tp.backends.messages.plain import Plain

    return Plain(torch_dist(group, device.type))


def _pipelined(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.messages.pipelined import Pipelined

    return Pipelined(torch_dist(group, device.type))


def _shared_memory(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.shared_memory.shared_memory import SharedMemorySchedule

    return SharedMemorySchedule(_known(ShmTransport, shm_transport(group)))


def _known(kind: type[T], found: object) -> T:
    """Assert that `found`, the result of an availability check, has type `kind`."""
    assert isinstance(found, kind), "it is available"
    return found


def _memory(group: Group, device: torch.device) -> GroupMemory:
    from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory, group_memory

    return _known(GroupMemory, group_memory(group, device))


def _device(algorithm: str) -> Callable[[Group, torch.device, int | None], Schedule]:
    def make(group: Group, device: torch.device, chunks: int | None) -> Schedule:
        from fused_tp.backends.cuda.device_collectives import DeviceCollectives
        from fused_tp.backends.cuda.device_schedule import DeviceSchedule

        plain, made = _plain(group, device), _COLLECTIVES[group]
        if device not in made:
            made[device] = DeviceCollectives(_memory(group, device), plain.transport)
        return DeviceSchedule(algorithm, made[device], plain)

    return make


def _symm_mem(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.torch_symm_mem.torch_symm_mem import TorchSymmMem
    from fused_tp.backends.torch_symm_mem.torch_symm_mem_schedule import TorchSymmMemSchedule

    plain = _plain(group, device)
    return TorchSymmMemSchedule(TorchSymmMem(_memory(group, device), plain.transport), plain)


def _copy_engine(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.copy_engine.copy_engine import CopyEngine
    from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule

    plain, made = _plain(group, device), _ENGINES[group]
    if device not in made:
        made[device] = CopyEngine(_memory(group, device), plain.transport)
    return CopyEngineSchedule(made[device], plain, chunks)


def _fused_kernel(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
    from fused_tp.backends.triton.fused_kernel import FusedKernel

    copies = _copy_engine(group, device, None) if _copy_engines_available(group, device) else None
    assert copies is None or isinstance(copies, CopyEngineSchedule)
    return FusedKernel(_memory(group, device), _plain(group, device), copies)


def _nccl_pipeline(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.nccl.nccl import NcclDist, nccl_dist
    from fused_tp.backends.nccl.nccl_pipeline import NcclPipeline

    return NcclPipeline(_known(NcclDist, nccl_dist(group, device)), chunks)


def _hierarchical(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    from fused_tp.backends.hierarchical.hierarchical import Hierarchical
    from fused_tp.backends.hierarchical.two_level import Hosts, group_hosts, raise_as_group_errors
    from fused_tp.backends.nccl.nccl import nccl_dist

    hosts = _known(Hosts, group_hosts(group))
    inside: dict[Any, Schedule] = {}
    made: dict[str, Schedule] = {}

    def among_host(op: str, dtype: torch.dtype) -> Schedule:
        key = op, dtype, settings.shared_memory_allowed()  # shared memory may be turned off at any time
        if key not in inside:
            with raise_as_group_errors(group, hosts.local_group):
                specs = (SCHEDULES[name] for name in INSIDE)
                usable = (one for one in specs if one.supports(op, dtype) and one.available(hosts.local_group, device))
                spec = next(usable, SCHEDULES["plain"])
                if spec.name not in made:
                    made[spec.name] = spec.make(hosts.local_group, device, None)
            inside[key] = made[spec.name]
        return inside[key]

    with raise_as_group_errors(group, hosts.cross_group):
        own = nccl_dist(hosts.cross_group, device)
        across = torch_dist(hosts.cross_group, device.type) if isinstance(own, Availability) else own
    return Hierarchical(hosts, among_host, across, _plain(group, device))


# -- the registry -----------------------------------------------------------------------------------------------------

_SYMMETRIC: dict[str, Any] = {"transport": "symmetric memory", "devices": ("cuda",), "max_ranks": MAX_RANKS}
_UNEVEN = "symmetric memory (by messages where rows do not divide evenly by the ranks, or into 16 bytes)"
_TORCH_KERNELS = (
    "torch's kernels wait for peers without a deadline (FUSED_TP_TIMEOUT bounds their set-up only), and without a "
    "multicast switch their all-reduces of 16-bit numbers round after every addition"
)
_HIERARCHICAL_TRANSPORT = (
    "memory inside hosts, messages across hosts (all by messages if rows do not divide evenly by the ranks)"
)
_device_kernels = _in_symmetric_memory("device kernels", device_kernels_on)
_copy_engines_available = _in_symmetric_memory("copy engines", _copy_engine_on)
_multimem = _in_symmetric_memory("device kernels", device_kernels_on, multicast=True)
_symm_mem_available = _in_symmetric_memory("torch's symm_mem ops", _torch_ops_on, max_ranks=SYMM_MEM_RANKS)

SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("plain", _always, _always, _plain),
        ScheduleSpec("pipelined", _always, _always, _pipelined),
        ScheduleSpec("one_sided", _always, _shared_memory_available, _shared_memory, "shm", ("cpu",), SHM_RANKS),
        ScheduleSpec(
            "symm_mem",
            _symm_mem_supports,
            _symm_mem_available,
            _symm_mem,
            _UNEVEN,
            ("cuda",),
            SYMM_MEM_RANKS,
            _TORCH_KERNELS,
        ),
        ScheduleSpec(
            "fused_kernel",
            _fused_kernel_supports,
            _in_symmetric_memory("fused kernels", fused_kernels_on),
            _fused_kernel,
            **_SYMMETRIC,
        ),
        ScheduleSpec("one_shot", _device_kernels_support, _device_kernels, _device("one_shot"), **_SYMMETRIC),
        ScheduleSpec("two_shot", _device_kernels_support, _device_kernels, _device("two_shot"), **_SYMMETRIC),
        ScheduleSpec("multimem", _device_kernels_support, _multimem, _device("multimem"), **_SYMMETRIC),
        ScheduleSpec(
            "copy_engine",
            # Excluded ops: sums without a matmul to overlap with.
            _lacks(
                "copy engines have nothing for {op}",
                *("all_reduce", "all_reduce_rms_norm", RING, ALL_TO_ALL),
                *("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "grouped_matmul_all_reduce"),
            ),
            _copy_engines_available,
            _copy_engine,
            **_SYMMETRIC,
        ),
        ScheduleSpec("nccl_pipeline", _always, _nccl_available, _nccl_pipeline, "NCCL", ("cuda",)),
        ScheduleSpec(
            "hierarchical",
            _lacks("it has no {op}", RING, ALL_TO_ALL),  # movements around grouped matmuls use two levels, too
            _two_levels_available,
            _hierarchical,
            _HIERARCHICAL_TRANSPORT,
            ("cpu", "cuda"),
        ),
    )
}
