"""Schedules chosen by measurement at run time: with `FUSED_TP_AUTOTUNE`, and between GPUs with NVLink by default.

The first call of an op with new sizes runs on every schedule available to its group, with the call's own tensors, on
all ranks together:

    1. check      a result must equal that of the plain schedule up to rounding. If the plain schedule repeats its bits,
                  so must this one; if its bits agree on all ranks in an op whose result all ranks get, so must these.
                  A schedule that fails is not chosen again for that op and dtype, by this group or, through the file,
                  by another on this machine
    2. measure    the schedules in turn, in rounds; the slowest rank's time counts in each round
    3. choose     the one that beats the plain schedule by a clear margin in three quarters of the rounds, else plain

If the variable is not set, the shipped table decides, except for GPUs that write into each other's memory, for which
the table has published figures only. For these, plain collectives and torch's own ops (`symm_mem`) are measured, and
those of our own schedules that `fused-tp tune` has verified on this machine.

Ranks exchange their results and make the same choice. Rank 0 saves choices in a file, keyed by device, versions and
ranks; later programs on the same machine load them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fused_tp.backends.hierarchical.two_level import own_host
from fused_tp.backends.registry import SCHEDULES, schedule_named, transport_key
from fused_tp.backends.schedule import Schedule
from fused_tp.backends.symmetric_memory.symm_mem import is_capturing
from fused_tp.core import settings
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.store import exchange

ROUNDS = 9
ROUND_SECONDS = 2e-3  # minimum for one schedule: a call of microseconds is made several times
MOST_CALLS = 50  # in a round
MARGIN = 0.95  # of plain's time: the third quartile of the rounds must be below it
HOPELESS = 3.0  # dropped if this many times as long as the fastest in the first look
EVERYWHERE = frozenset(  # ops whose result is the same on all ranks
    {"all_gather", "all_reduce", "all_reduce_rms_norm", "matmul_all_reduce", "matmul_all_reduce_rms_norm"}
)

_PLAIN = "plain"
_TRUSTED = (_PLAIN, "symm_mem")  # measured if FUSED_TP_AUTOTUNE is not set
_ABOUT = (
    "Schedules that fused_tp has measured on this machine (FUSED_TP_AUTOTUNE): choices by op, dtype and sizes, and "
    "those whose results were wrong, or found right by fused-tp tune. Delete the file to measure again."
)
_LOG = logging.getLogger("fused_tp")
_PARTS = ("choices", "wrong", "right")  # sections of the file
_KEPT: GroupSlot[dict[str, Any]] = GroupSlot()

Run = Callable[[Schedule], Any]


def measures(name: str, key: ScheduleKey, group: Group) -> bool:
    """True if the first call like this one of op `name` is measured. All ranks call together."""
    if group.size == 1 or settings.forced_schedule() is not None:
        return False
    asked = settings.autotune()
    if asked != settings.ONLINE:
        return asked is not None
    if settings.table_path() is not None or transport_key(group, key.device) != "nvlink":
        return False
    return len(_candidates(name, key, group, _kept(group, key.device))) > 1


def tuned_schedule(name: str, key: ScheduleKey, group: Group, run: Run) -> Schedule | None:
    """Return the fastest schedule for a call of op `name`, measuring it if needed. None if nothing can be measured:
    during the capture of a CUDA graph, or if `FUSED_TP_AUTOTUNE` is not set and memory is short.

    Args:
        run: makes the call on a schedule; the same call on all ranks, repeatable any number of times.

    Raises:
        FusedTPError: a schedule failed and left the group unusable; the message names the schedule.
    """
    kept = _kept(group, key.device)
    # A schedule that was fast may be turned off today, or have been found wrong at other sizes.
    choice = _found(name, key, group, kept)
    if choice is None:
        if is_capturing(key.device):
            return None
        with torch.no_grad():
            choice = _measured(name, key, group, run, kept)
        if choice is None:
            return None
        words = _places(name, key)[-1]
        kept["choices"][words] = choice
        if group.rank == 0:
            _keep(kept)
            _LOG.info("autotune: %s: %s", words, told(choice))
    return schedule_named(choice["schedule"], group, key.device)


def kept_choice(name: str, key: ScheduleKey, group: Group) -> dict[str, Any] | None:
    """The choice of this group for such a call; None if it has measured none."""
    kept = _KEPT.get(group)
    return None if kept is None else _found(name, key, group, kept)


def told_choices(group: Group) -> dict[str, str]:
    """Descriptions of all choices of this group, by the description of the call."""
    return {words: told(choice) for words, choice in _KEPT.get(group, {"choices": {}})["choices"].items()}


def kept_files() -> list[tuple[Path, dict[str, Any]]]:
    """Files of choices in the folder that this process would use, with their contents."""
    found = ((path, _read(path)) for path in sorted(_folder().glob("autotune-*.json")))
    return [(path, content) for path, content in found if content is not None]


def usable(
    op: str, dtype: torch.dtype, device: torch.device, group: Group, among: Collection[str] | None = None
) -> list[str]:
    """Names of the schedules available to this group for an op, the plain one first. All ranks call together.

    Args:
        among: names to choose from; None: all.
    """
    rest = (spec for spec in SCHEDULES.values() if spec.name != _PLAIN and (among is None or spec.name in among))
    return [_PLAIN, *(s.name for s in rest if s.supports(op, dtype) and s.available(group, device))]


def _candidates(name: str, key: ScheduleKey, group: Group, kept: Mapping[str, Any]) -> list[str]:
    """The schedules that may serve a call and were not found wrong; always includes the plain one."""
    among = None
    if settings.autotune() == settings.ONLINE:
        right = kept.get("right", {})
        among = [one for one in SCHEDULES if one in _TRUSTED or right.get(_what(one, name, key.dtype))]
    found = usable(key.op, key.dtype, key.device, group, among)
    return [one for one in found if one == _PLAIN or not kept["wrong"].get(_what(one, name, key.dtype))]


def _found(name: str, key: ScheduleKey, group: Group, kept: Mapping[str, Any]) -> dict[str, Any] | None:
    """The saved choice for a call, if its schedule is still a candidate."""
    choices = [choice for words in _places(name, key) if (choice := kept["choices"].get(words)) is not None]
    if not choices:
        return None
    candidates = _candidates(name, key, group, kept)
    return next((choice for choice in choices if choice["schedule"] in candidates), None)


def _what(schedule: str, name: str, dtype: torch.dtype) -> str:
    return f"{schedule}: {name} in {str(dtype).removeprefix('torch.')}"


def known_problem(group: Group, device: torch.device, schedule: str, name: str, dtype: torch.dtype) -> str:
    """The problem found with an op on a schedule, empty if none was found. All ranks call together."""
    return str(_kept(group, device)["wrong"].get(_what(schedule, name, dtype), ""))


def set_wrong(group: Group, device: torch.device, found: Mapping[tuple[str, str, torch.dtype], str]) -> None:
    """Save problems by schedule, op and dtype; empty ones clear an earlier problem. All ranks call together."""
    kept = _kept(group, device)
    kept["wrong"].update({_what(*what): problem for what, problem in found.items()})
    kept["right"].update({_what(*what): "" for what in found})
    if group.rank == 0:
        _keep(kept)


def set_right(group: Group, device: torch.device, found: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Save schedules, ops and dtypes that `verify` has found right. All ranks call together."""
    kept = _kept(group, device)
    kept["right"].update(dict.fromkeys((_what(*what) for what in found), "checked by fused-tp tune"))
    if group.rank == 0:
        _keep(kept)


