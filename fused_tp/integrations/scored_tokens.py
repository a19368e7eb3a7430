"""Log-probabilities in place of logits, as TRL's trainers ask models for them, where a rank has a part of the tokens.

TRL's `add_fused_lm_head` puts a forward in the place of a model's own. Called with fused_lm_head=True it hands the
hidden states and the output layer's weight, of which it gathers the whole, to a kernel of its own. With targets that
are shifted already it looks at each token by itself, so it can be given a part of them:

| what                     | tensor parallel     | + sequence parallel             | context parallel            |
|--------------------------|---------------------|---------------------------------|-----------------------------|
| hidden states            | as they are         | gathered behind the last norm   | of this rank's tokens       |
| targets                  | as they are         | shifted before                  | shifted before, then cut    |
| log-probabilities, ...   | as they are         | as they are                     | gathered                    |
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_tp.integrations.forward_shard import ForwardShard
from fused_tp.integrations.global_loss import shift

ASKED = "fused_lm_head"


def take_targets(arguments: dict[str, Any], ignore_index: int) -> Tensor:
    """The target of each token, (batch, seq); they leave `arguments`."""
    labels, targets = arguments.pop("labels", None), arguments.pop("shift_labels", None)
    if targets is None:
        if labels is None:
            raise ValueError(f"{ASKED}=True asks for log-probabilities of labels, and there are none.")
        targets = shift(labels, ignore_index)
    arguments["labels"] = None
    found: Tensor = targets
    return found


def own_targets(targets: Tensor, shard: ForwardShard) -> Tensor:
    """Those of this context parallel rank's tokens."""
    return targets if shard.cp is None else shard.cp.shard(targets, 1)


def whole_scores(output: Any, shard: ForwardShard, whole: Any, count: Tensor | int | None) -> Any:
    """`output` for all tokens, whose loss is their mean, or the sum over `count`.

    Args:
        whole: makes of a part of the sequence, along dim 1, the whole one.

    Raises:
        ValueError: there is a number in it that was made of this rank's tokens.
    """
    if shard.cp is None:
        return output
    for name, value in list(output.items()):
        if name == "loss" or not isinstance(value, Tensor):
            continue
        if value.ndim < 2:
            raise ValueError(
                f"The model returns a number {name!r} next to its log-probabilities, made of this rank's tokens, which "
                "context parallel ranks do not serve. Turn it off (the loss of routers by output_router_logits=False)."
            )
        same = whole(value.float() if value.dtype.itemsize < 2 else value)
        output[name] = same.to(value.dtype)
    if count is None:
        count = output["label_mask"].sum()
    output["loss"] = -output["log_probs"].sum() / count
    return output
