"""Times on a GPU: all contestants of a case in turn, round after round, each measured by events on its streams.

What is timed is queued while a gate holds all streams back, so the host's part of a launch does not count, nor does it
that ranks are launched one after the other. A time is that from the opening of the gate to the end of the last stream.
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

from fused_tp.cli.doctor import output_of

from .case import Case, Contestant
from .results import Machine, this_machine, versions

MIN_TIMED_SECONDS = 1e-3  # of what is timed at once: events are exact to about a microsecond
MAX_CALLS = 16
MAX_HOLD_SECONDS = 0.5
MAX_TRIES = 8
MOST_RANKS = 4
# Relative errors of a whole result, by norm: one rounding of bf16 is 1.7e-3, and terms that travel have another.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CHECKED_ROWS = 512


class Budget:
    """The minutes that a run may take, and whether what is next fits."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun, self._seconds = now, now(), seconds
        self._planned = self._taken = 0.0

    def spent(self) -> float:
        return self._now() - self._begun

    def left(self) -> float:
        return self._seconds - self.spent()

    def learn(self, planned: float, taken: float) -> None:
        """Something has taken other than planned: so will what follows."""
        self._planned += planned
        self._taken += taken

    def fits(self, planned: float) -> bool:
        slowness = max(1.0, self._taken / self._planned) if self._planned else 1.0
        return planned * slowness <= self.left()


