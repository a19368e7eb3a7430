"""Sharding state of the forward passes of a parallel model, and the stack of running passes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.ops.ring_attention import ring_attention_from_head
from fused_tp.ops.sequence import sequence_positions, shard_sequence, unshard_sequence
from fused_tp.ops.ulysses_attention import context_parallel_attention_from_head


@dataclass(frozen=True)
class CpContext:
    """Context parallel ranks that one forward pass attends over, and the layout of the sequence on them.

    Attributes:
        has_padding: True if the caller's mask had padding on the right and was removed. Causal attention does not need
            such a mask; non-causal attention would.
        documents: starts of the packed documents of each row, and the end: (0, ..., seq_len); () for one document.
        tp_rank: index of this rank among the tensor parallel ranks that share the heads.
        ulysses_meshes: (ranks of `mesh` that exchange heads, ranks of `mesh` that pass keys around a ring); None for
            one ring of all ranks.
        last_position: the greatest position of the full sequence; None unless `needs_last_position` is set.
    """

    mesh: DeviceMesh
    seq_len: int
    has_padding: bool = False
    documents: tuple[int, ...] = ()
    tp_rank: int = 0
    ulysses_meshes: tuple[DeviceMesh, DeviceMesh | None] | None = None
    last_position: int | None = None

    @property
    def layout(self) -> str:
        """Layout in which causal attention costs the same on all ranks.

        Each rank holds an early and a late chunk of a single document ("zigzag"), or chunks of packed documents that
        add up to an equal cost ("balanced").
        """
        return "balanced" if self.documents else "zigzag"

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor(self.documents, dtype=torch.int64, device="cpu") if self.documents else None

    @property
    def _layout_options(self) -> dict[str, Any]:
        return {"group": self.mesh, "layout": self.layout, "cu_seqlens": self.cu_seqlens}

    def positions(self, device: torch.device) -> Tensor:
        """Indices of this rank's tokens in the full sequence."""
        return sequence_positions(self.seq_len, device=device, **self._layout_options)

    def shard(self, t: Tensor, dim: int) -> Tensor:
        """Return the shard of `t` along `dim` that belongs to this rank's tokens."""
        return shard_sequence(t, dim, **self._layout_options)

    def unshard(self, t: Tensor, dim: int) -> Tensor:
        """Gather `t`, a shard returned by `shard`, to the full tensor."""
        return unshard_sequence(t, dim, seq_len=self.seq_len, **self._layout_options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, are_heads_sharded: bool, **keywords: Any) -> Tensor:
        """Attend from this rank's tokens to all tokens.

        Args:
            q, k, v: [batch, heads, seq, head_dim], like the result.
            are_heads_sharded: the TP ranks hold different heads. Dropout is then drawn by the global index of the head,
                so that it differs between TP ranks even with equal random states. If all TP ranks hold all heads, they
                must draw the same dropout.
            keywords: keyword arguments of `ring_attention`.
        """
        count_attention_call()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keywords |= {"layout": self.layout, "cu_seqlens": self.cu_seqlens, "seq_len": self.seq_len}
        keywords["first_head"] = self.tp_rank * q.shape[2] if are_heads_sharded else 0
        if self.ulysses_meshes is None:
            out = ring_attention_from_head(q, k, v, self.mesh, **keywords)
        else:
            out = context_parallel_attention_from_head(q, k, v, *self.ulysses_meshes, **keywords)
        return out.transpose(1, 2)


@dataclass(frozen=True)
class ForwardShard:
    """Shard of the sequence that one forward pass runs on.

    Attributes:
        batch_size: number of rows.
        seq_len: number of tokens of the full sequence.
        local_len: number of tokens on this CP rank, over all TP ranks that share them.
        cp: set if the sequence is sharded over the context parallel ranks.
        targets: this rank's target tokens [batch, seq], already shifted; set if this package computes the loss.
        target_count: number of targets over all ranks, or the caller's num_items_in_batch.
        ignore_index: value of targets that the loss ignores.
        logits_to_keep: positions of the full sequence that the caller requests logits for; 0 for all.
        targets_version: `tensor_version(targets)` at the time they were counted.
    """

    batch_size: int
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
        """True if the model's forward, which receives `targets` as its labels, has not written to them."""
        return self.targets_version in (None, tensor_version(self.targets))


def tensor_version(t: Tensor | None) -> int | None:
    """Number of in-place writes to `t`; None if torch does not count them."""
    return None if t is None or torch.compiler.is_compiling() or t.is_inference() else t._version


@dataclass(frozen=True)
class LayerState:
    """State of a forward pass that its layers read.

    Attributes:
        is_tp_sharded: the residual stream is sharded along the sequence over the TP ranks.
        local_len: number of tokens on this CP rank, over all TP ranks that share them; None if the forward pass is not
            sharded.
        cp: set if the sequence is sharded over the context parallel ranks.
        are_logits_sharded: the output layer leaves its output sharded by vocabulary, for a loss over the TP ranks.
        batch_size: number of rows; set together with `local_len`.
    """

    is_tp_sharded: bool = False
    local_len: int | None = None
    cp: CpContext | None = None
    are_logits_sharded: bool = False
    batch_size: int = 0


UNSHARDED = LayerState()


def unsharded_state() -> LayerState:
    """Return `UNSHARDED`: the `current_state` of modules whose forward pass is never sharded."""
    return UNSHARDED


