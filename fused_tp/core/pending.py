"""Base of all transports: asynchronous results, the order of a sum, and checksums of calls."""

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

# torch 2.13 renamed these: it warns about the old names, and 2.12 and earlier lack the new ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol[T_co]):
    """A transfer that has been started. `wait` finishes it, within the deadline, and may be called once."""

    def wait(self) -> T_co: ...


class Done(Pending[T_co]):
    """A result that is available already."""

    def __init__(self, value: T_co) -> None:
        self._value = value

    def wait(self) -> T_co:
        return self._value


class After(Pending[T_co]):
    """A result that `finish` computes when it is waited for."""

    def __init__(self, finish: Callable[[], T_co]) -> None:
        self._finish = finish

    def wait(self) -> T_co:
        return self._finish()


def when(moving: Pending[object], out: T) -> Pending[T]:
    """`out`, once `moving` has finished, which fills it."""

    def finish() -> T:
        moving.wait()
        return out

    return After(finish)


def start_thread(thread: Thread) -> None:
    """Start `thread`; raise a RuntimeError that names the limit if the system allows no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"No thread could be started ({error}): most likely this user has as many threads as RLIMIT_NPROC allows "
            "(ulimit -u), or this container as its limit of pids; raise that, or run fewer processes and threads."
        ) from error


def current_stream(device: torch.device) -> int:
    """Handle of the current stream; 0 on the CPU. Making a torch.cuda.Stream object would take a microsecond."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of sums over ranks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_in_rank_order(terms: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum of `terms` [W, ...] over dim 0, plus `bias`, accumulated in rank order and rounded once to terms' dtype.

    It adds one term at a time instead of `terms.sum(0)`, which may split the terms over several accumulators in an
    order that depends on the shape, so that two ranks that sum different slices would round differently. The result is
    allocated separately, so that it does not keep all terms alive.
    """
    dtype = terms.dtype
    total = terms[0].to(accumulate_dtype(dtype), copy=True)
    for term in terms[1:]:
        total.add_(term)
    if bias is not None:
        total.add_(bias)
    return total.to(dtype)


# -- checksums: ranks compare their arguments within an exchange that they make anyway ---------------------------------


def checksum(words: Any) -> int:
    """Checksum of text or bytes, in 24 bits, which a float of any transport holds exactly."""
    return zlib.crc32(words.encode() if isinstance(words, str) else words) & 0xFFFFFF


def check_equal(checksums: Sequence[float], did: str, then: str) -> None:
    """Raise RankMismatchError unless all ranks have rank 0's checksum. In the message, `did` says what the differing
    ranks have done, and `then` this rank's state and the remedy."""
    for rank, theirs in enumerate(checksums):
        if theirs != checksums[0]:
            raise RankMismatchError(f"Ranks 0 and {rank} {did} (checksums {checksums[0]:.0f} and {theirs:.0f}){then}")
