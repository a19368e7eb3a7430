"""`fused-tp doctor`: report the state of this installation, how to fix problems, and the schedules of the ops.

Example:
    $ fused-tp doctor          # text; exit code 0, or 1 if something should be fixed
    $ fused-tp doctor --json   # JSON
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fused_tp.backends.autotune import saved_files
from fused_tp.backends.cuda import cuda_driver, native_kernels
from fused_tp.backends.registry import forced_schedule, fused_kernels_availability
from fused_tp.core import dispatch, settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.ops.explain import explain_hypothetical

OK, NOTE, PROBLEM = "ok", "note", "problem"

MINIMUM_TORCH = (2, 10)
MINIMUM_CUDA = 12
TOOLKIT_NVCC = "/usr/local/cuda/bin/nvcc"

_LIBRARIES = {
    "triton": ("triton", "GPU kernels, also interpreted on CPUs"),
    "transformers": ("hf", "parallelize() of Hugging Face models"),
    "megatron-core": ("megatron", "Megatron-Core integration"),
    "deepspeed": ("deepspeed", "DeepSpeed integration, benchmark baseline"),
    "matplotlib": ("train", "plots of train, compare and bench"),
    "rich": ("train", "tables of plan"),
}

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")

_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")

# NCCL features that fused_tp uses and that depend on its version, as attributes of `_core.NcclLibrary`.
_NCCL_FEATURES = {"has_revoke": "communicators that can be stopped", "has_shared_devices": "several ranks on one GPU"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says how to fix a problem."""

    name: str
    value: str
    status: str = OK
    advice: str = ""
    section: str = ""


_STATUS_MARKS = {OK: "ok ", NOTE: " - ", PROBLEM: "!! "}

# Sizes for which the report shows the dispatch: rows per rank in a layer of an 8B model, on two ranks.
_TOKEN_COUNTS = {"1 token": 1, "2048 tokens": 2048}
_HIDDEN_SIZE, _WORLD_SIZE = 4096, 2
# Number of tensor shapes that each op takes: x [tokens, hidden], and with two also weight [hidden, hidden].
_SHAPES_BY_OP = {
    "all_gather_matmul": 2,
    "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 2,
    "column_parallel_matmul": 2,
    "all_reduce_rms_norm": 1,
    "matmul_all_reduce_rms_norm": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fused-tp doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; exit code 0 if nothing needs fixing, else 1."""
    findings = examine()
    is_healthy = all(finding.status != PROBLEM for finding in findings)
    if arguments.json:
        print(json.dumps({"healthy": is_healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(format_report(findings))
    return 0 if is_healthy else 1


def examine() -> list[Finding]:
    """Return all findings, in the order of the report."""
    core, why_no_core = import_native_core()
    sections = {
        "Software": _examine_software(),
        "CPU": _examine_processor(core),
        "CPU shared memory": _examine_shared_memory(core, why_no_core),
        "GPU": examine_gpu(core),
        "Optional libraries": _examine_libraries(),
        "Settings": _examine_settings(),
        "Schedules measured by FUSED_TP_AUTOTUNE": _examine_autotuned_schedules(),
        f"Schedules of {_WORLD_SIZE} ranks, bf16, hidden size {_HIDDEN_SIZE}": _examine_schedules(core),
    }
    return [replace(finding, section=section) for section, findings in sections.items() for finding in findings]


def format_report(findings: list[Finding]) -> str:
    """Format the findings as text."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {_STATUS_MARKS[finding.status]} {finding.name:<31} {finding.value}")
        if finding.advice:
            lines.append(f"      {'':<31} {finding.advice}")
    num_problems = sum(finding.status == PROBLEM for finding in findings)
    closing = (
        "Nothing needs fixing."
        if num_problems == 0
        else f"{num_problems} thing{'s' * (num_problems > 1)} to fix, marked !!."
    )
    return "\n".join([*lines, "", closing])


def _examine_libraries() -> Iterator[Finding]:
    for name, (extra, purpose) in _LIBRARIES.items():
        installed_version = _installed_version(name)
        value = installed_version or f"not installed ({purpose}): pip install 'fused-tp[{extra}]'"
        yield Finding(name, value, OK if installed_version else NOTE)


def _examine_software() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())  # needs no check: older versions cannot parse this file
    yield Finding("fused-tp", _installed_version("fused-tp") or f"not installed, run from {Path(__file__).parents[2]}")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    is_too_old = release < MINIMUM_TORCH
    advice = f"torch {dotted_version(MINIMUM_TORCH)} or later is needed: pip install -U torch" if is_too_old else ""
    yield Finding("torch", torch.__version__, PROBLEM if is_too_old else OK, advice)
    backends = [name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)]
    yield Finding("backends", ", ".join(backends), OK if backends else PROBLEM)
    compiler = next(iter(read_program_output("c++", "--version")), "")
    yield Finding("C++ compiler", compiler or "none", OK if compiler else NOTE)
    yield _examine_cuda_compiler()


