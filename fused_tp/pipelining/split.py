"""torch's own door for gradients of weights that are computed later: `dw_builder` of a PipelineStage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fused_tp.integrations.outputs import tensors_in
from fused_tp.ops.split_backward import DeferredWeightGradients


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], None]]:
    """What `torch.distributed.pipelining.PipelineStage` takes as `dw_builder`, for a stage that runs `module`.

    Backward of the fused ops in `module` then leaves the gradients of their weights for later. A schedule that does not
    split backward computes them at once. Other layers compute theirs in backward. Without it, and inside
    `fused_tp.split_backward()`, torch splits backward by itself, for all layers; that lets go of less memory between
    the halves, as torch keeps the graph of the whole stage.

    Example:
        stage = PipelineStage(part, index, stages, device, group=group, dw_builder=dw_builder(part))
    """
    deferred = DeferredWeightGradients()

    def enter(module: nn.Module, args: Any) -> None:
        deferred.begin_forward()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        deferred.end()
        for t in tensors_in(output):
            if t.requires_grad:  # activation checkpointing runs layers again in backward, which begins here
                t.register_hook(lambda grad: deferred.begin_backward())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return deferred.take
