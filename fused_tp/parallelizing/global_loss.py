"""Loss over the tokens of all ranks, where each rank computes logits of some of the tokens or of the vocabulary.

Every rank holds the derivative of the global loss through its own tokens. The gradient is the SUM of these over the
ranks, see `fused_tp.parallelizing.grad_sync`. FSDP2 and DDP over a mesh that includes the CP ranks take the MEAN
instead; for them `scale_gradient` multiplies each rank's derivative by the number of CP ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.checks import is_capturing
from fused_tp.ops.collectives import all_reduce
from fused_tp.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
from fused_tp.parallelizing.deferred_logits import DeferredLogits
from fused_tp.parallelizing.forward_shard import ForwardShard, is_recomputing, running_shard, tensor_version
from fused_tp.parallelizing.graph import HeadOutputs, reachable_nodes
from fused_tp.parallelizing.outputs import find_tensors

# Keywords of loss functions that are not supported, with the default values that leave the loss unchanged.
UNSUPPORTED_KEYWORDS: dict[str, Any] = {"label_smoothing": 0.0, "reduction": "mean", "weight": None}


def shift_targets(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the target of each token: the next label, or `ignore_index` for the last token.

    Call it before the sequence is sharded, because the successor of a rank's last token is on another rank.
    """
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@dataclass(frozen=True, eq=False)
class ComputedLoss:
    """Snapshot of a computed loss, to detect a model that adds to the loss in place.

    Attributes:
        version: `tensor_version(loss)` when it was computed.
        value: `loss`, or a copy of it if torch does not count in-place writes to it.
        node: autograd node of `loss`; None if it has no gradient or torch.compile is tracing.
    """

    loss: Tensor
    version: int | None
    value: Tensor
    node: Any

    @classmethod
    def from_loss(cls, loss: Tensor) -> ComputedLoss:
        is_traced = torch.compiler.is_compiling()
        needs_copy = not is_traced and loss.is_inference()
        return cls(
            loss, tensor_version(loss), loss.clone() if needs_copy else loss, None if is_traced else loss.grad_fn
        )

    def equals(self, t: Tensor) -> bool:
        """True if `t` has the value of the computed loss. Does not synchronize with a GPU if `t` is the loss itself."""
        return self.version in (None, tensor_version(self.loss)) and have_equal_values(t, self.value)


