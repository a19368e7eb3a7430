"""Backward of an op in two halves that autograd can run separately: gradients of inputs, and gradients of weights.

Zero-bubble pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241) send the gradient of a stage's
input as early as possible and fill bubbles with the gradients of weights. torch calls autograd for the inputs, and
later for the weights. A node cannot determine which gradients a pass requests (pytorch issues 166577 and 174017), so a
single node would compute both halves in both passes. Inside `split_backward` an op therefore creates three nodes, and
autograd runs only the nodes that lead to the requested gradients:

    inputs  ---> _HalfFunction (inputs)  ---.
                                            +--> _JoinFunction ---> outputs
    weights ---> _HalfFunction (weights) ---'

The forward of a half returns expanded scalars with the shapes of the outputs, which need no memory. If both halves are
requested, the half for the inputs runs first, because other ranks and stages wait for its results.

This is not the default, because communication then does not overlap with the gradients of weights.
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
    from fused_tp.ops.op import Op, SavedForBackward

DeferredList = list[Callable[[], None]]


class _BackwardMode:
    """Global mode that determines the backward nodes that ops create.

    The mode is per process, not per thread. On GPUs backward runs in autograd's threads, and activation checkpointing
    reruns ops there. The reruns must create the same nodes as the first run.
    """

    depth = 0  # nesting depth of split_backward
    pending: DeferredList | None = None  # the list of the active `DeferredWeightGradients`
    # Id of the backward pass for which `pending` is valid; -1 outside of backward. Ops that run in another backward
    # pass must not append to `pending`.
    graph_task_id = -1


def is_backward_split() -> bool:
    """True if ops called now create separate nodes for the gradients of inputs and of weights."""
    return _BackwardMode.depth > 0 or _active_deferred_list() is not None


def _active_deferred_list() -> DeferredList | None:
    if _BackwardMode.pending is None or torch._C._current_graph_task_id() != _BackwardMode.graph_task_id:
        return None
    return _BackwardMode.pending


@contextmanager
def split_backward() -> Iterator[None]:
    """Context manager that splits the backward of ops into two halves: gradients of inputs, and gradients of weights.

    Use it for the zero-bubble schedules of torch.distributed.pipelining (ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble, ScheduleDualPipeV). Without it, backward of a step communicates everything twice. With other
    schedules, gradients are the same, but communication does not overlap with the gradients of weights.

    Run the entire step inside the context: forward reads the mode, and activation checkpointing reruns forward in
    backward. The mode applies to all threads. Backward of code compiled by torch.compile is not split.

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
    """Weight gradients of one pipeline stage that are computed after backward.

    Ops that run between `begin_forward` or `begin_backward` and `end` defer their weight gradients. `take_pending`
    returns a function that computes the gradients deferred since its last call.
    """

    def __init__(self) -> None:
        self._pending: DeferredList = []

    def begin_forward(self) -> None:
        """Start deferring, and drop pending gradients.

        Pending gradients at this time belong to a backward pass that torch ran only to infer the shapes of gradients.
        """
        self._pending.clear()
        self.begin_backward()

    def begin_backward(self) -> None:
        _BackwardMode.pending, _BackwardMode.graph_task_id = self._pending, torch._C._current_graph_task_id()

    def end(self) -> None:
        _BackwardMode.pending = None

    def take_pending(self) -> Callable[[], None]:
        """Return a function that computes the pending gradients and adds them to the weights' `grad` or `main_grad`."""
        self.end()
        pending = self._pending[:]
        self._pending.clear()

        def run() -> None:
            while pending:
                pending.pop(0)()

        return run


def apply_split(op: Op[Any], run: Callable[[], Any], args: Any, values: Sequence[Any]) -> Any:
    """Run an op with a split backward and return its results. Return None, without running it, if only one half exists.

    Args:
        op: the op.
        run: runs `op` on `args`.
        args: arguments of the op.
        values: `args` with nested NamedTuples flattened.
    """
    input_tensors, weight_tensors = (
        _tensors_needing_grad(op, values, is_weight_half=False),
        _tensors_needing_grad(op, values, is_weight_half=True),
    )
    pending = _active_deferred_list()
    if not weight_tensors or not (input_tensors or pending is not None):
        return None
    with torch.no_grad():
        outputs = run()
    split_call = _SplitCall(op, args, [outputs] if isinstance(outputs, Tensor) else outputs)
    if pending is not None:
        # An empty leaf that requires a gradient. Without it, autograd would not create a node for a call whose inputs
        # need no gradient.
        empty_leaf = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        input_half = _HalfFunction.apply(split_call, False, *input_tensors) if input_tensors else ()
        joined_outputs = _JoinDeferredFunction.apply(
            split_call, [get_gradient_edge(w) for w in weight_tensors], pending, empty_leaf, *input_half
        )
    else:
        # Of the nodes that are ready, the autograd engine runs the one created last: so create the inputs' half last.
        weight_half = _HalfFunction.apply(split_call, True, *weight_tensors)
        joined_outputs = _JoinFunction.apply(
            split_call, *weight_half, *_HalfFunction.apply(split_call, False, *input_tensors)
        )
    del split_call.args, split_call.outputs  # the nodes have saved them with ctx.save_for_backward
    return (
        list(joined_outputs)
        if op.returns_list
        else joined_outputs[0]
        if isinstance(outputs, Tensor)
        else joined_outputs
    )


