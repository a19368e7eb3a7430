"""Smoke test of a GPU: peak rates, driver attributes, stream memory operations, and one kernel of each family."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fused_tp.selftest import kernels

PrintLine = Callable[[str], None]
# Constants of cuda.h: device attributes (CUdevice_attribute), and kinds and flags of stream memory operations.
DRIVER_ATTRIBUTES = {"multicast": 132, "64-bit memory operations": 122, "virtual memory": 102, "handles as files": 103}
_WAIT_64, _WRITE_64, _GEQ = 4, 5, 0
_MAX_BATCH = 255


def run_smoke_checks(
    device: torch.device,
    print_line: PrintLine,
    save_findings: Callable[[dict[str, Any], list[str]], object] = lambda findings, failures: None,
) -> tuple[dict[str, Any], list[str]]:
    """Run all checks; return the measurements, and a message for each failed check.

    After each check, call `print_line` with its result, and `save_findings` with all results so far.
    """
    findings: dict[str, Any] = {}
    failures: list[str] = []
    checks: dict[str, Callable[[torch.device], Any]] = {
        "bf16 matmul 8192^3 by cuBLAS, TFLOP/s": measure_matmul_tflops,
        "copy on the device, GB/s read and written": measure_copy_bandwidth,
        "driver": read_driver_attributes,
        "device kernels of csrc/cuda": check_device_library,
        **{
            f"one kernel: {op}": partial(check_one_kernel, op=op)
            for op in ("attention", "reduce_scatter", "direct", "ring")
        },
        # Near the end, because a stream wait has no timeout: if it hangs, the later checks do not run.
        "memory operations of a stream": partial(check_memory_operations, is_in_graph=False),
        "memory operations in a CUDA graph": partial(check_memory_operations, is_in_graph=True),
        "one kernel: copied": partial(check_one_kernel, op="copied"),
    }
    for name, check in checks.items():
        try:
            findings[name] = check(device)
            print_line(f"right  {name}: {findings[name]}")
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {str(error)[:300]}"
            failures.append(text)
            print_line(f"WRONG  {text}")
        save_findings(findings, failures)
    return findings, failures


def _measure_milliseconds(run: Callable[[], object], num_calls: int = 10) -> float:
    run()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(num_calls):
        run()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / num_calls


def measure_matmul_tflops(device: torch.device) -> float:
    x, w = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * 8192**3 / _measure_milliseconds(lambda: x @ w.t()) / 1e9, 1)


def measure_copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(1 << 29, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _measure_milliseconds(lambda: target.copy_(source)) / 1e6, 1)


def read_driver_attributes(device: torch.device) -> dict[str, Any]:
    from fused_tp.backends.cuda.cuda_driver import cuda_version, device_attribute

    index = device.index or 0
    return {
        "version": cuda_version(),
        **{name: device_attribute(attribute, index) for name, attribute in DRIVER_ATTRIBUTES.items()},
    }


def check_memory_operations(device: torch.device, *, is_in_graph: bool) -> str:
    """Let a stream write a word, wait for it, and write it again, in one batch; outside of graphs also many times."""
    cuda = ctypes.CDLL("libcuda.so.1")
    word, stream = torch.zeros(1, dtype=torch.int64, device=device), torch.cuda.Stream(device)

    def submit_operations(num_operations: int) -> None:
        batch = (ctypes.c_uint64 * (6 * num_operations))()  # 48 bytes each: kind, address, value, flags
        for index in range(num_operations):
            kind, value = (_WRITE_64, 7) if index == 0 else (_WAIT_64, 7) if index == 1 else (_WRITE_64, 9)
            batch[6 * index : 6 * index + 4] = [kind, word.data_ptr(), value, _GEQ]
        status = cuda.cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), num_operations, batch, 0)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp failed for a batch of {num_operations} (CUresult {status})")

    torch.cuda.synchronize(device)
    if is_in_graph:
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph, stream=stream):
            submit_operations(3)
        cuda_graph.replay()
    else:
        with torch.cuda.stream(stream):
            for num_operations in (3, _MAX_BATCH):
                submit_operations(num_operations)
    torch.cuda.synchronize(device)
    if int(word) != 9:
        raise RuntimeError(f"the last word that the stream wrote must be 9, got {int(word)}")
    return "in one batch of 3" if is_in_graph else f"in batches of 3 and {_MAX_BATCH}"


def check_device_library(device: torch.device) -> str:
    from fused_tp.backends.cuda import native_kernels
    from fused_tp.backends.cuda.device_collectives import sum_into

    major, minor = torch.cuda.get_device_capability(device)
    availability = native_kernels.native_kernels_available(10 * major + minor)
    if not availability:
        raise RuntimeError(availability.reason)
    started = time.monotonic()
    native_kernels.native_kernels().preload()
    seconds = time.monotonic() - started
    terms = torch.randn(4, 1000, 77, dtype=torch.float32, device=device).bfloat16()
    out = torch.empty(1000, 77, device=device, dtype=torch.bfloat16)
    sum_into(out, terms)
    error = float((out.double() - terms.double().sum(0)).abs().max())
    if error > 0.05:
        raise RuntimeError(f"the sum of four terms differs from fp64 by {error:.3g}, more than 0.05")
    return f"built for {native_kernels.read_kernel_targets()}, loaded in {seconds:.2f} s"


def check_one_kernel(device: torch.device, op: str) -> str:
    case = next(case for case in kernels.CASES if case.op == op and not case.late_ranks)
    problem = kernels.check(kernels.keep_first_shape(case), device)
    if problem:
        raise RuntimeError(problem)
    return case.name