@dataclass(eq=False)
class GlobalLoss:
    """Replacement for a model's `loss_function(logits, labels, vocab_size, ...)`.

    Every rank returns the same value: the sum over all ranks' tokens / the count of all ranks' targets. (A mean of the
    ranks' means would weight tokens by the number of targets on their rank.) The model's own function runs if the
    forward pass is not sharded. Activation checkpointing must not recompute the loss.

    Args:
        model_loss_function: the model's function.
        vocab_mesh: the ranks that shard the last dim of the logits, or None.
        cp_mesh: the ranks that shard the sequence, or None.
        shards_tokens: True if a rank has hidden states of only some of the tokens.
        grad_sync: if False, gradients are scaled by the CP size, for a wrapper that averages over the CP ranks.
        computed_losses: losses of the running forward pass.
    """

    model_loss_function: Callable[..., Tensor]
    vocab_mesh: DeviceMesh | None
    cp_mesh: DeviceMesh | None
    shards_tokens: bool
    grad_sync: bool
    computed_losses: list[ComputedLoss] = field(default_factory=list)

    def __call__(self, logits: Tensor, labels: Tensor | None, vocab_size: int, **kwargs: Any) -> Tensor:
        if is_recomputing():
            raise ValueError(
                "The model calls its loss_function inside an activation checkpoint. Backward recomputes it there, when "
                "the sharding of the tokens is no longer known. Call loss_function outside of the checkpoint."
            )
        shard = running_shard()
        if shard is None or shard.targets is None:
            return self.model_loss_function(logits, labels, vocab_size, **kwargs)
        ignore_index = kwargs.get("ignore_index", shard.ignore_index)
        if ignore_index != shard.ignore_index:
            raise ValueError(
                f"The model calls its loss_function with ignore_index={ignore_index}, but targets were counted with "
                f"ignore_index={shard.ignore_index}. Pass ignore_index to the model's forward, or use -100."
            )
        is_readable = not (torch.compiler.is_compiling() or is_capturing())
        if is_readable and not (have_equal_values(labels, shard.targets) and shard.targets_unchanged):
            raise ValueError(
                "The model calls its loss_function with labels that differ from those passed to forward. This is not "
                "supported over sharded tokens or a sharded vocabulary. Call the model without labels, and compute "
                "the loss from its logits."
            )
        unsupported_names = []
        for name, default in UNSUPPORTED_KEYWORDS.items():  # torch.compile does not trace this as a comprehension
            value = kwargs.get(name)
            if value is not None and (isinstance(value, Tensor) or value != default):
                unsupported_names.append(name)
        if unsupported_names:
            raise ValueError(
                f"The model calls its loss_function with {', '.join(unsupported_names)}, which is not supported over "
                "sharded tokens or a sharded vocabulary: the loss must be the plain mean cross entropy. Call the model "
                "without labels, and compute the loss from its logits."
            )
        assert shard.target_count is not None  # set together with the targets
        loss = self._local_loss(logits, shard, shard.targets, vocab_size)
        if self.cp_mesh is not None:
            loss = all_reduce(loss, group=self.cp_mesh)
            if not self.grad_sync:  # clone: models may add to the loss in place, which fails on a custom op's view
                loss = scale_gradient(loss, self.cp_mesh.size()).clone()
        self.computed_losses.append(ComputedLoss.from_loss(loss))
        return loss

    def check_returned_loss(self, output: Any, head: HeadOutputs) -> None:
        """Check that `output` of a forward pass with labels holds the computed loss, and no scalar of this rank alone.

        Raises:
            ValueError: the loss is missing, or another scalar has a gradient from some of the tokens or vocabulary.
        """
        computed_losses, self.computed_losses = self.computed_losses, []
        if not computed_losses:
            raise ValueError(
                "forward was called with labels but did not call the model's loss_function, which computes the loss "
                "over all ranks. Any other loss covers this rank's tokens or vocabulary only. Call the model without "
                "labels, and compute the loss from its logits."
            )
        if is_capturing():
            return
        if torch.compiler.is_compiling() and any(
            _contains_tensor(output, computed_loss.loss) for computed_loss in computed_losses
        ):
            return  # if the loss is not in the output, the checks below break the graph and run eagerly
        scalars = [t for t in find_tensors(output) if t.numel() == 1]
        returned_losses = [t for t in scalars if any(computed_loss.equals(t) for computed_loss in computed_losses)]
        other_scalars = [
            t for t in scalars if t.requires_grad and not any(t is returned for returned in returned_losses)
        ]
        if not self.shards_tokens and head.is_available:
            # The model may add terms computed from all tokens, such as a router loss.
            loss_nodes = [computed_loss.node for computed_loss in computed_losses]
            reached_nodes = [(t, reachable_nodes(t, stop_nodes=loss_nodes)) for t in other_scalars]
            returned_losses += [t for t, nodes in reached_nodes if not nodes.isdisjoint(loss_nodes)]
            other_scalars = [t for t, nodes in reached_nodes if not nodes.isdisjoint(head.nodes)]
        elif not self.shards_tokens:
            returned_losses += [t for t in scalars if any(t is computed_loss.loss for computed_loss in computed_losses)]
        if other_scalars or not returned_losses:
            raise ValueError(
                "forward did not return the loss that loss_function computed: the model changed the loss, or returned "
                "another scalar that is computed from this rank's shard of the tokens or of the vocabulary only. Call "
                "the model without labels, and compute such terms from its logits."
            )

    def _local_loss(self, logits: Tensor, shard: ForwardShard, targets: Tensor, vocab_size: int) -> Tensor:
        """Return the sum of the losses of this CP rank's tokens / the count of all ranks' targets."""
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"The model called its loss_function with logits of shape {tuple(logits.shape)} for "
                f"{tuple(targets.shape)} tokens. It must pass the unshifted logits of all tokens that it received."
            )
        num_targets = torch.as_tensor(shard.target_count, device=targets.device)
        if isinstance(logits, DeferredLogits) and not logits.is_computed:
            return logits.cross_entropy(targets, num_targets, shard.ignore_index, vocab_size)
        if self.vocab_mesh is not None:
            loss_sum = vocab_parallel_cross_entropy(
                logits,
                targets,
                group=self.vocab_mesh,
                ignore_index=shard.ignore_index,
                reduction="sum",
                vocab_size=vocab_size,
            )
        else:
            precise_logits = logits if logits.dtype == torch.float64 else logits.float()
            loss_sum = F.cross_entropy(
                precise_logits.flatten(0, -2), targets.flatten(), ignore_index=shard.ignore_index, reduction="sum"
            )
        return loss_sum / num_targets


@dataclass(eq=False)
class UserLoss:
    """A `loss_function` that the user set after `parallelize`, and that replaced the GlobalLoss `global_loss`.

    Raises:
        ValueError: `function` fails without having called `global_loss`, because the logits cover a shard of the
            vocabulary.
    """

    function: Callable[..., Tensor]
    global_loss: GlobalLoss

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return self.function(*args, **kwargs)
        except Exception as error:
            if self.global_loss.computed_losses:
                raise
            raise ValueError(
                f"The model's loss_function was replaced after parallelize and fails ({type(error).__name__}: "
                f"{error}), because the logits cover only this rank's shard of the vocabulary. Call the replaced "
                "loss_function from the new one; or call the model without labels, and compute the loss from its "
                "logits."
            ) from error


def _contains_tensor(output: Any, t: Tensor) -> bool:
    """True if `t` itself is in `output`, nested tuples, lists and dicts. Written so that torch.compile can trace it."""
    if isinstance(output, Mapping):
        output = [output[name] for name in output]
    if not isinstance(output, (tuple, list)):
        return output is t
    return any([_contains_tensor(item, t) for item in output])  # noqa: C419  # torch.compile does not trace generators that recurse


def have_equal_values(first: Any, second: Tensor) -> bool:
    """True if `first` is `second`, or a tensor with equal values, possibly of another dtype or on another device."""
    if first is second or not isinstance(first, Tensor):
        return first is second
    if first.shape != second.shape:
        return False
    return torch.allclose(first.detach(), second.detach().to(first), rtol=0.0, atol=0.0, equal_nan=True)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None  # type: ignore[attr-defined]  # set in forward


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged; backward multiplies its gradient by `factor`."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)
