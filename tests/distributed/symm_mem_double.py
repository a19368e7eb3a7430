"""torch's symm_mem ops on CPU tensors, for several processes.

Ops that torch implements in Python run unchanged: the functions that it registers for CUDA, over CPU shared memory
instead of symmetric memory, with streams that complete at once. The all-reduce kernels exist in CUDA only, so test
doubles emulate the checks, the rounding and the memory changes of CUDASymmetricMemoryOps.cu.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor

from fused_tp.backends.symmetric_memory import symm_mem
from fused_tp.backends.symmetric_memory.symm_mem import CpuSymmetricMemory
from fused_tp.backends.torch_symm_mem import torch_symm_mem as transport
from fused_tp.core.group import group_by_name

PYTHON_OPS = (
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
)
CALLED: list[str] = []  # names of the ops that have run in this process

_memories: dict[int, CpuSymmetricMemory] = {}  # by address of this rank's buffer
_workspaces: dict[str, tuple[Tensor, CpuSymmetricMemory]] = {}  # by group


class _Stream:
    """Stream whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, *_: object) -> bool:
        return True

    wait_stream = wait_event = record = wait


def _allocate(group: Any, nbytes: int) -> tuple[Tensor, Any]:
    tensor, handle = _allocate_cpu(group, nbytes)
    _memories[tensor.data_ptr()] = handle
    weakref.finalize(handle, _memories.pop, tensor.data_ptr(), None)
    return tensor, handle


_allocate_cpu = symm_mem.allocate_cpu


def workspace(group_name: str, min_size: int) -> CpuSymmetricMemory:
    """Replacement for `get_symm_mem_workspace`, which grows within a call if necessary."""
    known = _workspaces.get(group_name)
    if known is None or known[0].numel() < min_size:
        known = _workspaces[group_name] = _allocate_cpu(group_by_name(group_name), min_size)
    return known[1]


def _rendezvous(tensor: Tensor, group: object) -> CpuSymmetricMemory | None:
    return _memories.get(tensor.untyped_storage().data_ptr())


def _as_on_cuda(name: str) -> Callable[..., Any]:
    """Wrap torch's own implementation of an op."""
    run = getattr(torch_symm_mem, "_fused" + name.removeprefix("fused") if name.startswith("fused") else name)

    def op(*args: Any, **keywords: Any) -> Any:
        CALLED.append(name)
        with ExitStack() as patches:
            for where, attribute, double in (
                (torch.cuda, "current_stream", _Stream),
                (torch.cuda, "Event", _Stream),
                (torch.cuda, "_sleep", lambda cycles: None),
                (torch_symm_mem, "_get_backend_stream", _Stream),
                (torch_symm_mem, "get_symm_mem_workspace", workspace),
                (torch_symm_mem, "rendezvous", _rendezvous),
            ):
                patches.enter_context(mock.patch.object(where, attribute, double))
            return run(*args, **keywords)

    return op


# -- test doubles of the kernels ---------------------------------------------------------------------------------------


def _terms(x: Tensor, reduce_op: str, name: str, *, multicast: bool) -> tuple[list[Tensor], CpuSymmetricMemory]:
    """Make the checks of the kernels' launchers, wait for all ranks, and return their terms."""
    CALLED.append(name)
    memory = _rendezvous(x, None)
    assert x.is_contiguous() and reduce_op == "sum" and x.dtype in (torch.float32, torch.bfloat16), name
    assert memory is not None, f"{name}: input must be allocated with empty_strided_p2p()."
    assert x.nbytes % max(4, x.element_size()) == 0, f"{name}: input size must be at least 4-byte aligned."
    assert getattr(memory, "multicast_ptr", 0) or not multicast, f"{name}: multicast support is required."
    memory.barrier()
    offset = int(x.storage_offset())
    return [memory.get_buffer(rank, x.shape, x.dtype, offset) for rank in range(memory.world_size)], memory


def _in_rank_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term  # bfloat16 is rounded each time
    return total


def _by_the_switch(terms: list[Tensor]) -> Tensor:
    return torch.stack(list(reversed(terms))).float().sum(0).to(terms[0].dtype)


def _all_reduce(name: str, total: Callable[[list[Tensor]], Tensor], *, in_place: bool, multicast: bool) -> Any:
    def op(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
        terms, memory = _terms(x, reduce_op, name, multicast=multicast)
        result = total(terms)
        memory.barrier()
        return x.copy_(result) if in_place else result

    return op


KERNELS = {
    "one_shot_all_reduce": _all_reduce("one_shot_all_reduce", _in_rank_order, in_place=False, multicast=False),
    "two_shot_all_reduce_": _all_reduce("two_shot_all_reduce_", _in_rank_order, in_place=True, multicast=False),
    "multimem_one_shot_all_reduce": _all_reduce(
        "multimem_one_shot_all_reduce", _by_the_switch, in_place=False, multicast=True
    ),
    "multimem_all_reduce_": _all_reduce("multimem_all_reduce_", _by_the_switch, in_place=True, multicast=True),
}


@contextmanager
def symm_mem_on_cpu(*, without: tuple[str, ...] = (), switch: bool = False) -> Iterator[None]:
    """Enable the schedule `symm_mem` for CPU tensors.

    Args:
        without: ops to leave out, as if this torch lacked them.
        switch: give ranks multicast memory.
    """
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    CALLED.clear()
    try:
        for name, op in ({name: _as_on_cuda(name) for name in PYTHON_OPS} | KERNELS).items():
            if name not in without:
                library.impl(name, op)
        with ExitStack() as patches:
            patches.enter_context(mock.patch.dict(transport.DISPATCH_KEYS, cpu="CPU"))
            patches.enter_context(mock.patch.object(symm_mem, "allocate_cpu", _allocate))
            patches.enter_context(mock.patch.object(torch_symm_mem, "get_symm_mem_workspace", workspace))
            if switch:
                patches.enter_context(mock.patch.object(CpuSymmetricMemory, "multicast_ptr", 1, create=True))
                patches.enter_context(
                    mock.patch.object(symm_mem.GroupMemory, "has_multicast", property(_yes, _ignored), create=True)
                )
            yield
    finally:
        library._destroy()
        _workspaces.clear()


def _yes(memory: object) -> bool:
    return True


def _ignored(memory: object, value: object) -> None: ...
