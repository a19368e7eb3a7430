"""Column-parallel layers that read the same tensor share one gather of it, wherever the model calls them.

Models call q_proj(x), k_proj(x), v_proj(x) one by one. The first call of such a group computes all of them by the
multi-weight op; the others are handed their part. A part is handed out only where calling the layer would give the
same: the same tensor object, not written to since (autograd's version counter), the same unwritten weights, the same
autograd and autocast modes. Each part is handed out once, and only one group per thread has parts waiting, so that a
group that is interrupted (activation checkpointing stops a recomputation as soon as it has what it needs) does not keep
tensors alive.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.nn.linear import ColumnParallelLinear, column_forward


class _Waiting(threading.local):
    """The group of this thread whose parts wait; weakly, so that a model can be freed."""

    def __init__(self) -> None:
        self.group: Callable[[], SharedGather | None] = lambda: None


_waiting = _Waiting()


class _Parts:
    """Outputs computed ahead for a group, with what they were computed from."""

    def __init__(self, x: Tensor, state: tuple[Any, ...], outputs: dict[int, Tensor]) -> None:
        self.x = x
        self.state = state
        self.outputs = outputs  # by index of the layer in its group


class SharedGather:
    """The layers of one group and, between their calls, the outputs that wait for them."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        self.parts: _Parts | None = None

    def output_of(self, index: int, x: Tensor, gather_size: int | None) -> Tensor:
        """Layer `index`'s output for x: the waiting one where that is what the layer would compute, else all anew."""
        if torch.compiler.is_compiling():
            return _output_while_tracing(self, index, x, gather_size)
        written = _written(x, self.layers)
        if written is None:
            return column_forward([self.layers[index]], x, gather_size)[0]
        state = (*_modes(x), torch.is_inference_mode_enabled(), gather_size, *written)
        parts = self.parts
        if parts is not None and parts.x is x and parts.state == state and index in parts.outputs:
            output = parts.outputs.pop(index)
            if not parts.outputs:
                self.parts = None
            return output
        outputs = dict(enumerate(column_forward(self.layers, x, gather_size)))
        output = outputs.pop(index)
        previous = _waiting.group()
        if previous is not None:
            previous.parts = None
        self.parts = _Parts(x, state, outputs)
        _waiting.group = weakref.ref(self)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGather:
        group = SharedGather([])
        memo[id(self)] = group
        group.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return group

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "parts": None}


def share_gather(layers: Sequence[nn.Module]) -> None:
    """Makes column-parallel layers that a model calls with the same tensor share one gather and one op.

    The layers' results do not change, only when they are computed. Works under autograd, no_grad, torch.compile and
    activation checkpointing; under inference_mode each layer computes for itself, as nobody counts there whether a
    tensor was written to (generate under no_grad). A layer can be in one group only.

    Raises:
        TypeError: something other than ColumnParallelLinear.
        ValueError: fewer than two layers, layers of different mesh, in_features, dtype or sequence parallelism, or one
            that is in a group already.

    Example:
        >>> share_gather([attention.q_proj, attention.k_proj, attention.v_proj])
    """
    checked: list[ColumnParallelLinear] = []
    for layer in layers:
        if not isinstance(layer, ColumnParallelLinear):
            raise TypeError(f"share_gather takes ColumnParallelLinear layers, not {type(layer).__name__}.")
        checked.append(layer)
    if len(checked) < 2 or len({id(layer) for layer in checked}) < len(checked):
        raise ValueError(f"share_gather needs two or more different layers, got {len(checked)}.")
    first = checked[0]
    for layer in checked:
        if layer._shared is not None:
            raise ValueError("a layer given to share_gather shares a gather with other layers already.")
        for name in ("mesh", "in_features", "sequence_parallel", "sequence_dim"):
            if getattr(layer, name) != getattr(first, name):
                raise ValueError(
                    f"layers that share a gather must have the same {name}; got {getattr(first, name)} and "
                    f"{getattr(layer, name)}."
                )
        if layer.weight.dtype != first.weight.dtype:
            raise ValueError(
                f"layers that share a gather must have one dtype; got {first.weight.dtype} and {layer.weight.dtype}."
            )
    group = SharedGather(checked)
    for index, layer in enumerate(checked):
        layer._shared = group
        layer._shared_index = index


def _modes(x: Tensor) -> tuple[Any, ...]:
    """The autograd and autocast modes that outputs depend on."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast, x.requires_grad


def _written(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[int | bool] | None:
    """Which tensors the outputs come from, and how often each was written to; None where that is not counted."""
    parameters = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    # A DTensor and its local part count apart, and a write through one does not move the counter of the other.
    tensors = [x, *parameters, *(p._local_tensor for p in parameters if isinstance(p, DTensor))]
    if any(t.is_inference() for t in tensors):
        return None
    return [*(t._version for t in tensors), *map(id, parameters), *(p.requires_grad for p in parameters)]


# ---- under torch.compile -----------------------------------------------------------------------------------------
#
# A traced program cannot ask for a version counter (it would be data-dependent), and inside a checkpointed region it
# may not write to objects from outside, such as the group. So while tracing, the parts hang on x itself, which lives in
# the graph only; and whether they may be handed out is asked of the fake tensors, whose counters move as the program is
# traced. `comptime` looks at these, `assume_constant_result` brings the answer back as a constant of the trace.

_PARTS = "_fused_tp_parts"


class _TraceAnswers(threading.local):
    """What the trace of this thread has stored and been told. Fakes are held weakly: they die with their trace."""

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


def _output_while_tracing(group: SharedGather, index: int, x: Tensor, gather_size: int | None) -> Tensor:
    from torch._dynamo.comptime import comptime

    state = (*_modes(x), gather_size)
    waiting = getattr(x, _PARTS, None)
    if waiting is not None and waiting[0] is group and waiting[1] == state and index in waiting[2]:
        comptime(_ask_fresh)
        if _answer():
            return waiting[2].pop(index)
    comptime(_ask_may_hold)
    if not _answer():
        return column_forward([group.layers[index]], x, gather_size)[0]
    outputs = dict(enumerate(column_forward(group.layers, x, gather_size)))
    output = outputs.pop(index)
    setattr(x, _PARTS, (group, state, outputs))
    comptime(_note_stored)
    return output
