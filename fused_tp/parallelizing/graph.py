"""Search the autograd graph of a forward pass for the nodes and leaves that a backward from a tensor reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# Name of the autograd node of a reentrant checkpoint. The nodes inside the checkpoint are invisible.
REENTRANT_NODE = "CheckpointFunctionBackward"


def reachable_nodes(t: Tensor, *, stop_nodes: Collection[Any] = ()) -> set[Any]:
    """Return the nodes that a backward from `t` reaches, with the search stopped at the nodes in `stop_nodes`.

    Reached nodes of `stop_nodes` are included.
    """
    first_node = get_gradient_edge(t).node
    nodes, pending_nodes = {first_node}, [first_node]
    while pending_nodes:
        node = pending_nodes.pop()
        if node not in stop_nodes:
            successors = {successor for successor, _ in node.next_functions if successor is not None} - nodes
            nodes |= successors
            pending_nodes.extend(successors)
    return nodes


def leaf_tensors(nodes: Iterable[Any]) -> list[Tensor]:
    """Tensors whose gradients a backward through `nodes` accumulates."""
    return [node.variable for node in nodes if is_leaf(node)]


def is_leaf(node: Any) -> bool:
    """Return True if `node` accumulates the gradient of a leaf."""
    return node.name() == "torch::autograd::AccumulateGrad"


class HeadOutputs:
    """Outputs of the output layer (head) in the running forward pass, as nodes of the autograd graph.

    Layers before the head may hold a shard of the tokens, and the head a shard of the vocabulary. A scalar that the
    model computes from such a shard differs between the ranks.

    Attributes:
        is_available: False if the graph is not available: while torch.compile traces, or for a head inside a reentrant
            checkpoint.
        nodes: nodes of the head's outputs, and of other tensors that are equal on all ranks.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the record at the start of a forward pass."""
        self.is_available = not torch.compiler.is_compiling()
        self.nodes: list[Any] = []
        # Autograd numbers its nodes in order of creation, so a node with a smaller number than that of the LM head's
        # output was created while hidden states were computed.
        self._first_sequence_nr = torch.autograd._get_sequence_nr() if self.is_available else 0
        self._last_sequence_nr: int | None = None

    def record(self, output: Tensor) -> None:
        """Record an output of the head."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self.is_available = False
            return
        if output.grad_fn is not None:
            self.nodes.append(output.grad_fn)
        self.end_hidden_states()

    def end_hidden_states(self) -> None:
        """Record that the nodes created from now on are computed after the hidden states."""
        if self._last_sequence_nr is None and self.is_available:
            self._last_sequence_nr = torch.autograd._get_sequence_nr()

    def record_replicated(self, tensors: Iterable[Tensor]) -> None:
        """Record that `tensors` are equal on all ranks, as the head's outputs are, although their inputs are not."""
        if self.is_available:
            self.nodes.extend(t.grad_fn for t in tensors if t.grad_fn is not None)

    def determines(self, t: Tensor) -> bool:
        """True if `t` depends on the hidden states of this forward pass only through the recorded outputs.

        Also True if the graph is not available.
        """
        if not (self.is_available and t.requires_grad):
            return True
        other_nodes = reachable_nodes(t, stop_nodes=self.nodes).difference(self.nodes)
        sequence_nrs = (node._sequence_nr() for node in other_nodes if not is_leaf(node))
        return not any(
            self._first_sequence_nr <= sequence_nr
            and (self._last_sequence_nr is None or sequence_nr < self._last_sequence_nr)
            for sequence_nr in sequence_nrs
        )
