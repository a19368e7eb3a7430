"""Base of the schedules that run kernels over symmetric memory, or copy engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from fused_tp.backends.messages.plain import Plain
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import RowSchedule
from fused_tp.backends.symmetric_memory.workspace import GroupKernels


class KernelSchedule(RowSchedule):
    """Base of the schedules that use kernels or copy engines; ops without one fall back to plain collectives.

    Args:
        kernels: kernels of the group.
        plain: plain schedule of the group, on the messages that fail together with the kernels; None if the ranks are
            threads, which have no messages.
        without: message of the error for ops without a kernel if the ranks are threads.
    """

    def __init__(self, kernels: GroupKernels[Any], plain: Plain | None, without: str) -> None:
        self.rank, self.world_size = kernels.rank, kernels.world_size
        self._kernels = kernels
        self._plain = plain
        self._transport = None if plain is None else plain.transport
        self._without = without

    @property
    def fallback(self) -> Plain:
        """The plain schedule, which runs the calls that have no kernel.

        Raises:
            ValueError: the ranks are threads.
        """
        if self._plain is None:
            raise ValueError(self._without)
        return self._plain

    @property
    def messages(self) -> TorchDist:
        return self.fallback.transport

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return self._kernels.abort_scope(op)

    def _all_reduced(self, partial: Tensor) -> Tensor:
        return self.fallback._all_reduced(partial)

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        """Raise if messages of the group have failed, after which ranks may mean different launches; then compare."""
        if self._transport is not None:
            self._kernels.check_usable()
            self._transport.check(op, dims, x.dtype, x.device)
