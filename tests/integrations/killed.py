"""Run examples.train_resilient and kill one rank in each of its first starts:

torchrun ... -m tests.integrations.killed DEATHS ARGUMENTS-OF-THE-EXAMPLE

DEATHS, such as "1:step:6,0:save:2", has one entry per start of the ranks: the rank, the place, and the number of the
call in that start. "step" kills before the optimizer takes a step, "save" while a save is being written.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

from examples import train_resilient


def kill_at(owner: Any, method: str, number: int) -> None:
    original, calls = getattr(owner, method), 0

    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **keywords)

    setattr(owner, method, counted)


if __name__ == "__main__":
    deaths, *arguments = sys.argv[1:]
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for rank, where, number in [death.split(":") for death in deaths.split(",")][life : life + 1]:
        if os.environ["RANK"] == rank:
            owner, method = {"step": (torch.optim.AdamW, "step"), "save": (FileSystemWriter, "write_data")}[where]
            kill_at(owner, method, int(number))
    train_resilient.main(arguments)
