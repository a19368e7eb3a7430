"""examples.train_resilient, of which one rank kills itself in its first life:

torchrun ... -m tests.integrations.killed RANK WHERE NUMBER ARGUMENTS-OF-THE-EXAMPLE

WHERE is "step", before the optimizer takes the step of this number, or "save", while the save of this number (from 1)
is being written.
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
    rank, where, number, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        owner, method = {"step": (torch.optim.AdamW, "step"), "save": (FileSystemWriter, "write_data")}[where]
        kill_at(owner, method, int(number))
    train_resilient.main(arguments)
