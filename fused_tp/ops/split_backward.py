"""Backward of an op in two halves that autograd can run separately: gradients of inputs, gradients of weights.

Zero-bubble pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241) send the gradient of a stage's
input as early as possible and fill bubbles with the gradients of weights. torch calls autograd for the inputs, and
later for the weights. A node cannot know which gradients a pass requests (pytorch issues 166577 and 174017), so that a
single node would compute both halves twice. Inside `split_backward` an op creates three nodes, and autograd runs those
that lead to the requested gradients:

    inputs  ---> _Half (inputs)  ---.
                                    +--> _Join ---> outputs
    weights ---> _Half (weights) ---'

A half returns tensors with the shapes of the outputs and no memory. If both halves are requested, the half of the
inputs runs first, which minimizes the wait of other ranks and stages.

Not the default, because communication no longer overlaps the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from fused_tp.ops.op import Op, Saved

Pending = list[Callable[[], None]]


class _BackwardMode:
    """Global mode that determines the backward nodes of ops.

    The mode is per process, not per thread: on GPUs, backward runs in autograd's own threads, and activation
    checkpointing reruns ops in these threads, which must create the same nodes as the first run.
    """

    depth = 0  # nesting depth of split_backward
    pending: Pending | None = None  # the list of the active `DeferredWeightGradients`
    task = -1  # backward pass for which `pending` is valid, -1 outside of any; other passes must not append to it


def is_split() -> bool:
    """True if ops called now create separate nodes for the gradients of inputs and of weights."""
    return _BackwardMode.depth > 0 or _pending() is not None


def _pending() -> Pending | None:
    if _BackwardMode.pending is None or torch._C._current_graph_task_id() != _BackwardMode.task:
        return None
    return _BackwardMode.pending


@contextmanager
def split_backward() -> Iterator[None]:
    """Context manager that splits the ops' backward in halves: gradients of inputs, later gradients of weights.

    Use it for the zero-bubble schedules of torch.distributed.pipelining (ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble, ScheduleDualPipeV): without it, a step communicates everything in backward twice. Other
    schedules get the same gradients, but lose the overlap of communication with the gradients of weights.

    Enclose the whole step: the mode is read in forward, and activation checkpointing reruns forward in backward. It
    applies to all threads. Backward of code compiled by torch.compile is not split.

    Example:
        with fused_tp.split_backward():
            schedule.step(tokens)

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
    """
    _BackwardMode.depth += 1
    try:
        yield
    finally:
        _BackwardMode.depth -= 1


class DeferredWeightGradients:
    """Weight gradients of one pipeline stage that are deferred beyond backward.

    Between `begin_...` and `end`, ops defer them; `take` returns those deferred since its last call.
    """

    def __init__(self) -> None:
        self._pending: Pending = []

    def begin_forward(self) -> None:
        """Start deferring, and drop pending gradients: they belong to a backward pass that torch ran only to infer
        the shapes of gradients."""
        self._pending.clear()
        self.begin_backward()

    def begin_backward(self) -> None:
        _BackwardMode.pending, _BackwardMode.task = self._pending, torch._C._current_graph_task_id()

    def end(self) -> None:
        _BackwardMode.pending = None

    def take(self) -> Callable[[], None]:
        """Return a function that computes the pending gradients and adds them to the weights' `grad` or `main_grad`."""
        self.end()
        pending = self._pending[:]
        self._pending.clear()

        def run() -> None:
            while pending:
                pending.pop(0)()

        return run


def apply_split(op: Op[Any], run: Callable[[], Any], args: Any, values: Sequence[Any]) -> Any:
    """Return the results of `run()`, which is `op` on `args`, with a split backward; None if only one half exists.

    Args:
        values: `args`, flattened: no NamedTuple inside another.
    """
    inputs, weights = _needing_grad(op, values, weights=False), _needing_grad(op, values, weights=True)
    pending = _pending()
    if not weights or not (inputs or pending is not None):
        return None
    with torch.no_grad():
        outputs = run()
    split = _Split(op, args, [outputs] if isinstance(outputs, Tensor) else outputs)
    if pending is not None:
        # An empty leaf: without it, a call whose inputs need no gradient would get no autograd node.
        leaf = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        of_inputs = _Half.apply(split, False, *inputs) if inputs else ()
        joined = _JoinDeferred.apply(split, [get_gradient_edge(w) for w in weights], pending, leaf, *of_inputs)
    else:
        # The engine runs the youngest node that is ready: inputs before weights.
        of_weights = _Half.apply(split, True, *weights)
        joined = _Join.apply(split, *of_weights, *_Half.apply(split, False, *inputs))
    del split.args, split.outputs  # the nodes have saved them through autograd
    return list(joined) if op.returns_list else joined[0] if isinstance(outputs, Tensor) else joined


