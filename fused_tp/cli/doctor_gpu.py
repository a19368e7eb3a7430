"""The GPU part of `fused-tp doctor`: driver, CUDA, NCCL, who reaches whose memory, and which kernels can run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from fused_tp.cli.findings import NOTE, OK, PROBLEM, Finding, dotted, output_of
from fused_tp.schedules.ways import no_kernel_on
from fused_tp.transport import cuda_driver, native_kernels

_SECTION = "GPU"
_MODULE_VERSION = Path("/proc/driver/nvidia/version")

# What a version of NCCL has that we use: attributes of `_core.NcclLibrary`.
_NCCL_FEATURES = {
    "has_windows": "zero-copy windows",
    "has_zero_cta": "collectives by copy engines",
    "has_revoke": "communicators that can be stopped",
    "has_shared_devices": "several ranks on one GPU",
}


def examine_gpu(core: ModuleType | None) -> Iterator[Finding]:
    """All lines of the section. `core`: the native core, None where it is missing."""
    on_gpu = torch.cuda.is_available()
    yield from _driver(on_gpu)
    devices = range(torch.cuda.device_count()) if on_gpu else range(0)
    archs = []
    for device in devices:
        try:
            properties = torch.cuda.get_device_properties(device)
        except RuntimeError as error:  # a GPU that has fallen off the bus, or whose driver has
            advice = "nvidia-smi may say more; CUDA_VISIBLE_DEVICES can leave it out."
            yield _finding(f"cuda:{device}", f"unusable: {str(error).splitlines()[0]}", PROBLEM, advice)
            continue
        archs.append(10 * properties.major + properties.minor)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        multicast = ", multicast" * (cuda_driver.device_attribute(cuda_driver.MULTICAST, device) == 1)
        yield _finding(f"cuda:{device}", f"{properties.name}, sm_{archs[-1]}, {memory}{multicast}")
    if not on_gpu:
        yield _finding("CUDA devices", "none, or a torch built without CUDA; CPU ops need none", NOTE)
    if len(archs) == len(devices) > 1:
        yield from _peers(devices)
    if on_gpu:
        yield _nccl(core)
    yield _fused_kernels(on_gpu)
    yield _device_kernels(sorted(set(archs)))


def _driver(on_gpu: bool) -> Iterator[Finding]:
    serves = cuda_driver.cuda_version()
    if serves is not None:
        yield _finding("NVIDIA driver", f"{_driver_release() or 'version unknown'}, for CUDA up to {dotted(serves)}")
    elif on_gpu:
        yield _finding("NVIDIA driver", "unknown: libcuda.so.1 cannot be asked", NOTE)
    else:
        yield _finding("NVIDIA driver", "none", NOTE)
    wants = torch.version.cuda
    if serves is not None and wants is None:
        advice = "To use the GPU, install a torch with CUDA (pytorch.org names the command)."
        yield _finding("CUDA of torch", "none: this torch was built for CPUs", NOTE, advice)
    elif serves is not None and wants is not None and serves[0] < int(wants.split(".")[0]):
        advice = "Update the driver, or install a torch for that CUDA."
        yield _finding("CUDA of torch", f"{wants}, which this driver does not serve", PROBLEM, advice)
    else:
        yield _finding("CUDA of torch", wants or "none", OK if wants else NOTE)


def _driver_release() -> str:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _MODULE_VERSION.read_text())
    except OSError:
        found = None
    if found is not None:
        return found[1]
    return next(iter(output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")), "")


def _peers(devices: range) -> Iterator[Finding]:
    """Which GPUs can write into each other's memory, and use atomics there, as kernels that signal each other do."""
    reach = {(one, other): _reach(one, other) for one in devices for other in devices if one != other}
    if set(reach.values()) == {_ATOMICS}:
        yield _finding("peer access", f"all {len(devices)} GPUs reach each other, with atomics")
        return
    for one in devices:
        groups = {how: [other for other in devices if reach.get((one, other)) == how] for how in (_ATOMICS, _PLAIN, "")}
        parts = [f"{_numbers(others)} {how or 'not at all'}" for how, others in groups.items() if others]
        yield _finding(f"cuda:{one} reaches", "; ".join(parts), OK if groups[_ATOMICS] else NOTE)


_ATOMICS, _PLAIN = "with atomics", "without atomics, so not for kernels"


def _reach(one: int, other: int) -> str:
    if not torch.cuda.can_device_access_peer(one, other):
        return ""
    return _ATOMICS if cuda_driver.peer_attribute(cuda_driver.NATIVE_ATOMICS, one, other) == 1 else _PLAIN


def _numbers(devices: list[int]) -> str:
    return ", ".join(f"cuda:{device}" for device in devices)


def _nccl(core: ModuleType | None) -> Finding:
    if not dist.is_nccl_available():
        return _finding("NCCL", "missing", PROBLEM, "Install a torch with NCCL.")
    version = dotted(torch.cuda.nccl.version())  # which also loads it, before the core looks for it
    if core is None:
        return _finding("NCCL", f"{version}; schedule nccl_pipeline needs the native core", NOTE)
    try:
        library = core.NcclLibrary()
    except RuntimeError as error:
        return _finding("NCCL", f"{version}; not for schedule nccl_pipeline: {error}", NOTE)
    features = [text for name, text in _NCCL_FEATURES.items() if getattr(library, name)]
    missing = [text for name, text in _NCCL_FEATURES.items() if not getattr(library, name)]
    value = f"{library.version_text}, has {', '.join(features)}" if features else library.version_text
    return _finding("NCCL", f"{value}; a later one adds {', '.join(missing)}" if missing else value)


def _fused_kernels(on_gpu: bool) -> Finding:
    reason = no_kernel_on(torch.device("cuda" if on_gpu else "cpu"))
    if reason is not None:
        return _finding("fused kernels", f"none: {reason}", NOTE)
    where = "on GPUs that reach each other by NVLink" if on_gpu else "interpreted, for tests"
    return _finding("fused kernels", f"can run {where}")


def _device_kernels(archs: list[int]) -> Finding:
    built = native_kernels.built_for()
    what = f"built for {', '.join(built.archs)} by CUDA {dotted(built.toolkit[:2])}" if built is not None else "there"
    reasons = {arch: native_kernels.no_native_kernels(arch) for arch in archs or [0]}
    problems = [reason for reason in reasons.values() if reason is not None]
    if not problems:
        return _finding("device kernels", what)
    if not archs or built is None:
        return _finding("device kernels", f"none: {problems[0]}" if built is None else f"{what}; {problems[0]}", NOTE)
    return _finding("device kernels", f"{what}, but not usable", PROBLEM, f"{problems[0][0].upper()}{problems[0][1:]}.")


def _finding(name: str, value: str, status: str = OK, advice: str = "") -> Finding:
    return Finding(_SECTION, name, value, status, advice)
