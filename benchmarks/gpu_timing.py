"""Timing on a GPU: all contestants of a case in turn, round after round, each measured by events on its streams.

The timed work is queued while a gate holds all streams back, so the host's part of a launch does not count, nor the
order in which ranks are launched. A time is measured from the opening of the gate to the end of the last stream.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fused_tp.cli.doctor import read_program_output

from .case import BenchCase, Contestant
from .results import MeasuredMachine, this_machine, versions

MIN_TIMED_SECONDS = 1e-3  # least time of one measurement, because events are exact to about a microsecond
MAX_CALLS = 16
MAX_HOLD_SECONDS = 0.5
MAX_TRIES = 8
MAX_RANKS = 4
# Relative errors of a whole result, by norm: one rounding of bf16 is 1.7e-3; terms sent to peers are rounded once more.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CHECKED_ROWS = 512


class TimeBudget:
    """Time that a run may take, with a prediction whether the next case fits."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start, self._budget_seconds = now, now(), seconds
        self._planned_seconds = self._taken_seconds = 0.0

    def spent_seconds(self) -> float:
        return self._now() - self._start

    def remaining_seconds(self) -> float:
        return self._budget_seconds - self.spent_seconds()

    def record(self, planned_seconds: float, taken_seconds: float) -> None:
        """Record planned and actual time, whose ratio scales the plans of later cases."""
        self._planned_seconds += planned_seconds
        self._taken_seconds += taken_seconds

    def fits(self, planned_seconds: float) -> bool:
        slowness = max(1.0, self._taken_seconds / self._planned_seconds) if self._planned_seconds else 1.0
        return planned_seconds * slowness <= self.remaining_seconds()


