"""The memory that a group's fused kernels work in: made when first needed, grown when too small, one op at a time.

There is one workspace for each kind of op, so a gather and a sum may be under way at once, on two streams. Ops of one
kind take turns, as collectives of one NCCL communicator do: an op on another stream than the one before waits for it.

CUDA graphs: a captured op keeps the workspace that it was captured with, so that has to be there and large enough
before: run the same ops once outside of the capture, as torch asks for anyway. A workspace that a graph may still use
is never freed, also when later ops outgrow it. Replays count as ops of the stream that they are replayed on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fused_tp.runtime import settings
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.transport.kernel_memory import KernelMemory
from fused_tp.transport.peer_watch import PeerWatch

_LOG = logging.getLogger("fused_tp")

# Makes a workspace of a buffer and a handle; its class is the kernels' own, which are imported late.
MakeWorkspace = Callable[..., Any]

_LEAST_BYTES = 1 << 20
_ROUNDED_TO = 64 << 20  # above it a workspace is a multiple of it, below it a power of two


@dataclass
class _Slot:
    """A workspace, and the last op that used it."""

    workspace: Any
    nbytes: int
    captured: bool = False
    stream: torch.cuda.Stream | None = None
    done: torch.cuda.Event | None = None


class Workspaces:
    """The workspaces of one group on one device, by kind of op.

    Args:
        memory: of the group.
        kinds: how to make a workspace of each kind: `make(buffer, handle, timeout_seconds=...)`.
    """

    def __init__(self, memory: KernelMemory, kinds: Mapping[str, MakeWorkspace]) -> None:
        self._memory = memory
        self.rank = memory.rank
        self._kinds = dict(kinds)
        self._slots: dict[str, _Slot] = {}
        self._outgrown: list[_Slot] = []  # those that a CUDA graph may still use
        self._watch: PeerWatch | None = None
        self._lost: int | None = None
        self._told = False
        self.broken: str | None = None

    @contextmanager
    def use(self, kind: str, nbytes: int, op: str) -> Iterator[Any]:
        """A workspace of at least `nbytes`, for what is launched inside.

        Raises:
            CollectiveTimeoutError: a wait of this op (interpreted) or of an earlier one (on a GPU) has expired.
            PeerLostError: a peer's process has ended; no kernel waits for it any more.
            FusedTPError: that was so before.
            RuntimeError: the workspace would have to grow while a CUDA graph is being captured.
        """
        self.raise_if_expired()
        slot = self._slots.get(kind)
        if slot is None or slot.nbytes < nbytes:
            slot = self._grow(kind, nbytes, op)
        slot.workspace.timeout_ns = int(settings.timeout_seconds() * 1e9)
        on_gpu = slot.workspace.state.is_cuda
        if on_gpu:
            _enter(slot)
        yield slot.workspace
        if on_gpu:
            _leave(slot)
        else:
            self.raise_if_expired()

    def raise_if_expired(self) -> None:
        """Raises what a kernel has reported, if any has; does not wait for kernels that still run."""
        if self.broken is not None:
            raise FusedTPError(
                f"The group's kernels are unusable since an earlier failure: {self.broken} "
                "Destroy the process group and make a new one."
            )
        # A peer's death is the cause where both are there: others may have given up for want of it.
        if self._lost is not None:
            self.broken = f"rank {self._memory.rank} of {self._memory.world_size} lost rank {self._lost}: it has ended."
            raise PeerLostError(self.broken)
        self.broken = self._expired()
        if self.broken is not None:
            raise CollectiveTimeoutError(self.broken)

    def _expired(self) -> str | None:
        for slot in self._all():
            expired = slot.workspace.expired()
            if expired is not None:
                return f"{expired}, in {slot.workspace.timeout_ns / 1e9:g} s (FUSED_TP_TIMEOUT)."
        return None

    def _all(self) -> list[_Slot]:
        return [*self._slots.values(), *self._outgrown]

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _peer_lost(self, rank: int) -> None:
        if self._lost is None:
            self._lost = rank
        for slot in self._all():
            # At the end of a program ranks end one after the other, and nothing is under way any more.
            if slot.done is not None and not slot.done.query():
                _LOG.error(
                    "Rank %d lost rank %d: it has ended. Results that it had a part in are wrong.", self.rank, rank
                )
            slot.workspace.stop_waiting()

    def _look(self) -> None:
        """Says at once what the next op is going to raise: there may be none, and results are wrong already."""
        if not self._told and self._memory.arch and (sentence := self._expired()) is not None:
            self._told = True
            _LOG.error("%s What the group's kernels had under way is wrong.", sentence)

    # -----------------------------------------------------------------------------------------------------------------

    def _grow(self, kind: str, nbytes: int, op: str) -> _Slot:
        old = self._slots.get(kind)
        if _capturing():
            have = f"of {old.nbytes} bytes" if old is not None else "that is not there yet"
            raise RuntimeError(
                f"{op} needs a workspace of {nbytes} bytes and the group has one {have}; it cannot be made while a "
                "CUDA graph is being captured. Run the same ops once before the capture."
            )
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        if size > _ROUNDED_TO:
            size = -(-nbytes // _ROUNDED_TO) * _ROUNDED_TO
        on_gpu = self._memory.arch != 0
        # No rank frees what another may still write to: each waits for its own kernels, then making the new workspace
        # waits for all ranks.
        # For its stream only: where ranks are threads, other streams of the device wait for this rank.
        if old is not None and old.done is not None:
            old.done.synchronize()
        buffer, handle = self._memory.allocate(size)
        workspace = self._kinds[kind](buffer, handle, timeout_seconds=settings.timeout_seconds())
        if on_gpu:
            torch.cuda.current_stream(buffer.device).synchronize()
        if old is not None and old.captured:
            self._outgrown.append(old)
        slot = self._slots[kind] = _Slot(workspace, size)
        if self._watch is None:
            self._watch = PeerWatch(self, self._memory.pids, Workspaces._peer_lost, Workspaces._look)
        return slot


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _enter(slot: _Slot) -> None:
    stream = torch.cuda.current_stream()
    if _capturing():
        # Waiting for something outside of the capture is not allowed, nor needed: a capture begins on an idle device.
        slot.captured = True
    elif slot.done is not None and slot.stream != stream:
        stream.wait_event(slot.done)


def _leave(slot: _Slot) -> None:
    if _capturing():
        return
    if slot.done is None:
        slot.done = torch.cuda.Event()
    slot.stream = torch.cuda.current_stream()
    slot.done.record(slot.stream)
