"""Timeline of the computations in a pipeline step, and a plot of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

# Methods of torch's stages, and the kind of computation of each.
_KIND_OF_METHOD = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


@dataclass(frozen=True)
class Span:
    """A computation of one stage for one microbatch.

    Attributes:
        kind: "forward", "backward" (of inputs, or of both), "weights" (of weights alone).
        start, stop: times in seconds.
    """

    rank: int
    stage: int
    microbatch: int
    kind: str
    start: float
    stop: float


class Recorder:
    """Records the computations of stages inside `recording`; on GPUs it synchronizes the device around each of them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_recording = False

    def watch(self, stage: Any) -> None:
        """Wrap the methods of a torch PipelineStage so that its computations are recorded."""
        for method, kind in _KIND_OF_METHOD.items():
            setattr(stage, method, self._record_calls(stage, getattr(stage, method), kind))

    def _record_calls(self, stage: Any, compute: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @wraps(compute)
        def recorded_compute(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self.is_recording:
                return compute(microbatch, *args, **kwargs)
            start = _read_synchronized_clock(stage.device)
            result = compute(microbatch, *args, **kwargs)
            span = Span(
                stage.group_rank, stage.stage_index, microbatch, kind, start, _read_synchronized_clock(stage.device)
            )
            self.spans.append(span)
            return result

        return recorded_compute

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Record computations inside the context; the list is complete at its end."""
        self.spans, self.is_recording = [], True
        try:
            yield self.spans
        finally:
            self.is_recording = False


def _read_synchronized_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bubble(spans: Sequence[Span]) -> float:
    """Fraction of all ranks' time, from the first computation to the last, in which they were idle."""
    if not spans:
        raise ValueError("spans is empty. Record a step first.")
    ranks = {span.rank for span in spans}
    total_seconds = (max(span.stop for span in spans) - min(span.start for span in spans)) * len(ranks)
    return 1 - sum(span.stop - span.start for span in spans) / total_seconds


def draw(spans: Sequence[Span], path: str | Path) -> None:
    """Plot a step: a row for each rank, a box for each computation with its microbatch number, bubbles shaded.

    Args:
        spans: computations of all ranks, on one clock.
        path: path of a PNG or SVG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    colors = {"forward": "#4c8bf5", "backward": "#f2a33a", "weights": "#59a869"}
    ranks = sorted({span.rank for span in spans})
    start = min(span.start for span in spans)
    stop = max(span.stop for span in spans)
    num_stages = 1 + max(span.stage for span in spans)
    figure, axes = plt.subplots(figsize=(12, 0.7 * len(ranks) + 1.4), layout="constrained")
    for row, rank in enumerate(ranks):
        axes.barh(row, (stop - start) * 1e3, height=0.9, color="#dddddd", zorder=0)
        for span in (span for span in spans if span.rank == rank):
            left, width = (span.start - start) * 1e3, (span.stop - span.start) * 1e3
            opacity = 1.0 if num_stages <= len(ranks) else 0.55 + 0.45 * (span.stage // len(ranks) % 2)
            axes.barh(row, width, left=left, height=0.9, color=colors[span.kind], alpha=opacity, edgecolor="white")
            if width * 120 > (stop - start) * 1e3:
                axes.text(left + width / 2, row, span.microbatch, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, (stop - start) * 1e3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{num_stages} stages on {len(ranks)} ranks, {bubble(spans):.0%} of the time idle", fontsize=10)
    handles = [Patch(color=color, label=kind) for kind, color in colors.items()] + [
        Patch(color="#dddddd", label="idle")
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
