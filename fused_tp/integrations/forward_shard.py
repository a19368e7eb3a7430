"""Sharding state of the forward passes of a parallel model, and which of them runs."""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.ops.ring_attention import attention_over
from fused_tp.ops.sequence import sequence_positions, shard_sequence, unshard_sequence
from fused_tp.ops.ulysses_attention import attention_of_heads_over


@dataclass(frozen=True)
class CpContext:
    """The ranks that one forward pass attends over, and what of the whole sequence each of them holds.

    Attributes:
        padded: the caller's mask had padding (on the right). Only causal attention may do without the mask then.
        documents: where the packed documents of each row begin, and the end: (0, ..., seq_len); () for one document.
        tp_rank: of this rank among those that share the heads.
        ulysses: the ranks of `mesh` that share heads out among them, and those that then pass keys on; None for a ring
            of all.
        last_position: the greatest of the whole sequence, where the model asks for it.
    """

    mesh: DeviceMesh
    seq_len: int
    padded: bool = False
    documents: tuple[int, ...] = ()
    tp_rank: int = 0
    ulysses: tuple[DeviceMesh, DeviceMesh | None] | None = None
    last_position: int | None = None

    @property
    def layout(self) -> str:
        """Causal attention costs all ranks the same: each holds an early and a late piece of one document, or its share
        of the work of many."""
        return "balanced" if self.documents else "zigzag"

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor(self.documents, dtype=torch.int64, device="cpu") if self.documents else None

    @property
    def _where(self) -> dict[str, Any]:
        return {"group": self.mesh, "layout": self.layout, "cu_seqlens": self.cu_seqlens}

    def positions(self, device: torch.device) -> Tensor:
        """Indices in the whole sequence of this rank's tokens."""
        return sequence_positions(self.seq_len, device=device, **self._where)

    def shard(self, t: Tensor, dim: int) -> Tensor:
        """This rank's tokens of `t`."""
        return shard_sequence(t, dim, **self._where)

    def unshard(self, t: Tensor, dim: int) -> Tensor:
        """The whole of what `shard` cut."""
        return unshard_sequence(t, dim, seq_len=self.seq_len, **self._where)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, heads_sharded: bool, **keywords: Any) -> Tensor:
        """Attention of this rank's tokens over all tokens, with keywords of `ring_attention`.

        q, v and the result: [batch, heads, seq, head_dim]. `heads_sharded`: the TP ranks hold different heads. Dropout,
        which is drawn by head, then differs between them also where their random numbers are the same; and it must not
        where all hold all heads.
        """
        _count_attention()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keywords |= {"layout": self.layout, "cu_seqlens": self.cu_seqlens, "seq_len": self.seq_len}
        keywords["first_head"] = self.tp_rank * q.shape[2] if heads_sharded else 0
        if self.ulysses is None:
            out = attention_over(q, k, v, self.mesh, **keywords)
        else:
            out = attention_of_heads_over(q, k, v, *self.ulysses, **keywords)
        return out.transpose(1, 2)


@dataclass(frozen=True)
class ForwardShard:
    """A forward pass on a part of the sequence.

    Attributes:
        batch: rows.
        seq_len: tokens of the whole sequence.
        local_len: of these on this CP rank, over all its TP ranks.
        cp: set where the sequence is sharded over the context parallel ranks.
        targets: this rank's target tokens [batch, seq], already shifted; set where the loss is ours to compute.
        target_count: how many targets count over all ranks, or the caller's num_items_in_batch.
        ignore_index: the target that does not count.
        logits_to_keep: the positions of the whole sequence that the caller wants logits of; 0 for all.
        targets_version: `version_of` the targets as they were counted.
    """

    batch: int
    seq_len: int
    local_len: int
    cp: CpContext | None = None
    targets: Tensor | None = None
    target_count: Tensor | int | None = None
    ignore_index: int = -100
    logits_to_keep: int | Tensor = 0
    targets_version: int | None = None

    @property
    def targets_unchanged(self) -> bool:
        """Whether the model's forward, which is given `targets` as its labels, has not written to them."""
        return self.targets_version in (None, version_of(self.targets))


def version_of(t: Tensor | None) -> int | None:
    """How often `t` was written to; None where that is not counted."""
    return None if t is None or torch.compiler.is_compiling() or t.is_inference() else t._version


@dataclass(frozen=True)
class LayerState:
    """What layers need to know of a forward pass.

    Attributes:
        tp_sharded: the residual stream is sharded along the sequence over the TP ranks.
        local_len: tokens on this CP rank, over all its TP ranks; None where the forward pass is not sharded.
        cp: set where the sequence is sharded over the context parallel ranks.
        logits_sharded: the output layer leaves its output sharded by vocabulary, next to a loss over the TP ranks.
        batch: rows, with `local_len`.
    """

    tp_sharded: bool = False
    local_len: int | None = None
    cp: CpContext | None = None
    logits_sharded: bool = False
    batch: int = 0


