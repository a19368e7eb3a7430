"""The short way through an op for a call like one before it: decoding repeats one call, token after token.

A decode-sized matmul streams its whole weight through the caches, so all that runs after it starts cold: each Python
frame then costs 5 to 10 us where it costs 0.2 us in a hot loop (two x86 cores, 16 MiB of weight), and a product of one
row takes 1 ms. The whole way through an op takes 16 frames for checks and choices that come out the same every time;
what is left here are the questions whose answers may have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fused_tp.ops.arguments import check_linear
from fused_tp.runtime import settings, tracing
from fused_tp.runtime.group import GroupLike, GroupSlot, known_group
from fused_tp.schedules.registry import select_schedule

_MOST_REMEMBERED = 1024
_Repeated: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
_CALLS: GroupSlot[dict[object, _Repeated | None]] = GroupSlot(lambda group: {})


def repeated_call(op: str, x: Tensor, weight: Tensor, group: GroupLike) -> _Repeated | None:
    """`call(x, weight)` that does all of `op`; None where the call needs the whole way through it.

    That is so for anything that records, traces or casts (gradients, compilers, modes, profilers, autocast), for tensor
    subclasses, for a group that no op has been called with yet, and for schedules that have no `repeatable` form.

    Raises:
        TypeError, ValueError: x and weight do not fit.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or not (type(x) is Tensor or type(x) is Parameter)
        or not (type(weight) is Tensor or type(weight) is Parameter)
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or not (x.is_cpu and weight.is_cpu)
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.autograd.profiler._is_profiler_enabled
        or tracing.TOOL
        or settings.RAW.get(tracing.NVTX)
        or forward_ad._current_level >= 0
    ):
        return None
    known = known_group(group)
    if known is None:
        return None
    calls = _CALLS[known]
    key = (op, x.shape, weight.shape, x.dtype, weight.dtype, settings.routing())
    try:
        call = calls[key]
    except KeyError:
        check_linear("x", x, weight, None)
        schedule = select_schedule(op, known, x.dtype, x.device, x.shape[:-1].numel(), None, weight.shape[0])
        repeatable: Any = getattr(schedule, "repeatable", None)
        call = None if repeatable is None else repeatable(op, x, weight)
        if len(calls) >= _MOST_REMEMBERED:  # lengths that keep changing
            calls.clear()
        calls[key] = call
    return call
