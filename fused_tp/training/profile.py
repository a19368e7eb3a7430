"""Recording of training steps with torch.profiler on every rank, for `fused-tp report`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import profile, record_function

from fused_tp.training.settings import TrainSettings

_logger = logging.getLogger("fused_tp")


class StepProfiler:
    """Record the steps of `settings.profile`, and write them to `out`/traces/rank{rank}.json.gz.

    The trace has a named range for each step and for the forward of each module. torch.profiler adds the rank, the
    groups and the base of its clock; the metadata "mesh" maps dims to groups. Rejected: `with_stack` of torch.profiler,
    which does not record the names of modules in the model, and takes longer than a small step.

    Args:
        modules: the model, or the stages of a pipeline.
        mesh: mesh of the run.
        done_steps: number of steps before the run resumes. If fewer steps are left than the profile needs, nothing
            is recorded, with a warning: a restart shortly before the end is not an error.

    Example:
        >>> profiler = StepProfiler(settings, [model], mesh)
        >>> for number, batch in enumerate(batches, 1):
        ...     with profiler.step(number):
        ...         train(batch)
    """

    def __init__(
        self, settings: TrainSettings, modules: Iterable[nn.Module], mesh: DeviceMesh, done_steps: int = 0
    ) -> None:
        assert settings.profile is not None
        self._first_step, self._last_step = done_steps + settings.profile.first, done_steps + settings.profile.last_step
        self._folder, self._total_steps = settings.out / "traces", settings.steps
        if self._last_step > settings.steps and dist.get_rank() == 0:
            _logger.warning(
                "No profile will be recorded: it needs steps %d to %d, and the run resumes after step %d and ends with "
                "step %d; increase steps.",
                self._first_step,
                self._last_step,
                done_steps,
                settings.steps,
            )
        self._modules, self._mesh = list(modules), mesh
        self._profile: profile | None = None
        self._hooks: list[Any] = []
        self._open_ranges: list[record_function] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager around step `number` (from 1), on every rank."""
        if not self._first_step <= number <= self._last_step <= self._total_steps:
            yield
            return
        if self._profile is None:
            self._start()
        with record_function(f"step {number}"):
            yield
        if number == self._last_step:
            self._write()

    def _start(self) -> None:
        names = self._mesh.mesh_dim_names or ()
        mesh = {
            "sizes": dict(zip(names, self._mesh.shape, strict=True)),
            "coordinate": self._mesh.get_coordinate(),
            "groups": {self._mesh[name].get_group().group_name: name for name in names},
        }
        for old_trace in self._folder.glob("rank*.json.gz") if dist.get_rank() == 0 else ():
            old_trace.unlink()  # traces of an earlier run, which may have had more ranks
        self._profile = profile(acc_events=True)
        self._profile.start()
        self._profile.add_metadata_json("mesh", json.dumps(mesh))
        for model in self._modules:
            for name, module in model.named_modules():
                # prepend: the range includes other hooks. always_call: activation checkpointing stops recomputation
                # early by an exception inside forward.
                self._hooks.append(
                    module.register_forward_pre_hook(partial(self._open_range, name or "model"), prepend=True)
                )
                self._hooks.append(module.register_forward_hook(self._close_range, always_call=True))
        dist.barrier()  # the profiler's start takes a different time on each rank

    def _open_range(self, name: str, *_: Any) -> None:
        self._open_ranges.append(record_function(name))
        self._open_ranges[-1].__enter__()

    def _close_range(self, *_: Any) -> None:
        self._open_ranges.pop().__exit__(None, None, None)

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        for hook in self._hooks:
            hook.remove()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"rank{dist.get_rank()}.json.gz"))
        self._profile = None
