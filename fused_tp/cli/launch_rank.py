"""Prepare a rank, then exec its program: `python launch_rank.py LAUNCHER cores|none PROGRAM ARGUMENTS`.

The rank then ends with process LAUNCHER, even if that is killed; with `cores` it is bound to its share of the host's
processors. `fused-tp launch` and `train` start ranks through this file, by its path: as a module of the package it
would import torch a second time. Linux only. torchrun's --numa-binding cannot replace it, as it binds a rank by its
GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
_PR_SET_PDEATHSIG = 1


def end_with_parent(launcher: int) -> None:
    """Have this process killed when its parent, process `launcher`, ends; exit now if that has ended already."""
    # The setting survives exec. SIGKILL, because a launcher that could still ask its ranks to end has done so. It fires
    # when the thread that started this process ends; torchrun starts ranks from the thread that waits for them.
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print(f"This rank may outlive process {launcher}: prctl is refused here.", file=sys.stderr)
    if os.getppid() != launcher:
        sys.exit(1)


def share_of(rank: int, ranks: int, cpus: Sequence[int]) -> set[int]:
    """Processors of a rank: neighbours in `cpus`, equally many per rank up to one.

    Example:
        >>> share_of(1, 2, [0, 4, 1, 5])
        {1, 5}
    """
    return set(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks])


def in_order_of_cores(cpus: set[int]) -> list[int]:
    """Sort processors by NUMA node, socket and core: threads of a core become neighbours, as do cores of a node."""
    return sorted(cpus, key=lambda cpu: (*_place(CPUS / f"cpu{cpu}"), cpu))


def _place(folder: Path) -> tuple[int, int, int]:
    # Kernels without NUMA expose no node, and some virtual machines expose no topology.
    node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
    files = [folder / "topology" / name for name in ("physical_package_id", "core_id")]
    socket, core = (int(file.read_text()) if file.exists() else 0 for file in files)
    return node, socket, core


def main(launcher: str, binding: str, *program: str) -> None:
    end_with_parent(int(launcher))
    if binding == "cores":
        rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        os.sched_setaffinity(0, share_of(rank, ranks, in_order_of_cores(os.sched_getaffinity(0))))
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
