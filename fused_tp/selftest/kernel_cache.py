"""Compile the selftest's kernels, for a GPU that need not be present, into Triton's disk cache or an archive of it.

    python -m fused_tp.selftest.kernel_cache --arch 90 --out sm_90.tar.xz

Each of several processes makes all calls on CPU tensors, and compiles its share of the kernels.
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

# Cases of benchmarks.gpu in two steps: kernels alone, and ranks on one GPU.
TIMED = "^(alone|attention/|flags)", "^(ranks|attention-ranks|latency|norm|overhead)"


class Compiled(NamedTuple):
    """Result of compiling.

    Attributes:
        kernels: number of kernels that are launched.
        found: number of these that were in the cache already.
        failed: a sentence for each kernel that does not compile.
        seconds: total time.
    """

    kernels: int
    found: int
    failed: list[str]
    seconds: float


class _Driver:
    """Fake of Triton's driver for machines without a GPU: compiles for `arch` and launches nothing."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Kernels that were launched while `recorded`.

    Attributes:
        keys: name and key of each kernel.
        hits: number of this process's kernels that were in the cache.
        failed: a sentence for each kernel that does not compile.
    """

    def __init__(self, arch: int, worker: int, workers: int) -> None:
        self.keys: set[str] = set()
        self.hits = 0
        self.failed: list[str] = []
        self._arch, self._worker, self._workers = arch, worker, workers
        self._asked = threading.local()  # .here: this process compiles the kernel that the thread is launching
        self._waiting: list[Callable[[], object]] = []

    def launch(self, run: Callable[..., Any], kernel: Any, *arguments: Any, **named: Any) -> None:
        """Record a launch. Compilation is deferred, as ranks that are threads wait for each other with deadlines."""
        named |= {"warmup": True}
        self._asked.here = False
        run(kernel, *arguments, **named)
        if self._asked.here:
            self._waiting.append(partial(run, kernel, *arguments, **named))

    def passed_over(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's hook before compilation; returning True skips it."""
        whole = f"{fn.name} {key}"
        mine = self._workers > 0 and zlib.crc32(whole.encode()) % self._workers == self._worker
        self._asked.here = mine and whole not in self.keys
        self.keys.add(whole)
        return True

    def compile(self) -> None:
        """Compile this process's share of the kernels launched since the last call."""
        waiting, self._waiting = self._waiting, []
        with mock.patch.object(_knobs().runtime, "jit_cache_hook", None):
            for one in waiting:
                try:
                    one()
                except Exception as error:
                    self.failed.append(f"for sm_{self._arch}: {type(error).__name__}: {str(error)[-300:]}")

    def compiled(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's hook after a kernel was compiled or found in the cache."""
        self.hits += cache_hit


@contextlib.contextmanager
def recorded(arch: int, worker: int = 0, workers: int = 0) -> Iterator[Launches]:
    """Context in which launches on CPU tensors are recorded for `arch`, and nothing runs.

    Args:
        workers: number of processes that share the compilations, of which this is `worker`; 0: nothing is compiled.
    """
    import triton
    from triton.runtime.driver import driver

    from fused_tp.triton_kernels.device import KNOWN_GPUS, assumed

    launches, run = Launches(arch, worker, workers), triton.JITFunction.run

    def launch(kernel: Any, *arguments: Any, **named: Any) -> None:
        launches.launch(run, kernel, *arguments, **named)

    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        with (
            assumed(KNOWN_GPUS[arch]),
            mock.patch.object(triton.JITFunction, "run", launch),
            mock.patch.object(_knobs().runtime, "jit_cache_hook", launches.passed_over),
            mock.patch.object(_knobs().compilation, "listener", launches.compiled),
        ):
            yield launches
    finally:
        driver._active = before


def _knobs() -> Any:
    import triton

    return triton.knobs


def compile_for(arch: int, workers: int) -> Compiled:
    """Compile all kernels that the selftest launches for `arch` into Triton's disk cache, in `workers` processes."""
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        shares = list(pool.map(_compile_share, [arch] * workers, range(workers), [workers] * workers))
    count = len(set().union(*(keys for keys, _, _ in shares)))
    failed = sorted({text for _, _, of_share in shares for text in of_share})
    return Compiled(count, sum(hits for _, hits, _ in shares), failed, time.monotonic() - begun)


def _compile_share(arch: int, worker: int, workers: int) -> tuple[set[str], int, list[str]]:
    torch.set_num_threads(1)  # there are as many processes as cores
    launches = launch_all(arch, worker, workers)
    return launches.keys, launches.hits, launches.failed


def launch_all(arch: int, worker: int = 0, workers: int = 0, *, timed: bool = True) -> Launches:
    """Record the launches of all cases of `kernels.CASES` and, with `timed`, of the timed calls; see `recorded`."""
    from fused_tp.selftest import kernels

    # Cases that differ only in late ranks or repeats launch the same kernels.
    different = {(case.op, case.world, case.dtype, case.shapes): case for case in kernels.CASES if case.compiled_ahead}
    with recorded(arch, worker, workers) as launches:
        for case in different.values():
            kernels.launch_only(case)
            launches.compile()
        if timed:
            for run in timed_calls(arch):
                run()
                launches.compile()
    return launches


def timed_calls(arch: int) -> Iterator[Callable[[], object]]:
    """Calls of the Triton kernels that the selftest times, on CPU tensors."""
    from fused_tp.benchmarks import gpu, gpu_attention, gpu_matmul
    from fused_tp.benchmarks.gpu_timing import RecordedContext
    from fused_tp.triton_kernels.device import KNOWN_GPUS

    theirs = {gpu_matmul.CUBLAS, *gpu_attention.BACKENDS}
    context = RecordedContext(arch, KNOWN_GPUS[arch].sms)
    for case in gpu.cases(quick=True):
        timed = any(re.search(pattern, case.name) for pattern in TIMED)
        if timed and case.make.__module__ in (gpu_matmul.__name__, gpu_attention.__name__):
            yield partial(_run_once, case, context, theirs)


def _run_once(case: Any, context: Any, theirs: set[str]) -> None:
    for name, make in case.make(context, **case.parameters).items():
        if name not in theirs:
            make().run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write an archive; return 1 if a kernel does not compile."""
    from fused_tp.triton_kernels.archive import pack
    from fused_tp.triton_kernels.device import KNOWN_GPUS

    parser = argparse.ArgumentParser(prog="python -m fused_tp.selftest.kernel_cache", description=__doc__)
    parser.add_argument("--arch", type=int, choices=KNOWN_GPUS, required=True, help="as in sm_90")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar.xz")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, metavar="N", help=f"({cores})")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}; it must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="fused_tp_kernels_") as folder:
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
            found = compile_for(options.arch, options.processes)
        count = pack(Path(folder), options.out)
    print(*found.failed, sep="\n", file=sys.stderr, end="")
    size = options.out.stat().st_size / 1e6
    print(f"{count} kernels for sm_{options.arch} in {found.seconds:.0f} s: {options.out}, {size:.1f} MB")
    return int(bool(found.failed) or count < found.kernels)


if __name__ == "__main__":
    raise SystemExit(main())
