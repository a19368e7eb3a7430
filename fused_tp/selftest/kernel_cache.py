"""Compile the selftest's kernels into Triton's disk cache, or an archive of it. No GPU is needed.

    python -m fused_tp.selftest.kernel_cache --arch 90 --out sm_90.tar.xz

Several processes each make all calls on CPU tensors to record the kernels, and compile a share of the kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

# Patterns of the cases of benchmarks.gpu that the selftest times, in two steps: single kernels, then ranks on one GPU.
TIMED_CASES = "^(alone|attention/|flags)", "^(ranks|attention-ranks|latency|norm|overhead)"


class CompileResult(NamedTuple):
    """Result of compiling.

    Attributes:
        num_kernels: number of kernels that the selftest launches.
        num_cached: number of kernels that were already in the cache.
        failures: a message for each kernel that does not compile.
        seconds: total time.
    """

    num_kernels: int
    num_cached: int
    failures: list[str]
    seconds: float


class _FakeDriver:
    """Fake Triton driver for machines without a GPU: compiles for `arch` and launches nothing."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class LaunchRecorder:
    """Kernels that were launched inside the context `record_launches`.

    Attributes:
        keys: name and cache key of each kernel.
        num_hits: number of kernels of this process's share that were already in the cache.
        failures: a message for each kernel that does not compile.
    """

    def __init__(self, arch: int, worker: int, num_workers: int) -> None:
        self.keys: set[str] = set()
        self.num_hits = 0
        self.failures: list[str] = []
        self._arch, self._worker, self._num_workers = arch, worker, num_workers
        # .compiles_current: True if this process has to compile the kernel that the current thread is launching.
        self._thread_state = threading.local()
        self._deferred_compilations: list[Callable[[], object]] = []

    def launch(self, run: Callable[..., Any], kernel: Any, *arguments: Any, **keywords: Any) -> None:
        """Record a launch. Compilation is deferred: it could exceed the timeouts of ranks (threads) that wait."""
        keywords |= {"warmup": True}
        self._thread_state.compiles_current = False
        run(kernel, *arguments, **keywords)
        if self._thread_state.compiles_current:
            self._deferred_compilations.append(partial(run, kernel, *arguments, **keywords))

    def skip_compilation(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Record the kernel; Triton's hook before compilation. Returns True, which skips the compilation."""
        kernel_key = f"{fn.name} {key}"
        is_own = self._num_workers > 0 and zlib.crc32(kernel_key.encode()) % self._num_workers == self._worker
        self._thread_state.compiles_current = is_own and kernel_key not in self.keys
        self.keys.add(kernel_key)
        return True

    def compile(self) -> None:
        """Compile this process's share of the kernels launched since the last call."""
        compilations, self._deferred_compilations = self._deferred_compilations, []
        with mock.patch.object(_triton_knobs().runtime, "jit_cache_hook", None):
            for compilation in compilations:
                try:
                    compilation()
                except Exception as error:
                    self.failures.append(f"for sm_{self._arch}: {type(error).__name__}: {str(error)[-300:]}")

    def count_cache_hit(self, *, cache_hit: bool, **_: Any) -> None:
        """Count cache hits; Triton's hook after a kernel was compiled or found in the cache."""
        self.num_hits += cache_hit


@contextlib.contextmanager
def record_launches(arch: int, worker: int = 0, num_workers: int = 0) -> Iterator[LaunchRecorder]:
    """Context manager that records launches on CPU tensors for `arch` instead of running them.

    Args:
        arch: architecture to compile for, such as 90.
        worker: index of this process among `num_workers`.
        num_workers: number of processes that share the compilations; 0: nothing is compiled.
    """
    import triton
    from triton.runtime.driver import driver

    from fused_tp.triton_kernels import archive
    from fused_tp.triton_kernels.device import KNOWN_GPUS, assume_gpu

    recorder, run = LaunchRecorder(arch, worker, num_workers), triton.JITFunction.run

    def launch(kernel: Any, *arguments: Any, **keywords: Any) -> None:
        recorder.launch(run, kernel, *arguments, **keywords)

    active_driver = driver._active
    driver.set_active(_FakeDriver(arch))
    try:
        with (
            assume_gpu(KNOWN_GPUS[arch]),
            # A launch unpacks shipped archives into the cache, which would then be packed into the new archive, too.
            mock.patch.object(archive, "SHIPPED_FOLDER", Path(os.devnull)),
            mock.patch.object(triton.JITFunction, "run", launch),
            mock.patch.object(_triton_knobs().runtime, "jit_cache_hook", recorder.skip_compilation),
            mock.patch.object(_triton_knobs().compilation, "listener", recorder.count_cache_hit),
        ):
            yield recorder
    finally:
        driver._active = active_driver


def _triton_knobs() -> Any:
    import triton

    return triton.knobs


def compile_for(arch: int, num_workers: int) -> CompileResult:
    """Compile all kernels that the selftest launches for `arch` into Triton's disk cache, in several processes."""
    start_seconds = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        shares = list(pool.map(_compile_share, [arch] * num_workers, range(num_workers), [num_workers] * num_workers))
    num_kernels = len(set().union(*(keys for keys, _, _ in shares)))
    failures = sorted({text for _, _, share_failures in shares for text in share_failures})
    return CompileResult(
        num_kernels, sum(num_hits for _, num_hits, _ in shares), failures, time.monotonic() - start_seconds
    )


def _compile_share(arch: int, worker: int, num_workers: int) -> tuple[set[str], int, list[str]]:
    torch.set_num_threads(1)  # there is a process for each core
    recorder = record_all_launches(arch, worker, num_workers)
    return recorder.keys, recorder.num_hits, recorder.failures


def record_all_launches(
    arch: int, worker: int = 0, num_workers: int = 0, *, include_timed: bool = True
) -> LaunchRecorder:
    """Record the launches of all cases of `kernels.CASES` and, with `include_timed`, of the timed calls.

    See `record_launches` for the other arguments.
    """
    from fused_tp.selftest import kernels

    # Cases that differ only in late ranks or repeats launch the same kernels, so record only one of them.
    distinct_cases = {
        (case.op, case.world, case.dtype, case.shapes): case for case in kernels.CASES if case.is_compiled_ahead
    }
    with record_launches(arch, worker, num_workers) as recorder:
        for case in distinct_cases.values():
            kernels.launch_only(case)
            recorder.compile()
        if include_timed:
            for run in timed_calls(arch):
                run()
                recorder.compile()
    return recorder


def timed_calls(arch: int) -> Iterator[Callable[[], object]]:
    """Yield the calls of the Triton kernels that the selftest times, on CPU tensors."""
    from fused_tp.benchmarks import gpu, gpu_attention, gpu_matmul
    from fused_tp.benchmarks.gpu_timing import RecordedContext
    from fused_tp.triton_kernels.device import KNOWN_GPUS

    library_names = {gpu_matmul.CUBLAS, *gpu_attention.BACKENDS}
    context = RecordedContext(arch, KNOWN_GPUS[arch].sms)
    for case in gpu.cases(is_quick=True):
        is_timed = any(re.search(pattern, case.name) for pattern in TIMED_CASES)
        if is_timed and case.make.__module__ in (gpu_matmul.__name__, gpu_attention.__name__):
            yield partial(_run_once, case, context, library_names)


def _run_once(case: Any, context: Any, library_names: set[str]) -> None:
    for name, make_contestant in case.make(context, **case.parameters).items():
        if name not in library_names:
            make_contestant().run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write an archive; return 1 if a kernel does not compile."""
    from fused_tp.triton_kernels.archive import pack
    from fused_tp.triton_kernels.device import KNOWN_GPUS

    parser = argparse.ArgumentParser(prog="python -m fused_tp.selftest.kernel_cache", description=__doc__)
    parser.add_argument(
        "--arch", type=int, choices=KNOWN_GPUS, required=True, help="architecture of the kernels: 90 for sm_90"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar.xz")
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=num_cores, metavar="N", help=f"({num_cores})")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    with tempfile.TemporaryDirectory(prefix="fused_tp_kernels_") as folder:
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
            result = compile_for(options.arch, options.processes)
        num_packed = pack(Path(folder), options.out)
    print(*result.failures, sep="\n", file=sys.stderr, end="")
    size = options.out.stat().st_size / 1e6
    print(f"{num_packed} kernels for sm_{options.arch} in {result.seconds:.0f} s: {options.out}, {size:.1f} MB")
    return int(bool(result.failures) or num_packed != result.num_kernels)


if __name__ == "__main__":
    raise SystemExit(main())