class GpuContext:
    """The GPU that cases run on; a `case.Context`. Its streams are those of the ranks of a case."""

    rechecks_results = True  # results are checked again after calls without a pause between them

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timed_streams: Sequence[torch.cuda.Stream] = ()
        self._hold_seconds = 1e-3  # seconds that the gate stays closed

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def start(self, case: BenchCase) -> None:
        self._timed_streams = self.streams(case.parameters.get("world_size", 1))
        self._hold_seconds = 1e-3

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        measure = measure_host_seconds if contestant.times_host else self._measure_gpu_seconds
        estimate = min(measure(contestant.run, 1) for _ in range(3))
        calls = min(MAX_CALLS, max(1, math.ceil(MIN_TIMED_SECONDS / max(estimate, 1e-6))))
        measure(contestant.run, calls)
        return estimate, calls

    def measure_seconds(self, contestant: Contestant, calls: int) -> float:
        measure = measure_host_seconds if contestant.times_host else self._measure_gpu_seconds
        return measure(contestant.run, calls) / contestant.repeats

    def _measure_gpu_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Time `calls` calls of run(), which queues its work on the case's streams; return the seconds per call."""
        for _ in range(MAX_TRIES):
            seconds, host_seconds, in_time = self._measure_gated(run, calls)
            self._hold_seconds = min(MAX_HOLD_SECONDS, max(2e-4, (1.5 if in_time else 3.0) * host_seconds))
            if in_time:
                return seconds / calls
        raise RuntimeError(
            f"The host took over {MAX_HOLD_SECONDS} s to queue {calls} calls, in each of {MAX_TRIES} tries. "
            "Use an idle host."
        )

    def _measure_gated(self, run: Callable[[], object], calls: int) -> tuple[float, float, bool]:
        """Time `calls` calls behind the gate: (seconds on the GPU, seconds of the host, in time).

        In time: the gate stayed closed until all work was queued.
        """
        gate_opened = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._streams[0]):
            torch.cuda._sleep(int(self._hold_seconds * 2e9))  # cycles; no clock is much above 2 GHz
            gate_opened.record()
        for stream in self._timed_streams:
            stream.wait_event(gate_opened)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        ends = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in self._timed_streams]
        in_time = not gate_opened.query()
        host_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return max(gate_opened.elapsed_time(end) for end in ends) / 1e3, host_seconds, in_time

    @cached_property
    def properties(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    @property
    def arch(self) -> int:
        """Architecture as a number, e.g. 90 for sm_90."""
        return 10 * int(self.properties.major) + int(self.properties.minor)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @property
    def sms(self) -> int:
        return int(self.properties.multi_processor_count)

    def input_set_count(self, nbytes: int) -> int:
        """Return the number of sets of `nbytes` to cycle through: 3 times the capacity of L2, so that L2 holds none."""
        l2 = int(getattr(self.properties, "L2_cache_size", 0)) or 64 << 20
        return min(32, max(2, math.ceil(3 * l2 / max(nbytes, 1))))

    def streams(self, world_size: int) -> list[torch.cuda.Stream]:
        """Streams of `world_size` ranks, the same ones each time."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size is {world_size}; there are streams for 1 to {MAX_RANKS} ranks.")
        return self._streams[1 : 1 + world_size]

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream]:
        """Stream of the gate, which holds the others back, and streams of the ranks."""
        # Rejected: torch's pool, which returns a stream again after 32 others: it may wait behind another user's work.
        from fused_tp.triton_kernels.comm.streams import own_streams

        streams: list[torch.cuda.Stream] = own_streams(self, self.device, 1 + MAX_RANKS)
        return streams


class RecordedContext(GpuContext):
    """An absent GPU whose kernels are being compiled (`selftest.kernel_cache`); tensors are on the CPU."""

    def __init__(self, arch: int, sms: int) -> None:
        super().__init__(torch.device("cpu"))
        self.properties = SimpleNamespace(major=arch // 10, minor=arch % 10, multi_processor_count=sms)

    def synchronize(self) -> None:
        """Do nothing, as nothing runs."""

    def input_set_count(self, nbytes: int) -> int:
        return 1

    def streams(self, world_size: int) -> list[Any]:
        return [None] * world_size


def measure_host_seconds(run: Callable[[], object], calls: int) -> float:
    """Time the host during `calls` calls of run(), while queued work runs; return the seconds per call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls


def checked_rows(rows: int) -> slice:
    """Rows to compare with fp64: about CHECKED_ROWS, spread over the result, including the last row."""
    step = max(1, rows // CHECKED_ROWS)
    return slice((rows - 1) % step if rows else 0, None, step)


def assert_near(actual: Tensor, expected64: Tensor, name: str = "the result") -> None:
    """Raise AssertionError if `actual` differs from fp64, by norm, by more than its dtype explains, or holds NaN."""
    assert actual.shape == expected64.shape, f"{name} is {tuple(actual.shape)}, not {tuple(expected64.shape)}"
    norm = float(expected64.norm())
    error = float((actual.double() - expected64).norm()) / norm if norm else float(actual.double().norm())
    bound = TOLERANCES[actual.dtype]
    assert error <= bound, f"{name} is off by {error:.3g} of its norm; the bound is {bound:.3g}"


def use_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Return the context that makes `stream` current; None keeps the current stream (`RecordedContext`)."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def run_on_streams(streams: Sequence[torch.cuda.Stream], step: Callable[[int], Any]) -> list[Any]:
    """Call step(rank) in the stream of each rank; return the results."""
    results = []
    for rank, stream in enumerate(streams):
        with use_stream(stream):
            results.append(step(rank))
    return results


def cycling_contestant(
    run_set: Callable[[int], object], check: Callable[[], None] | None, note: str = ""
) -> Contestant:
    """Return a contestant whose calls cycle through the sets of inputs."""
    call_counter = itertools.count()
    return Contestant(lambda: run_set(next(call_counter)), check, note)


CLOCKS_SECONDS = 10.0  # least interval between two reads of the clocks
CLOCKS = {
    "driver": "driver_version",
    "SM clock": "clocks.sm",
    "highest SM clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power limit": "power.limit",
}


def gpu_machine(device: torch.device) -> MeasuredMachine:
    """Description of the GPU and of the host's processor."""
    gpu = torch.cuda.get_device_properties(device)
    memory = f"{getattr(gpu, 'L2_cache_size', 0) >> 20} MiB of L2, {gpu.total_memory >> 30} GiB"
    name = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {memory}"
    return replace(this_machine(), gpu=name)


def gpu_versions(device: torch.device) -> dict[str, str]:
    """Versions of all components, the commit, and the GPU's current clocks, as far as available."""
    import triton

    collected = {**versions(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return collected | query_nvidia_smi(device.index or 0, int(time.monotonic() // CLOCKS_SECONDS)) | _query_commit()


@lru_cache(1)
def query_nvidia_smi(index: int, cache_key: int) -> dict[str, str]:
    """Query driver, clocks and power with nvidia-smi; {} without it. Cached: a query takes longer than a short case."""
    query = f"--query-gpu={','.join(CLOCKS.values())}"
    lines = read_program_output("nvidia-smi", f"--id={index}", query, "--format=csv,noheader")
    values = [value.strip() for value in "".join(lines).split(",")]
    if len(values) != len(CLOCKS):
        return {}
    return {name: value for name, value in zip(CLOCKS, values, strict=True) if value and "N/A" not in value}


@cache
def _query_commit() -> dict[str, str]:
    """Query the commit of this checkout, and whether files have changed; {} outside of a checkout."""
    git_folder = ("-C", str(Path(__file__).parent))
    changed = read_program_output("git", *git_folder, "status", "--porcelain", "--untracked-files=no")
    commit = "".join(read_program_output("git", *git_folder, "rev-parse", "--short", "HEAD"))
    return {"commit": commit + (" and changes" if changed else "")} if commit else {}