_MAX_RECORDED_STATES = 4096  # changes of state to keep; an autograd graph rarely lives through more than a few


class StateHistory:
    """States of past forward passes, looked up by the number of an autograd node that the pass created.

    Activation checkpointing reruns layers in backward, perhaps after a later forward pass with another sequence length,
    and does not report which pass it reruns. But the rerun happens inside a backward node of the original pass, and
    autograd numbers nodes in order of creation (`_sequence_nr`). So comparing the number of the running node with the
    first number of each pass identifies the pass.

    Each thread numbers its own nodes, and the history covers one thread: a forward pass in another thread clears it.
    Backward may run in any thread. Nested checkpoints create their inner nodes in backward; these can be looked up only
    if backward runs in the thread of the forward passes, as it does on CPU.
    """

    def __init__(self) -> None:
        self._thread_id: int | None = None  # thread of the forward passes
        self._start_sequence_nrs: list[int] = []
        self._states: list[LayerState] = []

    def record(self, state: LayerState) -> None:
        """Record that nodes created from now on belong to `state`."""
        sequence_nr, thread_id = torch.autograd._get_sequence_nr(), threading.get_ident()
        # A lower number in the same thread ident means a new thread: idents are reused, and each thread counts from 0.
        if thread_id != self._thread_id or (self._start_sequence_nrs and sequence_nr < self._start_sequence_nrs[-1]):
            if running_node_number() is not None:
                return  # backward in another thread: the nodes that it creates are never looked up
            self._thread_id = thread_id
            self._start_sequence_nrs.clear()
            self._states.clear()
        if self._states and self._states[-1] == state:
            return
        self._start_sequence_nrs.append(sequence_nr)
        self._states.append(state)
        if len(self._start_sequence_nrs) > _MAX_RECORDED_STATES:
            del self._start_sequence_nrs[0], self._states[0]

    def state_at(self, sequence_nr: int) -> LayerState:
        """State in which the autograd node with this `sequence_nr` was created."""
        return (
            self._states[max(bisect_right(self._start_sequence_nrs, sequence_nr) - 1, 0)] if self._states else UNSHARDED
        )


def running_node_number() -> int | None:
    """Sequence number of the autograd node whose backward is running this code; None outside of backward."""
    if torch.compiler.is_compiling():
        return None  # code is traced in forward, never inside a backward
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@dataclass
class RunningForward:
    """A running forward pass of a parallel model.

    Attributes:
        owner: the SequenceSharding whose model runs.
        shard: the shard that it runs on, or None.
        node_number: the `running_node_number` at its start; None outside of backward.
        outer_frame: the forward pass of another model that called this one.
        cache: KV cache that is sharded over the CP ranks, in a forward pass whose sequence is not sharded.
        attention_calls: number of calls of attention over the CP ranks.
        is_traced: True if a compiled program called attention; its calls are not counted in `attention_calls`.
    """

    owner: object
    shard: ForwardShard | None
    node_number: int | None
    outer_frame: RunningForward | None
    cache: object | None = None
    attention_calls: int = 0
    is_traced: bool = False


# Thread-local, not a ContextVar, because torch.compile cannot trace ContextVar.set. Attributes are read through the
# functions below, because torch.compile ignores the defaults of a subclass of threading.local.
_thread_state = threading.local()


def running_forward() -> RunningForward | None:
    """Innermost forward pass of a parallel model that is running in this thread."""
    frame: RunningForward | None = getattr(_thread_state, "frame", None)
    return frame


def is_recomputing() -> bool:
    """True while backward recomputes an earlier forward pass (activation checkpointing)."""
    node_number, frame = running_node_number(), running_forward()
    return node_number is not None and (frame is None or frame.node_number != node_number)


def running_shard() -> ForwardShard | None:
    """Shard of the running forward pass; None outside of a forward pass and in one that is not sharded.

    For the loss and masks only, which are not recomputed in backward. Attention may be recomputed when no forward pass
    is running, so it receives its CpContext as an argument.
    """
    frame = running_forward()
    return None if frame is None else frame.shard


def count_attention_call() -> None:
    """Count a call of attention over the CP ranks, unless backward is recomputing the layer."""
    frame = running_forward()
    if frame is None:
        return
    if torch.compiler.is_compiling():
        frame.is_traced = True
    elif frame.node_number == running_node_number():
        frame.attention_calls += 1


def enter_forward(owner: object, shard: ForwardShard | None, cache: object | None = None) -> None:
    """Begin a forward pass of `owner`, possibly inside a forward pass of another model."""
    node_number, outer_frame = running_node_number(), running_forward()
    frame = outer_frame
    while frame is not None:
        if frame.owner is owner and frame.node_number == node_number:
            # A model does not run inside itself, so this frame and all frames inside it are left over from interrupted
            # passes: on KeyboardInterrupt torch skips the forward hooks that call `leave_forward`.
            outer_frame = frame.outer_frame
        frame = frame.outer_frame
    _thread_state.frame = RunningForward(owner, shard, node_number, outer_frame, cache)


def leave_forward(owner: object) -> RunningForward | None:
    """End the forward pass of `owner`, make the enclosing pass the current one, and return the ended one.

    Returns None if the current pass is not of `owner`: `owner` raised before it called `enter_forward`.
    """
    frame = running_forward()
    if frame is None or frame.owner is not owner:
        return None
    _thread_state.frame = frame.outer_frame
    return frame