def _tensors_needing_grad(op: Op[Any], values: Sequence[Any], *, is_weight_half: bool) -> list[Tensor]:
    return [
        t
        for index, value in enumerate(values)
        if (index in op.weight_indices) == is_weight_half
        for t in (value if type(value) is list else (value,))
        if isinstance(t, Tensor) and t.requires_grad
    ]


class _SplitCall:
    """State of one call of an op, shared by its nodes.

    Attributes:
        args, outputs: arguments and results; deleted once the nodes exist.
        carry: output gradients (with their versions) and the `SavedForBackward.carry` that the inputs' half leaves for
            the weights' half.
    """

    def __init__(self, op: Op[Any], args: Any, outputs: Sequence[Tensor]) -> None:
        self.op, self.args, self.outputs = op, args, outputs
        self.carry: tuple[list[Any], Any] | None = None

    def save(self, ctx: Any) -> None:
        ctx.split_call = self
        # Detached, to avoid a reference cycle: outputs reference the node that returns them, and the node this object.
        self.op.setup_context(ctx, self.args, [y.detach() for y in self.outputs])

    def compute_gradients(
        self, ctx: Any, saved: SavedForBackward[Any], grads: Sequence[Any], *, is_weight_half: bool
    ) -> list[Tensor | None]:
        """Compute the gradients of the tensors that `_tensors_needing_grad` returns, in the same order.

        `grads` are the gradients of the outputs.
        """
        op, grads_with_versions = self.op, [(d, None if d is None else d._version) for d in grads]
        if is_weight_half and self.carry is not None and _are_same_grads(self.carry[0], grads_with_versions):
            saved.carry = self.carry[1]
        half = op.grad_weight if is_weight_half else op.grad_input
        grads_by_name = op.run_half(ctx, half, saved, [list(grads)] if op.returns_list else grads)
        self.carry = None if is_weight_half or saved.carry is None else (grads_with_versions, saved.carry)
        return [
            grad
            for index, (name, needs) in enumerate(zip(op.fields, ctx.needs, strict=True))
            if (index in op.weight_indices) == is_weight_half
            for grad, needed in _grads_with_needs(grads_by_name.get(name), needs)
            if needed
        ]


def _grads_with_needs(grad: Any, needs: Any) -> Iterator[tuple[Tensor | None, bool]]:
    if not isinstance(needs, list):
        yield grad, needs
    else:
        yield from zip([None] * len(needs) if grad is None else grad, needs, strict=True)


def _are_same_grads(first_grads: Sequence[Any], second_grads: Sequence[Any]) -> bool:
    return all(
        a is b and version == current_version
        for (a, version), (b, current_version) in zip(first_grads, second_grads, strict=True)
    )


class _HalfFunction(Function):
    """Autograd node for one half of backward. Each tensor that gets a gradient is a separate argument."""

    @staticmethod
    def forward(ctx: Any, split_call: _SplitCall, is_weight_half: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        split_call.save(ctx)
        ctx.is_weight_half = is_weight_half
        return tuple(y.new_empty(()).expand(y.shape) for y in split_call.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        split_call: _SplitCall = ctx.split_call
        return (
            None,
            None,
            *split_call.compute_gradients(ctx, split_call.op.load_saved(ctx), grads, is_weight_half=ctx.is_weight_half),
        )


class _JoinFunction(Function):
    @staticmethod
    def forward(ctx: Any, split_call: _SplitCall, *halves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(split_call.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *grads, *grads


class _JoinDeferredFunction(Function):
    """`_JoinFunction` for deferred weight gradients: its backward appends their computation to `pending`.

    The gradients are later accumulated through `edges`, the gradient edges of the weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split_call: _SplitCall,
        edges: list[GradientEdge],
        pending: DeferredList,
        leaf: Tensor,
        *input_half: Tensor,
    ) -> tuple[Tensor, ...]:
        split_call.save(ctx)
        ctx.edges, ctx.pending, ctx.has_input_half = edges, pending, bool(input_half)
        return tuple(split_call.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.split_call.op.load_saved(ctx)  # unpack now: autograd frees the saved tensors after this backward
        ctx.pending.append(partial(_accumulate, ctx, saved, grads))
        return None, None, None, None, *(grads if ctx.has_input_half else ())


@torch.no_grad()
def _accumulate(ctx: Any, saved: SavedForBackward[Any], grads: Sequence[Tensor | None]) -> None:
    weight_grads = ctx.split_call.compute_gradients(ctx, saved, grads, is_weight_half=True)
    pairs = [(edge, grad) for edge, grad in zip(ctx.edges, weight_grads, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
