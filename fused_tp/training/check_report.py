"""Report of `check_model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_MAX_LISTED = 12  # parameters listed at most


@dataclass(frozen=True)
class CheckReport:
    """Comparison of a parallel model with the unsharded model.

    Errors are relative to the largest value of a tensor.

    Attributes:
        layout: description of the parallel dims, such as "cp2 x tp2".
        tolerance: errors up to `tolerance` count as rounding.
        losses: losses of each step, on one process and in parallel.
        loss_error: largest error over all steps and ranks.
        outputs: output errors by module name and rank, in the order in which the unsharded model's modules return.
        skipped: modules whose outputs are not compared, with the reason.
        gradients: gradient errors by parameter name, the largest first.
        communicated: number of calls of each collective in the first step, the maximum over all ranks.
        advice: possible explanation of the difference.
    """

    layout: str
    tolerance: float
    losses: list[tuple[float, float]]
    loss_error: float
    outputs: dict[str, dict[int, float]]
    skipped: dict[str, str]
    gradients: dict[str, float]
    communicated: dict[str, int]
    advice: str = ""

    @property
    def first_difference(self) -> str | None:
        """Name of the first module whose output differs."""
        return next((name for name, errors in self.outputs.items() if self._differs(max(errors.values()))), None)

    @property
    def wrong_gradients(self) -> dict[str, float]:
        """Errors of the parameters whose gradients differ, the largest first."""
        return {name: error for name, error in self.gradients.items() if self._differs(error)}

    @property
    def suspect(self) -> str | None:
        """Name of the module that most likely contains the error; None if there is none.

        This is the first module whose output differs. If no output differs, it is the last module with a parameter
        whose gradient differs, because backward runs from the last module to the first.
        """
        if self.first_difference is not None:
            return self.first_difference
        order = {name: position for position, name in enumerate(self.outputs)}
        modules = [name.rpartition(".")[0] for name in self.wrong_gradients]
        return max(modules, key=lambda name: order.get(name, -1), default=None)

    @property
    def right(self) -> bool:
        """True if no output, gradient or loss differs."""
        return self.first_difference is None and not self.wrong_gradients and not self._differs(self.loss_error)

    def _differs(self, error: float) -> bool:
        return not error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Convert the report to JSON values; numbers that JSON lacks become strings, such as "Infinity"."""
        summary = {"right": self.right, "suspect": self.suspect, "first_difference": self.first_difference}
        values: dict[str, Any] = json.loads(json.dumps({**summary, **asdict(self)}), parse_constant=str)
        return values

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"layout         {self.layout}; tolerance {self.tolerance:g}"
        for step, (one_process_loss, parallel_loss) in enumerate(self.losses):
            yield f"loss           step {step}: {one_process_loss:.6f} on one process, {parallel_loss:.6f} in parallel"
        first_difference, wrong_gradients = self.first_difference, self.wrong_gradients
        if first_difference is None:
            yield f"outputs        the outputs of all {len(self.outputs)} modules are right"
        else:
            rank_errors = {
                rank: error for rank, error in self.outputs[first_difference].items() if self._differs(error)
            }
            ranks = "rank" if len(rank_errors) == 1 else "ranks"
            yield f"outputs        the first that differs: {first_difference}"
            yield f"               by {max(rank_errors.values()):.1e}, on {ranks} {', '.join(map(str, rank_errors))}"
        for name, reason in self.skipped.items():
            yield f"not compared   {name}: {reason}"
        yield f"gradients      {len(wrong_gradients)} of {len(self.gradients)} parameters differ"
        for name, error in list(wrong_gradients.items())[:_MAX_LISTED]:
            yield f"               {error:.1e}  {name}"
        if len(wrong_gradients) > _MAX_LISTED:
            yield f"               and {len(wrong_gradients) - _MAX_LISTED} more"
        for name, call_count in self.communicated.items():
            yield f"communication  {call_count:4} x {name}"
        if self.right:
            yield "RIGHT"
        else:
            yield f"WRONG: check {self.suspect or 'the computation of the loss'} first"
            if self.advice:
                yield self.advice
