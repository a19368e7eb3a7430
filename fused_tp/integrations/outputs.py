"""The tensors in what a model's forward returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists, dicts and dataclasses, in one order."""
    found: list[Tensor] = []
    for value in tree_leaves(dict(output) if isinstance(output, dict) else output):
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += tensors_in([getattr(value, field.name) for field in fields(value)])
    return found


def map_tensors(function: Callable[[Tensor], Any], output: Any) -> Any:
    """`output`, a nest of tuples, lists and dicts, with every tensor replaced by function(tensor).

    Raises:
        TypeError: it holds an object that cannot be searched, such as a dataclass; the tensors in it would stay what
            one rank has.
    """

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if is_dataclass(value):
            raise TypeError(
                f"forward returned a {type(value).__name__}, which cannot be searched for tensors of a part of the "
                "sequence; return a NamedTuple, tuple, list or dict, or register it by torch.utils._pytree."
            )
        return value

    return tree_map(one, output)
