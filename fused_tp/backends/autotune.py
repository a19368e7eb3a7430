"""Selection of schedules by measurement at run time: with `FUSED_TP_AUTOTUNE`, and by default between NVLink GPUs.

The first call of an op with new sizes runs on every schedule available to its group, with the call's own tensors, on
all ranks together:

    1. check      The result must equal that of the plain schedule up to rounding. If the plain schedule returns the
                  same bits in two calls, or on all ranks for an op with replicated output, this schedule must too. A
                  schedule that fails is not used again for that op and dtype by this group, nor by any group on this
                  machine that loads the file of saved choices.
    2. measure    The schedules run in turn, for several rounds. The time of a round is that of the slowest rank.
    3. choose     The fastest schedule that beats the plain one by a clear margin in three quarters of the rounds, or
                  the plain schedule if there is none.

If the variable is not set, the shipped table decides, except for GPUs that write into each other's memory, for which
the table has published numbers only, none measured with this package. There the candidates are the plain schedule,
torch's own ops (`symm_mem`), and the other schedules that `fused-tp tune` has verified on this machine.

Ranks exchange their results, so all make the same choice. Rank 0 saves choices in a file, keyed by device, versions and
ranks. Later programs on the same machine load them.
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

from fused_tp.backends.hierarchical.two_level import host_id
from fused_tp.backends.registry import SCHEDULES, schedule_named, transport_key
from fused_tp.backends.schedule import Schedule
from fused_tp.backends.symmetric_memory.symm_mem import is_capturing
from fused_tp.core import settings
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.store import exchange

PLAIN_SCHEDULE = "plain"
NUM_ROUNDS = 9
ROUND_SECONDS = 2e-3  # shortest time per schedule and round; short calls are repeated
MAX_CALLS = 50  # largest number of calls per schedule and round
# A schedule is faster than plain if the third quartile of (its time / plain's time) over the rounds is below this.
MAX_TIME_RATIO = 0.95
MAX_SLOWDOWN = 3.0  # a schedule that takes this many times as long as the fastest in its first call is not measured
REPLICATED_OPS = frozenset(  # ops whose result is the same on all ranks
    {"all_gather", "all_reduce", "all_reduce_rms_norm", "matmul_all_reduce", "matmul_all_reduce_rms_norm"}
)

# Without FUSED_TP_AUTOTUNE, these are candidates even if `fused-tp tune` has not verified them.
_ALWAYS_CANDIDATES = (PLAIN_SCHEDULE, "symm_mem")
_FILE_DESCRIPTION = (
    "Schedules that fused_tp has measured on this machine (FUSED_TP_AUTOTUNE): choices by op, dtype and sizes, the "
    "schedules with wrong results, and the schedules verified by fused-tp tune. Delete the file to measure again."
)
_LOG = logging.getLogger("fused_tp")
_SECTIONS = ("choices", "wrong", "right")  # sections of the file of saved choices
_SAVED_CHOICES: GroupSlot[dict[str, Any]] = GroupSlot()

RunOnSchedule = Callable[[Schedule], Any]


def is_measured(op_name: str, key: ScheduleKey, group: Group) -> bool:
    """True if the first call of op `op_name` with `key` is measured. All ranks call together."""
    if group.size == 1 or settings.forced_schedule() is not None:
        return False
    setting = settings.autotune()
    if setting != settings.AUTOTUNE_UNSET:
        return setting is not None
    if settings.table_path() is not None or transport_key(group, key.device) != "nvlink":
        return False
    return len(_candidate_schedules(op_name, key, group, _load_choices_once(group, key.device))) > 1


def tuned_schedule(op_name: str, key: ScheduleKey, group: Group, run: RunOnSchedule) -> Schedule | None:
    """Return the fastest schedule for a call of op `op_name`, and measure the schedules if there is no saved choice.

    Returns None if schedules cannot be measured: during CUDA graph capture, or if `FUSED_TP_AUTOTUNE` is not set and
    memory is short.

    Args:
        run: runs the call on a schedule. It is called repeatedly, and must make the same call on all ranks.

    Raises:
        FusedTPError: a schedule failed and left the group unusable; the message names the schedule.
    """
    saved_results = _load_choices_once(group, key.device)
    # Checked at every call: the chosen schedule may have been disabled, or found wrong at other sizes, since.
    choice = _valid_choice(op_name, key, group, saved_results)
    if choice is None:
        if is_capturing(key.device):
            return None
        with torch.no_grad():
            choice = _measure_candidates(op_name, key, group, run, saved_results)
        if choice is None:
            return None
        call_key = _choice_keys(op_name, key)[-1]
        saved_results["choices"][call_key] = choice
        if group.rank == 0:
            _save_choices(saved_results)
            _LOG.info("autotune: %s: %s", call_key, describe_choice(choice))
    return schedule_named(choice["schedule"], group, key.device)


def saved_choice(op_name: str, key: ScheduleKey, group: Group) -> dict[str, Any] | None:
    """Return the saved choice of this group for a call of op `op_name` with `key`; None if there is none."""
    saved_results = _SAVED_CHOICES.get(group)
    return None if saved_results is None else _valid_choice(op_name, key, group, saved_results)


def describe_choices(group: Group) -> dict[str, str]:
    """Return descriptions of all choices of this group, keyed by the description of the call."""
    return {
        call: describe_choice(choice) for call, choice in _SAVED_CHOICES.get(group, {"choices": {}})["choices"].items()
    }


def saved_files() -> list[tuple[Path, dict[str, Any]]]:
    """Return (path, content) of all files of saved choices in the folder that this process uses."""
    contents = ((path, _read_choices(path)) for path in sorted(_results_folder().glob("autotune-*.json")))
    return [(path, content) for path, content in contents if content is not None]


def usable_schedules(
    op: str, dtype: torch.dtype, device: torch.device, group: Group, names: Collection[str] | None = None
) -> list[str]:
    """Return the names of the schedules available to `group` for `op`, "plain" first. All ranks call together.

    Args:
        names: names of schedules to consider; None: all.
    """
    other_specs = (
        spec for spec in SCHEDULES.values() if spec.name != PLAIN_SCHEDULE and (names is None or spec.name in names)
    )
    return [PLAIN_SCHEDULE, *(s.name for s in other_specs if s.supports(op, dtype) and s.available(group, device))]


def _candidate_schedules(op_name: str, key: ScheduleKey, group: Group, saved_results: Mapping[str, Any]) -> list[str]:
    """Return the names of the schedules to measure for a call, without those with wrong results; includes "plain"."""
    names = None
    if settings.autotune() == settings.AUTOTUNE_UNSET:
        verified = saved_results.get("right", {})
        names = [
            schedule
            for schedule in SCHEDULES
            if schedule in _ALWAYS_CANDIDATES or verified.get(_verdict_key(schedule, op_name, key.dtype))
        ]
    usable = usable_schedules(key.op, key.dtype, key.device, group, names)
    return [
        schedule
        for schedule in usable
        if schedule == PLAIN_SCHEDULE or not saved_results["wrong"].get(_verdict_key(schedule, op_name, key.dtype))
    ]


def _valid_choice(
    op_name: str, key: ScheduleKey, group: Group, saved_results: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the saved choice for a call if its schedule is still a candidate, else None."""
    choices = [
        choice for call in _choice_keys(op_name, key) if (choice := saved_results["choices"].get(call)) is not None
    ]
    if not choices:
        return None
    candidates = _candidate_schedules(op_name, key, group, saved_results)
    return next((choice for choice in choices if choice["schedule"] in candidates), None)


