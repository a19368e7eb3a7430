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
from fused_tp.backends.shared_memory.shm import MAX_RANKS as SHM_MAX_RANKS
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
    from fused_tp.backends.messages.plain import PlainSchedule
    from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory

T = TypeVar("T")
RING = "ring_attention"
ALL_TO_ALL = "all_to_all"
SYMM_MEM_MAX_RANKS = 16  # torch's signal pad of 2048 bytes has a word per rank for each of 24 blocks: at most 21 ranks
MAX_RANKS = 63  # limit of kernels that write into peers' memory: their error record has one bit per rank
_MAX_CACHED_SELECTIONS = 4096
# Message about settings that differ between the ranks; "" once they have been compared and are equal.
_DIFFERING_SETTINGS: GroupSlot[str | FusedTPError] = GroupSlot()
_SELECTED_SCHEDULES: GroupSlot[dict[object, Schedule]] = GroupSlot(empty_dict)  # by schedule key and routing settings
_CREATED_SCHEDULES: GroupSlot[dict[object, Schedule]] = GroupSlot(empty_dict)  # by name, device and number of chunks
_GROUP_ARCHS: GroupSlot[dict[str, str]] = GroupSlot(empty_dict)  # by device type
_DEVICE_COLLECTIVES: GroupSlot[dict[torch.device, DeviceCollectives]] = GroupSlot(empty_dict)
_COPY_ENGINES: GroupSlot[dict[torch.device, CopyEngine]] = GroupSlot(empty_dict)


@dataclass(frozen=True)
class ScheduleSpec:
    """Entry of a schedule in the registry.

    Attributes:
        name: name of the schedule in `FUSED_TP_SCHEDULE` and the dispatch table.
        supports: returns whether the schedule implements an op in a dtype, for any group.
        available: returns whether a group can use it on a device. All ranks must make the first call together.
        make: creates the schedule from (group, device, number of chunks); None: the schedule computes the number.
        transport: name of its transport in `explain`; None: the group's torch.distributed backend.
        device_types: supported device types; empty: all that torch.distributed supports.
        max_ranks: largest group; None: no limit.
        caveat: guarantee that this schedule lacks compared to the others, as a clause, for `explain`.
    """

    name: str
    supports: Callable[[str, torch.dtype], Availability]
    available: Callable[[Group, torch.device], Availability]
    make: Callable[[Group, torch.device, int | None], Schedule]
    transport: str | None = None
    device_types: tuple[str, ...] = ()
    max_ranks: int | None = None
    caveat: str = ""


@dataclass(frozen=True)
class ScheduleDecision:
    """Selected schedule, its transport, and the reason."""

    schedule: str
    transport: str
    reason: str


SINGLE_RANK_DECISION = ScheduleDecision("local", "none", "the group has one rank, so nothing moves")


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
    schedules = _SELECTED_SCHEDULES[group]
    call_key = key, settings.routing_values()
    schedule = schedules.get(call_key)
    if schedule is None:
        if len(schedules) >= _MAX_CACHED_SELECTIONS:  # reached if sequence lengths keep changing
            schedules.clear()
        schedule = schedules[call_key] = _select(key, group)
    return schedule


def _compare_settings(group: Group) -> str:
    """Compare the settings that must be equal on all ranks. Return the differences as text; empty if there are none.

    With different settings, ranks could wait for each other in different calls, or misread each other's data.
    """
    own_values = {**settings.must_match_values(), "the dispatch table (FUSED_TP_TABLE)": dispatch.table_checksum()}
    values_by_rank = exchange(group, "the first call", own_values)
    differences = []
    for name in own_values:
        ranks_by_value: dict[str, list[str]] = {}
        for rank, rank_values in enumerate(values_by_rank):
            ranks_by_value.setdefault(rank_values.get(name, "unknown"), []).append(str(rank))
        if len(ranks_by_value) > 1:
            values = join_words(
                f"{value} on rank{'s'[len(ranks) < 2 :]} {join_words(ranks)}" for value, ranks in ranks_by_value.items()
            )
            differences.append(f"{name} is {values}")
    return "; ".join(differences)


