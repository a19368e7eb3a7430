"""Progress of the demo's runs: a bar each on a terminal, a line each where the output is a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fused_tp.cli.demo_train import Run


class Progress(Protocol):
    def advance(self, run: Run, total: int) -> None:
        """`run` has done one more of its `total` steps."""


class _Silent:
    def advance(self, run: Run, total: int) -> None:
        pass


@contextmanager
def silent_progress() -> Iterator[Progress]:
    """For the ranks that do not report."""
    yield _Silent()


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """Bars by rich, one for each run, with its latest loss; they appear as the runs begin."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description:<27}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}

    class Rich:
        def advance(self, run: Run, total: int) -> None:
            if run.name not in tasks:
                tasks[run.name] = bars.add_task(run.name, total=total, loss=run.losses[-1])
            bars.update(tasks[run.name], advance=1, loss=run.losses[-1])

    with bars:
        yield Rich()
