"""torch's own `symm_mem` ops for one group: their lookup, their memory, and their serialization.

The API is alpha and differs between versions of torch, so each op is looked up, and used only if its arguments have the
expected types. The ranks use the ops that all of them have.

Memory: torch keeps one workspace per group, and every op places its buffers from offset 0, so two ops on different
streams would overwrite each other. Here an op waits for the previous one, on any stream, and for our own kernels on the
device. torch grows the workspace within an op, where a rank that grows it alone would wait without a deadline. So all
ranks grow it here first, together, or none does if one of them has too little memory. Sums use a separate buffer.

Deadlines: set-up is bounded by `FUSED_TP_TIMEOUT`, and a peer that has ended is noticed before the next call. The
kernels poll without a deadline, and nothing ends them: a peer that is lost in the middle of an op leaves the GPU
waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.symmetric_memory.group_kernels import Workspaces, rounded
from fused_tp.backends.symmetric_memory.symm_mem import (
    GroupMemory,
    NoSymmetricMemory,
    check_not_capturing,
    make_torch_workspace,
)
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.failure import GroupCalls
from fused_tp.core.store import exchange

# torch's dispatch keys by device type.
KEYS = {"cuda": "CUDA"}

# Types of the arguments passed to each op. An op may have further arguments if they have defaults.
NEEDED = {
    "fused_all_gather_matmul": ("Tensor", "List[Tensor]", "int", "str", "bool"),
    "fused_matmul_reduce_scatter": ("Tensor", "Tensor", "str", "int", "str"),
    "one_shot_all_reduce": ("Tensor", "str", "str"),
    "two_shot_all_reduce_": ("Tensor", "str", "str"),
}
OPTIONAL = {
    "multimem_all_reduce_": ("Tensor", "str", "str"),
    "multimem_one_shot_all_reduce": ("Tensor", "str", "str"),
    "_low_contention_all_gather": ("Tensor", "str"),
    "_low_contention_reduce_scatter": ("Tensor", "str", "str"),
}

_LOG = logging.getLogger("fused_tp")


def torch_op(name: str, device_type: str) -> Any:
    """torch's op `symm_mem::<name>` for tensors on such a device, or an `Availability` with the reason if none fits."""
    import torch.distributed._symmetric_memory  # defines the ops that are written in Python

    found = getattr(getattr(torch.ops.symm_mem, name, None), "default", None)
    key = KEYS.get(device_type)
    if found is None or key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
        return unavailable(f"torch {torch.__version__} has no symm_mem.{name} for {device_type}")
    passed, arguments = (NEEDED | OPTIONAL)[name], found._schema.arguments
    types = tuple(str(argument.type) for argument in arguments)
    if types[: len(passed)] != passed or not all(one.has_default_value() for one in arguments[len(passed) :]):
        return unavailable(
            f"symm_mem.{name} of torch {torch.__version__} takes ({', '.join(types)}), not ({', '.join(passed)})"
        )
    return found


def torch_ops_on(device: torch.device) -> Availability:
    """True if this torch has the ops that the schedule requires, for tensors on `device`."""
    if device.type not in KEYS:
        return unavailable(f"torch's symm_mem ops are for {', '.join(KEYS)}; this is {device.type}")
    return next((one for name in NEEDED if isinstance(one := torch_op(name, device.type), Availability)), AVAILABLE)


class TorchSymmMem(Workspaces):
    """The ops of one group on one device, and their memory.

    Attributes:
        ops: the ops that all ranks have, by name.
        name: name of the group, as torch's ops take it.
        multicast: True if the `multimem` ops can run.
    """

    def __init__(self, memory: GroupMemory, messages: GroupCalls | None = None) -> None:
        super().__init__(memory, {}, messages)
        self._what = "symm_mem ops"
        self._group = memory.group
        self.name, self.multicast = memory.group.name, memory.multicast
        found = {name: torch_op(name, self.device.type) for name in (*NEEDED, *OPTIONAL)}
        mine = [name for name, op in found.items() if not isinstance(op, Availability)]
        everyone = [set(theirs) for theirs in exchange(self._group, "torch's symm_mem ops", mine)]
        self.ops: dict[str, Any] = {name: found[name] for name in mine if all(name in theirs for theirs in everyone)}
        self._workspace_bytes = 0
        self._sums: Tensor | None = None
        self._outgrown_memory: list[Tensor] = []  # outgrown memory that a CUDA graph may still use
        # by kind of memory, the smallest size that some rank could not allocate
        self._failed_bytes: dict[str, int] = {}

    def has_room(self, op: str, *, workspace: int = 0, sums: int = 0) -> bool:
        """True if the memory for `turn` exists. Makes it if it does not, on all ranks or on none.

        Args:
            workspace: bytes that torch will require of its own workspace, the same on all ranks.
            sums: bytes for `summand`.

        Raises:
            RuntimeError: memory would have to grow while a CUDA graph is being captured.
            Also the errors of `raise_if_failed`.
        """
        self.raise_if_failed()
        have = 0 if self._sums is None else self._sums.numel()
        return self._grow(op, "workspace", workspace, self._workspace_bytes) and self._grow(op, "sums", sums, have)

    def _grow(self, op: str, kind: str, nbytes: int, have: int) -> bool:
        if nbytes <= have:
            return True
        if nbytes >= self._failed_bytes.get(kind, nbytes + 1):
            return False
        check_not_capturing(
            self.device, f"{op} needs {nbytes} bytes of symmetric memory for torch's op, and the group has {have}"
        )
        # No rank may free memory that another may still read: each waits for its own ops, and making the new memory
        # waits for all ranks.
        if self._turn.done is not None:
            self._turn.done.synchronize()
        size = rounded(nbytes)
        try:
            if kind == "workspace":
                outgrown = make_torch_workspace(self._group, self.device, size)
                self._workspace_bytes = size
            else:
                outgrown = self._sums
                self._sums, self._handle = self._memory.allocate(size)
        except NoSymmetricMemory as error:
            self._failed_bytes[kind] = nbytes
            _LOG.warning("%s of this size goes by plain collectives from now on: %s", op, error)
            return False
        if outgrown is not None and self._outside_slot.captured:
            self._outgrown_memory.append(outgrown)
        return True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Scope of one op that `has_room`: its launches run after those of the previous op, on the group's device."""
        self.calls += 1
        with self.in_turn():
            yield

    def summand(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Uninitialized tensor in memory of all ranks for this rank's term of a sum; valid inside its `turn`."""
        assert self._sums is not None
        return self._sums[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _on_peer_lost(self, rank: int) -> None:
        super()._on_peer_lost(rank)
        if self._outside_slot.turn.under_way():
            _LOG.error(
                "Rank %d lost rank %d, which has ended, while a symm_mem op of torch's was under way. Its kernels wait "
                "without a deadline: end this process.",
                self.rank,
                rank,
            )
