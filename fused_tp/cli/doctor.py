"""`fused-tp doctor`: what this installation has, what it lacks, how to get that, and what the ops would run on.

Example:
    $ fused-tp doctor          # sentences; exit code 0, or 1 when something should be fixed
    $ fused-tp doctor --json   # the same as JSON
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fused_tp.cli.doctor_gpu import examine_gpu
from fused_tp.cli.findings import NOTE, OK, PROBLEM, Finding, dotted, output_of
from fused_tp.ops.explain import explain_for
from fused_tp.ops.queries import Both, queries
from fused_tp.runtime import dispatch, settings
from fused_tp.schedules.ways import WAYS

_MARKS = {OK: "ok ", NOTE: " - ", PROBLEM: "!! "}

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 10)
MINIMUM_CUDA = 12
TOOLKIT_NVCC = "/usr/local/cuda/bin/nvcc"

# Every environment variable that the package reads, also at build time.
VARIABLES = {
    "FUSED_TP_TIMEOUT": "seconds until a wait for a peer raises CollectiveTimeoutError (600)",
    "FUSED_TP_CHECK": "1: ranks compare op, shapes and dtypes before every op on torch.distributed (0)",
    "FUSED_TP_SCHEDULE": "the schedule that every op must use (the dispatch table chooses)",
    "FUSED_TP_ATTENTION": "what computes attention: native-cpu, triton, torch-cpu, ... (the best there is)",
    "FUSED_TP_RING_GRADIENTS": "input: a ring's dK/dV travel in the keys' dtype (wide: in float32)",
    "FUSED_TP_TABLE": "a dispatch table to use in place of the shipped one",
    "FUSED_TP_SM_MARGIN": "multiprocessors that fused kernels leave to what runs beside them (0)",
    "FUSED_TP_SHM": "0: do not use CPU shared memory (1)",
    "FUSED_TP_SHM_RESERVE": "bytes of address space each rank reserves for shared memory (32 GiB)",
    "FUSED_TP_ISA": "plain, avx2 or avx512: the most the native core may use (the best this CPU has)",
    "FUSED_TP_HOST": "names this host, where ranks of one machine share neither memory nor GPUs (its boot id)",
    "FUSED_TP_NVTX": "1: NVTX ranges always; 0: never (while a tool listens)",
    "FUSED_TP_REQUIRE_NATIVE": "1 when installing: a native core that cannot be built is an error (0)",
    "FUSED_TP_CUDA": "when installing, 0: no device kernels; 1: an error where they cannot be built (built with nvcc)",
    "FUSED_TP_CUDA_ARCHS": "when installing: GPUs to build device kernels for (80;90a;100a+PTX)",
}

# What others than this process read: the values that they take, in lower case, and what to do about any other.
_TAKEN = {
    "FUSED_TP_ISA": ("(plain|avx2|avx512)?", "plain, avx2 or avx512"),
    "FUSED_TP_SHM_RESERVE": (r"0*[1-9]\d*", "a positive number of bytes"),
    "FUSED_TP_CUDA_ARCHS": (
        r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+",
        "architectures like 80;90a;100a+PTX, +PTX at those that later GPUs shall be able to use",
    ),
}

_SWITCHES = ("FUSED_TP_NVTX", "FUSED_TP_REQUIRE_NATIVE", "FUSED_TP_CUDA")

_LIBRARIES = {
    "triton": ("triton", "GPU kernels, also interpreted on CPUs"),
    "transformers": ("hf", "parallelize() of Hugging Face models"),
    "megatron-core": ("megatron", "Megatron-Core integration"),
    "deepspeed": ("deepspeed", "DeepSpeed integration, benchmark baseline"),
    "matplotlib": ("demo", "plots of demo and bench"),
    "rich": ("demo", "progress of the demo"),
}

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")

# Sizes whose dispatch is shown: rows per rank, in a layer of an 8B model, on two ranks.
_TOKENS = {"1 token": 1, "2048 tokens": 2048}
_HIDDEN, _RANKS = 4096, 2
# How many tensors each op's shapes are those of: x [tokens, hidden], and weight [hidden, hidden] where there are two.
_OPS = {
    "all_gather_matmul": 2,
    "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 2,
    "column_parallel_matmul": 2,
    "all_reduce_rms_norm": 1,
    "matmul_all_reduce_rms_norm": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fused-tp doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; 0 when nothing needs fixing, else 1."""
    findings = examine()
    healthy = all(finding.status != PROBLEM for finding in findings)
    if arguments.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(report(findings))
    return 0 if healthy else 1


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    core = _core()
    parts = (_software(), _processor(core), _native_core(core), examine_gpu(core), _libraries(), _settings())
    return [finding for part in (*parts, _schedules(core)) for finding in part]


