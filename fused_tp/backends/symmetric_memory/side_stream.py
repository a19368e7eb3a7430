"""Work that overlaps with a kernel that communicates: on a side stream on a GPU, after the launch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fused_tp.core.pending import Pending, PendingCall


class SideStream:
    """Side streams of one schedule, one for each stream of its callers."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._gather_stream: torch.cuda.Stream | None = None

    @contextmanager
    def __call__(self, overlapped_work: Callable[[], None] | None, device: torch.device) -> Iterator[None]:
        """Overlap `overlapped_work` with the launches inside the scope: on a GPU on a side stream, joined at the end.

        Memory that `overlapped_work` allocates belongs to the side stream's pool and is used on the caller's stream.
        This is safe: the pool reuses a block only for later work of the side stream, which first waits for all earlier
        work of the caller's stream.
        """
        if overlapped_work is None:
            yield
        elif device.type != "cuda":
            yield
            overlapped_work()
        else:
            stream = torch.cuda.current_stream(device)
            start_event = stream.record_event()
            yield
            if stream.cuda_stream not in self._streams:
                self._streams[stream.cuda_stream] = self._make_stream(device)
            side_stream = self._streams[stream.cuda_stream]
            side_stream.wait_event(start_event)
            try:
                with torch.cuda.stream(side_stream):
                    overlapped_work()
            finally:
                stream.wait_stream(side_stream)

    def start(self, x: Tensor, gather: Callable[[], Tensor]) -> Pending[Tensor]:
        """Start `gather` of `x`; on a GPU, on a separate stream, overlapped with the caller's next launches."""
        if self._gather_stream is None:
            self._gather_stream = self._make_stream(x.device)
        stream = self._gather_stream
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            gathered = gather()
        x.record_stream(stream)

        def finish() -> Tensor:
            consumer = torch.cuda.current_stream(x.device)
            consumer.wait_stream(stream)
            gathered.record_stream(consumer)
            return gathered

        return PendingCall(finish)

    def _make_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Make a stream that nothing else uses."""
        from fused_tp.triton_kernels.comm.streams import own_streams

        stream: torch.cuda.Stream = own_streams(self, device, 1)[0]
        return stream
