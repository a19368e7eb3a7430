"""Column-parallel layers that read the same tensor share one gather of it, wherever the model calls them.

Models call q_proj(x), k_proj(x), v_proj(x) one by one. The first call of such a group computes all of them by the
multi-weight op; the others are handed their part. A part is handed out only where calling the layer would give the
same: the same tensor object, not written to since (autograd's version counter), the same unwritten weights, the same
autograd and autocast modes. Each part is handed out once, and only one group per thread has parts waiting, so that a
group that is interrupted (activation checkpointing stops a recomputation as soon as it has what it needs) does not keep
tensors alive.
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
    """The layers of one group and, between their calls, the outputs that wait for them."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        # What the outputs were computed from, and the outputs by index of the layer.
        self.waiting: tuple[Tensor, tuple[Any, ...], dict[int, Tensor]] | None = None

    def output_of(self, index: int, x: Tensor, *sizes: int | None) -> Tensor:
        """Layer `index`'s output for x: the waiting one where that is what the layer would compute, else all anew.

        `sizes`: the keywords of its forward.
        """
        if torch.compiler.is_compiling():
            return _output_while_tracing(self, index, x, *sizes)
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias) if p is not None]
        # A DTensor and its local part count writes apart: one through the one does not move the counter of the other.
        tensors = [x, *parameters, *(p._local_tensor for p in parameters if isinstance(p, DTensor))]
        if any(t.is_inference() for t in tensors):  # it has no write counter
            return column_forward([self.layers[index]], x, *sizes)[0]
        versions = tuple(t._version for t in tensors)
        written = torch.is_inference_mode_enabled(), versions, *((id(p), p.requires_grad) for p in parameters)
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
    """The group of this thread whose parts wait; weakly, so that a model can be freed."""

    group: Callable[[], SharedGather | None] = staticmethod(lambda: None)


_last = _Last()


def share_gather(layers: Sequence[Any]) -> None:
    """Makes column-parallel layers that a model calls with the same tensor share one gather and one op.

    They must agree in mesh, in_features, dtype and sequence parallelism, and each in one group only. Results do not
    change, only when they are computed. Works under autograd, no_grad, torch.compile and activation checkpointing;
    under inference_mode, which counts no writes, each layer computes for itself.

    Example:
        >>> share_gather([attention.q_proj, attention.k_proj, attention.v_proj])
    """
    group = SharedGather(layers)
    for index, layer in enumerate(layers):
        layer._shared = (group, index)


def _modes(x: Tensor, *sizes: int | None) -> tuple[Any, ...]:
    """The modes that outputs depend on."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast, x.requires_grad, *sizes


# ---- under torch.compile -----------------------------------------------------------------------------------------
#
# A traced program cannot ask for a version counter (it would be data-dependent), and inside a checkpointed region it
# may not write to objects from outside, such as the group. So while tracing, the parts hang on x itself, which lives in
# the graph only; and whether they may be handed out is asked of the fake tensors, whose counters move as the program is
# traced. `comptime` looks at these, `assume_constant_result` brings the answer back as a constant of the trace.

_PARTS = "_fused_tp_parts"


class _TraceAnswers(threading.local):
    """What this thread's trace has stored and received. Fakes are held weakly: they die with their trace."""

    def __init__(self) -> None:
        self.stored: tuple[Any, int] | None = None  # fake x of the last parts, its version then
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
    """Inside a checkpointed region only tensors made there may be written to; there every layer computes for itself."""
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