def report(findings: list[Finding]) -> str:
    """The findings as text."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {_MARKS[finding.status]} {finding.name:<31} {finding.value}")
        if finding.advice:
            lines.append(f"      {'':<31} {finding.advice}")
    problems = sum(finding.status == PROBLEM for finding in findings)
    closing = "Nothing needs fixing." if problems == 0 else f"{problems} thing{'s' * (problems > 1)} to fix, marked !!."
    return "\n".join([*lines, "", closing])


def _software() -> Iterator[Finding]:
    section = "Software"
    too_old = sys.version_info[:2] < MINIMUM_PYTHON
    advice = f"Python {dotted(MINIMUM_PYTHON)} or later is needed." if too_old else ""
    yield Finding(section, "python", platform.python_version(), PROBLEM if too_old else OK, advice)
    yield Finding(section, "fused-tp", _installed("fused-tp") or f"not installed, run from {Path(__file__).parents[2]}")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    too_old = release < MINIMUM_TORCH
    advice = f"torch {dotted(MINIMUM_TORCH)} or later is needed: pip install -U torch" if too_old else ""
    yield Finding(section, "torch", torch.__version__, PROBLEM if too_old else OK, advice)
    if not dist.is_available():
        yield Finding(section, "torch.distributed", "missing", PROBLEM, "Install a torch that was built with it.")
        return
    backends = [name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)]
    yield Finding(section, "backends", ", ".join(backends), OK if backends else PROBLEM)
    compiler = next(iter(output_of("c++", "--version")), "")
    yield Finding(section, "C++ compiler", compiler or "none", OK if compiler else NOTE)
    yield _cuda_compiler(section)


def _cuda_compiler(section: str) -> Finding:
    """Where setup.py looks, too: nowhere else where a variable names its place."""
    named = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    places = [f"{os.environ[named]}/bin/nvcc"] if named else ["nvcc", TOOLKIT_NVCC]
    lines: list[str] = next(filter(None, (output_of(place, "--version") for place in places)), [])
    if not lines:
        return Finding(section, "CUDA compiler", f"none in {places[0]}, as {named} says" if named else "none", NOTE)
    release = re.search(r"release (\d+)", "\n".join(lines))
    too_old = release is not None and int(release[1]) < MINIMUM_CUDA
    advice = f"CUDA {MINIMUM_CUDA}.0 or later is needed to build the device kernels." if too_old else ""
    return Finding(section, "CUDA compiler", lines[-1], NOTE if too_old else OK, advice)


def _processor(core: ModuleType | None) -> Iterator[Finding]:
    section = "CPU"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        section, "processors", f"{cpus} usable, {platform.machine()}; torch runs {torch.get_num_threads()} threads"
    )
    present = _cpu_flags()
    yield Finding(section, "instruction sets", ", ".join(f for f in _CPU_FEATURES if f in present) or "baseline")
    yield Finding(section, "torch kernels use", torch.backends.cpu.get_cpu_capability())
    if core is not None:
        yield Finding(section, "native core uses", core.isa())


def _native_core(core: ModuleType | None) -> Iterator[Finding]:
    section = "CPU shared memory"
    if core is None:
        if sys.platform != "linux":
            yield Finding(section, "native core", "none: it needs Linux; ops run on torch.distributed", NOTE)
        else:
            value = f"not there, so ops run on torch.distributed ({_why_no_core()})"
            yield Finding(section, "native core", value, PROBLEM, _how_to_build())
        return
    yield Finding(section, "native core", Path(str(core.__file__)).name)
    if not _setting(settings.shared_memory_allowed, default=True):
        yield Finding(section, "two processes share", "not tried: FUSED_TP_SHM turns it off", NOTE)
        return
    why_not = _try_shared_memory(core)
    if why_not is None:
        yield Finding(section, "two processes share", "yes")
    else:
        advice = (
            "Ops run on torch.distributed. The ranks of a host need the same user and PID namespace, and their "
            "container must let them open /proc/<pid>/fd of each other (docker: --pid host --cap-add SYS_PTRACE)."
        )
        yield Finding(section, "two processes share", f"no: {why_not}", PROBLEM, advice)


def _libraries() -> Iterator[Finding]:
    for name, (extra, purpose) in _LIBRARIES.items():
        found = _installed(name)
        value = found or f"not installed ({purpose}): pip install 'fused-tp[{extra}]'"
        yield Finding("Optional libraries", name, value, OK if found else NOTE)


def _settings() -> Iterator[Finding]:
    section = "Settings"
    checks: dict[str, Callable[[], Any]] = {
        "FUSED_TP_TIMEOUT": settings.timeout_seconds,
        "FUSED_TP_CHECK": settings.check_ranks,
        "FUSED_TP_SM_MARGIN": settings.sm_margin,
        "FUSED_TP_SHM": settings.shared_memory_allowed,
        "FUSED_TP_TABLE": lambda: dispatch.load_table(settings.table_path()),
        "FUSED_TP_SCHEDULE": _forced_schedule,
        "FUSED_TP_ATTENTION": _forced_provider,
        "FUSED_TP_RING_GRADIENTS": settings.narrow_gradients,
        **{name: partial(_taken, name) for name in _TAKEN},
        **{name: partial(settings.switch, name, True) for name in _SWITCHES},
    }
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name)
        if value is None:
            yield Finding(section, name, f"not set; {meaning}")
            continue
        try:
            checks.get(name, lambda: None)()
        except (ValueError, OSError) as error:
            yield Finding(section, name, f"{value!r}; {meaning}", PROBLEM, str(error))
        else:
            yield Finding(section, name, f"{value!r}; {meaning}")
    for name in sorted(os.environ):
        if name.startswith("FUSED_TP_") and name not in VARIABLES:
            yield Finding(
                section, name, repr(os.environ[name]), PROBLEM, "Nothing reads this variable; is it misspelt?"
            )


def _forced_schedule() -> str | None:
    name = settings.forced_schedule()
    if name is not None and name not in WAYS:
        raise ValueError(f"There is no such schedule; there are {', '.join(WAYS)}.")
    return name


def _forced_provider() -> str | None:
    # It loads NumPy and the native core, which the rest of doctor does without.
    from fused_tp.attention.providers import forced_provider

    return forced_provider()


def _taken(name: str) -> None:
    pattern, wanted = _TAKEN[name]
    if not re.fullmatch(pattern, os.environ[name].lower()):
        raise ValueError(f"Set it to {wanted}.")


def _schedules(core: ModuleType | None) -> Iterator[Finding]:
    """The dispatch table's choices for two ranks of this machine; `fused-tp explain` has more."""
    section = f"Schedules of {_RANKS} ranks, bf16, hidden size {_HIDDEN}"
    shared = core is not None and _setting(settings.shared_memory_allowed, default=True)
    ways = [("cpu", "shm" if shared else "gloo", "cpu")]
    if torch.cuda.is_available():
        ways.append(("cuda", "nccl", dispatch.arch_of(torch.device("cuda", torch.cuda.current_device()))))
    for device, transport, arch in ways:
        for op, tensors in _OPS.items():
            try:
                chosen = []
                for tokens in _TOKENS.values():
                    shapes = ((tokens, _HIDDEN), (_HIDDEN, _HIDDEN))[:tensors]
                    explanation = explain_for(
                        op, *shapes, dtype=torch.bfloat16, world_size=_RANKS, transport=transport, arch=arch
                    )
                    decision = explanation.forward or explanation.backward
                    by_table = decision.schedule if decision else "local"
                    chosen.append(_forced_for(queries(op, shapes, None, _RANKS), device) or by_table)
            except (ValueError, OSError) as error:
                yield Finding(section, f"{op}, {device}", "no choice", PROBLEM, str(error))
            else:
                value = ", ".join(f"{schedule} ({tokens})" for tokens, schedule in zip(_TOKENS, chosen, strict=True))
                yield Finding(section, f"{op}, {device}", value)


