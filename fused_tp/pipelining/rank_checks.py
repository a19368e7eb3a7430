"""Comparisons over the ranks of a pipeline, whose optimizers and code between steps see one rank's stages only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

from fused_tp.parallelizing.checks.model_check import warn_once

_FACTOR_TOLERANCE = 1e-3  # relative difference of factors of hyperparameters that rounding may explain


class NumbersOfRanks:
    """Numbers of all ranks of a group, gathered while the work that is launched next runs on the device.

    Rejected: `core.store.exchange` in each step. One store would serve all ranks of all pipelines.
    """

    def __init__(self, numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> None:
        rows = torch.zeros(dist.get_world_size(group), len(numbers), dtype=torch.float64, device="cpu")
        rows[dist.get_rank(group)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        rows = rows.to(device, non_blocking=True)
        dist.all_reduce(rows, group=group)
        self._rows = rows.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def read(self) -> list[list[float]]:
        """Return the numbers of each rank."""
        if self._copied is not None:
            self._copied.synchronize()
        rows: list[list[float]] = self._rows.tolist()
        return rows


class HyperparameterCheck:
    """Search for hyperparameters (learning rate, weight decay, ...) that are computed from one rank's stages.

    Stages may have hyperparameters and schedules of their own. So values are not compared, but the factor by which a
    hyperparameter has changed, if it is the same in all groups of a rank.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, dict[str, list[float]]] = {}  # by id of the optimizer
        self._reported: dict[str, tuple[int, list[float]]] = {}  # step and values of the latest report, by name

    def record(self, optimizer: Optimizer) -> None:
        """Record the hyperparameters with which `optimizer` has stepped."""
        values: dict[str, list[float]] = {}
        for group in optimizer.param_groups:
            for name, value in _scalars(group):
                values.setdefault(f"{name!r} of {type(optimizer).__name__}", []).append(value)
        self._recorded[id(optimizer)] = values

    def report(self, step: int) -> dict[str, Any]:
        """Return (step of the report before, factor since then, value) by name, and remove the recorded values."""
        current: dict[str, list[float]] = {}
        for values in self._recorded.values():
            for name, numbers in values.items():
                current.setdefault(name, []).extend(numbers)
        self._recorded = {}
        report = {}
        for name, numbers in current.items():
            earlier_step, earlier_numbers = self._reported.get(name, (0, []))
            report[name] = earlier_step, _common_factor(earlier_numbers, numbers), numbers[0]
        self._reported |= {name: (step, numbers) for name, numbers in current.items()}
        return report

    @staticmethod
    def compare(reports: Sequence[Mapping[str, Any]], mesh: DeviceMesh) -> None:
        """Log the hyperparameters whose factors differ between `reports`, those of all ranks of `mesh`."""
        for name in dict.fromkeys(name for report in reports for name in report):
            steps, factors, values = zip(*(report[name] for report in reports if name in report), strict=True)
            if len(set(steps)) > 1 or None in factors:
                continue
            if max(factors) - min(factors) > _FACTOR_TOLERANCE * max(map(abs, factors)):
                warn_once(
                    [mesh],
                    f"hyperparameter {name}",
                    "The hyperparameter %s changes by other factors on some ranks of a pipeline than on others, to "
                    "%.4g on one rank and %.4g on another. If it is computed from a norm or a maximum over "
                    "pipe.parameters() or their gradients, that is one of a rank's stages only: combine it over the "
                    "ranks of the pipeline, for example by fused_tp.all_reduce(squared_norm, group=mesh['pp']).",
                    name,
                    values[factors.index(min(factors))],
                    values[factors.index(max(factors))],
                )


def _scalars(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers in a parameter group, also of those in tuples."""
    for name, value in group.items():
        entries = value if isinstance(value, tuple) else (value,)
        for index, entry in enumerate(entries if name != "params" else ()):
            is_number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
            if is_number or (isinstance(entry, Tensor) and entry.numel() == 1):
                yield f"{name}[{index}]" if isinstance(value, tuple) else name, float(entry)


def _common_factor(earlier: Sequence[float], current: Sequence[float]) -> float | None:
    """Return the factor by which all numbers in `earlier` but zeros have changed, or None if there is none."""
    if len(earlier) != len(current):
        return None
    factors = [new / old for old, new in zip(earlier, current, strict=True) if old]
    if not factors or not max(factors) - min(factors) <= _FACTOR_TOLERANCE * max(map(abs, factors)):
        return None
    return factors[0]