def _select(key: ScheduleKey, group: Group) -> Schedule:
    if _DIFFERING_SETTINGS.get(group) != "" and (
        differences := create_together(_DIFFERING_SETTINGS, group, _compare_settings)
    ):
        del _DIFFERING_SETTINGS[group]  # so that the ranks compare again in their next call
        raise RankMismatchError(
            f"Ranks of group {group.name!r} differ in settings that must be the same on all of them: {differences}."
        )
    device = key.device
    name, num_chunks = forced_schedule(), None
    # Calls that the forced schedule does not implement fall back to the table.
    if name is None or not _forced_schedule_availability(name, key, group):
        choice = _choose_for_group(key, group)
        name, num_chunks = choice.schedule, choice.num_chunks
    return schedule_named(name, group, device, num_chunks)


def schedule_named(name: str, group: Group, device: torch.device, num_chunks: int | None = None) -> Schedule:
    """Return the schedule `name` of `group`. The first call creates it, and all ranks must make it together.

    Raises:
        ValueError: the schedule does not support this group.
    """
    schedules, schedule_key = _CREATED_SCHEDULES[group], (name, device, num_chunks)
    schedule = schedules.get(schedule_key)
    # FUSED_TP_SHM may have been set to 0 since the schedule was created.
    if schedule is None or (name == "one_sided" and not settings.shared_memory_allowed()):
        availability = SCHEDULES[name].available(group, device)
        if not availability:
            raise ValueError(f"Schedule {name!r} does not support this group: {availability.reason}.")
        schedule = schedules[schedule_key] = SCHEDULES[name].make(group, device, num_chunks)
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


def _forced_schedule_availability(name: str, key: ScheduleKey, group: Group) -> Availability:
    """Return whether a call uses the forced schedule `name`, which is the case if it implements the op.

    If the group cannot use the schedule, its creation raises later. Only for `hierarchical` this returns false instead,
    because some groups of a mesh are inside one host.
    """
    support = SCHEDULES[name].supports(key.op, key.dtype)
    return SCHEDULES[name].available(group, key.device) if support and name == "hierarchical" else support


def _choose_for_group(key: ScheduleKey, group: Group) -> dispatch.TableChoice:
    """Return the choice of the first rule of the table whose schedule supports the call.

    With the shipped table, CPU ranks of several hosts use `hierarchical`, because messages between hosts are by far the
    slowest part.
    """
    device = key.device
    transport = transport_key(group, device)
    may_span_hosts = device.type == "cpu" and transport != "shm" and settings.shared_memory_allowed()
    if may_span_hosts and settings.table_path() is None and _forced_schedule_availability("hierarchical", key, group):
        return dispatch.TableChoice("hierarchical", "CPU ranks of several hosts use the two-level schedule")

    def availability_of(spec: ScheduleSpec) -> Availability:
        support = spec.supports(key.op, key.dtype)
        is_created = spec.name != "one_sided" and (spec.name, device, None) in _CREATED_SCHEDULES[group]
        return spec.available(group, device) if support and not is_created else support

    return choose_by_table(key, group.size, transport, group_arch(group, device), availability_of)


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
    key: ScheduleKey, size: int, transport: str, arch: str, availability_of: Callable[[ScheduleSpec], Availability]
) -> dispatch.TableChoice:
    """Return the choice of the first rule whose schedule is available, with the reasons why earlier ones are not.

    Raises:
        ValueError: the table names a schedule that does not exist, or has no rule for the call.
    """
    reasons: dict[str, str] = {}
    while True:
        choice = dispatch.choose_schedule(key, size, transport, arch, tuple(reasons))
        if choice.schedule not in SCHEDULES:
            schedule_names = ", ".join(SCHEDULES)
            raise ValueError(
                f"Dispatch table {settings.table_path() or 'as shipped'}, rule {choice.rule}, names schedule "
                f"{choice.schedule!r}; it must be one of {schedule_names}."
            )
        # Rules are checked one by one and only as needed, because `availability_of` may be a collective call.
        if availability := availability_of(SCHEDULES[choice.schedule]):
            notes = "".join(f"; no {name}: {reason}" for name, reason in reasons.items())
            return dispatch.TableChoice(choice.schedule, choice.rule + notes, choice.num_chunks)
        reasons[choice.schedule] = availability.reason


