"""torch's own `symm_mem` ops for one group: which there are, the memory that they work in, and one at a time.

The API is alpha and differs between versions of torch, so each op is looked up, and taken only where its arguments are
those that are passed here. Ranks take the ops that all of them have.

Memory: torch keeps one workspace for each group and every op carves its buffers from offset 0, so two ops on different
streams would overwrite each other. Here an op waits for the one before, on whatever stream that is, and for our own
kernels on the device. torch grows the workspace within an op, and a rank that does so alone would wait without a
deadline; so it is grown here first, by all ranks together. Sums have a buffer of their own.

Deadlines: setting up keeps `FUSED_TP_TIMEOUT`, and a peer that has ended is noticed before the next call. The kernels
themselves poll without a deadline, and nothing ends them: a peer that is lost in the middle of an op leaves the GPU
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_tp.runtime.availability import AVAILABLE, Availability, unavailable
from fused_tp.transport.failure import GroupCalls
from fused_tp.transport.store import exchange
from fused_tp.transport.symm_mem import GroupMemory, check_not_capturing, make_torch_workspace
from fused_tp.transport.workspace import Workspaces, rounded

# torch's dispatch keys by type of device.
KEYS = {"cuda": "CUDA"}

# The types of the arguments that are passed, by op. Others may follow where they have defaults.
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

_LEAST_BYTES = 1 << 20
_ROUNDED_TO = 64 << 20


def torch_op(name: str, device_type: str) -> Any:
    """torch's op `symm_mem::<name>` for tensors on such a device, or an `Availability` that says why there is none."""
    import torch.distributed._symmetric_memory  # defines those that are written in Python

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
    """True if this torch has the ops that the schedule cannot do without, for tensors on `device`."""
    if device.type not in KEYS:
        return unavailable(f"torch's symm_mem ops are for {', '.join(KEYS)}; this is {device.type}")
    return next((one for name in NEEDED if isinstance(one := torch_op(name, device.type), Availability)), AVAILABLE)


class TorchSymmMem(Workspaces):
    """The ops of one group on one device, and the memory that they work in.

    Attributes:
        ops: by name, those that all ranks have.
        name: of the group, as torch's ops take it.
        multicast: the `multimem` ops can run.
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
        self._kept: list[Tensor] = []  # outgrown memory that a CUDA graph may still use

    @contextmanager
    def turn(self, op: str, *, workspace: int = 0, sums: int = 0) -> Iterator[None]:
        """Scope of one op: its launches run after those of the op before, on the group's device.

        Args:
            workspace: bytes that torch will ask of its own workspace, the same on all ranks.
            sums: bytes for `summand`.

        Raises:
            RuntimeError: memory would have to grow while a CUDA graph is being captured.
            Also what `raise_if_failed` raises.
        """
        self.raise_if_failed()
        if workspace > self._workspace_bytes:
            self._grow_workspace(op, workspace)
        if sums and (self._sums is None or self._sums.numel() < sums):
            self._grow_sums(op, sums)
        self.calls += 1
        with self.in_turn():
            yield

    def summand(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """This rank's term of a sum, in memory of all ranks and without values yet; inside of its `turn`."""
        assert self._sums is not None
        return self._sums[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _grow_workspace(self, op: str, nbytes: int) -> None:
        size = self._before_growing(op, nbytes, self._workspace_bytes)
        with self._making(size, op):
            outgrown = make_torch_workspace(self._group, self.device, size)
        self._keep_captured(outgrown)
        self._workspace_bytes = size

    def _grow_sums(self, op: str, nbytes: int) -> None:
        old = self._sums
        size = self._before_growing(op, nbytes, 0 if old is None else old.numel())
        with self._making(size, op):
            self._sums, self._handle = self._memory.allocate(size)
        self._keep_captured(old)

    def _before_growing(self, op: str, nbytes: int, have: int) -> int:
        """How much to make. No peer reads memory that this rank frees: making the new waits for all ranks."""
        check_not_capturing(
            self.device, f"{op} needs {nbytes} bytes of symmetric memory for torch's op, and the group has {have}"
        )
        if self._turn.done is not None:
            self._turn.done.synchronize()
        return rounded(nbytes, _LEAST_BYTES, _ROUNDED_TO)

    def _keep_captured(self, outgrown: Tensor | None) -> None:
        if outgrown is not None and self._elsewhere.captured:
            self._kept.append(outgrown)
