"""Tensors in the output of a model's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_WITHOUT_TENSORS = (str, bytes, int, float, complex, torch.dtype, torch.device, type(None))
_NOT_SEARCHED = (nn.Module, ModuleType, FunctionType, type)


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in `output`, nested containers and other objects, each once, in a fixed order."""
    return list(_search(output, set()))


def _search(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen or isinstance(value, (*_WITHOUT_TENSORS, *_NOT_SEARCHED)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for part in _parts(value):
        yield from _search(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return dict(value).values()  # dict(): a field of transformers' ModelOutput may hide the method "values"
    leaves = tree_leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return leaves
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def map_tensors(function: Callable[[Tensor], Any], output: Any, *, caches: tuple[type, ...] = ()) -> Any:
    """Return `output`, nested tuples, lists and dicts, with every tensor replaced by `function(tensor)`.

    Args:
        caches: classes whose objects are returned unchanged.

    Raises:
        TypeError: `output` holds an object of another type with tensors, such as a dataclass or a subclass of dict;
            its tensors cannot be replaced.
    """

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, caches) or not tensors_in(value):
            return value
        raise TypeError(
            f"forward returned a {type(value).__name__}, whose tensors cannot be replaced by the full sequence's. "
            "Return a NamedTuple, tuple, list or dict, or register the class with torch.utils._pytree."
        )

    return tree_map(one, output)