def _needing_grad(op: Op[Any], values: Sequence[Any], *, weights: bool) -> list[Tensor]:
    return [
        t
        for at, value in enumerate(values)
        if (at in op.weights_at) == weights
        for t in (value if type(value) is list else (value,))
        if isinstance(t, Tensor) and t.requires_grad
    ]


class _Split:
    """State of one call of an op, shared by its nodes.

    Attributes:
        args, outputs: arguments and results; deleted once the nodes exist.
        kept: output gradients (with their versions) and the value that the inputs' half keeps for the weights' half.
    """

    def __init__(self, op: Op[Any], args: Any, outputs: Sequence[Tensor]) -> None:
        self.op, self.args, self.outputs = op, args, outputs
        self.kept: tuple[list[Any], Any] | None = None

    def save(self, ctx: Any) -> None:
        ctx.split = self
        # Detached: otherwise they would reference the node that returns them, and that node this object (a cycle).
        self.op.setup_context(ctx, self.args, [y.detach() for y in self.outputs])

    def gradients(self, ctx: Any, saved: Saved[Any], grads: Sequence[Any], *, weights: bool) -> list[Tensor | None]:
        """Gradients of the tensors that `_needing_grad` returns, in its order, from gradients of the outputs."""
        op, given = self.op, [(d, None if d is None else d._version) for d in grads]
        if weights and self.kept is not None and _same(self.kept[0], given):
            saved.kept = self.kept[1]
        half = op.grad_weight if weights else op.grad_input
        found = op.run_half(ctx, half, saved, [list(grads)] if op.returns_list else grads)
        self.kept = None if weights or saved.kept is None else (given, saved.kept)
        return [
            grad
            for at, (name, needs) in enumerate(zip(op.fields, ctx.needs, strict=True))
            if (at in op.weights_at) == weights
            for grad, needed in _pairs(found.get(name), needs)
            if needed
        ]


def _pairs(grad: Any, needs: Any) -> Iterator[tuple[Tensor | None, bool]]:
    if not isinstance(needs, list):
        yield grad, needs
    else:
        yield from zip([None] * len(needs) if grad is None else grad, needs, strict=True)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(a is b and version == now for (a, version), (b, now) in zip(one, other, strict=True))


class _Half(Function):
    """Node for one half of backward. Each tensor that gets a gradient is a separate argument."""

    @staticmethod
    def forward(ctx: Any, split: _Split, weights: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        split.save(ctx)
        ctx.weights = weights
        return tuple(y.new_empty(()).expand(y.shape) for y in split.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        split: _Split = ctx.split
        return None, None, *split.gradients(ctx, split.op.saved(ctx), grads, weights=ctx.weights)


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, split: _Split, *halves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(split.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *grads, *grads


class _JoinDeferred(Function):
    """Joining node for deferred weights: its backward queues their gradients, to be accumulated through `edges`."""

    @staticmethod
    def forward(
        ctx: Any, split: _Split, edges: list[GradientEdge], pending: Pending, leaf: Tensor, *half: Tensor
    ) -> tuple[Tensor, ...]:
        split.save(ctx)
        ctx.edges, ctx.pending, ctx.inputs = edges, pending, bool(half)
        return tuple(split.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.split.op.saved(ctx)  # autograd frees these tensors when this returns
        ctx.pending.append(partial(_accumulate, ctx, saved, grads))
        return None, None, None, None, *(grads if ctx.inputs else ())


@torch.no_grad()
def _accumulate(ctx: Any, saved: Saved[Any], grads: Sequence[Tensor | None]) -> None:
    found = ctx.split.gradients(ctx, saved, grads, weights=True)
    pairs = [(edge, grad) for edge, grad in zip(ctx.edges, found, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