class GpuContext:
    """The GPU that cases run on; a `case.Context`. Its streams are those of the ranks of a case."""

    checks_again = True  # whether calls that follow each other without a pause compute the same

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timed: Sequence[torch.cuda.Stream] = ()
        self._hold = 1e-3  # seconds that the gate stays closed

    def exchange(self, mine: Any) -> list[Any]:
        return [mine]

    def start(self, case: Case) -> None:
        self._timed = self.streams(case.parameters.get("world_size", 1))
        self._hold = 1e-3

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        measure = host_seconds if contestant.on_host else self._gpu_seconds
        estimate = min(measure(contestant.run, 1) for _ in range(3))
        calls = min(MAX_CALLS, max(1, math.ceil(MIN_TIMED_SECONDS / max(estimate, 1e-6))))
        measure(contestant.run, calls)
        return estimate, calls

    def seconds(self, contestant: Contestant, calls: int) -> float:
        measure = host_seconds if contestant.on_host else self._gpu_seconds
        return measure(contestant.run, calls) / contestant.repeats

    def _gpu_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of one of `calls` calls of run(), which queues its work on the streams of the case."""
        for _ in range(MAX_TRIES):
            seconds, host_seconds, in_time = self._measure(run, calls)
            self._hold = min(MAX_HOLD_SECONDS, max(2e-4, (1.5 if in_time else 3.0) * host_seconds))
            if in_time:
                return seconds / calls
        raise RuntimeError(f"The host took over {MAX_HOLD_SECONDS} s to queue {calls} calls, {MAX_TRIES} times over.")

    def _measure(self, run: Callable[[], object], calls: int) -> tuple[float, float, bool]:
        """Seconds on the GPU, seconds of the host, and whether the gate stayed closed until all was queued."""
        opened = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._streams[0]):
            torch.cuda._sleep(int(self._hold * 2e9))  # cycles; no clock is above 2 GHz by much
            opened.record()
        for stream in self._timed:
            stream.wait_event(opened)
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        ends = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in self._timed]
        in_time = not opened.query()
        host_seconds = time.perf_counter() - begun
        torch.cuda.synchronize()
        return max(opened.elapsed_time(end) for end in ends) / 1e3, host_seconds, in_time

    @cached_property
    def properties(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    @property
    def arch(self) -> int:
        """As in sm_90."""
        return 10 * int(self.properties.major) + int(self.properties.minor)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @property
    def sms(self) -> int:
        return int(self.properties.multi_processor_count)

    def input_sets(self, nbytes: int) -> int:
        """How many sets of inputs of `nbytes` to take in turn, so that none is found in L2: 3 times what that holds."""
        l2 = int(getattr(self.properties, "L2_cache_size", 0)) or 64 << 20
        return min(32, max(2, math.ceil(3 * l2 / max(nbytes, 1))))

    def streams(self, world_size: int) -> list[torch.cuda.Stream]:
        """The streams of so many ranks, the same ones each time."""
        if not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"world_size is {world_size}; there are streams for 1 to {MOST_RANKS} ranks.")
        return self._streams[1 : 1 + world_size]

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream]:
        """The gate's, which holds the others back, and the ranks'."""
        # With no other user: one of torch's pool is handed out again after 32 more, and would wait behind that work.
        from fused_tp.triton_kernels.comm.streams import own_streams

        streams: list[torch.cuda.Stream] = own_streams(self, self.device, 1 + MOST_RANKS)
        return streams


class RecordedContext(GpuContext):
    """A GPU that is not there, while its kernels are compiled (`selftest.kernel_cache`): tensors are the CPU's."""

    def __init__(self, arch: int, sms: int) -> None:
        super().__init__(torch.device("cpu"))
        self.properties = SimpleNamespace(major=arch // 10, minor=arch % 10, multi_processor_count=sms)

    def synchronize(self) -> None:
        """Nothing runs."""

    def input_sets(self, nbytes: int) -> int:
        return 1

    def streams(self, world_size: int) -> list[Any]:
        return [None] * world_size


def host_seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds that the host takes for one of `calls` calls of run(); what these queue runs meanwhile."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    return seconds / calls


def checked_rows(rows: int) -> slice:
    """Rows that are compared with fp64: about CHECKED_ROWS, in all parts of a result, the last one among them."""
    step = max(1, rows // CHECKED_ROWS)
    return slice((rows - 1) % step if rows else 0, None, step)


def assert_near(actual: Tensor, expected64: Tensor, what: str = "the result") -> None:
    """Raises AssertionError where `actual` is further from fp64, by norm, than its dtype explains; NaN always is."""
    assert actual.shape == expected64.shape, f"{what} is {tuple(actual.shape)}, not {tuple(expected64.shape)}"
    norm = float(expected64.norm())
    error = float((actual.double() - expected64).norm()) / norm if norm else float(actual.double().norm())
    bound = TOLERANCES[actual.dtype]
    assert error <= bound, f"{what} is off by {error:.3g} of its norm, where {bound:.3g} is allowed"


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A context in which `stream` is the current one; None: nothing changes (`RecordedContext`)."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def each(streams: Sequence[torch.cuda.Stream], step: Callable[[int], Any]) -> list[Any]:
    """step(rank) in the stream of each rank."""
    results = []
    for rank, stream in enumerate(streams):
        with on(stream):
            results.append(step(rank))
    return results


def counted(run_set: Callable[[int], object], check: Callable[[], None] | None, note: str = "") -> Contestant:
    """A contestant whose calls take the sets of inputs in turn."""
    turn = itertools.count()
    return Contestant(lambda: run_set(next(turn)), check, note)


CLOCKS_SECONDS = 10.0  # clocks are read at most so often
CLOCKS = {
    "driver": "driver_version",
    "SM clock": "clocks.sm",
    "highest SM clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power limit": "power.limit",
}


def gpu_machine(device: torch.device) -> Machine:
    """The GPU and the processor that launches."""
    gpu = torch.cuda.get_device_properties(device)
    memory = f"{getattr(gpu, 'L2_cache_size', 0) >> 20} MiB of L2, {gpu.total_memory >> 30} GiB"
    name = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {memory}"
    return replace(this_machine(), gpu=name)


def gpu_versions(device: torch.device) -> dict[str, str]:
    """Versions of all that takes part, the commit, and the GPU's clocks now, as far as they can be had."""
    import triton

    found = {**versions(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found | nvidia_smi(device.index or 0, int(time.monotonic() // CLOCKS_SECONDS)) | _commit()


@lru_cache(1)
def nvidia_smi(index: int, moment: int) -> dict[str, str]:
    """Driver, clocks and power, asked once in a moment: short cases take less time than the program; {} without it."""
    query = f"--query-gpu={','.join(CLOCKS.values())}"
    lines = output_of("nvidia-smi", f"--id={index}", query, "--format=csv,noheader")
    values = [value.strip() for value in "".join(lines).split(",")]
    if len(values) != len(CLOCKS):
        return {}
    return {name: value for name, value in zip(CLOCKS, values, strict=True) if value and "N/A" not in value}


@cache
def _commit() -> dict[str, str]:
    """Of this checkout, and whether it has changes; nothing if it is none."""
    here = ("-C", str(Path(__file__).parent))
    changed = output_of("git", *here, "status", "--porcelain", "--untracked-files=no")
    commit = "".join(output_of("git", *here, "rev-parse", "--short", "HEAD"))
    return {"commit": commit + (" and changes" if changed else "")} if commit else {}
