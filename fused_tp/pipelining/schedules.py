"""Schedules of torch.distributed.pipelining by name: number and placement of stages, and their requirements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch.

    Attributes:
        name: name of the class, without "Schedule".
        stages_per_rank: number of stages per rank; 0: any number, two or more.
        is_v_shaped: rank r of R runs the stages r and 2 * R - 1 - r, so that rank 0 has the first and the last stage.
            Otherwise stage s is on rank s % R.
        splits_backward: the schedule computes the gradients of inputs and of weights separately.
        find_violated_requirement: (microbatches, ranks) -> the requirement that they violate, or None.
    """

    name: str
    stages_per_rank: int
    is_v_shaped: bool = False
    splits_backward: bool = False
    find_violated_requirement: Callable[[int, int], str | None] = lambda num_microbatches, num_ranks: None

    def stages_of(self, rank: int, num_ranks: int, virtual_stages: int) -> list[int]:
        """Return the indices of the stages of `rank`."""
        if self.is_v_shaped:
            return [rank, 2 * num_ranks - 1 - rank]
        return [rank + num_ranks * i for i in range(virtual_stages)]

    def make_schedule(self, stages: list[Any], microbatches: int, loss_fn: Callable[..., Any] | None) -> Any:
        """Create torch's schedule for this rank's stages. Gradients of microbatches are summed, not averaged."""
        schedule_class = torch_schedules.get_schedule_class(self.name)
        return schedule_class(
            stages if issubclass(schedule_class, torch_schedules.PipelineScheduleMulti) else stages[0],
            microbatches,
            loss_fn=loss_fn,
            scale_grads=False,
        )


def _require_one_per_rank(num_microbatches: int, num_ranks: int) -> str | None:
    return (
        None if num_microbatches >= num_ranks else f"it needs at least one for each of the {num_ranks} pipeline ranks"
    )


def _require_full_rounds(num_microbatches: int, num_ranks: int) -> str | None:
    num_rounds = max(1, num_microbatches // num_ranks)
    return (
        None
        if num_microbatches % num_rounds == 0
        else f"it needs a multiple of {num_rounds}, such as {num_microbatches - num_microbatches % num_rounds}"
    )


def _require_two_per_rank(num_microbatches: int, num_ranks: int) -> str | None:
    return (
        None
        if num_microbatches >= 2 * num_ranks
        else f"it needs at least {2 * num_ranks}, two for each of the {num_ranks} pipeline ranks"
    )


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("GPipe", 1),
        ScheduleKind("1F1B", 1, find_violated_requirement=_require_one_per_rank),
        ScheduleKind("Interleaved1F1B", 0, find_violated_requirement=_require_full_rounds),
        ScheduleKind("InterleavedZeroBubble", 0, splits_backward=True, find_violated_requirement=_require_full_rounds),
        ScheduleKind("ZBVZeroBubble", 2, is_v_shaped=True, splits_backward=True),
        ScheduleKind(
            "DualPipeV", 2, is_v_shaped=True, splits_backward=True, find_violated_requirement=_require_two_per_rank
        ),
    )
}
ALIASES = {"interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule with that name, case-insensitive; raise ValueError if there is none."""
    names = {kind_name.lower(): kind_name for kind_name in SCHEDULES} | ALIASES
    if not isinstance(name, str) or name.lower() not in names:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}.")
    return SCHEDULES[names[name.lower()]]


def find_schedule(name: str, num_ranks: int, microbatches: int, virtual_stages: int | None) -> tuple[ScheduleKind, int]:
    """Return the schedule with that name, case-insensitive, and the number of stages per rank.

    Raises:
        ValueError: no schedule has that name, or the schedule does not support that number of microbatches or stages;
            the message names its requirement.
    """
    kind = schedule_kind(name)
    requirement = kind.find_violated_requirement(microbatches, num_ranks)
    if requirement is not None:
        raise ValueError(f"microbatches={microbatches} is not supported by schedule {kind.name!r}: {requirement}.")
    if kind.stages_per_rank:
        if virtual_stages not in (None, kind.stages_per_rank):
            raise ValueError(
                f"virtual_stages={virtual_stages}, but schedule {kind.name!r} has {kind.stages_per_rank} "
                f"stage{'s' if kind.stages_per_rank > 1 else ''} on each rank. Remove virtual_stages."
            )
        return kind, kind.stages_per_rank
    stages_per_rank = 2 if virtual_stages is None else virtual_stages
    if stages_per_rank < 2:
        raise ValueError(
            f"virtual_stages={virtual_stages}, but schedule {kind.name!r} needs two or more on each rank; "
            "'1F1B' has one."
        )
    return kind, stages_per_rank
