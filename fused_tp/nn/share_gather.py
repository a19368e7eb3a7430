"""Column-parallel layers that read the same tensor share one gather of it, wherever the model calls them.

Models call q_proj(x), k_proj(x), v_proj(x) one by one. The first call of such a group computes all outputs by the
multi-weight op; the other calls return the output that is waiting for them. A waiting output is returned only if
calling the layer would compute the same: the same tensor object, not written since (autograd's version counter), the
same unwritten weights, the same autograd and autocast modes. Each output is returned once. Only one group per thread
has waiting outputs, so that an interrupted group (activation checkpointing stops a recomputation as soon as it has all
that it needs) does not keep tensors alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_tp.nn.linear import ColumnParallelLinear, column_forward


class SharedGather:
    """The layers of one group and, between their calls, the waiting outputs."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        # The input, the state at that time, and the outputs by index of the layer.
        self.waiting: tuple[Tensor, tuple[Any, ...], dict[int, Tensor]] | None = None

    def output_of(self, index: int, x: Tensor, *sizes: int | None) -> Tensor:
        """Return the output of layer `index` for x: the waiting one if it is still valid, else recompute all outputs.

        `sizes`: the keywords of the layer's forward.
        """
        if torch.compiler.is_compiling():
            return _output_while_tracing(self, index, x, *sizes)
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias) if p is not None]
        # A DTensor and its local tensor have separate version counters: a write through one does not move the other's.
        tensors = [x, *parameters, *(p._local_tensor for p in parameters if isinstance(p, DTensor))]
        if True in [t.is_inference() for t in tensors]:  # such tensors have no version counter
            return column_forward([self.layers[index]], x, *sizes)[0]
        versions = [t._version for t in tensors]
        written = torch.is_inference_mode_enabled(), versions, [(id(p), p.requires_grad) for p in parameters]
        state = (*_modes(x, *sizes), *written)
        source, source_state, outputs = self.waiting or (None, None, {})
        if source is not x or source_state != state or index not in outputs:
            outputs = dict(enumerate(column_forward(self.layers, x, *sizes)))
            last = _last.group()
            if last is not None:
                last.waiting = None
            _last.group = weakref.ref(self)
        output = outputs.pop(index)
        self.waiting = (x, state, outputs) if outputs else None
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "waiting": None}


class _Last(threading.local):
    """Group of this thread with waiting outputs, by weak reference, so that a model can be freed."""

    group: Callable[[], SharedGather | None] = staticmethod(lambda: None)


_last = _Last()


def share_gather(layers: Sequence[Any]) -> None:
    """Make column-parallel layers that a model calls with the same tensor share one gather and one op.

    They must agree in mesh, in_features, dtype and sequence parallelism, and a layer may be in one group only. Results
    do not change, only the time of their computation. Works under autograd, no_grad, torch.compile and activation
    checkpointing; under inference_mode, which counts no writes, each layer computes separately.

    Example:
        >>> share_gather([attention.q_proj, attention.k_proj, attention.v_proj])
    """
    group = SharedGather(layers)
    for index, layer in enumerate(layers):
        layer._shared = (group, index)


def _modes(x: Tensor, *sizes: int | None) -> tuple[Any, ...]:
    """Autograd and autocast modes, and sizes, that outputs depend on."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast, x.requires_grad, *sizes


# ---- under torch.compile -----------------------------------------------------------------------------------------
#
# A traced program cannot read a version counter (it would be data-dependent), and inside a checkpointed region it may
# not write to outside objects, such as the group. So while tracing, the outputs are attached to x itself, which exists
# in the graph only. The fake tensors, whose version counters move during tracing, decide whether an output may be
# returned: `comptime` reads them, and `assume_constant_result` returns the answer as a constant of the trace.

_PARTS = "_fused_tp_parts"


class _TraceAnswers(threading.local):
    """Last outputs and last answer of this thread's trace. Fake tensors are held weakly: they die with their trace."""

    def __init__(self) -> None:
        self.stored: tuple[Any, int] | None = None  # fake x of the last outputs, and its version then
        self.yes = False


_answers = _TraceAnswers()


def _note_stored(ctx: Any) -> None:
    fake = ctx.get_local("x").as_fake()
    _answers.stored = (weakref.ref(fake), fake._version)


def _ask_fresh(ctx: Any) -> None:
    fake = ctx.get_local("x").as_fake()
    stored = _answers.stored
    _answers.yes = stored is not None and stored[0]() is fake and stored[1] == fake._version


def _ask_may_hold(ctx: Any) -> None:
    """Ask whether outputs may be attached to x: a checkpointed region may write only to tensors created in it."""
    _answers.yes = ctx.get_local("x").as_proxy().node.graph is ctx.graph()


@torch.compiler.assume_constant_result
def _answer() -> bool:
    return _answers.yes


def _output_while_tracing(group: SharedGather, index: int, x: Tensor, *sizes: int | None) -> Tensor:
    from torch._dynamo.comptime import comptime

    state = _modes(x, *sizes)
    waiting = getattr(x, _PARTS, None)
    if waiting is not None and waiting[0] is group and waiting[1] == state and index in waiting[2]:
        comptime(_ask_fresh)
        if _answer():
            return waiting[2].pop(index)
    comptime(_ask_may_hold)
    if not _answer():
        return column_forward([group.layers[index]], x, *sizes)[0]
    outputs = dict(enumerate(column_forward(group.layers, x, *sizes)))
    output = outputs.pop(index)
    setattr(x, _PARTS, (group, state, outputs))
    comptime(_note_stored)
    return output