def _verdict_key(schedule: str, op_name: str, dtype: torch.dtype) -> str:
    """Return the key of a schedule, op and dtype in the sections "wrong" and "right"."""
    return f"{schedule}: {op_name} in {str(dtype).removeprefix('torch.')}"


def known_problem(group: Group, device: torch.device, schedule: str, op_name: str, dtype: torch.dtype) -> str:
    """Return the recorded problem of op `op_name` on a schedule; empty if there is none. All ranks call together."""
    return str(_load_choices_once(group, device)["wrong"].get(_verdict_key(schedule, op_name, dtype), ""))


def record_problems(group: Group, device: torch.device, problems: Mapping[tuple[str, str, torch.dtype], str]) -> None:
    """Save problems by (schedule, op, dtype); an empty problem clears an earlier one. All ranks call together."""
    saved_results = _load_choices_once(group, device)
    saved_results["wrong"].update({_verdict_key(*case): problem for case, problem in problems.items()})
    saved_results["right"].update({_verdict_key(*case): "" for case in problems})
    if group.rank == 0:
        _save_choices(saved_results)


def record_verified(group: Group, device: torch.device, verified: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Save that the (schedule, op, dtype) in `verified` are verified by fused-tp tune. All ranks call together."""
    saved_results = _load_choices_once(group, device)
    saved_results["right"].update(dict.fromkeys((_verdict_key(*case) for case in verified), "checked by fused-tp tune"))
    if group.rank == 0:
        _save_choices(saved_results)


def _measure_candidates(
    op_name: str, key: ScheduleKey, group: Group, run: RunOnSchedule, saved_results: dict[str, Any]
) -> dict[str, Any] | None:
    """Measure all candidates and return the choice; None if memory is short. Add wrong results to `saved_results`."""
    names = _candidate_schedules(op_name, key, group, saved_results)
    schedules = {candidate: schedule_named(candidate, group, key.device) for candidate in names}
    reference = _list_tensors(run(schedules[PLAIN_SCHEDULE]))
    if settings.autotune() == settings.AUTOTUNE_UNSET:
        # Check the memory first: if one rank ran out of it inside a torch op, its peers would wait in the op forever.
        transfer_bytes = key.m * (key.n or key.k or 0) * key.dtype.itemsize
        is_memory_short = sum(t.nbytes for t in reference) * 3 + 4 * transfer_bytes > _free_bytes(key.device)
        if any(exchange(group, f"autotuning of {op_name}: memory", is_memory_short)):
            return None
    trials = exchange(
        group,
        f"autotuning of {op_name}: first calls",
        {
            candidate: _try_schedule(candidate, schedule, run, reference, key.device)
            for candidate, schedule in schedules.items()
        },
    )
    for candidate in names:
        problem = _schedule_problem(
            [trial[candidate] for trial in trials],
            [trial[PLAIN_SCHEDULE] for trial in trials],
            op_name in REPLICATED_OPS,
        )
        if problem and candidate != PLAIN_SCHEDULE:
            saved_results["wrong"][_verdict_key(candidate, op_name, key.dtype)] = problem
            del schedules[candidate]
    first_call_seconds = {candidate: max(trial[candidate]["seconds"] for trial in trials) for candidate in schedules}
    shortest_seconds = min(first_call_seconds.values())
    measured_names = [
        candidate
        for candidate in schedules
        if candidate == PLAIN_SCHEDULE or first_call_seconds[candidate] < MAX_SLOWDOWN * shortest_seconds
    ]
    calls_per_round = min(MAX_CALLS, 1 + int(ROUND_SECONDS / max(shortest_seconds, 1e-9)))
    rounds = [
        [
            _measure_seconds_per_call(schedules[candidate], run, calls_per_round, key.device)
            for candidate in measured_names
        ]
        for _ in range(NUM_ROUNDS)
    ]
    rounds_by_rank = exchange(group, f"autotuning of {op_name}: times", rounds)
    slowest_seconds = {
        candidate: [max(times[i][column] for times in rounds_by_rank) for i in range(NUM_ROUNDS)]
        for column, candidate in enumerate(measured_names)
    }
    median_seconds = {candidate: statistics.median(times) for candidate, times in slowest_seconds.items()}
    return {
        "schedule": choose_fastest(slowest_seconds),
        "seconds": median_seconds,
        "slower": sorted(set(schedules) - set(measured_names)),
    }


def _try_schedule(
    schedule_name: str, schedule: Schedule, run: RunOnSchedule, reference: Sequence[Tensor], device: torch.device
) -> dict[str, Any]:
    """Run the call three times on a schedule; return its problem, its duration and the checksums of its results."""
    try:
        first_result = _list_tensors(run(schedule))
        seconds = _measure_seconds_per_call(schedule, run, 1, device)
        second_result = _list_tensors(run(schedule))
    except FusedTPError as error:
        suffix = " Autotuning ran this call on schedule {tried!r}; set FUSED_TP_AUTOTUNE=0 to turn autotuning off."
        raise error.copy(suffix, tried=schedule_name) from error
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}", "seconds": 0.0, "bits": [], "again": []}
    return {
        "problem": describe_difference(first_result, reference),
        "seconds": seconds,
        "bits": [tensor_checksum(t) for t in first_result],
        "again": [tensor_checksum(t) for t in second_result],
    }


def _schedule_problem(
    trials: Sequence[Mapping[str, Any]], plain_trials: Sequence[Mapping[str, Any]], is_replicated: bool
) -> str:
    """Return the problem of a schedule, from the results of `_try_schedule` on each rank; empty if there is none.

    Args:
        trials: results for this schedule, by rank.
        plain_trials: results for the plain schedule, by rank.
        is_replicated: True if all ranks get the same result from this op.
    """
    for rank, trial in enumerate(trials):
        if trial["problem"]:
            return f"on rank {rank} {trial['problem']}"
    for rank, (trial, plain_trial) in enumerate(zip(trials, plain_trials, strict=True)):
        if trial["bits"] != trial["again"] and plain_trial["bits"] == plain_trial["again"]:
            return f"on rank {rank} two equal calls returned different bits"
    ranks_differ = [len({tuple(trial["bits"]) for trial in rank_trials}) > 1 for rank_trials in (trials, plain_trials)]
    return "ranks hold different bits" if is_replicated and ranks_differ == [True, False] else ""


def describe_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Describe a difference between two results that is larger than rounding; empty if there is none.

    Elements are compared one by one, because one wrong tile of a large result would not change its norm noticeably.
    """
    if [t.shape for t in results] != [t.shape for t in expected]:
        return f"the result has shapes {[tuple(t.shape) for t in results]}, not {[tuple(t.shape) for t in expected]}"
    for result, reference in zip(results, expected, strict=True):
        if not reference.numel():
            continue
        if not reference.is_floating_point():
            if not torch.equal(result, reference):
                return "the result differs"
            continue
        # Schedules round the terms of a sum differently, and GPUs may multiply float32 as tf32 (10 bits).
        eps = torch.finfo(reference.dtype).eps
        tolerance = 8 * (eps if reference.dtype == torch.float64 else max(eps, 2.0**-11))
        wide_dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
        is_finite = reference.isfinite()
        rms = torch.where(is_finite, reference, 0).to(wide_dtype).square().mean().sqrt()
        error = (result.to(wide_dtype) - reference.to(wide_dtype)).abs()
        allowed_error = tolerance * (reference.to(wide_dtype).abs() + rms)
        is_wrong = is_finite & ~(error <= allowed_error)
        if is_wrong.any():
            wrong_share = is_wrong.sum().item() / reference.numel()
            worst_ratio = float((error / rms)[is_wrong].max())
            return f"{wrong_share:.2%} of the result are wrong, by up to {worst_ratio:.2g} times its root mean square"
    return ""


def choose_fastest(seconds: Mapping[str, Sequence[float]], incumbent: str = PLAIN_SCHEDULE) -> str:
    """Choose from seconds by name and round: the incumbent, unless another is clearly faster in most rounds.

    A rival must take less than `MAX_TIME_RATIO` of the incumbent's time in three quarters of the rounds, so that noise
    changes no choice; of such rivals, the one with the smallest median ratio is chosen. Without times of the incumbent,
    the one with the smallest median time is.

    >>> choose_fastest({"plain": [1.0, 1.0, 1.0, 1.0], "pipelined": [0.9, 0.9, 0.9, 1.2], "one_sided": [0.97] * 4})
    'pipelined'
    """
    if incumbent not in seconds:
        return min(seconds, key=lambda name: statistics.median(seconds[name]))
    ratios = {
        name: sorted(
            rival_seconds / incumbent_seconds
            for rival_seconds, incumbent_seconds in zip(times, seconds[incumbent], strict=True)
        )
        for name, times in seconds.items()
    }
    faster_names = [name for name, values in ratios.items() if values[(3 * len(values) - 1) // 4] < MAX_TIME_RATIO]
    return min(faster_names, key=lambda name: statistics.median(ratios[name]), default=incumbent)


def _measure_seconds_per_call(schedule: Schedule, run: RunOnSchedule, num_calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(num_calls):
        run(schedule)
    _synchronize(device)
    return (time.perf_counter() - start) / num_calls


def _free_bytes(device: torch.device) -> float:
    """Return the bytes of GPU memory that can still be allocated; infinity for a CPU."""
    if device.type != "cuda":
        return float("inf")
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached_bytes)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _list_tensors(results: Any) -> list[Tensor]:
    return [t for t in tree_leaves(results) if isinstance(t, Tensor)]


def tensor_checksum(t: Tensor) -> int:
    """Return a CRC of the bytes of `t`."""
    return zlib.crc32(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())


def _describe_call(op_name: str, key: ScheduleKey) -> str:
    dims = ("up to m", _round_up_to_bucket(key.m)), ("k", key.k), ("n", key.n)
    sizes = ", ".join(f"{dim}={size}" for dim, size in dims if size is not None)
    return f"{op_name}, {str(key.dtype).removeprefix('torch.')} on {key.device.type}, {sizes}"


def _choice_keys(op_name: str, key: ScheduleKey) -> list[str]:
    """Return the keys under which choices for a call are looked up, in order; a new choice is saved under the last.

    With FUSED_TP_AUTOTUNE=1 all schedules are measured, so such a choice is also valid if the variable is not set.
    Choices made while it is not set compare few schedules, so they have a separate key.
    """
    call = _describe_call(op_name, key)
    return (
        [call]
        if settings.autotune() != settings.AUTOTUNE_UNSET
        else [call, f"{call}, where FUSED_TP_AUTOTUNE is not set"]
    )


def _round_up_to_bucket(num_rows: int) -> int:
    """Round `num_rows` up to 2^i or 1.5 * 2^i, so that a program with varying batch lengths measures few sizes.

    >>> [_round_up_to_bucket(rows) for rows in (0, 1, 3, 5, 6, 7, 100, 1025)]
    [0, 1, 3, 6, 6, 8, 128, 1536]
    """
    power = 1 << max(0, num_rows - 1).bit_length()
    return 0 if num_rows == 0 else 3 * power // 4 if num_rows <= 3 * power // 4 else power


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Describe a choice: the schedule and the measured time of each candidate."""
    times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in choice["seconds"].items())
    return f"{choice['schedule']} ({times})"


# -- the file ---------------------------------------------------------------------------------------------------------


def _results_folder() -> Path:
    setting = settings.autotune()
    if setting in (None, settings.AUTOTUNE_UNSET, "1"):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fused_tp")
    return Path(str(setting))


def _describe_machine(group: Group, device: torch.device) -> dict[str, Any]:
    """Return the hardware and versions for which saved choices are valid. A collective call."""
    hosts = exchange(group, "autotuning: hosts", host_id())
    ranks_per_host = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if device.type == "cuda":
        device_name, driver = torch.cuda.get_device_name(device), getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009
    else:
        device_name, driver = (
            f"{platform.machine()}, {os.cpu_count()} processors",
            f"{torch.get_num_threads()} threads a rank",
        )
    versions = {"fused_tp": version("fused-tp"), "torch": torch.__version__}
    return {**versions, "ranks of each host": ranks_per_host, "device": device_name, "driver": driver}


def _load_choices_once(group: Group, device: torch.device) -> dict[str, Any]:
    saved_results = _SAVED_CHOICES.get(group)
    if saved_results is None:
        saved_results = _SAVED_CHOICES[group] = _load_choices(group, device)
    return saved_results


def _load_choices(group: Group, device: torch.device) -> dict[str, Any]:
    """Return the content of rank 0's file of saved choices. A collective call."""
    machine = _describe_machine(group, device)
    path = _results_folder() / f"autotune-{zlib.crc32(json.dumps(machine, sort_keys=True).encode()):08x}.json"
    own_content = _read_choices(path) if group.rank == 0 else None
    content = exchange(group, "autotuning: saved choices", own_content)[0] or {}
    sections = {section: content.get(section, {}) for section in _SECTIONS}
    return {"about": _FILE_DESCRIPTION, "machine": machine, **sections, "path": str(path)}


def _read_choices(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        if all(isinstance(content[section], dict) for section in ("machine", "choices", "wrong")):
            return dict(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not a valid file of saved choices (%s); it will be overwritten.", path, error)
    return None


def _save_choices(saved_results: Mapping[str, Any]) -> None:
    """Merge `saved_results` into its file.

    The file is replaced atomically, because other groups and programs may write it at the same time.
    """
    path = Path(saved_results["path"])
    previous_content = _read_choices(path) or {}
    content = {
        "about": saved_results["about"],
        "machine": saved_results["machine"],
        **{
            section: {
                key: value
                for key, value in (previous_content.get(section, {}) | saved_results.get(section, {})).items()
                if value
            }
            for section in _SECTIONS
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(file.name, path)
    except OSError as error:
        _LOG.warning(
            "Choices of schedules could not be saved in %s (%s); the next run will measure again.", path, error
        )
