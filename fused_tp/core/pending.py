"""Helpers of all transports: asynchronous results, sums in rank order, and checksums of calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.core.errors import RankMismatchError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# torch 2.13 renamed these functions: it warns about the old names, and torch 2.12 lacks the new names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol[T_co]):
    """A started transfer. `wait` waits until the deadline at most and returns the result; call it at most once."""

    def wait(self) -> T_co: ...


class PendingValue(Pending[T_co]):
    """A `Pending` whose result is already available."""

    def __init__(self, value: T_co) -> None:
        self._value = value

    def wait(self) -> T_co:
        return self._value


class PendingCall(Pending[T_co]):
    """A `Pending` whose `wait` returns `finish()`."""

    def __init__(self, finish: Callable[[], T_co]) -> None:
        self._finish = finish

    def wait(self) -> T_co:
        return self._finish()


def pending_output(transfer: Pending[object], out: T) -> Pending[T]:
    """Return a `Pending` that waits for `transfer`, which fills `out`, and then returns `out`."""

    def finish() -> T:
        transfer.wait()
        return out

    return PendingCall(finish)


def start_thread(thread: Thread) -> None:
    """Start `thread`; raise a RuntimeError that names the limit if the system allows no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"No thread could be started ({error}). Most likely RLIMIT_NPROC (ulimit -u) of this user or the pids "
            "limit of this container is reached. Raise the limit, or run fewer processes and threads."
        ) from error


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream of `device`; 0 on the CPU. Creating a torch.cuda.Stream takes 1 us."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of sums over ranks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_in_rank_order(terms: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the sum of `terms` [W, ...] over dim 0 plus `bias`, accumulated in rank order and rounded once.

    Terms are added one at a time. `terms.sum(0)` may use several accumulators, in an order that depends on the shape,
    so ranks that sum slices of different shapes would round differently. The result does not share memory with
    `terms`, so that it does not keep all terms alive.
    """
    dtype = terms.dtype
    total = terms[0].to(accumulate_dtype(dtype), copy=True)
    for term in terms[1:]:
        total.add_(term)
    if bias is not None:
        total.add_(bias)
    return total.to(dtype)


# -- checksums of arguments, which ranks add to an existing exchange to compare the arguments --------------------------


def checksum(text: Any) -> int:
    """Return a 24-bit CRC of text or bytes. It is exact in fp32, the dtype in which ranks may send it."""
    return zlib.crc32(text.encode() if isinstance(text, str) else text) & 0xFFFFFF


def check_equal_checksums(checksums: Sequence[float], difference: str, remedy: str) -> None:
    """Raise RankMismatchError unless all `checksums`, one per rank, are equal.

    Args:
        difference: predicate of the message, whose subject is the ranks that differ.
        remedy: end of the message: this rank's state and the remedy.
    """
    for rank, rank_checksum in enumerate(checksums):
        if rank_checksum != checksums[0]:
            raise RankMismatchError(
                f"Ranks 0 and {rank} {difference} (checksums {checksums[0]:.0f} and {rank_checksum:.0f}){remedy}"
            )
