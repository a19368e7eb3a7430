"""The mean cross entropy over all tokens of all ranks, from the logits that this rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.integrations.call import Call, current_call, runs_again
from fused_tp.integrations.grad_sync import scale_gradient
from fused_tp.ops.collectives import all_reduce
from fused_tp.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy

# Keywords that would make it another loss, and the values that do not.
OTHER_LOSSES: dict[str, Any] = {"label_smoothing": 0.0, "reduction": "mean", "weight": None}


def shift(labels: Tensor, ignore_index: int) -> Tensor:
    """The target of each token, which is its successor; the last token has none. Before the sequence is cut: a rank's
    last token is followed by a token of another rank."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class GlobalLoss:
    """Stands in for a model's `loss_function(logits, labels, vocab_size, ...)`.

    Every rank returns the same value, sum over all ranks' tokens / count of all ranks' targets. (A mean of the ranks'
    means would weigh tokens by how many targets their rank happens to have.) Where a forward pass was not cut, the
    model's own function runs. Activation checkpointing must not run it again.

    Args:
        own: the model's function.
        vocab_mesh: the ranks that the logits' last dim is cut over, or None.
        cp_mesh: the ranks that the sequence is cut over, or None.
        grad_sync: False scales gradients by the CP size, for a wrapper that averages over the CP ranks.
    """

    def __init__(
        self,
        own: Callable[..., Tensor],
        *,
        vocab_mesh: DeviceMesh | None,
        cp_mesh: DeviceMesh | None,
        grad_sync: bool,
    ) -> None:
        self.own = own
        self.vocab_mesh = vocab_mesh
        self.cp_mesh = cp_mesh
        self.grad_sync = grad_sync

    def __call__(self, logits: Tensor, labels: Tensor | None, vocab_size: int, **kwargs: Any) -> Tensor:
        if runs_again():
            raise ValueError(
                "The model calls its loss_function inside of an activation checkpoint, which runs it again in "
                "backward, when it is no longer known how the tokens were cut. Call it outside of the checkpoint."
            )
        call = current_call()
        if call is None or call.targets is None:
            return self.own(logits, labels, vocab_size, **kwargs)
        ignore_index = kwargs.get("ignore_index", call.ignore_index)
        if ignore_index != call.ignore_index:
            raise ValueError(
                f"The model calls its loss_function with ignore_index={ignore_index}, and targets were counted with "
                f"{call.ignore_index}; pass ignore_index to the model's forward, or use -100."
            )
        asked = []
        for name, usual in OTHER_LOSSES.items():  # torch.compile does not trace this as a comprehension
            value = kwargs.get(name)
            if value is not None and (isinstance(value, Tensor) or value != usual):
                asked.append(name)
        if asked:
            raise ValueError(
                f"The model calls its loss_function with {', '.join(asked)}; over cut tokens or a cut vocabulary it is "
                "the plain mean cross entropy. Compute another loss from the logits: call the model without labels."
            )
        assert call.target_count is not None  # set together with the targets
        loss = self._sum_of_own_tokens(logits, call, call.targets, vocab_size) / call.target_count
        if self.cp_mesh is None:
            return loss
        loss = all_reduce(loss, group=self.cp_mesh)
        return loss if self.grad_sync else scale_gradient(loss, self.cp_mesh.size())

    def _sum_of_own_tokens(self, logits: Tensor, call: Call, targets: Tensor, vocab_size: int) -> Tensor:
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"The model called its loss_function with logits of shape {tuple(logits.shape)} for "
                f"{tuple(targets.shape)} tokens; it must pass the logits of all tokens it was given, unshifted."
            )
        if self.vocab_mesh is not None:
            return vocab_parallel_cross_entropy(
                logits,
                targets,
                group=self.vocab_mesh,
                ignore_index=call.ignore_index,
                reduction="sum",
                vocab_size=vocab_size,
            )
        precise = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            precise.flatten(0, -2), targets.flatten(), ignore_index=call.ignore_index, reduction="sum"
        )
