"""Work beside a kernel that communicates: on a GPU on streams of its own, on the CPU after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Beside:
    """The side streams of one schedule."""

    def __init__(self) -> None:
        self._sides: dict[int, torch.cuda.Stream] = {}

    @contextmanager
    def __call__(self, meanwhile: Callable[[], None] | None, device: torch.device) -> Iterator[None]:
        """Runs `meanwhile` beside what is launched inside: on a GPU on a stream of its own, joined at the end.

        There is one for each stream of the caller's. What `meanwhile` allocates belongs to its pool and is used on the
        caller's stream. That is safe: the pool hands it out again to later work of that stream only, which begins by
        waiting for all that the caller's had been given before.
        """
        if meanwhile is None:
            yield
        elif device.type != "cuda":
            yield
            meanwhile()
        else:
            stream = torch.cuda.current_stream(device)
            before = stream.record_event()
            yield
            if stream.cuda_stream not in self._sides:
                self._sides[stream.cuda_stream] = self.own_stream(device)
            side = self._sides[stream.cuda_stream]
            side.wait_event(before)
            try:
                with torch.cuda.stream(side):
                    meanwhile()
            finally:
                stream.wait_stream(side)

    def own_stream(self, device: torch.device) -> torch.cuda.Stream:
        """One more stream that nobody else has."""
        from fused_tp.triton_kernels.comm.streams import own_streams

        stream: torch.cuda.Stream = own_streams(self, device, 1)[0]
        return stream
