"""Sharing of one gather by column-parallel layers that read the same tensor, in unchanged model code.

Models call q_proj(x), k_proj(x), v_proj(x) one by one. The first call of such a group computes all outputs by the
multi-weight op, and caches the outputs of the other layers. A cached output is returned only if calling the layer would
compute the same: x is the same tensor object, x and the weights were not written since (by autograd's version
counters), and the autograd and autocast modes are the same. Each output is returned once. Only the group called last on
a thread has cached outputs, so those of layers that are never called are freed when the next group is called.
(Activation checkpointing leaves such layers: it stops a recomputation once it has the tensors that it needs.)
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
    """Layers of one group and, between their calls, the cached outputs."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        # Cache: the input, the state at the time of the computation, and the outputs by index of the layer.
        self.cached_outputs: tuple[Tensor, tuple[Any, ...], dict[int, Tensor]] | None = None

    def layer_output(self, index: int, x: Tensor, *sizes: int | None) -> Tensor:
        """Return layer `index`'s output for x: from the cache if it is still valid, else compute all layers' outputs.

        `sizes` are the keyword arguments of the layer's forward.
        """
        if torch.compiler.is_compiling():
            return _output_while_tracing(self, index, x, *sizes)
        parameters = [
            parameter for layer in self.layers for parameter in (layer.weight, layer.bias) if parameter is not None
        ]
        # A DTensor and its local tensor have separate version counters: a write through one does not advance both.
        tensors = [
            x,
            *parameters,
            *(parameter._local_tensor for parameter in parameters if isinstance(parameter, DTensor)),
        ]
        is_inference = True in [tensor.is_inference() for tensor in tensors]  # such tensors have no version counter
        # A hook computes the weight of a pruned layer before each call of the layer. Until then the weight is outdated.
        if is_inference or [True for parameter in parameters if parameter.grad_fn is not None]:
            return column_forward([self.layers[index]], x, *sizes)[0]
        versions = [tensor._version for tensor in tensors]
        write_state = (
            torch.is_inference_mode_enabled(),
            versions,
            [(id(parameter), parameter.requires_grad) for parameter in parameters],
        )
        state = (*_modes(x, *sizes), *write_state)
        cached_x, cached_state, outputs = self.cached_outputs or (None, None, {})
        if cached_x is not x or cached_state != state or index not in outputs:
            outputs = dict(enumerate(column_forward(self.layers, x, *sizes)))
            previous_group = _last_group.group()
            if previous_group is not None:
                previous_group.cached_outputs = None
            _last_group.group = weakref.ref(self)
        output = outputs.pop(index)
        self.cached_outputs = (x, state, outputs) if outputs else None
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "cached_outputs": None}


class _LastGroup(threading.local):
    """Group of this thread that has cached outputs, by weak reference, so that its model can be freed."""

    group: Callable[[], SharedGather | None] = staticmethod(lambda: None)


_last_group = _LastGroup()


def share_gather(layers: Sequence[Any]) -> None:
    """Make column-parallel layers that a model calls with the same tensor share one gather and one op.

    The layers must have equal mesh, in_features, dtype and sequence parallelism, and a layer may be in one group only.
    Results do not change. Supported under autograd, no_grad, torch.compile and activation checkpointing. Under
    inference_mode, where tensors have no version counters, each layer computes separately.

    Example:
        >>> share_gather([attention.q_proj, attention.k_proj, attention.v_proj])
    """
    group = SharedGather(layers)
    for index, layer in enumerate(layers):
        layer._shared_gather = (group, index)


def _modes(x: Tensor, *sizes: int | None) -> tuple[Any, ...]:
    """Return the autograd and autocast modes and the `sizes`, on which outputs depend."""
    device = x.device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast_dtype, x.requires_grad, *sizes


# ---- under torch.compile -----------------------------------------------------------------------------------------
#
# A traced program cannot read a version counter (it would be data-dependent), and inside a checkpointed region it may
# not write to outside objects, such as the group. So while tracing, the outputs are attached to x itself, which exists
# in the graph only. The fake tensors, whose version counters move during tracing, decide whether an output may be
# returned: `comptime` reads them, and `assume_constant_result` returns the answer as a constant of the trace.

_CACHE_ATTRIBUTE = "_fused_tp_parts"


class _TraceAnswers(threading.local):
    """State of this thread's trace. Fake tensors are referenced weakly, because they are freed with their trace."""

    def __init__(self) -> None:
        self.stored_input: tuple[Any, int] | None = None  # fake x of the last outputs, and its version at that time
        self.answer = False  # answer to the last question that `comptime` has evaluated


_trace_answers = _TraceAnswers()


def _note_stored(ctx: Any) -> None:
    fake_x = ctx.get_local("x").as_fake()
    _trace_answers.stored_input = (weakref.ref(fake_x), fake_x._version)


def _ask_if_unchanged(ctx: Any) -> None:
    fake_x = ctx.get_local("x").as_fake()
    stored_input = _trace_answers.stored_input
    _trace_answers.answer = (
        stored_input is not None and stored_input[0]() is fake_x and stored_input[1] == fake_x._version
    )


def _ask_if_attachable(ctx: Any) -> None:
    """Determine whether outputs may be attached to x: a checkpointed region may write only to tensors created in it."""
    _trace_answers.answer = ctx.get_local("x").as_proxy().node.graph is ctx.graph()


@torch.compiler.assume_constant_result
def _last_answer() -> bool:
    return _trace_answers.answer


def _output_while_tracing(group: SharedGather, index: int, x: Tensor, *sizes: int | None) -> Tensor:
    from torch._dynamo.comptime import comptime

    state = _modes(x, *sizes)
    cached_entry = getattr(x, _CACHE_ATTRIBUTE, None)
    if cached_entry is not None and cached_entry[0] is group and cached_entry[1] == state and index in cached_entry[2]:
        comptime(_ask_if_unchanged)
        if _last_answer():
            return cached_entry[2].pop(index)
    comptime(_ask_if_attachable)
    if not _last_answer():
        return column_forward([group.layers[index]], x, *sizes)[0]
    outputs = dict(enumerate(column_forward(group.layers, x, *sizes)))
    output = outputs.pop(index)
    setattr(x, _CACHE_ATTRIBUTE, (group, state, outputs))
    comptime(_note_stored)
    return output