def _measured(name: str, key: ScheduleKey, group: Group, run: Run, kept: dict[str, Any]) -> dict[str, Any] | None:
    """Measure the choice for a call; record schedules with wrong results in `kept`. None if memory is short."""
    names = _candidates(name, key, group, kept)
    schedules = {one: schedule_named(one, group, key.device) for one in names}
    reference = _leaves(run(schedules[_PLAIN]))
    if settings.autotune() == settings.ONLINE:
        # A rank that runs out of memory inside one of torch's ops would leave its peers waiting without a deadline.
        moved = key.m * (key.n or key.k or 0) * key.dtype.itemsize
        short = sum(t.nbytes for t in reference) * 3 + 4 * moved > _free_bytes(key.device)
        if any(exchange(group, f"autotuning of {name}: memory", short)):
            return None
    looks = exchange(
        group,
        f"autotuning of {name}: first look",
        {one: _look(one, schedule, run, reference, key.device) for one, schedule in schedules.items()},
    )
    for one in names:
        problem = _problem([look[one] for look in looks], [look[_PLAIN] for look in looks], name in EVERYWHERE)
        if problem and one != _PLAIN:
            kept["wrong"][_what(one, name, key.dtype)] = problem
            del schedules[one]
    slowest = {one: max(look[one]["seconds"] for look in looks) for one in schedules}
    fastest = min(slowest.values())
    rivals = [one for one in schedules if one == _PLAIN or slowest[one] < HOPELESS * fastest]
    calls = min(MOST_CALLS, 1 + int(ROUND_SECONDS / max(fastest, 1e-9)))
    rounds = [[_seconds(schedules[one], run, calls, key.device) for one in rivals] for _ in range(ROUNDS)]
    everyone = exchange(group, f"autotuning of {name}: times", rounds)
    times = {
        one: [max(theirs[number][at] for theirs in everyone) for number in range(ROUNDS)]
        for at, one in enumerate(rivals)
    }
    chosen = _fastest(times)
    medians = {one: statistics.median(found) for one, found in times.items()}
    return {"schedule": chosen, "seconds": medians, "slower": sorted(set(schedules) - set(rivals))}


