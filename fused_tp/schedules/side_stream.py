"""Work that overlaps with a kernel that communicates: on a GPU on a side stream, on the CPU behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fused_tp.transport.base import After, Pending


class SideStream:
    """The side streams of one schedule, one for each stream of its callers."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._gathers: torch.cuda.Stream | None = None

    @contextmanager
    def __call__(self, meanwhile: Callable[[], None] | None, device: torch.device) -> Iterator[None]:
        """Overlaps `meanwhile` with what is launched inside: on a GPU on a side stream, which is joined at the end.

        What `meanwhile` allocates belongs to the pool of the side stream and is used on the caller's stream. That is
        safe: the pool gives a block out again only to later work of the side stream, which begins by waiting for all
        that the caller's stream had been given before.
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
            if stream.cuda_stream not in self._streams:
                self._streams[stream.cuda_stream] = self.own_stream(device)
            side = self._streams[stream.cuda_stream]
            side.wait_event(before)
            try:
                with torch.cuda.stream(side):
                    meanwhile()
            finally:
                stream.wait_stream(side)

    def start(self, x: Tensor, gather: Callable[[], Tensor]) -> Pending[Tensor]:
        """Start `gather` of `x`, on a GPU, on a stream of its own, overlapped with what the caller launches next."""
        if self._gathers is None:
            self._gathers = self.own_stream(x.device)
        stream = self._gathers
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            gathered = gather()
        x.record_stream(stream)

        def finish() -> Tensor:
            consumer = torch.cuda.current_stream(x.device)
            consumer.wait_stream(stream)
            gathered.record_stream(consumer)
            return gathered

        return After(finish)

    def own_stream(self, device: torch.device) -> torch.cuda.Stream:
        """One more stream, used by no one else."""
        from fused_tp.triton_kernels.comm.streams import own_streams

        stream: torch.cuda.Stream = own_streams(self, device, 1)[0]
        return stream