def _examine_cuda_compiler() -> Finding:
    """Find nvcc where setup.py searches: only in CUDA_HOME or CUDA_PATH if one of them is set."""
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    candidates = [f"{os.environ[variable]}/bin/nvcc"] if variable else ["nvcc", TOOLKIT_NVCC]
    lines: list[str] = next(filter(None, (read_program_output(candidate, "--version") for candidate in candidates)), [])
    if not lines:
        return Finding("CUDA compiler", f"none in {candidates[0]}, as {variable} says" if variable else "none", NOTE)
    release = "\n".join(lines).partition("release ")[2].partition(".")[0]
    is_too_old = release.isdigit() and int(release) < MINIMUM_CUDA
    advice = f"CUDA {MINIMUM_CUDA}.0 or later is needed to build the device kernels." if is_too_old else ""
    return Finding("CUDA compiler", lines[-1], NOTE if is_too_old else OK, advice)


def _examine_processor(core: ModuleType | None) -> Iterator[Finding]:
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "processors", f"{num_cpus} usable, {platform.machine()}; torch runs {torch.get_num_threads()} threads"
    )
    cpu_flags = _read_cpu_flags()
    yield Finding("instruction sets", ", ".join(f for f in _CPU_FEATURES if f in cpu_flags) or "baseline")
    yield Finding("torch kernels use", torch.backends.cpu.get_cpu_capability())
    if core is not None:
        yield Finding("native core uses", core.isa())


def _examine_shared_memory(core: ModuleType | None, why_no_core: str) -> Iterator[Finding]:
    if core is None and sys.platform != "linux":
        yield Finding("native core", "none: it needs Linux; ops run on torch.distributed", NOTE)
        return
    if core is None:
        value = f"missing, so ops run on torch.distributed ({why_no_core})"
        yield Finding("native core", value, PROBLEM, _build_instructions())
        return
    yield Finding("native core", Path(str(core.__file__)).name)
    if not shared_memory_allowed():
        yield Finding("two processes share", "not tested: FUSED_TP_SHM disables it", NOTE)
        return
    availability = _try_shared_memory(core)
    if availability:
        yield Finding("two processes share", "yes")
    else:
        advice = (
            "Ops run on torch.distributed. The ranks of a host need the same user and PID namespace, and their "
            "container must let them open /proc/<pid>/fd of each other (docker: --pid host --cap-add SYS_PTRACE)."
        )
        yield Finding("two processes share", f"no: {availability.reason}", PROBLEM, advice)


def shared_memory_allowed() -> bool:
    """True if FUSED_TP_SHM allows shared memory, or is invalid, which the Settings section reports."""
    try:
        return settings.shared_memory_allowed()
    except ValueError:
        return True


def import_native_core() -> tuple[ModuleType | None, str]:
    """Import the native core; if that fails, return None and the reason."""
    try:
        return importlib.import_module("fused_tp._core"), ""
    except ImportError as error:
        return None, str(error)


def _build_instructions() -> str:
    steps = []
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        steps.append("install a C++17 compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        steps.append("install the Python headers (Debian, Ubuntu: apt-get install python3-dev)")
    steps.append("reinstall: pip install --force-reinstall --no-deps fused-tp (from its sources: pip install -e .)")
    return "To build it, " + ", then ".join(steps) + "."


# Program of rank 1 in _try_shared_memory. It loads the core by its path, to avoid importing torch.
_PEER_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
group = core.Group(1, 2, 1 << 20, lambda: 10.0)
print(group.address.hex(), flush=True)
first = bytes.fromhex(sys.stdin.readline())
group.connect([first, group.address])
core.barrier(group)
group.close()
"""


def _try_shared_memory(core: ModuleType) -> Availability:
    """Test whether two processes can map each other's memory and pass a barrier."""
    command = [sys.executable, "-c", _PEER_PROGRAM, str(core.__file__)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as peer:
        try:
            assert peer.stdin is not None and peer.stdout is not None and peer.stderr is not None
            group = core.Group(0, 2, 1 << 20, lambda: 10.0)
            peer.stdin.write(group.address.hex() + "\n")
            peer.stdin.flush()
            address = peer.stdout.readline()
            if not address:
                return unavailable(peer.stderr.read().strip().rpartition("\n")[2])
            group.connect([group.address, bytes.fromhex(address)])
            core.barrier(group)
            group.close()
            peer.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return unavailable(str(error))
        finally:
            peer.kill()
    return AVAILABLE


def _read_cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, ":").partition(":")[2].split())


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_gpu(core: ModuleType | None) -> Iterator[Finding]:
    """Yield the findings of the GPU section. `core`: the native core, None if it is missing."""
    has_gpu = torch.cuda.is_available()
    yield from _examine_driver(has_gpu)
    devices = range(torch.cuda.device_count()) if has_gpu else range(0)
    archs = []
    for device in devices:
        try:
            properties = torch.cuda.get_device_properties(device)
        except RuntimeError as error:  # the GPU has fallen off the bus, or its driver has failed
            advice = "Run nvidia-smi for details; exclude the GPU by CUDA_VISIBLE_DEVICES."
            yield Finding(f"cuda:{device}", f"unusable: {str(error).splitlines()[0]}", PROBLEM, advice)
            continue
        archs.append(10 * properties.major + properties.minor)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        multicast = ", multicast" * (cuda_driver.device_attribute(cuda_driver.MULTICAST_SUPPORTED, device) == 1)
        yield Finding(f"cuda:{device}", f"{properties.name}, sm_{archs[-1]}, {memory}{multicast}")
    if not has_gpu:
        yield Finding("CUDA devices", "none, or a torch built without CUDA; CPU ops need none", NOTE)
    if len(archs) == len(devices) > 1:
        yield from _examine_peer_access(devices)
    if has_gpu:
        yield _examine_nccl(core)
    yield _examine_fused_kernels(has_gpu)
    yield _examine_device_kernels(sorted(set(archs)))


