"""Whether the ranks of a group can have an NCCL communicator of ours, and the libraries that it takes.

All ranks must come to the same answer, so they tell each other what each of them has, and all judge by the same facts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fused_tp.runtime.group import Group
from fused_tp.transport.peer_watch import own_process


@dataclass(frozen=True)
class _Libraries:
    """Paths of the two, and whether they take tensors of the CPU."""

    nccl: str = ""  # that which torch has loaded
    cuda: str = "libcuda.so.1"
    on_cpu: bool = False


_libraries = _Libraries()


def use_libraries(nccl: str | Path | None, cuda: str | Path | None = None) -> None:
    """For tests: look-alikes of NCCL and of the CUDA driver, for tensors of the CPU. None: the real ones again."""
    global _libraries
    _libraries = _Libraries() if nccl is None else _Libraries(str(nccl), str(cuda), on_cpu=True)


def no_nccl_on(device: torch.device) -> str | None:
    """Why tensors on `device` cannot go through an NCCL communicator of ours, whatever the group, or None."""
    if find_spec("fused_tp._core") is None:
        return "this installation has no native core"
    if device.type != "cuda" and not (device.type == "cpu" and _libraries.on_cpu):
        return f"NCCL moves tensors of NVIDIA GPUs, not of {device.type}"
    try:
        load()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


def load() -> tuple[Any, Any]:
    """`_core.NcclLibrary` and `_core.Driver`. Raises RuntimeError where one of them cannot be had."""
    core = import_module("fused_tp._core")
    return core.NcclLibrary(_libraries.nccl), core.Driver(_libraries.cuda)


@dataclass(frozen=True)
class Facts:
    """What one rank tells the others."""

    process: tuple[str, int]
    gpu: str = ""
    version: int = 0
    id: str = ""  # rank 0's unique id, in hex
    problem: str = ""


def own_facts(group: Group, device: torch.device) -> Facts:
    """What this rank has to tell."""
    problem = no_nccl_on(device)
    if problem is not None:
        return Facts(own_process(), problem=problem)
    try:
        library, _ = load()
        unique_id = library.make_id().hex() if group.rank == 0 else ""
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    except RuntimeError as error:
        return Facts(own_process(), problem=str(error).splitlines()[0].rstrip("."))
    if os.environ.get("NCCL_COMM_BLOCKING", "").strip() not in ("", "0", "-1"):
        # It goes before the configuration of a communicator, and who waits inside of NCCL has no deadline.
        return Facts(own_process(), problem="NCCL_COMM_BLOCKING is set: unset it, so that no call of NCCL blocks")
    # Several ranks on one GPU: NCCL 2.30 and later, where the variable says so.
    shares = library.version >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return Facts(own_process(), "" if shares else gpu, library.version, unique_id)


def obstacle(facts: Sequence[Facts]) -> str | None:
    """What keeps these ranks from having a communicator, or None."""
    for rank, fact in enumerate(facts):
        if fact.problem:
            return f"rank {rank}: {fact.problem}"
    versions = sorted({fact.version for fact in facts})
    if len({version // 100 for version in versions}) > 1:
        return f"its ranks have loaded different versions of NCCL: {', '.join(map(_shown, versions))}"
    gpus = [fact.gpu for fact in facts if fact.gpu]
    if len(set(gpus)) < len(gpus):
        return "several of its ranks share a GPU (NCCL 2.30 and later take that with NCCL_MULTI_RANK_GPU_ENABLE=1)"
    return None


@cache
def _shown(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
