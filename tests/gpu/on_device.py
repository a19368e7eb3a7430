"""Run checks that are written for the CPU on a GPU: each call moves tensors and gradients there and back.

The same checks thus test the CPU build of the kernels, the doubles of NCCL and CUDA, and a GPU. With the CPU as the
device nothing is moved, so these tests can themselves be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends.schedule import GatherMatmul
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import Pending, sum_in_rank_order
from tests.reference import seeded

OPS = (
    "all_gather_matmul",
    "all_reduce_rms_norm",
    "column_parallel_matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "ring_attention",
)


def device_of(rank: int, kind: str) -> torch.device:
    """GPU of a rank that is a process, possibly shared with other ranks; or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_sharing(world_size: int) -> dict[str, str]:
    """Environment variables that torch and NCCL require if several ranks share a GPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world_size:
        return {}
    return {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def there(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device` with the same strides and storage offset."""
    if device.type == "cpu":
        return tensor
    if tensor.requires_grad or tensor.numel() == 0:
        return tensor.to(device)
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((held,), (1,), 0).to(device)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def mapped(value: Any, change: Callable[[Tensor], Tensor], pending: Callable[[Any], Any] = lambda one: one) -> Any:
    """Apply `change` to all tensors of `value`, also in lists and (named) tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if callable(getattr(value, "wait", None)):
        return pending(value)
    if isinstance(value, list):
        return [mapped(one, change, pending) for one in value]
    if isinstance(value, tuple):
        items = [mapped(one, change, pending) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class OnDevice:
    """Proxy of `target`, whose methods take and return CPU tensors and compute on `device`.

    Args:
        after: called when the results of a method are available, to raise errors that a kernel has reported.
    """

    def __init__(self, target: Any, device: torch.device, after: Callable[[], None] = lambda: None) -> None:
        self.__dict__.update(target=target, _to=device, _after=after)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        return on_device(value, self._to, self._after) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.target, name, value)


class _Waiting(Pending[Any]):
    def __init__(self, pending: Any, home: Callable[[Any], Any]) -> None:
        self._pending = pending
        self._home = home

    def wait(self) -> Any:
        return self._home(self._pending.wait())


def on_device(fn: Callable[..., Any], device: torch.device, after: Callable[[], None] = lambda: None) -> Any:
    """Wrap `fn` to compute on `device`. An argument `out` is filled, also if it is an input; gradients flow back."""

    def home(value: Any) -> Any:
        result = mapped(value, lambda t: t.to("cpu"), lambda pending: _Waiting(pending, home))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return result

    def call(*args: Any, **keywords: Any) -> Any:
        moved: dict[int, Tensor] = {}

        def go(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = there(tensor, device)
            return moved[id(tensor)]

        out = keywords.get("out")
        result = fn(*mapped(args, go), **{name: mapped(value, go) for name, value in keywords.items()})
        if out is not None and result is moved[id(out)]:
            if result is not out:
                out.copy_(result)
            result = out
        else:
            result = home(result)
        after()
        return result

    return call


class Graph:
    """A CUDA graph of `work`; on the CPU a replay calls `work` again.

    Args:
        turn: context of the capture, which begins by synchronizing the whole device.
    """

    def __init__(
        self,
        device: torch.device,
        work: Callable[[], list[Tensor]],
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._work = work
        self._graph = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            if stream == torch.cuda.default_stream():
                stream = torch.cuda.Stream(device)  # the default stream cannot be captured
            with turn(), torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._results = work()

    def replay(self) -> list[Tensor]:
        if self._graph is None:
            return self._work()
        self._graph.replay()
        return self._results


@contextmanager
def public_ops_on(device: torch.device) -> Iterator[None]:
    """Let `fused_tp.<op>` take and return CPU tensors and compute on `device`."""
    with ExitStack() as stack:
        for name in OPS:
            stack.enter_context(mock.patch.object(fused_tp, name, on_device(getattr(fused_tp, name), device)))
        yield


def why_not(group: Any, schedule: str, device: torch.device) -> str | None:
    """Reason that `group` cannot use `schedule` on `device`, or None. Collective over the group."""
    from fused_tp.backends.registry import SCHEDULES

    spec = SCHEDULES.get(schedule)
    if spec is None:
        return f"there is no schedule {schedule}"
    if spec.device_types and device.type not in spec.device_types:
        return f"{schedule} is for {', '.join(spec.device_types)}, not {device.type}"
    return spec.available(resolve_group(group), device).reason or None


PATIENCE = "60"  # seconds, for a GPU and for NCCL to start


def environment(world_size: int, **more: str) -> dict[str, str]:
    """Environment of ranks that may have to share a GPU."""
    return {**gpu_sharing(world_size), "FUSED_TP_TIMEOUT": PATIENCE, **more}


def unwrapped(outcomes: Sequence[Any]) -> list[Any]:
    """Results of the ranks; skip the test if rank 0 returned a reason why the ranks cannot run it."""
    results = [outcome.unwrap() for outcome in outcomes]
    if isinstance(results[0], str) and results[0]:
        pytest.skip(f"these ranks cannot run it: {results[0]}")
    return results


def in_graph(group: Any, schedule: Any, device: torch.device, raise_failure: Callable[[], None] = lambda: None) -> None:
    """Capture gathers and sums in one graph and replay it with other inputs each time, with calls in between."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows, columns = 6 * world_size, 16
    eye = torch.eye(columns, dtype=torch.bfloat16, device=device)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    def work() -> list[Tensor]:
        (gathered,), _ = schedule.all_gather_matmul(GatherMatmul(x, [eye], [None], 0))
        scattered = schedule.matmul_reduce_scatter([(x, eye)], None, scatter_dim=0)
        return [gathered, scattered, schedule.matmul_all_reduce([(x, eye)], None)]

    def check(run: Callable[[], list[Tensor]], seed: int) -> None:
        terms = torch.stack([seeded(rows, columns, dtype=x.dtype, seed=100 * seed + r) for r in range(world_size)])
        x.copy_(terms[rank])
        gathered, scattered, summed = (result.cpu() for result in run())
        raise_failure()
        total = sum_in_rank_order(terms)
        assert torch.equal(gathered, terms.flatten(0, 1)) and torch.equal(summed, total)
        assert torch.equal(scattered, total.chunk(world_size)[rank])

    for seed in range(2):
        check(work, seed)
    graph = Graph(device, work)
    for seed in range(2, 8):
        check(graph.replay, seed)
        if seed % 2:
            check(work, seed)
    dist.barrier(group)