def _examine_driver(has_gpu: bool) -> Iterator[Finding]:
    driver_cuda = cuda_driver.cuda_version()
    if driver_cuda is not None:
        yield Finding(
            "NVIDIA driver",
            f"{_read_driver_release() or 'version unknown'}, for CUDA up to {dotted_version(driver_cuda)}",
        )
    elif has_gpu:
        yield Finding("NVIDIA driver", "unknown: libcuda.so.1 cannot be loaded", NOTE)
    else:
        yield Finding("NVIDIA driver", "none", NOTE)
    torch_cuda = torch.version.cuda
    if driver_cuda is not None and torch_cuda is None:
        advice = "To use the GPU, install a torch with CUDA (pytorch.org names the command)."
        yield Finding("CUDA of torch", "none: this torch was built for CPUs", NOTE, advice)
    elif driver_cuda is not None and torch_cuda is not None and driver_cuda[0] < int(torch_cuda.split(".")[0]):
        advice = "Update the driver, or install a torch for that CUDA."
        yield Finding("CUDA of torch", f"{torch_cuda}, which this driver does not support", PROBLEM, advice)
    else:
        yield Finding("CUDA of torch", torch_cuda or "none", OK if torch_cuda else NOTE)


def _read_driver_release() -> str:
    try:
        words = _DRIVER_VERSION_FILE.read_text().partition("Kernel Module")[2].split()
    except OSError:
        words = []
    release = next((word for word in words if word[0].isdigit() and "." in word), "")
    return release or next(
        iter(read_program_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")), ""
    )


def _examine_peer_access(devices: range) -> Iterator[Finding]:
    """Report the GPUs that can access each other's memory, which kernels need to signal peers."""
    peers_by_device = {
        device: [peer for peer in devices if peer != device and torch.cuda.can_device_access_peer(device, peer)]
        for device in devices
    }
    if all(len(peers) == len(devices) - 1 for peers in peers_by_device.values()):
        yield Finding("peer access", f"all {len(devices)} GPUs reach each other")
        return
    for device, peers in peers_by_device.items():
        names = ", ".join(f"cuda:{peer}" for peer in peers)
        yield Finding(f"cuda:{device} reaches", names or "no other", OK if peers else NOTE)


def _examine_nccl(core: ModuleType | None) -> Finding:
    if not dist.is_nccl_available():
        return Finding("NCCL", "missing", PROBLEM, "Install a torch with NCCL.")
    version = dotted_version(torch.cuda.nccl.version())  # also loads NCCL, which the core then finds
    if core is None:
        return Finding("NCCL", f"{version}; schedule nccl_pipeline needs the native core", NOTE)
    try:
        library = core.NcclLibrary()
    except RuntimeError as error:
        return Finding("NCCL", f"{version}; not for schedule nccl_pipeline: {error}", NOTE)
    features = [text for name, text in _NCCL_FEATURES.items() if getattr(library, name)]
    missing_features = [text for name, text in _NCCL_FEATURES.items() if not getattr(library, name)]
    value = f"{library.version_text}, has {', '.join(features)}" if features else library.version_text
    return Finding("NCCL", f"{value}; a later one adds {', '.join(missing_features)}" if missing_features else value)


def _examine_fused_kernels(has_gpu: bool) -> Finding:
    availability = fused_kernels_availability(torch.device("cuda" if has_gpu else "cpu"))
    if not availability:
        return Finding("fused kernels", f"none: {availability.reason}", NOTE)
    location = "on GPUs that reach each other by NVLink" if has_gpu else "interpreted, for tests"
    return Finding("fused kernels", f"can run {location}")


def _examine_device_kernels(archs: list[int]) -> Finding:
    build_info = native_kernels.read_kernel_targets()
    description = (
        f"built for {', '.join(build_info.archs)} by CUDA {dotted_version(build_info.toolkit[:2])}"
        if build_info is not None
        else "installed"
    )
    availabilities = [native_kernels.native_kernels_available(arch) for arch in archs or [0]]
    problems = [availability.reason for availability in availabilities if not availability]
    if not problems:
        return Finding("device kernels", description)
    if not archs or build_info is None:
        return Finding(
            "device kernels", f"none: {problems[0]}" if build_info is None else f"{description}; {problems[0]}", NOTE
        )
    return Finding(
        "device kernels", f"{description}, but not usable", PROBLEM, f"{problems[0][0].upper()}{problems[0][1:]}."
    )


def _examine_settings() -> Iterator[Finding]:
    checks: dict[str, Callable[[], Any]] = {
        "FUSED_TP_TABLE": lambda: dispatch.load_table(settings.table_path()),
        "FUSED_TP_SCHEDULE": forced_schedule,
        "FUSED_TP_ATTENTION": _read_forced_kernel,
    }
    for setting in settings.SETTINGS:
        value = os.environ.get(setting.name)
        meaning = (
            f"{'when installing, ' if setting.is_install_time else ''}{setting.meaning} (default: {setting.default})"
        )
        if value is None:
            yield Finding(setting.name, f"not set; {meaning}")
            continue
        try:
            checks.get(setting.name, setting)()
        except (ValueError, OSError) as error:
            yield Finding(setting.name, f"{value!r}; {meaning}", PROBLEM, str(error))
        else:
            yield Finding(setting.name, f"{value!r}; {meaning}")
    known_names = {setting.name for setting in settings.SETTINGS}
    for name in sorted(os.environ):
        if name.startswith("FUSED_TP_") and name not in known_names:
            yield Finding(name, repr(os.environ[name]), PROBLEM, "Nothing reads this variable; is it misspelt?")


def _read_forced_kernel() -> str | None:
    # Imported here, because it loads NumPy and the native core, which doctor must not require.
    from fused_tp.attention.kernels.select import forced_kernel

    return forced_kernel()


def _examine_autotuned_schedules() -> Iterator[Finding]:
    """Yield the results of earlier runs, from the autotune files that this installation would read."""
    for path, results in saved_files():
        device, ranks = results["machine"].get("device"), results["machine"].get("ranks of each host")
        yield Finding(str(device), f"{len(results['choices'])} choices for ranks {ranks} in {path}")
        for description, problem in results["wrong"].items():
            advice = (
                f"It is never chosen here. Please report this line, {path.name}, and the output of `fused-tp tune "
                "--check-only` and doctor."
            )
            yield Finding(description, problem, PROBLEM, advice)


def _examine_schedules(core: ModuleType | None) -> Iterator[Finding]:
    """Yield the schedules that two ranks of this machine would use; `fused-tp explain` prints details."""
    has_shared_memory = core is not None and shared_memory_allowed()
    targets = [("cpu", "shm" if has_shared_memory else "gloo", "cpu")]
    if torch.cuda.is_available():
        targets.append(("cuda", "nccl", dispatch.device_arch(torch.device("cuda", torch.cuda.current_device()))))
    for device, transport, arch in targets:
        for op, num_shapes in _SHAPES_BY_OP.items():
            try:
                schedules = []
                for num_tokens in _TOKEN_COUNTS.values():
                    shapes = ((num_tokens, _HIDDEN_SIZE), (_HIDDEN_SIZE, _HIDDEN_SIZE))[:num_shapes]
                    explanation = explain_hypothetical(
                        op, *shapes, dtype=torch.bfloat16, world_size=_WORLD_SIZE, transport=transport, arch=arch
                    )
                    decision = explanation.forward or explanation.backward
                    schedules.append(decision.schedule if decision else "local")
            except (ValueError, OSError) as error:
                yield Finding(f"{op}, {device}", "no choice", PROBLEM, str(error))
            else:
                value = ", ".join(
                    f"{schedule} ({num_tokens})" for num_tokens, schedule in zip(_TOKEN_COUNTS, schedules, strict=True)
                )
                yield Finding(f"{op}, {device}", value)


def read_program_output(command: str, *arguments: str) -> list[str]:
    """Return the lines that a program prints; empty if it is missing or fails."""
    path = shutil.which(command)
    if path is None:
        return []
    try:
        completed = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return completed.stdout.strip().splitlines() if completed.returncode == 0 else []


def dotted_version(version: Sequence[int]) -> str:
    """Format a version in dotted notation, such as "12.4"."""
    return ".".join(map(str, version))
