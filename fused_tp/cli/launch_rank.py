"""Prepare a rank, then exec its program: `python launch_rank.py LAUNCHER cores|none PROGRAM ARGUMENTS`.

The rank is killed when process LAUNCHER exits, even by SIGKILL. With `cores` it is bound to its share of the host's
processors. `fused-tp launch` and `train` run this file by its path: as a module of the package it would import torch
before the program does. Linux only. Rejected: torchrun's --numa-binding, which binds a rank by its GPU.
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
    """Make the kernel kill this process when its parent, process `launcher`, exits; exit now if it already has."""
    # The setting survives exec. SIGKILL, because a launcher that exits regularly has already sent SIGTERM. The signal
    # is sent when the thread that started this process exits: torchrun's thread that waits for the ranks.
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print(f"This rank may outlive process {launcher}: prctl is not permitted here.", file=sys.stderr)
    if os.getppid() != launcher:
        sys.exit(1)


def share_of(rank: int, ranks: int, cpus: Sequence[int]) -> set[int]:
    """Return the processors of a rank: a contiguous slice of `cpus`; sizes differ by at most one.

    Example:
        >>> share_of(1, 2, [0, 4, 1, 5])
        {1, 5}
    """
    return set(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks])


def in_order_of_cores(cpus: set[int]) -> list[int]:
    """Sort processors by NUMA node, socket and core: threads of a core become neighbours, as do cores of a node."""
    return sorted(cpus, key=lambda cpu: (*_position(CPUS / f"cpu{cpu}"), cpu))


def _position(folder: Path) -> tuple[int, int, int]:
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