UNSHARDED = LayerState()


def unsharded() -> LayerState:
    """The state of what no forward pass cuts."""
    return UNSHARDED


_MOST_REMEMBERED = 4096  # changes of state; a graph lives through a few of them at most


class StateHistory:
    """Which state a forward pass had, by the autograd nodes that it made.

    Activation checkpointing runs layers again in backward, perhaps after another forward pass of another length, and
    does not say which one it runs again. But it runs inside a node of that pass, and nodes are numbered in the order of
    their making: a pass is found by where the numbers stood when it began.

    Each thread counts its own numbers, and those of one thread are remembered: a forward pass in another starts anew.
    Backward may run in any thread. Of checkpoints inside checkpoints, whose inner nodes are made in backward, the pass
    is known only where backward runs in the thread of the forward passes, as it does on CPU.
    """

    def __init__(self) -> None:
        self._thread: int | None = None  # of the forward passes
        self._starts: list[int] = []
        self._states: list[LayerState] = []

    def note(self, state: LayerState) -> None:
        """From here on nodes are made in `state`."""
        number, thread = torch.autograd._get_sequence_nr(), threading.get_ident()
        # Idents are given again to later threads, which count from 0.
        if thread != self._thread or (self._starts and number < self._starts[-1]):
            if running_node() is not None:
                return  # backward in another thread; the nodes that it makes are not looked up
            self._thread = thread
            self._starts.clear()
            self._states.clear()
        if self._states and self._states[-1] == state:
            return
        self._starts.append(number)
        self._states.append(state)
        if len(self._starts) > _MOST_REMEMBERED:
            del self._starts[0], self._states[0]

    def at(self, number: int) -> LayerState:
        """The state that the node of that number was made in."""
        return self._states[max(bisect_right(self._starts, number) - 1, 0)] if self._states else UNSHARDED


def running_node() -> int | None:
    """The number of the autograd node that calls us, in backward; None outside of backward."""
    if torch.compiler.is_compiling():
        return None  # nor does backward call what is being traced
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@dataclass
class RunningForward:
    """A running forward pass of a parallel model.

    Attributes:
        node: where it runs inside of a backward: see `running_node`.
        outer: the forward pass that it runs inside of.
        cache: of which each CP rank holds a part, in a forward pass that is not cut.
        attended: how often it has called attention over the CP ranks.
        traced: it has done so in a traced program, which does not count.
    """

    owner: object
    shard: ForwardShard | None
    node: int | None
    outer: RunningForward | None
    cache: object | None = None
    attended: int = 0
    traced: bool = False


# One per thread, and not a ContextVar, whose `set` torch.compile cannot trace. Attributes are read through the
# functions below: torch.compile does not see the defaults of a subclass of threading.local.
_current = threading.local()


def running_forward() -> RunningForward | None:
    """The innermost forward pass of a parallel model that is running in this thread."""
    frame: RunningForward | None = getattr(_current, "frame", None)
    return frame


def runs_again() -> bool:
    """Whether backward calls us for a forward pass that has ended, as activation checkpointing does."""
    node, frame = running_node(), running_forward()
    return node is not None and (frame is None or frame.node != node)


def running_shard() -> ForwardShard | None:
    """What the running forward pass has been cut into; None outside of one and in one that is not cut.

    For the loss and masks, which do not run again in backward; attention, which does, is given its CpContext.
    """
    frame = running_forward()
    return None if frame is None else frame.shard


def _count_attention() -> None:
    """Attention over the CP ranks is called: not again, in backward."""
    frame = running_forward()
    if frame is None:
        return
    if torch.compiler.is_compiling():
        frame.traced = True
    elif frame.node == running_node():
        frame.attended += 1


def enter_forward(owner: object, shard: ForwardShard | None, cache: object | None = None) -> None:
    """A forward pass of `owner` begins. It may run inside of one of another model."""
    node, outer = running_node(), running_forward()
    frame = outer
    while frame is not None:
        if frame.owner is owner and frame.node == node:
            # A model does not run inside of itself: this one was interrupted, and with it what ran inside of it. On
            # KeyboardInterrupt torch runs no hooks that would have said so.
            outer = frame.outer
        frame = frame.outer
    _current.frame = RunningForward(owner, shard, node, outer, cache)


def leave_forward(owner: object) -> RunningForward | None:
    """The forward pass of `owner` ends: the one around it is the current one again.

    Returns None where none of `owner` is running, since one that was refused has not begun.
    """
    frame = running_forward()
    if frame is None or frame.owner is not owner:
        return None
    _current.frame = frame.outer
    return frame
