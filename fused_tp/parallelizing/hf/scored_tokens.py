"""Log-probabilities instead of logits, as TRL's trainers request them, if a rank has a shard of the tokens.

TRL's `add_fused_lm_head` replaces a model's forward. Called with fused_lm_head=True it gathers the whole weight of the
output layer, and passes it with the hidden states to a kernel of TRL. If targets are shifted already it treats each
token independently, so it accepts a shard of them:

| tensors                  | tensor parallel     | + sequence parallel             | context parallel             |
|--------------------------|---------------------|---------------------------------|------------------------------|
| hidden states            | unchanged           | gathered behind the last norm   | of this rank's tokens        |
| targets                  | unchanged           | shifted before                  | shifted before, then sharded |
| log-probabilities, ...   | unchanged           | unchanged                       | gathered                     |

If targets come from labels, which TRL would shift itself, the last position is dropped again: it has no target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fused_tp.parallelizing.forward_shard import ForwardShard
from fused_tp.parallelizing.global_loss import shift

ASKED = "fused_lm_head"


@dataclass(frozen=True)
class Targets:
    """Target of each token, [batch, seq]; `shifted`: computed from labels, so that the last token has none."""

    whole: Tensor
    shifted: bool
    count: Any  # num_items_in_batch


def take_targets(arguments: dict[str, Any], ignore_index: int) -> Targets:
    """Remove the targets of a forward pass from `arguments`, and return them."""
    labels, targets = arguments.pop("labels", None), arguments.pop("shift_labels", None)
    arguments["labels"], count = None, arguments.get("num_items_in_batch")
    if targets is not None:
        return Targets(targets, False, count)
    if labels is None:
        raise ValueError(f"{ASKED}=True asks for log-probabilities of labels, and there are none.")
    return Targets(shift(labels, ignore_index), True, count)


def own_targets(targets: Targets, shard: ForwardShard) -> Tensor:
    """Targets of this context parallel rank's tokens."""
    return targets.whole if shard.cp is None else shard.cp.shard(targets.whole, 1)


def whole_scores(output: Any, shard: ForwardShard, whole: Callable[[Tensor], Tensor], targets: Targets) -> Any:
    """Return `output` for all tokens that have targets; its loss is their mean, or their sum over `targets.count`.

    Args:
        whole: gathers a shard of the sequence along dim 1.

    Raises:
        ValueError: `output` holds a number that was computed from this rank's tokens.
    """
    for name, value in list(output.items()):
        if name == "loss" or not isinstance(value, Tensor):
            continue
        if value.ndim > 1:
            if shard.cp is not None:
                value = whole(value.float() if value.dtype.itemsize < 2 else value).to(value.dtype)
            output[name] = value[:, :-1] if targets.shifted else value
        elif shard.cp is not None:
            raise ValueError(
                f"The model returns a number {name!r} next to its log-probabilities, made of this rank's tokens, which "
                "context parallel ranks do not serve. Turn it off (the loss of routers by output_router_logits=False, "
                "which TRL takes as router_aux_loss_coef=0.0)."
            )
    if shard.cp is not None:
        count = output["label_mask"].sum() if targets.count is None else targets.count
        output["loss"] = -output["log_probs"].sum() / count
    return output