def _look(name: str, schedule: Schedule, run: Run, reference: Sequence[Tensor], device: torch.device) -> dict[str, Any]:
    """Results of a schedule as one rank sees them, and the duration of a second call."""
    try:
        first = _leaves(run(schedule))
        seconds = _seconds(schedule, run, 1, device)
        again = _leaves(run(schedule))
    except FusedTPError as error:
        sentence = " FUSED_TP_AUTOTUNE had this call tried on schedule {tried!r}; set it to 0 to try none."
        raise error.copy(sentence, tried=name) from error
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}", "seconds": 0.0, "bits": [], "again": []}
    return {
        "problem": difference(first, reference),
        "seconds": seconds,
        "bits": [checksum(t) for t in first],
        "again": [checksum(t) for t in again],
    }


def _problem(looks: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], everywhere: bool) -> str:
    """The problem with a schedule, from all ranks' looks at it and at the plain one; empty if there is none."""
    for rank, look in enumerate(looks):
        if look["problem"]:
            return f"on rank {rank} {look['problem']}"
    for rank, (look, reference) in enumerate(zip(looks, plain, strict=True)):
        if look["bits"] != look["again"] and reference["bits"] == reference["again"]:
            return f"on rank {rank} a second call gave other bits"
    differ = [len({tuple(look["bits"]) for look in one}) > 1 for one in (looks, plain)]
    return "ranks hold different bits" if everywhere and differ == [True, False] else ""


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Describe a difference between results larger than rounding; empty if there is none.

    Compares element by element, because a wrong tile may be a thousandth of a result.
    """
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return f"the result has shapes {[tuple(t.shape) for t in found]}, not {[tuple(t.shape) for t in wanted]}"
    for mine, reference in zip(found, wanted, strict=True):
        if not reference.numel():
            continue
        if not reference.is_floating_point():
            if not torch.equal(mine, reference):
                return "the result differs"
            continue
        # Terms are rounded before they are summed; float32 may be multiplied as tf32.
        eps = torch.finfo(reference.dtype).eps
        tolerance = 8 * (eps if reference.dtype == torch.float64 else max(eps, 2.0**-11))
        wide = torch.float64 if reference.dtype == torch.float64 else torch.float32
        known = reference.isfinite()
        size = torch.where(known, reference, 0).to(wide).square().mean().sqrt()
        error = (mine.to(wide) - reference.to(wide)).abs()
        allowed = tolerance * (reference.to(wide).abs() + size)
        bad = known & ~(error <= allowed)
        if bad.any():
            part = bad.sum().item() / reference.numel()
            return f"{part:.2%} of the result are wrong, by up to {float((error / size)[bad].max()):.2g} of its size"
    return ""


def _fastest(times: Mapping[str, Sequence[float]]) -> str:
    """The schedule with the smallest median among those that clearly beat the plain one; plain if none does.

    >>> _fastest({"plain": [1.0, 1.0, 1.0, 1.0], "pipelined": [0.9, 0.9, 0.9, 1.2], "one_sided": [0.97] * 4})
    'pipelined'
    """
    ratios = {
        name: sorted(mine / plain for mine, plain in zip(found, times[_PLAIN], strict=True))
        for name, found in times.items()
    }
    clear = [name for name, of in ratios.items() if of[(3 * len(of) - 1) // 4] < MARGIN]
    return min(clear, key=lambda name: statistics.median(ratios[name]), default=_PLAIN)


def _seconds(schedule: Schedule, run: Run, calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run(schedule)
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _free_bytes(device: torch.device) -> float:
    """Bytes that can still be allocated; infinite on a CPU, where this is not queried."""
    if device.type != "cuda":
        return float("inf")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leaves(results: Any) -> list[Tensor]:
    return [t for t in tree_leaves(results) if isinstance(t, Tensor)]


def checksum(t: Tensor) -> int:
    """Checksum of a tensor's bits."""
    return zlib.crc32(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())