def group_arch(group: Group, device: torch.device) -> str:
    """Return the architecture that all ranks of `group` use for the dispatch table. The first call is collective.

    If GPUs differ it is the lowest architecture, because all ranks wait for the slowest one.

    Raises:
        CollectiveTimeoutError: a rank did not call within `FUSED_TP_TIMEOUT` seconds.
    """
    own_arch = dispatch.device_arch(device)
    if device.type != "cuda":
        return own_arch
    archs = _GROUP_ARCHS[group]
    if device.type not in archs:
        archs_by_rank = exchange(group, "the comparison of GPU architectures", own_arch)
        # Compared as numbers, because sm_100 is not below sm_90.
        archs[device.type] = min(archs_by_rank, key=lambda arch: int(arch.removeprefix("sm_")))
    return archs[device.type]


def describe_selection(key: ScheduleKey, group: Group) -> ScheduleDecision:
    """Return the schedule that `select_schedule` returns, its transport, and the reason for the selection."""
    if group.size == 1:
        return SINGLE_RANK_DECISION
    if key.device == torch.device("cuda"):  # tensors report cuda:N, so add the index
        key = key._replace(device=torch.device("cuda", torch.cuda.current_device()))
    device = key.device
    name = select_schedule(key, group).name
    transport = SCHEDULES[name].transport or backend_for_device(group, device.type)
    forced_name = settings.forced_schedule()
    if forced_name == name:
        return ScheduleDecision(name, transport, f"FUSED_TP_SCHEDULE={forced_name} forces it{describe_caveat(name)}")
    rule = _choose_for_group(key, group).rule
    reason = f"dispatch table {settings.table_path() or 'as shipped'}, rule {rule}"
    if forced_name is not None:
        problem = _forced_schedule_availability(forced_name, key, group).reason
        reason = f"FUSED_TP_SCHEDULE={forced_name}, but {problem}; {reason}"
    if device.type == "cpu" and "no one_sided" not in rule and not (shm := _shared_memory_available(group, device)):
        reason += f"; no shared memory: {shm.reason}"
    return ScheduleDecision(name, transport, reason + describe_caveat(name))


def describe_caveat(name: str) -> str:
    """Return a schedule's caveat as the end of a reason; empty if it has none."""
    caveat = SCHEDULES[name].caveat
    return f"; note that {caveat}" if caveat else ""


# -- support and availability of schedules ----------------------------------------------------------------------------


def _always_available(*_: object) -> Availability:
    return AVAILABLE


def _supports_all_except(text: str, *ops: str) -> Callable[[str, torch.dtype], Availability]:
    """Return a `supports` function that accepts all ops except `ops`; `text` is the reason, with the op as `{op}`."""
    return lambda op, dtype: unavailable(text.format(op=op)) if op in ops else AVAILABLE


def _shared_memory_available(group: Group, device: torch.device) -> Availability:
    if device.type != "cpu":
        return unavailable(f"shared memory supports CPU tensors only, not {device.type}")
    if not settings.shared_memory_allowed():
        return unavailable("FUSED_TP_SHM=0 turns shared memory off")
    return AVAILABLE if shm_transport(group) is not None else shm_availability(group)


def _fused_kernel_supports(op: str, dtype: torch.dtype) -> Availability:
    from fused_tp.backends.triton import fused_kernel

    if op not in fused_kernel.OPS:
        return unavailable(f"there is no fused kernel of {op}")
    if dtype not in fused_kernel.DTYPES:
        return unavailable(f"fused kernels support float16, bfloat16 and float32, not {_dtype_name(dtype)}")
    return AVAILABLE


def fused_kernels_availability(device: torch.device) -> Availability:
    """Return whether fused kernels can run on `device`, regardless of the group."""
    if not has_triton():
        return unavailable("Triton is not installed (pip install triton)")
    if device.type != "cuda" and not (device.type == "cpu" and is_triton_interpreted()):
        return unavailable(
            f"fused kernels run on NVIDIA GPUs, and on the CPU if TRITON_INTERPRET=1 is set, but not on {device.type}"
        )
    if device.type == "cuda" and is_triton_interpreted():
        return unavailable("TRITON_INTERPRET is set, so fused kernels run on the CPU only; unset it")
    try:
        from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule

        FusedKernelSchedule.load()
    except Exception as error:  # a broken Triton may raise anything
        return unavailable(f"the fused kernels cannot be loaded ({type(error).__name__}: {error})")
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
        return unavailable(f"torch's symm_mem ops sum bfloat16 and float32, not {_dtype_name(dtype)}")
    return AVAILABLE


