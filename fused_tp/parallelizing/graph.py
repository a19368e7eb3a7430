"""Search the autograd graph of a forward pass for the nodes and leaves that a backward from a tensor reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

REENTRANT = "CheckpointFunctionBackward"  # name of the node of a reentrant checkpoint; the nodes inside are invisible


def nodes_of(t: Tensor, *, behind: Collection[Any] = ()) -> set[Any]:
    """Return the nodes that a backward from `t` reaches, with the search stopped at the nodes in `behind`.

    Reached nodes of `behind` are included.
    """
    first = get_gradient_edge(t).node
    found, nodes = {first}, [first]
    while nodes:
        node = nodes.pop()
        if node not in behind:
            following = {other for other, _ in node.next_functions if other is not None} - found
            found |= following
            nodes.extend(following)
    return found


def leaves(nodes: Iterable[Any]) -> list[Tensor]:
    """Tensors whose gradients a backward through `nodes` accumulates."""
    return [node.variable for node in nodes if _is_leaf(node)]


def _is_leaf(node: Any) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


class HeadOutputs:
    """Outputs of the output layer (head) in the running forward pass, as nodes of the autograd graph.

    Layers before the head may hold a shard of the tokens, and the head a shard of the vocabulary. A scalar that the
    model computes from such a shard differs between the ranks.

    Attributes:
        known: False if the graph is not available: while torch.compile traces, or for a head inside a reentrant
            checkpoint.
        nodes: nodes of the head's outputs, and of other tensors that are equal on all ranks.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the record at the start of a forward pass."""
        self.known = not torch.compiler.is_compiling()
        self.nodes: list[Any] = []
        # Nodes are numbered in order of creation: nodes before the head's output belong to hidden states.
        self._first = torch.autograd._get_sequence_nr() if self.known else 0
        self._last: int | None = None

    def note(self, output: Tensor) -> None:
        """Record an output of the head."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self.known = False
            return
        if output.grad_fn is not None:
            self.nodes.append(output.grad_fn)
        if self._last is None:
            self._last = torch.autograd._get_sequence_nr()

    def note_whole(self, tensors: Iterable[Tensor]) -> None:
        """Record that `tensors` are equal on all ranks, as the head's outputs are, although their inputs are not."""
        if self.known:
            self.nodes.extend(t.grad_fn for t in tensors if t.grad_fn is not None)

    def determine(self, t: Tensor) -> bool:
        """True if `t` depends on the hidden states of this forward pass only through the recorded outputs.

        Also True if the graph is not available.
        """
        if not (self.known and t.requires_grad):
            return True
        others = nodes_of(t, behind=self.nodes).difference(self.nodes)
        made = (node._sequence_nr() for node in others if not _is_leaf(node))
        return not any(self._first <= number and (self._last is None or number < self._last) for number in made)