def _words(name: str, key: ScheduleKey) -> str:
    dims = ("up to m", _rounded_up(key.m)), ("k", key.k), ("n", key.n)
    sizes = ", ".join(f"{dim}={size}" for dim, size in dims if size is not None)
    return f"{name}, {str(key.dtype).removeprefix('torch.')} on {key.device.type}, {sizes}"


def _places(name: str, key: ScheduleKey) -> list[str]:
    """Keys of the saved choices for a call; a new choice is saved under the last one.

    A choice among few schedules does not serve FUSED_TP_AUTOTUNE=1, but one made with FUSED_TP_AUTOTUNE=1 serves both.
    """
    words = _words(name, key)
    return (
        [words] if settings.autotune() != settings.ONLINE else [words, f"{words}, where FUSED_TP_AUTOTUNE is not set"]
    )


def _rounded_up(rows: int) -> int:
    """Round up to a power of two, or 1.5 times one: varying batch lengths would otherwise be measured for ever.

    >>> [_rounded_up(rows) for rows in (0, 1, 3, 5, 6, 7, 100, 1025)]
    [0, 1, 3, 6, 6, 8, 128, 1536]
    """
    power = 1 << max(0, rows - 1).bit_length()
    return 0 if rows == 0 else 3 * power // 4 if rows <= 3 * power // 4 else power


def told(choice: Mapping[str, Any]) -> str:
    """A choice in words, with the measured times."""
    times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in choice["seconds"].items())
    return f"{choice['schedule']} ({times})"


# -- the file ---------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    named = settings.autotune()
    if named in (None, settings.ONLINE, "1"):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fused_tp")
    return Path(str(named))


def _machine(group: Group, device: torch.device) -> dict[str, Any]:
    """The hardware and versions that choices are valid for. A collective call."""
    hosts = exchange(group, "autotuning: hosts", own_host())
    ranks = [hosts.count(one) for one in dict.fromkeys(hosts)]
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009
    else:
        name, driver = f"{platform.machine()}, {os.cpu_count()} processors", f"{torch.get_num_threads()} threads a rank"
    versions = {"fused_tp": version("fused-tp"), "torch": torch.__version__}
    return {**versions, "ranks of each host": ranks, "device": name, "driver": driver}


def _kept(group: Group, device: torch.device) -> dict[str, Any]:
    kept = _KEPT.get(group)
    if kept is None:
        kept = _KEPT[group] = _load(group, device)
    return kept


def _load(group: Group, device: torch.device) -> dict[str, Any]:
    """Load the choices that rank 0 saved in earlier runs, on all ranks."""
    machine = _machine(group, device)
    path = _folder() / f"autotune-{zlib.crc32(json.dumps(machine, sort_keys=True).encode()):08x}.json"
    mine = _read(path) if group.rank == 0 else None
    theirs = exchange(group, "autotuning: choices kept", mine)[0] or {}
    kept = {part: theirs.get(part, {}) for part in _PARTS}
    return {"about": _ABOUT, "machine": machine, **kept, "path": str(path)}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        if all(isinstance(content[part], dict) for part in ("machine", "choices", "wrong")):
            return dict(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not a file of measured choices (%s); it is written anew.", path, error)
    return None


def _keep(kept: Mapping[str, Any]) -> None:
    """Write the file atomically: several groups, and programs, may write it."""
    path = Path(kept["path"])
    before = _read(path) or {}
    content = {
        "about": kept["about"],
        "machine": kept["machine"],
        **{part: {k: v for k, v in (before.get(part, {}) | kept.get(part, {})).items() if v} for part in _PARTS},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(file.name, path)
    except OSError as error:
        _LOG.warning("Choices of schedules could not be kept in %s (%s); the next run measures again.", path, error)
