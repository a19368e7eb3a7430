"""What one forward pass of a parallel model has been cut into, for whoever inside it has to know."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.ops.ring_attention import ring_attention

LAYOUT = "zigzag"  # every rank holds an early and a late piece, so causal attention costs all of them the same


@dataclass(frozen=True)
class Ring:
    """The ranks that one forward pass attends over, and the length of the whole sequence.

    `padded`: the caller's mask had padding (on the right). Only causal attention may do without the mask then.
    """

    mesh: DeviceMesh
    seq_len: int
    padded: bool = False

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, dropout_p: float, **more: Any
    ) -> Tensor:
        """Attention of this rank's tokens over all tokens. q, v and the result: [batch, heads, seq, head_dim]."""
        out = ring_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            group=self.mesh,
            causal=causal,
            scale=scale,
            layout=LAYOUT,
            dropout_p=dropout_p,
            seq_len=self.seq_len,
            **more,
        )
        return out.transpose(1, 2)


@dataclass(frozen=True)
class Call:
    """A forward pass on a part of the sequence.

    Attributes:
        seq_len: tokens of the whole sequence.
        ring: set where the sequence is cut over the context parallel ranks.
        targets: this rank's target tokens [batch, seq], already shifted; set where the loss is ours to compute.
        target_count: how many targets count over all ranks, or the caller's num_items_in_batch.
        ignore_index: the target that does not count.
        logits_to_keep: the positions of the whole sequence that the caller wants logits of; 0 for all.
    """

    seq_len: int
    ring: Ring | None = None
    targets: Tensor | None = None
    target_count: Tensor | int | None = None
    ignore_index: int = -100
    logits_to_keep: int | Tensor = 0


# One per thread, and not a ContextVar, whose `set` torch.compile cannot trace. Attributes are read through the
# functions below: torch.compile does not see the defaults of a subclass of threading.local.
_current = threading.local()


def current_call() -> Call | None:
    """The forward pass that is running in this thread; None outside of one and in one that is not cut.

    For what is called without our keywords: the loss, the making of masks. Neither runs again in backward, when there
    is no current call; what does run again (attention) is handed its Ring.
    """
    call: Call | None = getattr(_current, "call", None)
    return call


def set_current_call(call: Call | None) -> None:
    """Called before and after every forward pass of a parallel model."""
    _current.call = call
