"""Deferred weight gradients through torch's own hook for them, `dw_builder` of PipelineStage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fused_tp.ops.split_backward import DeferredWeightGradients
from fused_tp.parallelizing.outputs import find_tensors


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], None]]:
    """Return the `dw_builder` of `torch.distributed.pipelining.PipelineStage` for a stage that runs `module`.

    Backward of the fused ops in `module` then defers the gradients of their weights; other layers compute theirs in
    backward. A schedule that does not split backward computes the deferred ones at once. Without `dw_builder`, inside
    `fused_tp.split_backward()`, torch splits the backward of all layers itself; that frees less memory between the
    halves, because torch keeps the graph of the whole stage.

    Example:
        stage = PipelineStage(part, index, stages, device, group=group, dw_builder=dw_builder(part))
    """
    deferred_gradients = DeferredWeightGradients()

    def before_forward(module: nn.Module, args: Any) -> None:
        deferred_gradients.begin_forward()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        deferred_gradients.end()
        for t in find_tensors(output):
            if t.requires_grad:  # backward begins at this gradient; activation checkpointing reruns layers after it
                t.register_hook(lambda grad: deferred_gradients.begin_backward())

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward, always_call=True)
    return deferred_gradients.take_pending
