"""Support for TRL's trainers that request log-probabilities instead of logits, if the sequence is sharded.

TRL's `add_fused_lm_head` replaces a model's forward. Called with fused_lm_head=True, the new forward passes the hidden
states and the full weight of the output layer to a kernel of TRL. If targets are already shifted, the kernel treats
each token independently, so it also works on a shard of the tokens:

| tensors                  | tensor parallel     | + sequence parallel             | context parallel             |
|--------------------------|---------------------|---------------------------------|------------------------------|
| hidden states            | unchanged           | gathered after the last norm    | this rank's tokens           |
| targets                  | unchanged           | shifted by us                   | shifted by us, then sharded  |
| log-probabilities, ...   | unchanged           | unchanged                       | gathered                     |

TRL would itself shift targets that are passed as labels, and return no value for the last token. So if we have shifted
them, the value of the last token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fused_tp.parallelizing.forward_shard import ForwardShard
from fused_tp.parallelizing.global_loss import shift_targets

SCORES_ARGUMENT = "fused_lm_head"  # argument of forward by which TRL requests log-probabilities


@dataclass(frozen=True)
class Targets:
    """Targets of a forward pass.

    Attributes:
        full_targets: target of each token of the full sequence, [batch, seq].
        are_shifted: True if they were computed from labels, so that the last token has no target.
        num_items: the argument num_items_in_batch, by which the loss is divided; None for the number of targets.
    """

    full_targets: Tensor
    are_shifted: bool
    num_items: Any


def take_targets(arguments: dict[str, Any], ignore_index: int) -> Targets:
    """Remove the targets of a forward pass from `arguments`, and return them."""
    labels, targets = arguments.pop("labels", None), arguments.pop("shift_labels", None)
    arguments["labels"], num_items = None, arguments.get("num_items_in_batch")
    if targets is not None:
        return Targets(targets, False, num_items)
    if labels is None:
        raise ValueError(f"{SCORES_ARGUMENT}=True needs targets. Pass labels or shift_labels.")
    return Targets(shift_targets(labels, ignore_index), True, num_items)


def shard_targets(targets: Targets, shard: ForwardShard) -> Tensor:
    """Return the targets of this context parallel rank's tokens."""
    return targets.full_targets if shard.cp is None else shard.cp.shard(targets.full_targets, 1)


def gather_scores(output: Any, shard: ForwardShard, gather_full: Callable[[Tensor], Tensor], targets: Targets) -> Any:
    """Return `output` for all tokens of the sequence that have targets.

    The loss is the sum of the negative log-probabilities, divided by `targets.count` or by the number of targets.

    Args:
        gather_full: function that gathers a tensor along dim 1 from its shards.

    Raises:
        ValueError: `output` holds another scalar, computed from this rank's tokens.
    """
    for name, value in list(output.items()):
        if name == "loss" or not isinstance(value, Tensor):
            continue
        if value.ndim > 1:
            if shard.cp is not None:
                value = gather_full(value.float() if value.dtype.itemsize < 2 else value).to(value.dtype)
            output[name] = value[:, :-1] if targets.are_shifted else value
        elif shard.cp is not None:
            raise ValueError(
                f"The model returns a scalar {name!r} beside its log-probabilities, computed from this rank's tokens, "
                "which is not supported with a cp_dim. Turn this output off (the loss of routers with "
                "output_router_logits=False, or with router_aux_loss_coef=0.0 in TRL)."
            )
    if shard.cp is not None:
        num_items = output["label_mask"].sum() if targets.num_items is None else targets.num_items
        output["loss"] = -output["log_probs"].sum() / num_items
    return output
