"""One training step and what is measured of it. The same code trains the unsharded and the parallel model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.runtime import tracing

WARMUP_STEPS = 5  # of the learning rate
GRAD_NORM = 1.0


@dataclass
class Run:
    """What one way of training gave, a value for each step.

    Attributes:
        name: how the report calls it.
        ranks, threads: processes, and threads of each.
        losses: mean cross entropy in nats.
        seconds: wall time of the step on the slowest rank.
        waited: the part of it that a rank stood still for its peers, in seconds, mean over the ranks.
    """

    name: str
    ranks: int
    threads: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class Trainer:
    """A model and its AdamW; `step` takes the full batch, whether or not the model is parallel."""

    def __init__(self, model: Any, *, lr: float, dtype: str, device: str) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.base_lr = lr

    def autocast(self) -> torch.autocast:
        """bf16 matmuls over fp32 weights, or nothing."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == "bf16")

    def step(self, tokens: Tensor, number: int) -> float:
        """Train on `tokens` [batch, seq] as step `number`, counted over resumes, and return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * min(1.0, (number + 1) / WARMUP_STEPS)
        self.optimizer.zero_grad()
        with self.autocast():
            loss: Tensor = self.model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, GRAD_NORM)
        self.optimizer.step()
        return loss.item()

    def timed_step(self, tokens: Tensor, number: int, run: Run) -> None:
        """A step whose loss, wall time and time spent waiting are added to `run`, as this rank sees them."""
        waited, started = tracing.waited_seconds(), time.perf_counter()
        run.losses.append(self.step(tokens, number))
        if self.device == "cuda":
            torch.cuda.synchronize()
        run.seconds.append(time.perf_counter() - started)
        run.waited.append(tracing.waited_seconds() - waited)


@contextmanager
def plain_collectives() -> Iterator[None]:
    """Run every fused op as matmul, then one torch.distributed collective, without shared memory: the baseline."""
    forced = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}
    before = {name: os.environ.get(name) for name in forced}
    os.environ.update(forced)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