def _device_kernels_support(op: str, dtype: torch.dtype) -> Availability:
    from fused_tp.backends.cuda.device_plans import SUMMED_DTYPES

    if op == RING:
        return unavailable(f"there is no device kernel of {RING}")
    if dtype not in SUMMED_DTYPES and op != ALL_TO_ALL:
        return unavailable(f"device kernels support float16, bfloat16 and float32, not {_dtype_name(dtype)}")
    return AVAILABLE


def device_kernels_availability(device: torch.device) -> Availability:
    """Return whether device kernels can run on `device`, regardless of the group."""
    from fused_tp.backends.cuda import native_kernels

    if not has_triton():
        return unavailable("Triton, which the workspaces of device kernels use, is not installed (pip install triton)")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return native_kernels.native_kernels_available(10 * major + minor)
    if device.type in native_kernels.KERNEL_DEVICES:
        return native_kernels.native_kernels_available()
    return unavailable(f"device kernels run on NVIDIA GPUs, not on {device.type}")


def _copy_engine_availability(device: torch.device) -> Availability:
    from fused_tp.backends.copy_engine.copy_engine import copy_engine_available

    return copy_engine_available(device)


def _torch_ops_availability(device: torch.device) -> Availability:
    from fused_tp.backends.torch_symm_mem.torch_symm_mem import torch_ops_availability

    return torch_ops_availability(device)


def _symmetric_memory_check(
    feature: str,
    check_device: Callable[[torch.device], Availability],
    *,
    needs_multicast: bool = False,
    max_ranks: int = MAX_RANKS,
) -> Callable[[Group, torch.device], Availability]:
    """Return the `available` function of a schedule that needs symmetric memory.

    Args:
        feature: name of the kernels, under which the ranks exchange their answers.
        check_device: returns whether this rank's device supports the schedule. All ranks must support it.
        needs_multicast: True if the schedule needs multicast memory.
        max_ranks: size of the largest supported group.
    """

    def check_group(group: Group, device: torch.device) -> Availability:
        if group.size > max_ranks:
            return unavailable(f"the kernels support at most {max_ranks} ranks, and the group has {group.size}")
        availability = agree_on_availability(group, f"{feature} on {device.type}", lambda: check_device(device))
        if not availability:
            return availability
        from fused_tp.backends.symmetric_memory.symm_mem import group_memory

        memory = group_memory(group, device)
        if isinstance(memory, Availability):
            return memory
        if needs_multicast and not memory.has_multicast:
            return unavailable(
                "the group's GPUs have no multicast memory, which needs NVSwitch with SHARP (Hopper or later)"
            )
        return AVAILABLE

    return check_group


def _nccl_available(group: Group, device: torch.device) -> Availability:
    from fused_tp.backends.nccl.nccl import nccl_dist

    transport = nccl_dist(group, device)
    return transport if isinstance(transport, Availability) else AVAILABLE


# Schedules inside a host. The first available one is used; if none is available, two levels have no advantage.
HOST_SCHEDULES = ("one_sided", "fused_kernel", "two_shot")


