"""A rank that is killed when a part of its message has come: gloo does not notice that, and would wait on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime.errors import PeerLostError
from fused_tp.runtime.group import resolve_group
from fused_tp.transport.torch_dist import TorchDist
from tests.beside import beside
from tests.workers import fresh_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills ranks")

ELEMENTS = 32 * 1024 * 1024
NOTICE_SECONDS = 12.0  # 2 to 6 s, and where many processes share a core; the deadline is 60 s
OPS: dict[str, Callable[[TorchDist, Tensor], Any]] = {
    "shift": lambda transport, x: transport.shift("shift", x, torch.zeros_like(x), 1),
    "all_gather": lambda transport, x: transport.all_gather("all_gather", x),
    "all_to_all": lambda transport, x: transport.all_to_all(
        "all_to_all", x, *[[len(x) // transport.world_size] * transport.world_size] * 2
    ),
}


def lose(_: Any, op: str) -> tuple[str, float, float]:
    """What a survivor raises, how long after the victim's death, and how long the group's end takes then."""
    transport = TorchDist(resolve_group(None), "cpu")
    last = transport.world_size - 1
    pids: list[Any] = [None] * transport.world_size
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(ELEMENTS, dtype=torch.uint8)
    x = x[: len(x) // transport.world_size * transport.world_size]
    died = [0.0]

    def kill() -> None:
        time.sleep(0.02)  # about in the middle; where it is not, the case is an easier one
        died[0] = time.time()
        os.kill(pids[last], signal.SIGKILL)

    dist.barrier()
    begun = time.time()
    if transport.rank == 0:
        threading.Thread(target=kill).start()
    with pytest.raises(PeerLostError) as caught:
        for _ in range(1000):
            OPS[op](transport, x).wait()
    raised = time.time()
    message = str(caught.value)
    begun = died[0] or begun
    del transport, caught
    dist.destroy_process_group()
    return message, raised - begun, time.time() - raised


@beside(lambda op, world_size: fresh_ranks(world_size, lose, op, env={"FUSED_TP_TIMEOUT": "60"}, expect_deaths=True))
@pytest.mark.parametrize(("op", "world_size"), [("shift", 2), ("shift", 3), ("all_gather", 3), ("all_to_all", 2)])
def test_a_rank_killed_in_the_middle_of_a_message_is_noticed(outcome: list[Any], op: str, world_size: int) -> None:
    for rank in range(world_size - 1):
        message, seconds, end = outcome[rank].unwrap()
        assert f"lost rank {world_size - 1}: died, or closed its connections" in message
        assert seconds < NOTICE_SECONDS and end < 2.0, (seconds, end)
