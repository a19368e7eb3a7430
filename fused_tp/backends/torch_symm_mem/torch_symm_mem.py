"""torch's own `symm_mem` ops for one group: their lookup, their memory, and their serialization.

The API is alpha and differs between versions of torch, so each op is looked up, and used only if its arguments have the
expected types. The ranks use the ops that all of them have.

Memory: torch keeps one workspace per group, and every op places its buffers from offset 0, so two ops on different
streams would overwrite each other. Here an op waits for the previous one, on any stream, and for this package's kernels
on the device. torch grows the workspace within an op, where a rank that grows it alone would wait without a deadline.
So all ranks grow it here first, together, or no rank does if one of them has too little memory. Sums use a separate
buffer.

Deadlines: setup is bounded by `FUSED_TP_TIMEOUT`, and the exit of a peer is detected before the next call. torch's
kernels poll without a deadline and cannot be aborted: if a peer is lost in the middle of an op, the GPU waits forever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.symmetric_memory.group_kernels import Workspaces, round_up_bytes
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
DISPATCH_KEYS = {"cuda": "CUDA"}

# Types of the arguments passed to each op. An op may have further arguments if they have defaults.
REQUIRED_OPS = {
    "fused_all_gather_matmul": ("Tensor", "List[Tensor]", "int", "str", "bool"),
    "fused_matmul_reduce_scatter": ("Tensor", "Tensor", "str", "int", "str"),
    "one_shot_all_reduce": ("Tensor", "str", "str"),
    "two_shot_all_reduce_": ("Tensor", "str", "str"),
}
OPTIONAL_OPS = {
    "multimem_all_reduce_": ("Tensor", "str", "str"),
    "multimem_one_shot_all_reduce": ("Tensor", "str", "str"),
    "_low_contention_all_gather": ("Tensor", "str"),
    "_low_contention_reduce_scatter": ("Tensor", "str", "str"),
}

_LOG = logging.getLogger("fused_tp")


def find_torch_op(name: str, device_type: str) -> Any:
    """Return torch's op `symm_mem::<name>` for this device type, or an `Availability` with the reason if none fits."""
    import torch.distributed._symmetric_memory  # defines the ops that are written in Python

    op = getattr(getattr(torch.ops.symm_mem, name, None), "default", None)
    key = DISPATCH_KEYS.get(device_type)
    if op is None or key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
        return unavailable(f"torch {torch.__version__} has no symm_mem.{name} for {device_type}")
    passed_types, arguments = (REQUIRED_OPS | OPTIONAL_OPS)[name], op._schema.arguments
    types = tuple(str(argument.type) for argument in arguments)
    if types[: len(passed_types)] != passed_types or not all(
        argument.has_default_value() for argument in arguments[len(passed_types) :]
    ):
        return unavailable(
            f"symm_mem.{name} of torch {torch.__version__} has arguments ({', '.join(types)}), and fused_tp passes "
            f"({', '.join(passed_types)})"
        )
    return op


def torch_ops_availability(device: torch.device) -> Availability:
    """Return whether this version of torch has all `REQUIRED_OPS` for tensors on `device`."""
    if device.type not in DISPATCH_KEYS:
        return unavailable(f"torch's symm_mem ops run on {', '.join(DISPATCH_KEYS)}, not on {device.type}")
    return next(
        (op for name in REQUIRED_OPS if isinstance(op := find_torch_op(name, device.type), Availability)), AVAILABLE
    )


class TorchSymmMem(Workspaces):
    """torch's symm_mem ops for one group on one device, and their memory.

    Attributes:
        ops: the ops that all ranks have, by name.
        name: name of the group, which torch's ops accept.
        has_multicast: True if the `multimem` ops can run.
    """

    def __init__(self, memory: GroupMemory, messages: GroupCalls | None = None) -> None:
        super().__init__(memory, {}, messages)
        self._kernels_name = "symm_mem ops"
        self._group = memory.group
        self.name, self.has_multicast = memory.group.name, memory.has_multicast
        own_ops = {name: find_torch_op(name, self.device.type) for name in (*REQUIRED_OPS, *OPTIONAL_OPS)}
        own_names = [name for name, op in own_ops.items() if not isinstance(op, Availability)]
        names_by_rank = [set(rank_names) for rank_names in exchange(self._group, "torch's symm_mem ops", own_names)]
        self.ops: dict[str, Any] = {
            name: own_ops[name] for name in own_names if all(name in rank_names for rank_names in names_by_rank)
        }
        self._workspace_bytes = 0
        self._sum_buffer: Tensor | None = None
        self._outgrown_memory: list[Tensor] = []  # outgrown memory that a CUDA graph may still use
        # for "workspace" and "sums": the smallest size that some rank could not allocate
        self._failed_bytes: dict[str, int] = {}

    def reserve_memory(self, op: str, *, workspace_bytes: int = 0, sum_bytes: int = 0) -> bool:
        """Allocate missing memory for `op_scope`, on all ranks or on none. Return True if the memory exists.

        Args:
            workspace_bytes: bytes that torch's op needs in torch's workspace, the same on all ranks.
            sum_bytes: bytes that `summand` needs.

        Raises:
            RuntimeError: memory would have to grow while a CUDA graph is being captured.
            Also the errors of `raise_if_failed`.
        """
        self.raise_if_failed()
        existing_bytes = 0 if self._sum_buffer is None else self._sum_buffer.numel()
        return self._grow(op, "workspace", workspace_bytes, self._workspace_bytes) and self._grow(
            op, "sums", sum_bytes, existing_bytes
        )

    def _grow(self, op: str, memory_name: str, nbytes: int, existing_bytes: int) -> bool:
        if nbytes <= existing_bytes:
            return True
        if nbytes >= self._failed_bytes.get(memory_name, nbytes + 1):
            return False
        check_not_capturing(
            self.device,
            f"{op} needs {nbytes} bytes of symmetric memory for torch's op, and the group has {existing_bytes}",
        )
        # No rank may free memory that a peer may still read. So each rank waits for its own ops, and then allocates the
        # new memory, which waits for all ranks.
        if self._turn.done_event is not None:
            self._turn.done_event.synchronize()
        size = round_up_bytes(nbytes)
        try:
            if memory_name == "workspace":
                outgrown_tensor = make_torch_workspace(self._group, self.device, size)
                self._workspace_bytes = size
            else:
                outgrown_tensor = self._sum_buffer
                self._sum_buffer, self._handle = self._memory.allocate(size)
        except NoSymmetricMemory as error:
            self._failed_bytes[memory_name] = nbytes
            _LOG.warning("Calls of %s of this size or larger use plain collectives from now on: %s", op, error)
            return False
        if outgrown_tensor is not None and self._outside_slot.is_captured:
            self._outgrown_memory.append(outgrown_tensor)
        return True

    @contextmanager
    def op_scope(self) -> Iterator[None]:
        """Context manager of one op, after `reserve_memory`: its kernels run after those of the previous op."""
        self.calls += 1
        with self.in_turn():
            yield

    def summand(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in symmetric memory for this rank's term of a sum; valid inside `op_scope`."""
        assert self._sum_buffer is not None
        return self._sum_buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _on_peer_lost(self, rank: int) -> None:
        super()._on_peer_lost(rank)
        if self._outside_slot.turn.is_running():
            _LOG.error(
                "Rank %d lost rank %d, whose process has exited, during one of torch's symm_mem ops. The op's kernels "
                "wait without a deadline. Kill this process.",
                self.rank,
                rank,
            )