def _two_levels_available(group: Group, device: torch.device) -> Availability:
    from fused_tp.backends.hierarchical.two_level import group_hosts, raise_as_group_errors

    hosts = group_hosts(group)
    if isinstance(hosts, Availability):
        return hosts
    with raise_as_group_errors(group, hosts.local_group):
        availabilities = {name: SCHEDULES[name].available(hosts.local_group, device) for name in HOST_SCHEDULES}
    reasons = "; ".join(f"{name}: {availability.reason}" for name, availability in availabilities.items())
    own_availability = unavailable(f"the group's ranks have no fast links inside a host ({reasons})")
    feature = f"fast links inside hosts on {device.type}"
    return agree_on_availability(
        group, feature, lambda: AVAILABLE if any(availabilities.values()) else own_availability
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- creation of schedules -------------------------------------------------------------------------------------------


def _make_plain(group: Group, device: torch.device, num_chunks: int | None = None) -> PlainSchedule:
    from fused_tp.backends.messages.plain import PlainSchedule

    return PlainSchedule(torch_dist(group, device.type))


def _make_pipelined(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.messages.pipelined import PipelinedSchedule

    return PipelinedSchedule(torch_dist(group, device.type))


def _make_shared_memory(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.shared_memory.shared_memory import SharedMemorySchedule

    return SharedMemorySchedule(_assert_type(ShmTransport, shm_transport(group)))


def _assert_type(expected_type: type[T], value: object) -> T:
    """Assert that `value`, the result of an availability check, has type `expected_type`."""
    assert isinstance(value, expected_type), "it is available"
    return value


def _kernel_memory(group: Group, device: torch.device) -> GroupMemory:
    from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory, group_memory

    return _assert_type(GroupMemory, group_memory(group, device))


def _device_schedule_maker(algorithm: str) -> Callable[[Group, torch.device, int | None], Schedule]:
    def make(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
        from fused_tp.backends.cuda.device_collectives import DeviceCollectives
        from fused_tp.backends.cuda.device_schedule import DeviceSchedule

        plain, collectives = _make_plain(group, device), _DEVICE_COLLECTIVES[group]
        if device not in collectives:
            collectives[device] = DeviceCollectives(_kernel_memory(group, device), plain.transport)
        return DeviceSchedule(algorithm, collectives[device], plain)

    return make


def _make_symm_mem(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.torch_symm_mem.torch_symm_mem import TorchSymmMem
    from fused_tp.backends.torch_symm_mem.torch_symm_mem_schedule import TorchSymmMemSchedule

    plain = _make_plain(group, device)
    return TorchSymmMemSchedule(TorchSymmMem(_kernel_memory(group, device), plain.transport), plain)


def _make_copy_engine(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.copy_engine.copy_engine import CopyEngine
    from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule

    plain, engines = _make_plain(group, device), _COPY_ENGINES[group]
    if device not in engines:
        engines[device] = CopyEngine(_kernel_memory(group, device), plain.transport)
    return CopyEngineSchedule(engines[device], plain, num_chunks)


def _make_fused_kernel(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
    from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule

    copy_schedule = _make_copy_engine(group, device, None) if _copy_engines_available(group, device) else None
    assert copy_schedule is None or isinstance(copy_schedule, CopyEngineSchedule)
    return FusedKernelSchedule(_kernel_memory(group, device), _make_plain(group, device), copy_schedule)


def _make_nccl_pipeline(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.nccl.nccl import NcclDist, nccl_dist
    from fused_tp.backends.nccl.nccl_pipeline import NcclPipeline

    return NcclPipeline(_assert_type(NcclDist, nccl_dist(group, device)), num_chunks)


def _make_hierarchical(group: Group, device: torch.device, num_chunks: int | None) -> Schedule:
    from fused_tp.backends.hierarchical.hierarchical import HierarchicalSchedule
    from fused_tp.backends.hierarchical.two_level import Hosts, group_hosts, raise_as_group_errors
    from fused_tp.backends.nccl.nccl import nccl_dist

    hosts = _assert_type(Hosts, group_hosts(group))
    schedules_by_call: dict[Any, Schedule] = {}
    schedules_by_name: dict[str, Schedule] = {}

    def host_schedule(op: str, dtype: torch.dtype) -> Schedule:
        key = op, dtype, settings.shared_memory_allowed()  # shared memory may be turned off at any time
        if key not in schedules_by_call:
            with raise_as_group_errors(group, hosts.local_group):
                specs = (SCHEDULES[name] for name in HOST_SCHEDULES)
                usable_specs = (
                    spec for spec in specs if spec.supports(op, dtype) and spec.available(hosts.local_group, device)
                )
                spec = next(usable_specs, SCHEDULES["plain"])
                if spec.name not in schedules_by_name:
                    schedules_by_name[spec.name] = spec.make(hosts.local_group, device, None)
            schedules_by_call[key] = schedules_by_name[spec.name]
        return schedules_by_call[key]

    with raise_as_group_errors(group, hosts.cross_group):
        nccl_transport = nccl_dist(hosts.cross_group, device)
        cross_host = (
            torch_dist(hosts.cross_group, device.type) if isinstance(nccl_transport, Availability) else nccl_transport
        )
    return HierarchicalSchedule(hosts, host_schedule, cross_host, _make_plain(group, device))


# -- the registry -----------------------------------------------------------------------------------------------------

_SYMMETRIC_MEMORY_FIELDS: dict[str, Any] = {
    "transport": "symmetric memory",
    "device_types": ("cuda",),
    "max_ranks": MAX_RANKS,
}
_SYMM_MEM_TRANSPORT = "symmetric memory (by messages where rows do not divide evenly by the ranks, or into 16 bytes)"
_SYMM_MEM_CAVEAT = (
    "torch's kernels wait for peers without a deadline (FUSED_TP_TIMEOUT bounds their set-up only), and without a "
    "multicast switch their all-reduces of 16-bit numbers round after every addition"
)
_HIERARCHICAL_TRANSPORT = (
    "memory inside hosts, messages across hosts (all by messages if rows do not divide evenly by the ranks)"
)
_device_kernels_available = _symmetric_memory_check("device kernels", device_kernels_availability)
_copy_engines_available = _symmetric_memory_check("copy engines", _copy_engine_availability)
_multimem_available = _symmetric_memory_check("device kernels", device_kernels_availability, needs_multicast=True)
_symm_mem_available = _symmetric_memory_check(
    "torch's symm_mem ops", _torch_ops_availability, max_ranks=SYMM_MEM_MAX_RANKS
)

SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("plain", _always_available, _always_available, _make_plain),
        ScheduleSpec("pipelined", _always_available, _always_available, _make_pipelined),
        ScheduleSpec(
            "one_sided",
            _always_available,
            _shared_memory_available,
            _make_shared_memory,
            "shm",
            ("cpu",),
            SHM_MAX_RANKS,
        ),
        ScheduleSpec(
            "symm_mem",
            _symm_mem_supports,
            _symm_mem_available,
            _make_symm_mem,
            _SYMM_MEM_TRANSPORT,
            ("cuda",),
            SYMM_MEM_MAX_RANKS,
            _SYMM_MEM_CAVEAT,
        ),
        ScheduleSpec(
            "fused_kernel",
            _fused_kernel_supports,
            _symmetric_memory_check("fused kernels", fused_kernels_availability),
            _make_fused_kernel,
            **_SYMMETRIC_MEMORY_FIELDS,
        ),
        ScheduleSpec(
            "one_shot",
            _device_kernels_support,
            _device_kernels_available,
            _device_schedule_maker("one_shot"),
            **_SYMMETRIC_MEMORY_FIELDS,
        ),
        ScheduleSpec(
            "two_shot",
            _device_kernels_support,
            _device_kernels_available,
            _device_schedule_maker("two_shot"),
            **_SYMMETRIC_MEMORY_FIELDS,
        ),
        ScheduleSpec(
            "multimem",
            _device_kernels_support,
            _multimem_available,
            _device_schedule_maker("multimem"),
            **_SYMMETRIC_MEMORY_FIELDS,
        ),
        ScheduleSpec(
            "copy_engine",
            # Excluded: sums without a matmul to overlap with, ring attention, all-to-all and grouped matmuls.
            _supports_all_except(
                "copy engines do not implement {op}",
                *("all_reduce", "all_reduce_rms_norm", RING, ALL_TO_ALL),
                *("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "grouped_matmul_all_reduce"),
            ),
            _copy_engines_available,
            _make_copy_engine,
            **_SYMMETRIC_MEMORY_FIELDS,
        ),
        ScheduleSpec("nccl_pipeline", _always_available, _nccl_available, _make_nccl_pipeline, "NCCL", ("cuda",)),
        ScheduleSpec(
            "hierarchical",
            # Movements around grouped matmuls use two levels, too.
            _supports_all_except("the two-level schedule does not implement {op}", RING, ALL_TO_ALL),
            _two_levels_available,
            _make_hierarchical,
            _HIERARCHICAL_TRANSPORT,
            ("cpu", "cuda"),
        ),
    )
}
