"""Ring attention on shared memory: a rank's K/V are read by its peers where they lie; nothing goes round.

Each rank writes the K/V rows that others look at into its workspace once, says so, and reads those of its peers in
place, one peer per step in the order of the ring so that not all ranks read the same memory at once.

Backward, stages of a rank: 1 K/V are readable; 2t its term for step t is readable; 2t + 3 it has added the term that
others found for it in step t. Terms of dK/dV lie in two slots, used in turn: before step t overwrites that of step
t - 2, its reader must have reached stage 2(t - 2) + 3. A reader gets there after its own step t - 1, so ranks may drift
apart by a step before anyone waits, and memory does not grow with W. Owners add terms in the order of the steps: the
same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.schedules.ring_state import OwnGrads, RingBackward, RingCall, RingForward, from_wire, heads_first
from fused_tp.transport.base import accumulate_dtype
from fused_tp.transport.shm import ShmTransport, Workspace

_ALIGNMENT = 64  # a cache line, and the widest vector
_KEYS_READABLE = 1


class _Regions:
    """Where everything lies in the workspace of one rank, as every rank can work out."""

    def __init__(
        self, workspace: Workspace | None, call: RingCall, rank: int, k: Tensor, v: Tensor, slots: int
    ) -> None:
        plan = call.plan
        self._workspace, self._rank = workspace, rank
        self._offset = 0
        self._keys = [self._region(x, plan.rows_sent(rank), x.dtype) for x in (k, v)]
        steps = range(1, plan.world_size) if slots else ()
        rows = max((plan.step(rank, t).kv_stop for t in steps), default=0)
        self._slots = [
            [self._region(x, rows, accumulate_dtype(x.dtype)) for x in (k, v)] for _ in range(min(slots, len(steps)))
        ]
        self.nbytes = self._offset

    def _region(self, like: Tensor, rows: int, dtype: torch.dtype) -> tuple[Sequence[int], torch.dtype, int]:
        shape = (rows, like.shape[0], like.shape[2], like.shape[3])
        region = (shape, dtype, self._offset)
        self._offset += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return region

    def keys(self) -> list[Tensor]:
        """K and V, heads first."""
        return [self._view(*region) for region in self._keys]

    def terms(self, t: int, rows: int) -> list[Tensor]:
        """dK and dV of step t for the first `rows` keys of its source, heads first."""
        return [self._view(*region)[:, :, :rows] for region in self._slots[t % len(self._slots)]]

    def _view(self, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        assert self._workspace is not None
        return from_wire(self._workspace.buffer(self._rank, shape, dtype, offset))


class OneSidedRing:
    """Serves the CPU tensors of ranks on one host."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        state = RingForward(call, q, v)
        with self._begin("ring_attention", call, k, v, dims, slots=0) as workspace:
            self._publish_keys(workspace, call, k, v, slots=0)
            state.attend(0, heads_first(k), heads_first(v))
            for t in range(1, call.plan.world_size):
                if not call.plan.step(call.rank, t).empty:
                    state.attend(t, *self._read_keys(workspace, call, t, k, v, slots=0))
        return state.result()

    def backward(
        self,
        call: RingCall,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dims: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, rank = call.plan, call.rank
        state = RingBackward(call, grad_out, q, out, lse)
        with self._begin("ring_attention_backward", call, k, v, dims, slots=2) as workspace:
            mine = self._publish_keys(workspace, call, k, v, slots=2)
            own = OwnGrads(k, v, state.attend(0, heads_first(k), heads_first(v)))
            for t in range(1, plan.world_size):
                step = plan.step(rank, t)
                if not step.empty:
                    terms = state.attend(t, *self._read_keys(workspace, call, t, k, v, slots=2))
                    assert terms is not None
                    if t > 2:
                        workspace.wait(plan.source(rank, t - 2), _added(t - 2))
                    for slot, term in zip(mine.terms(t, step.kv_stop), terms, strict=True):
                        slot.copy_(term)
                workspace.signal(_written(t))
                if t > 1:
                    self._add_terms(workspace, call, t - 1, own, k, v)
                    workspace.signal(_added(t - 1))
            if plan.world_size > 1:
                self._add_terms(workspace, call, plan.world_size - 1, own, k, v)
        return state.dq(), *own.result()

    def _begin(self, op: str, call: RingCall, k: Tensor, v: Tensor, dims: tuple[int, ...], slots: int) -> Workspace:
        return self._transport.begin(op, dims, k.dtype, _Regions(None, call, call.rank, k, v, slots).nbytes)

    def _publish_keys(self, workspace: Workspace, call: RingCall, k: Tensor, v: Tensor, slots: int) -> _Regions:
        mine = _Regions(workspace, call, call.rank, k, v, slots)
        for there, here in zip(mine.keys(), (k, v), strict=True):
            there.copy_(heads_first(here)[:, :, : there.shape[2]])
        workspace.signal(_KEYS_READABLE)
        return mine

    def _read_keys(
        self, workspace: Workspace, call: RingCall, t: int, k: Tensor, v: Tensor, slots: int
    ) -> list[Tensor]:
        source = call.plan.source(call.rank, t)
        workspace.wait(source, _KEYS_READABLE)
        return _Regions(workspace, call, source, k, v, slots).keys()

    def _add_terms(self, workspace: Workspace, call: RingCall, t: int, own: OwnGrads, k: Tensor, v: Tensor) -> None:
        """Add what the rank that looks at our keys in step t found."""
        other = (call.rank + t) % call.plan.world_size
        rows = call.plan.step(other, t).kv_stop
        if rows:
            workspace.wait(other, _written(t))
            dk, dv = _Regions(workspace, call, other, k, v, slots=2).terms(t, rows)
            own.add(dk, dv)


def _written(t: int) -> int:
    return 2 * t


def _added(t: int) -> int:
    return 2 * t + 3