def _forced_for(asked: Both, device: str) -> str | None:
    """The schedule that FUSED_TP_SCHEDULE forces on a call, if it is one that has something for it."""
    name = settings.forced_schedule()
    query = asked[0] or asked[1]
    if name not in WAYS or query is None:
        return None
    way = WAYS[name]
    serves = way.lacks(query[0], torch.bfloat16) is None and device in (way.devices or (device,))
    return name if serves else None


def _setting(read: Callable[[], bool], *, default: bool) -> bool:
    """A setting, or its default where the environment holds nonsense: that is reported under Settings."""
    try:
        return read()
    except ValueError:
        return default


def _core() -> ModuleType | None:
    try:
        return importlib.import_module("fused_tp._core")
    except ImportError:
        return None


def _why_no_core() -> str:
    try:
        importlib.import_module("fused_tp._core")
    except ImportError as error:
        return str(error)
    return ""


def _how_to_build() -> str:
    steps = []
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        steps.append("install a C++17 compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        steps.append("install the Python headers (Debian, Ubuntu: apt-get install python3-dev)")
    steps.append("reinstall: pip install --force-reinstall --no-deps fused-tp (from its sources: pip install -e .)")
    return "To build it, " + ", then ".join(steps) + "."


# The other rank of _try_shared_memory. It loads the core by its path, so that it needs not wait for torch.
_PEER = """
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


def _try_shared_memory(core: ModuleType) -> str | None:
    """Two processes map each other's memory and meet in a barrier: None, or why they could not."""
    command = [sys.executable, "-c", _PEER, str(core.__file__)]
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
                return peer.stderr.read().strip().rpartition("\n")[2]
            group.connect([group.address, bytes.fromhex(address)])
            core.barrier(group)
            group.close()
            peer.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            peer.kill()
    return None


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, ":").partition(":")[2].split())


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
