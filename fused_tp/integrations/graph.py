"""Autograd's graph of a forward pass: what a backward from a tensor comes to, and by which way."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

REENTRANT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint, which hides what is in it


def nodes_of(t: Tensor, *, behind: Collection[Any] = ()) -> set[Any]:
    """All nodes that a backward from `t` may come to, other than by way of the nodes `behind`; these among them."""
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
    """The tensors whose gradients a backward by way of `nodes` accumulates."""
    return [node.variable for node in nodes if _is_leaf(node)]


def _is_leaf(node: Any) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


class HeadOutputs:
    """Outputs of the output layer in the running forward pass, as nodes of the autograd graph.

    Layers before it may hold a part of the tokens, and it a part of the vocabulary: what a model computes of these by
    itself would be another number on every rank.

    Attributes:
        known: False where the graph does not tell: of a traced program, or of a head inside of a reentrant checkpoint.
        nodes: those of its outputs, and of what else is whole.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A forward pass begins."""
        self.known = not torch.compiler.is_compiling()
        self.nodes: list[Any] = []
        # Nodes are numbered in the order of their making: those before the head's output are of hidden states.
        self._first = torch.autograd._get_sequence_nr() if self.known else 0
        self._last: int | None = None

    def note(self, output: Tensor) -> None:
        """The head has given `output`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self.known = False
            return
        if output.grad_fn is not None:
            self.nodes.append(output.grad_fn)
        if self._last is None:
            self._last = torch.autograd._get_sequence_nr()

    def note_whole(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`, other than what made them, are the same on every rank, as the head's outputs are."""
        if self.known:
            self.nodes.extend(t.grad_fn for t in tensors if t.grad_fn is not None)

    def gave(self, t: Tensor) -> bool:
        """Whether `t` comes from nothing of the forward pass that is older than the head's outputs, but by way of them.
        True where that is not known."""
        if not (self.known and t.requires_grad):
            return True
        others = nodes_of(t, behind=self.nodes).difference(self.nodes)
        made = (node._sequence_nr() for node in others if not _is_leaf(node))
        return not any(self._first <= number and (self._last is None or number < self._last) for number in made)
