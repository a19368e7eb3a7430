"""Backward of an op in two halves that autograd can run apart: gradients of inputs, gradients of weights.

Zero-bubble pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241) send the gradient of a stage's
input as early as possible and fill bubbles with the gradients of weights. torch asks autograd for one, later for the
other. A node cannot know which it is run for (pytorch issues 166577 and 174017), so that one node computes both, twice.
Inside `split_backward` an op makes three nodes, and autograd runs those that lead to what was asked for:

    inputs  ---> _Half (inputs)  ---.
                                    +--> _Join ---> outputs
    weights ---> _Half (weights) ---'

What a half returns has the shape of the outputs and no memory. Where both halves are asked for, that of the inputs runs
first, so that the ranks or stages that wait for it wait least.

What it costs: communication no longer hides behind the gradients of weights. So it is not the default.
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


class _Mode:
    """What ops are to do with their backward.

    One for the process, not for each thread: on GPUs, backward runs in threads of autograd's own, and activation
    checkpointing runs ops again there, which must make the nodes that they made before.
    """

    depth = 0  # of split_backward
    pending: Pending | None = None  # of `DeferredWeightGradients`
    task = -1  # the backward pass that it holds in, -1 outside of any: no other may leave its gradients there


def is_split() -> bool:
    """Whether ops that are called now make separate nodes for the gradients of inputs and of weights."""
    return _Mode.depth > 0 or _pending() is not None


def _pending() -> Pending | None:
    if _Mode.pending is None or torch._C._current_graph_task_id() != _Mode.task:
        return None
    return _Mode.pending


@contextmanager
def split_backward() -> Iterator[None]:
    """A context in which the ops' backward can be run in halves: gradients of inputs, and later those of weights.

    For zero-bubble schedules of torch.distributed.pipelining (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble,
    ScheduleDualPipeV): a step inside communicates once what a step outside communicates twice. Any other backward gives
    the same gradients, too, but its communication does not hide behind the gradients of weights.

    Enclose the whole step. Forward is what counts, and activation checkpointing runs it again in backward. It holds for
    all threads. What torch.compile compiles stays in one piece.

    Example:
        with fused_tp.split_backward():
            schedule.step(tokens)

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
    """
    _Mode.depth += 1
    try:
        yield
    finally:
        _Mode.depth -= 1


class DeferredWeightGradients:
    """Gradients of weights that backward leaves to be computed later, of one pipeline stage.

    Between `begin_...` and `end` ops leave them; `take` gives those of the backward passes since it was last called.
    """

    def __init__(self) -> None:
        self._pending: Pending = []

    def begin_forward(self) -> None:
        """What is still there belongs to a backward pass whose weights nobody asked for: torch runs one to learn the
        shapes of gradients."""
        self._pending.clear()
        self.begin_backward()

    def begin_backward(self) -> None:
        _Mode.pending, _Mode.task = self._pending, torch._C._current_graph_task_id()

    def end(self) -> None:
        _Mode.pending = None

    def take(self) -> Callable[[], None]:
        """What computes them, and adds them to `grad` (or `main_grad`) of the weights."""
        self.end()
        pending = self._pending[:]
        self._pending.clear()

        def run() -> None:
            while pending:
                pending.pop(0)()

        return run


def apply_split(op: Op[Any], run: Callable[[], Any], args: Any, values: Sequence[Any]) -> Any:
    """The results of `run()`, which is `op` on `args`, with a backward in halves; None where one half is all there is.

    Args:
        values: `args` one by one, without a NamedTuple inside another.
    """
    inputs, weights = _needing_grad(op, values, weights=False), _needing_grad(op, values, weights=True)
    pending = _pending()
    if not weights or not (inputs or pending is not None):
        return None
    with torch.no_grad():
        outputs = run()
    split = _Split(op, args, [outputs] if isinstance(outputs, Tensor) else outputs)
    if pending is not None:
        # A leaf of no size: without it a call whose inputs need no gradient would have no node.
        leaf = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        of_inputs = _Half.apply(split, False, *inputs) if inputs else ()
        joined = _JoinDeferred.apply(split, [get_gradient_edge(w) for w in weights], pending, leaf, *of_inputs)
    else:
        # The engine runs the youngest node that is ready: inputs before weights.
        of_weights = _Half.apply(split, True, *weights)
        joined = _Join.apply(split, *of_weights, *_Half.apply(split, False, *inputs))
    del split.args, split.outputs  # which the nodes save, as autograd wants it
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
    """One call of an op, as its nodes share it.

    Attributes:
        args, outputs: until the nodes are made.
        kept: what the half of the inputs leaves for that of the weights, and the gradients that it is of.
    """

    def __init__(self, op: Op[Any], args: Any, outputs: Sequence[Tensor]) -> None:
        self.op, self.args, self.outputs = op, args, outputs
        self.kept: tuple[list[Any], Any] | None = None

    def save(self, ctx: Any) -> None:
        ctx.split = self
        # Detached: as they are, they would hold the node that returns them, and that node this one.
        self.op.setup_context(ctx, self.args, [y.detach() for y in self.outputs])

    def gradients(self, ctx: Any, saved: Saved[Any], grads: Sequence[Any], *, weights: bool) -> list[Tensor | None]:
        """Gradients of those tensors that `_needing_grad` gives, in that order, for gradients of the outputs."""
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
    """Of inputs or of weights: what gets a gradient is an argument of its own."""

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
    """In the place of the half of the weights: what computes their gradients and adds them up where `edges` lead."""

    @staticmethod
    def forward(
        ctx: Any, split: _Split, edges: list[GradientEdge], pending: Pending, leaf: Tensor, *half: Tensor
    ) -> tuple[Tensor, ...]:
        split.save(ctx)
        ctx.edges, ctx.pending, ctx.inputs = edges, pending, bool(half)
        return tuple(split.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.split.op.saved(ctx)  # tensors that autograd lets go when this returns
        ctx.pending.append(partial(_accumulate, ctx, saved, grads))
        return None, None, None, None, *(grads if ctx.inputs else ())


@torch.no_grad()
def _accumulate(ctx: Any, saved: Saved[Any], grads: Sequence[Tensor | None]) -> None:
    found = ctx.split.gradients(ctx, saved, grads, weights=True)
    pairs = [(edge, grad) for edge, grad in zip(ctx.edges, found, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
